"""Converts a checkpoint of any supported format to a checkpoint directory, in one process without a process group.

The source is verified first, as far as its format has checksums. Then tensors are read, written and freed one by one,
so memory is that of the largest tensor and the writer's buffers. The directory is published like any other
(directory.py).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import fsspec
import torch
from torch import Tensor

from lt_zero.checkpoint.formats.reading import damage
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import Place, is_url
from lt_zero.checkpoint.native.load import as_lightning, beginning_of_epoch, number_states
from lt_zero.checkpoint.native.pieces import Fragment
from lt_zero.checkpoint.native.save import KEY, bundle, write
from lt_zero.checkpoint.open import found_at, open_source
from lt_zero.checkpoint.output import bar, check_space
from lt_zero.checkpoint.source import Foreign, Source, Spec
from lt_zero.comm.communicator import Comm
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.engine.lazy_tensor import LazyTensor

_PER_TENSOR = 4096  # maximum bytes that a directory adds to a tensor
_SHOWN = 3  # files in a warning


def import_checkpoint(
    source: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, progress: bool = False
) -> str:
    """Convert a checkpoint to a checkpoint directory that any world size, stage and offload resumes from.

    Warnings name what cannot be converted, and files without checksums.

    Args:
        source: a checkpoint directory or file of any supported format; see ``open_source``.
        out: the directory to create, or its URL.
        tag: of a DeepSpeed directory; default: the one in its file ``latest``.
        progress: show the progress on stderr.

    Returns:
        The directory.

    Raises:
        CheckpointError: the source is damaged or of an unknown format, or ``out`` exists already or cannot be written;
            no partial directory is left.
    """
    target = _target(source, os.fspath(out))
    opened = open_source(source, tag)
    need = sum(spec.nbytes + _PER_TENSOR for spec in _specs(opened))
    if not is_url(target):
        check_space(Path(target).parent, need, "import", "")
    with progress_bar(f"Checking {source}", rank=0, shown=progress):
        _verify(opened)
    comm = Comm(None, None, torch.device("cpu"))
    with bar(f"Importing {os.path.basename(target)}", progress) as (begin, tick):
        begin(sum(spec.nbytes for spec in _specs(opened)))
        checkpoint, names, facts = _content(opened, target, _Fragments(tick))
        content = bundle(checkpoint, names, comm, _run(source), facts["config"], facts["left_out"])
        place = Place.make(target)
        try:
            write(content, place, comm, None)
        except BaseException:
            place.discard()
            raise
    return target


def _target(source: str | os.PathLike[str], out: str) -> str:
    """The absolute path of the directory to create.

    Raises:
        CheckpointError: it exists and is not empty, or lies inside the source.
    """
    if is_url(out):
        if fsspec.core.url_to_fs(out)[0].exists(out):
            raise CheckpointError(f"{out} exists already. Name another path, or remove it.")
        return out.rstrip("/")
    target = Path(os.path.realpath(out))
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target} exists already. Name another path, or remove it.")
    if not is_url(source) and Path(os.path.realpath(found_at(source))) in target.parents:
        raise CheckpointError(f"{target} would be in the checkpoint {source} itself. Name another path.")
    return str(target)


def _specs(source: Source) -> list[Spec]:
    """Specs of all tensors that are not aliases."""
    weights = [spec for name, spec in source.weights.items() if name not in source.aliases]
    states = (entry for saved in source.optimizers for entry in saved.state.values())
    return weights + [value for entry in states for value in entry.values() if isinstance(value, Spec)]


def _verify(source: Source | Foreign) -> None:
    """Verify the checksums of the source, and warn of files that have none.

    Raises:
        CheckpointError: a file is damaged.
    """
    if isinstance(source, Archive):
        source.verify()
        return
    verify: Callable[[], list[str]] = getattr(source, "verify", list)
    if unchecked := verify():
        more = f" and {len(unchecked) - _SHOWN} more" if len(unchecked) > _SHOWN else ""
        warnings.warn(
            f"{', '.join(unchecked[:_SHOWN])}{more}: without checksums, so damaged values cannot be detected.",
            stacklevel=3,
        )


class _Fragments:
    """Makes a fragment for each lazy tensor, which is read when it is written, and freed before the next one."""

    def __init__(self, tick: Callable[[int], object]) -> None:
        self._tick = tick
        self._fragments: dict[int, Fragment] = {}
        self._alive: list[LazyTensor] = []  # keeps the ids unique

    def of(self, value: Any) -> Any:
        """``value`` with a fragment for each lazy tensor in it; tied ones share a fragment."""
        if isinstance(value, LazyTensor):
            if id(value) not in self._fragments:
                values = _Values(value, self._tick)
                shape, numel = tuple(value.shape), value.numel()
                self._fragments[id(value)] = Fragment(values.read, shape, 0, numel, value.dtype, values.free)
                self._alive.append(value)
            return self._fragments[id(value)]
        if isinstance(value, Mapping):
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return value


class _Values:
    """The values of a lazy tensor, from the first read until they are written."""

    def __init__(self, lazy: LazyTensor, tick: Callable[[int], object]) -> None:
        self._lazy, self._tick = lazy, tick
        self._values: Tensor | None = None

    def read(self) -> Tensor:
        if self._values is None:
            values = self._lazy.elements(0, self._lazy.numel())
            if values.dtype != self._lazy.dtype or values.numel() != self._lazy.numel():
                raise CheckpointError(
                    f"A tensor was read as {values.numel()} elements of {values.dtype}, but the checkpoint declares "
                    f"{tuple(self._lazy.shape)} of {self._lazy.dtype}: it is damaged. Import another copy."
                )
            self._values = values
            self._tick(values.nbytes)
        return self._values

    def free(self) -> None:
        self._values = None


def _content(
    source: Source, target: str, fragments: _Fragments
) -> tuple[dict[str, Any], list[list[list[str]]], dict[str, Any]]:
    """The checkpoint with fragments, the names of optimizers' parameters by group, and arguments of ``bundle``."""
    checkpoint = as_lightning(source)
    own = checkpoint.pop(KEY)
    foreign = not isinstance(source, Archive)
    if foreign and "loops" not in checkpoint and (source.optimizers or hasattr(source, "steps")):
        _begin_epoch(source, checkpoint, target)
    states = checkpoint.get("optimizer_states", [])
    names = [[list(group["params"]) for group in state["param_groups"]] for state in states]
    numbered = [number_states(state, names[i], i) for i, state in enumerate(states)]
    checkpoint = fragments.of(
        {**checkpoint, **({"optimizer_states": numbered} if "optimizer_states" in checkpoint else {})}
    )
    marks = {"hparams": own["hparams"], "foreign": any(state.get("foreign") for state in states)}
    checkpoint[KEY] = marks
    saved = source.meta.get(KEY, {}) if not foreign else {}
    return checkpoint, names, {"config": saved.get("config", {}), "left_out": own["frozen_left_out"]}


def _begin_epoch(source: Source, checkpoint: dict[str, Any], target: str) -> None:
    """Add loops at the beginning of an epoch to a state that Lightning did not save."""
    found = (state.get("step") for saved in source.optimizers for state in saved.state.values())
    with damage("The optimizers' number of steps"):
        counted = [int(value) for value in found if _is_number(value)]
    steps: int = getattr(source, "steps", max(counted, default=0))
    checkpoint.update(beginning_of_epoch(checkpoint, steps))
    schedules = "the saved states of schedulers" if checkpoint.setdefault("lr_schedulers", []) else "new schedulers"
    warnings.warn(
        f"The state was not saved by Lightning: a run that resumes from {target} continues at step {steps}, at the "
        f"beginning of epoch {checkpoint['epoch']}, with {schedules}.",
        stacklevel=4,
    )


def _is_number(value: Any) -> TypeGuard[int | float | Tensor]:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def _run(source: str | os.PathLike[str]) -> dict[str, Any]:
    path = os.fspath(source)
    return {
        "imported_from": path if is_url(path) else os.path.abspath(path),
        "ranks": 1,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": str(torch.__version__),
    }
