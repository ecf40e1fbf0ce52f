"""The global gradient norm, and what scales gradients by one number: unscaling and clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from lt_zero.core.engine import Engine
from lt_zero.core.optimizer import ShardedOptimizer


@torch.no_grad()
def grad_norm(sharded: ShardedOptimizer, norm_type: float = 2.0) -> Tensor:
    """The global norm (0D, fp32) of the accumulated gradients of the optimizer's parameters. Collective.

    It is not finite exactly if a gradient of any rank is not, or too large to be squared.
    """
    return total_norm(sharded.engine, sharded.grads(), norm_type)


@torch.no_grad()
def clip_grad_norm(sharded: ShardedOptimizer, max_norm: float, norm: Tensor | None = None) -> Tensor:
    """Unscale the gradients and scale them down to a global 2-norm of ``max_norm``, in one pass.

    The same formula as ``torch.nn.utils.clip_grad_norm_``. Collective.

    Args:
        sharded: whose gradients.
        max_norm: the limit.
        norm: the norm of the unscaled gradients, if it is known.

    Returns:
        The norm (0D) of the unscaled gradients before clipping.
    """
    norm = grad_norm(sharded) / sharded.loss_scale if norm is None else norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / sharded.loss_scale
    sharded.widen_fp16()
    for grad in sharded.grads():
        grad.mul_(factor)
    sharded.loss_scale = 1.0
    return norm


@torch.no_grad()
def clip_grad_value(sharded: ShardedOptimizer, limit: float) -> None:
    """Clamp each element of the averaged gradients to [-limit, limit]. Collective."""
    for grad in sharded.grads():
        grad.clamp_(-limit, limit)


@torch.no_grad()
def unscale(sharded: ShardedOptimizer) -> None:
    """Divide the accumulated gradients by the loss scale that they carry. Collective."""
    if sharded.loss_scale != 1.0:
        sharded.widen_fp16()
        for grad in sharded.grads():
            grad.mul_(1.0 / sharded.loss_scale)
        sharded.loss_scale = 1.0


@torch.no_grad()
def total_norm(engine: Engine, grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm over all ranks' pieces, each element counted once."""
    # 16-bit gradients one by one, added up in fp32: the foreach kernels add in the dtype that they are given.
    low = [grad for grad in grads if grad.dtype in (torch.float16, torch.bfloat16)]
    parts = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in low]
    wide = [grad for grad in grads if grad.dtype not in (torch.float16, torch.bfloat16)]
    parts += [torch.nn.utils.get_total_norm(wide, norm_type)] if wide else []
    empty = torch.zeros((), device=engine.comm.device)
    local = torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else empty
    if not engine.sharded_optim:
        return local
    if norm_type == float("inf"):
        return engine.comm.max_scalar(local, "gradient norm")
    total = engine.comm.sum_scalar(local.to(torch.float64) ** norm_type, "gradient norm")
    return (total ** (1.0 / norm_type)).to(local.dtype)
