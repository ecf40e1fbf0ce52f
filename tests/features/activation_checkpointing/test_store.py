"""Where inputs of checkpointed modules rest (stores.py), on a CPU whose host memory counts as apart."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lt_zero.common import accelerator
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.features.activation_checkpointing.checkpointing import open_store
from lt_zero.features.activation_checkpointing.stores import ActivationStore
from lt_zero.offload.copy_streams import CopyStream
from tests.features.activation_checkpointing.store_tools import (
    CPU,
    NBYTES,
    PLACES,
    WIDTH,
    blocks,
    forward,
    gradients,
    opened,
    rows,
    same,
)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_apart", True)


@pytest.fixture(params=[*PLACES, "files here"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActivationStore]:
    """Files both ways: on a device that is apart, and on one that is the host's memory."""
    monkeypatch.setattr(accelerator, "_apart", request.param != "files here")
    made = opened(request.param.removesuffix(" here"), tmp_path)
    yield made
    made.close()


# ---- the same gradients --------------------------------------------------------------------------------------------


def expected(net: nn.ModuleList, *seeds: int) -> list[Tensor]:
    for seed in seeds:
        forward(net, rows(seed)).backward()
    return gradients(net)


def test_steps_have_the_gradients_of_plain_checkpointing_and_allocate_once(store: ActivationStore) -> None:
    net, made = blocks(), list[int]()
    for step in range(3):
        for micro in range(2):
            forward(net, rows(2 * step + micro), store).backward()
            store.end_backward()
        assert same(gradients(net), expected(net, 2 * step, 2 * step + 1))
        found = store.stats()
        assert (found["stored"], found["bytes"], found["most"]) == (0, 0, 6 * NBYTES)
        made.append(found["made"])
    assert store.stats()["unpacked"] == 6 * 6, "all of them went through the store"
    assert len(set(made)) == 1, "what the first micro-batch allocated serves all"


def test_several_forwards_before_a_backward(store: ActivationStore) -> None:
    net = blocks()
    first, second = forward(net, rows(1), store), forward(net, rows(2), store)
    assert store.stats()["stored"] == 12
    first.backward()
    store.end_backward()
    second.backward()
    assert same(gradients(net), expected(net, 1, 2))


def test_a_graph_may_be_walked_again(store: ActivationStore) -> None:
    net = blocks(3)
    loss = forward(net, rows(1), store)
    for last in (False, False, True):
        loss.backward(retain_graph=not last)
        store.end_backward()
        assert same(gradients(net), expected(net, 1))
    del loss
    assert store.stats()["stored"] == 0


def test_gradients_of_gradients(store: ActivationStore) -> None:
    net = blocks(2)

    def penalty(store: ActivationStore | None) -> list[Tensor]:
        x = rows(1).requires_grad_()
        (grad,) = torch.autograd.grad(forward(net, x, store), x, create_graph=True)
        grad.square().sum().backward()
        return [*(p.grad for p in net[0].parameters() if p.grad is not None), x.grad if x.grad is not None else x]

    found = penalty(store)
    net.zero_grad()
    assert same(found, penalty(None))


class InPlace(nn.Module):
    """Writes to its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5)).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["arena", "files"])
def test_a_forward_that_writes_to_its_input_is_recomputed_from_what_it_was(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_apart", False)
    store, (a, b, c) = opened(place, tmp_path), (InPlace() for _ in range(3))
    x = rows(1)
    c(b(a(x.clone() * 1))).sum().backward()
    want = [p.grad.clone() for m in (a, b, c) for p in m.parameters() if p.grad is not None]
    with saved_tensors_hooks(store.pack, store.unpack):
        h = x.clone()
        for module in (a, b, c):
            h = checkpoint(module, h, use_reentrant=False)
    loss = h.sum()
    for last in (False, True):  # what rests is not what recomputation writes to
        for module in (a, b, c):
            module.zero_grad()
        loss.backward(retain_graph=not last)
        assert same([p.grad for m in (a, b, c) for p in m.parameters() if p.grad is not None], want)
    store.close()


def test_a_source_that_changes_while_it_is_copied_is_told(tmp_path: Path) -> None:
    store = opened("host", tmp_path)
    x = rows(1)
    packed = store.pack(x)
    x.add_(1)  # the copy, on a stream of its own, may not have read it
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*at version 1; expected version 0"):
        store.unpack(packed)
    packed = store.pack(x)
    for seed in range(10):
        store.pack(rows(seed))  # few are on their way at a time: now it is there
    want = x.clone()
    x.add_(1)
    assert torch.equal(store.unpack(packed), want)


# ---- what is stored ------------------------------------------------------------------------------------------------


class Sub(Tensor):
    pass


def test_what_is_not_stored_stays_itself_and_is_watched(tmp_path: Path) -> None:
    store, weight = opened("arena", tmp_path), nn.Parameter(rows(1))
    kept = {
        "parameter": weight,
        "view of a parameter": weight.t(),
        "small": torch.ones(8),
        "few indices": torch.arange(10),
        "empty": torch.empty(0, 4096),
        "another device": torch.empty(4096, device="meta"),
        "sparse": rows(1).to_sparse(),
        "subclass": rows(1).as_subclass(Sub),
        "nested": torch.nested.nested_tensor([rows(1), rows(2)], layout=torch.jagged),
        "conjugate": torch.complex(rows(1), rows(2)).conj(),
        "overlapping": torch.arange(9000.0).unfold(0, 4096, 1),
    }
    for name, tensor in kept.items():
        back = store.unpack(store.pack(tensor))
        assert type(back) in (type(tensor), Tensor), name
        assert back.shape == tensor.shape, name
        if name not in ("sparse", "another device", "nested", "subclass"):
            assert back.data_ptr() == tensor.data_ptr(), name
    assert store.stats()["kept"] == len(kept)
    assert store.stats()["made"] == 0
    small = torch.ones(8)
    packed = store.pack(small)
    small.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        store.unpack(packed)
    with torch.inference_mode():
        frozen = rows(1)
    assert store.unpack(store.pack(frozen)).data_ptr() == frozen.data_ptr()


def test_values_dtypes_and_strides_come_back(store: ActivationStore) -> None:
    base = rows(3, 192).requires_grad_()
    views = {
        "whole": (base, 192 * WIDTH),
        "transposed": (base.t(), 192 * WIDTH),
        "rows of it": (base[7:90], 83 * WIDTH),
        "a slice with gaps": (base[:, 3:20], 192 * 17),
        "every second": (base[::2, ::2].t(), 96 * 16),
        "permuted": (base.view(4, 48, WIDTH).permute(2, 0, 1), 192 * WIDTH),
        "expanded": (base[:, None].expand(192, 50, WIDTH), 192 * WIDTH),
        "expanded with gaps": (base[:, :16].unsqueeze(0).expand(3, 192, 16), 192 * 16),
        "one row": (base.view(1, -1)[:, ::2], 96 * WIDTH),
    }
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.complex64, torch.uint8):
        views[str(dtype)] = ((base.detach() * 10).to(dtype), 192 * WIDTH)
    for name, (tensor, numel) in views.items():
        packed = store.pack(tensor)
        assert store.stats()["bytes"] == numel * tensor.element_size(), name
        back = store.unpack(packed)
        assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(back, tensor), name
        assert not back.requires_grad
        del packed
    assert store.stats()["kept"] == 0


def test_what_all_blocks_get_is_stored_once(store: ActivationStore) -> None:
    net, mask = blocks(), rows(9).sigmoid()
    forward(net, rows(1), None, mask).backward()
    want = gradients(net)
    loss = forward(net, rows(1), store, mask)
    found = store.stats()
    assert (found["stored"], found["shared"], found["bytes"]) == (7, 5, 7 * NBYTES)
    loss.backward()
    assert same(gradients(net), want)


def test_a_shared_tensor_is_known_by_storage_elements_and_version(store: ActivationStore) -> None:
    x, held = rows(1), []
    first = x.clone()
    held += [store.pack(x), store.pack(x.view(-1)), store.pack(x.t()), store.pack(x.detach())]
    assert store.stats()["stored"] == 1
    for _ in range(10):
        held.append(store.pack(rows(1)))  # or what was copied is still on its way
    x.add_(1)
    held += [store.pack(x), store.pack(x[:48]), store.pack(x.view(torch.int32))]
    assert store.stats()["stored"] == 14
    assert torch.equal(store.unpack(held[0]), first)
    assert torch.equal(store.unpack(held[2]), first.t())
    store.unpack(held[1]).add_(5)  # what recomputation may do to it
    assert torch.equal(store.unpack(held[3]), first)
    assert torch.equal(store.unpack(held[-3]), x)
    del held
    address, values = x.data_ptr(), list[tuple[object, Tensor]]()
    del x
    for seed in range(20):  # the allocator gives the address again
        fresh = rows(seed)
        address = fresh.data_ptr() if fresh.data_ptr() != address else address
        values.append((store.pack(fresh), fresh.clone()))
        del fresh
    assert all(torch.equal(store.unpack(packed), want) for packed, want in values)


# ---- how long ------------------------------------------------------------------------------------------------------


def test_what_no_graph_holds_is_free(store: ActivationStore) -> None:
    net = blocks()
    forward(net, rows(1), store).backward()
    gradients(net)
    made = store.stats()["made"]
    for seed in range(3):
        loss = forward(net, rows(seed), store)  # never walked
        assert store.stats()["stored"] == 6
        del loss
        assert store.stats()["stored"] == 0
    with torch.no_grad():
        forward(net, rows(1), store)
    assert store.stats()["packed"] - store.stats()["kept"] == 24  # torch 2.10 also packs a tensor without elements

    def stop(grad: Tensor) -> None:
        raise ValueError("given up")

    x = rows(1).requires_grad_()
    loss = forward(net, x, store)
    handle = net[2].up.weight.register_hook(stop)
    with pytest.raises(ValueError, match="given up"):
        loss.backward()
    del loss
    handle.remove()
    gc.collect()
    store.end_backward()
    assert store.stats()["stored"] == 2, "torch holds what was being computed until the next backward"
    net.zero_grad()
    for _ in range(2):
        forward(net, rows(2), store).backward()
        assert same(gradients(net), expected(net, 2))
        assert store.stats()["stored"] == 0
    assert store.stats()["made"] <= made + 3


def test_clear_takes_back_what_graphs_hold(store: ActivationStore) -> None:
    net = blocks()
    loss = forward(net, rows(1), store)
    store.clear()
    assert (store.stats()["stored"], store.stats()["bytes"]) == (0, 0)
    with pytest.raises(RuntimeError, match=r"Store.clear\(\) was called after this forward. Run backward before"):
        loss.backward()
    del loss
    net.zero_grad()
    forward(net, rows(1), store).backward()
    assert same(gradients(net), expected(net, 1))


def test_a_buffer_is_reused_only_after_the_prefetch_from_it(store: ActivationStore) -> None:
    """The first is prefetched while its file is being written; the others need its buffer before it is used."""
    first, second, *later = (rows(seed) for seed in range(12))
    packed = [store.pack(first), store.pack(second)]
    assert torch.equal(store.unpack(packed[1]), second)  # prefetches the first
    packed += [store.pack(tensor) for tensor in later]
    for want, one in zip((first, second, *later), packed, strict=True):
        assert torch.equal(store.unpack(one), want)


def test_any_thread(store: ActivationStore) -> None:
    tensors = [rows(seed) for seed in range(8)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            packed = [store.pack(t) for t in tensors[number::2]]
            for want, one in zip(tensors[number::2], packed, strict=True):
                if not torch.equal(store.unpack(one), want):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert store.stats()["stored"] == 0


# ---- host memory ---------------------------------------------------------------------------------------------------


def test_copies_come_before_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, begun, copy = opened("host", tmp_path), list[int](), CopyStream.copy
    packed = [store.pack(torch.full((2048,), float(number))) for number in range(6)]

    def spy(lane: CopyStream, target: Tensor, source: Tensor, after: object = None) -> object:
        begun.append(int(source.view(torch.float32)[0]) if source.view(torch.float32)[0] < 6 else -1)
        return copy(lane, target, source, after)

    monkeypatch.setattr(CopyStream, "copy", spy)
    for number in reversed(range(6)):
        begun.clear()
        assert store.unpack(packed[number]).eq(number).all()
        ahead = [n for n in (number - 1, number - 2) if n >= 0]
        assert begun == ([number, *ahead] if number == 5 else ahead[1:])


def test_on_a_cpu_they_are_in_host_memory_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_apart", False)
    assert open_store(ActivationCheckpointing(cpu_checkpointing=True), CPU, 6) is None
    assert open_store(ActivationCheckpointing(mode="full"), CPU, 6) is None


# ---- one block of memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["arena", "host arena"])
def test_a_block_is_allocated_once(place: str, tmp_path: Path) -> None:
    store, net, seen = opened(place, tmp_path), blocks(), list[list[int]]()
    memory = store.storage.memory  # type: ignore[attr-defined]
    take = memory.take

    def spy(nbytes: int) -> object:
        loan = take(nbytes)
        seen[-1].append(loan.tensor.data_ptr())
        return loan

    memory.take = spy
    for step, count in enumerate((64, 64, 64, 40)):  # the last batch is smaller
        seen.append([])
        forward(net, rows(step, count), store).backward()
        store.end_backward()
        forward(net, rows(step, count)).backward()
        assert store.stats()["made"] == 1
    assert seen[1] == seen[2], "the same addresses in the same order"
    assert {address for step in seen for address in step} <= {min(seen[0]) + NBYTES * i for i in range(8)}
    gradients(net)
    for step in range(3):  # larger: once in ordinary memory, then with larger slots
        forward(net, rows(step, 100), store).backward()
        store.end_backward()
        assert same(gradients(net), [*_plain(net, step, 100)])
    made = store.stats()["made"]
    assert made > 1
    forward(net, rows(3, 100), store).backward()
    assert store.stats()["made"] == made
    slots = 8 if place == "arena" else 6
    assert store.stats()["memory"] == slots * 100 * WIDTH * 4


def _plain(net: nn.ModuleList, seed: int, count: int) -> list[Tensor]:
    forward(net, rows(seed, count)).backward()
    return gradients(net)


def test_too_few_slots_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, net = opened("host arena", tmp_path, number_checkpoints=4), blocks()
    for step in range(2):
        forward(net, rows(step), store).backward()
        store.end_backward()
        assert same(gradients(net), expected(net, step))
    assert [record.getMessage() for record in caplog.records] == [
        "activation_checkpointing.contiguous_memory_optimization: a saved input of 8192 bytes does not fit, all 4 "
        "slots are in use. It is stored in separate memory; raise number_checkpoints=4."
    ]
    assert (store.stats()["made"], store.stats()["memory"]) == (1 + 2 * 2, 4 * NBYTES)


def test_slots_grow_with_what_is_in_use_if_nobody_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, net, made = opened("host arena", tmp_path, count=6), blocks(), list[int]()
    for step in range(3):
        first, second = forward(net, rows(step), store), forward(net, rows(step + 1), store)
        (first + second).backward()
        del first, second
        store.end_backward()
        made.append(store.stats()["made"])
    assert made == [7, 8, 8], "6 outside of the block, then a block of 12"
    assert store.stats()["memory"] == 12 * NBYTES
    assert not caplog.records


def test_what_is_handed_out_is_nobody_elses(store: ActivationStore) -> None:
    want = [rows(seed) for seed in range(12)]
    views = []
    for tensor in want:
        packed = store.pack(tensor)
        views.append(store.unpack(packed).view(-1)[5:])  # held beyond its graph, as autograd may
        del packed
    assert store.stats()["stored"] == 0
    assert all(torch.equal(view, tensor.view(-1)[5:]) for view, tensor in zip(views, want, strict=True))
