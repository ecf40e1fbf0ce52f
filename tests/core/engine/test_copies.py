"""What is pickled, saved or deep-copied in the middle of a fit: a plain module, a Trainer that has not begun."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from torch import nn

from lt_zero import gathered
from lt_zero.common.module_hooks import no_hook
from lt_zero.core.engine.guard import is_guarded
from tests.support.features import there
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import only
from tests.support.models import Net, tokens
from tests.support.pool import Pool

WATCHED: dict[str, Any] = {
    "activation_checkpointing": {"mode": "full" if there("activation_checkpointing") else "none"},
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "steps_per_print": 1,
    "comms_logger": {"enabled": True},
    "flops_profiler": {"enabled": True, "profile_step": 1},
}


def hooks_of(module: nn.Module) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    found = [hook for m in module.modules() for name in names for hook in getattr(m, name).values()]
    return [getattr(hook, "hook", hook) for hook in found]


class Copying(Callback):
    """Copies everything, at several moments."""

    def __init__(self) -> None:
        self.looked: list[str] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        copy.deepcopy(pl_module)
        pickle.dumps(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer, pl_module, "start")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer, pl_module, "backward")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer, pl_module, "validation")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer, pl_module, "end")

    def _look(self, trainer: pl.Trainer, module: pl.LightningModule, where: str) -> None:
        self.looked.append(where)
        assert any(hook is not no_hook for hook in hooks_of(module)), "there is something to lose"
        with gathered(module):
            _is_plain(copy.deepcopy(module), module)
            _is_plain(pickle.loads(pickle.dumps(module)), module)
            torch.save(module, io.BytesIO())
            for thing in (trainer, *trainer.callbacks, trainer.fit_loop, trainer.strategy):  # type: ignore[attr-defined]
                again = pickle.loads(pickle.dumps(thing))
                assert type(again) is type(thing)
            assert all(type(o) is torch.optim.SGD for o in pickle.loads(pickle.dumps(trainer.optimizers)))
            twin = copy.deepcopy(trainer)
        assert twin.strategy is not trainer.strategy
        assert twin.strategy.run.built is None, "it has not begun"
        loader = trainer.train_dataloader
        assert type(pickle.loads(pickle.dumps(loader))) is torch.utils.data.DataLoader
        assert type(copy.deepcopy(loader)) is torch.utils.data.DataLoader


def _is_plain(made: Any, module: nn.Module) -> None:
    assert all(hook is no_hook for hook in hooks_of(made))
    for (name, theirs), mine in zip(made.named_parameters(), module.parameters(), strict=True):
        assert type(theirs) is nn.Parameter, name
        assert torch.equal(theirs.detach(), mine.detach()), name
    batch, net, plain = tokens(0, 0, dist.get_rank()), made.net, Net()
    plain.load_state_dict(net.state_dict())
    outputs = [each(batch) for each in (net, plain)]
    torch.testing.assert_close(*outputs)
    if torch.is_grad_enabled():
        net.zero_grad()
        for output in outputs:
            output.square().sum().backward()
        for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def _copies(stage: int, folder: Path) -> None:
    callbacks = [Copying(), TQDMProgressBar(), ModelCheckpoint(folder)]
    trainer = sharded_trainer(
        stage,
        config=WATCHED,
        callbacks=callbacks,
        max_epochs=1,
        enable_checkpointing=True,
        enable_progress_bar=True,
        num_sanity_val_steps=0,
    )
    trainer.fit(GPT(dist.get_world_size()))
    assert {"start", "backward", "validation", "end"} <= set(callbacks[0].looked)  # type: ignore[attr-defined]
    if stage < 3:
        pickle.dumps(trainer)


@pytest.mark.parametrize("stage", only([3], [2, 3]))
def test_everything_can_be_copied_while_it_trains(pool: Pool, stage: int, tmp_path: Path) -> None:
    pool.run(2, _copies, stage, tmp_path)


class Refused(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        names = [name for name, p in pl_module.named_parameters() if is_guarded(p)]
        assert names
        for copies in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match=r"parameter .temperature. are sharded .*gathered"):
                copies(pl_module)


def _refused() -> None:
    sharded_trainer(3, callbacks=[Refused()], max_steps=1).fit(GPT(dist.get_world_size()))


def test_parameters_that_are_sharded_are_not_copied_without_their_values(pool: Pool) -> None:
    pool.run(2, _refused)
