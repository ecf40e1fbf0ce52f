"""Parameters of which this rank has a part, as users see them: with the shape of all of the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from lt_zero.core.comm.ranks import Ranks


class Parts(Protocol):
    """Converts between what users see of a parameter and the part that this rank's engine has (ParamSpec)."""

    @property
    def joins(self) -> bool:
        """True if users see whole tensors, which ``join`` gives."""

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that have the other parts, and run the same layers with this one; None: not known here."""

    @property
    def uneven(self) -> str:
        """Why ranks may not run different numbers of forwards; "": they may."""

    def cut(self, parameter: Parameter, value: Tensor) -> Tensor:
        """The part of ``value``, which is for all of ``parameter``, that belongs here; of a lazy tensor a lazy one."""

    def show(self, parameter: Parameter, part: Tensor) -> Tensor:
        """The view of ``part`` that users see, who see ``parameter``. It shares memory."""

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """The gradient that backward left, in the shape of the part; as it counts in the mean of the group."""

    def place(self, empty: Parameter, full: Parameter) -> Parameter:
        """A parameter like ``empty``, which is on the meta device, with its part of ``full``."""

    def join(self, parameter: Parameter, part: Tensor) -> Tensor:
        """The full tensor, joined from the parts of all ranks that have one. Collective over these ranks."""

    def check_graph(self, name: str, parameters: Iterable[Parameter]) -> None:
        """Check that a backward of module ``name``, which uses ``parameters``, can itself be differentiated.

        Raises:
            RuntimeError: it cannot.
        """


class Unjoined:
    """Users see parts as they are: modules were made for them, and other ranks' are out of reach."""

    joins = False
    ranks: Ranks | None = None
    uneven = ""

    def cut(self, parameter: Parameter, value: Tensor) -> Tensor:
        """Return ``value``."""
        return value

    show = join = cut

    gradient: Callable[[Parameter], Tensor | None] = staticmethod(attrgetter("grad"))  # called for each in each step

    def place(self, empty: Parameter, full: Parameter) -> Parameter:
        """Return ``full``."""
        return full

    def check_graph(self, name: str, parameters: Iterable[Parameter]) -> None:
        """Accept any module: the collectives of modules that were made for parts are their own."""
