"""DeepSpeed's checkpoints (ZeRO stages 0 to 3), read without DeepSpeed. Checked against 0.19.8.

Note [Stages 1 and 2]
    Per parameter group there is one flat row: its parameters in the order of ``param_shapes``, each followed by
    ``param_alignment_paddings`` elements, padded at the end so that all ranks get equal parts. Rank r's file has part
    r: moments with all padding, fp32 weights without that at the end (``group_paddings`` tells how much is missing;
    BF16_Optimizer, whose files have no ``zero_stage``, cuts nothing off; ``elastic_checkpoint`` cuts the moments too).

Note [Stage 3]
    Each parameter is cut into ``world`` equal parts by itself (the last one padded). Rank r's file has the r-th parts
    of all parameters of a sub-group in one row. Sub-groups follow each other in the order of ``param_shapes``, of the
    flat weights, and of the numbers in the inner optimizer's state. Model files have empty tensors for parameters.

Note [Frozen parameters]
    From stage 2 on they are in ``frozen_param_fragments`` (stage 3: a part in each rank's file), in stages 0 and 1
    among the module's tensors.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved, mapping, ties
from lt_zero.checkpoint.formats.reading import Stub, opened
from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_EXPERTS = re.compile(r"(?:expp_rank_|layer_\d+_expert_|expert_\d+_)")
_OWN_KEYS = {  # of a model file; the rest is what the caller of save_checkpoint gave
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "sparse_tensor_module_names"),
    *("folding", "ds_autoep_layers", "autoep_layers", "num_experts"),
}


class _ParamLocation(NamedTuple):
    """The location of a parameter: the number of its row, and its elements on each rank."""

    group: int
    shape: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]  # (rank, start, stop) in that rank's row, in the order of the elements

    @property
    def rank(self) -> int:
        """The first rank that has some of the parameter."""
        return self.spans[0][0] if self.spans else 0


class DeepSpeedSource(ForeignSource):
    """A checkpoint folder of DeepSpeed, or of Lightning's DeepSpeedStrategy.

    Weights of trained parameters are the fp32 master weights. The loss scaler of an fp16 run is
    ``meta["ZeroPrecision"]``.

    Args:
        path: the folder with ``latest`` and a folder per tag, or one of the latter.
        tag: which one; default: the one in ``latest``.
        inert: see ``ForeignSource``.

    Attributes:
        left_out: names of frozen parameters that were not saved.
        steps: that DeepSpeed has counted, skipped ones included.
        loop: what its engine restores beside weights and optimizer, as ours saves it (loop/engine.py); of use unless
            Lightning wrote the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], tag: str | None = None, inert: Collection[str] = ()) -> None:
        super().__init__(_tag_folder(Path(path), tag), inert)

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """True if ``path`` is a folder that this class reads; says nothing about whether it is complete."""
        folder = Path(path)
        return _has_models(folder) or (folder.is_dir() and any(map(_has_models, folder.iterdir())))

    def _open(self) -> None:
        models = {file: self._load(file, "model states") for file in self._files_of(_MODEL)}
        file, model = next(iter(models.items()))
        self._inner: dict[Path, dict[str, Any]] = {}  # the optimizer's state, by the file of a rank
        self._rows: list[list[Tensor]] = []  # by group: the fp32 weights of each rank, 1D
        self._cut_off: list[list[int]] = []  # by group: the number of elements left out at the end of each row
        self._places: dict[str, _ParamLocation] = {}
        self._stage3 = False
        shapes = [_shapes(group, file) for group in model.get("param_shapes") or []]
        if shapes:
            self._open_optimizers(shapes)
        else:
            self.notes.append(
                f"{file} is of ZeRO stage 0, where optimizer states and master weights have no names: weights are "
                "those of the module, and there is no optimizer state."
            )
        self.steps = int(model.get("global_steps") or 0)
        self.meta = self._meta(model, file)
        given = {key: value for key, value in self.meta.items() if key in model and key not in _OWN_KEYS}
        self.loop = {
            "global_steps": self.steps,
            "global_samples": int(model.get("global_samples") or 0),
            "loss_scale": self.meta.get("ZeroPrecision", {}),
            "client_state": given,
        }
        self._open_weights(models)
        if shapes:
            self._open_states([[self._named(raw) for raw in group] for group in shapes])

    def _files_of(self, pattern: re.Pattern[str]) -> list[Path]:
        """The files of all ranks, in the order of ranks."""
        found: dict[int, Path] = {}
        for file in sorted(self.path.iterdir()):
            if _EXPERTS.match(file.name):
                raise CheckpointError(f"{file} belongs to a mixture of experts, whose checkpoints cannot be read.")
            match = pattern.fullmatch(file.name)
            if match is None:
                continue
            rank = int(match["rank"] or 0)
            if int(match["mp"]) != 0 or rank in found:
                raise CheckpointError(
                    f"{file} is one of several for the same rank: checkpoints of tensor-parallel runs cannot be read, "
                    "and files of different runs must not be in one folder."
                )
            found[rank] = file
        if sorted(found) != list(range(len(found))) or not found:
            raise CheckpointError(
                f"{self.path} has files of ranks {sorted(found)} only ({pattern.pattern}): some are missing."
            )
        return [found[rank] for rank in sorted(found)]

    def _open_optimizers(self, shapes: list[dict[str, tuple[int, ...]]]) -> None:
        """Read the optimizers' files and find the parameters in them. ``shapes``: of parameters, by group."""
        for file in self._files_of(_OPTIMIZER):
            content = self._load(file, "optimizer states")
            self._inner[file] = mapping(content.get("optimizer_state_dict"), "optimizer_state_dict", file)
        file, first = next(iter(self._inner.items()))
        counts = first.get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if set(counts) != {len(self._inner)}:
            raise CheckpointError(
                f"{file} belongs to a run of {counts} ranks, but there are {len(self._inner)} *_optim_states.pt files "
                f"in {self.path}. Copy the missing ones, or take another tag; expert parallelism cannot be read."
            )
        stage = first.get("zero_stage")
        self._stage3 = (stage.args[0] if isinstance(stage, Stub) and stage.args else stage) == 3
        key = "fp32_flat_groups" if self._stage3 else "single_partition_of_fp32_groups"
        flat = {file: _tensors(inner.get(key), key, file) for file, inner in self._inner.items()}
        for file, rows in flat.items():
            if len(rows) != len(shapes):
                raise CheckpointError(f"{file} has {len(rows)} groups, not {len(shapes)} ({key}).")
        paddings = None if self._stage3 else first.get("param_alignment_paddings")
        for group, sizes in enumerate(shapes):
            ends = [inner.get("group_paddings") if "zero_stage" in inner else None for inner in self._inner.values()]
            self._cut_off.append([int(end[group]) if end and not self._stage3 else 0 for end in ends])
            self._rows.append([rows[group] for rows in flat.values()])
            lengths = [row.numel() for row in self._rows[group]]
            gaps = paddings[group] if paddings else [0] * len(sizes)
            self._places |= _cut(group, sizes, lengths, file, None if self._stage3 else gaps, self._cut_off[group])

    def _meta(self, model: dict[str, Any], file: Path) -> dict[str, Any]:
        meta: dict[str, Any] = self._plain({key: model[key] for key in model if key not in _OWN_KEYS}, file)
        if model.get("lr_scheduler") is not None and "lr_schedulers" not in meta:
            meta["lr_schedulers"] = [self._plain(model["lr_scheduler"], file, "lr_scheduler")]
        for key in ("data_sampler", "random_ltd"):
            if model.get(key):
                self.notes.append(f"{key} of {file} (data efficiency) was left out.")
        scaler = next(iter(self._inner.values()), {}).get("loss_scaler")
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

    def _open_weights(self, models: dict[Path, dict[str, Any]]) -> None:
        """Master weights, frozen parameters, and the other tensors of the module, by their names in the files."""
        file, model = next(iter(models.items()))
        module = mapping(model.get("module"), "module", file)
        tensors = {name: value for name, value in module.items() if isinstance(value, Tensor)}
        found = {name: Saved.of(tensor) for name, tensor in tensors.items()}
        frozen = _shapes(model.get("frozen_param_shapes") or {}, file)
        for name, shape in frozen.items():
            parts: list[Tensor] = []
            for where, states in models.items():
                fragments = mapping(states.get("frozen_param_fragments"), "frozen_param_fragments", where)
                parts += _tensors([fragments.get(name)], f"frozen parameter {name}", where, flat=False)
            found[name] = Saved.of(parts[0])
            if len(parts) > 1 or parts[0].shape != shape:
                place = _cut(0, {name: shape}, [part.numel() for part in parts], file, None, [0] * len(parts))[name]
                found[name] = self._assembled(name, place, parts)
        for name, place in self._places.items():
            found[name] = self._assembled(name, place, self._rows[place.group])
        shared = model.get("shared_params")
        shared = shared if isinstance(shared, dict) else ties(tensors)
        shared = {tied: first for tied, first in shared.items() if tied in found and first in found}
        found |= {tied: found[first] for tied, first in shared.items()}
        # The module's other tensors are placeholders, see Note [Stage 3].
        own = {*(model.get("buffer_names") or ()), *frozen, *self._places}
        absent = [name for name in found if self._stage3 and shared.get(name, name) not in own]
        self._set_weights({name: saved for name, saved in found.items() if name not in absent}, shared)
        self.left_out = [self._named(name) for name in absent]
        self.notes += [f"{name} was not saved (exclude_frozen_parameters)." for name in self.left_out]

    def _open_states(self, names: list[list[str]]) -> None:
        """Publish the optimizer. ``names``: of parameters, by group."""
        key = "optimizer_state_dict" if self._stage3 else "base_optimizer_state"
        inner = {file: rank.get(key) for file, rank in self._inner.items()}
        file, first = next(iter(inner.items()))
        if isinstance(first, dict):
            saved = self._plain(first.get("param_groups"), file, "param_groups")
            groups = [{**group, "params": [n for i in group["params"] for n in names[i]]} for group in saved]
        else:
            groups = [{"params": row} for row in names]
            self.notes.append(f"{file} has no settings of parameter groups (elastic_checkpoint).")
        # Fused optimizers count in the group what torch's count in the state.
        steps = {name: group.pop("step") for group in groups if "step" in group for name in group["params"]}
        states: list[list[dict[str, Any]]] = []  # by group and rank
        for group in range(len(names)):
            states.append([])
            for where, rank in inner.items():
                entries = rank.get("state") if isinstance(rank, dict) else rank
                try:
                    found = entries[group]  # type: ignore[index]
                except (LookupError, TypeError):  # an optimizer without states
                    found = {}
                states[-1].append(mapping(found, "optimizer state", where))
        state = {}
        for raw, place in self._places.items():
            name, entries = self._named(raw), self._entries(raw, place, states[place.group])
            if entries:
                counted = {"step": torch.tensor(float(steps[name]))} if name in steps and "step" not in entries else {}
                state[name] = {**entries, **counted}
        self._add_optimizer(groups, state)

    def _entries(self, name: str, place: _ParamLocation, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The states of a parameter. ``states``: those of its group, per rank."""
        length = self._rows[place.group][place.rank].numel()
        sizes = {length, length + self._cut_off[place.group][place.rank]}
        entries: dict[str, Any] = {}
        for key, value in states[place.rank].items():
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() in sizes:
                entries[key] = self._assembled(f"{key} of {name}", place, [state.get(key) for state in states])
            elif isinstance(value, Tensor) and not value.shape:
                entries[key] = self._records.check(value).detach().clone()
            elif isinstance(value, (int, float, bool, type(None))):
                entries[key] = value
            else:
                note = f"The state {key!r} in {[*self._inner][place.rank]} is not element-wise; it was left out."
                self.notes += [note] if note not in self.notes else []
        return entries

    def _assembled(self, what: str, place: _ParamLocation, rows: Sequence[Any]) -> Saved:
        """A tensor with its elements in the rows of ranks."""
        dtype = rows[place.rank].dtype

        def read() -> Tensor:
            result = torch.empty(place.shape, dtype=dtype)
            flat, done = result.view(-1), 0
            for rank, start, stop in place.spans:
                row = rows[rank]
                if not isinstance(row, Tensor) or row.dim() != 1 or stop > row.numel() or row.dtype != dtype:
                    raise CheckpointError(
                        f"The files of rank {rank} in {self.path} have no flat tensor of {dtype} with elements {start} "
                        f"to {stop} for {what}, as those of rank {place.rank} do: they do not belong together."
                    )
                flat[done : done + stop - start] = self._records.check(row).detach()[start:stop]
                done += stop - start
            return result

        return Saved(Spec(place.shape, dtype), read)


def _has_models(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(file.name) for file in folder.iterdir())


def _tag_folder(path: Path, tag: str | None) -> Path:
    """The folder with the files."""
    latest = path / "latest"
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


def _cut(
    group: int,
    shapes: Mapping[str, tuple[int, ...]],
    lengths: Sequence[int],
    file: Path,
    gaps: Sequence[int] | None,
    cut_off: Sequence[int],
) -> dict[str, _ParamLocation]:
    """Places of the parameters of a group; raises if the rows have another length than the shapes need.

    Args:
        lengths: saved elements of each rank's row.
        gaps: elements between a parameter and the next in the row that ranks share; None: each is cut by itself.
        cut_off: elements that are missing at the end of each rank's part of that row.
    """
    world, row, offset = len(lengths), lengths[0] + cut_off[0], 0
    places = {}
    for (name, shape), gap in zip(shapes.items(), [0] * len(shapes) if gaps is None else gaps, strict=True):
        numel = math.prod(shape)
        if gaps is None:
            start, base, part = 0, offset, -(-numel // world)
            offset += part
        else:
            start, base, part = offset, 0, row
            offset += numel + gap
        stop = start + numel
        spans = tuple(
            (rank, base + max(start - rank * part, 0), base + min(stop - rank * part, part))
            for rank in range(world)
            if max(start, rank * part) < min(stop, (rank + 1) * part)
        )
        places[name] = _ParamLocation(group, shape, spans)
    needed, found = (offset * world, sum(lengths)) if gaps is None else (offset, min(offset, sum(lengths)))
    equal = all(length + missing == row for length, missing in zip(lengths, cut_off, strict=True))
    if not equal or found != needed or min(*cut_off, *(gaps or ()), 0) < 0:
        raise CheckpointError(
            f"{file} and its neighbours have {list(lengths)} elements of group {group} (and {list(cut_off)} of "
            f"padding), but the parameters need {needed}: the files do not belong together, or the weights were "
            "offloaded to NVMe and not saved. Take another checkpoint."
        )
    return places


def _shapes(value: Any, file: Path) -> dict[str, tuple[int, ...]]:
    shapes = mapping(value, "shapes of parameters", file)
    for name, shape in shapes.items():
        if not isinstance(name, str) or not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise CheckpointError(f"{file} is damaged: {name!r} has the shape {shape!r}. Take another checkpoint.")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _tensors(value: Any, what: str, file: Path, flat: bool = True) -> list[Tensor]:
    if not isinstance(value, list) or not all(isinstance(t, Tensor) and (t.dim() == 1 or not flat) for t in value):
        raise CheckpointError(f"{file} has no {what}, or not as tensors: it is damaged or of an unknown version.")
    return value
