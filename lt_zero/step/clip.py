"""The global gradient norm, unscaling and clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lt_zero import ops
from lt_zero.common.timing import phased
from lt_zero.engine.engine import Engine
from lt_zero.step.sharded_optimizer import ShardedOptimizer


@phased("clip")
@torch.no_grad()
def grad_norm(sharded: ShardedOptimizer, norm_type: float = 2.0) -> Tensor:
    """The global norm (0D, fp32; fp64 if all accumulators are) of the optimizer's accumulated gradients. Collective.

    It is finite unless a gradient of some rank is not, or is too large to be squared.
    """
    return total_norm(sharded.engine, sharded.grads.by_bucket(), norm_type)


@phased("clip")
@torch.no_grad()
def clip_grad_norm(sharded: ShardedOptimizer, max_norm: float, norm: Tensor | None = None) -> Tensor:
    """Unscale the gradients and scale them down to a global 2-norm of ``max_norm``, in one pass.

    The same formula as ``torch.nn.utils.clip_grad_norm_``. Collective.

    Args:
        sharded: the optimizer that owns the gradients.
        max_norm: the limit.
        norm: the norm of the unscaled gradients; None: it is computed.

    Returns:
        The norm (0D) of the unscaled gradients before clipping.
    """
    norm = grad_norm(sharded) / sharded.loss_scale if norm is None else norm
    sharded.grads.multiply(torch.clamp(max_norm / (norm + 1e-6), max=1.0) / sharded.loss_scale)
    sharded.loss_scale = 1.0
    return norm


@phased("clip")
@torch.no_grad()
def clip_grad_value(sharded: ShardedOptimizer, limit: float) -> None:
    """Clamp each element of the averaged gradients to [-limit, limit]. Collective."""
    for rows in sharded.grads.by_bucket(write=True):
        for grad in rows:
            grad.clamp_(-limit, limit)
    sharded.engine.used_parameters.changed()


@phased("clip")
@torch.no_grad()
def unscale(sharded: ShardedOptimizer) -> None:
    """Divide the accumulated gradients by the loss scale that they carry. Collective."""
    if sharded.loss_scale != 1.0:
        device = sharded.engine.comm.device
        sharded.grads.multiply(torch.full((), 1.0 / sharded.loss_scale, dtype=torch.float32, device=device))
        sharded.loss_scale = 1.0


@torch.no_grad()
def total_norm(engine: Engine, grads: Iterable[list[Tensor]], norm_type: float) -> Tensor:
    """The norm (0D) over all ranks' pieces, each element counted once; ``grads`` yields them in groups."""
    comm = engine.comm
    # The kernels take fp32 factors, and step no fp64 bucket.
    accumulators = {b.grads.dtype for b in engine.buckets if b.wants_grad}
    dtype = torch.float64 if accumulators == {torch.float64} else torch.float32
    if norm_type == 2.0:
        total = torch.zeros((), dtype=torch.float64, device=comm.device)
        for rows in grads:
            total = total + _squares(rows, comm.device)
        if engine.sharded_optim:
            total = comm.sum_scalar(total, "gradient norm")
        return total.sqrt().to(dtype)
    parts = [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for rows in grads for grad in rows]
    none = torch.zeros((), dtype=dtype, device=comm.device)
    local = torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else none
    if not engine.sharded_optim:
        return local
    if norm_type == float("inf"):
        return comm.max_scalar(local, "gradient norm")
    total = comm.sum_scalar(local.to(torch.float64) ** norm_type, "gradient norm")
    return (total ** (1.0 / norm_type)).to(local.dtype)


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
