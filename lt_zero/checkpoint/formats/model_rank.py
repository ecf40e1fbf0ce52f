"""The files of one model rank of DeepSpeed: its weights, and what the ranks of ZeRO have of its optimizer.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved, mapping, ties
from lt_zero.checkpoint.formats.reading import Stub
from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError

Shape = tuple[int, ...]


class _ParamLocation(NamedTuple):
    """The location of a parameter: the number of its row, and its elements on each rank."""

    group: int
    shape: Shape
    spans: tuple[tuple[int, int, int], ...]  # (rank, start, stop) in that rank's row, in the order of the elements

    @property
    def rank(self) -> int:
        """The first rank that has some of the parameter."""
        return self.spans[0][0] if self.spans else 0


class ModelRank:
    """All of a model, or what a rank of tensor parallelism or of a pipeline has of it. Names are those in the files.

    Args:
        source: reads files, and takes notes.
        files: model files, in the order of ZeRO's ranks (of stages 0 to 2 one).

    Attributes:
        file: the first of ``files``.
        model: its content.
        models: the contents of all ``files``.
        shapes: of trained parameters, by group (stage 3: by sub-group).
        frozen: shapes of frozen parameters, from stage 2 on.
        buffers: names of buffers.
        weights: master weights, frozen parameters and buffers.
        shared: tied name -> the name whose values it has.
        absent: names of parameters that were not saved.
        groups: torch's ``param_groups``, with names in ``params``.
        counts: of steps, by group (stage 3: by sub-group); None where none are counted.
        states: of trained parameters; a ``Saved`` for an element-wise tensor.
        loss_scaler: an object of DeepSpeed, or None.

    Raises:
        CheckpointError: files are damaged, or do not belong together.
    """

    def __init__(self, source: ForeignSource, files: Sequence[Path]) -> None:
        self._source, self.file = source, files[0]
        self.models = {file: source.load_file(file, "model states") for file in files}
        self.model = self.models[self.file]
        self.shapes = [_shapes(group, self.file) for group in self.model.get("param_shapes") or []]
        self.frozen = _shapes(self.model.get("frozen_param_shapes") or {}, self.file)
        self.buffers = list(map(str, self.model.get("buffer_names") or ()))
        self.weights: dict[str, Saved] = {}
        self.shared: dict[str, str] = {}
        self.absent: list[str] = []
        self.groups: list[dict[str, Any]] = []
        self.counts: list[float | None] = []
        self.states: dict[str, dict[str, Any]] = {}
        self.loss_scaler: Any = None
        self._inner: dict[Path, dict[str, Any]] = {}  # the optimizer's state, by the file of a rank
        self._rows: list[list[Tensor]] = []  # by group: the fp32 weights of each rank, 1D
        self._cut_off: list[list[int]] = []  # by group: the number of elements left out at the end of each row
        self._places: dict[str, _ParamLocation] = {}
        self._stage3 = False

    def open_optimizer(self, files: Sequence[Path]) -> None:
        """Read the optimizer's files, in the order of ZeRO's ranks, and find the trained parameters in them."""
        for file in files:
            content = self._source.load_file(file, "optimizer states")
            self._inner[file] = mapping(content.get("optimizer_state_dict"), "optimizer_state_dict", file)
        file, first = next(iter(self._inner.items()))
        counts = first.get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if set(counts) - {len(self._inner)}:
            raise CheckpointError(
                f"{file} belongs to a run of {counts} ranks, but there are {len(self._inner)} *_optim_states.pt files "
                f"in {file.parent}. Copy the missing ones, or take another tag; expert parallelism cannot be read."
            )
        stage = first.get("zero_stage")
        self._stage3 = (stage.args[0] if isinstance(stage, Stub) and stage.args else stage) == 3
        self.loss_scaler = first.get("loss_scaler")
        key = "fp32_flat_groups" if self._stage3 else "single_partition_of_fp32_groups"
        flat = {file: _tensors(inner.get(key), key, file) for file, inner in self._inner.items()}
        for file, rows in flat.items():
            if len(rows) != len(self.shapes):
                raise CheckpointError(f"{file} has {len(rows)} groups, not {len(self.shapes)} ({key}).")
        paddings = None if self._stage3 else first.get("param_alignment_paddings")
        for group, sizes in enumerate(self.shapes):
            ends = [inner.get("group_paddings") if "zero_stage" in inner else None for inner in self._inner.values()]
            self._cut_off.append([int(end[group]) if end and not self._stage3 else 0 for end in ends])
            self._rows.append([rows[group] for rows in flat.values()])
            lengths = [row.numel() for row in self._rows[group]]
            gaps = paddings[group] if paddings else [0] * len(sizes)
            self._places |= _cut(group, sizes, lengths, file, None if self._stage3 else gaps, self._cut_off[group])
        self._open_states()

    def open_weights(self, whole: Mapping[str, Saved] | None = None) -> None:
        """Find all weights of the module.

        ``whole``: those of trained parameters that are not in files of ranks, under their names.
        """
        module = {} if self.model.get("module") is None else mapping(self.model["module"], "module", self.file)
        tensors = {name: value for name, value in module.items() if isinstance(value, Tensor)}
        found = {name: self._checked(tensor) for name, tensor in tensors.items()}
        for name, shape in self.frozen.items():
            parts: list[Tensor] = []
            for where, states in self.models.items():
                fragments = mapping(states.get("frozen_param_fragments"), "frozen_param_fragments", where)
                parts += _tensors([fragments.get(name)], f"frozen parameter {name}", where, flat=False)
            found[name] = self._checked(parts[0])
            if len(parts) > 1 or parts[0].shape != shape:
                lengths = [part.numel() for part in parts]
                place = _cut(0, {name: shape}, lengths, self.file, None, [0] * len(parts))[name]
                found[name] = self._assembled(name, place, parts)
        for name, place in self._places.items():
            found[name] = self._assembled(name, place, self._rows[place.group])
        found |= whole or {}
        shared = self.model.get("shared_params")
        shared = shared if isinstance(shared, dict) else ties(tensors)
        self.shared = {tied: first for tied, first in shared.items() if first in found}
        found |= {tied: found[first] for tied, first in self.shared.items()}
        # In stage 3 the module's other tensors are placeholders, see Note [Stage 3].
        own = {*self.buffers, *self.frozen, *self._places, *(whole or ())}
        has_placeholders = self._stage3 or self.file.name.startswith("zero_pp_rank_")
        self.absent = [name for name in found if has_placeholders and self.shared.get(name, name) not in own]
        self.weights = {name: saved for name, saved in found.items() if name not in self.absent}

    def named_groups(self, saved: Any, file: Path) -> list[dict[str, Any]]:
        """torch's ``param_groups``, which have numbers of flat rows, with the names of the parameters in the rows."""
        names = [list(group) for group in self.shapes]
        groups = self._source.plain(saved, file, "param_groups")
        return [{**group, "params": [n for i in group["params"] for n in names[i]]} for group in groups]

    def _open_states(self) -> None:
        """Publish the optimizer's groups and states."""
        key = "optimizer_state_dict" if self._stage3 else "base_optimizer_state"
        inner = {file: rank.get(key) for file, rank in self._inner.items()}
        file, first = next(iter(inner.items()))
        if isinstance(first, dict):
            self.groups = self.named_groups(first.get("param_groups"), file)
        else:
            self.groups = [{"params": list(group)} for group in self.shapes]
            self._source.notes.append(f"{file} has no settings of parameter groups (elastic_checkpoint).")
        # Fused optimizers count in the group what torch's count in the state.
        steps = {name: group.pop("step") for group in self.groups if "step" in group for name in group["params"]}
        states: list[list[dict[str, Any]]] = []  # by group and rank
        for group in range(len(self.shapes)):
            states.append([])
            for where, rank in inner.items():
                entries = rank.get("state") if isinstance(rank, dict) else rank
                try:
                    found = entries[group]  # type: ignore[index]
                except (LookupError, TypeError):  # an optimizer without states
                    found = {}
                states[-1].append(mapping(found, "optimizer state", where))
            self._check_steps(group, states[-1], list(inner.values()))
        for name, place in self._places.items():
            entries = self._entries(name, place, states[place.group])
            if entries:
                counted = {"step": torch.tensor(float(steps[name]))} if name in steps and "step" not in entries else {}
                self.states[name] = {**entries, **counted}

    def _check_steps(self, group: int, states: Sequence[Mapping[str, Any]], inner: Sequence[Any]) -> None:
        """Check that ranks have counted as many steps, and keep the number.

        ``states``: of a group, per rank. ``inner``: the optimizer's state, per rank; fused optimizers count in groups.
        """
        groups: list[Any] = [rank.get("param_groups") or [{}] if isinstance(rank, dict) else [{}] for rank in inner]
        found = [state.get("step", own[0].get("step")) for state, own in zip(states, groups, strict=True)]
        counts = [self._count(step) for step in found]
        for file, count in zip(self._inner, counts, strict=True):
            if count != counts[0]:
                raise CheckpointError(
                    f"{file} has counted {count} steps of group {group}, but {next(iter(self._inner)).name} "
                    f"{counts[0]}: the files do not belong together. Take another checkpoint."
                )
        self.counts.append(counts[0])

    def _count(self, step: Any) -> float | None:
        if isinstance(step, Tensor):
            return float(self._source.records.check(step)) if step.numel() == 1 else None
        return float(step) if isinstance(step, (int, float)) else None

    def _entries(self, name: str, place: _ParamLocation, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The states of a parameter. ``states``: those of its group, per rank."""
        length = self._rows[place.group][place.rank].numel()
        sizes = {length, length + self._cut_off[place.group][place.rank]}
        entries: dict[str, Any] = {}
        for key, value in states[place.rank].items():
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() in sizes:
                entries[key] = self._assembled(f"{key} of {name}", place, [state.get(key) for state in states])
            elif isinstance(value, Tensor) and not value.shape:
                entries[key] = self._source.records.check(value).detach().clone()
            elif isinstance(value, (int, float, bool, type(None))):
                entries[key] = value
            else:
                note = f"The state {key!r} in {[*self._inner][place.rank]} is not element-wise; it was left out."
                self._source.notes += [note] if note not in self._source.notes else []
        return entries

    def _checked(self, tensor: Tensor) -> Saved:
        """A tensor that is compared with its checksum when it is read."""
        records = self._source.records
        return Saved(Spec(tuple(tensor.shape), tensor.dtype), lambda: records.check(tensor))

    def _assembled(self, what: str, place: _ParamLocation, rows: Sequence[Any]) -> Saved:
        """A tensor with its elements in the rows of ranks."""
        dtype, records, folder = rows[place.rank].dtype, self._source.records, self.file.parent

        def read() -> Tensor:
            result = torch.empty(place.shape, dtype=dtype)
            flat, done = result.view(-1), 0
            for rank, start, stop in place.spans:
                row = rows[rank]
                if not isinstance(row, Tensor) or row.dim() != 1 or stop > row.numel() or row.dtype != dtype:
                    raise CheckpointError(
                        f"The files of rank {rank} in {folder} have no flat tensor of {dtype} with elements {start} "
                        f"to {stop} for {what}, as those of rank {place.rank} do: they do not belong together."
                    )
                flat[done : done + stop - start] = records.check(row).detach()[start:stop]
                done += stop - start
            return result

        return Saved(Spec(place.shape, dtype), read)


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
