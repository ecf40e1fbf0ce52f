"""Tensors of buckets in host memory, and their copies to and from the device.

ZeRO-Offload, arXiv:2101.06840: gradients are reduced on the device and added up in host memory, the CPU kernel steps,
and the compute copy is sent to the device. Copies overlap with computation (copy_streams.py); a store keeps the copy
event of each until it is waited for.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from lt_zero.common.flat_storage import flat_empty
from lt_zero.core.stores.pinned import BufferPool, host_buffer
from lt_zero.core.stores.store import CopyEvent, Gap, Place, Store
from lt_zero.offload.copy_streams import CopyStream, StagingBuffer, StagingBuffers

_ARRIVING = 2  # reduced gradients that may be on their way to host memory


def host_empty(numel: int, dtype: torch.dtype, pin: bool) -> Tensor:
    """A 1D tensor in host memory for the life of a run; pinned if ``pin``, and pageable where that fails."""
    if not pin:
        return flat_empty(numel, dtype, torch.device("cpu"))
    return host_buffer(numel * dtype.itemsize, pin=True)[: numel * dtype.itemsize].view(dtype)


class HostLink:
    """Copy streams and buffers between host memory and a device. See copy_streams.py.

    Args:
        device: the device.
        pin: pin the buffers.
        nbytes: size of the largest tensor that is cast on its way to the device.
    """

    def __init__(self, device: torch.device, pin: bool, nbytes: int) -> None:
        late = device.type == "cpu"
        self.device, self.pin = device, pin
        self.to_host, self.to_device = CopyStream(device, late, limit=_ARRIVING), CopyStream(device, late)
        self.slots = StagingBuffers(lambda count: host_empty(count, torch.uint8, pin), nbytes)
        self.landing = BufferPool(spare=_ARRIVING + 1, make=lambda count: host_buffer(count, pin))
        self.arriving: deque[HostStore] = deque()  # stores to which reduced gradients are being copied


class HostStore(Store):
    """Keeps a tensor in host memory.

    Args:
        dtype: of the tensor.
        make: allocates it.
        link: to the device; None: the device is the CPU.
    """

    def __init__(self, dtype: torch.dtype, make: Callable[[], Tensor], link: HostLink | None) -> None:
        super().__init__(dtype, make)
        self._link = link
        self._landing: tuple[Tensor, bool] | None = None  # ``target`` of a reduction, and whether to add its result
        # What is reduced on the device comes by a copy: its event, and the buffer if it is to be added.
        self._incoming: tuple[CopyEvent, Tensor | None] | None = None
        # The background thread and the thread that launches reductions both take ``_incoming``.
        self._lock = threading.Lock()

    def read(self) -> Tensor:
        self.wait_arrived()
        return self.tensor

    def overwrite(self) -> Tensor:
        self.wait_arrived()
        return super().overwrite()

    def discard(self) -> None:
        self.wait_arrived()
        self._landing = None
        # Pinned memory is kept: pinning it again would take longer than filling it.
        if self._link is None or not self._link.pin:
            self._tensor = None

    def widened(self) -> Store:
        wide = self.read().float()
        self.discard()
        store = HostStore(torch.float32, lambda: wide, self._link)
        store.overwrite()
        return store

    # ---- collectives -------------------------------------------------------------------------------------------

    def source(self, shard: Tensor) -> AbstractContextManager[Tensor | None]:
        assert self._link is not None
        self._sent = self._link.to_device.copy(shard, self.tensor)
        # The gather reads ``shard``, so it runs on the copy stream after the copy that fills it.
        return self._link.to_device.in_line()

    def sent(self) -> None:
        # The collective of a single rank waits for nothing, so wait for the copy here.
        if self._sent is not None:
            self._sent.wait()

    def target(self, add: bool, whole: bool = False) -> tuple[Tensor, bool]:
        out, add = super().target(add, whole)
        if self._link is None:
            return out, add
        landing = flat_empty(out.numel(), out.dtype, self._link.device)
        if whole:
            self._link.to_device.copy(landing, out).wait()
        self._landing = landing, add and not whole
        return landing, whole

    def arrived(self) -> None:
        landed, self._landing = self._landing, None
        if landed is None or self._link is None:
            return
        link, (landing, add) = self._link, landed
        # What is added arrives in a buffer of its own: the host adds it when the copy has ended.
        buffer = link.landing.take(landing.nbytes) if add else None
        target = self.tensor if buffer is None else buffer[: landing.nbytes].view(landing.dtype)
        self._incoming = link.to_host.copy(target, landing), buffer
        link.arriving.append(self)
        if len(link.arriving) > _ARRIVING:
            link.arriving.popleft().wait_arrived()

    @torch.no_grad()
    def wait_arrived(self) -> None:
        """Wait for the copy of a reduced gradient, and add it if it is to be added. Thread-safe."""
        incoming = self._incoming
        if incoming is None:
            return
        event, buffer = incoming
        # Wait without the lock, so that a thread waits for no copy but its own.
        event.synchronize()
        with self._lock:
            # Another thread has taken it meanwhile: adding it again would count the gradient twice.
            if self._incoming is not incoming:
                return
            if buffer is not None:
                assert self._link is not None
                self.tensor.add_(buffer[: self.tensor.nbytes].view(self.tensor.dtype))
                self._link.landing.give(buffer)
            self._incoming = None


class StreamedStore(HostStore):
    """Keeps a tensor elsewhere, and in host memory only while it is used. Views that it has lent follow the values.

    A subclass says where: it implements ``read``, ``overwrite``, ``begin_step``, ``end_use``, ``wait_written`` and
    ``discard``, and calls ``_show`` when ``_tensor`` was set or removed.

    Args:
        numel: elements.
        dtype: of the tensor.
        link: to the device; None: the device is the CPU.
    """

    streamed = True

    def __init__(self, numel: int, dtype: torch.dtype, link: HostLink | None) -> None:
        super().__init__(dtype, lambda: self.tensor, link)
        self.numel = numel
        # Shown for values that are away or lost. In bytes: a scale whose bits are all ones is a NaN (moments.py).
        self.lost = 255 if dtype == torch.uint8 else torch.nan
        self._lent: list[tuple[weakref.ref[Tensor], int]] = []

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            return torch.full((), self.lost, dtype=self.dtype).expand(self.numel)
        return self._tensor

    def lend(self, offset: int, shape: torch.Size, kind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        # Set the storage of an empty tensor: an ordinary view would keep the memory alive.
        view = torch.empty(0, dtype=self.dtype)
        view = kind(view) if kind is not None else view
        view.data = self._part(offset, shape)
        self._lent = [(ref, lo) for ref, lo in self._lent if ref() is not None]
        self._lent.append((weakref.ref(view), offset))
        return view

    def owns(self, value: Tensor) -> bool:
        return any(ref() is value for ref, _ in self._lent)

    def _part(self, offset: int, shape: torch.Size) -> Tensor:
        part = self.tensor[offset : offset + shape.numel()]
        return part.view(shape) if self._tensor is not None else part[:1].view([1] * len(shape)).expand(shape)

    def _show(self) -> None:
        """Let the views that were lent show the values, or NaN while these are away."""
        for ref, offset in self._lent:
            if (view := ref()) is not None:
                view.data = self._part(offset, view.shape)

    def source(self, shard: Tensor) -> AbstractContextManager[Tensor | None]:
        shard.copy_(self.read())
        self.end_use()
        self.wait_written()
        return nullcontext()

    def kernel_target(self, master: torch.dtype, covers: Callable[[], bool]) -> Tensor | None:
        return None

    def refresh(self, master: Store, written: bool, gaps: Sequence[Gap]) -> None:
        self.overwrite().copy_(master.tensor)


class FedStore(Store):
    """Keeps the compute copy of master weights in host memory: on the device, sent there after each step.

    Args:
        tensor: the copy, 1D.
        link: to the device.
    """

    def __init__(self, tensor: Tensor, link: HostLink) -> None:
        super().__init__(tensor.dtype, lambda: tensor)
        self.overwrite()
        self._link = link
        self._staging: StagingBuffer | None = None  # where the kernel writes the copy
        self._coming: CopyEvent | None = None  # the end of the copy of updated weights
        self._after: object = None  # event on the device, after which the copy may be written

    def source(self, shard: Tensor) -> AbstractContextManager[Tensor | None]:
        self.wait_copied()
        return super().source(shard)

    def kernel_target(self, master: torch.dtype, covers: Callable[[], bool]) -> Tensor | None:
        # A staging buffer can be used only if the kernel writes all of it.
        return self._stage().tensor if self.dtype != master and covers() else None

    def _stage(self) -> StagingBuffer:
        self._staging = self._staging or self._link.slots.take(self.tensor.numel(), self.dtype)
        return self._staging

    def cancel(self) -> None:
        if self._staging is not None:
            self._staging.give_back()
        self._staging = None

    def refresh(self, master: Store, written: bool, gaps: Sequence[Gap]) -> None:
        if written and self._staging is None:
            return  # sent already
        if self.dtype == master.dtype:
            self._coming = self._sent = self._link.to_device.copy(self.tensor, master.tensor, self._after)
            if master.streamed:
                # The next bucket reuses the memory of the master weights.
                self._coming.synchronize()
            return
        staging = self._stage()
        if not written:
            staging.tensor.copy_(master.tensor)
        for lo, hi in gaps if written else ():
            staging.tensor[lo:hi].zero_()
        self._coming, self._staging = staging.send(self._link.to_device, self.tensor, self._after), None

    def note_readers(self) -> None:
        self._after = self._link.to_device.now()

    def wait_copied(self) -> None:
        coming = self._coming
        self._coming = None
        self._after = None
        if coming is not None:
            coming.wait()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        with self._link.to_device.in_line():
            yield
        self._coming = self._link.to_device.mark()


def host_place(link: HostLink, pin_master: bool = True) -> Place:
    """Host memory, apart from the device; ``pin_master``: whether master weights are copied there as they are."""

    def store(kind: str, numel: int, dtype: torch.dtype) -> Store:
        pin = link.pin and (kind != "master" or pin_master)
        return HostStore(dtype, lambda: host_empty(numel, dtype, pin), link)

    return Place(store, offloads=True, feed=partial(FedStore, link=link))
