"""Ranks that step with different options, or parameters that the engine does not know: an error on all ranks."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import lt_zero
from lt_zero import FabricZeroStrategy
from tests.support.lightning_tools import GPT, quick, sharded_trainer, torchrun_env
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of
from tests.support.pool import Pool

HEAD = r"Parameter 'late.weight', 'late.bias' of \w+ was added or replaced after the model was sharded"


def other() -> bool:
    """Whether this is the last rank, which does something else."""
    return dist.get_rank() == dist.get_world_size() - 1


# ---- at set-up -------------------------------------------------------------------------------------------------------


def rates(net: nn.Module) -> list[Optimizer]:
    return [SGD([{"params": net.parameters(), "name": "all"}], lr=1.0 if other() else 1e-3)]


def kinds(net: nn.Module) -> list[Optimizer]:
    return [(Adam if other() else AdamW)(net.parameters(), weight_decay=0.0)]


def sizes(net: nn.Module) -> list[Optimizer]:
    params = list(net.parameters())
    cut = 3 if other() else 4
    return [SGD([{"params": params[:cut]}, {"params": params[cut:]}], lr=0.1)]


def counts(net: nn.Module) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=0.1) for _ in range(2 if other() else 1)]


def foreign(net: nn.Module) -> list[Optimizer]:
    return [SGD([*net.parameters(), nn.Parameter(torch.zeros(2, 3))], lr=0.1)]


AT_SETUP: dict[Callable[[nn.Module], list[Optimizer]], str] = {
    rates: r"SGD, group 0 \(all\), lr is 0.001 on rank 0 and 1.0 on rank 1",
    kinds: "the optimizer is AdamW on rank 0 and Adam on rank 1",
    sizes: r"group 0, the number of parameters is 4 \(with '[\w.]+'\) on rank 0 and 3 on rank 1",
    counts: "the number of optimizers is 1 on rank 0 and 2 on rank 1",
    foreign: r"SGD, group 0, has parameter number \d+ \(2, 3\), which the engine does not know: it is not one of the",
}


class Made(GPT):
    def __init__(self, make: Callable[[nn.Module], list[Optimizer]]) -> None:
        super().__init__(dist.get_world_size())
        self.make, self.automatic_optimization = make, False

    def configure_optimizers(self) -> Any:
        return self.make(self)


def _start(face: str, make: Callable[[nn.Module], list[Optimizer]]) -> None:
    net = Net()
    if face == "Trainer":
        sharded_trainer(1, max_steps=1).fit(Made(make))
    elif face == "Fabric":
        os.environ.update(torchrun_env())
        strategy = FabricZeroStrategy(config={"zero_optimization": {"stage": 3}})
        fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size())
        fabric.launch()
        fabric.setup(net, *make(net))
    elif face == "loop":
        lt_zero.initialize(model=net, optimizer=make(net)[0], config={"zero_optimization": {"stage": 2}})
    else:
        engine = lt_zero.shard(net, config_of(0))
        for optimizer in make(net):
            lt_zero.ShardedOptimizer(engine, optimizer)


def _set_up(face: str, make: Callable[[nn.Module], list[Optimizer]]) -> str:
    with quick(), pytest.raises(RuntimeError) as caught:
        _start(face, make)
    return str(caught.value)


@pytest.mark.parametrize(
    ("face", "make"),
    only_rows(
        [("shard", rates), ("shard", sizes), ("shard", foreign), ("loop", kinds), ("Fabric", counts)],
        [
            *itertools.product(["shard", "loop"], [rates, kinds, sizes, foreign]),  # a loop has one optimizer
            *itertools.product(["Fabric", "Trainer"], AT_SETUP),
        ],
    ),
)
def test_optimizers_differ_at_set_up(pool: Pool, face: str, make: Callable[[nn.Module], list[Optimizer]]) -> None:
    for told in pool.run(2, _set_up, face, make):
        assert re.search(AT_SETUP[make], told), told


# ---- in training -----------------------------------------------------------------------------------------------------


class Run:
    """Steps of training, in which ``change`` is called at a point of the second one."""

    def __init__(self, stage: int, when: str, change: Callable[[Run], None]) -> None:
        self.when, self.change = when, change
        with quick():
            self.engine = lt_zero.shard(Net(), config_of(stage))
        self.net = self.engine.root
        self.optimizer = SGD(list(self.net.parameters())[2:], lr=0.1, momentum=0.9)
        self.sharded = lt_zero.ShardedOptimizer(self.engine, self.optimizer)

    def step(self, number: int) -> None:
        if number == 1 and self.when == "before":
            self.change(self)
        next_token_loss(self.net, number, 0, dist.get_rank()).backward()
        if number == 1 and self.when == "between":
            self.change(self)
        self.sharded.grads.clip_norm(self.limit)
        self.optimizer.step()
        self.optimizer.zero_grad()

    limit = 0.5


def rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.2 if other() else 0.1


def tensor_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.2 if other() else 0.1)


def group(run: Run) -> None:
    if other():
        run.optimizer.add_param_group({"params": [next(run.net.parameters())]})


def clipping(run: Run) -> None:
    run.limit = 0.25 if other() else 0.5


def freezing(run: Run) -> None:
    run.net.blocks[1].norm.bias.requires_grad_(not other())  # of all of a bucket it would be other collectives


def unknown(run: Run) -> None:
    run.net.late = nn.Linear(2, 2)
    run.optimizer.add_param_group({"params": list(run.net.late.parameters())})


def head(run: Run) -> None:
    run.net.late = nn.Linear(2, 2)


def one_head(run: Run) -> None:
    if other():
        run.net.late = nn.Linear(2, 2)


LATE = r"SGD, group 1, has parameter 'late.weight' \(2, 2\), which the engine does not know: the model got it after"
IN_TRAINING: dict[Callable[[Run], None], str] = {
    rate: "SGD, group 0, lr is 0.1 on rank",
    tensor_rate: "SGD, group 0, lr is 0.1",
    group: "the number of parameter groups is 1 on rank",
    clipping: "the 2-norm to which gradients are clipped is 0.5 on rank",
    freezing: r"parameter 'blocks.1.norm.bias' is trainable on rank\S* 0.* and frozen on rank",
    unknown: f"{LATE}|{HEAD}",
    head: HEAD,
    one_head: f"Rank [12]: {HEAD}",
}
# A step of other parameters, or one that is clipped otherwise, meets other collectives above stage 0.
AT_STAGE_0 = [(group, "between"), (clipping, "before"), (clipping, "between")]
WHEN = list(itertools.product(IN_TRAINING, ["before", "between"]))


def _changes(stage: int, when: str, change: Callable[[Run], None], mixed: bool) -> tuple[int, str]:
    """In which step the error came, and what it says. ``mixed``: ranks have stepped with different values."""
    run, number = Run(stage, when, change), 0
    try:
        for number in range(3):
            run.step(number)
        return -1, ""
    except RuntimeError as error:
        first = str(error)
    if mixed:
        with pytest.raises(RuntimeError, match=re.escape(first)):
            run.engine.prepare_reading()  # what was stepped so cannot be saved
    else:
        run.engine.prepare_reading()  # the weights are as they were
    return number, first


@pytest.mark.parametrize(
    ("ranks", "stage", "change", "when"),
    only_rows(
        [
            (2, 0, clipping, "between"),
            (2, 3, rate, "between"),
            (2, 3, tensor_rate, "before"),
            (2, 3, group, "before"),
            (2, 3, freezing, "between"),
            (2, 3, unknown, "before"),
            (2, 3, one_head, "between"),
        ],
        [
            (ranks, stage, *case)
            for ranks, stage in [(2, 0), (2, 1), (2, 2), (2, 3), (3, 3)]
            for case in WHEN
            if stage == 0 or case not in AT_STAGE_0
        ],
    ),
)
def test_they_differ_in_training(pool: Pool, ranks: int, stage: int, change: Callable[[Run], None], when: str) -> None:
    late = change is clipping or (when == "between" and change is not unknown)
    mixed = late and change in (rate, tensor_rate, group, clipping)
    for step, told in pool.run(ranks, _changes, stage, when, change, mixed):
        assert re.search(IN_TRAINING[change], told), told
        assert step == (2 if late else 1)


def _last_step(stage: int) -> str:
    run = Run(stage, "between", rate)
    run.step(0)
    run.step(1)
    with pytest.raises(RuntimeError) as caught:
        run.engine.prepare_reading()
    return str(caught.value)


def test_the_last_step_is_checked_before_weights_are_saved(pool: Pool) -> None:
    for told in pool.run(2, _last_step, 1):
        assert re.search("lr is 0.1 on rank 0 and 0.2 on rank 1", told), told


def _accumulates(stage: int) -> str:
    """A step with another rate, which is put back, then two backwards: the first one's exchange is not waited for."""
    run = Run(stage, "never", rate)
    run.step(0)
    next_token_loss(run.net, 1, 0, dist.get_rank()).backward()
    rate(run)
    run.optimizer.step()
    run.optimizer.param_groups[0]["lr"] = 0.1
    for micro in range(2):
        next_token_loss(run.net, 2, micro, dist.get_rank()).backward()
    with pytest.raises(RuntimeError) as caught:
        run.optimizer.step()
    return str(caught.value)


def test_exchanges_that_nobody_waits_for(pool: Pool) -> None:
    for told in pool.run(2, _accumulates, 2):
        assert re.search("lr is 0.1 on rank 0 and 0.2 on rank 1", told), told


class AddsHead(pl.Callback):
    def __init__(self, to_optimizer: bool, frozen: bool) -> None:
        self.to_optimizer, self.frozen = to_optimizer, frozen

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.late = nn.Linear(2, 2).requires_grad_(not self.frozen)
        if self.to_optimizer:
            trainer.optimizers[0].add_param_group({"params": list(pl_module.late.parameters())})


def _adds(to_optimizer: bool, frozen: bool) -> str:
    with quick():
        trainer = sharded_trainer(2, max_steps=2, limit_val_batches=0, callbacks=[AddsHead(to_optimizer, frozen)])
        try:
            trainer.fit(GPT(dist.get_world_size()))
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("to_optimizer", only([False], [True, False]))
def test_a_head_that_a_callback_adds(pool: Pool, to_optimizer: bool) -> None:
    for told in pool.run(2, _adds, to_optimizer, False):
        assert re.search(f"{LATE}|{HEAD}" if to_optimizer else HEAD, told), told
    assert pool.run(2, _adds, to_optimizer, True) == ["", ""], "frozen"


def _unfrozen_later() -> str:
    run = Run(1, "before", lambda _: None)
    run.net.late = nn.Linear(2, 2).requires_grad_(False)
    run.step(0)
    run.net.late.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        run.step(1)
    return str(caught.value)


def test_a_frozen_module_that_is_added_and_unfrozen(pool: Pool) -> None:
    for told in pool.run(2, _unfrozen_later):
        assert re.search(HEAD, told), told


def _alike() -> list[float]:
    """Options that the ranks change in the same way, or that are the same number in another type."""
    run = Run(3, "before", lambda _: None)
    for number, value in enumerate([0.1, torch.tensor(0.5), 1 if other() else 1.0]):
        run.optimizer.param_groups[0]["lr"] = value
        run.step(number)
    run.optimizer.add_param_group({"params": [next(run.net.parameters())], "lr": 0.3})
    run.step(3)
    run.engine.prepare_reading()
    return [float(group["lr"]) for group in run.optimizer.param_groups]


def test_changes_that_all_ranks_make(pool: Pool) -> None:
    assert pool.run(2, _alike) == [[1.0, 0.3]] * 2
