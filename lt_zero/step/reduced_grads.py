"""The reduced gradients of one optimizer between backward and step: their norm, clipping and unscaling.

Note [Unused parameters]
    A zero gradient is not "no gradient": AdamW would decay and move a parameter that no rank used. The ranks agree
    on the used parameters, and fragments of the others have ``grad=None`` in this step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lt_zero import ops
from lt_zero.common.timing import phased
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.compressed_momentum import CompressedMomentum
from lt_zero.engine.layout import ALIGN
from lt_zero.engine.local_steps import LocalSteps
from lt_zero.engine.visible_grads import is_view
from lt_zero.step.fragments import Fragments
from lt_zero.step.fused_step import FusedStep


class ReducedGrads:
    """The accumulated gradients of one optimizer's parameters, including parameters in no bucket.

    Args:
        fragments: of the optimizer.
        fused: its kernel, which can multiply the gradients by a number; None if it has none.
    """

    def __init__(self, fragments: Fragments, fused: FusedStep | None) -> None:
        self._fragments, self._fused, self._engine = fragments, fused, fragments.engine
        self.loss_scale = 1.0  # that the gradients carry; see loss_scale.py

    # ---- which there are ---------------------------------------------------------------------------------------

    def used(self) -> dict[Bucket, list[int]]:
        """The parameters that have a gradient on any rank, in order. Collective."""
        used = self._engine.finish_reductions()
        found: dict[Bucket, list[int]] = {}
        for bucket, index, _ in self._fragments.places():
            if used(bucket, index):
                found.setdefault(bucket, []).append(index)
        if isinstance(self._engine.compression, CompressedMomentum):
            self._engine.compression.drop_unused(found)
        return {bucket: sorted(indices) for bucket, indices in found.items()}

    def exist(self) -> bool:
        """Whether any rank has a gradient for this optimizer. Collective."""
        used = self._engine.finish_reductions()
        return bool(self._foreign()) or any(used(b, i) for b, i, _ in self._fragments.places())

    def _foreign(self) -> list[Tensor]:
        """The gradients of parameters that the engine does not own."""
        return [p.grad for p in self._fragments.parameters() if id(p) not in self._engine.owner and p.grad is not None]

    # ---- their values ------------------------------------------------------------------------------------------

    def by_bucket(self, write: bool = False) -> Iterator[list[Tensor]]:
        """This rank's gradients (1D rows) of the parameters that any rank used. Collective.

        First those in files, bucket by bucket: each accumulator is in memory until the next is asked for, and written
        back with ``write``. Then all others. Neighbours in a bucket share a row, with the zeros between them.
        """
        together: list[Tensor] = []
        for bucket, indices in self.used().items():
            rows = _rows(bucket, indices, write)
            if bucket.grads.streamed:
                yield rows
                bucket.grads.put_away()
            else:
                together += rows
        yield together + self._foreign()

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by ``factor`` (0D fp32), now or later in the kernel. Collective."""
        used, places = self.used(), self._fragments.places()
        self._engine.used_parameters.scaled(places, factor)
        mine, taken = self._fragments.indices(), self._fused.takes(used) if self._fused is not None else ()
        for bucket, indices in used.items():
            # fused_step.py, Note [Deferred factor]; not those with views in ``p.grad``
            if bucket in taken and bucket.grads.valid <= mine[bucket] and not is_view(bucket):
                bucket.grads.defer(factor)
                continue
            bucket.grads.widen_fp16()
            rows = _rows(bucket, indices)
            here = factor.to(rows[0].device) if rows else factor
            for row in rows:
                row.mul_(here)
            bucket.grads.put_away()
        for grad in self._foreign():
            grad.mul_(factor.to(grad.device))

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply all accumulated gradients, reduced or not. Not collective."""
        places = self._fragments.places()
        self._engine.used_parameters.scaled(places, factor)
        for bucket, index, _ in places:
            span, grads = bucket.layout.spans[index], bucket.grads
            if grads.local is not None:
                grads.local[span.lo : span.hi].mul_(factor)
            for piece in bucket.pieces_of(index) if index in grads.valid else ():
                grads.of(piece).mul_(factor)
            grads.put_away()

    # ---- norm, clipping, unscaling -----------------------------------------------------------------------------

    @phased("clip")
    @torch.no_grad()
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The global norm (0D, fp32; fp64 if all accumulators are) of the accumulated gradients. Collective.

        It is finite unless a gradient of some rank is not, or is too large to be squared. While ranks step with their
        own gradients (engine/local_steps.py) it is the root mean square of their norms, so that they agree.
        """
        engine, comm = self._engine, self._engine.comm
        apart = isinstance(engine.compression, LocalSteps) and engine.compression.local
        # The kernels take fp32 factors, and step no fp64 bucket.
        accumulators = {b.grads.dtype for b in engine.buckets if b.wants_grad}
        dtype = torch.float64 if accumulators == {torch.float64} else torch.float32
        if norm_type == 2.0:
            total = torch.zeros((), dtype=torch.float64, device=comm.device)
            for rows in self.by_bucket():
                total = total + _squares(rows, comm.device)
            if engine.sharded_optim or apart:
                total = comm.sum_scalar(total, "gradient norm") / (comm.world if apart else 1)
            return total.sqrt().to(dtype)
        parts = [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for rows in self.by_bucket() for grad in rows]
        none = torch.zeros((), dtype=dtype, device=comm.device)
        local = torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else none
        if not (engine.sharded_optim or apart):
            return local
        if norm_type == float("inf"):
            return comm.max_scalar(local, "gradient norm")
        total = comm.sum_scalar(local.to(torch.float64) ** norm_type, "gradient norm") / (comm.world if apart else 1)
        return (total ** (1.0 / norm_type)).to(local.dtype)

    def expect_clipping(self, max_norm: float) -> None:
        """Tell that ``clip_norm(max_norm)`` follows: a 1-bit optimizer clips before anything reads its gradients."""
        if isinstance(self._engine.compression, CompressedMomentum):
            self._engine.compression.limit = max_norm

    @phased("clip")
    @torch.no_grad()
    def clip_norm(self, max_norm: float, norm: Tensor | None = None) -> Tensor:
        """Unscale the gradients and scale them down to a global 2-norm of ``max_norm``, in one pass.

        The same formula as ``torch.nn.utils.clip_grad_norm_``. Collective.

        Args:
            max_norm: the limit.
            norm: the norm of the unscaled gradients; None: it is computed.

        Returns:
            The norm (0D) of the unscaled gradients before clipping.

        Raises:
            RuntimeError: a 1-bit optimizer has exchanged its momenta already.
        """
        self._engine.same_on_ranks.note_value("the norm to which gradients are clipped", max_norm)
        compression = self._engine.compression
        if isinstance(compression, CompressedMomentum) and compression.compresses:
            return self._clip_exchanged(compression, max_norm)
        norm = self.norm() / self.loss_scale if norm is None else norm
        self.multiply(torch.clamp(max_norm / (norm + 1e-6), max=1.0) / self.loss_scale)
        self.loss_scale = 1.0
        return norm

    @phased("clip")
    @torch.no_grad()
    def clip_value(self, limit: float) -> None:
        """Clamp each element of the averaged gradients to [-limit, limit]. Collective."""
        if isinstance(self._engine.compression, CompressedMomentum):
            raise RuntimeError(
                "Clipping by value cannot be combined with this 1-bit optimizer: after freeze_step no rank has the "
                "mean gradient. Clip by norm."
            )
        self._engine.same_on_ranks.note_value("the value to which gradients are clipped", limit)
        for rows in self.by_bucket(write=True):
            for grad in rows:
                grad.clamp_(-limit, limit)
        self._engine.used_parameters.changed()

    def _clip_exchanged(self, compression: CompressedMomentum, max_norm: float) -> Tensor:
        """Clip before momenta are exchanged, see compressed_momentum.py; returns the norm."""
        self.expect_clipping(max_norm)
        used = self.used()
        self.unscale()
        if not used:
            return torch.zeros((), device=self._engine.comm.device)
        if compression.clipped is None or compression.clipped[0] != max_norm:
            raise RuntimeError(
                f"The gradients have become averaged momenta before they were clipped to {max_norm:g}: something has "
                "read them. Clip first, or set Trainer(gradient_clip_val) to this limit."
            )
        return compression.clipped[1]

    @phased("clip")
    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the accumulated gradients by the loss scale that they carry. Collective."""
        if self.loss_scale != 1.0:
            device = self._engine.comm.device
            self.multiply(torch.full((), 1.0 / self.loss_scale, dtype=torch.float32, device=device))
            self.loss_scale = 1.0


def _rows(bucket: Bucket, indices: list[int], write: bool = True) -> list[Tensor]:
    """The accumulated gradients of these parameters; pieces with only alignment between them share a row.

    Read-only without ``write``.
    """
    edges: list[list[int]] = []
    wanted = set(indices)
    for piece in bucket.pieces:
        if piece.index not in wanted:
            continue
        if edges and piece.offset - edges[-1][1] < ALIGN:  # a parameter in between would take at least ALIGN
            edges[-1][1] = piece.offset + piece.numel
        else:
            edges.append([piece.offset, piece.offset + piece.numel])
    bucket.grads.apply_deferred_scale()
    if not edges:
        return []
    grad = bucket.grads.write() if write else bucket.grads.read()
    return [grad[lo:hi] for lo, hi in edges]


def _squares(grads: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares (0D fp64)."""
    simple: dict[torch.device, list[Tensor]] = {}
    others: list[Tensor] = []
    for grad in grads:
        fits = grad.dtype in ops.DTYPES and grad.is_contiguous()
        (simple.setdefault(grad.device, []) if fits else others).append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for rows in simple.values():
        total = total + ops.norm_squared(rows).to(device)
    for grad in others:  # of parameters that the engine does not own
        dense = grad.to_dense() if grad.layout is not torch.strided else grad
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        total = total + dense.double().square().sum().to(device)
    return total
