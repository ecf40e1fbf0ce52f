"""Converts a checkpoint of any supported format to a checkpoint directory, in one process without a process group.

The source is verified first, as far as its format has checksums. Then tensors are read, written and freed one by one,
so memory is that of the largest tensor and the writer's buffers. The directory is published like any other
(directory.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.download import local_copy
from lt_zero.checkpoint.formats.foreign import ForeignSource, damage
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import PendingDirectory, file_system, is_url, plain_path
from lt_zero.checkpoint.native.load import as_lightning, loss_scale, number_states, with_names_by
from lt_zero.checkpoint.native.plain import restore, to_plain
from lt_zero.checkpoint.native.save import FABRIC, LT_ZERO, Bundle, bundle, write
from lt_zero.checkpoint.open import found_at, open_source
from lt_zero.checkpoint.output import check_space
from lt_zero.checkpoint.source import CheckpointSource, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.users_code import warn
from lt_zero.core.comm.world import World
from lt_zero.core.engine.lazy_tensor import Fragment, LazyTensor

_PER_TENSOR = 4096  # maximum bytes that a directory adds to a tensor
_SHOWN = 3  # files in a warning


def import_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    progress: bool = False,
    inert: Sequence[str] = (),
    add_prefix: str = "",
    cuts: Mapping[str, int] | None = None,
) -> str:
    """Convert a checkpoint to a checkpoint directory that any world size, stage and offload resumes from.

    Warnings name content that cannot be converted, and files without checksums.

    Args:
        source: a checkpoint directory or file of any supported format, or its URL; see ``open_source``. What is at a
            URL is copied into a temporary folder first, unless it is a directory of lt_zero.
        out: the directory to create, or its URL.
        tag: of a DeepSpeed directory; default: the one in its file ``latest``.
        progress: show the progress on stderr.
        inert: as for ``open_source``.
        add_prefix: prefix that all names of parameters and buffers get, such as ``model.``, if a LightningModule has
            the saved model as its attribute ``model``.
        cuts: as for ``open_source``.

    Returns:
        The directory.

    Raises:
        ValueError: ``add_prefix`` does not end with a dot.
        CheckpointError: the source is damaged or of an unknown format, or ``out`` exists already or cannot be written;
            no partial directory is left.
    """
    if add_prefix and not add_prefix.endswith("."):
        raise ValueError(
            f"add_prefix={add_prefix!r} does not end with a dot, as the path of a module does: {add_prefix}."
        )
    path = plain_path(source)
    target = _target(path, plain_path(out))
    with local_copy(path, tag, progress) as copy:
        opened = open_source(copy, tag, inert=inert, cuts=cuts)
        _convert(opened, path if is_url(path) else os.path.abspath(path), target, progress, add_prefix)
    return target


def _convert(source: CheckpointSource, path: str, target: str, progress: bool, add_prefix: str) -> None:
    """Verify an open checkpoint, and write the directory ``target``. ``path``: of the source, for messages."""
    specs = [spec for name, spec in source.weights.items() if name not in source.aliases]
    for saved in source.optimizers:
        specs += [value for entry in saved.state.values() for value in entry.values() if isinstance(value, Spec)]
    if not is_url(target):
        check_space(Path(target).parent, sum(spec.nbytes + _PER_TENSOR for spec in specs), "import", "")
    with progress_bar(f"Checking {path}", rank=0, shown=progress):
        unchecked = source.verify() if isinstance(source, Archive | ForeignSource) else None
    if isinstance(unchecked, list) and unchecked:
        more = f" and {len(unchecked) - _SHOWN} more" if len(unchecked) > _SHOWN else ""
        warn(f"{', '.join(unchecked[:_SHOWN])}{more}: without checksums, so damaged values cannot be detected.")
    world = World(None, torch.device("cpu"))
    with progress_bar(f"Importing {os.path.basename(target)}", rank=0, in_bytes=True, shown=progress) as work:
        work.total = sum(spec.nbytes for spec in specs)
        content = _content(source, target, path, world, add_prefix)
        place = PendingDirectory.make(target)
        try:
            write(content, place, world, None, tick=work.advance)
        except BaseException:
            place.discard()
            raise


def _target(source: str | os.PathLike[str], out: str) -> str:
    """The absolute path of the directory to create, which must not exist, unless empty, nor lie inside the source."""
    if is_url(out):
        target, is_taken = out.rstrip("/"), file_system(out).exists(out)
    else:
        target = os.path.realpath(out)
        is_taken = os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target))
    if is_taken:
        raise CheckpointError(f"{target} exists already. Name another path, or remove it.")
    if not is_url(target) and not is_url(source) and Path(os.path.realpath(found_at(source))) in Path(target).parents:
        raise CheckpointError(f"{target} would be in the checkpoint {source} itself. Name another path.")
    return target


def _content(source: CheckpointSource, target: str, path: str, world: World, prefix: str) -> Bundle:
    """The content of the directory ``target``, with tensors that are read from the source at ``path``."""
    checkpoint = _prefixed(as_lightning(source), prefix)
    own = checkpoint.pop(LT_ZERO)
    saved = source.meta.get(LT_ZERO, {}) if isinstance(source, Archive) else {}
    resumable = bool(source.optimizers) or hasattr(source, "steps")
    if "loops" not in checkpoint and resumable:
        _begin_epoch(source, checkpoint, target)
    states = checkpoint.get("optimizer_states", [])
    names = [[list(group["params"]) for group in state["param_groups"]] for state in states]
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [number_states(state, names[i], i) for i, state in enumerate(states)]
    made: dict[int, Fragment] = {}  # tied tensors share one

    def fragment(_: Sequence[Any], value: Tensor) -> Tensor:
        if isinstance(value, LazyTensor) and id(value) not in made:
            made[id(value)] = _fragment(value)
        return made.get(id(value), value)

    # Convert all mappings: averaged weights are in an OrderedDict.
    checkpoint, rest = to_plain(checkpoint, fragment)
    restore(checkpoint, rest)
    checkpoint[LT_ZERO] = {"hparams": own["hparams"], "foreign": any(state.get("foreign") for state in states)}
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run = {"imported_from": path, "ranks": 1, "created": created, "torch": str(torch.__version__)}
    return bundle(checkpoint, names, world, run, saved.get("config", {}), own["frozen_left_out"])


def _prefixed(checkpoint: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A copy of a checkpoint dictionary with ``prefix`` before all names of parameters and buffers."""
    made = with_names_by(lambda name: prefix + name, checkpoint)
    if FABRIC in made:  # Fabric removes the prefix of a module
        parts = {kind: {k: prefix + own for k, own in made[FABRIC][kind].items()} for kind in ("modules", "optimizers")}
        made[FABRIC] = {**made[FABRIC], **parts}
    return made


def _fragment(lazy: LazyTensor) -> Fragment:
    """A fragment that reads the tensor when it is written, and frees it before the next one."""
    kept: list[Tensor] = []

    def read() -> Tensor:
        if not kept:
            kept.append(lazy.elements(0, lazy.numel()))
            if kept[0].dtype != lazy.dtype or kept[0].numel() != lazy.numel():
                raise CheckpointError(
                    f"A tensor was read as {kept[0].numel()} elements of {kept[0].dtype}, but the checkpoint declares "
                    f"{tuple(lazy.shape)} of {lazy.dtype}: it is damaged. Import another copy."
                )
        return kept[0]

    return Fragment(read, tuple(lazy.shape), 0, lazy.numel(), lazy.dtype, kept.clear)


def _begin_epoch(source: CheckpointSource, checkpoint: dict[str, Any], target: str) -> None:
    """Add loops at the beginning of an epoch to a state that Lightning did not save, and the loss scale's key."""
    if scale := loss_scale(checkpoint):
        checkpoint.setdefault("ZeroPrecision", scale)
    found: list[Any] = [state.get("step") for saved in source.optimizers for state in saved.state.values()]
    with damage("The optimizers' number of steps"):
        counted = [int(n) for n in found if (n.numel() == 1 if isinstance(n, Tensor) else isinstance(n, (int, float)))]
    steps: int = getattr(source, "steps", checkpoint.get("global_step") or max(counted, default=0))
    checkpoint.update(_beginning_of_epoch(checkpoint, steps))
    schedules = "the saved states of schedulers" if checkpoint.setdefault("lr_schedulers", []) else "new schedulers"
    warn(
        f"The state was not saved by Lightning: a run that resumes from {target} continues at step {steps}, at the "
        f"beginning of epoch {checkpoint['epoch']}, with {schedules}.",
    )


def _beginning_of_epoch(meta: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """``global_step``, ``epoch`` and ``loops`` for a state that Lightning did not save: at the beginning of the epoch
    that ``meta`` names (else the first one), after ``steps`` optimizer steps."""
    epoch = meta.get("epoch")
    epoch = epoch if isinstance(epoch, int) and epoch >= 0 else 0
    done = {"total": {"ready": steps, "completed": steps}, "current": {"ready": 0, "completed": 0}}
    zeroed = {name: {**count, "started": count["ready"]} for name, count in done.items()}
    counts = dict.fromkeys(("ready", "started", "processed", "completed"), epoch)
    fit = {
        "epoch_progress": {"total": counts, "current": dict(counts)},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": done, "zero_grad": zeroed}},
        "epoch_loop.manual_optimization.optim_step_progress": done,
    }
    return {"epoch": epoch, "global_step": steps, "loops": {"fit_loop": fit}}
