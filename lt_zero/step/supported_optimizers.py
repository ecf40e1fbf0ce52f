"""Optimizers that compute the same on flat pieces of parameters as on full parameters.

A class that is neither torch's nor this package's is tried out: some steps of one optimizer on a small matrix are
compared with the steps of two optimizers on a piece each, with the hyper-parameters of every group. The same with two
matrices shows whether it needs all parameters at once. The trial is inconclusive if the optimizer draws random numbers,
or its constructor needs other arguments than groups and defaults; then its name decides.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.compat import bare_step
from lt_zero.common.errors import ConfigError
from lt_zero.common.users_code import warn
from lt_zero.optim.exchanging import ExchangingOptimizer
from lt_zero.optim.lamb import Lamb
from lt_zero.optim.registry import is_known

# Names of classes, which decide where a trial is inconclusive.
_FLAT = {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Lion"}
_WHOLE = {"Muon", "Adafactor", "Shampoo", "SOAP", "DistributedShampoo", "Kron", "PSGD", "Lamb", "LAMB", "Lars", "LARS"}
# Wrappers and optimizers that shard states, or average weights, over the ranks by themselves.
_DISTRIBUTED = {
    "ZeroRedundancyOptimizer",
    "PostLocalSGDOptimizer",
    "OSS",
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
}
# States of these are weights, or step sizes that change by small factors.
_NOT_MOMENTS = {"ASGD", "Rprop"}
_CUT = 5000  # of 10,240 elements: 8-bit optimizers keep tensors of less than 4096 in 32 bits
_STEPS = 8  # rectified optimizers (RAdam) do not move before the sixth


def check_supported(optimizer: Optimizer, sharded: bool, whole: bool = False) -> None:
    """Refuse optimizers whose update would be wrong on shards; warn about unknown ones.

    Args:
        optimizer: any.
        sharded: whether each rank holds a shard of the model.
        whole: whether shards consist of full parameters.

    Raises:
        TypeError: the optimizer needs full matrices, all parameters, sparse gradients or repeated closures, or it
            works on several ranks by itself.
    """
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    name = type(optimizer).__name__
    if names & _DISTRIBUTED:
        inner = getattr(optimizer, "optim", None)
        instead = type(inner).__name__ if isinstance(inner, Optimizer) else "the optimizer that it wraps, such as AdamW"
        raise TypeError(
            f"{name} shards states or averages weights over the ranks by itself, as ZeRO does already. Pass {instead} "
            "instead, over the same parameters: its states are sharded from stage 1 on."
        )
    if "LBFGS" in names:
        raise TypeError(f"{name} evaluates its closure several times per step, which ZeRO does not support. Use AdamW.")
    if "SparseAdam" in names:
        raise TypeError(f"{name} needs sparse gradients; ZeRO reduces dense buckets. Use Adam and sparse=False.")
    # Lamb asks for the norms of full parameters, so it may get fragments.
    if not sharded or isinstance(optimizer, Lamb):
        return
    if names & _WHOLE and not whole:
        ours = "lt_zero.optim.Lamb" if names & {"Lamb", "LAMB"} else "stage 0"
        raise TypeError(
            f"{name} computes its update from whole matrices or per-parameter norms, but at this stage a rank holds "
            f"flat pieces of parameters. Use {ours}, or set zero_optimization.shard_along=parameter, or take an "
            "element-wise optimizer such as AdamW."
        )
    if is_known(type(optimizer)):
        return
    found = divides(optimizer, whole)
    if found is False and (whole or divides(optimizer, whole=True) is False):
        raise TypeError(
            f"{name} computes its update from all parameters at once (found out by a trial with two small matrices), "
            "but at this stage each rank holds a part of them. Use stage 0, or take an element-wise optimizer such as "
            "AdamW."
        )
    if found is False:
        raise TypeError(
            f"{name} computes something else on pieces of a parameter than on all of it (found out by a trial with a "
            "small matrix), but at this stage a rank holds flat pieces. Set zero_optimization.shard_along=parameter, "
            "which gives it whole parameters, or use stage 0, or take an element-wise optimizer such as AdamW."
        )
    if found is None and not names & (_FLAT | _WHOLE):
        held = "a part of the parameters" if whole else "flat pieces of parameters"
        why = "treats parameters one by one" if whole else "is element-wise (zero_optimization.shard_along=parameter "
        why += "" if whole else "gives it whole parameters)"
        warn(
            f"{name} is not known to lt_zero: each rank runs it on {held}, which is exact only if its update {why}.",
        )


def check_parts(optimizer: Optimizer, parts: Mapping[int, str]) -> None:
    """Refuse optimizers whose update of a part of a tensor differs from that of all of it.

    Args:
        optimizer: any that ``check_supported`` accepts.
        parts: by id, the names of parameters that are a part of a tensor.

    Raises:
        TypeError: the update needs all of the tensor; names the parameter.
    """
    groups = [group for group in optimizer.param_groups if group.get("use_muon", True)]  # lt_zero.optim.Muon's others
    found = next((parts[id(p)] for group in groups for p in group["params"] if id(p) in parts), None)
    if found is None or isinstance(optimizer, Lamb):
        return
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if names & _WHOLE or (not is_known(type(optimizer)) and divides(optimizer, whole=False) is False):
        raise TypeError(
            f"{type(optimizer).__name__} computes its update from whole matrices or their norms, but groups of ranks "
            f"have a part of {found!r} each. Take an element-wise optimizer such as AdamW, or lt_zero.optim.Lamb "
            "(lt_zero.optim.Muon with use_muon=False for these parameters)."
        )


def check_moments(optimizer: Optimizer, dtype: torch.dtype | None) -> None:
    """Refuse optimizers whose states cannot be kept in ``dtype`` of less than 32 bits: they may be more than moments.

    Raises:
        ConfigError: the optimizer may keep weights or step sizes, or exchanges its states.
    """
    name = type(optimizer).__name__
    known = is_known(type(optimizer)) and name not in _NOT_MOMENTS
    if dtype in (None, torch.float32) or (known and not isinstance(optimizer, ExchangingOptimizer)):
        return
    key, kind = "optimizer_states.dtype", str(dtype).removeprefix("torch.")
    raise ConfigError.about(
        key,
        f"{key}={kind}: states of {name} are not known to be moments, which this key rounds after each step. Remove "
        "the key, or take an optimizer of torch.optim or lt_zero.optim such as AdamW.",
    )


def check_rounding(optimizer: Optimizer) -> None:
    """Refuse optimizers whose ranks exchange states from which weights follow: ``bf16.stochastic_rounding`` is on.

    Raises:
        ConfigError: the optimizer exchanges its states.
    """
    if isinstance(optimizer, ExchangingOptimizer):
        key, name = "bf16.stochastic_rounding", type(optimizer).__name__
        raise ConfigError.about(
            key,
            f"{key}=true: {name} exchanges sums of its updates, and weights that were rounded at random do not follow "
            "from these. Remove the key, or take an optimizer such as AdamW.",
        )


def divides(optimizer: Optimizer, whole: bool) -> bool | None:
    """True if two optimizers with a part of the elements each compute what one with all of them does; None: unknown.

    ``whole``: the parts are full parameters.
    """
    other = ("params", "param_names", "initial_lr", "name")  # keys that do not affect the update
    groups = [{k: v for k, v in group.items() if k not in other} for group in optimizer.param_groups]
    distinct = {repr(group): group for group in groups}.values()
    found = [_group_divides(optimizer, group, whole) for group in distinct]
    return False if False in found else None if None in found else True


def _group_divides(optimizer: Optimizer, group: dict[str, Any], whole: bool) -> bool | None:
    if "lr" in group and not isinstance(group["lr"], Tensor):
        group = {**group, "lr": 0.1}  # a schedule may start at zero
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(64, 160, generator=random, dtype=torch.float64) for _ in range(2 * (_STEPS + 1))]
    pairs = []  # the two parts: weights, then the gradients of each step; of different size, for norms to differ
    for first, second, scale in zip(rows[::2], rows[1::2], [3.0, *[10.0] * _STEPS], strict=True):
        flat = first.flatten()
        pairs.append((first, second * scale) if whole else (flat[:_CUT], flat[_CUT:] * scale))
    merged = [list(pair) if whole else [torch.cat(pair).view(64, 160)] for pair in pairs]
    try:
        with _undisturbed():
            together = _stepped(optimizer, group, merged)
    except Exception:  # the constructor or ``step`` needs other arguments
        return None
    try:
        with _undisturbed():
            parts = [_stepped(optimizer, group, [[pair[number]] for pair in pairs])[0] for number in range(2)]
    except _RandomError:
        return None
    except Exception:
        return False
    got, want, start = (torch.cat([t.flatten() for t in some]) for some in (parts, together, merged[0]))
    moved = (want - start).abs().max()
    if not torch.isfinite(moved) or moved == 0:
        return None
    return bool((got - want).abs().max() <= 1e-5 * moved)


class _RandomError(Exception):
    """A trial drew random numbers."""


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Context for trials: no warnings, no compilation, random state restored."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            raise _RandomError


def _stepped(optimizer: Optimizer, group: dict[str, Any], rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The weights ``rows[0]`` after steps of a new optimizer of the same class with gradients ``rows[1:]``."""
    parameters = [Parameter(row.clone()) for row in rows[0]]
    trial = _trial(optimizer, group, parameters)
    # Schedule-free optimizers refuse a step outside of their train mode.
    getattr(trial, "train", lambda: None)()
    closes = "closure" in inspect.signature(trial.step).parameters
    for grads in rows[1:]:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        bare_step(trial)(trial, **({"closure": lambda: torch.zeros(())} if closes else {}))
    return [parameter.detach() for parameter in parameters]


def _trial(optimizer: Optimizer, group: dict[str, Any], parameters: list[Parameter]) -> Any:
    """A new optimizer of the same class and hyper-parameters."""
    cls: Any = type(optimizer)
    accepted = inspect.signature(cls).parameters
    return cls([{**group, "params": parameters}], **{k: v for k, v in optimizer.defaults.items() if k in accepted})


def states_per_element(optimizer: Optimizer) -> int:
    """The most states of a parameter's size that the optimizer keeps per parameter."""
    return max(states_by_group(optimizer), default=0)


def states_by_group(optimizer: Optimizer) -> list[int]:
    """The number of states of a parameter's size that the optimizer keeps, by group; tried with a small matrix.

    A group of vectors, such as Adafactor's of biases, may keep more. Some make more states later: ``most_states``.
    """
    if isinstance(optimizer, ExchangingOptimizer):
        return [optimizer.most_states] * len(optimizer.param_groups)
    known: dict[str, int] = {}
    found = []
    for own in optimizer.param_groups:
        group = {k: v for k, v in own.items() if k not in ("params", "initial_lr")}
        if repr(group) not in known:
            parameter = Parameter(torch.zeros(3, 5, dtype=torch.float32, device="cpu"))
            parameter.grad = torch.ones_like(parameter)
            try:
                with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                    trial = _trial(optimizer, group, [parameter])
                    trial.step()
                states = trial.state[parameter].values()
                known[repr(group)] = sum(isinstance(v, Tensor) and v.shape == parameter.shape for v in states)
            except Exception:  # the constructor or ``step`` needs other arguments
                known[repr(group)] = 2
        found.append(known[repr(group)])
    return found
