"""The weights of one bucket on this rank, and edits of them by user code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import version_of
from lt_zero.engine.layout import BucketLayout, Piece
from lt_zero.offload.background import BackgroundStep
from lt_zero.offload.store import DeviceStore, Gather, Place, Store, Waits, put_away

_ROW = 1024  # words per row of a digest, which does not see permutations within a row


class Weights:
    """The weights of one bucket on this rank: what the optimizer updates, and what gathers read.

    ``master``  master weights: this rank's shard, or all elements if the optimizer is not sharded. They are a slice of
                the compute copy where that stays in memory and has the master's dtype.
    ``frozen``  the shard of a frozen bucket, or its values in a wider dtype.
    ``copy``    the compute copy that a step has to update: this rank's elements of the flat tensor, or what gathers
                read while the master weights are offloaded. None: the master weights serve.

    Args:
        shard: this rank's elements (1D) of the flat tensor.
        master_dtype: dtype of the master weights.
        sharded: whether parameters are sharded, so that the flat tensor is released at times.
        gaps: elements [lo, hi) of ``shard`` that belong to no parameter.
        background: the background step of the bucket.
    """

    def __init__(
        self,
        shard: Tensor,
        master_dtype: torch.dtype,
        sharded: bool,
        gaps: list[tuple[int, int]],
        background: BackgroundStep,
    ) -> None:
        self.master_dtype, self._gaps, self._background = master_dtype, gaps, background
        self.shard, self.sharded = shard, sharded
        self.master: Store | None = None
        self.frozen: Store | None = None
        self.copy: Store | None = None
        self.written = False  # the running step has written the compute copy already

    def use(self, optim: Place, params: Place) -> None:
        """Keep master weights in ``optim``, and what gathers read in ``params``."""
        self._optim, self._params = optim, params

    # ---- construction ------------------------------------------------------------------------------------------

    def keep(self, values: Tensor, train: bool) -> None:
        """Store this rank's ``values`` (1D, as ``shard``): as master weights if ``train``, as frozen weights if not."""
        compute = self.shard.dtype
        if not train:
            dtype = compute if values.dtype == compute else self.master_dtype
            self.frozen = _stored(self._params, "weights", values, dtype)
            return
        self.master = _stored(self._optim, "master", values, self.master_dtype)
        serves = self._optim.streamed and self._params.streamed and self.master_dtype == compute
        if not self.sharded:
            self.copy = self._optim.fed(DeviceStore.of(self.shard))
        elif self._optim.offloads and not serves:  # a gather must not wait until master weights are read
            self.copy = self._optim.fed(_stored(self._params, "weights", values, compute))

    @torch.no_grad()
    def enable_training(self) -> None:
        """Make the master weights if there are none; called late when frozen parameters are unfrozen."""
        if self.trains:
            return
        frozen, self.frozen = self.frozen, None
        if self.master_is_view:
            self.master = DeviceStore.of(self.shard)
        elif frozen is None:
            self.keep(self.shard, train=True)
        elif frozen.dtype == self.master_dtype and not self._optim.offloads and not frozen.streamed:
            self.master = frozen
            self.copy = None if self.sharded else DeviceStore.of(self.shard)
        else:
            self.keep(frozen.read(), train=True)
            frozen.discard()
        put_away(self.stores())  # the bucket may never be stepped

    # ---- what there is -----------------------------------------------------------------------------------------

    @property
    def master_is_view(self) -> bool:
        """Whether the master weights are a slice of the compute copy."""
        return not self.sharded and self.master_dtype == self.shard.dtype and not self._optim.offloads

    @property
    def offloaded(self) -> bool:
        """Whether master weights are kept off the device."""
        return self._optim.offloads

    @property
    def trains(self) -> bool:
        """Whether there are master weights."""
        return self.master is not None

    @property
    def _kept(self) -> Store | None:
        return self.master or self.frozen

    @property
    def has_master(self) -> bool:
        """Whether master or frozen weights are stored apart from the flat tensor."""
        return not self.master_is_view and self._kept is not None

    def stores(self) -> list[Store]:
        """The stores of weights."""
        return [store for store in (self.master, self.frozen, self.copy) if store is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that weights apart from the flat tensor take now."""
        copy = self.copy.nbytes if self.copy is not None and self.sharded else 0
        return copy + (self._kept.nbytes if self._kept is not None and self.has_master else 0)

    @property
    def master_rows(self) -> Tensor:
        """The master weights (1D, as ``shard``), whether or not their values are in memory."""
        assert self.master is not None
        return self.master.tensor

    @property
    def precision(self) -> torch.dtype:
        """Dtype of ``master_or_shard()``, without reading it."""
        return self._kept.dtype if self._kept is not None else self.shard.dtype

    def values(self) -> Tensor:
        """Master or frozen weights (1D, as ``shard``), read-only."""
        self._background.wait()
        assert self._kept is not None
        return self._kept.read()

    def master_or_shard(self) -> Tensor:
        """``values()``, or the flat tensor's elements if there are none (1D, as ``shard``), read-only."""
        return self.values() if self._kept is not None else self.shard

    def writable_values(self) -> Tensor:
        """Where new values are written: ``values()``, or the flat tensor's elements if there are none."""
        self._background.wait()
        return self._kept.write() if self._kept is not None else self.shard

    # ---- the copy that gathers read ----------------------------------------------------------------------------

    @property
    def gather_source(self) -> Store:
        """What a gather of sharded parameters reads (1D, as ``shard``)."""
        source = self.copy or self._kept
        assert source is not None
        return source

    def launch_gather(self, gather: Gather) -> Waits:
        """Start filling ``shard``, and the ``gather`` of it."""
        self._background.wait()
        return self.gather_source.launch_gather(self.shard, gather)

    def kernel_target(self, covers: Callable[[], bool]) -> Tensor | None:
        """Where the kernel can write the compute copy while it updates the master weights; None: ``refresh`` does.

        ``covers``: whether the kernel writes all elements but the gaps.
        """
        self.gather_source.wait_sent()
        return self.copy.kernel_target(self.master_dtype, covers) if self.copy is not None else None

    def cancel_kernel(self) -> None:
        """Forget ``kernel_target`` after the kernel failed."""
        if self.copy is not None:
            self.copy.cancel()
        self.written = False

    def refresh(self) -> None:
        """Copy the master weights, which are in memory, to the compute copy."""
        self._background.wait()
        if self.copy is not None and self.master is not None:
            self.copy.refresh(self.master, self.written, self._gaps)
        self.written = True

    def note_readers(self) -> None:
        """Before a background step: note which work queued on the device still reads the compute copy."""
        if self.copy is not None:
            self.copy.note_readers()

    def wait_copied(self) -> None:
        """Make the current stream wait until the compute copy is up to date."""
        if self.copy is not None:
            self.copy.wait_copied()

    def publishing(self) -> AbstractContextManager[object]:
        """Context in which the background thread gathers the copies of all ranks."""
        return self.copy.publishing() if self.copy is not None else nullcontext()

    def follow_edit(self) -> None:
        """After an edit of ``writable_values()``: update what gathers read, and write streamed stores."""
        if self.copy is not None and self.sharded:
            self.written = False
            self.refresh()
            self.written = False
            self.wait_copied()
        put_away(self.stores())

    @torch.no_grad()
    def keep_edits(self) -> None:
        """Copy edits of the (gathered) flat tensor to the master weights."""
        if not self.has_master:
            return
        # Only edited elements: the others are more precise in the master weights.
        compute = self.shard.dtype
        if not self._optim.offloads:
            master = self.writable_values()
            edited = master.to(compute) != self.shard
            master.copy_(torch.where(edited, self.shard.to(master.dtype), master))  # does not wait for the GPU
            return
        kept = self.values()
        shown = self.shard.to(kept.device)
        edited = kept.to(compute) != shown
        if bool(edited.any()):
            master = self.writable_values()
            master[edited] = shown[edited].to(master.dtype)
            self.follow_edit()
        else:
            put_away(self.stores())


def _stored(place: Place, kind: str, values: Tensor, dtype: torch.dtype) -> Store:
    store = place.store(kind, values.numel(), dtype)
    store.overwrite().copy_(values)
    return store


class InplaceEdits:
    """Detects edits of compute copies outside of ``gathered``, which the next step would overwrite.

    Where parameters are not sharded, an edit is copied to the master weights. Where they are, it raises: the edited
    copy is lost when the bucket is released.

    Most edits change a parameter's version counter, which is checked in each backward. ``p.data.copy_(...)`` does not,
    so values are checked, too, before they are stepped or saved: by a digest on a CPU and where master weights are
    offloaded. On a GPU a digest would have to be waited for, so edited elements are found by comparing master weights
    with the compute copy. ``p.data = tensor`` takes a parameter out of its bucket, which changes its address; its
    values are copied back.

    Args:
        params: parameters of the bucket.
        layout: their offsets in it.
        views: views of the flat tensor, for each parameter.
        weights: the bucket's weights.
        pieces: of parameters in the master weights of this rank.
        resident: whether the parameters are gathered.
    """

    def __init__(
        self,
        params: list[Parameter],
        layout: BucketLayout,
        views: list[Tensor],
        weights: Weights,
        pieces: tuple[Piece, ...],
        resident: Callable[[], bool],
    ) -> None:
        self._params, self._names, self._views = params, [span.name for span in layout.spans], views
        self._weights, self._pieces, self._resident = weights, pieces, resident
        self._shard = weights.shard
        self.lost: list[str] = []  # names of parameters whose edits are lost
        self.handed_out = False  # user code got a tensor whose writes change no version counter
        self._versions: list[int] = []
        self._addresses: list[int] = []  # of the views; where parameters are not sharded
        self._digest: Tensor | None = None  # of this rank's shard
        self._paused = False  # master weights are ahead of the compute copy

    def note(self) -> None:
        """Record the current values as unedited."""
        self._paused = False
        if not self._weights.master_is_view:
            self._versions = [version_of(p) for p in self._params]
            self._digest = _digest_of(self._shard) if self._digests else None

    def pause(self) -> None:
        """Stop checking until ``note``: the master weights are stepped before the compute copy is updated."""
        self._paused = not self._weights.sharded

    @property
    def _digests(self) -> bool:
        weights = self._weights
        cheap = weights.has_master and self._shard.device.type == "cpu"  # a comparison takes 4 times AdamW's step
        return (weights.offloaded or cheap) and not weights.sharded

    def seen(self) -> bool:
        """Whether versions or the digest have changed since ``note``."""
        if self._paused:  # the compute copy is of another step, or is being written
            return False
        changed = self._digests and (self._digest is None or bool(self._digest != _digest_of(self._shard)))
        return changed or [version_of(p) for p in self._params] != self._versions

    def check(self, values: bool = False) -> None:
        """Keep the edits since ``note``, or add them to ``lost``; with ``values`` check values, too."""
        if not self._resident() or self._paused:
            return
        sharded = self._weights.sharded
        edited = self._put_back() if not sharded else []
        if not self._weights.has_master:
            return
        changed = zip(self._params, self._versions, self._names, strict=True)
        edited += [name for p, version, name in changed if version_of(p) != version]
        if sharded:
            if self.handed_out and not edited:
                edited = [self._names[p.index] for p in self._pieces if not self._equal(p)]
            self.lost += edited
        elif edited or (values and (not self._digests or self.seen())):
            # Every rank has the whole copy, and edits it as it would without ZeRO.
            self._weights.keep_edits()
            self.note()
        self.handed_out = False
        if edited:
            self.note()

    def _equal(self, piece: Piece) -> bool:
        place = slice(piece.offset, piece.offset + piece.numel)
        return torch.equal(self._shard[place], self._weights.values()[place].to(self._shard.device, self._shard.dtype))

    def _put_back(self) -> list[str]:
        """Copy parameters that were assigned other tensors back to their views; returns their names."""
        if not self._addresses:
            self._addresses = [view.data_ptr() for view in self._views]
        pairs = enumerate(zip(self._params, self._addresses, strict=True))
        return [name for i, (p, address) in pairs if p.data_ptr() != address and (name := self._put(p, i))]

    @torch.no_grad()
    def _put(self, parameter: Parameter, index: int) -> str:
        view, name = self._views[index], self._names[index]
        if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
            self.lost.append(name)
            return ""
        view.copy_(parameter)
        parameter.data = view
        return name


def _digest_of(shard: Tensor) -> Tensor:
    """A checksum (0D int64) of the bits of ``shard``, which is a multiple of 16 bytes long."""
    words = shard.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1)
    return (rows * torch.arange(1, rows.numel() + 1, device=shard.device)).sum() + words[whole:].sum()
