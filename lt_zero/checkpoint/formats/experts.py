"""DeepSpeed's expert files: the experts of a mixture, which the ranks of expert parallelism have apart.

Note [Expert files]
    ``layer_<L>_expert_<E>_mp_rank_<XX>_model_states.pt`` has one expert of the L-th mixture (in the order of modules),
    numbered across all ranks. Its tensors are named ``<mixture>.deepspeed_moe.experts.deepspeed_experts.<E>.<name>``
    by DeepSpeed's MoE, and ``<mixture>.experts.w1.<E>`` by AutoEP, whose layer has all experts in one tensor.

Note [Numbers of experts]
    Model files have shapes of what ZeRO's first rank has, so experts are numbered within a rank there: with two experts
    on each rank, expert 1 of rank 2 (of expert parallelism) is expert 5 of the mixture. W ranks of ZeRO, c of which
    share a parameter group with experts (``partition_count``), are W / c ranks of expert parallelism; neighbours have
    different experts, or the same ones if ``use_data_before_expert_parallelism`` is set.

Note [Optimizer files of experts]
    ``expp_rank_<R>_mp_rank_<XX>_optim_states.pt`` are files of stage 0, with numbers in place of names. In stages 1 and
    2 states of experts are in the files of ZeRO's ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved, mapping
from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError

_EXPERT = re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"expp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_NATIVE = re.compile(r"(?P<mixture>.*?)\.?deepspeed_moe\.experts\.deepspeed_experts\.(?P<expert>\d+)\.(?P<name>.+)")
_AUTOEP = re.compile(r"(?P<name>(?:.*\.)?experts\.w[123])\.(?P<expert>\d+)")
_CONVERT = "If AutoEP made it, convert the folder with DeepSpeed's ds_to_universal.py, and pass the result."


class ExpertFiles:
    """The experts of all mixtures of a checkpoint.

    Args:
        source: reads files.
        model: content of the model file.
        file: its path.

    Attributes:
        weights: all tensors of experts, numbered across ranks; AutoEP's with the experts as first dimension.

    Raises:
        CheckpointError: a file is missing, damaged, of another run, or of a kind that is not read.
    """

    def __init__(self, source: ForeignSource, model: Mapping[str, Any], file: Path) -> None:
        self._source, self._file = source, file
        self._experts: dict[str, int] = {}  # the number of experts, by mixture of DeepSpeed's MoE or tensor of AutoEP
        self.weights: dict[str, Saved] = {}
        config = model.get("ds_config")
        told = config.get("use_data_before_expert_parallelism") if isinstance(config, dict) else None
        self._data_first = bool(told)
        counts = model.get("num_experts")
        if not isinstance(counts, list) or not all(type(count) is int and count > 0 for count in counts):
            raise CheckpointError(
                f"{file} tells no number of experts (num_experts is {counts!r}), but expert files are beside it: files "
                "of different runs must not be in one folder. Take another checkpoint."
            )
        self._refuse_others(model)
        self._check_optimizer_files(model)
        found = self._found()
        wanted = {(layer, expert) for layer, count in enumerate(counts) for expert in range(count)}
        for layer, expert in sorted(wanted - set(found))[:1]:
            raise CheckpointError(
                f"{file.parent} has no layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt, but the mixtures have "
                f"{counts} experts: the checkpoint is not complete. Copy the file, or take another tag."
            )
        for place in sorted(set(found) - wanted)[:1]:
            raise CheckpointError(
                f"{found[place]} is of an expert that {file.name} does not know (its mixtures have {counts} experts): "
                "files of different runs must not be in one folder. Take another checkpoint."
            )
        for layer, count in enumerate(counts):
            self._add_mixture([found[layer, expert] for expert in range(count)])

    @classmethod
    def of(cls, source: ForeignSource, model: Mapping[str, Any], file: Path) -> ExpertFiles | None:
        """The experts of a model file; None if there are none, or if a universal folder has them with all the rest.

        Raises:
            CheckpointError: see the class.
        """
        apart = cls.are_in(file.parent)
        if (file.parent / "zero").is_dir():
            if apart:
                raise CheckpointError(
                    f"{file.parent} is a universal folder, which has all experts in `zero`, but expert files are in it "
                    "too: files of different runs must not be in one folder. Convert the run again."
                )
            return None
        return cls(source, model, file) if apart or model.get("num_experts") else None

    @classmethod
    def are_in(cls, folder: Path) -> bool:
        """True if a folder has files of experts."""
        return any(_EXPERT.fullmatch(file.name) or _OPTIMIZER.fullmatch(file.name) for file in folder.iterdir())

    def is_expert(self, name: str) -> bool:
        """True for a name in a model file that is of an expert."""
        return name in self.weights or _NATIVE.fullmatch(name) is not None

    def ranks_of(self, count: int, world: int) -> list[list[int]]:
        """The ranks of ZeRO by rank of expert parallelism, in their order, where ``count`` share a parameter group."""
        parts = world // count
        if self._data_first:
            return [list(range(part * count, (part + 1) * count)) for part in range(parts)]
        return [list(range(part, world, parts)) for part in range(parts)]

    def renamed(self, name: str, part: int, parts: int) -> str:
        """The name of what rank ``part`` of ``parts`` of expert parallelism has as ``name``.

        AutoEP's keeps its name: ranks have parts of one tensor. See Note [Numbers of experts].
        """
        match = _NATIVE.fullmatch(name)
        key = name if match is None else match["mixture"]
        count = self._experts.get(key)
        if count is None or count % parts or (match is not None and int(match["expert"]) >= count // parts):
            raise CheckpointError(
                f"{self._file} has {name}, which {parts} ranks of expert parallelism cannot have of {count or 0} "
                "experts in the expert files: the files do not belong together. Take another checkpoint."
            )
        if match is None:
            return name
        number = part * (count // parts) + int(match["expert"])
        return f"{name[: match.start('expert')]}{number}{name[match.end('expert') :]}"

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Compare the shape of a trained parameter with that in the expert files.

        Raises:
            CheckpointError: they differ, or expert files do not have it.
        """
        saved = self.weights.get(name)
        if saved is None or saved.spec.shape != tuple(shape):
            own = "not there" if saved is None else list(saved.spec.shape)
            raise CheckpointError(
                f"{name} has the shape {list(shape)} in optimizer files, but is {own} in the expert files of "
                f"{self._file.parent}: the files do not belong together. Take another checkpoint."
            )

    def _refuse_others(self, model: Mapping[str, Any]) -> None:
        """Raise if experts are placed on ranks in another order than that of their numbers, or cut by tensor ranks."""
        layers = model.get("ds_autoep_layers") or []
        for saved in layers if isinstance(layers, list) else [None]:
            layer = mapping(saved, "AutoEP layer", self._file)
            placement = layer.get("expert_placement")
            if placement is not None:
                ranks = sorted(placement["ranks"], key=lambda entry: int(entry["rank"]))
                if [expert for rank in ranks for expert in rank["experts"]] != list(range(placement["num_experts"])):
                    raise CheckpointError(
                        f"{self._file} has experts that are not on ranks in the order of their numbers "
                        f"({layer['module_path']}), which is not read. {_CONVERT}"
                    )
        if model.get("folding") or self._file.name.startswith("zero_pp_rank_"):
            kind = "tensor ranks" if model.get("folding") else "ZeRO stage 3"
            raise CheckpointError(f"{self._file} has experts of a run with {kind}, which are not read. {_CONVERT}")

    def _check_optimizer_files(self, model: Mapping[str, Any]) -> None:
        """Read what is not used, to find damage. See Note [Optimizer files of experts]."""
        found = {}
        for file in sorted(self._file.parent.iterdir()):
            if match := _OPTIMIZER.fullmatch(file.name):
                found[int(match["rank"])] = file
        for number, file in sorted(found.items()):
            if model.get("param_shapes"):
                raise CheckpointError(
                    f"{file} is of ZeRO stage 0, but {self._file.name} beside it is not: files of different runs must "
                    "not be in one folder. Take another checkpoint."
                )
            if number and number - 1 not in found:
                raise CheckpointError(
                    f"{file.parent} has no expp_rank_{number - 1}_mp_rank_00_optim_states.pt, but {file.name}: the "
                    "checkpoint is not complete. Copy the file, or take another tag."
                )
            self._source.load_file(file, "optimizer states")

    def _found(self) -> dict[tuple[int, int], Path]:
        """Files by mixture and expert."""
        found = {}
        for file in sorted(self._file.parent.iterdir()):
            match = _EXPERT.fullmatch(file.name)
            if match is not None and match["layer"] is None:
                raise CheckpointError(
                    f"{file} is of an old DeepSpeed, whose expert files do not tell their mixture, and is not read. "
                    "Load it with DeepSpeed, and save it again."
                )
            other = match or _OPTIMIZER.fullmatch(file.name)
            if other is not None and int(other["mp"]):
                raise CheckpointError(f"{file} is of a tensor rank: experts with tensor ranks are not read. {_CONVERT}")
            if match is not None:
                found[int(match["layer"]), int(match["expert"])] = file
        return found

    def _add_mixture(self, files: Sequence[Path]) -> None:
        """Add the tensors of a mixture's experts, which ``files`` have in their order."""
        stacked: dict[str, list[Tensor]] = {}
        first: set[str] = set()
        for expert, file in enumerate(files):
            content = self._source.load_file(file, "expert")
            names = set()
            for key, value in content.items():
                if not isinstance(value, Tensor):
                    continue
                match = _NATIVE.fullmatch(str(key)) or _AUTOEP.fullmatch(str(key))
                if match is None or int(match["expert"]) != expert:
                    raise CheckpointError(
                        f"{file} has {str(key)[:200]!r}, which is not of expert {expert}: it is not the file it "
                        "should be. Take another checkpoint."
                    )
                is_native = match.re is _NATIVE
                names.add(f"{match['mixture']} {match['name']}" if is_native else match["name"])
                self._experts[match["mixture"] if is_native else match["name"]] = len(files)
                if is_native:
                    self.weights[str(key)] = Saved.of(value)._replace(read=partial(self._source.records.check, value))
                else:
                    stacked.setdefault(match["name"], []).append(value)
            if not names or (expert and names != first):
                raise CheckpointError(
                    f"{file} has other tensors than {files[0].name} beside it: the files do not belong together. Take "
                    "another checkpoint."
                )
            first = names
        for name, tensors in stacked.items():
            if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
                raise CheckpointError(
                    f"{files[0].parent} has experts of different shapes or dtypes for {name}: the files do not belong "
                    "together. Take another checkpoint."
                )
            spec = Spec((len(tensors), *tensors[0].shape), tensors[0].dtype)
            self.weights[name] = Saved(spec, partial(_stacked, self._source, tensors))


def _stacked(source: ForeignSource, tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([source.records.check(tensor) for tensor in tensors])
