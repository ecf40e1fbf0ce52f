"""Saved inputs of which each tensor rank keeps a part: the same gradients, fewer bytes, and only what is equal."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lt_zero.common import accelerator
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.core.comm.part_ranks import PartRanks
from lt_zero.core.comm.world import World
from lt_zero.features.activation_checkpointing import partitioned, stores
from lt_zero.features.activation_checkpointing.checkpointing import open_store
from lt_zero.features.activation_checkpointing.partitioned import PartitionedStore, _Digests
from lt_zero.features.activation_checkpointing.stores import ActivationStore
from tests.features.activation_checkpointing.store_tools import CPU, PLACES, WIDTH, Feed, gradients, same
from tests.support.matrix import only
from tests.support.pool import Pool

ODD = 37  # rows: neither they nor their bytes are a multiple of 3 ranks'
BYTES = ODD * WIDTH * 4
DEPTH = 4


def opened(place: str = "device", folder: Path | None = None) -> PartitionedStore:
    """A store over all ranks, in host memory, files and so on as if the device had memory of its own. Collective."""
    block = PLACES.get(place, {}) | ({"nvme_path": folder} if place == "files" else {})
    world = World.join(CPU)
    parts = [list(range(world.size))]
    ranks = PartRanks(world, parts, world.new_group(None, parts, closes=True))
    with mock.patch.object(accelerator, "_apart", True), mock.patch.object(stores, "_MIN_BYTES", 1):
        made = open_store(
            ActivationCheckpointing(partition_activations=True, **block), CPU, DEPTH, rank=dist.get_rank(), ranks=ranks
        )
    assert isinstance(made, PartitionedStore)
    return made


class Block(Feed):
    """Its output does not depend on the mask, of which it has a gradient: that of a local one is the same, too."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if mask is not None:
            masked = mask.to(x.dtype) * self.down.bias
            y = y + (masked - masked.detach())
        return y


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(DEPTH))


def rows(seed: int = 0, count: int = ODD) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def forward(net: nn.ModuleList, x: Tensor, store: ActivationStore | None, *others: Tensor) -> Tensor:
    for number, block in enumerate(net):
        x = call(block, store, str(number), x, *others)
    return x.square().sum()


def call(module: nn.Module, store: ActivationStore | None, name: str, *tensors: Tensor) -> Tensor:
    """The output of a checkpointed module."""
    with store.saving(name, tensors) if store is not None else nullcontext():
        result: Tensor = torch.utils.checkpoint.checkpoint(module, *tensors, use_reentrant=False)
        return result


@dataclass(frozen=True)
class Masked:
    """Inputs of each block beside the activation: what they are, and whether they are equal on all ranks."""

    make: Callable[[int], Tensor]
    equal: bool


OTHERS = {
    "bool": Masked(lambda rank: rows(1) > 0, True),
    "int": Masked(lambda rank: (10 * rows(1)).to(torch.int16), True),
    "low": Masked(lambda rank: rows(1).bfloat16(), True),
    "double": Masked(lambda rank: rows(1).double(), True),
    "transposed": Masked(lambda rank: rows(1).view(WIDTH, ODD).t(), True),
    "slice at an odd byte": Masked(lambda rank: (rows(1, ODD + 1) > 0).flatten()[3:-29].view(ODD, WIDTH), True),
    "expanded": Masked(lambda rank: rows(3, 1).expand(ODD, WIDTH), True),
    "local": Masked(lambda rank: rows(rank), False),
    "one element": Masked(lambda rank: rows(1).index_fill(1, torch.tensor(5), 1 + 1e-7 * rank), False),
    "local permutation": Masked(lambda rank: torch.eye(ODD, WIDTH).roll(rank, 1), False),
    "local layout": Masked(lambda rank: rows(1) if rank == 0 else rows(1).t().contiguous().t(), False),
    "local dtype": Masked(lambda rank: torch.zeros(ODD, WIDTH, dtype=torch.int32 if rank else torch.float32), False),
}


def _equals(place: str, folder: Path) -> None:
    store = opened(place, folder)
    rank = dist.get_rank()
    net = blocks()
    for name, other in OTHERS.items():
        x, mask = rows().requires_grad_(), other.make(rank)
        forward(net, x, None, mask).backward()
        want, of_input = gradients(net), x.grad
        x.grad = None
        before = store.split, store.whole
        loss = forward(net, x, store, mask)
        for last in (False, True):  # a graph may be walked again
            loss.backward(retain_graph=not last)
            store.end_backward()
            assert same(gradients(net), want), (place, name)
            assert x.grad is not None
            assert of_input is not None
            assert torch.equal(x.grad, of_input), (place, name)
            x.grad = None
        found = store.split - before[0], store.whole - before[1]
        # The mask is one tensor, which all blocks share.
        assert found == ((DEPTH + 1, 0) if other.equal else (DEPTH, 1)), (place, name, found)
        del loss
        assert store.stats()["stored"] == store.stats()["bytes"] == 0
    store.close()


@pytest.mark.parametrize("place", only(["device", "host"], ["device", "arena", "host", "files"]))
def test_gradients_are_those_without_to_the_bit(pool: Pool, place: str, tmp_path: Path) -> None:
    pool.run(3 if place == "device" else 2, _equals, place, tmp_path)


def _counts(ranks: int) -> None:
    part = -(-BYTES // ranks)
    for place in ("device", "arena", "host"):
        store, net = opened(place), blocks()
        loss = forward(net, rows().requires_grad_(), store)
        # The last call's input is whole until another call, or backward.
        assert store.stats()["bytes"] == (DEPTH - 1) * part + BYTES, place
        store._settle()
        found = store.stats()
        assert found["bytes"] == DEPTH * part, place
        assert found["most"] == (DEPTH - 1) * part + BYTES, "the input of one call is whole at a time"
        loss.backward()
        store.end_backward()
        store.close()


@pytest.mark.parametrize("ranks", only([3], [2, 3]))
def test_each_rank_saves_its_share_of_the_bytes(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _counts, ranks)


def _kept_alive() -> None:
    """Rank 0 keeps a graph, as to log it, so that the entry of a mask which all steps use lives on there only."""
    store = opened()
    net = blocks()
    mask = rows(1) > 0
    forward(net, rows(), None, mask).backward()
    want, kept = gradients(net), []
    for step in range(3):
        unused = forward(net, rows(), store, mask)
        if dist.get_rank() == 0:
            kept.append(unused)
        del unused
        gc.collect()
        forward(net, rows(), store, mask).backward()
        store.end_backward()
        assert same(gradients(net), want), step
    assert (store.stats()["stored"] > 0) == (dist.get_rank() == 0)


def test_a_graph_that_one_rank_keeps(pool: Pool) -> None:
    pool.run(2, _kept_alive)


def _one_tensor() -> None:
    """On rank 0 two arguments are one tensor, on rank 1 a tensor and a copy."""
    store = opened()
    net = blocks()[:2]
    x = rows().requires_grad_()
    mask = rows(1)

    class Two(nn.Module):
        def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
            return net[0](x, one) * other

    def loss(store: Any) -> Tensor:
        other = mask.view(ODD, WIDTH) if dist.get_rank() == 0 else mask.clone()
        return call(Two(), store, "two", call(net[1], store, "one", x), mask, other).sum()

    loss(None).backward()
    want = gradients(net)
    for _ in range(2):
        made = loss(store)
        for last in (False, True):
            made.backward(retain_graph=not last)
            assert same(gradients(net), want)
        store.end_backward()


def test_ranks_that_share_different_tensors(pool: Pool) -> None:
    pool.run(2, _one_tensor)


def _distributed() -> None:
    store, rank = opened(), dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tensor",))

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).tanh() * x

    for placement, equal in ((Replicate(), True), (Shard(1), False)):
        local = rows(0 if equal else rank)
        local = local.requires_grad_()
        made = DTensor.from_local(local, mesh, [placement], run_check=False)
        want = torch.autograd.grad(Scale()(made).to_local().square().sum(), local)
        before = store.split
        out = call(Scale(), store, "scale", made * 1)
        store._settle()
        assert store.split - before == equal
        assert torch.equal(torch.autograd.grad(out.to_local().square().sum(), local)[0], want[0])
        changing = made * 1
        out = call(Scale(), store, "scale", changing)
        with torch.no_grad():
            changing.mul_(0)  # after forward: a write to a DTensor is no version of what the rank has
        assert torch.equal(torch.autograd.grad(out.to_local().square().sum(), local)[0], want[0])


def test_distributed_tensors(pool: Pool) -> None:
    pool.run(2, _distributed)


def _changed() -> None:
    """A saved input that is written to before backward is autograd's error, whether it is still whole or not."""
    for equal in (True, False):
        store, net = opened("host"), blocks()[:2]
        for calls in (1, 2):
            x = rows(0 if equal else dist.get_rank()).requires_grad_() * 1
            out = call(net[0], store, "0", x)
            with torch.no_grad():
                x.add_(1)
            loss = (call(net[1], store, "1", out) if calls == 2 else out).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            store.end_backward()
        store.clear()


def test_an_input_that_is_changed_before_backward(pool: Pool) -> None:
    pool.run(2, _changed)


def _differing_calls() -> None:
    """The ranks' inputs have other numbers, and sizes: nothing of such a call is split, and nothing hangs."""
    store, rank = opened(), dist.get_rank()

    class Sum(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return torch.stack([t.tanh().sum() for t in tensors]).sum()

    for count in (1, partitioned._INPUTS - 1, partitioned._INPUTS + 4):
        tensors = [rows(seed, ODD + rank).requires_grad_() for seed in range(count + rank)]
        call(Sum(), store, "sum", *tensors).backward()
        store.end_backward()
        for tensor in tensors:
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad, 1 - tensor.detach().tanh() ** 2)
    assert store.split == 0
    many = [rows(seed).requires_grad_() for seed in range(partitioned._INPUTS + 4)]
    call(Sum(), store, "sum", *many).backward()
    assert store.split == partitioned._INPUTS, "the first of them"


def test_calls_that_differ(pool: Pool) -> None:
    pool.run(2, _differing_calls)


def _useless(caplog_level: int) -> list[str]:
    store = opened()
    net = blocks()[:2]
    found = list[str]()
    store._tells = dist.get_rank() == 0

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(caplog_level)
    partitioned.log.addHandler(handler)
    for seed in range(2):
        forward(net, rows(seed + 5 * dist.get_rank()), store).backward()
        store.end_backward()
    partitioned.log.removeHandler(handler)
    return found


def test_a_run_in_which_nothing_is_equal_says_so_once(pool: Pool) -> None:
    first, second = pool.run(2, _useless, logging.WARNING)
    assert len(first) == 1
    assert "partition_activations splits nothing" in first[0]
    assert second == []


def test_digests_see_values_and_their_order() -> None:
    digests, found = _Digests(), set[int]()
    base = torch.arange(5003, dtype=torch.int32).view(torch.uint8)
    tensors = [base, base.roll(1), base.roll(8), base.flip(0), base[:-1], base[1:], base.clone().fill_(0)]
    for element in range(0, base.numel(), 997):
        other = base.clone()
        other[element] ^= 128
        tensors.append(other)
    with mock.patch.object(partitioned, "_WORDS", 64):
        for tensor in tensors:
            found.add(int(digests.of(tensor)))
            assert int(digests.of(tensor.clone())) in found, "of the values, wherever they are"
    assert len(found) == len(tensors)
