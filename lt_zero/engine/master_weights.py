"""A bucket's values apart from its compute copy: where they rest, and how the two copies follow each other.

Note [Where values rest]
    ``master``  what the optimizer updates: this rank's shard (or everything, if the optimizer is not sharded). Where
                the compute copy stays in memory and has the master's dtype, ``master`` *is* a slice of it.
    ``home``    the values as precise as they are kept: the master, or for frozen buckets a shard in the compute dtype.
                A gather reads it, unless ``source`` is something else.

Note [States in files]
    With a shelf, the master weights and the optimizer's states rest in files (offload/nvme_store.py). Whoever asks for
    ``master`` gets it read; the optimizer asks for bucket after bucket, so that reading overlaps with stepping. As
    gathers cannot wait for that, sharded parameters have a copy of their own in the compute dtype (``source``), in
    memory or, if parameters are offloaded, in another file; a master of the same dtype does both.

Note [States in host memory]
    With a device that has memory of its own, offloaded states live in host memory (ZeRO-Offload, arXiv:2101.06840):
    gradients are reduced on the device and added there, the CPU kernel steps, the compute copy returns. Copies run
    beside what the device computes (offload/copy_streams.py), and each has a ticket here until somebody waits for it.
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
    """The values of one bucket on this rank, but for the compute copy. In memory, unless ``use`` gives them a shelf.

    Args:
        part: this rank's elements (1D) of the compute copy.
        master_dtype: of master weights, where there are some.
        sharded: whether the parameters are, so that the compute copy is not always there.
        comm: the collectives, which read what is gathered.
        gaps: elements [lo, hi) of ``part`` that belong to no parameter.
    """

    def __init__(
        self, part: Tensor, master_dtype: torch.dtype, sharded: bool, comm: Comm, gaps: list[tuple[int, int]]
    ) -> None:
        self.master_dtype, self._gaps = master_dtype, gaps
        self._part, self._sharded, self._comm = part, sharded, comm
        self._store = BucketStore()
        self._master: Tensor | None = None  # 1D, as ``part``; None if there is none, or it rests in a file
        self._frozen: Tensor | None = None  # 1D, of a frozen bucket
        self._gather_source: Tensor | None = None  # 1D: what gathers read if the master is in a file
        self._slot: StagingBuffer | None = None  # where the kernel writes the compute copy, in host memory
        self._coming: CopyEvent | None = None  # the compute copy, on its way to the device
        self._leaving: CopyEvent | None = None  # a gather that still reads ``source`` in host memory
        self._after: Any = None  # the moment from which the compute copy on the device may be written
        self.written = False  # the step at hand has put the updated weights into the compute copy already

    def use(self, store: BucketStore) -> None:
        """Rest on ``shelf``."""
        self._store = store

    # ---- construction ------------------------------------------------------------------------------------------

    def keep(self, values: Tensor, train: bool) -> None:
        """Keep this rank's part beside the compute copy: as master weights, or as the home of frozen ones."""
        store = self._store
        dtype = self.master_dtype if train or self._part.dtype != values.dtype else self._part.dtype
        if train and store.optim:
            store.stored_tensor("master", dtype).tensor.copy_(values)
            self._keep_source(values)
        elif train and store.host_optim:
            crosses = self._crosses and dtype == self._part.dtype  # otherwise a cast copy does
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
        """See Note [States in files]."""
        store, dtype = self._store, self._part.dtype
        if not self._sharded:
            return
        if store.params is None and store.host_params:
            self._gather_source = store.host_empty(values.numel(), dtype).copy_(values)
        elif store.params is None:
            self._gather_source = self._copy_kept(values, dtype)
        elif "master" not in store.stored or self.master_dtype != dtype:
            store.stored_tensor("weights", dtype).tensor.copy_(values)

    def _copy_kept(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy that stays; what gathers read lies where all ranks of the host can read it."""
        if self._sharded:
            copy = self._comm.allocate(values.numel(), dtype)
            self._comm.after_write()
        else:
            copy = flat_empty(values.numel(), dtype, values.device)
        return copy.copy_(values)

    @torch.no_grad()
    def enable_training(self) -> None:
        """Make the master weights (again a no-op when they exist); called late when frozen parameters are unfrozen."""
        if self.trains:
            return
        if self.master_is_view:
            self._master = self._part
        elif self._frozen is not None and self._frozen.dtype == self.master_dtype and not self._store.moves_optim:
            self._master, self._frozen = self._frozen, None
        else:
            self.keep(self.master_or_frozen if self.has_master or self._sharded else self._part, train=True)
            self._frozen = None
            if self._store.optim is None and "weights" in self._store.stored:
                self._store.stored.pop("weights").discard()  # gathers read the master weights
            self._store.tidy()  # a frozen one may never be stepped

    # ---- what there is -----------------------------------------------------------------------------------------

    @property
    def master_is_view(self) -> bool:
        """Whether the master weights are a slice of the compute copy. See Note [Where values rest]."""
        return not self._sharded and self.master_dtype == self._part.dtype and not self._store.moves_optim

    @property
    def trains(self) -> bool:
        """Whether there are master weights."""
        return self._master is not None or "master" in self._store.stored

    @property
    def has_master(self) -> bool:
        """Whether something more precise than the compute copy, or at least apart from it, is kept."""
        return not self.master_is_view and (self.trains or self._frozen is not None or bool(self._store.stored))

    @property
    def master(self) -> Tensor | None:
        """What the optimizer updates (1D, as ``part``). Read from its file if it rests there."""
        self._store.wait_background_step()
        home = self._store.stored.get("master")
        return home.bring() if home is not None else self._master

    @property
    def master_rows(self) -> Tensor:
        """``master`` as it lies, whether or not its values are there."""
        home = self._store.stored.get("master")
        rows = home.tensor if home is not None else self._master
        assert rows is not None
        return rows

    @property
    def master_or_frozen(self) -> Tensor:
        """See Note [Where values rest]. Read from its file if it rests there."""
        return self._brought(write=True)

    def values(self) -> Tensor:
        """``home``, for reading only."""
        return self._brought(write=False)

    def _brought(self, write: bool) -> Tensor:
        """``home``; without ``write`` nothing has to be written back."""
        self._store.wait_background_step()
        if self._master is not None:
            return self._master
        home = self._store.stored.get("master") or self._store.stored.get("weights")
        if home is not None:
            return home.bring(write)
        assert self._frozen is not None
        return self._frozen

    @property
    def _kept(self) -> bool:
        """Whether there is a ``home``."""
        return self.trains or self._frozen is not None or bool(self._store.stored)

    def writable_values(self) -> Tensor:
        """What takes new values: ``home``, or the compute copy where nothing else is kept."""
        return self.master_or_frozen if self._kept else self._part

    def master_or_shard(self) -> Tensor:
        """The values as precise as they are kept (1D, as ``part``), for reading only."""
        return self.values() if self._kept else self._part

    @property
    def precision(self) -> torch.dtype:
        """Of ``precise``, which need not be read for that."""
        homes = self._store.stored
        if self.trains:
            return self.master_rows.dtype
        resting = homes.get("weights")
        if resting is not None:
            return resting.dtype
        return self._frozen.dtype if self._frozen is not None else self._part.dtype

    # ---- the copy that gathers read ----------------------------------------------------------------------------

    @property
    def gather_source(self) -> Tensor | StoredTensor:
        """What a gather reads. See Note [States in files]."""
        self._store.wait_background_step()
        self.arrive()
        if self._gather_source is not None:
            return self._gather_source
        homes = self._store.stored
        return homes.get("weights") or homes.get("master") or self.master_or_frozen

    @property
    def gather_source_nbytes(self) -> int:
        """Bytes of what gathers read, if that is a tensor of its own."""
        return self._gather_source.nbytes if self._gather_source is not None else 0

    def copy_target(self) -> Tensor | None:
        """Where the compute copy of this rank's weights stays in memory, if it does."""
        if not self._sharded:
            return self._part if self.has_master else None
        return self._gather_source

    @property
    def _crosses(self) -> bool:
        """Whether the compute copy of a step's result has to go from host memory to the device."""
        return self._store.host_optim and not (self._sharded and self._store.host_params)

    def kernel_target(self, whole: bool) -> Tensor | None:
        """Where the kernel that updates the master weights can write the compute copy, too; None: ``refresh`` does.

        ``whole``: it writes all of it, but for the gaps.
        """
        target = self.copy_target()
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None
        if target is None or not self._crosses:
            return target
        return self._take_slot(target) if whole and target.dtype != self.master_dtype else None

    def _take_slot(self, target: Tensor) -> Tensor:
        if self._slot is None:
            self._slot = self._store.host_link.slots.take(target.numel(), target.dtype)
        return self._slot.tensor

    def forget_slot(self) -> None:
        """The kernel failed: others may have what it was to write to."""
        if self._slot is not None:
            self._slot.give_back()
        self._slot, self.written = None, False

    def refresh(self) -> None:
        """Bring the copy that gathers read up to date with the master weights, which are in memory."""
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
        if self.written and self._slot is None:
            return  # it is on its way
        lane, written = self._store.host_link.to_device, self.written
        if target.dtype == self.master_dtype:
            self._coming = self._leaving = lane.copy(target, self.master_rows, self._after)
            if self._store.optim is not None:
                self._coming.synchronize()  # its memory goes to the next bucket
            return
        into = self._take_slot(target)
        assert self._slot is not None
        if not written:
            into.copy_(self.master_rows)
        for lo, hi in self._gaps if written else ():
            into[lo:hi].zero_()
        self._coming, self._slot = self._slot.send(lane, target, self._after), None

    def leave(self) -> None:
        """Another thread brings the compute copy up to date; what the device has to do now is all that reads it."""
        self._after = self._store.host_link.to_device.now() if self._store.host_optim else None

    def arrives(self, event: CopyEvent) -> None:
        """The compute copy is there when ``ticket`` says so."""
        self._coming = event

    def arrive(self) -> None:
        """What the current stream does from now on may use the compute copy."""
        coming, self._coming, self._after = self._coming, None, None
        if coming is not None:
            coming.wait()

    def send(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Start copying ``source`` in host memory to ``target``, which a gather fills."""
        self._leaving = self._store.host_link.to_device.copy(target, source)
        return self._leaving

    def follow_edit(self) -> None:
        """``home`` was changed by hand: what gathers read follows, and what rests in files is put away."""
        if self.trains and self._store.moves_optim and self._sharded:
            self.written = False
            self.refresh()
            self.written = False
            self.arrive()
        self._store.tidy()
