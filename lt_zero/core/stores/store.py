"""Stores: each keeps one flat tensor of a bucket between uses.

A bucket owns its tensors as stores (core/engine/bucket.py): master weights, what gathers read, the accumulator,
optimizer states. A ``Place`` makes the stores of one bucket. What differs between device memory, host memory and files
is in their classes: ``Store`` here, ``HostStore`` (host_store.py), ``NvmeStore`` (nvme_store.py).
While a thread steps a bucket (background.py), its stores are the thread's: others wait for ``BackgroundStep`` first.

Note [Pairs of a store]
    A store launches no collectives. The code that does asks it for the tensor (``source`` of a gather, ``target`` of a
    reduction), waits for the work, and tells the store (``sent``, ``arrived``). A collective cannot be launched before
    its input is there, so the gather of a streamed store is launched where it is waited for, on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lt_zero.common.moment_form import MomentForm

WEIGHTS = "weights"  # kind of stores of what gathers read
CODES = "codes"  # kind of stores of encoded weights, as uint8
STATE = "state "  # kinds of optimizer states begin so
Gap = tuple[int, int]  # elements [lo, hi) of a shard that belong to no parameter


class CopyEvent(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Make the current stream wait; its later work may read the target and change the source."""

    def synchronize(self) -> None:
        """Block the host until the copy is done."""


class Store:
    """Keeps one flat tensor (1D), here in memory of the device. Subclasses keep it elsewhere.

    Args:
        dtype: of the tensor.
        make: allocates it; called when values are written for the first time, and after ``discard``.

    Attributes:
        streamed: it takes memory only while it is used: a step reads it before, and writes it after.
    """

    streamed = False

    def __init__(self, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.dtype, self._make = dtype, make
        self._tensor: Tensor | None = None  # 1D
        self._sent: CopyEvent | None = None  # the end of the last copy to the device that reads host memory

    @classmethod
    def of(cls, tensor: Tensor) -> Store:
        """A store of ``tensor`` (1D) itself, in memory of the device."""
        store = Store(tensor.dtype, lambda: tensor)
        store.overwrite()
        return store

    # ---- values ------------------------------------------------------------------------------------------------

    @property
    def tensor(self) -> Tensor:
        """The values if they are in memory, otherwise NaN of the same shape."""
        assert self._tensor is not None
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensor takes now."""
        return self._tensor.nbytes if self._tensor is not None else 0

    def read(self) -> Tensor:
        """The values, which the caller does not change."""
        return self.tensor

    def write(self) -> Tensor:
        """The values, which the caller changes."""
        return self.read()

    def overwrite(self) -> Tensor:
        """The tensor with undefined values, for a caller that writes all of it."""
        if self._tensor is None:
            self._tensor = self._make()
        return self._tensor

    def lend(self, offset: int, shape: torch.Size, kind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """A view of some elements that callers may keep; ``kind`` wraps it in a type that has ``data``."""
        view = self.tensor[offset : offset + shape.numel()].view(shape)
        return kind(view) if kind is not None else view

    def owns(self, value: Tensor) -> bool:
        """True if ``value`` is a view that ``lend`` returned."""
        return self._tensor is not None and value.data_ptr() == self._tensor.data_ptr()

    def discard(self) -> None:
        """Drop the values, which must not be read before they are overwritten."""
        self._tensor = None

    def widened(self) -> Store:
        """The values in fp32 memory of the same device; this store is discarded."""
        wide = self.tensor.float()
        self.discard()
        return Store.of(wide)

    # ---- moving: no-ops where the tensor is always in memory -----------------------------------------------------

    def prefetch(self) -> None:
        """Start reading the values if they are away."""

    def begin_step(self) -> None:
        """Have the values in memory for an optimizer step, which changes them."""

    def end_use(self) -> None:
        """Start writing the values if they were changed. ``wait_written`` completes this and frees the memory."""

    def wait_written(self) -> None:
        """Wait for a write that ``end_use`` started, and free the memory."""

    # ---- collectives -------------------------------------------------------------------------------------------

    def source(self, shard: Tensor) -> AbstractContextManager[Tensor | None]:
        """Context in which a gather of the values is launched, which are in ``shard`` (1D, on the device) then.

        It gives the values where peers may read them, too; None: nowhere. Call ``sent`` after the wait for the gather.
        A streamed store reads its file here: call ``prefetch`` early, and this as late as possible.
        """
        shard.copy_(self.tensor)
        return nullcontext(self.tensor)

    def sent(self) -> None:
        """Note that a gather from ``source`` was waited for."""

    def target(self, add: bool, whole: bool = False) -> tuple[Tensor, bool]:
        """The tensor on the device (1D) for the result of a reduction, which replaces the values, or is added to them.

        Returns the tensor, and whether the reduction has to add to it. Call ``arrived`` once the result is there.
        ``whole``: it adds to the values themselves, which are in the tensor.
        """
        return (self.write() if add else self.overwrite()), add

    def arrived(self) -> None:
        """Take the result of a reduction, which is in ``target`` now."""

    def wait_sent(self) -> None:
        """Wait for the last copy to the device that reads host memory, which is changed next."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    # ---- as the compute copy of master weights that are kept elsewhere -------------------------------------------

    def kernel_target(self, master: torch.dtype, covers: Callable[[], bool]) -> Tensor | None:
        """The target to which the kernel writes the copy while it updates master weights; None: ``refresh`` copies
        them.

        Args:
            master: dtype of the master weights.
            covers: whether the kernel writes all elements but the gaps.
        """
        return self.tensor

    def refresh(self, master: Store, written: bool, gaps: Sequence[Gap]) -> None:
        """Copy the master weights, which are in memory; ``written``: the kernel has written ``kernel_target``."""
        if not written:
            self.tensor.copy_(master.tensor)

    def cancel(self) -> None:
        """Forget ``kernel_target`` after the kernel failed."""

    def note_readers(self) -> None:
        """Note the queued work on the device that still reads the copy, before a background step."""

    def wait_copied(self) -> None:
        """Make the current stream wait until the copy is up to date."""

    def publishing(self) -> AbstractContextManager[object]:
        """Context for the background thread to gather the copies of all ranks."""
        return nullcontext()


@dataclass(frozen=True)
class Place:
    """Makes the stores of one bucket.

    Attributes:
        store: makes a store for a kind of values: "master", ``WEIGHTS``, ``CODES``, "grad",
            "state ...", "beside ..."; the other arguments are the number of elements and the dtype.
        offloads: whether its stores are off the device.
        streamed: whether its stores are, see ``Store``.
        feed: makes the store of a compute copy (1D, on the device) of master weights that are kept here; None: an
            ordinary store.
    """

    store: Callable[[str, int, torch.dtype], Store]
    offloads: bool = False
    streamed: bool = False
    feed: Callable[[Tensor], Store] | None = None

    def state(self, key: str, numel: int, form: MomentForm) -> Store | None:
        """A new store for the optimizer's element-wise state ``key``, with zeros in memory; None: it stays beside its
        fragment.
        """
        # An optimizer may call a state "master".
        return self.store(f"{STATE}{key}", form.length(numel), form.dtype) if self.streamed else None

    def fed(self, copy: Store) -> Store:
        """``copy`` as the compute copy of master weights that are kept here."""
        return self.feed(copy.tensor) if self.feed is not None and type(copy) is Store else copy


@dataclass
class Places:
    """The places of one bucket. Everything that makes its stores shares this object, and asks it then.

    Attributes:
        step: of what a step reads and writes: master weights, optimizer states and gradients.
        gather: of what gathers read.
    """

    step: Place
    gather: Place

    def change(self, step: Place, gather: Place) -> None:
        """Make stores in other places from now on."""
        self.step = step
        self.gather = gather


class Awaited(Protocol):
    """Work on a bucket in another thread."""

    def wait(self) -> bool:
        """Wait for its end; returns False at once in the thread that does it."""


class BackgroundStep:
    """The background step that owns a bucket, if any. Other threads wait before they access the bucket's stores.

    Attributes:
        job: that has the bucket; None: there is nothing to wait for.
    """

    def __init__(self) -> None:
        self.job: Awaited | None = None
        self._then: list[Callable[[], None]] = []

    def begin(self, job: Awaited) -> None:
        """Give the bucket to ``job`` until ``wait``."""
        self.job = job

    def wait(self) -> bool:
        """Wait until this thread may use the bucket; returns whether a job had it. No-op in the background thread."""
        if self.job is None or not self.job.wait():
            return False
        self.job = None
        then = self._then
        self._then = []
        for work in then:
            work()
        return True

    def then(self, work: Callable[[], None]) -> None:
        """Call ``work`` now, or when the job was waited for."""
        if self.job is None:
            work()
        else:
            self._then.append(work)


def device_place(
    allocate: Callable[[int, torch.dtype], Tensor], shared: Callable[[int, torch.dtype], Tensor] | None = None
) -> Place:
    """Memory of the device.

    Args:
        allocate: allocates (elements, dtype).
        shared: allocates weights, which peers may read; default: ``allocate``.
    """
    return Place(
        lambda kind, numel, dtype: Store(
            dtype, partial(shared if kind in ("master", WEIGHTS) and shared is not None else allocate, numel, dtype)
        )
    )


class Speed(NamedTuple):
    """Bytes per second of one process on an otherwise idle disk."""

    read: float
    write: float

    def seconds(self, bytes_read: int, bytes_written: int) -> float:
        """Disk time for these bytes; reads and writes share the disk."""
        return bytes_read / self.read + bytes_written / self.write


def put_away(stores: Iterable[Store]) -> None:
    """Write streamed stores and free their memory."""
    stores = list(stores)
    for store in stores:
        # Start all writes before waiting for the first: they go on side by side.
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
        # Evaluate the group once: the write has to be waited for on these stores.
        leaving.append(group())
        for store in leaving[-1]:
            store.end_use()
        while len(leaving) > (max(0, min(1, room - 2)) if write_behind else 0):
            for store in leaving.popleft():
                store.wait_written()
    for stores in leaving:
        for store in stores:
            store.wait_written()


class Sized(Protocol):
    """A code with a fixed number of bytes."""

    def nbytes(self, numel: int) -> int: ...


def record_nbytes(numel: int, dtype: torch.dtype, codec: Sized | None = None) -> int:
    """Bytes of a tensor of ``numel`` elements; ``codec``: it rests encoded. Files round them up to full blocks."""
    return numel * dtype.itemsize if codec is None else codec.nbytes(numel)
