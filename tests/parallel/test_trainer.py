"""A Trainer with tensor-parallel ranks: against one process, saved and resumed on other meshes, exported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

import lt_zero
from lt_zero.common.compat.of_compile import is_compiled
from tests.support.lightning_tools import FULL, quick, sharded_trainer, single_trainer, trust
from tests.support.matrix import only
from tests.support.parallel_module import BATCH, Module
from tests.support.pool import Pool


def trainer_of(stage: int, tensor: int, steps: int, **keys: Any) -> pl.Trainer:
    config = {"tensor_parallel": {"autotp_size": tensor}, "train_batch_size": BATCH, **keys}
    if dist.get_world_size() == tensor == 1:
        return single_trainer(max_steps=steps, use_distributed_sampler=False)
    return sharded_trainer(stage, config=config, max_steps=steps)


def _fit(stage: int, tensor: int, steps: int, save: str, resume: str | None = None) -> tuple[list[float], float]:
    data = dist.get_world_size() // tensor
    trainer, module = trainer_of(stage, tensor, steps), Module(data=data)
    trainer.fit(module, ckpt_path=resume, **trust(False))
    trainer.save_checkpoint(save)
    assert float(trainer.callback_metrics["rows"]) == BATCH
    assert float(trainer.callback_metrics["count"]) == BATCH * (steps if resume is None else 2), "of the last epoch"
    return module.losses


def expected(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    module = Module()
    single_trainer(max_steps=steps).fit(module)
    return module.losses, module.state_dict()


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in range(3)), 3])
def test_a_run_is_that_of_one_process_and_goes_on_without_tensor_ranks(pool: Pool, tmp_path: Path, stage: int) -> None:
    first, second = str(tmp_path / "tensor"), str(tmp_path / "data")
    losses = pool.run(4, _fit, stage, 2, 3, first)[0]
    assert losses == pytest.approx(expected(3)[0], rel=1e-5)
    losses = pool.run(3, _fit, stage, 1, 6, second, first)[0]
    want, weights = expected(6)
    assert losses == pytest.approx(want[3:], rel=1e-5)
    lt_zero.export(second, tmp_path / "weights.pt", dtype=torch.float32)
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), weights, rtol=1e-4, atol=1e-5)


def _compiled(stage: int) -> list[float]:
    torch.compiler.reset()
    module = Module(data=1)
    trainer_of(stage, 2, 3, compile={"backend": "aot_eager"}).fit(module)
    assert all(map(is_compiled, module.blocks))
    assert counters["stats"]["unique_graphs"] > 0
    return module.losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_the_configuration_compiles_blocks_with_layers_over_ranks(pool: Pool, stage: int) -> None:
    assert pool.run(2, _compiled, stage)[0] == pytest.approx(expected(3)[0], rel=1e-5)


def _decisions() -> tuple[bool, bool, bool]:
    trainer = trainer_of(1, 2, 1)
    trainer.fit(Module(data=2))
    rank, decide = dist.get_rank(), trainer.strategy.reduce_boolean_decision
    return decide(True), decide(rank == 1, all=False), decide(rank != 1)


def test_decisions_are_those_of_all_ranks(pool: Pool) -> None:
    """Whether a checkpoint is among the best, and whether training stops."""
    assert pool.run(4, _decisions) == [(True, True, False)] * 4


def _several_runs() -> tuple[float, float]:
    trainer, module = trainer_of(3, 2, 2), Module(data=1)
    trainer.fit(module)
    trainer_of(1, 2, 2).fit(module)
    return module.losses[1], module.losses[3]


@pytest.mark.slow
def test_a_module_is_trained_by_a_second_trainer(pool: Pool) -> None:
    module = Module()
    for _ in range(2):
        single_trainer(max_steps=2).fit(module)
    assert pool.run(2, _several_runs)[0] == pytest.approx((module.losses[1], module.losses[3]), rel=1e-5)


class Tied(Module):
    """Two layers with one weight, of which ``parallelize_module`` makes two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks[2].up.weight = self.blocks[0].up.weight


def _tied() -> list[float]:
    module = Tied(data=1)
    for _ in range(2):
        trainer_of(3, 2, 2).fit(module)
    return module.losses


def test_layers_that_are_tied_before_they_are_parallelized_stay_tied(pool: Pool) -> None:
    module = Tied()
    for _ in range(2):
        single_trainer(max_steps=2).fit(module)
    assert pool.run(2, _tied)[0] == pytest.approx(module.losses, rel=1e-5)


class Fails(Module):
    """Rank 1 ends before the collective of a layer."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.blocks[1].down.register_forward_pre_hook(self.fail)

    def fail(self, *_: Any) -> None:
        raise ValueError("of rank 1")


def _error_in_a_layer(stage: int) -> tuple[str, list[float]]:
    with quick():
        trainer = trainer_of(stage, 2, 2)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            trainer.fit(Fails(data=2))
        again = Module(data=2)
        trainer_of(stage, 2, 2).fit(again)
    return str(caught.value), again.losses


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_an_error_before_a_layers_collective_ends_all_ranks_and_another_model_is_trained(
    pool: Pool, stage: int
) -> None:
    """The next model's mesh equals that of the first, whose groups are closed."""
    for text, losses in pool.run(4, _error_in_a_layer, stage):
        assert "of rank 1" in text
        assert losses == pytest.approx(expected(2)[0], rel=1e-5)


class FailsLater(Module):
    """Rank 1 ends before the second forward."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 1 and self.global_rank == 1:
            raise ValueError("of rank 1")
        return super().training_step(batch, index)


def _same_model_after_an_error(tensor: int) -> list[str]:
    module, texts = FailsLater(data=2 // tensor), []
    with quick():
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                trainer_of(3, tensor, 2).fit(module)
            texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("tensor", only([2], [1, 2]))
def test_a_model_whose_run_ended_at_different_points_is_refused(pool: Pool, tensor: int) -> None:
    """What was sharded in that run cannot be gathered: the ranks would wait for each other."""
    for first, second in pool.run(2, _same_model_after_an_error, tensor):
        assert "of rank 1" in first
        assert "different points" in second
        assert "Make a new model" in second


class OnThread(Fails):
    """Backward runs on another thread, as on a GPU; rank 1 ends before it."""

    automatic_optimization = False

    def on_train_start(self) -> None:
        pass

    def training_step(self, batch: Tensor, index: int) -> None:
        loss = self(batch).square().mean()
        if self.global_rank == 1:
            self.fail()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.manual_backward, loss).result()


def _error_before_backward() -> str:
    with quick():
        trainer = trainer_of(1, 2, 2)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            trainer.fit(OnThread())
    return str(caught.value)


def test_a_backward_on_another_thread_ends_with_the_rank_that_it_waits_for(pool: Pool) -> None:
    for text in pool.run(2, _error_before_backward):
        assert "of rank 1" in text


def _full_file(path: str) -> tuple[list[float], list[float]]:
    module, again = Module(data=1), Module(data=1)
    config = {"tensor_parallel": {"autotp_size": 2}, **FULL}
    trainer = sharded_trainer(2, config=config, max_steps=2)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    sharded_trainer(2, config=config, max_steps=4).fit(again, ckpt_path=path, **trust(False))
    return module.losses, again.losses


def test_a_run_goes_on_from_one_file(pool: Pool, tmp_path: Path) -> None:
    losses = [*pool.run(2, _full_file, str(tmp_path / "full.ckpt"))[0]]
    assert losses[0] + losses[1] == pytest.approx(expected(4)[0], rel=1e-5)
