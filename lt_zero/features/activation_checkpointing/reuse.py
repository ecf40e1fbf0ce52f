"""Reusable memory for saved activations: buffers of any size, or slots of preallocated blocks.

Not thread-safe: ``ActivationStore`` (lt_zero/features/activation_checkpointing/stores.py) holds a lock.

Note [Lent memory]
    Autograd may save views of a tensor over reusable memory, and the memory may be reused only after the last view has
    died. ``Loan.lend`` therefore creates a tensor with a storage of its own over the piece (through DLPack, on any
    device). When that storage dies, a finalizer returns the piece. Finalizers may run in the middle of any code, so
    they only append to a deque.
"""

from __future__ import annotations

import logging
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lt_zero.core.stores.pinned import rounded
from lt_zero.core.stores.store import CopyEvent
from lt_zero.offload.copy_streams import DONE

log = logging.getLogger("lt_zero")

_ALIGN = 512  # bytes: what torch's allocator aligns to on a GPU
_SIMILAR = 4  # sizes that differ by at most this factor share slots


class Loan:
    """A piece of memory in use. The holder calls ``give_back`` exactly once, also after ``lend``.

    Args:
        tensor: 1D uint8, at least as long as requested.
        back: called with the loan when its last user is gone; ``after`` must be waited for before a reuse.
        returned: finalizers of lent tensors append the loan here.
        ready: a copy that may still read the memory. The current stream waits for it already; the host has to wait
            before it writes there.
    """

    def __init__(
        self, tensor: Tensor, back: Callable[[Loan], None], returned: deque[Loan], ready: CopyEvent = DONE
    ) -> None:
        self.tensor = tensor
        self.ready = ready
        self.after = DONE
        self._back = back
        self._returned = returned
        self._users = 1

    def give_back(self, after: CopyEvent = DONE) -> None:
        """Release one use, of the holder or of a lent tensor; ``after``: a copy that still uses the memory."""
        if after is not DONE:
            self.after = after
        self._users -= 1
        if not self._users:
            self._back(self)

    def lend(self, nbytes: int) -> Tensor:
        """The first bytes as a tensor; it and its views keep the loan in use. See Note [Lent memory]."""
        piece = self.tensor[:nbytes]
        self._users += 1
        weakref.finalize(piece, self._returned.append, self)
        return from_dlpack(piece)


def reap(returned: deque[Loan]) -> None:
    """Give back the loans that finalizers have returned."""
    while returned:
        returned.popleft().give_back()


class LoanPool:
    """Buffers for one tensor each; a returned buffer is reused for the next tensor that fits.

    There are at most as many buffers as were in use at the same time. If no free buffer is large enough, the smallest
    one is replaced by a larger one, so varying batch sizes end with buffers for the largest.

    Args:
        make: allocates a 1D uint8 tensor of at least the given number of bytes.

    Attributes:
        made: allocations so far.
        nbytes: bytes allocated, in use or free.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self.made = 0
        self.nbytes = 0
        self._make = make
        self._free: list[Loan] = []
        self._returned: deque[Loan] = deque()

    def take(self, nbytes: int) -> Loan:
        """An uninitialized piece of at least ``nbytes`` that the current stream may write to."""
        reap(self._returned)
        self._free.sort(key=lambda loan: loan.tensor.numel())
        found = next((i for i, loan in enumerate(self._free) if loan.tensor.numel() >= nbytes), None)
        if found is not None:
            old = self._free.pop(found)
            old.after.wait()
            return Loan(old.tensor, self._free.append, self._returned, old.after)
        if self._free:
            old = self._free.pop(0)
            # A copy may still use the memory that is unmapped now.
            old.after.synchronize()
            self.nbytes -= old.tensor.numel()
        self.made += 1
        tensor = self._make(nbytes)  # 1D
        self.nbytes += tensor.numel()
        return Loan(tensor, self._free.append, self._returned)


class Arena:
    """Slots of preallocated blocks, one block for all tensors of similar size.

    The first tensor sets the slot size. A tensor that is larger, or finds no free slot, gets ordinary memory, with one
    warning. Once a block is empty, it is reallocated with larger slots, and with more of them if ``grows``.

    Args:
        make: allocates a 1D uint8 tensor of the given number of bytes.
        count: slots of a block; with ``grows``, the initial number.
        grows: whether the number of slots may grow.
        spare: additional slots for tensors that are brought back while the others are still in use.
    """

    def __init__(self, make: Callable[[int], Tensor], count: int, grows: bool, spare: int = 0) -> None:
        self.made = 0
        self.make = make
        self.count = count
        self.grows = grows
        self.spare = spare
        self.returned: deque[Loan] = deque()
        self.warned = False
        self._blocks: list[_Slots] = []

    @property
    def nbytes(self) -> int:
        return sum(block.size * block.count + block.separate for block in self._blocks)

    def take(self, nbytes: int) -> Loan:
        reap(self.returned)
        similar = [b for b in self._blocks if b.size <= _SIMILAR * nbytes and nbytes <= _SIMILAR * b.size]
        if not similar:
            self._blocks.append(_Slots(self, rounded(nbytes, _ALIGN), self.count + self.spare))
            similar = self._blocks[-1:]
        return min(similar, key=lambda block: (nbytes > block.size, block.size)).take(nbytes)


class _Slots:
    """The block of one slot size, and the tensors of that size that got ordinary memory."""

    def __init__(self, arena: Arena, size: int, count: int) -> None:
        self._arena = arena
        self.size = size
        self.count = count
        self.separate = 0
        self._larger = size
        self._used = 0
        self._most = 0
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
            return Loan(old.tensor, self._back, self._arena.returned, old.after)
        self._warn(nbytes)
        self._larger = max(self._larger, rounded(nbytes, _ALIGN))
        self._arena.made += 1
        self.separate += nbytes
        return Loan(self._arena.make(nbytes), lambda _: self._count_freed(nbytes), self._arena.returned)

    def _wanted(self) -> int:
        return max(self.count, self._most) if self._arena.grows else self.count

    def _renew(self) -> None:
        for loan in self._free:
            # A copy may still use the memory that is freed below.
            loan.after.synchronize()
        # Free the old block before allocating the new one.
        self._free, self._memory = [], torch.empty(0)
        self.size, self.count, self._most = self._larger, self._wanted(), 0
        self._arena.made += 1
        self._memory = self._arena.make(self.size * self.count)
        pieces = [self._memory[i * self.size : (i + 1) * self.size] for i in reversed(range(self.count))]
        self._free = [Loan(piece, self._back, self._arena.returned) for piece in pieces]

    def _back(self, loan: Loan) -> None:
        self._used -= 1
        # Sorted so that the lowest address is reused first.
        insort(self._free, loan, key=lambda free: -free.tensor.data_ptr())

    def _count_freed(self, nbytes: int) -> None:
        self._used -= 1
        self.separate -= nbytes

    def _warn(self, nbytes: int) -> None:
        arena = self._arena
        # A block that grows does so before the next step, without a warning.
        if arena.warned or (arena.grows and nbytes <= self.size):
            return
        arena.warned = True
        why = f"all {self.count} slots are in use" if nbytes <= self.size else f"slots have {self.size} bytes"
        log.warning(
            "activation_checkpointing.contiguous_memory_optimization: a saved input of %d bytes does not fit, %s. It "
            "is stored in separate memory%s.",
            nbytes,
            why,
            "; slots grow when all are free" if nbytes > self.size else f"; raise number_checkpoints={arena.count}",
        )


Memory = LoanPool | Arena
