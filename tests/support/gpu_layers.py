"""What ranks exchange inside of layers, on one device: each rank beside one process. These run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import lt_zero
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.parallel import combine, dispatch, sequence_attention
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from tests.support.mixtures import NUMBER, FeedForwards, dense
from tests.support.parallel_nets import Net, all_weights, batch
from tests.support.parity import RELEASE, config_of

RANKS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 256, 4, 2, 64


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest of each tensor, of its largest element."""
    pairs = zip(found, exact, strict=True)
    return [float((a.double() - b).abs().amax() / b.abs().amax()) for a, b in pairs]


def by_flash(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION] if query.is_cuda else [SDPBackend.MATH]):
        return F.scaled_dot_product_attention(query, key, value, **options)


def by_flex(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Tensor:
    found: Tensor = torch.compile(flex_attention)(query, key, value, enable_gqa=enable_gqa)
    return found


def check_attention(kind: str, function: Callable[..., Tensor], dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Output and gradients of this rank's part, at most twice as far from fp64 as torch's in ``dtype``."""
    device, rank = torch.device(kind), dist.get_rank()
    torch.manual_seed(0)
    shapes = [(2, heads, LENGTH, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given = [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]
    factors = torch.randn(shapes[0], dtype=torch.float64).to(device, dtype)

    def whole(to: torch.dtype) -> list[Tensor]:
        values = [x.to(to).requires_grad_() for x in given]
        out = F.scaled_dot_product_attention(*values, enable_gqa=True, **options)
        return [out.detach(), *torch.autograd.grad((out * factors.to(to)).sum(), values)]

    def part(x: Tensor) -> Tensor:
        return x.chunk(RANKS, 2)[rank]

    mine = [part(x).clone().requires_grad_() for x in given]
    attend = sequence_attention(function, dist.group.WORLD, method=options.pop("method", "ulysses"))
    out = attend(*mine, enable_gqa=True, **options)
    found = [out.detach(), *torch.autograd.grad((out * part(factors)).sum(), mine)]
    exact, theirs = ([part(x) for x in whole(to)] for to in (torch.float64, dtype))
    for ours, other in zip(errors(found, exact), errors(theirs, exact), strict=True):
        assert ours <= 2 * other + 1e-6


def check_experts(kind: str) -> None:
    device, rank = torch.device(kind), dist.get_rank()
    torch.manual_seed(0)
    whole = FeedForwards().double().to(device)
    mine = [nn.Parameter(p.detach().chunk(RANKS)[rank].clone()) for p in (whole.up, whole.down)]
    for other in range(RANKS):
        torch.manual_seed(other)
        tokens = torch.randn(5 + other, 6, dtype=torch.float64).to(device)
        ids = torch.rand(5 + other, NUMBER).argsort(1)[:, :2].to(device)
        scores = torch.rand(5 + other, 2, dtype=torch.float64).to(device)
        want = dense(whole, tokens, ids, scores)
        want.square().sum().backward()
        if other == rank:
            sent = dispatch(tokens, ids, NUMBER, dist.group.WORLD)
            pairs = zip(sent.split(), *mine, strict=True)
            found = combine(torch.cat([torch.tanh(rows @ up) @ down for rows, up, down in pairs]), sent, scores)
            wanted = want.detach()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    found.square().sum().backward()
    for part, parameter in zip(mine, (whole.up, whole.down), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(part.grad, parameter.grad.chunk(RANKS)[rank], rtol=0, atol=1e-12)


def check_tensor_ranks(kind: str, stage: int) -> None:
    """Three steps of SGD with momentum on two tensor ranks."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    model, reference, world = Net().to(device), Net().to(device), World.join(device)
    config = config_of(stage, RELEASE if stage == 3 else {})
    everyone, mesh = ShardGroup.of_all(world), ParallelMesh(ParallelSizes(1, RANKS), world)
    plan = dict[str, Any]()
    for number in range(len(model.layers)):
        plan |= {f"layers.{number}.up": ColwiseParallel(), f"layers.{number}.down": RowwiseParallel()}
    parallelize_module(model, mesh.tensor, plan)
    engine = lt_zero.shard(model, config, device, None, group=everyone, **mesh.arguments(model, everyone, config))
    nets = model, reference
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
    owner = lt_zero.ShardedOptimizer(engine, optimizers[0])
    for step in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(batch(step, 0).to(device)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(owner.grads.clip_norm(0.1), norm, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    weights = all_weights(engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name].cpu(), value.detach().cpu(), rtol=1e-5, atol=1e-6)
