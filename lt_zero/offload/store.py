"""Where one flat tensor of a bucket is kept between uses.

A bucket owns its tensors as stores (engine/bucket.py): master weights, what gathers read, the accumulator, optimizer
states. A ``Place`` makes the stores of one bucket. What differs between device memory, host memory and files is in
their classes: ``DeviceStore`` here, ``HostStore`` (host_store.py), ``NvmeStore`` (nvme_store.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lt_zero.io.thread_pool import SwapError
from lt_zero.offload.copy_streams import CopyEvent

Gap = tuple[int, int]  # elements [lo, hi) of a shard that belong to no parameter


class Waits(Protocol):
    """A launched collective or copy."""

    def wait(self) -> Any: ...


# Launches the all-gather of a shard; the argument is this rank's shard, if peers can read it there.
Gather = Callable[[Tensor | None], Waits]
# Launches a reduction into a tensor on the device; the second argument: add to it.
Reduce = Callable[[Tensor, bool], Waits]


class Store(Protocol):
    """Keeps one flat tensor (1D).

    Attributes:
        dtype: of the tensor.
        streamed: it takes memory only while it is used: a step reads it before, and writes it after.
    """

    dtype: torch.dtype
    streamed: bool

    # ---- values ------------------------------------------------------------------------------------------------

    @property
    def tensor(self) -> Tensor:
        """The values if they are in memory, otherwise NaN of the same shape."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensor takes now."""

    def read(self) -> Tensor:
        """The values, which the caller does not change."""

    def write(self) -> Tensor:
        """The values, which the caller changes."""

    def overwrite(self) -> Tensor:
        """The tensor with undefined values, for a caller that writes all of it."""

    def lend(self, offset: int, shape: torch.Size, kind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """A view of some elements that callers may keep; ``kind`` wraps it in a type that has ``data``."""

    def owns(self, value: Tensor) -> bool:
        """Whether ``value`` is a view that ``lend`` returned."""

    def discard(self) -> None:
        """Drop the values, which must not be read before they are overwritten."""

    def widened(self) -> Store:
        """The values in fp32 memory of the same device; this store is discarded."""

    # ---- moving ------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start reading the values if they are away."""

    def begin_step(self) -> None:
        """Have the values in memory for an optimizer step, which changes them."""

    def end_use(self) -> None:
        """Start writing the values if they were changed. ``wait_written`` completes this and frees the memory."""

    def wait_written(self) -> None:
        """Wait for a write that ``end_use`` started, and free the memory."""

    # ---- collectives -------------------------------------------------------------------------------------------

    def launch_gather(self, shard: Tensor, gather: Gather) -> Waits:
        """Start copying the values to ``shard`` (1D, on the device) and the ``gather`` of it."""

    def launch_reduce(self, reduce: Reduce, add: bool) -> Waits:
        """Start a reduction whose result becomes the values, or is added to them."""

    def wait_sent(self) -> None:
        """Wait for the last copy to the device that reads host memory, which is changed next."""

    # ---- as the compute copy of master weights that are kept elsewhere -------------------------------------------

    def kernel_target(self, master: torch.dtype, covers: Callable[[], bool]) -> Tensor | None:
        """Where the kernel can write the copy while it updates master weights; None: ``refresh`` copies them.

        Args:
            master: dtype of the master weights.
            covers: whether the kernel writes all elements but the gaps.
        """

    def refresh(self, master: Store, written: bool, gaps: Sequence[Gap]) -> None:
        """Copy the master weights, which are in memory; ``written``: the kernel has written ``kernel_target``."""

    def cancel(self) -> None:
        """Forget ``kernel_target`` after the kernel failed."""

    def note_readers(self) -> None:
        """Before a background step: note which work queued on the device still reads the copy."""

    def wait_copied(self) -> None:
        """Make the current stream wait until the copy is up to date."""

    def publishing(self) -> AbstractContextManager[object]:
        """Context in which the background thread gathers the copies of all ranks."""


class Place(Protocol):
    """Makes the stores of one bucket.

    Attributes:
        offloads: whether its stores are off the device.
        streamed: whether its stores are, see ``Store``.
    """

    offloads: bool
    streamed: bool

    def store(self, kind: str, numel: int, dtype: torch.dtype) -> Store:
        """A new store for a ``kind`` of values: "master", "weights" (which gathers read), "grad"."""

    def state(self, key: str, numel: int, dtype: torch.dtype) -> Store | None:
        """A new store for the optimizer's element-wise state ``key``, with zeros in memory; None: it stays beside its
        fragment.
        """

    def fed(self, copy: Store) -> Store:
        """``copy`` as the compute copy of master weights that are kept here."""


class DeviceStore:
    """Keeps a tensor in memory of the device.

    Args:
        dtype: of the tensor.
        make: allocates it; called when values are written for the first time, and after ``discard``.
    """

    streamed = False

    def __init__(self, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.dtype, self._make = dtype, make
        self._tensor: Tensor | None = None  # 1D
        self._sent: CopyEvent | None = None  # of the last copy to the device that reads host memory

    @classmethod
    def of(cls, tensor: Tensor) -> DeviceStore:
        """A store of ``tensor`` (1D) itself."""
        store = cls(tensor.dtype, lambda: tensor)
        store.overwrite()
        return store

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None
        return self._tensor

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes if self._tensor is not None else 0

    def read(self) -> Tensor:
        return self.tensor

    def write(self) -> Tensor:
        return self.read()

    def overwrite(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._make()
        return self._tensor

    def lend(self, offset: int, shape: torch.Size, kind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        view = self.tensor[offset : offset + shape.numel()].view(shape)
        return kind(view) if kind is not None else view

    def owns(self, value: Tensor) -> bool:
        return self._tensor is not None and value.data_ptr() == self._tensor.data_ptr()

    def discard(self) -> None:
        self._tensor = None

    def widened(self) -> Store:
        wide = self.tensor.float()
        self.discard()
        return DeviceStore.of(wide)

    def prefetch(self) -> None:
        return None

    begin_step = end_use = wait_written = cancel = note_readers = wait_copied = prefetch

    def wait_sent(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def launch_gather(self, shard: Tensor, gather: Gather) -> Waits:
        shard.copy_(self.tensor)
        return gather(self.tensor)

    def launch_reduce(self, reduce: Reduce, add: bool) -> Waits:
        return reduce(self.write() if add else self.overwrite(), add)

    def kernel_target(self, master: torch.dtype, covers: Callable[[], bool]) -> Tensor | None:
        return self.tensor

    def refresh(self, master: Store, written: bool, gaps: Sequence[Gap]) -> None:
        if not written:
            self.tensor.copy_(master.tensor)

    def publishing(self) -> AbstractContextManager[object]:
        return nullcontext()


class DevicePlace:
    """Memory of the device.

    Args:
        allocate: allocates (elements, dtype).
        shared: allocates weights, which peers may read; default: ``allocate``.
    """

    offloads = streamed = False

    def __init__(
        self,
        allocate: Callable[[int, torch.dtype], Tensor],
        shared: Callable[[int, torch.dtype], Tensor] | None = None,
    ) -> None:
        self._allocate, self._shared = allocate, shared or allocate

    def store(self, kind: str, numel: int, dtype: torch.dtype) -> Store:
        make = self._allocate if kind == "grad" else self._shared
        return DeviceStore(dtype, lambda: make(numel, dtype))

    def state(self, key: str, numel: int, dtype: torch.dtype) -> Store | None:
        return None

    def fed(self, copy: Store) -> Store:
        return copy


class Speed(NamedTuple):
    """Bytes per second of one process on an otherwise idle disk."""

    read: float
    write: float

    def seconds(self, bytes_read: int, bytes_written: int) -> float:
        """Disk time for these bytes; reads and writes share the disk."""
        return bytes_read / self.read + bytes_written / self.write


class Tier(Protocol):
    """What backs the streamed stores of all buckets on this rank.

    Attributes:
        room: buckets that may be in memory at a time.
        problem: the first error. See nvme_store.py, Note [A failing disk].
        where: its name for the user.
    """

    room: int
    problem: SwapError | None
    where: str

    def place(self, record: int, link: Any) -> Place:
        """The place of the stores of bucket ``record``; ``link`` to the device, if it has memory of its own."""

    def require(self, bytes_per_element: int) -> None:
        """Check that there is space for states that do not exist yet.

        Raises:
            SwapError: the free space is too small.
        """

    @property
    def spare_nbytes(self) -> int:
        """Bytes of memory that are kept for the next bucket."""

    @property
    def bytes_on_disk(self) -> int:
        """Bytes that are stored."""

    def streaming(self) -> AbstractContextManager[object]:
        """Context in which freed memory is kept for the next bucket."""

    def speed(self, nbytes: int) -> Speed:
        """Measured bytes per second of reads and of writes, with about ``nbytes``."""

    def rest(self) -> None:
        """End all threads; the next access starts them again."""

    def close(self) -> None:
        """Release everything."""


def put_away(stores: Iterable[Store]) -> None:
    """Write streamed stores and free their memory."""
    stores = list(stores)
    for store in stores:
        store.end_use()
    for store in stores:
        store.wait_written()


def stream(
    groups: Sequence[Callable[[], list[Store]]], room: int, read_ahead: bool, write_behind: bool
) -> Iterator[int]:
    """Have groups of stores in memory for a step, one after the other.

    While group k is visited, k+1 is read and k-1 is written. At most ``room`` groups are in memory at a time; with room
    for two, nothing is read ahead while another group is being written.

    Args:
        groups: one function per bucket that returns its stores; it is called again after the visit, so that stores
            that the visit created are written too.
        room: groups that may be in memory at a time.
        read_ahead: read the next group during a visit.
        write_behind: write the previous group during a visit.

    Yields:
        The index of the group that is in memory.
    """
    leaving: deque[list[Store]] = deque()
    for number, group in enumerate(groups):
        for store in group():
            store.prefetch()
        if read_ahead and number + 1 < len(groups) and 2 + len(leaving) <= room:
            for store in groups[number + 1]():
                store.prefetch()
        for store in group():
            store.begin_step()
        yield number
        leaving.append(group())  # evaluated once: the write has to be waited for on these stores
        for store in leaving[-1]:
            store.end_use()
        while len(leaving) > (max(0, min(1, room - 2)) if write_behind else 0):
            for store in leaving.popleft():
                store.wait_written()
    for stores in leaving:
        for store in stores:
            store.wait_written()
