"""Converts an open checkpoint to Lightning's dictionary, with tensors that are read on demand.

Note [Options of parameter groups]
    torch's ``load_state_dict`` replaces all options of a group by the saved ones. Those of another class (DeepSpeed's
    FusedAdam) have other keys, and may lack some that torch's optimizer requires. So saved options are only loaded if
    the running group has them too, except those that select an implementation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lt_zero.checkpoint.formats.reading import VERSION
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.pieces import parameter_names
from lt_zero.checkpoint.native.plain import where
from lt_zero.checkpoint.native.save import KEY, REFERENCE
from lt_zero.checkpoint.source import Source, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.engine import Engine
from lt_zero.engine.lazy_tensor import LazyTensor, Reader

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


def saved_weights(source: Source) -> dict[str, Tensor]:
    """The state dict of a source with lazy tensors; tied names share an object."""
    weights: dict[str, Tensor] = {}
    for name, spec in source.weights.items():
        first = source.aliases.get(name, name)
        lazy = weights.get(first)
        weights[name] = lazy if lazy is not None else LazyTensor(spec.shape, spec.dtype, _reader(source, "read", first))
    return weights


def saved_state(source: Source, optimizer: int) -> dict[str, dict[str, Any]]:
    """The states of one optimizer of a source, by parameter name; element-wise ones are lazy."""
    states: dict[str, dict[str, Any]] = {}
    for name, state in source.optimizers[optimizer].state.items():
        states[name] = dict(state)
        for key, value in state.items():
            if isinstance(value, Spec):
                read = _reader(source, "read_state", optimizer, name, key)
                states[name][key] = LazyTensor(value.shape, value.dtype, read)
    return states


def _reader(source: Source, method: str, *place: Any) -> Reader:
    """Reads elements with ``<method>_range`` if the source has it, else all with ``method``."""
    ranges = getattr(source, f"{method}_range", None)
    if ranges is not None:
        return partial(ranges, *place)
    return lambda lo, hi: getattr(source, method)(*place).reshape(-1)[lo:hi]


def as_lightning(source: Source, weights_only: bool | None = None) -> dict[str, Any]:
    """Lightning's checkpoint dictionary with lazy tensors; optimizer states are keyed by parameter name.

    Args:
        source: an open checkpoint.
        weights_only: False also unpickles values without a plain form; use it for trusted checkpoints only.
    """
    ours = isinstance(source, Archive)
    meta = _whole_meta(source, weights_only) if isinstance(source, Archive) else lightning_meta(source)
    own = meta.pop(KEY, {})
    meta[KEY] = {
        "frozen_left_out": own.get("frozen_left_out", getattr(source, "left_out", [])),
        "hparams": own.get("hparams", ""),
        "path": str(getattr(source, "folder", getattr(source, "path", ""))),
    }
    meta.setdefault(VERSION, "2.5.0")
    meta["state_dict"] = {**saved_weights(source), **own.get("extra_state", {})}
    has_optimizers = own.get("has_optimizers", False) or bool(source.optimizers)
    foreign = not ours or own.get("foreign", False)
    if has_optimizers:
        meta["optimizer_states"] = [
            {"state": saved_state(source, number), "param_groups": saved.groups, "foreign": foreign}
            for number, saved in enumerate(source.optimizers)
        ]
    return meta


def _whole_meta(archive: Archive, weights_only: bool | None) -> dict[str, Any]:
    if weights_only is False:
        meta = archive.meta_with_objects()
    else:
        meta = dict(archive.meta)
        if left := archive.left_out():
            places = ", ".join(repr(where(path)) for path in left[:5])
            warnings.warn(
                f"{archive.path} has entries without a plain form, which are left out: {places}. If you trust the "
                "checkpoint and need them, pass weights_only=False.",
                stacklevel=2,
            )
    found = _resolve(archive, meta)
    assert isinstance(found, dict)
    return found


def _resolve(archive: Archive, value: Any) -> Any:
    """Replace references by lazy tensors."""
    if isinstance(value, Mapping):
        if set(value) == {REFERENCE}:
            name = value[REFERENCE]
            entry = archive.manifest.tensors[name]
            return LazyTensor(entry.shape, entry.dtype, partial(archive.elements, name))
        return type(value)((k, _resolve(archive, v)) for k, v in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_resolve(archive, v) for v in value)
    return value


def number_states(
    saved: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    number: int,
    frozen: Collection[str] = (),
) -> dict[str, Any]:
    """Convert an optimizer's saved state from parameter names to torch's numbers.

    Args:
        saved: groups and states by name.
        names: of the running optimizer's parameters, by group.
        number: of the optimizer, for messages.
        frozen: names of frozen parameters; those without a saved state may be missing on either side.

    Raises:
        CheckpointError: the saved parameters or their groups differ from the running ones.
    """
    groups = saved["param_groups"]
    idle = set(frozen) - set(saved["state"])
    running, stored = [set(group) - idle for group in names], [set(group["params"]) - idle for group in groups]
    if running != stored:
        new, gone = set().union(*running) - set().union(*stored), set().union(*stored) - set().union(*running)
        difference = (
            f"only in the model: {', '.join(sorted(new)[:5]) or 'none'}; "
            f"only in the checkpoint: {', '.join(sorted(gone)[:5]) or 'none'}"
            if new or gone
            else f"groups of {[len(g) for g in running]} parameters, in the checkpoint of {[len(g) for g in stored]}"
        )
        raise CheckpointError(
            f"Optimizer {number} has other parameters than the checkpoint's ({difference}). Restore "
            "configure_optimizers and requires_grad, or set checkpoint.load_optimizer_states=false to start with a new "
            "optimizer."
        )
    flat = [name for group in names for name in group]
    numbers = {name: i for i, name in enumerate(flat)}
    if ungrouped := sorted(set(saved["state"]) - set(numbers)):
        raise CheckpointError(
            f"The checkpoint's optimizer {number} has states of {', '.join(ungrouped[:5])}, which are in none of its "
            "groups: it is damaged. Use another checkpoint, or set checkpoint.load_optimizer_states=false."
        )
    return {
        "state": {numbers[name]: state for name, state in saved["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in own]} for group, own in zip(groups, names, strict=True)
        ],
    }


def fitting_state(
    saved: Mapping[str, Any], optimizer: Optimizer, engine: Engine, number: int, tell: bool
) -> dict[str, Any]:
    """Convert a saved state of ``as_lightning`` to torch's form, for the running optimizer.

    Args:
        saved: groups and states by name.
        optimizer: the running optimizer.
        engine: of its parameters.
        number: of the optimizer, for messages.
        tell: warn of options that are left out.

    Raises:
        CheckpointError: the saved parameters or their groups differ from the running ones.
    """
    if saved.get("foreign"):
        groups, dropped = settings_here(saved["param_groups"], optimizer.param_groups)
        saved = {**saved, "param_groups": groups}
        if dropped and tell:
            warnings.warn(
                f"Options of the checkpoint's optimizer {number} that the running optimizer does not have are left "
                f"out: {', '.join(dropped)}.",
                stacklevel=2,
            )
    frozen = [name for name, p in engine.root.named_parameters() if not p.requires_grad]
    return number_states(saved, parameter_names(optimizer, engine), number, frozen)


def by_name(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's saved state is keyed by names."""
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def rounded_weights(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with the engine's parameters rounded to their compute dtype."""
    named = engine.root.named_parameters(remove_duplicate=False)  # a tied name would restore the exact values
    dtypes = {name: engine.owner[id(p)][0].dtype for name, p in named if id(p) in engine.owner}

    def rounding(value: Tensor, name: str) -> Tensor:
        lazy = value if isinstance(value, LazyTensor) else None
        if lazy is None:
            return value.to(dtypes[name]).to(value.dtype)
        return LazyTensor(
            tuple(lazy.shape),
            lazy.dtype,
            lambda lo, hi: lazy.elements(lo, hi).to(dtypes[name]).to(lazy.dtype),
        )

    return {name: rounding(value, name) if name in dtypes else value for name, value in state.items()}


def counted(state: Mapping[str, Any], reach: Callable[[int], object]) -> dict[str, Any]:
    """The state dict; ``reach`` is called with the number (from 1) of each tensor that is read from a checkpoint."""

    def counting(lazy: LazyTensor, number: int) -> LazyTensor:
        def read(lo: int, hi: int) -> Tensor:
            reach(number)
            return lazy.elements(lo, hi)

        return LazyTensor(tuple(lazy.shape), lazy.dtype, read)

    numbered = enumerate(state.items(), 1)
    return {key: counting(v, number) if isinstance(v, LazyTensor) else v for number, (key, v) in numbered}


def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool, left_out: Sequence[str] = ()) -> None:
    """``module.load_state_dict``; with ``strict``, exactly the names in ``left_out`` may be missing.

    Raises:
        RuntimeError: names or shapes do not match, as in torch.
    """
    if not left_out or not strict:
        module.load_state_dict(state, strict=strict)
        return
    missing, unexpected = module.load_state_dict(state, strict=False)
    expected, present = set(left_out), set(missing)
    problems = [f"Missing key(s): {', '.join(sorted(present - expected))}."] if present - expected else []
    if unexpected:
        problems.append(f"Unexpected key(s): {', '.join(sorted(unexpected))}.")
    if expected - present:
        names = ", ".join(sorted(expected - present))
        problems.append(f"Left out on purpose (save_frozen=false), but the module has no such parameter: {names}.")
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: {' '.join(problems)}")
