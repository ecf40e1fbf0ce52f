"""Any saved training state as a checkpoint directory of ours. One process, no process group.

Note [One after the other]
    The source is checked first, as far as its formats have checksums. Then tensors are read, written and let go one by
    one: besides the largest of them, an import needs the buffers of the writer. The directory is written like any other
    (directory.py): under a temporary name, with a manifest, renamed when it is complete.
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

from lt_zero.checkpoint.formats.foreign import damage
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import Place, is_url
from lt_zero.checkpoint.native.fragment import Fragment
from lt_zero.checkpoint.native.load import as_lightning, number_states
from lt_zero.checkpoint.native.resuming import beginning_of_epoch
from lt_zero.checkpoint.native.save import KEY, bundle, write
from lt_zero.checkpoint.open import found_at, open_source
from lt_zero.checkpoint.output import bar, check_space
from lt_zero.checkpoint.source import Foreign, Source, Spec
from lt_zero.comm.communicator import Comm
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.engine.lazy_tensor import LazyTensor

_PER_TENSOR = 4096  # bytes at most that a directory adds to a tensor
_SHOWN = 3  # files in a warning


def import_checkpoint(
    source: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, progress: bool = False
) -> str:
    """Write what is at ``source`` as a checkpoint directory that any world size, stage and offload resumes from.

    What cannot be taken over, and files without checksums, are reported in warnings.

    Args:
        source: a checkpoint directory or file, whoever wrote it; see ``open_source``.
        out: the directory to make, or its URL.
        tag: which one of a DeepSpeed directory; default: the one that its file ``latest`` names.
        progress: show on stderr how far it is, if it takes long.

    Returns:
        The directory.

    Raises:
        CheckpointError: the source is damaged or of an unknown kind, ``out`` is there already or cannot be written;
            then nothing is there.
    """
    made = _place_for(source, os.fspath(out))
    opened = open_source(source, tag)
    need = sum(spec.nbytes + _PER_TENSOR for spec in _specs(opened))
    if not is_url(made):
        check_space(Path(made).parent, need, "import", "")
    with progress_bar(f"Checking {source}", rank=0, shown=progress):
        _verify(opened)
    comm = Comm(None, None, torch.device("cpu"))
    with bar(f"Importing {os.path.basename(made)}", progress) as (begin, tick):
        begin(sum(spec.nbytes for spec in _specs(opened)))
        checkpoint, names, facts = _content(opened, made, _Fragments(tick))
        content = bundle(checkpoint, names, comm, _run(source), facts["config"], facts["left_out"])
        place = Place.make(made)
        try:
            write(content, place, comm, None)
        except BaseException:
            place.discard()
            raise
    return made


def _place_for(source: str | os.PathLike[str], out: str) -> str:
    """The whole name of the directory, which is not there.

    Raises:
        CheckpointError: it is.
    """
    if is_url(out):
        if fsspec.core.url_to_fs(out)[0].exists(out):
            raise CheckpointError(f"{out} is there already: name another place, or remove it.")
        return out.rstrip("/")
    made = Path(os.path.realpath(out))
    if os.path.lexists(made) and not (made.is_dir() and not any(made.iterdir())):
        raise CheckpointError(f"{made} is there already: name another place, or remove it.")
    if not is_url(source) and Path(os.path.realpath(found_at(source))) in made.parents:
        raise CheckpointError(f"{made} would be in the checkpoint {source} itself: name another place.")
    return str(made)


def _specs(source: Source) -> list[Spec]:
    """Of all tensors that have values of their own."""
    weights = [spec for name, spec in source.weights.items() if name not in source.aliases]
    states = (entry for saved in source.optimizers for entry in saved.state.values())
    return weights + [value for entry in states for value in entry.values() if isinstance(value, Spec)]


def _verify(source: Source | Foreign) -> None:
    """Check the source as far as its formats allow, and tell what they do not.

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
            f"{', '.join(unchecked[:_SHOWN])}{more}: without checksums, so that changed values cannot be noticed.",
            stacklevel=3,
        )


class _Fragments:
    """A fragment for each lazy tensor: read when it is written, and let go when the next one is."""

    def __init__(self, tick: Callable[[int], object]) -> None:
        self._tick = tick
        self._made: dict[int, Fragment] = {}
        self._kept: list[LazyTensor] = []  # so that an id stands for one object

    def of(self, value: Any) -> Any:
        """``value`` with a fragment for each lazy tensor in it; one and the same for a tied one."""
        if isinstance(value, LazyTensor):
            if id(value) not in self._made:
                held = _Held(value, self._tick)
                shape, numel = tuple(value.shape), value.numel()
                self._made[id(value)] = Fragment(held.elements, shape, 0, numel, value.dtype, held.done)
                self._kept.append(value)
            return self._made[id(value)]
        if isinstance(value, Mapping):
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return value


class _Held:
    """The values of a lazy tensor, from when they are wanted first until they are written."""

    def __init__(self, lazy: LazyTensor, tick: Callable[[int], object]) -> None:
        self._lazy, self._tick = lazy, tick
        self._values: Tensor | None = None

    def elements(self) -> Tensor:
        if self._values is None:
            values = self._lazy.elements(0, self._lazy.numel())
            if values.dtype != self._lazy.dtype or values.numel() != self._lazy.numel():
                raise CheckpointError(
                    f"A tensor was read as {values.numel()} elements of {values.dtype}, and the checkpoint announces "
                    f"{tuple(self._lazy.shape)} of {self._lazy.dtype}: it is damaged."
                )
            self._values = values
            self._tick(values.nbytes)
        return self._values

    def done(self) -> None:
        self._values = None


def _content(
    source: Source, made: str, fragments: _Fragments
) -> tuple[dict[str, Any], list[list[list[str]]], dict[str, Any]]:
    """The checkpoint with fragments, the names of optimizers' parameters by group, and what of it has a place apart."""
    checkpoint = as_lightning(source)
    own = checkpoint.pop(KEY)
    foreign = not isinstance(source, Archive)
    if foreign and "loops" not in checkpoint and (source.optimizers or hasattr(source, "steps")):
        _begin(source, checkpoint, made)
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


def _begin(source: Source, checkpoint: dict[str, Any], made: str) -> None:
    """Let a run begin an epoch with a state that Lightning did not save."""
    found = (state.get("step") for saved in source.optimizers for state in saved.state.values())
    with damage("The optimizers' number of steps"):
        counted = [int(value) for value in found if _is_number(value)]
    steps: int = getattr(source, "steps", max(counted, default=0))
    checkpoint.update(beginning_of_epoch(checkpoint, steps))
    schedules = "the saved states of schedules" if checkpoint.setdefault("lr_schedulers", []) else "fresh schedules"
    warnings.warn(
        f"The state was not saved by Lightning: a run that is resumed from {made} goes on at step {steps} with the "
        f"beginning of epoch {checkpoint['epoch']}, and with {schedules}.",
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
