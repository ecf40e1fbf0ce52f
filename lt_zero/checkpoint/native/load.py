"""A saved training state as Lightning expects a checkpoint: nothing is read until somebody needs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.collect import parameter_names
from lt_zero.checkpoint.native.plain import where
from lt_zero.checkpoint.native.resuming import lightning_meta, settings_here
from lt_zero.checkpoint.native.save import KEY, REFERENCE
from lt_zero.checkpoint.native.saved import saved_state, saved_weights
from lt_zero.checkpoint.source import Source
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.engine import Engine
from lt_zero.engine.lazy_tensor import LazyTensor

_VERSION = "pytorch-lightning_version"


def as_lightning(source: Source, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint that Lightning saved, with lazy tensors; optimizer states are keyed by names of parameters.

    Args:
        source: an open checkpoint.
        weights_only: False also unpickles what has no plain form: only for a checkpoint that is trusted.
    """
    ours = isinstance(source, Archive)
    meta = _whole_meta(source, weights_only) if isinstance(source, Archive) else lightning_meta(source)
    own = meta.pop(KEY, {})
    meta[KEY] = {
        "frozen_left_out": own.get("frozen_left_out", getattr(source, "left_out", [])),
        "hparams": own.get("hparams", ""),
        "path": str(getattr(source, "folder", getattr(source, "path", ""))),
    }
    meta.setdefault(_VERSION, "2.5.0")
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
                f"{archive.path} has entries without a plain form, which are left out: {places}. Pass "
                "weights_only=False if you trust the checkpoint and need them.",
                stacklevel=2,
            )
    found = _resolve(archive, meta)
    assert isinstance(found, dict)
    return found


def _resolve(archive: Archive, value: Any) -> Any:
    """Put lazy tensors where references stand for them."""
    if isinstance(value, Mapping):
        if set(value) == {REFERENCE}:
            return _by_full_name(archive, value[REFERENCE])
        return type(value)((k, _resolve(archive, v)) for k, v in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_resolve(archive, v) for v in value)
    return value


def _by_full_name(archive: Archive, name: str) -> Tensor:
    entry = archive.manifest.tensors[name]
    return LazyTensor(entry.shape, entry.dtype, lambda lo, hi: archive.elements(name, lo, hi))


def number_states(
    saved: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    number: int,
    frozen: Collection[str] = (),
) -> dict[str, Any]:
    """An optimizer's saved state, keyed by names, as torch wants it: keyed by numbers.

    Args:
        saved: groups and states by name.
        names: of the running optimizer's parameters, by group.
        number: of the optimizer, for messages.
        frozen: names of parameters that need no gradient here; those without a saved state may be here or there only.

    Raises:
        CheckpointError: it has other parameters, or other groups of them.
    """
    groups = saved["param_groups"]
    idle = set(frozen) - set(saved["state"])
    mine, theirs = [set(group) - idle for group in names], [set(group["params"]) - idle for group in groups]
    if mine != theirs:
        new, gone = set().union(*mine) - set().union(*theirs), set().union(*theirs) - set().union(*mine)
        what = (
            f"only here: {', '.join(sorted(new)[:5]) or 'none'}; only there: {', '.join(sorted(gone)[:5]) or 'none'}"
            if new or gone
            else f"here in groups of {[len(g) for g in mine]} parameters, there of {[len(g) for g in theirs]}"
        )
        raise CheckpointError(
            f"Optimizer {number} has other parameters than the checkpoint's ({what}). Make configure_optimizers and "
            "requires_grad what they were, or set checkpoint.load_optimizer_states=false to start with a fresh one."
        )
    flat = [name for group in names for name in group]
    numbers = {name: i for i, name in enumerate(flat)}
    if strangers := sorted(set(saved["state"]) - set(numbers)):
        raise CheckpointError(
            f"The checkpoint's optimizer {number} has states of {', '.join(strangers[:5])}, which are in none of its "
            "groups: it is damaged. Take another checkpoint, or set checkpoint.load_optimizer_states=false."
        )
    return {
        "state": {numbers[name]: state for name, state in saved["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in mine_in_order]}
            for group, mine_in_order in zip(groups, names, strict=True)
        ],
    }


def fitting_state(
    saved: Mapping[str, Any], optimizer: Optimizer, engine: Engine, number: int, tell: bool
) -> dict[str, Any]:
    """A saved state of ``as_lightning`` for the running optimizer, as torch wants it.

    Args:
        saved: groups and states by name.
        optimizer: the running one.
        engine: of its parameters.
        number: of the optimizer, for messages.
        tell: warn of what is left out.

    Raises:
        CheckpointError: it has other parameters, or other groups of them.
    """
    if saved.get("foreign"):
        groups, dropped = settings_here(saved["param_groups"], optimizer.param_groups)
        saved = {**saved, "param_groups": groups}
        if dropped and tell:
            warnings.warn(
                f"Settings of the checkpoint's optimizer {number} that the one here does not have are left out: "
                f"{', '.join(dropped)}.",
                stacklevel=2,
            )
    frozen = [name for name, p in engine.root.named_parameters() if not p.requires_grad]
    return number_states(saved, parameter_names(optimizer, engine), number, frozen)


def by_name(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's saved state is keyed by names."""
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def rounded_weights(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with the engine's parameters rounded to the dtype they are computed in."""
    every = engine.root.named_parameters(remove_duplicate=False)  # a tied name would bring the exact values back
    dtypes = {name: engine.owner[id(p)][0].dtype for name, p in every if id(p) in engine.owner}

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
    """The state dict; ``reach`` is told the number (from 1) of each tensor that is read from a checkpoint."""

    def counting(lazy: LazyTensor, number: int) -> LazyTensor:
        def read(lo: int, hi: int) -> Tensor:
            reach(number)
            return lazy.elements(lo, hi)

        return LazyTensor(tuple(lazy.shape), lazy.dtype, read)

    numbered = enumerate(state.items(), 1)
    return {key: counting(v, number) if isinstance(v, LazyTensor) else v for number, (key, v) in numbered}


def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool, left_out: Sequence[str] = ()) -> None:
    """``module.load_state_dict``, where exactly ``left_out`` may be missing although ``strict``.

    Raises:
        RuntimeError: as torch raises it.
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
