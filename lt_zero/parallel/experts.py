"""Experts of a mixture over ranks: each has some of them, and ranks send each other the tokens of these.

Note [Gradients of experts]
    An expert sees the tokens of all data (and sequence) ranks of its expert ranks, and so its gradient there is a sum
    over these ranks already. The sum over the ranks that have the same experts is therefore divided by the number of
    all data ranks, not by the number of ranks that are summed. Tensor ranks have the same tokens, and each sends them
    to other ranks: they have equal gradients of the same experts, of which the engine takes the mean.

Note [Tokens of no expert]
    A rank that got no tokens runs the same operations on no rows, so that its backward takes part in all exchanges, and
    the gradients of its experts are zero, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.layer_ranks import ProcessGroup, TokenRanks

SIZE = "expert_parallel.autoep_size"
AXIS = "expert_parallel"  # of the mesh over which stacks are distributed


@dataclass(frozen=True)
class Dispatched:
    """Tokens of this rank's experts.

    Attributes:
        tokens: [rows, ...], those of the first expert first.
        counts: how many rows each of this rank's experts has.
    """

    tokens: Tensor
    counts: list[int]
    _ranks: TokenRanks | None
    _sends: list[int]
    _receives: list[int]
    _sorted: Tensor  # which of the rows that came is in each row of ``tokens``
    _sent: Tensor  # which choice, of all tokens in order, was sent in each row
    _shape: torch.Size  # of the choices

    def split(self) -> tuple[Tensor, ...]:
        """The rows of each of this rank's experts, also of those without any."""
        return torch.split(self.tokens, self.counts)


def dispatch(
    tokens: Tensor, expert_ids: Tensor, experts: int, group: TokenRanks | ProcessGroup | None = None
) -> Dispatched:
    """Send tokens to the ranks of their experts: of n ranks, rank r has the r-th n-th of the experts.

    Differentiable. Collective over ``group``.

    Args:
        tokens: [tokens, ...].
        expert_ids: int64, [tokens] or [tokens, k]: the experts of each token.
        experts: how many there are; a multiple of the number of ranks.
        group: ranks that have the experts; None: this rank has all.

    Raises:
        ValueError: shapes do not fit, or an expert does not exist.
    """
    ranks = TokenRanks.of(group, tokens.device) if isinstance(group, ProcessGroup) else group
    size = 1 if ranks is None else ranks.size
    _check(tokens, expert_ids, experts, size)
    choices = expert_ids.shape[1] if expert_ids.dim() == 2 else 1
    chosen, order = expert_ids.reshape(-1).sort(stable=True)
    rows = tokens.index_select(0, order // max(choices, 1))
    # How many choices are of an expert before the k-th: of a negative one for k=0.
    before = torch.searchsorted(chosen, torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype))
    counts = before.diff().view(size, -1)  # [ranks, experts of a rank]
    came = counts if ranks is None else ranks.swap(counts)
    # The only copy to the host, which waits for the device.
    parts = [counts.sum(1), came.sum(1), came.sum(0), before[:1], before[-1:]]
    sends, receives, mine, low, high = _lists(parts)
    if low[0] > 0 or high[0] < len(chosen):
        raise ValueError(
            f"expert_ids are from {int(chosen[0])} to {int(chosen[-1])}, and there are {experts} experts, the first of"
            " them 0."
        )
    if ranks is None:
        return Dispatched(rows, mine, None, [], [], order, order, expert_ids.shape)
    rows = ranks.exchange(rows, sends, receives)
    # Rows came in order of the ranks, and those of a rank in order of the experts.
    each = torch.arange(came.shape[1], device=came.device).repeat(size)
    expert = each.repeat_interleave(came.view(-1), output_size=sum(receives))
    arranged = expert.argsort(stable=True)
    arrived = rows.index_select(0, arranged)
    return Dispatched(arrived, mine, ranks, sends, receives, arranged, order, expert_ids.shape)


def _lists(parts: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of 1D tensors, in one copy to the host."""
    numbers, found = torch.cat(list(parts)).tolist(), list[list[int]]()
    for part in parts:
        found.append(numbers[: len(part)])
        numbers = numbers[len(part) :]
    return found


def combine(rows: Tensor, dispatched: Dispatched, scores: Tensor | None = None) -> Tensor:
    """Send what experts made of tokens back, and add up what those of a token made of it.

    Differentiable. Collective over the ranks of ``dispatch``.

    Args:
        rows: [rows, ...], one for each row of ``dispatched.tokens``; the other sizes may be others.
        scores: by which each is multiplied, of the shape of ``expert_ids``; None: by nothing. Sums are those of the
            more precise of both dtypes.

    Returns:
        A tensor [tokens, ...] of the dtype of ``rows``.

    Raises:
        ValueError: shapes do not fit.
    """
    if len(rows) != sum(dispatched.counts):
        raise ValueError(f"combine got {len(rows)} rows, and dispatch gave {sum(dispatched.counts)}.")
    shape = dispatched._shape
    if scores is not None and scores.shape != shape:
        raise ValueError(f"combine got scores of shape {list(scores.shape)}, and expert_ids have {list(shape)}.")
    if dispatched._ranks is not None:
        came = rows.index_select(0, _inverse(dispatched._sorted))
        rows = dispatched._ranks.exchange(came, dispatched._receives, dispatched._sends)
    made = rows.index_select(0, _inverse(dispatched._sent)).view(*shape, *rows.shape[1:])
    if scores is not None:
        made = made * scores.view(*shape, *(1 for _ in rows.shape[1:]))
    return (made if len(shape) == 1 else made.sum(1)).to(rows.dtype)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


def _check(tokens: Tensor, expert_ids: Tensor, experts: int, ranks: int) -> None:
    if expert_ids.dim() not in (1, 2) or len(expert_ids) != len(tokens) or expert_ids.is_floating_point():
        raise ValueError(
            f"expert_ids are {expert_ids.dtype} {list(expert_ids.shape)} for {len(tokens)} tokens. Pass whole numbers "
            "of shape [tokens] or [tokens, k]."
        )
    if experts % ranks:
        raise ValueError(f"{ranks} ranks do not divide {experts} experts.")


class Experts(nn.Module):
    """Base class of a module with the experts of a layer, whose parameters are stacked along their first dimension.

    With ``expert_parallel`` each expert rank keeps an equal part of that dimension of the parameters that are the
    module's own. ``forward`` is yours: it sends tokens by ``dispatch``, uses ``local`` parameters, and gets results
    back by ``combine``. In a run without expert ranks these have all experts on this rank.

    Args:
        number: of experts.
    """

    _ranks: TokenRanks | None
    _parts: int

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self._ranks, self._parts = number, None, 1

    def dispatch(self, tokens: Tensor, expert_ids: Tensor) -> Dispatched:
        """Send tokens to the ranks of their experts: see ``lt_zero.parallel.dispatch``. Collective."""
        if self._ranks is None and self._parts > 1:
            raise RuntimeError("This is a copy of experts that are on several ranks, and has no connection to them.")
        return dispatch(tokens, expert_ids, self.number, self._ranks)

    def combine(self, rows: Tensor, dispatched: Dispatched, scores: Tensor | None = None) -> Tensor:
        """Send results back, and add them up: see ``lt_zero.parallel.combine``. Collective."""
        return combine(rows, dispatched, scores)

    def local(self, parameter: Tensor) -> Tensor:
        """The part of a parameter of this module that belongs to this rank's experts. Differentiable."""
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def spread(self, ranks: TokenRanks) -> None:
        """Use the experts of ``ranks`` from now on; parameters are cut already."""
        self._ranks, self._parts = ranks, ranks.size

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ranks": None}  # copies and pickles have no process group


OfStages = Callable[[Any], list[Any]]  # returns what all stages of a pipeline give. Collective


def one_stage(value: Any) -> list[Any]:
    """Return what all stages give where there is one."""
    return [value]


def cut_experts(module: nn.Module, mesh: DeviceMesh, ranks: TokenRanks, of_stages: OfStages = one_stage) -> None:
    """Cut the parameters of all ``Experts`` of ``module`` over ``ranks``, of which ``mesh`` is made. Collective.

    Values of the first of them are kept.

    Raises:
        ConfigError: on all ranks: no stage has any, or they cannot be cut.
    """
    problem, places = None, dict[Parameter, list[tuple[Experts, str]]]()
    found = {name: sub for name, sub in module.named_modules() if isinstance(sub, Experts)}
    size = ranks.size
    try:
        places = _stacks(module, found, size)
    except ConfigError as error:
        problem = error.problems[0]
    told = of_stages((bool(found), problem))
    for wrong in (each for _, each in told if each is not None):
        raise ConfigError([wrong])
    if not any(has for has, _ in told):
        raise _none_in(module, size)
    for experts in found.values():
        experts.spread(ranks)
    for parameter, where in places.items():
        if isinstance(parameter, DTensor):  # in an earlier run
            if (before := parameter.device_mesh.mesh.tolist()) != mesh.mesh.tolist():
                raise ConfigError.about(
                    SIZE,
                    f"{SIZE}={size}: experts of {type(module).__name__} are on ranks {before} since an earlier run. "
                    "Make the module anew, and read its weights from a checkpoint.",
                )
            continue
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        made = Parameter(part, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))  # what a plan says of it
        for experts, own in where:
            experts.register_parameter(own, made)


def planned_parts(module: nn.Module, size: int, of_stage: bool = False) -> list[ParamSpec]:
    """Parts that the first of ``size`` ranks has of stacks that are cut, or that ``cut_experts`` would cut.

    ``of_stage``: other stages of a pipeline may have them.

    Raises:
        ConfigError: as ``cut_experts``.
    """
    found = {name: sub for name, sub in module.named_modules() if isinstance(sub, Experts)}
    if size == 1:
        return []
    if not found and not of_stage:
        raise _none_in(module, size)
    stacks, specs = _stacks(module, found, size), list[ParamSpec]()
    for name, parameter in module.named_parameters():
        if parameter in stacks:
            number, *others = parameter.shape
            part = Box((0,) * parameter.dim(), (number // size, *others))
            specs.append(ParamSpec(name, (number, *others), part))
    return specs


def _none_in(module: nn.Module, size: int) -> ConfigError:
    return ConfigError.about(
        SIZE,
        f"{SIZE}={size}, but {type(module).__name__} has no lt_zero.parallel.Experts, and no mixture of "
        "transformers. Make the module with a layer's experts one of them, or remove the key.",
    )


def _stacks(module: nn.Module, found: Mapping[str, Experts], size: int) -> dict[Parameter, list[tuple[Experts, str]]]:
    """The parameters of experts, and where they are.

    Raises:
        ConfigError: they cannot be cut over ``size`` ranks.
    """
    places: dict[Parameter, list[tuple[Experts, str]]] = {}
    for name, experts in found.items():
        for own, parameter in experts.named_parameters(recurse=False):
            _check_stack(f"{clean_name(name)}.{own}".lstrip("."), parameter, experts.number, size)
            places.setdefault(parameter, []).append((experts, own))
    _check_elsewhere(module, places)
    return places


def is_of_experts(parameter: Tensor) -> bool:
    """True if ``parameter`` is a stack that is distributed over expert ranks."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == (AXIS,)


def _check_stack(name: str, parameter: Tensor, number: int, size: int) -> None:
    if number % size:
        raise ConfigError.about(
            SIZE, f"{SIZE}={size} does not divide the {number} experts of {name}. Use a divisor of their number."
        )
    if parameter.dim() == 0 or parameter.shape[0] != number:
        raise ConfigError.about(
            SIZE,
            f"{SIZE}={size}: {name} of shape {list(parameter.shape)} is no stack of {number} experts along its first "
            "dimension. Put parameters that experts share into a module of their own.",
        )


def _check_elsewhere(module: nn.Module, places: dict[Parameter, Any]) -> None:
    """Raise ConfigError if parameters of experts are used by a module of another kind."""
    for name, sub in module.named_modules():
        held: Sequence[Any] = [] if isinstance(sub, Experts) else list(sub._parameters.items())
        for own, parameter in held:
            if parameter is not None and parameter in places:
                raise ConfigError.about(
                    SIZE,
                    f"{SIZE}: {clean_name(name)}.{own} is a parameter of lt_zero.parallel.Experts, too, each of whose "
                    "ranks has a part of it. Untie them.",
                )
