"""Inputs of checkpointed modules on a machine with a GPU: streams, page-locked memory, the allocator's statistics."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lt_zero.core.stores.pinned import host_buffer
from lt_zero.features.activation_checkpointing.profile import Boundary
from lt_zero.features.activation_checkpointing.stores import ActivationStore
from tests.features.activation_checkpointing.store_tools import PLACES, Feed, gradients, opened, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = torch.device("cuda")
WIDTH, DEPTH = 1024, 12


@pytest.fixture(params=list(PLACES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationStore]:
    made = opened(request.param, tmp_path, DEPTH, GPU)
    yield made
    made.close()


def net() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Feed(WIDTH) for _ in range(DEPTH)).to(GPU)


def rows(seed: int, count: int = 4096) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator(GPU).manual_seed(seed), device=GPU)


def forward(model: nn.ModuleList, x: Tensor, store: ActivationStore | None) -> Tensor:
    for block in model:
        if store is None:
            x = checkpoint(block, x, use_reentrant=False)
        else:
            with saved_tensors_hooks(store.pack, store.unpack):
                x = checkpoint(block, x, use_reentrant=False)
    return x.square().mean()


def step(model: nn.ModuleList, store: ActivationStore | None, seed: int, count: int = 4096) -> list[Tensor]:
    for micro in range(2):
        forward(model, rows(2 * seed + micro, count), store).backward()
        if store is not None:
            store.end_backward()
    return gradients(model)


def test_the_same_gradients(store: ActivationStore) -> None:
    model = net()
    for seed in range(4):
        count = 4096 if seed < 3 else 1000
        assert same(step(model, store, seed, count), step(model, None, seed, count)), seed
    assert store.stats()["stored"] == 0
    assert store.problem is None
    loss = forward(model, rows(1), store)
    for last in (False, True):
        loss.backward(retain_graph=not last)
        found = gradients(model)
    forward(model, rows(1), None).backward()
    assert same(found, gradients(model))


def test_another_stream(store: ActivationStore) -> None:
    model, stream = net(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step(model, store, 1)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(found, step(model, None, 1))


def test_copies_race_with_nobody(store: ActivationStore) -> None:
    """What is packed is computed late and freed at once, its memory is written again, and copies are dropped."""
    a = torch.randn(4096, 4096, device=GPU)
    for turn in range(5):
        packed = []
        for number in range(12):
            a = a @ a  # the device is behind the host
            a = a / a.norm()
            source = torch.full((1 << 20,), float(number), device=GPU) + 0 * a.sum()
            packed.append(store.pack(source))
            del source
            torch.full((1 << 20,), -1.0, device=GPU)
        found = [store.unpack(one) for one in reversed(packed[turn:])]
        del packed
        for number, tensor in zip(range(11, turn - 1, -1), found, strict=True):
            assert tensor.eq(number).all(), (turn, number)


def test_host_memory_is_page_locked_and_nobody_waits(tmp_path: Path) -> None:
    buffer = host_buffer(5000, pin=True)
    assert buffer.is_pinned()
    assert buffer.numel() == 8192, "not rounded up to a power of two pages"
    store = opened("host", tmp_path, DEPTH, GPU)
    loan = store.storage.memory.take(1 << 20)
    assert loan.tensor.is_pinned()
    loan.give_back()
    a, x = torch.randn(8192, 8192, device=GPU), torch.randn(1 << 20, device=GPU)
    store.pack(x)
    torch.cuda.synchronize()
    for _ in range(40):
        a = a @ a
    start = time.perf_counter()
    packed = [store.pack(x + number) for number in range(3)]
    begun = time.perf_counter() - start
    torch.cuda.synchronize()
    waited = time.perf_counter() - start
    assert begun < waited / 4, (begun, waited)
    assert store.unpack(packed[1]).equal(x + 1)
    del packed, loan, buffer
    store.close()
    del store
    gc.collect()
    torch.cuda.synchronize()
    assert host_buffer(5000, pin=True).is_pinned(), "what was registered can be registered again"


@pytest.mark.parametrize("place", ["host", "files"])
def test_the_device_is_free_between_forward_and_backward(place: str, tmp_path: Path) -> None:
    model, store = net(), opened(place, tmp_path, DEPTH, GPU)
    step(model, store, 0)
    step(model, None, 0)
    taken = []
    for where in (None, store):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = forward(model, rows(1), where)
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients(model)
        del loss
        store.end_backward()
    nbytes = 4096 * WIDTH * 4
    assert taken[0] >= (DEPTH - 1) * nbytes
    assert taken[1] <= 6 * nbytes, "a few copies are on their way"
    store.close()


def test_one_block_of_memory(tmp_path: Path) -> None:
    """Allocations of the device's memory, and what lies free between what is used, with and without the block."""
    found = {}
    for name in ("plain", "arena"):
        model = net()
        store = opened("arena", tmp_path, DEPTH, GPU) if name == "arena" else None
        for seed in range(2):
            step(model, store, seed)
        torch.cuda.synchronize()
        made = store.stats()["made"] if store is not None else 0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        for seed in range(3):
            step(model, store, seed)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        found[name] = {
            "segments": after["segment.all.allocated"] - before["segment.all.allocated"],
            "split": after["inactive_split_bytes.all.peak"],
            "reserved": after["reserved_bytes.all.peak"],
        }
        if store is not None:
            assert store.stats()["made"] == made == 1
            store.close()
        del model, store
        gc.collect()
        torch.cuda.empty_cache()
    print(found)
    assert found["arena"]["segments"] == 0, found


def test_times_are_read_without_waiting() -> None:
    boundary, model = Boundary(GPU, profile=True, synchronize=False, every=100), net()
    x = rows(1)
    model[0](x)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        with boundary.around("block"):
            model[0](x)
    end.record()
    boundary.end_step()  # may come too early for some
    torch.cuda.synchronize()
    boundary.table(1)
    times = boundary.times["block"]
    assert times.calls == [20, 0]
    assert times.milliseconds[0] == pytest.approx(start.elapsed_time(end), rel=0.2)
