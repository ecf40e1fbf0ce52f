"""Optimizers that compute the same on flat pieces of parameters, or on a part of the parameters, as on all of them.

A class that is neither torch's nor this package's is tried out (optimizer_trial.py), unless the configuration says that
its update is element-wise. One that cannot be tried may be element-wise or not: it gets whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lt_zero.common.compat import is_initialized, without_torch_function
from lt_zero.common.errors import ConfigError
from lt_zero.common.users_code import warn
from lt_zero.core.engine.optimizer_spec import ExchangingOptimizer, NormedOptimizer, Separability, is_known
from lt_zero.core.step.optimizer_copy import states_of

ELEMENTWISE = "zero_optimization.optimizer_is_elementwise"
_ALONG = "zero_optimization.shard_along"
# Names of classes that are refused on pieces without a trial. Some use whole matrices only after more steps than a
# trial has: ScalableShampoo does so from the 1,000th on.
_WHOLE = {
    *("Muon", "Adafactor", "Shampoo", "ScalableShampoo", "DistributedShampoo", "SOAP", "Kron", "PSGD"),
    *("Lamb", "LAMB", "Lars", "LARS"),
}
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
_SMALL = (3, 5)
_tried: WeakIdKeyDictionary = WeakIdKeyDictionary()  # optimizer -> what was tried, and the result

Verdict = tuple[Separability, str]  # and why it could not be tried
Gather = Callable[[Verdict], list[Verdict]]


def check_supported(
    optimizer: Optimizer,
    sharded: bool,
    whole: bool = False,
    elementwise: bool = False,
    gather: Gather = lambda mine: [mine],
) -> None:
    """Refuse optimizers whose update would be wrong on shards, or may be. Collective for classes that are not known.

    Args:
        optimizer: any.
        sharded: whether each rank holds a shard of the model.
        whole: whether shards consist of full parameters.
        elementwise: whether the user says that the update is element-wise.
        gather: returns what trials have found on all ranks.

    Raises:
        TypeError: the optimizer needs full matrices, all parameters, sparse gradients or repeated closures; or it
            works on several ranks by itself; or it takes no hooks; or it could not be tried, and shards cut through
            parameters.
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
    if not is_initialized(optimizer):
        raise TypeError(
            f"{name} does not call Optimizer.__init__, so it takes no hooks, and its step cannot be sharded. Pass the "
            "optimizer that it wraps, or call super().__init__(params, defaults) in its constructor."
        )
    if "LBFGS" in names:
        raise TypeError(f"{name} evaluates its closure several times per step, which ZeRO does not support. Use AdamW.")
    if "SparseAdam" in names:
        raise TypeError(f"{name} needs sparse gradients; ZeRO reduces dense buckets. Use Adam and sparse=False.")
    if not sharded or isinstance(optimizer, NormedOptimizer):
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
    found, why = tried(optimizer, gather)
    if elementwise:
        if found in (Separability.NOTHING, Separability.PARAMETERS):
            warn(
                f"{ELEMENTWISE}=true, but {name} is not element-wise: in a trial it computed something else on pieces "
                f"of parameters than on all of them. Remove the key, and set {_ALONG}=parameter or stage 0."
            )
        return
    if found is Separability.NOTHING:
        raise TypeError(
            f"{name} computes its update from all parameters at once (or from the loss; found out by a trial with "
            "small tensors), but at this stage each rank holds a part of the parameters, and has a loss of its own. "
            "Use stage 0, or take an element-wise optimizer such as AdamW."
        )
    if found is Separability.PARAMETERS and not whole:
        raise TypeError(
            f"{name} computes something else on pieces of a parameter than on all of it (found out by a trial with "
            f"small tensors), but at this stage a rank holds flat pieces. Set {_ALONG}=parameter, which gives it whole "
            "parameters, or use stage 0, or take an element-wise optimizer such as AdamW."
        )
    if found is Separability.UNKNOWN and not whole:
        raise TypeError(
            f"{name} cannot be tried out ({why}), and at this stage a rank holds flat pieces of parameters, on which "
            f"only element-wise optimizers are exact. Set {_ALONG}=parameter, which gives it whole parameters, or, if "
            f"each element of its update depends on that element alone, {ELEMENTWISE}=true."
        )
    if found is Separability.UNKNOWN:
        warn(
            f"{name} cannot be tried out by lt_zero ({why}): each rank runs it on some of the parameters, which "
            "is exact only if it treats them one by one."
        )


def tried(optimizer: Optimizer, gather: Gather = lambda mine: [mine]) -> Verdict:
    """Try how an optimizer may be divided, and why not. Collective; all ranks go by the worst result.

    The result is kept while options and shapes stay as they are.
    """
    with without_torch_function():
        facts = [
            ({k: v for k, v in group.items() if k != "params"}, [p.shape for p in group["params"]])
            for group in optimizer.param_groups
        ]
    told = repr(facts)
    known = _tried.get(optimizer)
    if known is None or known[0] != told:
        from lt_zero.core.step.optimizer_trial import division_of

        known = told, division_of(optimizer)
        _tried[optimizer] = known
    mine: Verdict = known[1]
    return min(gather(mine), key=lambda verdict: _WORST.index(verdict[0]))


_WORST = [Separability.NOTHING, Separability.UNKNOWN, Separability.PARAMETERS, Separability.ELEMENTS]


def check_parts(optimizer: Optimizer, parts: Mapping[int, str], elementwise: bool = False) -> None:
    """Refuse optimizers whose update of a part of a tensor differs, or may differ, from that of all of it.

    Args:
        optimizer: any that ``check_supported`` accepts.
        parts: by id, the names of parameters that are a part of a tensor.
        elementwise: whether the user says that the update is element-wise.

    Raises:
        TypeError: the update may need all of the tensor; names the parameter.
    """
    groups = [group for group in optimizer.param_groups if group.get("use_muon", True)]  # lt_zero.optim.Muon's others
    found = next((parts[id(p)] for group in groups for p in group["params"] if id(p) in parts), None)
    if found is None or isinstance(optimizer, NormedOptimizer):
        return
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    name = type(optimizer).__name__
    division, why = (Separability.PARAMETERS, "") if names & _WHOLE else (Separability.ELEMENTS, "")
    if not (names & _WHOLE or is_known(type(optimizer)) or elementwise):
        division, why = tried(optimizer)
    remedy = "Take an element-wise optimizer such as AdamW, or lt_zero.optim.Lamb (lt_zero.optim.Muon with "
    remedy += "use_muon=False for these parameters)"
    if division is Separability.UNKNOWN:
        raise TypeError(
            f"{name} cannot be tried out ({why}), and groups of ranks have a part of {found!r} each, on which only "
            f"element-wise optimizers are exact. {remedy}, or, if it is element-wise, set {ELEMENTWISE}=true."
        )
    if division is not Separability.ELEMENTS:
        raise TypeError(
            f"{name} computes its update from whole matrices or their norms, but groups of ranks have a part of "
            f"{found!r} each. {remedy}."
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
    for number, own in enumerate(optimizer.param_groups):
        options = repr({k: v for k, v in own.items() if k not in ("params", "initial_lr")})
        if options not in known:
            try:
                states = states_of(optimizer, number, _SMALL)
                known[options] = sum(isinstance(state, Tensor) and state.shape == _SMALL for state in states)
            except Exception:  # it cannot be tried
                known[options] = 2
        found.append(known[options])
    return found
