"""Topologies: which is chosen, what it sends, and that it changes results only within rounding."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero import ConfigError
from lt_zero.core.comm import transport
from lt_zero.core.comm.hierarchy import axis_groups
from lt_zero.core.comm.topology import choose, group_by_node, torus
from lt_zero.core.comm.transport import Mesh
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.nodes import NodePool, Traffic
from tests.support.parity import RELEASE, Case, check, config_of, full_values
from tests.support.pool import Pool

TWO = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("wanted", "world", "shards", "nodes", "transport", "sizes", "why"),
    [
        ("auto", 4, 4, TWO, "gloo", (2, 2), "2 nodes"),
        ("auto", 4, 4, TWO, "windows", (), "share memory"),
        ("auto", 4, 4, TWO, "nccl", (), "nccl"),
        ("auto", 4, 4, [[0, 1, 2, 3]], "gloo", (), "one node"),
        ("auto", 4, 4, [[0], [1], [2], [3]], "gloo", (4,), "one rank"),
        ("auto", 4, 2, TWO, "gloo", (), "inside nodes"),
        ("auto", 4, 4, [[0, 1, 2], [3]], "gloo", (4,), "different numbers"),
        ("auto", 4, 4, [[0, 2], [1, 3]], "gloo", (4,), "neighbours"),
        ("auto", 12, 6, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], "gloo", (6,), "whole nodes"),
        ("auto", 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]], "gloo", (2, 2), "2 nodes"),
        (1, 4, 4, TWO, "gloo", (), "as configured"),
        (2, 4, 4, TWO, "windows", (2, 2), "2 nodes"),
        (2, 4, 4, [[0, 1, 2, 3]], "gloo", (), "one node"),
        (3, 8, 8, [[0, 1], [2, 3], [4, 5], [6, 7]], "gloo", (2, 2, 2), "2 x 2 x 2"),
        (3, 8, 8, [[0], [1, 2, 3, 4, 5, 6, 7]], "gloo", (2, 2, 2), "2 x 2 x 2"),
    ],
)
def test_what_is_chosen(
    wanted: Any, world: int, shards: int, nodes: list[list[int]], transport: str, sizes: Sequence[int], why: str
) -> None:
    found = choose(wanted, Mesh(world, 0, shards), nodes, transport)
    assert found.sizes == sizes
    assert why in found.why


@pytest.mark.parametrize(
    ("wanted", "nodes", "transport", "why"),
    [
        (2, [[0, 1, 2], [3]], "gloo", "different numbers of ranks .3, 1."),
        (2, [[0, 2], [1, 3]], "gloo", "not neighbours"),
        (2, TWO, "nccl", "nccl finds its own"),
        (3, TWO, "nccl", "nccl finds its own"),
    ],
)
def test_what_cannot_be_had(wanted: Any, nodes: list[list[int]], transport: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"communication.topology={wanted} .*{why}.*Write 'auto'"):
        choose(wanted, Mesh(4, 0, 4), nodes, transport)


def test_a_torus_has_all_ranks_once_in_each_dimension() -> None:
    for shards in range(1, 50):
        sizes, mesh = torus(shards, 1), Mesh(2 * shards, 0, shards)
        assert np.prod(sizes) == shards
        for dimension, size in enumerate(sizes):
            groups = axis_groups(mesh, sizes, dimension)
            assert {len(group) for group in groups} == {size}
            assert sorted(rank for group in groups for rank in group) == list(range(2 * shards))


def test_ranks_are_grouped_by_node() -> None:
    assert group_by_node(["a", "b", "a", "c", "b"]) == [[0, 2], [1, 4], [3]]


def _as_two_nodes(shared: str = "0") -> Any:
    """Half of the ranks are on another node, as LT_ZERO_NODE_RANK says."""
    number = dist.get_rank() // (dist.get_world_size() // 2)
    return mock.patch.dict(os.environ, {"LT_ZERO_NODE_RANK": str(number), "LT_ZERO_SHARED_MEMORY": shared})


def _exact(stage: int, topology: Any, optimizer: str, zero: dict[str, Any], sizes: Sequence[int]) -> None:
    with _as_two_nodes("1" if topology == 2 else "0"):
        keys = {"topology": topology}
        engine = check(Case(Net, next_token_loss, stage, optimizer, 3, micro=2, zero=zero, communication=keys))
    assert tuple(engine.groups[0].topology.sizes) == tuple(sizes)
    assert len(engine.world.nodes) == 2
    assert engine.groups[0].sends.in_place == (topology == 2)


@pytest.mark.parametrize(
    ("stage", "optimizer", "topology"),
    only_rows([(1, "adamw", 2), (3, "sgd", "auto")], itertools.product([0, 1, 2, 3], ["sgd", "adamw"], ["auto", 2, 3])),
)
def test_equals_single_process(pool: Pool, stage: int, optimizer: str, topology: Any) -> None:
    """Over sockets only; ranks of a node through shared memory (2); in three dimensions."""
    sizes = (2, 1, 2) if topology == 3 else (2, 2)
    pool.run(4, _exact, stage, topology, optimizer, RELEASE if stage == 3 else {}, sizes)


def _exact_alone(stage: int) -> None:
    found = []
    for keys in ({"topology": "auto"}, {"topology": 1}):
        alone = {"LT_ZERO_NODE_RANK": str(dist.get_rank()), "LT_ZERO_SHARED_MEMORY": "0"}
        with mock.patch.dict(os.environ, alone), mock.patch.object(transport, "_PIECE", 100):
            engine = check(Case(Net, next_token_loss, stage, "sgd", 3, micro=2, communication=keys))
        found.append({name: value.clone() for name, value in full_values(engine).items()})
        assert engine.groups[0].topology.sizes == ((3,) if keys["topology"] == "auto" else ())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=0)


@pytest.mark.parametrize("stage", only([2], [0, 1, 2, 3]))
def test_nodes_of_one_rank_get_the_bits_of_a_ring(pool: Pool, stage: int) -> None:
    """They exchange many pieces."""
    pool.run(3, _exact_alone, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_over_several_nodes(pool: Pool, stage: int) -> None:
    """Two replicas of four ranks, each on two nodes of two."""
    pool.run(8, _replicas, stage)


def _replicas(stage: int) -> None:
    number = str(dist.get_rank() // 2)
    with mock.patch.dict(os.environ, {"LT_ZERO_NODE_RANK": number, "LT_ZERO_SHARED_MEMORY": "0"}):
        engine = check(Case(Net, next_token_loss, stage, "sgd", steps=2, zero={"mics_shard_size": 4}))
    assert engine.groups[0].topology.sizes == (2, 2)
    assert engine.groups[0].mesh.replica == dist.get_rank() // 4


def _on_nodes(numbers: Sequence[int], sizes: Sequence[int]) -> None:
    """The ranks of a node share memory, and the dimensions of the torus are not nodes."""
    with mock.patch.dict(os.environ, {"LT_ZERO_NODE_RANK": str(numbers[dist.get_rank()])}):
        engine = check(Case(Net, next_token_loss, 2, "sgd", steps=1, communication={"topology": 3}))
    assert engine.groups[0].topology.sizes == sizes


@pytest.mark.parametrize("numbers", only([(0, 0, 1, 2)], [(0, 0, 1, 2), (0, 1, 0, 1)]))
def test_a_torus_across_nodes(pool: Pool, numbers: Sequence[int]) -> None:
    """Unequal nodes, and nodes whose ranks are not neighbours."""
    pool.run(4, _on_nodes, numbers, (2, 1, 2))


def _failing() -> str:
    with _as_two_nodes():
        engine = lt_zero.shard(Net(), config_of(2))
    flat = torch.ones(8)
    work = engine.groups[0].transport._reducing.submit(lambda: flat.view(3, 3))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="shape"):
        work.wait()
    work = engine.groups[0].transport._reducing.submit(lambda: flat.add_(1))  # type: ignore[attr-defined]
    work.wait()
    return str(flat.sum().item())


def test_an_error_in_the_thread_is_raised_where_its_work_is_waited_for(pool: Pool) -> None:
    assert pool.run(4, _failing) == ["16.0"] * 4


def _sent(stage: int, topology: Any) -> int:
    """Bytes that this rank's node sends to the other one in a backward and a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    config = config_of(stage, RELEASE if stage == 3 else {}, communication={"topology": topology})
    engine = lt_zero.shard(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(2):
        with Traffic() as traffic:
            optimizer.zero_grad()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            engine.finish_steps()
    return traffic.sent


@pytest.mark.nodes
@pytest.mark.parametrize("stage", only([3], [0, 2, 3]))
def test_bytes_between_nodes_are_divided_by_the_ranks_of_a_node(node_pool: NodePool, stage: int) -> None:
    ring, nodes = (sum(node_pool.run(_sent, stage, topology)[::2]) for topology in (1, "auto"))
    assert nodes < 0.55 * ring
