"""Memory that saved tensors rest in, used again from step to step: buffers of any size, or slots of one block.

Note [Lent memory]
    A tensor over a piece of reusable memory has views, and autograd saves those. Who wants to use the piece again has
    to know when the last of them is gone. ``Loan.lend`` therefore makes a tensor with a storage of its own over the
    piece (through DLPack, on any device); when that storage dies, so does what it was made of, whose finalizer hands
    the piece back. Finalizers run anywhere, in the middle of anything: they only append to a deque.

Note [Who calls]
    One thread at a time: the stores of lt_zero/activation hold a lock.
"""

from __future__ import annotations

import logging
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lt_zero.io.pinned import rounded
from lt_zero.offload.copy_streams import DONE, CopyEvent

log = logging.getLogger("lt_zero")

_ALIGN = 512  # bytes: what torch's allocator aligns to on a GPU
_KIN = 4  # sizes that differ by at most this factor share slots


class Loan:
    """A piece of memory that somebody uses. ``give_back`` once, whatever was lent of it.

    Args:
        tensor: 1D uint8, at least as long as asked for.
        back: takes it back when nobody uses it, with what has to be waited for before it is written to.
        returned: where finalizers leave a loan of which a tensor has died.
    """

    def __init__(self, tensor: Tensor, back: Callable[[Loan], None], returned: deque[Loan]) -> None:
        self.tensor, self.after = tensor, DONE
        self._back, self._returned, self._users = back, returned, 1

    def give_back(self, after: CopyEvent = DONE) -> None:
        """The holder, or a tensor that was lent, does not need it any more; ``after``: copies that still run."""
        if after is not DONE:
            self.after = after
        self._users -= 1
        if not self._users:
            self._back(self)

    def lend(self, nbytes: int) -> Tensor:
        """The first bytes as a tensor that keeps the loan while it or a view of it lives. See Note [Lent memory]."""
        piece = self.tensor[:nbytes]
        self._users += 1
        weakref.finalize(piece, self._returned.append, self)
        return from_dlpack(piece)


class Memory(Protocol):
    """Gives pieces of memory, and takes them back."""

    made: int  # allocations so far

    @property
    def nbytes(self) -> int:
        """All memory that it has."""

    def take(self, nbytes: int) -> Loan:
        """A piece of at least ``nbytes``, with any content, that the current stream may write to."""


class Stock:
    """Buffers, each for one tensor: what one gives back the next gets that fits.

    There are at most as many as were in use at one time. When a larger one is needed it takes the place of a free one,
    so batches whose size changes end with buffers for the largest.

    Args:
        make: gives a 1D uint8 tensor of at least so many bytes.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self.made, self.in_use, self._make, self._size = 0, 0, make, 0
        self._free: list[Loan] = []
        self._returned: deque[Loan] = deque()

    @property
    def nbytes(self) -> int:
        return self._size

    def take(self, nbytes: int) -> Loan:
        reap(self._returned)
        self._free.sort(key=lambda loan: loan.tensor.numel())
        found = next((i for i, loan in enumerate(self._free) if loan.tensor.numel() >= nbytes), None)
        self.in_use += 1
        if found is not None:
            old = self._free.pop(found)
            old.after.wait()
            return Loan(old.tensor, self._back, self._returned)
        if self._free:
            old = self._free.pop(0)
            old.after.synchronize()  # it is about to be unmapped
            self._size -= old.tensor.numel()
        self.made += 1
        tensor = self._make(nbytes)  # 1D
        self._size += tensor.numel()
        return Loan(tensor, self._back, self._returned)

    def _back(self, loan: Loan) -> None:
        self.in_use -= 1
        self._free.append(loan)


class Arena:
    """Slots of blocks that are allocated once: one block for all tensors of about one size.

    The first tensor says how large slots are. A larger one, or one too many, gets ordinary memory, which is told once;
    the block is made anew when it is empty, with larger slots, and with more if nobody said how many.

    Args:
        make: gives a 1D uint8 tensor of so many bytes.
        count: slots of a block, or where ``grows`` how many there are at first.
        grows: whether there may be more.
        spare: slots in addition, for what comes back while the others are still full.
    """

    def __init__(self, make: Callable[[int], Tensor], count: int, grows: bool, spare: int = 0) -> None:
        self.made, self.make, self.count, self.grows, self.spare = 0, make, count, grows, spare
        self.returned: deque[Loan] = deque()
        self.told = False
        self._blocks: list[_Slots] = []

    @property
    def nbytes(self) -> int:
        return sum(block.size * block.count + block.outside for block in self._blocks)

    def take(self, nbytes: int) -> Loan:
        reap(self.returned)
        kin = [b for b in self._blocks if b.size <= _KIN * nbytes and nbytes <= _KIN * b.size]
        if not kin:
            self._blocks.append(_Slots(self, rounded(nbytes, _ALIGN), self.count + self.spare))
            kin = self._blocks[-1:]
        return min(kin, key=lambda block: (nbytes > block.size, block.size)).take(nbytes)


class _Slots:
    def __init__(self, arena: Arena, size: int, count: int) -> None:
        self._arena, self.size, self.count, self.outside = arena, size, count, 0
        self._larger, self._used, self._most = size, 0, 0
        self._memory = torch.empty(0)
        self._free: list[Loan] = []
        self._renew()

    def take(self, nbytes: int) -> Loan:
        if len(self._free) == self.count and (self._larger > self.size or self._wanted() > self.count):
            self._renew()
        self._used += 1
        self._most = max(self._most, self._used)
        if nbytes <= self.size and self._free:
            old = self._free.pop()
            old.after.wait()
            return Loan(old.tensor, self._back, self._arena.returned)
        self._tell(nbytes)
        self._larger = max(self._larger, rounded(nbytes, _ALIGN))
        self._arena.made += 1
        self.outside += nbytes
        return Loan(self._arena.make(nbytes), lambda _: self._gone(nbytes), self._arena.returned)

    def _wanted(self) -> int:
        return max(self.count, self._most) if self._arena.grows else self.count

    def _renew(self) -> None:
        for loan in self._free:
            loan.after.synchronize()
        self._free, self._memory = [], torch.empty(0)  # the old memory goes first
        self.size, self.count, self._most = self._larger, self._wanted(), 0
        self._arena.made += 1
        self._memory = self._arena.make(self.size * self.count)
        pieces = [self._memory[i * self.size : (i + 1) * self.size] for i in reversed(range(self.count))]
        self._free = [Loan(piece, self._back, self._arena.returned) for piece in pieces]

    def _back(self, loan: Loan) -> None:
        self._used -= 1
        insort(self._free, loan, key=lambda free: -free.tensor.data_ptr())  # the first slot is the next to be used

    def _gone(self, nbytes: int) -> None:
        self._used -= 1
        self.outside -= nbytes

    def _tell(self, nbytes: int) -> None:
        arena = self._arena
        if arena.told or (arena.grows and nbytes <= self.size):  # it will be larger at the next step
            return
        arena.told = True
        why = f"its {self.count} slots are in use" if nbytes <= self.size else f"slots have {self.size} bytes"
        log.warning(
            "activation_checkpointing.contiguous_memory_optimization: a saved input of %d bytes finds no room, %s. It "
            "gets memory of its own%s.",
            nbytes,
            why,
            "; slots grow when all are free" if nbytes > self.size else f"; raise number_checkpoints={arena.count}",
        )


def reap(returned: deque[Loan]) -> None:
    """Take back what finalizers handed back."""
    while returned:
        returned.popleft().give_back()
