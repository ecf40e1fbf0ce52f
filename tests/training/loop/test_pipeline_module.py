"""``PipelineModule`` in a loop of one's own: weights and losses of one process, its data, its errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lt_zero
from lt_zero import ConfigError
from lt_zero.core.engine.full_values import full_parameters
from lt_zero.parallel import LayerSpec, Pipeline, PipelineModule
from lt_zero.parallel.pipeline.position import Position
from tests.support.matrix import only_rows
from tests.support.pipelines import WIDTH, batch, mean_loss, specs
from tests.support.pool import Pool

GAS = 3  # not a power of two, nor a multiple of the stages


def _config(stage: int, **keys: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.5,
        **keys,
    }


def _module(stages: int, **how: Any) -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule(specs(), num_stages=stages, loss_fn=mean_loss, **how)


def _batches(data: int) -> Iterator[tuple[Tensor, Tensor]]:
    return (batch(step, data, 4) for step in itertools.count())


class Plain:
    """The same steps in one process, on the data of ``data`` ranks."""

    def __init__(self, data: int) -> None:
        torch.manual_seed(0)
        self.model = Pipeline(specs(), loss_fn=mean_loss, position=Position())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sources = [_batches(rank) for rank in range(data)]

    def step(self) -> tuple[Tensor, Tensor]:
        """The loss, and the norm of its gradients before clipping."""
        self.optimizer.zero_grad()
        losses = [self.model(*next(source)) for source in self.sources for _ in range(GAS)]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach(), norm


def _train(stage: int, stages: int, keys: dict[str, Any]) -> None:
    data = dist.get_world_size() // stages
    engine, *_ = lt_zero.initialize(model=_module(stages), config=_config(stage, **keys))
    reference, source = Plain(data), _batches(engine.session.division.data_rank)
    assert engine.is_first_stage() == (dist.get_rank() < data)
    rough = {"rtol": 2e-2, "atol": 2e-3} if keys else {"rtol": 1e-5, "atol": 1e-6}
    for _ in range(3):
        wanted_loss, norm = reference.step()
        torch.testing.assert_close(engine.train_batch(data_iter=source), wanted_loss, **rough)
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=rough["rtol"])
    counts = engine.global_steps, engine.micro_steps, engine.global_samples
    assert counts == (3, 3 * GAS, 3 * GAS * 4 * data)
    wanted = dict(reference.model.named_parameters())
    for name, _, value in full_parameters(engine.engine):
        torch.testing.assert_close(value, wanted[name].detach(), **rough, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        shown = [(x, y) for x, y in itertools.islice(_batches(0), 2)]
        logits = [reference.model(x) for x, _ in shown]
        losses = torch.stack([mean_loss(*pair) for pair in zip(logits, (y for _, y in shown), strict=True)])
    loss, found = engine.eval_batch(iter(shown), return_logits=True, num_micro_batches=2)
    torch.testing.assert_close(loss, losses.mean(), **rough)
    torch.testing.assert_close(found.float(), torch.cat(logits), **(rough if not keys else {"rtol": 0.1, "atol": 0.1}))
    torch.testing.assert_close(engine.eval_batch(iter(shown), num_micro_batches=2), losses.mean(), **rough)
    engine.destroy()


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


@pytest.mark.parametrize(
    ("stage", "stages", "keys"),
    only_rows([(2, 2, FP16), (3, 2, {})], [(0, 2, {}), (1, 1, {}), (2, 2, FP16), (3, 2, {})]),
    ids=["0", "alone", "fp16", "3"],
)
def test_steps_are_those_of_one_process(pool: Pool, stage: int, stages: int, keys: dict[str, Any]) -> None:
    pool.run(2, _train, stage, stages, keys)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_steps_of_two_pipelines(pool: Pool, stage: int) -> None:
    pool.run(4, _train, stage, 2, {})


def _resumes(folder: str, stage: int, stages: int) -> None:
    """A checkpoint of two stages goes on with ``stages``, as the run would have that wrote it."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = lt_zero.initialize(model=_module(2), config=_config(stage, optimizer=adamw))
    source, later = _batches(0), list(itertools.islice(_batches(0), 2 * GAS))
    for _ in range(2):
        engine.train_batch(source)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    data = iter(later)
    wanted = [engine.train_batch(data) for _ in range(2)]
    engine.destroy()
    engine, *_ = lt_zero.initialize(model=_module(stages), config=_config(stage, optimizer=adamw))
    _, state = engine.load_checkpoint(folder)
    assert state == {"epoch": 3}
    assert (engine.global_steps, engine.micro_steps) == (2, 2 * GAS)
    data = iter(later)
    torch.testing.assert_close([engine.train_batch(data) for _ in range(2)], wanted, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize(("stage", "stages"), only_rows([(1, 1)], [(3, 2), (1, 1)]))
def test_checkpoints_go_on_with_other_stages(pool: Pool, tmp_path: Path, stage: int, stages: int) -> None:
    pool.run(2, _resumes, str(tmp_path), stage, stages)


class Pair(nn.Module):
    """Gets one argument, a tuple, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, mask = pair
        return self.linear(value) * mask, mask


def _masked_loss(pair: tuple[Tensor, Tensor]) -> Tensor:
    value, mask = pair
    return (value.square() * mask).mean()


def _pairs(stages: int, **how: Any) -> list[Tensor]:
    """The last layer returns the loss; seeds of its own; returns losses."""
    layers = [*(LayerSpec(Pair) for _ in range(3)), _masked_loss]
    module = PipelineModule(layers, num_stages=stages, seed_layers=True, base_seed=5, **how)
    data = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(2 * GAS)]
    source = (((x, (x > 0).float()), torch.zeros(4)) for x in data)
    engine, *_ = lt_zero.initialize(model=module, config=_config(1, pipeline={"activation_checkpoint_interval": 1}))
    losses = [engine.train_batch(source) for _ in range(2)]
    with pytest.raises(StopIteration):
        engine.train_batch()
    engine.destroy()
    return losses


def test_layers_get_tuples_and_return_losses(pool: Pool) -> None:
    for found in pool.run(2, _pairs, 2):
        torch.testing.assert_close(found, _pairs(1, checkpointable_layers=["Pair"]), rtol=1e-6, atol=1e-7)


def _loader() -> float:
    """Training data that are shorter than the steps, and an evaluation without losses."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))

    def loss_of_one_element(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target).view(1, 1)

    layers = [nn.Linear(WIDTH, 7), torch.tanh, nn.Linear(7, WIDTH)]
    module = PipelineModule(layers, 2, loss_fn=loss_of_one_element)
    config = {**_config(1), "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}
    engine, _, loader, _ = lt_zero.initialize(model=module, config=config, training_data=data)
    assert loader is engine.training_dataloader
    assert len(loader) == 4
    losses = [engine.train_batch().item() for _ in range(4)]
    outputs = engine.eval_batch(iter(loader), compute_loss=False, reduce_output=None)
    assert [tuple(output.shape) for output in outputs] == [(4, WIDTH)] * GAS
    each = engine.eval_batch(iter(loader), reduce_output=None)
    assert all(loss.dim() == 0 for loss in each)
    engine.destroy()
    return losses[0] - losses[-1]


def test_training_data_are_read_again_and_again(pool: Pool) -> None:
    assert all(gain > 0 for gain in pool.run(2, _loader))


def _misused() -> None:
    engine, *_ = lt_zero.initialize(model=_module(2), config=_config(1))
    for call in (lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(())), engine.step):
        with pytest.raises(RuntimeError, match="train_batch"):
            call()
    uneven = iter([*(batch(step, 0, 4) for step in range(2)), batch(2, 0, 3)])
    with pytest.raises(ValueError, match="equal shapes"):
        engine.train_batch(uneven)
    given = _batches(0) if dist.get_rank() == 0 else None
    with pytest.raises((ValueError, RuntimeError), match="has no data"):
        engine._draw(given, 1)
    with pytest.raises(TypeError, match="set_batch_fn"):
        engine.train_batch(iter([torch.zeros(4)] * GAS))
    engine.destroy()
    with pytest.raises(ConfigError) as caught:
        lt_zero.initialize(model=_module(2), config=_config(1, pipeline={"stages": 4}))
    assert caught.value.problems[0].key == "pipeline.stages"
    for keys in ({"seed_layers": True}, {"partition_method": "uniform"}, {"schedule": "LoopedBFS"}):
        with pytest.raises(ConfigError, match="PipelineModule"):
            lt_zero.initialize(model=_module(2), config=_config(1, pipeline=keys))


def test_misuse_is_an_error_on_all_ranks(pool: Pool) -> None:
    pool.run(2, _misused)


def test_arguments_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="num_stages"):
        PipelineModule(specs(), topology=object())
    with pytest.raises(ValueError, match="activation_checkpoint_func"):
        PipelineModule(specs(), num_stages=1, activation_checkpoint_func=print)
    with pytest.raises(ConfigError, match="Write parameters"):
        PipelineModule(specs(), num_stages=1, partition_method="time")
    with pytest.raises(ConfigError, match="init_distributed"):
        PipelineModule(specs(), num_stages=2)
