"""The master weights of one bucket, where they are stored, and how the compute copy is kept up to date with them.

``master``            what the optimizer updates: this rank's shard, or all elements if the optimizer is not sharded.
                      It is a slice of the compute copy where that stays in memory and has the master's dtype.
``master_or_frozen``  the master weights, or the shard of a frozen bucket.
``gather_source``     what a gather reads.

Files: master weights and optimizer states are stored tensors (offload/nvme_store.py), read when somebody asks for
``master``. The optimizer asks for one bucket after the other, so that reading overlaps with stepping. A gather cannot
wait for that: sharded parameters have another copy in the compute dtype as ``gather_source``, in memory or, if
parameters are offloaded, in another file. A master of the compute dtype serves as both.

Host memory (ZeRO-Offload, arXiv:2101.06840): gradients are reduced on the device and added in host memory, the CPU
kernel steps, and the compute copy is sent to the device. Copies overlap with computation (offload/copy_streams.py);
``Weights`` keeps the copy event of each until somebody waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lt_zero.comm.communicator import Comm
from lt_zero.common.flat_storage import flat_empty
from lt_zero.engine.bucket_store import BucketStore
from lt_zero.offload.copy_streams import CopyEvent, StagingBuffer
from lt_zero.offload.nvme_store import StoredTensor


class Weights:
    """The master weights of one bucket on this rank. In memory, unless ``use`` gives them a bucket store.

    Args:
        shard: this rank's elements (1D) of the compute copy.
        master_dtype: dtype of the master weights.
        sharded: whether parameters are sharded, so that the compute copy is released at times.
        comm: allocates what gathers read.
        gaps: elements [lo, hi) of ``shard`` that belong to no parameter.
    """

    def __init__(
        self, shard: Tensor, master_dtype: torch.dtype, sharded: bool, comm: Comm, gaps: list[tuple[int, int]]
    ) -> None:
        self.master_dtype, self._gaps = master_dtype, gaps
        self._shard, self._sharded, self._comm = shard, sharded, comm
        self._store = BucketStore()
        self._master: Tensor | None = None  # 1D, as ``shard``; None if there is none, or it is a stored tensor
        self._frozen: Tensor | None = None  # 1D, of a frozen bucket
        self._gather_source: Tensor | None = None  # 1D, in the compute dtype; None if the master serves
        self._buffer: StagingBuffer | None = None  # host memory where the kernel writes the compute copy
        self._coming: CopyEvent | None = None  # of the copy of updated weights to the device
        self._leaving: CopyEvent | None = None  # of the last copy that reads weights in host memory
        self._after: Any = None  # event on the device, after which the compute copy may be written
        self.written = False  # the running step has written the compute copy already

    def use(self, store: BucketStore) -> None:
        """Keep values in ``store``."""
        self._store = store

    # ---- construction ------------------------------------------------------------------------------------------

    def keep(self, values: Tensor, train: bool) -> None:
        """Store this rank's ``values`` (1D, as ``shard``): as master weights if ``train``, as frozen weights if not."""
        store = self._store
        dtype = self.master_dtype if train or self._shard.dtype != values.dtype else self._shard.dtype
        if train and store.optim:
            store.stored_tensor("master", dtype).tensor.copy_(values)
            self._keep_source(values)
        elif train and store.host_optim:
            crosses = self._crosses and dtype == self._shard.dtype  # otherwise a staging buffer is sent
            self._master = store.host_empty(values.numel(), dtype, crosses).copy_(values)
            self._keep_source(values)
        elif train:
            self._master = self._copy_kept(values, dtype)
        elif store.params and self._sharded:
            store.stored_tensor("weights", dtype).tensor.copy_(values)
        elif store.host_params:
            self._frozen = store.host_empty(values.numel(), dtype).copy_(values)
        else:
            self._frozen = self._copy_kept(values, dtype)

    def _keep_source(self, values: Tensor) -> None:
        """Make the copy that gathers read while the master is in files or in host memory."""
        store, dtype = self._store, self._shard.dtype
        if not self._sharded:
            return
        if store.params is None and store.host_params:
            self._gather_source = store.host_empty(values.numel(), dtype).copy_(values)
        elif store.params is None:
            self._gather_source = self._copy_kept(values, dtype)
        elif "master" not in store.stored or self.master_dtype != dtype:
            store.stored_tensor("weights", dtype).tensor.copy_(values)

    def _copy_kept(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy on the device; sharded weights are allocated where all ranks of the host can read them."""
        if self._sharded:
            copy = self._comm.allocate(values.numel(), dtype)
            self._comm.after_write()
        else:
            copy = flat_empty(values.numel(), dtype, values.device)
        return copy.copy_(values)

    @torch.no_grad()
    def enable_training(self) -> None:
        """Make the master weights if there are none; called late when frozen parameters are unfrozen."""
        if self.trains:
            return
        if self.master_is_view:
            self._master = self._shard
        elif self._frozen is not None and self._frozen.dtype == self.master_dtype and not self._store.moves_optim:
            self._master, self._frozen = self._frozen, None
        else:
            self.keep(self.master_or_frozen if self.has_master or self._sharded else self._shard, train=True)
            self._frozen = None
            if self._store.optim is None and "weights" in self._store.stored:
                self._store.stored.pop("weights").discard()  # gathers read the master weights
            self._store.tidy()  # the bucket may never be stepped

    # ---- what there is -----------------------------------------------------------------------------------------

    @property
    def master_is_view(self) -> bool:
        """Whether the master weights are a slice of the compute copy."""
        return not self._sharded and self.master_dtype == self._shard.dtype and not self._store.moves_optim

    @property
    def trains(self) -> bool:
        """Whether there are master weights."""
        return self._master is not None or "master" in self._store.stored

    @property
    def has_master(self) -> bool:
        """Whether master or frozen weights are stored apart from the compute copy."""
        return not self.master_is_view and (self.trains or self._frozen is not None or bool(self._store.stored))

    @property
    def master(self) -> Tensor | None:
        """What the optimizer updates (1D, as ``shard``). Reads the file of a stored tensor."""
        self._store.wait_background_step()
        stored = self._store.stored.get("master")
        return stored.bring() if stored is not None else self._master

    @property
    def master_rows(self) -> Tensor:
        """The tensor of ``master``, whether or not its values were read."""
        stored = self._store.stored.get("master")
        rows = stored.tensor if stored is not None else self._master
        assert rows is not None
        return rows

    @property
    def master_or_frozen(self) -> Tensor:
        """Master weights, or the frozen weights (1D, as ``shard``). Reads the file of a stored tensor."""
        return self._brought(write=True)

    def values(self) -> Tensor:
        """``master_or_frozen``, read-only: a stored tensor is not written back."""
        return self._brought(write=False)

    def _brought(self, write: bool) -> Tensor:
        self._store.wait_background_step()
        if self._master is not None:
            return self._master
        stored = self._store.stored.get("master") or self._store.stored.get("weights")
        if stored is not None:
            return stored.bring(write)
        assert self._frozen is not None
        return self._frozen

    @property
    def _kept(self) -> bool:
        """Whether there is a ``master_or_frozen``."""
        return self.trains or self._frozen is not None or bool(self._store.stored)

    def writable_values(self) -> Tensor:
        """Where new values are written: ``master_or_frozen``, or the compute copy if there is none."""
        return self.master_or_frozen if self._kept else self._shard

    def master_or_shard(self) -> Tensor:
        """``values()``, or the compute copy if there are none (1D, as ``shard``), read-only."""
        return self.values() if self._kept else self._shard

    @property
    def precision(self) -> torch.dtype:
        """Dtype of ``master_or_shard()``, without reading a file."""
        if self.trains:
            return self.master_rows.dtype
        stored = self._store.stored.get("weights")
        if stored is not None:
            return stored.dtype
        return self._frozen.dtype if self._frozen is not None else self._shard.dtype

    # ---- the copy that gathers read ----------------------------------------------------------------------------

    @property
    def gather_source(self) -> Tensor | StoredTensor:
        """What a gather reads (1D, as ``shard``, in the compute dtype)."""
        self._store.wait_background_step()
        self.arrive()
        if self._gather_source is not None:
            return self._gather_source
        stored = self._store.stored
        return stored.get("weights") or stored.get("master") or self.master_or_frozen

    @property
    def gather_source_nbytes(self) -> int:
        """Bytes of ``gather_source`` if it is a tensor of its own, else 0."""
        return self._gather_source.nbytes if self._gather_source is not None else 0

    def copy_target(self) -> Tensor | None:
        """This rank's weights in the compute dtype in memory, if they are apart from the master weights."""
        if not self._sharded:
            return self._shard if self.has_master else None
        return self._gather_source

    @property
    def _crosses(self) -> bool:
        """Whether a step's result has to be copied from host memory to the device."""
        return self._store.host_optim and not (self._sharded and self._store.host_params)

    def kernel_target(self, whole: bool) -> Tensor | None:
        """Where the kernel can write the compute copy while it updates the master weights; None: ``refresh`` does.

        Args:
            whole: the kernel writes all elements but the gaps.
        """
        target = self.copy_target()
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None
        if target is None or not self._crosses:
            return target
        return self._take_buffer(target) if whole and target.dtype != self.master_dtype else None

    def _take_buffer(self, target: Tensor) -> Tensor:
        if self._buffer is None:
            self._buffer = self._store.host_link.slots.take(target.numel(), target.dtype)
        return self._buffer.tensor

    def forget_slot(self) -> None:
        """Give the staging buffer back after the kernel failed."""
        if self._buffer is not None:
            self._buffer.give_back()
        self._buffer, self.written = None, False

    def refresh(self) -> None:
        """Copy the master weights, which are in memory, to the compute copy or to what gathers read."""
        self._store.wait_background_step()
        target = self.copy_target()
        if "weights" in self._store.stored and self._sharded and self.trains:
            self._store.stored["weights"].hold().copy_(self.master_rows)
        elif target is not None and self._crosses:
            self._send(target)
        elif target is not None and not self.written:
            target.copy_(self.master_rows)
        self.written = True

    def _send(self, target: Tensor) -> None:
        if self.written and self._buffer is None:
            return  # sent already
        stream, written = self._store.host_link.to_device, self.written
        if target.dtype == self.master_dtype:
            self._coming = self._leaving = stream.copy(target, self.master_rows, self._after)
            if self._store.optim is not None:
                self._coming.synchronize()  # the next bucket reuses the memory of the master weights
            return
        into = self._take_buffer(target)
        assert self._buffer is not None
        if not written:
            into.copy_(self.master_rows)
        for lo, hi in self._gaps if written else ():
            into[lo:hi].zero_()
        self._coming, self._buffer = self._buffer.send(stream, target, self._after), None

    def leave(self) -> None:
        """Before a background step: note which work queued on the device still reads the compute copy."""
        self._after = self._store.host_link.to_device.now() if self._store.host_optim else None

    def arrives(self, event: CopyEvent) -> None:
        """The compute copy is up to date when ``event`` is complete."""
        self._coming = event

    def arrive(self) -> None:
        """Make the current stream wait until the compute copy is up to date."""
        coming, self._coming, self._after = self._coming, None, None
        if coming is not None:
            coming.wait()

    def send(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Start copying ``source`` (host memory) to ``target``, this rank's shard of a gather."""
        self._leaving = self._store.host_link.to_device.copy(target, source)
        return self._leaving

    def follow_edit(self) -> None:
        """After an edit of ``writable_values()``: update what gathers read, and write stored tensors."""
        if self.trains and self._store.moves_optim and self._sharded:
            self.written = False
            self.refresh()
            self.written = False
            self.arrive()
        self._store.tidy()
