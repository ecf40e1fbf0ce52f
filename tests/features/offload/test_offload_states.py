"""States that rest in host memory between two steps come back bit for bit; calls that need them meanwhile say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.common import accelerator
from lt_zero.common.flat_storage import with_own_storage
from lt_zero.deepspeed.sharding import OffloadDeviceEnum, OffloadStateTypeEnum
from lt_zero.features.offload import moved_states
from lt_zero.features.offload.moved_states import KINDS, _tensors_of, move_back, move_to_host
from tests.support.models import Net
from tests.support.pool import Pool


def _engine(stage: int, model: nn.Module, kind: str = "AdamW", **keys: Any) -> Any:
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": block, "optimizer": {"type": kind, "params": {"lr": 0.1}}, **keys}
    return lt_zero.initialize(model=model, config=config)[0]


def _step(engine: Any) -> None:
    loss = engine(torch.randint(0, 8, (2, 6))).float().pow(2).mean()
    engine.backward(loss)
    engine.step()


def _trained(stage: int, kind: str, moves: bool, **keys: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Weights after three steps, and the bytes that were in host memory between two of them, by kind."""
    torch.manual_seed(0)
    engine, moved = _engine(stage, Net(), kind, **keys), {}
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    _step(engine)
    with mock.patch.object(accelerator, "_apart", True):  # the CPU as a device with memory of its own
        for kind in KINDS if moves else ():
            engine.offload_states(include=[kind])
            moved[kind] = sum(each.host.numel() for each in engine.moved._moved) - sum(moved.values())
    engine.reload_states()
    for _ in range(2):
        _step(engine)
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return weights, moved


def _beside_host() -> dict[str, int]:
    block = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    with mock.patch.object(accelerator, "_apart", True):
        return _twice(3, "AdamW", {"zero_optimization": block, **BF16})


def _twice(stage: int, kind: str, keys: dict[str, Any]) -> dict[str, int]:
    (want, _), (got, moved) = (_trained(stage, kind, moves, **keys) for moves in (False, True))
    assert all(torch.equal(got[name], want[name]) for name in want)
    return moved


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("stage", "kind", "keys", "sizes"),
    [
        (2, "AdamW", BF16, {"optim_states": 8, "hp_params": 4, "lp_params": 2}),
        pytest.param(0, "SGD", {}, {"lp_params": 4}, marks=pytest.mark.slow),
        pytest.param(1, "AdamW", {}, {"optim_states": 8, "lp_params": 4}, marks=pytest.mark.slow),
        pytest.param(3, "AdamW", BF16, {"optim_states": 8, "hp_params": 4, "lp_params": 2}, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_if_nothing_had_moved(
    pool: Pool, stage: int, kind: str, keys: dict[str, Any], sizes: dict[str, int]
) -> None:
    """``sizes``: bytes per element of what a rank keeps: its third, or at stages below 3 all weights of the forward."""
    numel = sum(p.numel() for p in Net().parameters())
    for moved in pool.run(3, _twice, stage, kind, keys):
        for name in KINDS:
            want = sizes.get(name, 0) * numel / (1 if name == "lp_params" and stage < 3 else 3)
            assert want * 0.7 <= moved[name], (name, moved, want)  # tied weights count once
            assert (moved[name] > 0) == (name in sizes), (name, moved)


def test_tensors_with_storages_of_their_own_in_that_memory_move_too() -> None:
    flat = torch.arange(12.0)
    matrix = with_own_storage(flat[3:9].view(2, 3))
    parameter = nn.Parameter(with_own_storage(flat[9:]))
    lying = {"flat": flat, "matrix": matrix, "turned": matrix.T, "parameter": parameter}
    before = {name: tensor.detach().clone() for name, tensor in lying.items()}
    for _ in range(2):  # and again
        (moved,) = move_to_host([flat, matrix], pin=False)
        begin = moved.host.data_ptr()
        assert all(begin <= tensor.data_ptr() < begin + moved.host.nbytes for tensor in lying.values())
        assert all(torch.equal(tensor, before[name]) for name, tensor in lying.items())
        with torch.no_grad():
            parameter.add_(1)
            before["parameter"] += 1
            before["flat"][9:] += 1
        move_back([moved])
        assert all(torch.equal(tensor, before[name]) for name, tensor in lying.items())
        assert parameter.data_ptr() == flat[9:].data_ptr()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "torch.save writes no more than that"


def test_memory_stays_that_is_held_through_another_storage() -> None:
    flat = torch.arange(5.0)
    own = with_own_storage(flat.view(1, 5))
    graph = nn.functional.linear(torch.ones(1, 5, requires_grad=True), own, torch.ones(1))
    with pytest.warns(UserWarning, match="leaves 20 bytes on the device"):
        assert move_to_host([flat], pin=False) == []
    assert own.data_ptr() == flat.data_ptr()
    del graph


def test_all_tensors_of_a_storage_move_and_a_held_one_stays() -> None:
    flat, held = torch.arange(12.0), torch.arange(5.0)
    view, parameter = flat[3:9].view(2, 3), nn.Parameter(flat[9:])
    factor = torch.ones(1, 5, requires_grad=True)
    graph = nn.functional.linear(factor, held.view(1, 5), torch.ones(1))  # keeps a view that Python does not know
    before, address = [t.clone() for t in (flat, view, parameter)], flat.data_ptr()
    with pytest.warns(UserWarning, match="leaves 20 bytes on the device"):
        moved = move_to_host([view, held], pin=True)
    hosts = {t.untyped_storage().data_ptr() for t in (flat, view, parameter)}
    assert len(hosts) == 1
    assert hosts != {address}
    assert all(torch.equal(t, value) for t, value in zip((flat, view, parameter), before, strict=True))
    with torch.no_grad():
        parameter.add_(1)  # what user code writes meanwhile comes back
    move_back(moved)
    assert flat[9:].tolist() == [10.0, 11.0, 12.0]
    assert {t.untyped_storage().data_ptr() for t in (flat, view, parameter)}.isdisjoint(hosts)
    graph.sum().backward()
    assert factor.grad is not None
    assert torch.equal(factor.grad[0], torch.arange(5.0))


def test_weights_whose_masters_are_offloaded_move(pool: Pool) -> None:
    numel = sum(p.numel() for p in Net().parameters())
    for moved in pool.run(2, _beside_host):
        assert moved["lp_params"] > 0.7 * numel  # bf16, a half of them
        assert moved["hp_params"] == 0


def test_offloaded_states_stay_in_their_pinned_memory() -> None:
    engine: Any = SimpleNamespace(device=torch.device("cuda"), buckets=[])
    optimizer: Any = SimpleNamespace(state={0: {"exp_avg": torch.ones(3)}})
    assert list(_tensors_of(engine, optimizer, set(KINDS))) == []


def test_a_host_without_memory_for_all_leaves_all_where_they_are() -> None:
    tensors = [torch.arange(4.0), torch.arange(8.0)]
    addresses = [t.data_ptr() for t in tensors]
    fails = mock.Mock(side_effect=[torch.empty(32, dtype=torch.uint8), MemoryError])
    with mock.patch.object(moved_states, "host_buffer", fails), pytest.raises(MemoryError):
        move_to_host(tensors, pin=False)
    assert [t.data_ptr() for t in tensors] == addresses


def test_calls_in_the_wrong_moment_and_arguments(tmp_path: Any) -> None:
    engine = _engine(2, nn.Linear(3, 2), gradient_accumulation_steps=2)
    x = torch.ones(1, 3)

    def micro_batch() -> None:
        engine.backward(engine(x).sum())
        engine.step()

    engine.reload_states()
    loss = engine(x).sum()
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="between the micro-batches of a step"):
        engine.offload_states()
    engine.step()
    with pytest.raises(RuntimeError, match="between the micro-batches of a step"):
        engine.offload_states()
    micro_batch()
    with pytest.raises(ValueError, match="has moments. Choose from optim_states, hp_params"):
        engine.offload_states(include=["moments"])
    with pytest.raises(ValueError, match="device='nvme'"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.warns(UserWarning, match="moves nothing"):
        engine.offload_states(device=OffloadDeviceEnum.none)
    ahead = engine(x).sum()
    engine.offload_states(include={OffloadStateTypeEnum.optim_states}, pin_memory=False, non_blocking=True)
    engine.offload_states(include=["hp_params"])
    with pytest.raises(RuntimeError, match="hp_params are in host memory already"):
        engine.offload_states(include=["hp_params", "lp_params"])
    for call in (
        lambda: engine(x),
        lambda: engine.module(x),
        lambda: engine.backward(ahead),
        engine.step,
        engine.module_state_dict,
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
        lambda: engine.save_16bit_model(tmp_path),
    ):
        with pytest.raises(RuntimeError, match="while hp_params, optim_states are in host memory"):
            call()
    engine.reload_states()
    micro_batch()
    micro_batch()
    assert engine.global_steps == 2
    engine.destroy()
    bare = lt_zero.initialize(model=nn.Linear(3, 2), config={"zero_optimization": {"stage": 2}})[0]
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        bare.offload_states()
    bare.destroy()
