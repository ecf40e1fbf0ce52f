"""The optimizer and ``p.grad`` stay what the user knows: its class, its copies, gradients inside of a window."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import lt_zero
from tests.support.lightning_tools import BoringModel, Path, sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import STAGES, config_of, full_values
from tests.support.pool import Pool


def _class_stays(stage: int) -> None:
    torch.manual_seed(0)
    engine = lt_zero.shard(Net(), config_of(stage))
    optimizers = [torch.optim.Adam(engine.root.parameters(), lr=1e-2) for _ in range(2)]
    before = repr(optimizers[0])
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]  # patches ``step``
    for optimizer in optimizers:
        lt_zero.ShardedOptimizer(engine, optimizer)
        assert type(optimizer) is torch.optim.Adam
    assert repr(optimizers[0]).replace("initial_lr: 0.01\n    ", "") == before
    wrapper: Any = LightningOptimizer(optimizers[0])
    assert type(wrapper).__name__ == "LightningAdam"

    next_token_loss(engine.root, 0, 0, dist.get_rank()).backward()
    optimizers[0].step()
    schedulers[0].step()
    copies = [copy.deepcopy(optimizers[0])] if stage < 3 else []
    for other in [*copies, pickle.loads(pickle.dumps(optimizers[0]))] if stage < 3 else copies:
        assert type(other) is torch.optim.Adam
        assert other.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
        assert "_lt_zero" not in vars(other)
        other.zero_grad()
    wrapper.zero_grad()
    assert all(p.grad is None for p in engine.root.parameters())
    engine.finish_reductions()
    assert not any(bucket.grads.valid for bucket in engine.buckets), "the wrapper's zero_grad has to reach everything"


@pytest.mark.parametrize("stage", only([2, 3], STAGES))
def test_the_class_of_an_optimizer_stays_the_users(pool: Pool, stage: int) -> None:
    pool.run(2, _class_stays, stage)


def _sharded_again() -> None:
    """An optimizer that a second engine shards is left alone by the first."""
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    engine = lt_zero.shard(net, config_of(2))
    for _ in range(2):
        lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(3):
        for model, mine in ((net, optimizer), (reference, expected)):
            next_token_loss(model, step, 0, 0).backward()
            mine.step()
            mine.zero_grad()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach())


def test_an_optimizer_may_be_sharded_again(pool: Pool) -> None:
    pool.run(2, _sharded_again)


def _change(step: int, optimizer: torch.optim.Optimizer) -> None:
    """Change the groups as user code may, also in place."""
    first, second = (group["params"] for group in optimizer.param_groups[:2])
    if step == 1:
        second.append(first.pop(3))
    elif step == 2:
        optimizer.param_groups[0]["params"] = first[::-1]
    elif step == 3:
        first[2], second[1] = second[1], first[2]
    elif step in (4, 6):
        first[0].requires_grad_(step == 6)
    elif step == 5:
        second[0].requires_grad_(False)
        optimizer.add_param_group({"params": [second.pop()], "lr": 0.3, "momentum": 0.0})
    elif step == 7:
        optimizer.param_groups[2]["momentum"] = 0.5


def _groups_change(stage: int) -> None:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    engine = lt_zero.shard(net, config_of(stage))
    optimizers = []
    for model in (net, reference):
        params = list(model.parameters())
        groups = [{"params": params[:9]}, {"params": params[9:], "lr": 0.02, "momentum": 0.8}]
        optimizers.append(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    lt_zero.ShardedOptimizer(engine, optimizers[0])
    for step in range(9):
        for model, mine in zip((net, reference), optimizers, strict=True):
            _change(step, mine)
            next_token_loss(model, step, 0, 0).backward()
            mine.step()
            mine.zero_grad()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach())


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_groups_may_change_between_steps(pool: Pool, stage: int) -> None:
    pool.run(2, _groups_change, stage)


class TwoAdams(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(32, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters(), lr) for layer, lr in ((self.layer, 1e-2), (self.other, 1e-3))]


def _monitored(folder: Path) -> list[str]:
    monitor = LearningRateMonitor()
    logger = CSVLogger(str(folder))
    trainer = sharded_trainer(2, logger=logger, callbacks=[monitor], max_steps=4, log_every_n_steps=1)
    trainer.fit(TwoAdams())
    return sorted(monitor.lrs)


def test_two_optimizers_of_a_class_have_two_names(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _monitored, tmp_path)[0] == ["lr-Adam", "lr-Adam-1"]


# ---- gradients inside of a window ------------------------------------------------------------------------------


def _window(stage: int) -> None:
    """``p.grad`` is there after a micro-batch that is not the last one, and setting it to None forgets it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    reference, own = copy.deepcopy(model), copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(2):
        with engine.no_sync():
            next_token_loss(model, step, 0, rank).backward()
        next_token_loss(own, step, 0, rank).backward()
        for r in range(world):
            (next_token_loss(reference, step, 0, r) / world).backward()
        for p, mine, average in zip(model.parameters(), own.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (mine.grad is None)
            if p.grad is not None and mine.grad is not None and average.grad is not None:
                want = mine.grad if stage < 2 else average.grad  # as under DDP, what is not reduced is the rank's own
                torch.testing.assert_close(p.grad.norm(2).item(), want.norm(2).item(), rtol=1e-4, atol=1e-6)
        model.zero_grad() if step else optimizer.zero_grad(set_to_none=False)
        for net in (own, reference):
            net.zero_grad(set_to_none=bool(step))
        engine.reducer.sync = True
        next_token_loss(model, step, 1, rank).backward()
        for r in range(world):
            (next_token_loss(reference, step, 1, r) / world).backward()
        optimizer.step()
        expected.step()
        own.load_state_dict(reference.state_dict())
        for net in (own, reference, model):
            net.zero_grad()
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach())


@pytest.mark.parametrize("stage", only([1, 3], STAGES))
def test_gradients_are_shown_and_forgotten_inside_of_a_window(pool: Pool, stage: int) -> None:
    pool.run(2, _window, stage)


class Looks(BoringModel):
    seen: bool | None = None

    def on_validation_start(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx == 0 and not self.trainer.sanity_checking:
            self.seen = self.layer.weight.grad is not None and bool(self.layer.weight.grad.norm(2) > 0)


def _validation(stage: int, precision: str) -> bool | None:
    model = Looks()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 0}
    sharded_trainer(stage, max_steps=1, limit_val_batches=1, precision=precision, **options).fit(model)
    return model.seen


@pytest.mark.parametrize(
    ("stage", "precision"), only_rows([(3, "32-true")], [(0, "bf16-true"), (1, "32-true"), (3, "32-true")])
)
def test_validation_inside_of_a_window_sees_gradients(pool: Pool, stage: int, precision: str) -> None:
    assert pool.run(2, _validation, stage, precision) == [True, True]
