"""A transport: gloo moves the bytes, and this counts them."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lt_zero.core.comm.transport import Connections, Gloo, Group, Reduction, Transport
from lt_zero.core.comm.work import CollectiveId, Work


class Counted(Transport):
    """Lets gloo move what it counts.

    Attributes:
        calls: name and elements of each collective, in their order.
    """

    name = "counted"
    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._gloo = Gloo(connections)
        self.sends = self._gloo.sends
        self.sums_wide = self._gloo.sums_wide

    @classmethod
    @override
    def fits(cls, connections: Connections) -> bool:
        return connections.backend == "gloo"

    @override
    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        self.calls.append(("all_gather", flat.numel()))
        return self._gloo.all_gather(flat, own, launch, group)

    @override
    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        self.calls.append(("reduce_scatter", reduction.flat.numel()))
        return self._gloo.reduce_scatter(reduction, launch)

    @override
    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        self.calls.append(("all_reduce", reduction.flat.numel()))
        return self._gloo.all_reduce(reduction, launch)
