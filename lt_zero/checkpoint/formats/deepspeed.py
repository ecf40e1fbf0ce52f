"""DeepSpeed's checkpoints (ZeRO stages 0 to 3), read without DeepSpeed. Checked against 0.19.8.

Note [Files of a folder]
    A model rank (the number in ``mp_rank_``) is a rank of tensor parallelism, of a pipeline, or of both. It has a model
    file (stage 3: one per rank of ZeRO) and an optimizer file per rank of ZeRO. model_rank.py reads these,
    pipeline_layers.py puts stages together, tensor_ranks.py joins the slices of tensor ranks. Experts of a mixture are
    in files of their own (experts.py). Folders of ``ds_to_universal.py`` have whole tensors in place of optimizer files
    (universal.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved
from lt_zero.checkpoint.formats.model_rank import ModelRank
from lt_zero.checkpoint.formats.pipeline_layers import LayerFiles, PipelineStages, pipeline_name
from lt_zero.checkpoint.formats.reading import Stub
from lt_zero.checkpoint.formats.tensor_ranks import TensorRanks
from lt_zero.checkpoint.formats.universal import UniversalTensors
from lt_zero.checkpoint.native.saved_file import opened
from lt_zero.common.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_Column = ModelRank | PipelineStages  # what there is of a tensor rank
_LATEST = ("latest", "latest_universal")  # files that name the last checkpoint of a folder
_OWN_KEYS = {  # of a model file; the rest is what the caller of save_checkpoint gave
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "sparse_tensor_module_names"),
    *("folding", "ds_autoep_layers", "autoep_layers", "num_experts"),
}


class DeepSpeedSource(ForeignSource):
    """A checkpoint folder of DeepSpeed, or of Lightning's DeepSpeedStrategy. See Note [Files of a folder].

    Weights of trained parameters are the fp32 master weights. The loss scaler of an fp16 run is
    ``meta["ZeroPrecision"]``.

    Args:
        path: the folder with ``latest`` and a folder per tag, or one of the latter.
        tag: which one; default: the one in ``latest``.
        inert: see ``ForeignSource``.
        cuts: see ``TensorRanks``, where they are ``rules``.

    Attributes:
        left_out: names of frozen parameters that were not saved.
        steps: that DeepSpeed has counted, skipped ones included.
        loop: what its engine restores beside weights and optimizer, as ours saves it (training/loop/engine.py); of use
            unless Lightning wrote the checkpoint.
    """

    has_tags: ClassVar[bool] = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        tag: str | None = None,
        inert: Collection[str] = (),
        cuts: Mapping[str, int] | None = None,
    ) -> None:
        self._cuts, self._is_pipeline = cuts, False
        super().__init__(_tag_folder(Path(path), tag), inert)

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """True if ``path`` is a folder that this class reads; says nothing about whether it is complete."""
        folder = Path(path)
        return _has_models(folder) or (folder.is_dir() and any(map(_has_models, folder.iterdir())))

    def _open(self) -> None:
        ranks = [ModelRank(self, files) for files in self._files_of(_MODEL)]
        first = ranks[0]
        self._check_one_run(ranks)
        self._is_pipeline = first.model.get("module") is None
        if first.experts is not None and (len(ranks) > 1 or self._is_pipeline):
            raise CheckpointError(
                f"{self.path} has expert files of a run with tensor ranks or a pipeline, which are not read. If AutoEP "
                "made them, convert the folder with DeepSpeed's ds_to_universal.py, and pass the result."
            )
        universal = UniversalTensors(self, ranks) if UniversalTensors.are_in(self.path) else None
        if universal is not None:
            for rank in ranks:
                rank.open_weights(universal.weights)
        elif any(rank.shapes for rank in ranks):
            for rank, files in zip(ranks, self._optimizer_files(len(ranks)), strict=True):
                rank.open_optimizer(files)
                rank.open_weights()
            _check_counts(ranks)
        else:
            for rank in ranks:
                rank.open_weights()
            self.notes.append(
                f"{first.file} is of ZeRO stage 0, where optimizer states and master weights have no names: weights "
                "are those of the module, and there is no optimizer state."
            )
        self.steps = int(first.model.get("global_steps") or 0)
        self.meta = self._meta(first, first.loss_scaler if universal is None else universal.loss_scaler)
        given = {key: value for key, value in self.meta.items() if key in first.model and key not in _OWN_KEYS}
        self.loop = {
            "global_steps": self.steps,
            "global_samples": int(first.model.get("global_samples") or 0),
            "loss_scale": self.meta.get("ZeroPrecision", {}),
            "client_state": given,
        }
        columns = self._columns(ranks, universal) if self._is_pipeline else ranks
        whole = columns[0] if len(columns) == 1 else self._joined(columns, ranks, universal)
        groups, states = (whole.groups, whole.states) if universal is None else (universal.groups, universal.states)
        self._set_weights(whole.weights, whole.shared)
        self.left_out = [self._named(name) for name in whole.absent]
        self.notes += [f"{name} was not saved (exclude_frozen_parameters)." for name in self.left_out]
        if any(rank.shapes for rank in ranks):
            named = [{**group, "params": [self._named(name) for name in group["params"]]} for group in groups]
            self._add_optimizer(named, {self._named(name): entries for name, entries in states.items()})

    def _files_of(self, pattern: re.Pattern[str]) -> list[list[Path]]:
        """The files of all ranks of ZeRO, in their order, by model rank.

        Raises:
            CheckpointError: some are missing, or there are several for the same rank.
        """
        found: dict[tuple[int, int], Path] = {}
        for file in sorted(self.path.iterdir()):
            match = pattern.fullmatch(file.name)
            if match is None:
                continue
            place = int(match["mp"]), int(match["rank"] or 0)
            if place in found and UniversalTensors.are_in(self.path):
                continue  # an export has both, for runs of any stage
            if place in found:
                raise CheckpointError(
                    f"{file} and {found[place].name} are of the same rank: files of different runs must not be in one "
                    "folder. Take another checkpoint."
                )
            found[place] = file
        models, ranks = ({place[axis] for place in found} for axis in range(2))
        missing = {(mp, rank) for mp in range(max(models, default=0) + 1) for rank in range(max(ranks, default=0) + 1)}
        missing -= set(found)
        if missing:
            lacking = ", ".join(f"mp_rank {mp}, ZeRO's rank {rank}" for mp, rank in sorted(missing)[:4])
            raise CheckpointError(
                f"{self.path} has files of ranks {sorted(found)} only ({pattern.pattern}): some are missing "
                f"({lacking}). Copy them, or take another tag."
            )
        return [[found[mp, rank] for rank in range(len(ranks))] for mp in range(len(models))]

    def _check_one_run(self, ranks: Sequence[ModelRank]) -> None:
        """Check what model files say of each other. Raises CheckpointError: the last ranks are missing, or some differ.

        Missing files of the last ranks leave no gap in the numbers of others.
        """
        first = ranks[0]
        size = first.model.get("mp_world_size")
        if type(size) is int and size > len(ranks):
            raise CheckpointError(
                f"{first.file} is of a run of {size} model ranks (mp_rank_XX), but {self.path} has files of "
                f"{len(ranks)}: some are missing. Copy them, or take another tag."
            )
        counts = {file: model.get("global_steps") for rank in ranks for file, model in rank.models.items()}
        for file, steps in counts.items():
            if steps != counts[first.file]:
                raise CheckpointError(
                    f"{file} was saved after {steps} steps, but {first.file.name} after {counts[first.file]}: they do "
                    "not belong together. Take another checkpoint."
                )

    def _optimizer_files(self, models: int) -> list[list[Path]]:
        files = self._files_of(_OPTIMIZER)
        if len(files) != models:
            raise CheckpointError(
                f"{self.path} has model files of {models} model ranks (mp_rank_XX), but optimizer files of "
                f"{len(files)}: some are missing. Copy them, or take another tag."
            )
        return files

    def _named(self, name: Any) -> str:
        own = super()._named(name)
        return pipeline_name(own) if self._is_pipeline else own

    def _columns(self, ranks: Sequence[ModelRank], universal: UniversalTensors | None) -> list[PipelineStages]:
        """Stages of a pipeline put together, by tensor rank."""
        files = LayerFiles(self.path)
        told = ranks[0].model.get("checkpoint_parallel_dimensions")
        size = (told.get("tp_degree") if isinstance(told, dict) else None) or len(files.found) or 1
        if type(size) is not int or len(ranks) % size:
            raise CheckpointError(
                f"{self.path} has files of {len(ranks)} model ranks (mp_rank_XX), and {size!r} tensor ranks do not "
                "divide them: some are missing. Copy them, or take another tag."
            )
        if universal is None and not files.found:
            raise CheckpointError(f"{self.path} has no layer files (layer_00-...), which a pipeline's checkpoint has.")
        if universal is not None and not files.found:
            self.notes.append(
                f"{self.path} has no layer files: buffers and frozen parameters of the pipeline are not in it."
            )
        return [PipelineStages(self, ranks[rank::size], files.of(rank)) for rank in range(size)]

    def _joined(
        self, columns: Sequence[_Column], ranks: Sequence[ModelRank], universal: UniversalTensors | None
    ) -> _Joined:
        info = next((info for rank in ranks if (info := rank.model.get("universal_checkpoint_info"))), None)
        cuts = TensorRanks(info, ranks[0].file, len(columns), self._cuts)
        joined = _Joined(columns, cuts, set() if universal is None else set(universal.weights))
        self.notes += joined.notes
        return joined

    def _meta(self, first: ModelRank, scaler: Any) -> dict[str, Any]:
        """Return ``meta``. ``scaler``: the loss scaler's object."""
        model, file = first.model, first.file
        meta: dict[str, Any] = self.plain({key: model[key] for key in model if key not in _OWN_KEYS}, file)
        if model.get("lr_scheduler") is not None and "lr_schedulers" not in meta:
            meta["lr_schedulers"] = [self.plain(model["lr_scheduler"], file, "lr_scheduler")]
        for key in ("data_sampler", "random_ltd"):
            if model.get(key):
                self.notes.append(f"{key} of {file} (data efficiency) was left out.")
        config = model.get("ds_config")
        fp16 = config.get("fp16") if isinstance(config, dict) else None
        if isinstance(scaler, Stub) and isinstance(fp16, dict) and fp16.get("enabled"):
            skipped = int(model.get("skipped_steps", 0))
            meta["ZeroPrecision"] = {
                "scaler": {
                    "scale": float(scaler.get("cur_scale", 1.0)),
                    "steps": int(scaler.get("cur_iter", 0)),
                    "last_overflow": int(scaler.get("last_overflow_iter", -1)),
                    "patience": int(scaler.get("cur_hysteresis", 1)),
                },
                "skips": [{"skipped": skipped, "consecutive": 0, "succeeded": self.steps - skipped}],
            }
        return meta


class _Joined:
    """The whole model, from the slices of tensor ranks; attributes as those of ``ModelRank``.

    ``known``: names of weights that need no joining.
    """

    def __init__(self, ranks: Sequence[_Column], cuts: TensorRanks, known: Collection[str]) -> None:
        first = ranks[0]
        self.shared = first.shared
        self.absent = first.absent
        self.groups = first.groups
        self.weights: dict[str, Saved] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        for rank in ranks[1:]:
            for one, two in ((first, rank), (rank, first)):
                if gone := [name for name in one.weights if name not in two.weights]:
                    raise CheckpointError(
                        f"{two.file} has no {gone[0]}, which {one.file} has. Take another checkpoint."
                    )
        for name in first.weights:
            if name in known or name in self.shared:
                self.weights[name] = first.weights[name]
                continue
            slices = [rank.weights[name] for rank in ranks]
            cut = cuts.cut_of(name, [saved.spec.shape for saved in slices], name in first.buffers)
            self.weights[name] = cut.joined(name, slices)
            entries = [rank.states.get(name, {}) for rank in ranks]
            self.states[name] = {}
            for key, value in entries[0].items():
                if isinstance(value, Saved):
                    parts = [entry[key] for entry in entries]
                    self.states[name][key] = cut.joined(f"{key} of {name}", parts, key)
                else:
                    self.states[name][key] = value
            if cut.is_scaled and self.states[name]:
                self.notes.append(
                    f"DeepSpeed trained {name} times a factor, as its affine_map says; it is read without the factor, "
                    "and its learning rate is from now on that of the whole parameter."
                )
        self.states = {name: entries for name, entries in self.states.items() if entries}
        for tied, name in self.shared.items():
            self.weights[tied] = self.weights[name]


def _check_counts(ranks: Sequence[ModelRank]) -> None:
    """Raise CheckpointError if optimizers of model ranks have counted different numbers of steps."""
    for rank in ranks[1:]:
        for group, (one, two) in enumerate(zip(ranks[0].counts, rank.counts, strict=False)):
            if None not in (one, two) and one != two:
                raise CheckpointError(
                    f"The optimizer files beside {rank.file} have counted {two} steps of group {group}, but those "
                    f"beside {ranks[0].file.name} {one}: they do not belong together. Take another checkpoint."
                )


def _has_models(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(file.name) for file in folder.iterdir())


def _tag_folder(path: Path, tag: str | None) -> Path:
    """The folder with the files."""
    latest = next((path / name for name in _LATEST if (path / name).is_file()), path / _LATEST[0])
    if tag is None and latest.is_file():
        with opened(latest) as file:
            tag = file.read(4096).decode("utf-8", "replace").strip()
    if tag is not None:
        if not tag or Path(tag).name != tag or not (path / tag).is_dir():
            raise CheckpointError(f"{latest} names the tag {tag[:200]!r}, but there is no such folder in {path}.")
        return path / tag
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    if _has_models(path):
        return path
    tags = [folder.name for folder in sorted(path.iterdir()) if _has_models(folder)]
    if len(tags) != 1:
        raise CheckpointError(f"{path} has no file `latest`, and {len(tags)} tags: {tags}. Name one of them.")
    return path / tags[0]
