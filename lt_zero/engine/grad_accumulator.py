"""The gradients of one bucket: taken from the parameters, reduced over the ranks, accumulated until the step.

``grad``   the accumulator (fp32 by default) of the same elements as the master weights (master_weights.py), stored
           where the optimizer's states are. It is valid for the parameters in ``valid``, zero in the gaps, and has yet
           to be multiplied by ``factor`` if there is one.
``local``  gradients of an accumulation window that were not reduced yet, all elements.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero import ops
from lt_zero.comm.communicator import Comm
from lt_zero.comm.work import All, Work
from lt_zero.common.flat_storage import flat_empty
from lt_zero.engine.bucket_store import BucketStore
from lt_zero.engine.layout import BucketLayout, Piece
from lt_zero.offload.copy_streams import CopyEvent
from lt_zero.offload.nvme_store import tidy


class Accumulator:
    """The gradients of one bucket on this rank. In memory, unless ``use`` gives it a bucket store.

    Args:
        name: name of the bucket's unit, for messages.
        params: parameters of the bucket, in order.
        layout: their offsets in the bucket.
        shard_range: the elements [lo, hi) that this rank accumulates.
        comm: the collectives.
        dtype: dtype of the accumulator.
        wire: dtype of gradients in collectives; None: chosen by ``send_dtype``.
        sharded: whether optimizer states are sharded, so that each rank needs only the sum of its shard.
    """

    def __init__(
        self,
        name: str,
        params: list[Parameter],
        layout: BucketLayout,
        shard_range: tuple[int, int],
        comm: Comm,
        dtype: torch.dtype,
        wire: torch.dtype | None,
        sharded: bool,
    ) -> None:
        self.dtype = dtype
        self._name, self._params, self._layout, self._comm = name, params, layout, comm
        self._numel, self._pieces = shard_range[1] - shard_range[0], layout.pieces(*shard_range)
        self._whole = shard_range == (0, layout.numel)
        self._wire, self._sharded = wire, sharded
        self._store = BucketStore()
        self._grad: Tensor | None = None  # 1D, [shard_range); None if there is none, or it is a stored tensor
        self.changes = 0  # counts changes of the gradients
        self._dropping = False  # ``_drop`` is queued
        self.accumulated = False  # whether there is an accumulator
        self.factor: Tensor | None = None  # 0D fp32; see fused_step.py, Note [Deferred factor]
        self.valid: set[int] = set()  # parameters that were reduced since their gradient was cleared
        self.used: set[int] = set()  # parameters that had a gradient on this rank
        # The copy of a reduced gradient to host memory: its event, the accumulator, what to add to it afterwards.
        self._coming: tuple[CopyEvent, Tensor, Tensor | None] | None = None
        self.local: Tensor | None = None  # 1D, all elements: gradients not reduced yet (stages 0 and 1)

    def use(self, store: BucketStore) -> None:
        """Keep the accumulator in ``store``."""
        self._store = store

    # ---- from the parameters to the accumulator ----------------------------------------------------------------

    def send_dtype(self, have: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of dtype ``have`` are sent: as configured, else ``have`` if that is as precise."""
        if self._wire is not None:
            return self._wire
        return have if self._sharded and self._comm.sums_wide else self.dtype

    def used_flags(self) -> list[bool]:
        """Whether each parameter has a gradient on this rank, in ``p.grad`` or in the accumulator."""
        used = self.used
        return [index in used or p.grad is not None for index, p in enumerate(self._params)]

    @torch.no_grad()
    def take(self, out: Tensor, add: bool, factor: float = 1.0) -> None:
        """Move the parameters' gradients times ``factor`` into ``out`` (1D, all elements), or add them to it.

        Absent gradients count as zeros.
        """
        targets, grads = [], []  # for the kernel: torch would need two passes
        for index, (parameter, span) in enumerate(zip(self._params, self._layout.spans, strict=True)):
            grad, target = parameter.grad, out[span.lo : span.hi].view(span.shape)
            if grad is None:
                if not add:
                    target.zero_()
                continue
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            if (grad.dtype != out.dtype or factor != 1.0) and ops.fits(out, grad, add):
                targets.append(target)
                grads.append(grad)
            elif add:
                target.add_(grad)
            elif factor == 1.0 or target.dtype.itemsize > grad.dtype.itemsize:
                target.copy_(grad)
                target.mul_(factor) if factor != 1.0 else None
            else:
                torch.mul(grad, factor, out=target)  # multiplied before it is rounded
            self.used.add(index)
            parameter.grad = None
        if targets and add:
            ops.accumulate(targets, grads)
        elif targets:
            ops.cast_scale(targets, grads, factor=factor)
        if not add:
            for lo, hi in self._layout.gaps:
                out[lo:hi].zero_()

    @torch.no_grad()
    def accumulate_local(self) -> None:
        """Add the parameters' gradients to ``local``."""
        add = self.local is not None
        if self.local is None:
            self.local = torch.empty(self._layout.numel, dtype=self.dtype, device=self._comm.device)
        self.take(self.local, add)

    def launch_reduce(self, send: Tensor, scratch: Tensor) -> Work:
        """Start averaging ``send`` (1D, all elements) over the ranks into the accumulator."""
        store = self._store
        self._own()
        if not self.accumulated and store.optim is None:
            make = store.host_empty if store.host_optim else partial(flat_empty, device=send.device)
            self.grad = make(self._numel, self.dtype)
        elif not self.accumulated:
            store.stored_tensor("grad", self.dtype).hold()
            self.accumulated = True
        self.apply_deferred_scale()
        add, out = bool(self.valid), self.grad
        assert out is not None
        self.valid.update(i for i, p in enumerate(self._params) if p.requires_grad)
        collective = self._comm.all_reduce if self._whole else self._comm.reduce_scatter
        if not store.host_optim:
            return collective(out, send, scratch, add, self._name)
        landing = flat_empty(self._numel, out.dtype, send.device)
        pending = collective(landing, send, scratch, False, self._name)
        return All([pending], lambda: self._send(out, landing, add))

    def _send(self, out: Tensor, landing: Tensor, add: bool) -> None:
        """Start copying what was reduced on the device to host memory."""
        target = torch.empty_like(out, pin_memory=out.is_pinned()) if add else out
        self._coming = (self._store.host_link.to_host.copy(target, landing), out, target if add else None)

    def arrive(self) -> None:
        """Wait for the copy to host memory, unless a background step has the bucket: it waits itself."""
        if not self._store.handed_over:
            self._arrive()

    @torch.no_grad()
    def _arrive(self) -> None:
        # Only the thread that has the bucket may be here: another would take the copy from under a running step.
        if self._coming is not None:
            (event, out, addend), self._coming = self._coming, None
            event.synchronize()
            if addend is not None:
                out.add_(addend)

    def _own(self) -> None:
        """Wait for the background step and for the copy to host memory."""
        self._store.wait_background_step()
        self._arrive()

    # ---- the accumulator ---------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        """The accumulator (1D, elements [shard_range)), for writing. Reads the file of a stored tensor."""
        self._own()
        self.changes += 1
        if not self.accumulated or self._grad is not None:
            return self._grad
        return self._store.stored["grad"].bring()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.rests:
            self._store.stored["grad"].discard()
        self._grad, self.accumulated = value, value is not None

    def read(self) -> Tensor:
        """``grad``, read-only; there must be one."""
        self._own()
        return self._grad if self._grad is not None else self._store.stored["grad"].bring(write=False)

    def of(self, piece: Piece, write: bool = True) -> Tensor:
        """The accumulated gradient (1D) of one of this rank's pieces; read-only without ``write``."""
        self.apply_deferred_scale()
        grad = self.grad if write else self.read()
        assert grad is not None
        return grad[piece.offset : piece.offset + piece.numel]

    @property
    def held(self) -> set[int]:
        """Parameters with gradients in ``grad`` or ``local``."""
        return self.valid | self.used

    @torch.no_grad()
    def clear(self, indices: set[int]) -> None:
        """Drop the accumulated gradients of the given parameters."""
        self.changes += 1
        self.valid -= indices
        self.used -= indices
        if not self.valid and not self.used:
            if not self._dropping:
                self._dropping = True
                self._store.after_background_step(self._drop)  # the next reduction starts from zero
            return
        self._store.wait_background_step()
        for index in indices:
            span = self._layout.spans[index]
            if self.local is not None:
                self.local[span.lo : span.hi].zero_()
        for piece in self._pieces:
            if self.accumulated and piece.index in indices:
                self.of(piece).zero_()
        self.stow()

    def _drop(self) -> None:
        self._dropping = False
        if not self.valid and not self.used:
            self._coming = None
            self.local, self.grad, self.factor = None, None, None

    # ---- accumulators in files ---------------------------------------------------------------------------------

    @property
    def rests(self) -> bool:
        """Whether the accumulator is a stored tensor."""
        return self.accumulated and self._grad is None

    def put_away(self) -> None:
        """Start writing the accumulator to its file, if it has one; ``stow`` finishes that."""
        self._own()
        if self.rests:
            self._store.stored["grad"].put_away()

    def stow(self) -> None:
        """Write the accumulator to its file, if it has one, and free its buffer."""
        self._own()
        if self.rests:
            tidy([self._store.stored["grad"]])

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the accumulator takes now."""
        stored = self._store.stored.get("grad")
        if self._grad is None and stored is not None:
            return stored.nbytes if stored.takes_memory else 0
        return self._grad.nbytes if self._grad is not None else 0

    # ---- deferred scale ----------------------------------------------------------------------------------------

    def defer(self, factor: Tensor) -> None:
        """Multiply the accumulated gradients by ``factor`` (0D fp32) later, when they are read."""
        self.changes += 1
        if self._store.moves_optim:
            factor = factor.cpu()  # in the background step this would wait for all work queued on the device by then
        self.factor = factor if self.factor is None else self.factor * factor

    @torch.no_grad()
    def apply_deferred_scale(self) -> None:
        """Multiply by the deferred factor."""
        self._store.wait_background_step()
        factor, self.factor = self.factor, None
        if factor is not None and self.accumulated:
            self.widen_fp16()
            grad = self.grad
            assert grad is not None
            grad.mul_(factor.to(grad.device))

    def widen_fp16(self) -> None:
        """Convert an fp16 accumulator to fp32 before unscaling, where small gradients would underflow."""
        if self.accumulated and self.dtype == torch.float16:
            grad = self.grad
            assert grad is not None
            self.grad = grad.float()
