"""Storage for saved activations between forward and backward: on the device, or in host memory.

Note [A source that changes]
    A copy to the host overlaps with compute, so nobody may write to the source before it is done. Autograd does not
    see a forward that changes its own input. Therefore the source's version is compared when the copy is waited for,
    and ``bring`` raises the error that autograd raises for a saved tensor that was changed.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from lt_zero.common.compat import version_of
from lt_zero.io.thread_pool import SwapError
from lt_zero.offload.copy_streams import DONE, CopyEvent, CopyStream
from lt_zero.offload.reuse import Loan, Memory

_IN_FLIGHT = 4  # copies to the host in flight; each keeps its source alive


class Place(Protocol):
    """The stored bytes of one saved activation."""

    def prefetch(self) -> bool:
        """Start copying to the device; False if there is no buffer for that."""

    def bring(self) -> Tensor:
        """A copy on the device, 1D uint8. Always a copy: recomputation may change it, a retained graph asks again.

        Raises:
            RuntimeError: the source was changed before it was copied.
        """

    def free(self) -> None:
        """Release the memory. The last call on this object."""


class Rest(Protocol):
    """Stores saved activations: on the device, in host memory or in files."""

    problem: SwapError | None  # the first error; see offload/nvme_store.py, Note [A failing disk]

    def put(self, source: Tensor) -> Place:
        """Store the bytes (1D uint8, on the device). See Note [A source that changes]."""

    def end_pass(self) -> None:
        """Called between passes, when nothing is stored."""

    def stats(self) -> dict[str, int]:
        """``made``: allocations so far; ``memory``, ``disk``: bytes allocated, in use or not."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class Source:
    """The source of a copy to the host. See Note [A source that changes]."""

    def __init__(self, tensor: Tensor, event: CopyEvent) -> None:
        self._tensor = None if event is DONE else tensor
        self._version, self.event, self._changed = version_of(tensor), event, 0

    def wait_copied(self, host: bool = False) -> None:
        """Make the current stream, or the host, wait for the copy, and drop the source."""
        if host:
            self.event.synchronize()
        else:
            self.event.wait()
        if self._tensor is not None:
            self._changed = version_of(self._tensor) - self._version
        self._tensor, self.event = None, DONE

    def check(self) -> None:
        """Raise if the source was changed before the copy was waited for."""
        if self._changed:
            raise changed(self._version + self._changed, self._version)


def changed(found: int, expected: int) -> RuntimeError:
    """Autograd's error for a saved tensor that was changed in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: an input of "
        f"a checkpointed module is at version {found}; expected version {expected} instead. Write to a copy of it."
    )


class OnDevice:
    """Stores saved activations on the device itself.

    Args:
        memory: allocator of device memory.
    """

    problem: SwapError | None = None

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def put(self, source: Tensor) -> Place:
        loan = self.memory.take(source.numel())
        loan.tensor[: source.numel()].copy_(source)
        return _DevicePlace(self, loan, source.numel())

    def end_pass(self) -> None:
        return None

    def stats(self) -> dict[str, int]:
        return {"made": self.memory.made, "memory": self.memory.nbytes, "disk": 0}

    close = end_pass


class _DevicePlace:
    def __init__(self, rest: OnDevice, loan: Loan, nbytes: int) -> None:
        self._rest, self._loan, self._nbytes = rest, loan, nbytes

    def prefetch(self) -> bool:
        return True

    def bring(self) -> Tensor:
        loan = self._rest.memory.take(self._nbytes)
        tensor = loan.lend(self._nbytes)
        loan.give_back()
        return tensor.copy_(self._loan.tensor[: self._nbytes])

    def free(self) -> None:
        self._loan.give_back()


class InHost:
    """Stores saved activations in host memory; copies overlap with compute (offload/copy_streams.py).

    Args:
        memory: allocator of pinned host memory.
        device: device of the activations.
    """

    problem: SwapError | None = None

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self.memory, self.device = memory, device
        late = device.type == "cpu"
        self.to_host, self.to_device = CopyStream(device, late), CopyStream(device, late)
        self._leaving: deque[Source] = deque()

    def put(self, source: Tensor) -> Place:
        loan = self.memory.take(source.numel())
        leaving = Source(source, self.to_host.copy(loan.tensor[: source.numel()], source))
        self._leaving.append(leaving)
        if len(self._leaving) > _IN_FLIGHT:
            self._leaving.popleft().wait_copied(host=True)
        return _HostPlace(self, loan, source.numel(), leaving)

    def end_pass(self) -> None:
        while self._leaving:
            self._leaving.popleft().wait_copied()

    def stats(self) -> dict[str, int]:
        return {"made": self.memory.made, "memory": self.memory.nbytes, "disk": 0}

    def close(self) -> None:
        self.end_pass()


class _HostPlace:
    def __init__(self, rest: InHost, loan: Loan, nbytes: int, source: Source) -> None:
        self._rest, self._loan, self._nbytes, self._source = rest, loan, nbytes, source
        self._target: Tensor | None = None
        self._coming: CopyEvent = DONE

    def prefetch(self) -> bool:
        if self._target is None:
            self._source.wait_copied()
            self._target = torch.empty(self._nbytes, dtype=torch.uint8, device=self._rest.device)
            self._coming = self._rest.to_device.copy(self._target, self._loan.tensor[: self._nbytes])
        return True

    def bring(self) -> Tensor:
        self._source.wait_copied()
        self._source.check()
        self.prefetch()
        self._coming.wait()
        target, self._target = self._target, None
        assert target is not None
        return target

    def free(self) -> None:
        self._source.wait_copied()
        self._coming.wait()  # or the copy would write into memory that the allocator has reused
        self._target = None
        self._loan.give_back(self._coming)
