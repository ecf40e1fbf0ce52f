"""Where tensors rest that backward will ask for: in a block on the device, or in host memory.

Note [A source that changes]
    A copy to the host runs beside what the device computes, so nobody may write to the source before it is done. What
    autograd does not see (a forward that changes its own input) is told by the source's version: it is compared when
    the copy is waited for, and the place then raises as autograd does for a saved tensor that was changed.

Note [Copies are handed out]
    Recomputation may change its inputs in place, and a graph that is retained asks again: what ``bring`` returns is
    always a copy, and what rests stays as it was.
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

_FLYING = 4  # copies to the host that are on their way, and keep their sources alive


class Place(Protocol):
    """One tensor at rest, as bytes."""

    def prefetch(self) -> bool:
        """Start to bring it; whether there is room for that."""

    def bring(self) -> Tensor:
        """A copy on the device, 1D uint8.

        Raises:
            RuntimeError: the source was changed before it was copied.
        """

    def free(self) -> None:
        """It is not needed any more. Once, and nothing else afterwards."""


class Rest(Protocol):
    """Takes tensors and keeps them."""

    problem: SwapError | None  # the first that went wrong; see offload/nvme_files.py, Note [A failing disk]

    def put(self, source: Tensor) -> Place:
        """Keep the bytes (1D uint8, on the device). See Note [A source that changes]."""

    def end_pass(self) -> None:
        """Nothing is kept now."""

    def stats(self) -> dict[str, int]:
        """``made``: allocations so far; ``memory``, ``disk``: bytes that are taken, in use or not."""

    def close(self) -> None:
        """Give all back. Again a no-op."""


class Source:
    """What a copy to the host reads from. See Note [A source that changes]."""

    def __init__(self, tensor: Tensor, event: CopyEvent) -> None:
        self._tensor = None if event is DONE else tensor
        self._version, self.event, self._changed = version_of(tensor), event, 0

    def wait_copied(self, host: bool = False) -> None:
        """The current stream, or the host, waits for the copy; the source is let go."""
        if host:
            self.event.synchronize()
        else:
            self.event.wait()
        if self._tensor is not None:
            self._changed = version_of(self._tensor) - self._version
        self._tensor, self.event = None, DONE

    def check(self) -> None:
        """Raise if it was changed before the copy was waited for."""
        if self._changed:
            raise changed(self._version + self._changed, self._version)


def changed(found: int, expected: int) -> RuntimeError:
    """What autograd says of a saved tensor that was written to."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: an input of "
        f"a checkpointed module is at version {found}; expected version {expected} instead. Write to a copy of it."
    )


class OnDevice:
    """Tensors rest on the device itself, in memory of their own.

    Args:
        memory: where.
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
    """Tensors rest in host memory. Copies run beside what the device computes. See offload/copy_streams.py.

    Args:
        memory: page-locked host memory.
        device: where tensors come from.
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
        if len(self._leaving) > _FLYING:
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
        self._coming.wait()  # or memory that is still being written would be another tensor's
        self._target = None
        self._loan.give_back(self._coming)
