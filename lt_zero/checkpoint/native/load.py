"""Converts an open checkpoint to Lightning's dictionary, whose tensors are read on demand, and fits its parts to a run.

Shared by a Trainer, Fabric and a loop of one's own, which restore by training/restore.py.

Note [Options of parameter groups]
    torch's ``load_state_dict`` replaces all options of a group by the saved ones. Those of another class (DeepSpeed's
    FusedAdam) have other keys, and may lack some that torch's optimizer requires. So saved options are only loaded if
    the running group has them too, except those that select an implementation.

Note [Weights of a checkpoint]
    The state dict has the weights that are evaluated: averages, if ``EMA`` made some. The optimizers' states belong to
    the trained weights, which such a checkpoint has, too. So a run that goes on with the states goes on with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.described_keys import described_keys, unknown
from lt_zero.checkpoint.native.pieces import (
    check_form,
    names_on_all_ranks,
    on_all_ranks,
    parameter_names,
    parameter_numbers,
)
from lt_zero.checkpoint.native.plain import MISSING, dotted_path, restore
from lt_zero.checkpoint.native.rank_state import RESIDUALS
from lt_zero.checkpoint.native.save import FABRIC, LOOP, LT_ZERO, REFERENCE, TRAINED_WEIGHTS
from lt_zero.checkpoint.native.saved_file import VERSION
from lt_zero.checkpoint.source import CheckpointSource, Spec
from lt_zero.common import plain_names
from lt_zero.common.boxes import Box
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import CheckpointError
from lt_zero.common.users_code import warn
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.engine.lazy_tensor import LazyTensor, elements_of

# Options of groups for which infinity makes no sense.
_FINITE = ("lr", "initial_lr", "betas", "eps", "momentum", "dampening", "weight_decay", "alpha", "lr_decay")
_COMPUTED = ("foreach", "fused", "capturable", "differentiable")
NEW = "set checkpoint.load_optimizer_states=false to start with a new optimizer."
NEW_SCHEDULE = "set checkpoint.load_lr_scheduler_states=false"  # errors say what for
# What else of a checkpoint is kept by the names of parameters: averaged runs' trained weights, what ranks owe.
_BY_NAME = {TRAINED_WEIGHTS: ("weights",), RESIDUALS: ("units", "worker", "server", "counts")}
_SCALERS = ("FSDPPrecision", "FSDPMixedPrecision")  # Lightning's plugins, which save the scaler under their names


def lightning_meta(source: CheckpointSource) -> dict[str, Any]:
    """The ``meta`` of another format, without entries that Lightning would mistake for its own."""
    meta = {k: v for k, v in source.meta.items() if k not in ("state_dict", "optimizer_states")}
    meta = {
        k: v for k, v in meta.items() if not str(k).startswith(f"{LT_ZERO}_")
    }  # they depend on the ranks of the run
    if not isinstance(meta.get(LT_ZERO, {}), dict):
        del meta[LT_ZERO]
    if VERSION not in meta:  # a client_state that a user of DeepSpeed passed to save_checkpoint
        for key in ("loops", "callbacks"):
            meta.pop(key, None)
        if (loop := getattr(source, LOOP, None)) is not None:
            meta[LOOP] = loop
    scalers = [meta.pop(key, None) for key in _SCALERS]
    for state in scalers:
        if isinstance(state, dict) and "scale" in state:
            meta.setdefault("MixedPrecision", state)
    for key, kind in (("lr_schedulers", list), ("callbacks", dict), ("hyper_parameters", dict)):
        if key in meta and not isinstance(meta[key], kind):
            del meta[key]
    return meta


def require_training_state(checkpoint: Mapping[str, Any], optimizers: bool) -> None:
    """Check that ``trainer.fit`` can resume from a checkpoint directory. ``optimizers``: their states are loaded.

    Raises:
        CheckpointError: something is missing; names the remedy.
    """
    path = checkpoint.get(LT_ZERO, {}).get("path")
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

    Saved groups beyond those of the running optimizer are unchanged.
    """
    groups: list[dict[str, Any]] = [dict(group) for group in saved]
    dropped: dict[str, None] = {}
    for i, (group, own) in enumerate(zip(saved, running, strict=False)):
        groups[i] = dict(own)
        for key, value in group.items():
            if key in _COMPUTED:
                continue
            if key in own or key in ("params", "initial_lr"):
                groups[i][key] = value
            elif (key, value) != ("bias_correction", True):  # torch's Adam always corrects
                dropped[f"{key}={value!r}"] = None
    return groups, list(dropped)


def as_lightning(source: CheckpointSource, weights_only: bool | None = None) -> dict[str, Any]:
    """Lightning's checkpoint dictionary with lazy tensors; optimizer states are keyed by parameter name.

    Args:
        source: an open checkpoint.
        weights_only: False also unpickles values without a plain form; use it for trusted checkpoints only.
    """
    archive = source if isinstance(source, Archive) else None
    meta = _whole_meta(archive, weights_only) if archive is not None else lightning_meta(source)
    own = meta.pop(LT_ZERO, {})
    meta[LT_ZERO] = {
        "frozen_left_out": own.get("frozen_left_out", getattr(source, "left_out", [])),
        "hparams": own.get("hparams", ""),
        "path": str(getattr(source, "folder", getattr(source, "path", ""))),
    }
    meta.setdefault(VERSION, "2.5.0")

    def lazy(spec: Spec, full: str, read: Callable[..., Tensor], *place: Any) -> LazyTensor:
        if archive is not None:  # which reads any range
            return archive.lazy(full)
        return LazyTensor(spec.shape, spec.dtype, lambda lo, hi, box: elements_of(read(*place), lo, hi, box))

    weights: dict[str, Any] = {}
    for name, spec in source.weights.items():  # tied names share an object
        first = source.aliases.get(name, name)
        weights[name] = weights[first] if first in weights else lazy(spec, f"model.{first}", source.read, first)
    meta["state_dict"] = {**weights, **own.get("extra_state", {})}
    if own.get("has_optimizers", False) or source.optimizers:
        meta["optimizer_states"] = []
        for i, saved in enumerate(source.optimizers):
            states: dict[str, dict[str, Any]] = {name: dict(state) for name, state in saved.state.items()}
            for name, key, value in [(n, k, v) for n, state in states.items() for k, v in state.items()]:
                if isinstance(value, Spec):
                    full = f"optimizer_{i}.state.{name}.{key}"
                    states[name][key] = lazy(value, full, source.read_state, i, name, key)
            foreign = archive is None or own.get("foreign", False)
            meta["optimizer_states"].append({"state": states, "param_groups": saved.groups, "foreign": foreign})
    return with_names_by(clean_name, meta) if any(clean_name(name) != name for name in weights) else meta


def with_names_by(rename: Callable[[str], str], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the dictionary of ``as_lightning`` with other names of all parameters and buffers."""

    def named(values: Mapping[str, Any]) -> dict[str, Any]:
        return {rename(name): value for name, value in values.items()}

    made = {**checkpoint, "state_dict": named(checkpoint["state_dict"]), LT_ZERO: dict(checkpoint[LT_ZERO])}
    made[LT_ZERO]["frozen_left_out"] = [rename(name) for name in made[LT_ZERO]["frozen_left_out"]]
    if "optimizer_states" in checkpoint:
        made["optimizer_states"] = [with_names(saved, rename) for saved in checkpoint["optimizer_states"]]
    for key, kinds in _BY_NAME.items():
        if isinstance(made.get(key), Mapping):
            made[key] = {**made[key], **{kind: named(made[key][kind]) for kind in kinds if kind in made[key]}}
    return made


def _whole_meta(archive: Archive, weights_only: bool | None) -> dict[str, Any]:
    """``meta`` with lazy tensors for references, and with values without a plain form if they may be unpickled."""

    made: dict[int, Any] = {}  # by id: copies of one container, apart, could be huge

    def resolve(value: Any) -> Any:
        if type(value) not in (list, tuple) and not isinstance(value, Mapping):
            return value
        if id(value) not in made:
            if isinstance(value, Mapping):
                refers = set(value) == {REFERENCE}
                items = ((k, resolve(v)) for k, v in value.items())
                made[id(value)] = archive.lazy(value[REFERENCE]) if refers else type(value)(items)  # type: ignore[call-arg]
            else:
                made[id(value)] = type(value)(resolve(v) for v in value)
        return made[id(value)]

    meta = dict(archive.meta)
    own = meta.get(LT_ZERO, {})
    keys = own.get("keys", [])
    left = [dotted_path(path) for path in own.get("left_out", [])]
    left += unknown(keys) if keys else []
    if weights_only is False:
        restore(meta, described_keys(keys, trusted=True))
        restore(meta, archive.objects())
    elif left:
        places = ", ".join(map(repr, left[:5]))
        warn(
            f"{archive.path} has entries without a plain form, which are left out: {places}. If you trust the "
            "checkpoint and need them, pass weights_only=False.",
        )
    found: dict[str, Any] = resolve(meta)
    return found


def number_states(
    saved: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    number: int,
    frozen: Collection[str] = (),
    remedy: str = NEW,
    every: Sequence[Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Convert an optimizer's saved state from parameter names to torch's numbers.

    Args:
        names: of the running optimizer's parameters, by group.
        every: those of all ranks, which may have other modules; default: ``names``.
        number: of the optimizer, for messages.
        frozen: names of frozen parameters; those without a saved state may be missing on either side.
        remedy: how to go on without the saved state, for messages.

    Raises:
        CheckpointError: the saved parameters or their groups differ from the running ones.
    """
    groups = saved["param_groups"]
    states = saved["state"]
    every = names if every is None else every
    idle = set(frozen) - set(states)
    running = [set(group) - idle for group in every]
    stored = [set(group["params"]) - idle for group in groups]
    if running != stored:
        new = set().union(*running) - set().union(*stored)
        gone = set().union(*stored) - set().union(*running)
        only = [", ".join(sorted(found)[:5]) or "none" for found in (new, gone)]
        difference = (
            f"only in the model: {only[0]}; only in the checkpoint: {only[1]}"
            if new or gone
            else f"groups of {[len(g) for g in running]} parameters, in the checkpoint of {[len(g) for g in stored]}"
        )
        raise CheckpointError(
            f"Optimizer {number} has other parameters than the checkpoint's ({difference}). Restore the parameter "
            f"groups (of configure_optimizers, under a Trainer) and requires_grad, or {remedy}"
        )
    numbers = {name: i for i, name in enumerate(chain.from_iterable(names))}
    if ungrouped := sorted(set(states) - set(chain.from_iterable(every))):
        raise CheckpointError(
            f"The checkpoint's optimizer {number} has states of {', '.join(ungrouped[:5])}, which are in none of its "
            f"groups: it is damaged. Use another checkpoint, or {remedy}"
        )
    numbered = [{**group, "params": [numbers[n] for n in own]} for group, own in zip(groups, names, strict=False)]
    here = {numbers[name]: state for name, state in states.items() if name in numbers}
    return {"state": here, "param_groups": numbered}


class OnAllRanks(NamedTuple):
    """Names of an optimizer's parameters on all ranks, by group, and those of all frozen parameters."""

    groups: list[list[str]]
    frozen: list[str]

    @classmethod
    def of(cls, optimizer: Optimizer, engine: Engine) -> OnAllRanks:
        """Collective if ranks have other modules."""
        frozen = [n for n, p in plain_names.named_parameters(engine.root, remove_duplicate=True) if not p.requires_grad]
        return cls(names_on_all_ranks(optimizer, engine), on_all_ranks(engine, frozen, "frozen parameters"))


def fitting_state(
    saved: Any, optimizer: Optimizer, engine: Engine, names: OnAllRanks, number: int, remedy: str = NEW
) -> Mapping[str, Any]:
    """Convert a saved state, by name as of ``as_lightning`` or by the numbers of the whole model, to torch's form.

    One with the numbers of this rank's module is returned unchanged.

    Args:
        optimizer: the running one; ``names``: of its parameters; ``number``: its number, for messages.
        remedy: how to go on without the saved state, for messages.

    Raises:
        CheckpointError: it is no state; the saved parameters or their groups differ from the running ones; or an option
            of its groups or a counter of steps is not finite.
    """
    check_form(saved, f"What the checkpoint has for optimizer {number}")
    if not isinstance(saved, Mapping) or not saved:
        return {}
    _check_numbers(saved, number, remedy)
    own = parameter_names(optimizer, engine)
    if not any(isinstance(name, str) for group in saved["param_groups"] for name in group["params"]):
        whole = list(chain.from_iterable(names.groups))
        numbers = parameter_numbers(saved)
        if len(numbers) != len(whole) or len(numbers) == sum(map(len, own)):
            return saved
        saved = with_names(saved, dict(zip(numbers, whole, strict=True)).__getitem__)
    if saved.get("foreign"):
        groups, dropped = settings_here(in_order(saved["param_groups"], names.groups), optimizer.param_groups)
        saved = {**saved, "param_groups": groups}
        if dropped and engine.world.rank == 0:
            warn(
                f"Options of the checkpoint's optimizer {number} that the running optimizer does not have are left "
                f"out: {', '.join(dropped)}.",
            )
    groups = [dict(group) for group in saved["param_groups"]]
    for group, running in zip(groups, optimizer.param_groups, strict=False):
        group |= {key: running[key] for key, value in group.items() if _is_missing(value) and key in running}
    saved = {**saved, "param_groups": groups}
    return number_states(saved, own, number, names.frozen, remedy, names.groups)


def in_order(groups: Sequence[Mapping[str, Any]], running: Sequence[Sequence[str]]) -> Sequence[Mapping[str, Any]]:
    """Groups of another format, whose order it may not tell, in that of the running ones if they have their names."""
    order = {frozenset(names): number for number, names in enumerate(running)}
    saved = [frozenset(group["params"]) for group in groups]
    if len(order) != len(running) or sorted(order.get(names, -1) for names in saved) != sorted(order.values()):
        return groups
    return [groups[saved.index(names)] for names in order]


def with_names(saved: Mapping[str, Any], rename: Callable[[Any], Any]) -> dict[str, Any]:
    """An optimizer's saved state with other names, or numbers, of its parameters."""
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in saved["param_groups"]]
    return {**saved, "state": {rename(name): state for name, state in saved["state"].items()}, "param_groups": groups}


def check_schedule(saved: Any, running: Any, path: str, remedy: str = NEW_SCHEDULE) -> None:
    """Check that a schedule can take a saved state: torch's accept any, and go on from where they are.

    ``path``: of the checkpoint, with which messages begin; ``remedy``: how to go on without the saved state, for them.

    Raises:
        CheckpointError: the state is of DeepSpeed's own schedules, and the running one is not; or it has a rate that is
            NaN or infinite.
    """
    for key in ("base_lrs", "_last_lr") if isinstance(saved, Mapping) else ():
        rates = saved.get(key)
        for rate in rates if isinstance(rates, (tuple, list)) else ():
            remedies = f"{remedy} to begin a new schedule, or use another checkpoint."
            _refuse_broken(rate, True, f"{key}={rates!r} in a schedule", remedies, path)
    of_deepspeed = isinstance(saved, Mapping) and "last_batch_iteration" in saved and "last_epoch" not in saved
    if of_deepspeed and not hasattr(running, "last_batch_iteration"):
        raise CheckpointError(
            f"{path} has a schedule of DeepSpeed at iteration {saved['last_batch_iteration']}, which "
            f"{type(running).__name__} cannot take. Use DeepSpeed's schedule (the block `scheduler` of its "
            f"configuration, or lt_zero's class of that name), or {remedy} to begin a new one."
        )


def _is_missing(value: Any) -> bool:
    """True if a value had no plain form, and was not unpickled."""
    return isinstance(value, str) and value == MISSING


def rounded_weights(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with the engine's parameters rounded to their compute dtype."""

    def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
        if not isinstance(value, LazyTensor):
            return value.to(dtype).to(value.dtype)
        exact = value.dtype
        return LazyTensor(tuple(value.shape), exact, lambda *part: value.elements(*part).to(dtype).to(exact))

    made = dict(state)
    # Include tied names: one that is left out would restore the exact values.
    parameters = dict(plain_names.named_parameters(engine.root))
    for name, value in state.items():
        if (p := parameters.get(clean_name(name))) is not None and id(p) in engine.owner:
            made[name] = rounded(value, engine.owner[id(p)][0].dtype)
    return made


def counted(state: Mapping[str, Any], reach: Callable[[int], object]) -> dict[str, Any]:
    """The state dict; ``reach`` is called with the number (from 1) of each tensor that is read from a checkpoint."""

    def read(lazy: LazyTensor, number: int, lo: int, hi: int, box: Box) -> Tensor:
        reach(number)
        return lazy.elements(lo, hi, box)

    made = dict(state)
    for number, (name, value) in enumerate(state.items(), 1):
        if isinstance(value, LazyTensor):
            made[name] = LazyTensor(tuple(value.shape), value.dtype, partial(read, value, number))
    return made


def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool, left_out: Sequence[str] = ()) -> None:
    """``module.load_state_dict``; with ``strict``, exactly the names in ``left_out`` may be missing.

    Names may be plain, or those of a module that was compiled in another way.

    Raises:
        RuntimeError: names or shapes do not match, as in torch.
    """
    try:
        names = plain_names.names_of(module)
        _load_module(module, plain_names.renamed(state, names), strict, [names[name] for name in left_out])
    except RuntimeError as error:
        if prefix := _lacking_prefix(module, state):
            hint = f"The checkpoint's names lack {prefix!r}, which `lt-zero import SRC OUT --add-prefix {prefix}` adds."
            raise RuntimeError(f"{error} {hint}") from error
        raise


def _lacking_prefix(module: nn.Module, state: Mapping[str, Any]) -> str:
    """The prefix that turns all names of a state dict into the module's; "" if there is none."""
    names = {name for name, _ in plain_names.named_parameters(module)}
    saved = [clean_name(name) for name, value in state.items() if isinstance(value, Tensor)]
    found = {name.removesuffix(saved[0]) for name in names if name.endswith(f".{saved[0]}")} if saved else set()
    return next((p for p in sorted(found) if names <= {p + name for name in saved}), "")


def _load_module(module: nn.Module, state: Mapping[str, Any], strict: bool, left_out: Sequence[str]) -> None:
    if not left_out or not strict:
        module.load_state_dict(state, strict=strict)
        return
    missing, unexpected = module.load_state_dict(state, strict=False)
    found = {
        "Missing key(s)": set(missing) - set(left_out),
        "Unexpected key(s)": set(unexpected),
        "Left out on purpose (save_frozen=false), but the module has no such parameter": set(left_out) - set(missing),
    }
    if problems := [f"{what}: {', '.join(sorted(names))}." for what, names in found.items() if names]:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: {' '.join(problems)}")


# ---- restoring -------------------------------------------------------------------------------------------------------


def renamed(opened: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str | None]:
    """The new names of the entries that a hook has renamed, by their names in the checkpoint; None: it is gone.

    All names are plain.

    Args:
        opened: the state dict as it was opened; ``state``: as the hooks have left it. Entries are known by their
            values, which a hook that only renames passes on.
    """
    old = _names_by_value(opened)
    new = _names_by_value(state)
    left = {clean_name(name) for name in state}
    found: dict[str, str | None] = {}
    for key, names in old.items():
        after = new.get(key, [])
        for number, name in enumerate(names):  # several: tied ones
            if name in after or (not after and name in left):  # the hook has put another value in its place
                continue
            found[name] = after[min(number, len(after) - 1)] if after else None
    return found


def _names_by_value(state: Mapping[str, Any]) -> dict[int, list[str]]:
    """The plain names of each object in a state dict."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(clean_name(name))
    return names


def trained_weights(
    checkpoint: Mapping[str, Any], names: Mapping[str, str | None] = MappingProxyType({})
) -> Mapping[str, Any]:
    """The weights that training goes on with. See Note [Weights of a checkpoint].

    ``names``: those that a hook has changed in the state dict, ``renamed``.
    """
    state: Mapping[str, Any] = checkpoint["state_dict"]  # callbacks may still change it
    if TRAINED_WEIGHTS not in checkpoint:
        return state
    weights = {names.get(name, name): value for name, value in checkpoint[TRAINED_WEIGHTS]["weights"].items()}
    shown = {clean_name(name): name for name in state}  # a hook may have given it those of compiled modules
    return {**state, **{shown.get(name, name): value for name, value in weights.items() if name is not None}}


def stepped(checkpoint: Mapping[str, Any]) -> bool:
    """True if a step has been taken, whichever of Trainer, Fabric and loop saved the weights."""
    return bool(checkpoint.get("global_step") or entries_of(checkpoint, FABRIC).get("stepped"))


def loss_scale(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the loss scale, whichever of the three saved it; {} if there is none."""
    own = entries_of(checkpoint, LOOP) or entries_of(checkpoint, FABRIC)
    return dict(own.get("loss_scale") or checkpoint.get("ZeroPrecision") or {})


def entries_of(checkpoint: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Entries of Fabric (``FABRIC``) or of the engine of a loop (``LOOP``); {} if the key is of users."""
    found = checkpoint.get(key)
    mark = {FABRIC: "modules", LOOP: "client_state"}[key]
    return found if isinstance(found, Mapping) and mark in found else {}


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards a module; None if none does."""
    return next((owner for owner in map(owner_of, module.parameters()) if isinstance(owner, Engine)), None)


def _check_numbers(saved: Mapping[str, Any], number: int, remedy: str) -> None:
    """Raise CheckpointError if a saved optimizer has an option or a counter with which every weight would become NaN.

    No option of a group is NaN. Infinity may mean "no limit", but not for rates, decays and their like.
    """
    groups = saved.get("param_groups")
    states = saved.get("state")
    for index, group in enumerate(groups if isinstance(groups, Sequence) else []):
        for key, value in group.items() if isinstance(group, Mapping) else ():
            for found in value if isinstance(value, (tuple, list)) else (value,):
                _refuse_broken(found, key in _FINITE, f"{key}={value!r} in group {index} of optimizer {number}", remedy)
    for name, state in states.items() if isinstance(states, Mapping) else ():
        if isinstance(state, Mapping) and "step" in state:
            _refuse_broken(state["step"], True, f"step={state['step']!r} for {name} in optimizer {number}", remedy)


def _refuse_broken(value: Any, finite: bool, what: str, remedy: str, path: str = "The checkpoint") -> None:
    """Raise CheckpointError, which begins with ``path``, if a number is NaN, or infinite and has to be ``finite``."""
    if isinstance(value, Tensor) and not isinstance(value, LazyTensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and (math.isnan(value) or (finite and math.isinf(value))):
        raise CheckpointError(f"{path} has {what}, with which weights would become NaN: {remedy}")
