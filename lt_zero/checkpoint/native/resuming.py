"""Converts what other formats save beside tensors for resuming: loops, schedulers, options of optimizers.

Note [Options of parameter groups]
    torch's ``load_state_dict`` replaces all options of a group by the saved ones. Those of another class (DeepSpeed's
    FusedAdam) have other keys, and may lack some that torch's optimizer requires. So saved options are only loaded if
    the running group has them too, except those that select an implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lt_zero.checkpoint.formats.reading import VERSION
from lt_zero.checkpoint.native.save import KEY
from lt_zero.checkpoint.source import Source
from lt_zero.common.errors import CheckpointError

_COMPUTED = ("foreach", "fused", "capturable", "differentiable")
_SCALERS = ("FSDPPrecision", "FSDPMixedPrecision")  # Lightning's plugins, which save the scaler under their names


def lightning_meta(source: Source) -> dict[str, Any]:
    """The ``meta`` of another format, without entries that Lightning would mistake for its own."""
    meta = {k: v for k, v in source.meta.items() if k not in ("state_dict", "optimizer_states")}
    meta = {k: v for k, v in meta.items() if not str(k).startswith(f"{KEY}_")}  # they depend on the ranks of the run
    if not isinstance(meta.get(KEY, {}), dict):
        del meta[KEY]
    if VERSION not in meta:  # a client_state that a user of DeepSpeed passed to save_checkpoint
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
    """``global_step``, ``epoch`` and ``loops`` at the beginning of an epoch, for a state that Lightning did not save.

    Args:
        meta: of the source; the epoch is its ``epoch``, else 0.
        steps: completed optimizer steps.
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
    """Check that ``trainer.fit`` can resume from a checkpoint directory.

    Args:
        checkpoint: the dictionary for Lightning.
        optimizers: whether optimizer states are loaded.

    Raises:
        CheckpointError: something is missing; names the remedy.
    """
    path = checkpoint.get(KEY, {}).get("path")
    if path is None:
        return  # a file, which Lightning checks
    if optimizers and "optimizer_states" not in checkpoint:
        raise CheckpointError(
            f"{path} has no optimizer states, which trainer.fit resumes from. Set checkpoint.load_module_only=true to "
            "load the weights and start a new run, or checkpoint.load_optimizer_states=false to continue with new "
            "optimizers."
        )
    loops = checkpoint.get("loops")
    if not isinstance(loops, dict) or "fit_loop" not in loops:
        raise CheckpointError(
            f"{path} was not saved by Lightning: it has no loops, which trainer.fit resumes from. Set "
            "checkpoint.load_module_only=true to load the weights and start a new run, or run `lt-zero import` on it "
            "and resume from the result, with its optimizer states and steps, at the beginning of an epoch."
        )


def settings_here(
    saved: Sequence[Mapping[str, Any]], running: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The options of each group, and saved options that are left out. See Note [Options of parameter groups].

    Args:
        saved: groups of an optimizer in another format.
        running: ``param_groups`` of the running optimizer. If there are fewer, further saved groups are unchanged.
    """
    groups: list[dict[str, Any]] = []
    dropped: dict[str, None] = {}
    for group, own in zip_longest(saved, running[: len(saved)]):
        if own is None:
            groups.append(dict(group))
            continue
        rest = {key: value for key, value in group.items() if key not in _COMPUTED}
        taken = {key: value for key, value in rest.items() if key in own or key in ("params", "initial_lr")}
        groups.append({**own, **taken})
        for key, value in rest.items():
            if key not in taken and (key, value) != ("bias_correction", True):  # torch's Adam always corrects
                dropped[f"{key}={value!r}"] = None
    return groups, list(dropped)
