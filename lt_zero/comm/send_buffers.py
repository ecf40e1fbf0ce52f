"""Memory from which gradients are sent. Ranks that share memory read it in place (shared_memory.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lt_zero.comm.transport import Transport
from lt_zero.common.flat_storage import flat_empty


@dataclass(eq=False)
class SendBuffer:
    """Input of one reduction.

    Attributes:
        flat: 1D; the sender fills it with gradients times ``factor``.
        factor: see ``ShardGroup.factors``.
        scratch: 1D, for what the reduction receives.
        whole: of a reusable buffer: all of it, of which ``flat`` and ``scratch`` are parts.
    """

    flat: Tensor
    factor: float
    scratch: Tensor
    whole: tuple[Tensor, Tensor] | None = None


class SendBuffers:
    """Send buffers for the buckets of one engine in one group. Reusable ones take turns.

    Args:
        transport: sends; None: this is a single process.
        device: of the gradients.
        factor: of gradients that are sent in a dtype.
        largest: by dtype, the most elements of a reusable buffer. Others are freed after their reduction.
    """

    def __init__(
        self,
        transport: Transport | None,
        device: torch.device,
        factor: Callable[[torch.dtype], float],
        largest: Mapping[torch.dtype, int],
    ) -> None:
        self._transport, self._device, self._factor, self._largest = transport, device, factor, largest
        self._free: dict[torch.dtype, deque[tuple[Tensor, Tensor]]] = {}
        self._made: dict[torch.dtype, int] = {}  # number of reusable ones, free or not

    def take(self, numel: int, dtype: torch.dtype) -> SendBuffer:
        """A buffer for ``numel`` elements; in the same order on all ranks. At most two are in use at a time."""
        largest, factor = self._largest.get(dtype, 0), self._factor(dtype)
        if numel > largest:
            return SendBuffer(flat_empty(numel, dtype, self._device), factor, self._scratch(numel, dtype))
        free = self._free.setdefault(dtype, deque())
        made = self._made.get(dtype, 0)
        if made < (self._transport.send_buffers if self._transport is not None else 2):
            self._made[dtype] = made + 1
            whole = self._allocate(largest, dtype)
        else:
            whole = free.popleft()
        return SendBuffer(whole[0][:numel], factor, whole[1][:numel], whole)

    def filled(self, values: Tensor, dtype: torch.dtype) -> SendBuffer:
        """A buffer with gradients (1D) that are complete, in ``dtype``; ``values`` may be overwritten."""
        factor = self._factor(dtype)
        return SendBuffer(values.mul_(factor).to(dtype), factor, self._scratch(values.numel(), dtype))

    def give_back(self, buffer: SendBuffer, unused: bool = False) -> None:
        """Let a buffer from ``take`` be reused after its reduction; ``unused``: there was none."""
        if buffer.whole is not None:
            free = self._free[buffer.flat.dtype]
            free.insert(0 if unused else len(free), buffer.whole)

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A reusable buffer for the life of a run, in shared memory if possible, and its scratch."""
        arena = self._transport.sends_from() if self._transport is not None else None
        if arena is not None:  # peers read it in place
            return arena.allocate(numel, dtype), flat_empty(0, dtype, self._device)
        return flat_empty(numel, dtype, self._device), self._scratch(numel, dtype)

    def _scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        needs = self._transport.scratch_numel(numel) if self._transport is not None else 0
        return flat_empty(needs, dtype, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the reusable buffers that are free."""
        return sum(tensor.nbytes for free in self._free.values() for pair in free for tensor in pair)
