"""Compressed reductions: what was put in is what has arrived plus what residuals hold, on all ranks alike."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Mesh
from lt_zero.core.comm.work import Done
from lt_zero.core.comm.world import World
from lt_zero.exchange.compression import Residuals, gather_encoded
from lt_zero.exchange.encoded import CompressedGroup, use_compression
from lt_zero.kernels import codecs
from lt_zero.ops import INT8, TWO_BITS, BlockCodec, Codec, TopK
from tests.support.matrix import only, only_rows
from tests.support.nodes import NodePool, Traffic
from tests.support.pool import Pool

CODECS = {
    "1bit": BlockCodec(1, 128),
    "2bit": TWO_BITS,
    "topk": TopK(0.05, torch.bfloat16, huffman=False),
    "huffman": TopK(0.05),
}


@pytest.mark.parametrize("ranks", [2, 64])
def test_the_calls_of_a_gather_do_not_grow_with_the_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    kernels = importlib.import_module("lt_zero.kernels.blocks")

    def counted(name: str) -> Callable[..., object]:
        return lambda *given: calls.append(name) or getattr(kernels, name)(*given)

    for name in ("quantize", "quantize_rows", "dequantize_sum", "dequantize_rows"):
        monkeypatch.setattr(codecs, name, counted(name))
    flat, mesh = torch.randn(ranks * 32), Mesh(ranks, 1, ranks)
    gather_encoded(flat, mesh, INT8, lambda codes: Done()).wait()
    assert calls == ["quantize", "dequantize_rows"]


def _sums(codec: Codec, hierarchical: bool, per_node: int = 0) -> CompressedGroup:
    if per_node:
        os.environ["LT_ZERO_NODE_RANK"] = str(dist.get_rank() // per_node)
    try:
        group = ShardGroup.of_all(World.join(torch.device("cpu")))
    finally:
        os.environ.pop("LT_ZERO_NODE_RANK", None)
    sums = use_compression(group, codec, hierarchical)
    assert sums is not None
    return sums


def _zeros(group: ShardGroup, numel: int, whole: bool) -> tuple[Tensor, Residuals]:
    """What a reduction writes to, and residuals."""
    shard = numel // group.size
    server = torch.zeros(shard) if whole else None
    return torch.zeros(numel if whole else shard), Residuals(torch.zeros(numel), server)


def _summed(group: ShardGroup, own: Tensor) -> Tensor:
    """The sum over the ranks in fp64."""
    return group.sum_scalar(own.double(), "test")


def _owed(group: ShardGroup, residuals: Residuals) -> Tensor:
    """What the residuals of all ranks hold of the sum."""
    owed = _summed(group, residuals.worker)
    if residuals.server is not None:
        shards = torch.zeros(group.size, residuals.server.numel(), dtype=torch.float64)
        shards[group.rank] = residuals.server
        owed += _summed(group, shards).view(-1)
    return owed


def _conserved(name: str, whole: bool, hierarchical: bool, dtype: torch.dtype, per_node: int) -> list[float]:
    """What residuals, sent as they are, leave of the difference to what was sent; that difference; a digest."""
    sums = _sums(CODECS[name], hierarchical, per_node)
    group = sums.group
    numel, steps = group.size * 1304, 30  # shards are no multiple of a block
    mine = slice(None) if whole else slice(group.rank * 1304, (group.rank + 1) * 1304)
    out, residuals = _zeros(group, numel, whole)
    sent, arrived = torch.zeros(numel, dtype=torch.float64), torch.zeros(out.numel(), dtype=torch.float64)
    draws = torch.Generator().manual_seed(group.rank)
    bias = torch.randn(numel, generator=draws)
    for step in range(steps):
        grads = (bias + torch.randn(numel, generator=draws)).to(dtype)
        sent += _summed(group, grads) / group.size
        sums.reduce(out, grads, residuals, add=step % 2 == 1, name="test").wait()
        if step % 2 == 1 or step == steps - 1:  # else the next adds to it
            arrived += out.double()
    kept = float((arrived + _owed(group, residuals)[mine] / group.size - sent[mine]).abs().max())
    lag = float((arrived - sent[mine]).norm() / sent[mine].norm())
    return [kept, lag, float(arrived.sum()) if whole else 0.0]


@pytest.mark.parametrize(
    ("name", "whole", "hierarchical", "dtype"),
    only_rows(
        [
            ("1bit", True, False, torch.float32),
            ("2bit", False, True, torch.bfloat16),
            ("huffman", False, True, torch.float32),
        ],
        itertools.product(CODECS, [True, False], [False, True], [torch.float32, torch.bfloat16]),
    ),
)
def test_nothing_is_lost(pool: Pool, name: str, whole: bool, hierarchical: bool, dtype: torch.dtype) -> None:
    for ranks, per_node in ((4, 2),) if hierarchical else ((3, 0), (4, 2)):
        results = pool.run(ranks, _conserved, name, whole, hierarchical, dtype, per_node)
        for kept, lag, total in results:
            assert kept < 2e-4, ranks  # fp32 rounding of sums over 30 steps
            assert lag < 0.7
            assert total == results[0][2]


def _first(codec: Codec, grads: Tensor) -> tuple[Tensor, Residuals]:
    sums = _sums(codec, hierarchical=False)
    out, residuals = _zeros(sums.group, grads.numel(), whole=True)
    sums.reduce(out, grads, residuals, add=False, name="test").wait()
    return out, residuals


def _overflowing(name: str, bad: float) -> tuple[bool, bool]:
    grads = torch.ones(dist.get_world_size() * 1304)
    if dist.get_rank() == 1:
        grads[7] = bad
    out, residuals = _first(CODECS[name], grads)
    return bool(out.isfinite().all()), all(bool(t.isfinite().all()) for t in residuals[:2] if t is not None)


@pytest.mark.parametrize("name", only(["1bit", "huffman"], CODECS))
def test_an_overflow_arrives_on_all_ranks_and_stays_in_no_residual(pool: Pool, name: str) -> None:
    for bad in (math.inf, math.nan):
        assert pool.run(2, _overflowing, name, bad) == [(False, True)] * 2


def _refused() -> str:
    group = _sums(CODECS["1bit"], hierarchical=False).group
    group.nodes = [[0], [1, 2]]
    with pytest.raises(ConfigError) as caught:
        use_compression(group, CODECS["1bit"], True)
    return str(caught.value)


def test_nodes_have_to_be_equal(pool: Pool) -> None:
    for text in pool.run(3, _refused):
        assert "gradient_compression.hierarchical_compress=true" in text
        assert "1, 2" in text


def _bytes(name: str, whole: bool, hierarchical: bool) -> int:
    sums = _sums(CODECS[name] if name in CODECS else TopK(0.01, torch.bfloat16), hierarchical)
    group = sums.group
    numel = 4_000_000
    out, residuals = _zeros(group, numel, whole)
    grads = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank))
    with Traffic() as traffic:
        sums.reduce(out, grads, residuals, add=False, name="test").wait()
    return traffic.sent


@pytest.mark.nodes
@pytest.mark.parametrize(
    ("name", "saves", "hierarchical"),
    only_rows(
        [("2bit", 0.93, True)],
        [
            (*kind, between)
            for kind in (("1bit", 0.96), ("2bit", 0.93), ("topk 1 %", 0.95))
            for between in (False, True)
        ],
    ),
)
def test_bytes_between_nodes(node_pool: NodePool, name: str, saves: float, hierarchical: bool) -> None:
    """Of two nodes with two ranks each, against fp32 in the same pattern: each part once, each mean once to a node."""
    numel = 4_000_000
    dense = 4 * numel * (0.5 if hierarchical else 1.0)
    for whole in (False, True):
        for sent in node_pool.run(_bytes, name, whole, hierarchical):
            assert sent < (1 - saves) * (dense + (2 * numel if whole else 0)) * 1.05  # headers of packets, and sizes
