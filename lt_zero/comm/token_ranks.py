"""Ranks that exchange tokens inside of layers, each with as many for another as its data says: forward and backward.

An all-to-all of unequal rows. What a rank sends in forward it receives in backward, so that the backward is the same
exchange with both sizes swapped, which can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup

from lt_zero.comm.layer_ranks import LayerRanks


class TokenRanks(LayerRanks):
    """Ranks that send each other tokens; of a run, or of a user's process group."""

    subject = "experts"

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send the next ``sends[k]`` rows to rank k of these; returns the rows that came, in order of their ranks.

        Differentiable. Collective.

        Args:
            rows: of shape [sum of sends, ...]; all but the first size, and the dtype, are the same on all ranks.
            receives: how many rows come from each rank.
        """
        out: Tensor = _exchange(self, rows, list(sends), list(receives))
        return out

    def swap(self, numbers: Tensor) -> Tensor:
        """Send row k of ``numbers`` [ranks, ...] to rank k; returns those that came, in its shape. Collective."""
        out: Tensor = self.exchanged(numbers, None, None, "numbers of tokens")
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def exchanged(
        self, rows: Tensor, sends: list[int] | None, receives: list[int] | None, name: str = "tokens of experts"
    ) -> Tensor:
        """Exchange without derivatives: see ``exchange``; None: equally many rows for all."""
        self._require_device(rows, name)
        received = rows.new_empty(len(rows) if receives is None else sum(receives), *rows.shape[1:])
        opened = self.log.open("all_to_all", name, received.nbytes)
        # Without the number of elements, which differs between ranks.
        launch = self.order.launch("all-to-all", f"{name}, {list(rows.shape[1:])}", 0)
        options: dict[str, Any] = {"group": self.process_group, "async_op": self._gloo}
        self._wait(dist.all_to_all_single(received, rows.contiguous(), receives, sends, **options), launch)
        self.log.ended(opened)
        return received


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, group: TokenRanks, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        context.group, context.sends, context.receives = group, sends, receives
        out: Tensor = group.exchanged(rows, sends, receives)
        return out

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, context.group.exchange(grad, context.receives, context.sends), None, None


# A compiler that looked into it would lose the derivative: what a collective writes depends on nothing it knows.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _exchange(*arguments: Any) -> Any:
    return _TokenExchange.apply(*arguments)  # type: ignore[no-untyped-call]
