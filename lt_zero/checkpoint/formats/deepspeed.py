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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.reading import (
    Plain,
    Stub,
    damage,
    has_checksums,
    load,
    mapping,
    prefix_of,
    spec_of,
    ties,
)
from lt_zero.checkpoint.source import SavedOptimizer, Spec
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


def _tag_folder(path: Path, tag: str | None) -> Path:
    """The folder with the files."""
    latest = path / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_bytes()[:4096].decode("utf-8", "replace").strip()
    if tag is not None:
        if not tag or Path(tag).name != tag or not (path / tag).is_dir():
            raise CheckpointError(f"{latest} names the tag {tag!r}, but there is no such folder in {path}.")
        return path / tag
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    if any(_MODEL.fullmatch(file.name) for file in path.iterdir()):
        return path
    tags = [d.name for d in sorted(path.iterdir()) if d.is_dir() and any(_MODEL.fullmatch(f.name) for f in d.iterdir())]
    if len(tags) != 1:
        raise CheckpointError(f"{path} has no file `latest`, and {len(tags)} tags: {tags}. Name one of them.")
    return path / tags[0]


def _files_of(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """By rank, from 0 on."""
    found: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        if _EXPERTS.match(file.name):
            raise CheckpointError(f"{file} belongs to a mixture of experts, whose checkpoints cannot be read.")
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        rank = int(match["rank"] or 0)
        if int(match["mp"]) != 0 or rank in found:
            raise CheckpointError(
                f"{file} is one of several for the same rank: checkpoints of tensor-parallel runs cannot be read, and "
                "files of different runs must not be in one folder."
            )
        found[rank] = file
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(
            f"{folder} has files of ranks {sorted(found)} only ({pattern.pattern}): some are missing."
        )
    return [found[rank] for rank in sorted(found)]


# ---- where the elements of a parameter are: rows that ranks share ----------------------------------------------

_Shapes = Mapping[str, tuple[int, ...]]
_Spans = tuple[tuple[int, int, int], ...]  # (rank, start, stop) in that rank's row, in the order of the elements


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: the number of its row, and which elements of it on which rank."""

    group: int
    shape: tuple[int, ...]
    spans: _Spans


def _cut_evenly(group: int, shapes: _Shapes, rows: Sequence[int], file: Path) -> dict[str, _Place]:
    """Each parameter is cut by itself; ``rows``: the length of each rank's row.

    Raises:
        CheckpointError: the rows have another length than the shapes need.
    """
    world, offset = len(rows), 0
    places = {}
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world)
        spans = tuple(
            (rank, offset, offset + min(part, numel - rank * part)) for rank in range(world) if rank * part < numel
        )
        places[name] = _Place(group, shape, spans)
        offset += part
    if any(row != offset for row in rows):
        raise CheckpointError(
            f"{file} and its neighbours have {list(rows)} elements of group {group}, but the parameters need {offset} "
            "each: the files do not belong together, or the weights were offloaded to NVMe and not saved."
        )
    return places


def _cut_rows(
    group: int,
    shapes: _Shapes,
    gaps: Sequence[int],
    rows: Sequence[int],
    cut_off: Sequence[int],
    file: Path,
) -> dict[str, _Place]:
    """The row of all parameters is cut into equal parts.

    Args:
        gaps: elements between a parameter and the next.
        rows: what there is of each rank's part.
        cut_off: what is missing at its end.

    Raises:
        CheckpointError: the parts are not equal, or have another length than the shapes need.
    """
    part = rows[0] + cut_off[0]
    needed = sum(map(math.prod, shapes.values())) + sum(gaps)
    equal = all(row + missing == part for row, missing in zip(rows, cut_off, strict=True))
    if not equal or len(gaps) != len(shapes) or sum(rows) < needed or min(cut_off) < 0 or min(gaps, default=0) < 0:
        raise CheckpointError(
            f"{file} and its neighbours have {list(rows)} elements of group {group} (and {list(cut_off)} of padding), "
            f"but the parameters need {needed}: the files do not belong together. Take another checkpoint."
        )
    places, offset = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        stop = offset + math.prod(shape)
        spans = tuple(
            (rank, max(offset, rank * part) - rank * part, min(stop, (rank + 1) * part) - rank * part)
            for rank in range(len(rows))
            if max(offset, rank * part) < min(stop, (rank + 1) * part)
        )
        places[name] = _Place(group, shape, spans)
        offset = stop + gap
    return places


# ---- the checkpoint -------------------------------------------------------------------------------------------------


class DeepSpeedSource:
    """A checkpoint folder of DeepSpeed, or of Lightning's DeepSpeedStrategy. A ``Foreign``.

    Weights of trained parameters are the fp32 master weights. The loss scaler of an fp16 run is
    ``meta["ZeroPrecision"]``.

    Args:
        path: the folder with ``latest`` and a folder per tag, or one of the latter.
        tag: which one; default: what ``latest`` says.
        inert: see ``Foreign``.

    Attributes:
        left_out: names of frozen parameters that were not saved.
        steps: that DeepSpeed has counted, skipped ones included.
    """

    def __init__(self, path: str | os.PathLike[str], tag: str | None = None, inert: Collection[str] = ()) -> None:
        self.notes: list[str] = []
        self.left_out: list[str] = []
        self._inert = inert
        self.folder = _tag_folder(Path(path), tag)
        self._files = _files_of(self.folder, _MODEL)
        self._models = [mapping(load(f, inert=inert), "model states", f) for f in self._files]
        with damage(self.folder):
            self._sort_out()

    def _sort_out(self) -> None:
        self._module = mapping(self._models[0].get("module"), "module", self._files[0])
        shapes = self._models[0].get("param_shapes")
        self._shapes: list[dict[str, tuple[int, ...]]] = [_shapes(s, self._files[0]) for s in shapes or []]
        self._inner: list[dict[str, Any]] = []  # the optimizer's state, per rank
        self._optimizer_files: list[Path] = []
        self._places: dict[str, _Place] = {}
        if self._shapes:
            self._read_optimizers()
        else:
            self.notes.append(
                f"{self._files[0]} is of ZeRO stage 0, where optimizer states and master weights have no names: "
                "weights are those of the module, and there is no optimizer state."
            )
        self.steps = int(self._models[0].get("global_steps") or 0)
        plain = Plain(self._files[0], self.notes)
        self.meta: Mapping[str, Any] = self._meta(plain)
        self._frozen = self._frozen_parameters()
        self._prefix = prefix_of(self._module, self.meta)
        self.aliases: Mapping[str, str] = self._aliases()
        self.weights: Mapping[str, Spec] = self._weights()
        self.optimizers: tuple[SavedOptimizer, ...] = self._optimizer() if self._shapes else ()

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is a folder that this class reads; says nothing about whether it is complete."""
        folder = Path(path)
        inside = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
        return any(_MODEL.fullmatch(f.name) for d in inside if d.is_dir() for f in d.iterdir())

    def read(self, name: str) -> Tensor:
        raw = self._raw(name)
        place = self._places.get(raw)
        if place is not None:
            return self._assembled(place, lambda rank: self._flat(rank, place.group))
        if raw in self._frozen:
            shape, spans, parts = self._frozen[raw]
            return _filled(shape, parts[0].dtype, spans, lambda rank: parts[rank])
        tensor: Tensor = self._module[raw]
        return tensor.detach().contiguous()

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        place = self._places.get(self._raw(name))
        if optimizer != 0 or place is None or key not in self._keys(place):
            raise CheckpointError(f"{self.folder} has no state {key!r} of {name!r} in optimizer {optimizer}.")
        return self._assembled(place, lambda rank: self._moment(rank, place.group, key))

    def verify(self) -> list[str]:
        files = [*self._files, *self._optimizer_files]
        return [str(file) for file in files if not has_checksums(file)]

    # ---- files -------------------------------------------------------------------------------------------------

    def _read_optimizers(self) -> None:
        self._optimizer_files = _files_of(self.folder, _OPTIMIZER)
        for file in self._optimizer_files:
            content = mapping(load(file, inert=self._inert), "optimizer states", file)
            self._inner.append(mapping(content.get("optimizer_state_dict"), "optimizer_state_dict", file))
        first, file = self._inner[0], self._optimizer_files[0]
        counts = first.get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if set(counts) != {len(self._inner)}:
            raise CheckpointError(
                f"{file} belongs to a run of {counts} ranks, but there are {len(self._inner)} *_optim_states.pt files "
                f"in {self.folder}. Copy the missing ones, or take another tag; expert parallelism cannot be read."
            )
        stage = first.get("zero_stage")
        stage = stage.args[0] if isinstance(stage, Stub) and stage.args else stage
        self._whole = stage == 3
        weights = "fp32_flat_groups" if self._whole else "single_partition_of_fp32_groups"
        for inner, file in zip(self._inner, self._optimizer_files, strict=True):
            inner["flat"] = _tensors(inner.get(weights), weights, file)
            if len(inner["flat"]) != len(self._shapes):
                raise CheckpointError(f"{file} has {len(inner['flat'])} groups, not {len(self._shapes)} ({weights}).")
        world = len(self._inner)
        for group, shapes in enumerate(self._shapes):
            rows = [self._flat(rank, group).shape[0] for rank in range(world)]
            if self._whole:
                self._places |= _cut_evenly(group, shapes, rows, file)
            else:
                cut_off = [self._cut_off(inner, group) for inner in self._inner]
                paddings = first.get("param_alignment_paddings")
                gaps = paddings[group] if paddings else [0] * len(shapes)
                self._places |= _cut_rows(group, shapes, gaps, rows, cut_off, file)

    @staticmethod
    def _cut_off(inner: Mapping[str, Any], group: int) -> int:
        """How many elements at the end of a rank's fp32 weights were left out."""
        paddings = inner.get("group_paddings")
        return int(paddings[group]) if "zero_stage" in inner and paddings else 0

    def _flat(self, rank: int, group: int) -> Tensor:
        row: Tensor = self._inner[rank]["flat"][group]
        return row

    # ---- what is in them ---------------------------------------------------------------------------------------

    def _meta(self, plain: Plain) -> dict[str, Any]:
        model = self._models[0]
        meta: dict[str, Any] = plain.of({key: value for key, value in model.items() if key not in _OWN_KEYS})
        if model.get("lr_scheduler") is not None and "lr_schedulers" not in meta:
            meta["lr_schedulers"] = [plain.of(model["lr_scheduler"], "lr_scheduler")]
        schedules = meta.get("lr_schedulers")
        if isinstance(schedules, list) and any(isinstance(s, dict) and "last_batch_iteration" in s for s in schedules):
            meta["lr_schedulers"] = []
            self.notes.append(f"{self._files[0]} has states of DeepSpeed's own schedules, which torch's cannot take.")
        scaler = self._inner[0].get("loss_scaler") if self._inner else None
        config = model.get("ds_config")
        fp16 = config.get("fp16") if isinstance(config, dict) else None
        if isinstance(scaler, Stub) and isinstance(fp16, dict) and fp16.get("enabled"):
            steps, skipped = int(model.get("global_steps", 0)), int(model.get("skipped_steps", 0))
            meta["ZeroPrecision"] = {
                "scaler": {
                    "scale": float(scaler.get("cur_scale", 1.0)),
                    "steps": int(scaler.get("cur_iter", 0)),
                    "last_overflow": int(scaler.get("last_overflow_iter", -1)),
                    "patience": int(scaler.get("cur_hysteresis", 1)),
                },
                "skips": [{"skipped": skipped, "consecutive": 0, "succeeded": steps - skipped}],
            }
        return meta

    def _frozen_parameters(self) -> dict[str, tuple[tuple[int, ...], _Spans, list[Tensor]]]:
        shapes = self._models[0].get("frozen_param_shapes") or {}
        found = {}
        for name, shape in _shapes(shapes, self._files[0]).items():
            parts = []
            for model, file in zip(self._models, self._files, strict=True):
                fragments = mapping(model.get("frozen_param_fragments"), "frozen_param_fragments", file)
                parts += _tensors([fragments.get(name)], f"frozen parameter {name}", file, flat=False)
            if parts[0].shape == shape and len(parts) == 1:
                self._module[name] = parts[0]
                continue
            rows = [part.numel() for part in parts]
            places = _cut_evenly(0, {name: shape}, rows, self._files[0])
            found[name] = (shape, places[name].spans, parts)
        return found

    def _aliases(self) -> dict[str, str]:
        shared = self._models[0].get("shared_params")
        if not isinstance(shared, dict):
            shared = ties({k: v for k, v in self._module.items() if isinstance(v, Tensor)})
        return {
            tied.removeprefix(self._prefix): first.removeprefix(self._prefix)
            for tied, first in shared.items()
            if tied in self._module and (first in self._module or first in self._places)
        }

    def _weights(self) -> dict[str, Spec]:
        weights: dict[str, Spec] = {}
        own = {*(self._models[0].get("buffer_names") or ()), *(self._models[0].get("frozen_param_shapes") or ())}
        for raw in dict.fromkeys([*self._module, *self._frozen, *self._places]):
            name = raw.removeprefix(self._prefix)
            source = self._raw(name)
            if source in self._places:
                place = self._places[source]
                weights[name] = Spec(place.shape, self._flat(0, place.group).dtype)
            elif source in self._frozen:
                shape, _, parts = self._frozen[source]
                weights[name] = Spec(shape, parts[0].dtype)
            elif isinstance(self._module[source], Tensor):
                weights[name] = spec_of(self._module[source])
                if self._shapes and self._whole and source not in own:  # a placeholder, see Note [Stage 3]
                    del weights[name]
                    self.left_out.append(name)
                    self.notes.append(f"{name} was not saved (exclude_frozen_parameters).")
        return weights

    def _optimizer(self) -> tuple[SavedOptimizer, ...]:
        inner = self._inner[0].get("optimizer_state_dict" if self._whole else "base_optimizer_state")
        names = [[raw.removeprefix(self._prefix) for raw in shapes] for shapes in self._shapes]
        if isinstance(inner, dict):
            saved = Plain(self._optimizer_files[0], self.notes).of(inner.get("param_groups"), "param_groups")
            groups = [{**group, "params": [n for i in group["params"] for n in names[i]]} for group in saved]
        else:
            groups = [{"params": row} for row in names]
            self.notes.append(f"{self._optimizer_files[0]} has no settings of parameter groups (elastic_checkpoint).")
        steps = {name: group.pop("step") for group in groups if "step" in group for name in group["params"]}
        state = {}
        for raw, place in self._places.items():
            entries = self._entries(place)
            if entries:
                # Fused optimizers count in the group what torch's count in the state.
                counted = {"step": torch.tensor(float(steps[raw]))} if raw in steps and "step" not in entries else {}
                state[raw.removeprefix(self._prefix)] = {**entries, **counted}
        return (SavedOptimizer(groups, state),)

    def _keys(self, place: _Place) -> dict[str, Any]:
        """The saved state of a parameter's group, on the first rank that has some of the parameter."""
        rank = place.spans[0][0] if place.spans else 0
        inner = self._inner[rank].get("optimizer_state_dict" if self._whole else "base_optimizer_state")
        if isinstance(inner, dict):
            inner = inner.get("state")
        try:
            found = inner[place.group]  # type: ignore[index]
        except (LookupError, TypeError):
            return {}
        return mapping(found, "optimizer state", self._optimizer_files[rank])

    def _entries(self, place: _Place) -> dict[str, Any]:
        rank = place.spans[0][0] if place.spans else 0
        row = self._flat(rank, place.group).shape[0]
        sizes = {row, row + (0 if self._whole else self._cut_off(self._inner[rank], place.group))}
        entries: dict[str, Any] = {}
        for key, value in self._keys(place).items():
            if isinstance(value, Tensor) and len(value.shape) == 1 and value.numel() in sizes:
                entries[key] = Spec(place.shape, value.dtype)
            elif isinstance(value, Tensor) and not value.shape:
                entries[key] = value.detach().clone()
            elif isinstance(value, (int, float, bool, type(None))):
                entries[key] = value
            else:
                note = f"The state {key!r} in {self._optimizer_files[rank]} is not element-wise; it was left out."
                self.notes += [note] if note not in self.notes else []
        return entries

    # ---- tensors -----------------------------------------------------------------------------------------------

    def _moment(self, rank: int, group: int, key: str) -> Tensor:
        place = _Place(group, (), ((rank, 0, 0),))
        value = self._keys(place).get(key)
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{self._optimizer_files[rank]} has no {key!r} of group {group}, as other files do.")
        return value

    def _assembled(self, place: _Place, part: Callable[[int], Tensor]) -> Tensor:
        dtype = part(place.spans[0][0]).dtype if place.spans else torch.float32
        return _filled(place.shape, dtype, place.spans, part)

    def _raw(self, name: str) -> str:
        """The file's name of what holds the values of ``name``."""
        name = self.aliases.get(name, name)
        raw = self._prefix + name
        if raw in self._module or raw in self._places or raw in self._frozen:
            return raw
        raise CheckpointError(f"{self.folder} has no parameter or buffer {name!r}.")


def _filled(shape: tuple[int, ...], dtype: torch.dtype, spans: _Spans, part: Callable[[int], Tensor]) -> Tensor:
    """A tensor put together from parts of ranks."""
    result = torch.empty(shape, dtype=dtype)
    flat, done = result.view(-1), 0
    for rank, start, stop in spans:
        row = part(rank)
        if row.dim() != 1 or stop > row.numel() or row.dtype != dtype:
            raise CheckpointError(
                f"A tensor of shape {tuple(row.shape)} ({row.dtype}) stands where a flat one of {dtype} with elements "
                f"{start} to {stop} should be: the files of the checkpoint do not belong together."
            )
        flat[done : done + stop - start] = row.detach()[start:stop]
        done += stop - start
    return result


def _shapes(value: Any, file: Path) -> dict[str, tuple[int, ...]]:
    shapes = mapping(value, "shapes of parameters", file)
    for name, shape in shapes.items():
        if (
            not isinstance(name, str)
            or not isinstance(shape, tuple)
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise CheckpointError(f"{file} is damaged: {name!r} has the shape {shape!r}. Take another checkpoint.")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _tensors(value: Any, what: str, file: Path, flat: bool = True) -> list[Tensor]:
    good = isinstance(value, list) and all(isinstance(t, Tensor) and (not flat or t.dim() == 1) for t in value)
    if not good:
        raise CheckpointError(f"{file} has no {what}, or not as tensors: it is damaged or of an unknown version.")
    tensors: list[Tensor] = value
    return tensors
