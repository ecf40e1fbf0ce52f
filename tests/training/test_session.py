"""Set-up through a session: which engine a trial measures, which optimizers a module takes."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero import CheckpointError, FabricZeroStrategy
from lt_zero.checkpoint.native.load import OnAllRanks, engine_of, fitting_state
from lt_zero.checkpoint.native.save import bundle
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.training import session
from tests.support.lightning_tools import torchrun_env
from tests.support.pool import Pool


def _fabric(stage: int, **config: Any) -> Any:
    os.environ.update(torchrun_env())
    strategy = FabricZeroStrategy(config={"zero_optimization": {"stage": stage}, **config})
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size())
    fabric.launch()
    return fabric


class Recorder:
    """A trial that only notes what it was started with."""

    def __init__(self) -> None:
        self.engines: list[Any] = []

    def start(self, engine: Any, config: Any, **facts: Any) -> None:
        self.engines.append(engine)


def _trial() -> None:
    fabric = _fabric(2)
    fabric.strategy.session.trial = recorder = Recorder()
    teacher = fabric.setup_module(nn.Linear(3, 5).eval())
    module = nn.Linear(3, 2)
    student, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert recorder.engines[0] is fabric.strategy._engine_of(student)
    assert recorder.engines[0] is not fabric.strategy._engine_of(teacher)


def test_a_trial_measures_the_module_that_is_trained(pool: Pool) -> None:
    """With one before it that is only evaluated."""
    pool.run(1, _trial)


def _of_another(stage: int) -> None:
    fabric = _fabric(stage)
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    fabric.setup_module(one)
    alone, several = "SGD steps parameters of several modules, or others, too", "which the engine does not know"
    with pytest.raises((ValueError, RuntimeError), match=alone if fabric.world_size == 1 else several):
        fabric.setup(two, torch.optim.SGD([*two.parameters(), *one.parameters()], lr=0.1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_with_parameters_of_another_module_is_refused(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _of_another, 2)


# ---- the memory check ------------------------------------------------------------------------------------------------


def _one_after_the_other() -> list[int]:
    """The number of optimizers whose states are checked, at each set-up; the first one is still there."""
    seen: list[int] = []
    fabric = _fabric(1)
    module = nn.Linear(3, 2)
    fabric.setup_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            session, "check_optimizers", lambda engine, config, optimizers, *_: seen.append(len(list(optimizers)))
        )
        first = fabric.setup_optimizers(torch.optim.AdamW([module.weight]))
        beside = fabric.setup_optimizers(torch.optim.AdamW([module.bias]))
        instead = fabric.setup_optimizers(torch.optim.SGD([module.weight], lr=0.1))
    assert all(ShardedOptimizer.of(known.optimizer) for known in (first, beside, instead))
    return seen


def test_memory_is_checked_for_optimizers_that_are_in_use(pool: Pool) -> None:
    """Not for one whose parameters another has taken over, as that of a Trainer's earlier fit."""
    assert pool.run(1, _one_after_the_other) == [[1, 2, 2]]


# ---- loading -----------------------------------------------------------------------------------------------------


def _no_state(folder: str) -> None:
    fabric = _fabric(2)
    module = nn.Linear(3, 2)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    whole = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    kinds: list[tuple[Any, str]] = [
        (None, "It is a NoneType"),
        ([], "It is a list"),
        ({}, ""),
        ({"x": 1}, "It has no 'param_groups'"),
        ({"state": {}}, "It has no 'param_groups'"),
        ({**whole, "param_groups": {}}, "Its param_groups are a dict"),
        ({**whole, "param_groups": [{"lr": 0.1}]}, r"param_groups\[0\] has no list 'params'"),
        ({**whole, "state": [1]}, "Its state is a list"),
        ({**whole, "state": {"weight": 1}}, "The state of 'weight' is a int"),
    ]
    for number, (saved, told) in enumerate(kinds):
        fabric.save(f"{folder}/{number}", {"model": model, "optimizer": saved})
        with pytest.raises(CheckpointError, match=f"is no state of one: check the keys.*{told}"):
            fabric.load(f"{folder}/{number}", {"model": model, "optimizer": optimizer})


def _broken_by_hooks(folder: str) -> None:
    fabric = _fabric(2)
    module = nn.Linear(3, 2)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    hooks: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (
            lambda state: state.update(state=3),
            "What state_dict of AdamW returns is no state of one.*Its state is a int",
        ),
        (lambda state: state.pop("param_groups"), "What state_dict of AdamW .* has no 'param_groups'"),
        (lambda state: state["param_groups"][0].pop("params"), r"param_groups\[0\] has no list 'params'"),
        (lambda state: state["param_groups"].clear(), "It has 0 parameters, and the optimizer has 2"),
    ]
    for hook, told in hooks:
        handle = optimizer.optimizer.register_state_dict_post_hook(lambda _, state, hook=hook: hook(state) and None)
        with pytest.raises(CheckpointError, match=told):
            fabric.save(f"{folder}/hooked", {"model": model, "optimizer": optimizer})
        handle.remove()
    content = optimizer.state_dict()
    broken: list[tuple[dict[str, Any], str]] = [
        ({"param_groups": content["param_groups"]}, "What is saved of optimizer 0 is no state of one.* has no 'state'"),
        ({**content, "state": {5: {}}}, "optimizer 0 is .* It has states of 5, which are in none of its groups"),
        ({**content, "param_groups": []}, "optimizer 0 is .* It has 0 parameters, and the optimizer has 2"),
    ]
    engine = engine_of(module)
    assert engine is not None
    names = OnAllRanks.of(optimizer.optimizer, engine)
    with pytest.raises(CheckpointError, match="What the checkpoint has for optimizer 1 .* has no 'state'"):
        fitting_state(broken[0][0], optimizer.optimizer, engine, names, 1)
    for state, told in broken:
        with pytest.raises(CheckpointError, match=told):
            bundle({"state_dict": {}, "optimizer_states": [state]}, [[["weight", "bias"]]], engine.world, {}, {})


def test_an_optimizer_state_that_a_hook_has_broken(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _broken_by_hooks, str(tmp_path))


def test_what_is_no_state_of_an_optimizer(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _no_state, str(tmp_path))


def _frozen(path: str) -> None:
    checkpoint = {"format": "full", "save_frozen": False}
    fabric = _fabric(2, checkpoint=checkpoint)
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    model, optimizer = fabric.setup(module, torch.optim.SGD([module.weight], lr=0.1))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fabric.barrier()
    assert list(torch.load(path)["model"]) == ["weight"]
    weight_of, bias_of = module.parameters()
    weight, bias = lt_zero.full_master(weight_of), lt_zero.full_master(bias_of)
    lt_zero.set_full_master(weight_of, torch.zeros(2, 3))
    fabric.load(path, {"model": model, "optimizer": optimizer})
    assert torch.equal(lt_zero.full_master(weight_of), weight)
    assert torch.equal(lt_zero.full_master(bias_of), bias)


def test_a_single_file_of_fabric_leaves_frozen_weights_out(pool: Pool, tmp_path: Path) -> None:
    """``checkpoint.save_frozen: false``; they are what they were after loading."""
    pool.run(2, _frozen, str(tmp_path / "one.ckpt"))


def _told(stage: int, nodes: int, **config: Any) -> str:
    """What is printed while a bf16 model of a bucket of 32 elements is set up."""
    node = {"LT_ZERO_NODE_RANK": str(dist.get_rank() % nodes), "LT_ZERO_SHARED_MEMORY": "0"}
    with mock.patch.dict(os.environ, node), contextlib.redirect_stdout(io.StringIO()) as printed:
        fabric = _fabric(stage, bf16={"enabled": True}, **config)
        model = nn.Linear(4, 3)
        fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    return " ".join(printed.getvalue().split())


def test_several_nodes_are_told_what_another_dtype_on_the_wire_would_save(pool: Pool) -> None:
    first, second = pool.run(2, _told, 0, 2)
    assert "over 2 nodes in fp32, 128 bytes per step: communication_data_type=bf16 would save 64 bytes" in first
    assert not second
    # gloo adds contributions of 16 bits in fp32 at stage 2, where it scatters.
    silent = [(0, 1, {}), (0, 2, {"communication_data_type": "bf16"}), (2, 2, {})]
    for stage, nodes, config in silent:
        assert pool.run(2, partial(_told, **config), stage, nodes) == ["", ""]
    sums = {"zero_optimization": {"stage": 2, "reduce_scatter": False}}
    assert "per micro-batch" in pool.run(2, partial(_told, **sums), 2, 2)[0]
