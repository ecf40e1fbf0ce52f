"""What scripts for DeepSpeed do beside training: they go on as they do with DeepSpeed, or an error says the remedy."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_zero
from lt_zero.common.errors import CheckpointError
from lt_zero.deepspeed import ranks as groups
from lt_zero.optim import OneCycle, WarmupLR
from tests.support.pool import Pool

CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Recomputed(nn.Module):
    """Blocks that are recomputed as transformers' models do it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._gradient_checkpointing_func(block, x).relu()
        return x


def _step(engine: Any, model: nn.Module, x: Tensor) -> None:
    engine.backward(engine(x).pow(2).mean())
    engine.step()


def _again(folder: str) -> None:
    """A module is trained, its engine destroyed, and trained by another one, at another stage."""
    torch.manual_seed(0)
    model, plain = Recomputed(), Recomputed()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for stage in (3, 1, 3):
        config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}
        engine, *_ = lt_zero.initialize(model=model, config=config)
        for step in range(2):
            x = torch.randn(dist.get_world_size(), 4, generator=torch.Generator().manual_seed(step))
            _step(engine, model, x[dist.get_rank()][None].clone())
            plain(x.requires_grad_()).pow(2).mean().backward()  # re-entrant ones need it
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(lt_zero.full_master(p), q[1].detach(), msg=name)
        engine.destroy()


def test_a_module_is_trained_again_after_destroy(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _again, str(tmp_path))


def test_one_task_of_a_launcher_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.is_initialized():
        pytest.skip("this process has a group")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        lt_zero.init_distributed("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        engine, *_ = lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG)
        _step(engine, engine.module, torch.ones(1, 2))
        engine.destroy()
    finally:
        dist.destroy_process_group()


def test_an_argument_beside_a_block_of_the_configuration() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    block = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.25, "warmup_num_steps": 9}}
    with pytest.warns(UserWarning, match="configured") as told:
        engine, used, _, schedule = lt_zero.initialize(
            model=model,
            config={**CONFIG, "scheduler": block},
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        )
    assert used is optimizer
    assert isinstance(schedule, WarmupLR)
    assert engine.get_lr() == [0.25]
    engine.destroy()
    texts = [str(warning.message) for warning in told]
    assert sum("the argument is used" in text for text in texts) == 1
    assert sum("the configured one is used" in text for text in texts) == 1


def test_frozen_parameters_have_no_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    engine, *_ = lt_zero.initialize(model=model, config=CONFIG)
    engine.backward(engine(torch.ones(1, 2)).sum())
    frozen, trained = model[0].weight, model[1].weight
    assert isinstance(frozen, nn.Parameter)
    assert isinstance(trained, nn.Parameter)
    for get in (
        lt_zero.safe_get_full_fp32_param,
        lt_zero.safe_get_full_grad,
        lt_zero.safe_get_local_fp32_param,
        lt_zero.safe_get_local_grad,
    ):
        assert get(frozen) is None
        assert get(trained) is not None
    assert lt_zero.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert lt_zero.safe_get_local_optimizer_state(frozen, "exp_avg") is None
    engine.destroy()


def test_norms_without_clipping() -> None:
    engine, *_ = lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG)
    _step(engine, engine.module, torch.ones(1, 2))
    assert engine.get_global_grad_norm() is None
    engine.tracks_norm = True
    engine.backward(engine(torch.ones(1, 2)).pow(2).mean())
    wanted = nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(wanted.item())
    engine.destroy()


def test_what_an_engine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, *_ = lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG)
    with pytest.raises(ValueError, match=r"has the shape \(3, 2\): pass one number, such as loss.mean"):
        engine.backward(engine(torch.ones(3, 2)))
    with engine.no_sync(), pytest.raises(RuntimeError, match="inside of engine.no_sync"), engine.no_sync():
        pass
    with pytest.raises(ValueError, match="custom_load_fn=.*gathered"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    for make in (copy.deepcopy, pickle.dumps, functools.partial(torch.save, f=io.BytesIO())):
        with pytest.raises(TypeError, match="Copy engine.module"):
            make(engine)
    copied = copy.deepcopy(engine.module)
    assert all(torch.equal(p, q) for p, q in zip(copied.parameters(), engine.module.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="csv_monitor"):
        engine.monitor.write_events([])
    monkeypatch.chdir(tmp_path)
    _step(engine, engine.module, torch.ones(1, 2))
    engine.save_checkpoint("")
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]
    assert engine.load_checkpoint("")[0] is not None
    engine.destroy()


def _tags(folder: str) -> list[str]:
    engine, *_ = lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG)
    texts, rank = [], dist.get_rank()
    for call, tag in ((engine.save_checkpoint, f"of_{rank}"), (engine.load_checkpoint, rank)):
        with pytest.raises(CheckpointError) as error:
            call(folder, tag=tag)
        texts.append(str(error.value))
    engine.save_checkpoint(folder, tag=0)
    with pytest.raises(CheckpointError, match="tag='latest' is the name of the file"):
        engine.save_checkpoint(folder, tag="latest")
    for tag in (None, "", 0):
        assert engine.load_checkpoint(folder, tag=tag)[0] == f"{folder}/0"
    engine.destroy()
    return texts


def test_tags_are_the_same_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(2, _tags, str(tmp_path)):
        assert texts[0] == (
            "engine.save_checkpoint: rank 0 has tag='of_0', and rank 1 tag='of_1'. Pass the same tag on all ranks."
        )
        assert "rank 0 has tag='0', and rank 1 tag='1'" in texts[1]
    assert sorted(os.listdir(tmp_path)) == ["0", "latest"]


def test_sequence_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = {"sequence_parallel": SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)}
    engine = SimpleNamespace(session=SimpleNamespace(division=SimpleNamespace(device_mesh=mesh)))
    monkeypatch.setattr(groups, "current_engine", lambda: engine)
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, 1)


@pytest.mark.parametrize("name", ["config_params", "args"])
def test_two_configurations(name: str) -> None:
    other: Any = {"zero_optimization": {"stage": 1}}
    given = SimpleNamespace(deepspeed_config=other) if name == "args" else other
    with pytest.raises(lt_zero.ConfigError, match=f"got {name}.*, and config, which differs. Pass one of them"):
        lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG, **{name: given})


def test_ranks_that_scripts_describe() -> None:
    model = nn.Linear(2, 2)
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    with pytest.raises(ValueError, match=r"mpu=\.\.\.\) has a model-parallel size of 2, .*autotp_size=1"):
        lt_zero.initialize(model=model, config=CONFIG, mpu=mpu)
    with pytest.raises(ValueError, match=r"mesh_param=\(1, 2\)\).* mesh \(1, 1\)"):
        lt_zero.initialize(model=model, config=CONFIG, mesh_param=(1, 2))
    mpu.get_model_parallel_world_size = lambda: 1
    engine, *_ = lt_zero.initialize(model=model, config=CONFIG, mpu=mpu, mesh_param=(1, 1), distributed_port=29511)
    assert (engine.get_data_parallel_rank(), engine.mp_world_size, engine.data_parallel_group) == (0, 1, None)
    engine.destroy()


def test_schedules_count_as_deepspeed_does() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1.0)
    first, other = (WarmupLR(optimizer, 0.0, 1.0, warmup_num_steps=10, warmup_type="linear") for _ in range(2))
    optimizer.step()
    for _ in range(5):
        first.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step(4)  # the iterations 0 to 4 are done
    assert first.get_last_lr() == other.get_last_lr() == [0.4]
    assert (first.last_epoch, other.last_epoch) == (5, 5)
    cycle = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=4)
    assert cycle.get_mom() == [(0.9, 0.99)]
    cycle.step(1)
    assert cycle.get_mom() == [optimizer.param_groups[0]["betas"]]
    with pytest.raises(ValueError, match="warmup_num_steps=None: write a number"):
        WarmupLR(optimizer, warmup_num_steps=None)  # type: ignore[arg-type]
