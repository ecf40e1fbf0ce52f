"""What others saved beside tensors, as a run that is resumed needs it: loops, schedules, settings of optimizers.

Note [Settings of groups]
    torch's ``load_state_dict`` replaces all settings of a group by the saved ones. Those of another class (DeepSpeed's
    FusedAdam) have other keys, and may lack some without which torch's optimizer fails. So what the running group knows
    comes from the file, but for how a step is computed; the rest stays as it is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lt_zero.checkpoint.formats.foreign import VERSION
from lt_zero.checkpoint.native.save import KEY
from lt_zero.checkpoint.source import Source
from lt_zero.common.errors import CheckpointError

_COMPUTED = ("foreach", "fused", "capturable", "differentiable")
_SCALERS = ("FSDPPrecision", "FSDPMixedPrecision")  # Lightning saves the same under each plugin's name


def lightning_meta(source: Source) -> dict[str, Any]:
    """The ``meta`` of a source that others wrote, without what Lightning would take for its own and is not."""
    meta = {k: v for k, v in source.meta.items() if k not in ("state_dict", "optimizer_states")}
    meta = {k: v for k, v in meta.items() if not str(k).startswith(f"{KEY}_")}  # of a run of ours, on its ranks
    if not isinstance(meta.get(KEY, {}), dict):
        del meta[KEY]
    if VERSION not in meta:  # what a user of DeepSpeed gave to save_checkpoint
        for key in ("loops", "callbacks"):
            meta.pop(key, None)
    for key in _SCALERS:
        state = meta.pop(key, None)
        if isinstance(state, dict) and "scale" in state:
            meta.setdefault("MixedPrecision", state)
    for key, kind in (("lr_schedulers", list), ("callbacks", dict), ("hyper_parameters", dict)):
        if key in meta and not isinstance(meta[key], kind):
            del meta[key]
    return meta


def beginning_of_epoch(meta: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """``global_step``, ``epoch`` and ``loops`` for a state that Lightning did not save: an epoch is about to begin.

    Args:
        meta: of the source; the epoch is its ``epoch``, else 0.
        steps: of optimizers that were made so far.
    """
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


def require_training_state(checkpoint: Mapping[str, Any], optimizers: bool) -> None:
    """See that ``trainer.fit`` can go on from what came out of a checkpoint directory.

    Args:
        checkpoint: as Lightning gets it.
        optimizers: whether their states are wanted.

    Raises:
        CheckpointError: it cannot; says what to do instead.
    """
    path = checkpoint.get(KEY, {}).get("path")
    if path is None:
        return  # a file: Lightning looks at it
    if optimizers and "optimizer_states" not in checkpoint:
        raise CheckpointError(
            f"{path} has no optimizer states, and trainer.fit would go on with them. Set "
            "checkpoint.load_module_only=true to take the weights and start anew, or "
            "checkpoint.load_optimizer_states=false to go on with fresh optimizers."
        )
    loops = checkpoint.get("loops")
    if not isinstance(loops, dict) or "fit_loop" not in loops:
        raise CheckpointError(
            f"{path} was not saved by Lightning: it has no loops, which tell where trainer.fit is to go on. Set "
            "checkpoint.load_module_only=true to take the weights and start anew, or run `lt-zero import` on it and "
            "resume from the result, with its optimizer states and number of steps, at the beginning of an epoch."
        )


def settings_here(
    saved: Sequence[Mapping[str, Any]], running: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The settings of each group, and what of the saved ones was left out. See Note [Settings of groups].

    Args:
        saved: groups of an optimizer that others saved.
        running: ``param_groups`` of the one here. Where there are fewer, saved groups stay as they are.
    """
    groups: list[dict[str, Any]] = []
    dropped: dict[str, None] = {}
    for theirs, own in zip_longest(saved, running[: len(saved)]):
        if own is None:
            groups.append(dict(theirs))
            continue
        rest = {key: value for key, value in theirs.items() if key not in _COMPUTED}
        taken = {key: value for key, value in rest.items() if key in own or key in ("params", "initial_lr")}
        groups.append({**own, **taken})
        for key, value in rest.items():
            if key not in taken and (key, value) != ("bias_correction", True):  # torch's Adam always corrects
                dropped[f"{key}={value!r}"] = None
    return groups, list(dropped)
