"""The interface of optimizers beyond torch's: a kernel for the step, norms over all ranks, an exchange of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Options = dict[str, Any]
# Squared norms, or maxima, of full tensors ([tensors, any], fp64) out of those of fragments. Collective.
Combine = Callable[[list[Tensor], Tensor], Tensor]


class Separability(Enum):
    """Parts of a model that ranks may step apart, so that an optimizer computes what it does in one process."""

    NOTHING = "it needs all parameters at once, or a loss"
    PARAMETERS = "each parameter"
    ELEMENTS = "each element"
    UNKNOWN = "it could not be tried"


@dataclass(frozen=True)
class SecondPass:
    """The second operation of a kernel whose update is scaled by norms of full parameters, which the first measures.

    Attributes:
        operation: its name in ``lt_zero.ops``; takes parameters, states, factors and compute copies of fragments.
        shared: names of the first operation's options that it takes, too.
        own: names of ``Kernel.options`` that the first operation does not take.
        columns: numbers that the first operation returns for each fragment: squared norms ([fragments, columns], fp64).
        rates: the factors ([fragments]) of the updates, out of the squared norms of full parameters and the options.
    """

    operation: str
    shared: tuple[str, ...]
    own: tuple[str, ...]
    columns: int
    rates: Callable[[Tensor, Options], Tensor]


@dataclass(frozen=True)
class Kernel:
    """The operation that computes the step of an optimizer.

    Attributes:
        operation: its name in ``lt_zero.ops``.
        keys: of the element-wise states, in the operation's order.
        options: the operation's options out of a group and the number of the elements' step, from 1.
        takes: whether the operation computes the update of such a group.
        has_states: whether such a group has states.
        counts: whether the state holds the number of steps, as ``step``.
        initial: what a state begins with.
        second: what follows once the norms that it needs are added up over all ranks; None: nothing.
    """

    operation: str
    keys: tuple[str, ...]
    options: Callable[[Options, float], Options]
    takes: Callable[[Options], bool] = lambda group: True
    has_states: Callable[[Options], bool] = lambda group: True
    counts: bool = True
    initial: Callable[[Optimizer], float] = lambda optimizer: 0.0
    second: SecondPass | None = None

    @property
    def collective(self) -> bool:
        """True if a step needs norms over all ranks."""
        return self.second is not None


def kernel_of(cls: type[Optimizer]) -> Kernel | None:
    """The ``step_kernel`` of exactly this class, as a subclass may compute something else; None: it has none."""
    found = vars(cls).get("step_kernel")
    return found if isinstance(found, Kernel) else None


def is_known(cls: type) -> bool:
    """True if an optimizer or scheduler is torch's or lt_zero's."""
    # Adafactor and Muon say that their module is torch.optim, the others a module inside of it.
    return f"{cls.__module__}.".startswith(("torch.optim.", "lt_zero.optim.", "lt_zero.features."))


def chosen(options: Options, *keys: str) -> Options:
    """Some of the options."""
    return {key: options[key] for key in keys}


class Norms:
    """Squared norms of full tensors out of parts, which describe fragments and are added: here of tensors in full."""

    def part(self, tensor: Tensor) -> Tensor:
        """The part (1D, fp64) that a fragment adds to the squared norm of its tensor."""
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
        return norm.square().view(1)

    def of_parts(self, tensors: list[Tensor], rows: Sequence[Tensor], columns: int) -> Tensor:
        """The squared norms of full tensors ([tensors, columns], fp64). Collective where tensors are fragments.

        Args:
            tensors: of the optimizer's groups.
            rows: the parts of each of them, one after the other (1D).
            columns: parts of a tensor.
        """
        if not rows:
            return torch.zeros(0, columns, dtype=torch.float64)
        return torch.stack([row.to(rows[0].device) for row in rows])


class CombinedNorms(Norms):
    """``Norms`` of fragments; a call takes squares that the optimizer has summed, which depend on what is cut where."""

    def __call__(self, fragments: list[Tensor], squares: Tensor, /) -> Tensor:
        """Squared norms of full tensors out of those of fragments ([tensors, any], fp64). Collective."""
        raise NotImplementedError


class NormedOptimizer(Optimizer):
    """An optimizer whose update needs norms of full parameters, and which asks for them: it may get fragments.

    Attributes:
        takes_parts: whether it takes norms by ``Norms.part`` only, so that they can be had with the same bits wherever
            parameters are cut.
    """

    takes_parts = False

    def combine(self, norms: CombinedNorms, maxima: Combine) -> None:
        """Step fragments of parameters from now on.

        Args:
            norms: squared norms of full parameters out of those of fragments ([tensors, any], fp64).
            maxima: likewise for maxima, none of which is below 0.
        """
        raise NotImplementedError


class ExchangingOptimizer(Optimizer):
    """An optimizer that needs an exchange of its own on several ranks, which are prepared for it.

    Attributes:
        prepared_at: the stages at which they can be, for messages.
        most_states: states of a parameter's size, at most.
    """

    prepared_at: str
    most_states: int

    @property
    def pending(self) -> bool:
        """True if the ranks have stepped apart since the last exchange."""
        return False

    def end_interval(self) -> None:
        """Exchange now if the ranks have stepped apart, and drop the states for exchanges. Collective."""
