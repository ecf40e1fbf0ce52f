"""One configuration in several runs, and on several ranks: what was resolved for one does not hold for another."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import ZeroStrategy
from lt_zero.common.errors import ConfigError
from tests.support.lightning_tools import QUIET, torchrun_env, trust
from tests.support.plain_module import SGD, Plain
from tests.support.pool import Pool

AUTO: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": "auto", "weight_decay": "auto"}},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}


def trainer_for(config: dict[str, Any], **kwargs: Any) -> pl.Trainer:
    warnings.filterwarnings("ignore")
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, **config})
    given = {"devices": 1, "use_distributed_sampler": False, "limit_train_batches": 1, "max_epochs": 1, **kwargs}
    return pl.Trainer(**{**QUIET, "strategy": strategy, **given})


def decay_of(trainer: pl.Trainer) -> Any:
    return trainer.optimizers[0].param_groups[0]["weight_decay"]


def test_auto_is_resolved_for_each_fit() -> None:
    trainer = trainer_for(AUTO)
    first, second = Plain(lr=0.5), Plain(batch=8, lr=0.25)
    trainer.fit(first)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second)
    assert (first.rates, second.rates) == ([0.5], [0.25])
    assert trainer.strategy.config.train_batch_size == 8  # type: ignore[attr-defined]
    second.lr = 0.125  # as Tuner.lr_find leaves it
    second.hparams.lr = 0.125
    trainer.fit_loop.max_epochs = 3
    trainer.fit(second)
    assert second.rates == [0.25, 0.125]


@pytest.mark.parametrize("value", ["0.5", np.float32(0.5), torch.tensor(0.5), 0.5])
def test_numbers_of_other_kinds(value: Any) -> None:
    module, trainer = Plain(lr="1e-1"), trainer_for(AUTO)
    module.weight_decay = value
    trainer.fit(module)
    assert decay_of(trainer) == 0.5
    assert module.rates == [0.1]


def test_a_list_of_omegaconf() -> None:
    module = Plain(betas=OmegaConf.create([0.5, 0.75]))
    trainer = trainer_for({"optimizer": {"type": "Adam", "params": {"betas": "auto"}}})
    trainer.fit(module)
    assert trainer.optimizers[0].param_groups[0]["betas"] == (0.5, 0.75)


class Failing(Plain):
    @property
    def lr(self) -> float:
        raise RuntimeError("not ready")


def test_what_is_no_number_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"Plain\.hparams\.lr='fast' .* is not a number"):
        trainer_for(AUTO).fit(Plain(lr="fast"))
    with pytest.raises(ConfigError, match=r"Failing\.lr .* raised RuntimeError: not ready"):
        trainer_for(AUTO).fit(Failing())
    module = Plain(lr=0.5)
    module.weight_decay = torch.nn.Parameter(torch.ones(2))  # has the name, and is something else
    trainer = trainer_for(AUTO)
    trainer.fit(module)
    assert decay_of(trainer) == 0.0


def test_what_auto_becomes_is_checked() -> None:
    config = {"optimizer": SGD, "train_batch_size": 10, "gradient_accumulation_steps": "auto"}
    with pytest.raises(ConfigError, match=r"train_batch_size=10 .*steps was auto, 3 is from Trainer\(accumulate"):
        trainer_for(config, accumulate_grad_batches=3).fit(Plain())
    with pytest.raises(ConfigError, match=r"gradient_clipping=-1.0 is wrong: .*at least 0"):
        trainer_for({"optimizer": SGD, "gradient_clipping": "auto"}, gradient_clip_val=-1.0).fit(Plain())


def test_the_length_of_a_run_that_accumulates_by_epoch() -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}
    trainer = trainer_for({"optimizer": SGD, "scheduler": schedule}, callbacks=[GradientAccumulationScheduler({1: 2})])
    with pytest.raises(ConfigError, match=r"total_num_steps|length of the run, which is unknown"):
        trainer.fit(Plain())


def test_a_resumed_run_may_begin_with_a_short_batch(tmp_path: Path) -> None:
    config = {"optimizer": SGD, "train_micro_batch_size_per_gpu": 24}
    options: dict[str, Any] = {"limit_train_batches": None, "max_epochs": 3}
    trainer = trainer_for(config, max_steps=2, **options)
    trainer.fit(Plain(batch=24))
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    again = trainer_for(config, max_steps=4, **options)
    again.fit(Plain(batch=24), ckpt_path=tmp_path / "c.ckpt", **trust(False))  # third batch: 16 of 64
    assert again.global_step == 4
    wrong = trainer_for({**config, "train_micro_batch_size_per_gpu": 32}, max_steps=4, **options)
    with pytest.raises(ConfigError, match="24 is the size of the first batch"):
        wrong.fit(Plain(batch=24), ckpt_path=tmp_path / "c.ckpt", **trust(False))


def test_sizes_that_are_not_clear_are_told() -> None:
    class Pairs(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch["a"]).sum()

        def train_dataloader(self) -> Any:
            return DataLoader([{"a": torch.ones(4, 32), "b": self.second}], batch_size=None)  # type: ignore[arg-type]

    for _ in range(2):  # in one process
        trainer = trainer_for({"optimizer": SGD, "train_micro_batch_size_per_gpu": 32})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.fit(Pairs(second=torch.ones(3)))
        assert any("train_micro_batch_size_per_gpu=32 cannot be compared" in str(w.message) for w in seen)
    with pytest.raises(ConfigError, match="4 is the size of the first batch"):  # a scalar says nothing
        trainer_for({"optimizer": SGD, "train_micro_batch_size_per_gpu": 32}).fit(Pairs(second=torch.tensor(3.0)))


def test_nothing_of_ours_is_on_the_module_while_it_trains() -> None:
    class Looks(Plain):
        def on_train_start(self) -> None:
            self.lent = "configure_optimizers" in vars(self)

    module = Looks()
    trainer_for({"optimizer": SGD}).fit(module)
    assert module.lent is False
    assert module.rates == [0.25]


def test_a_schedule_that_nobody_steps_is_told() -> None:
    class Manual(Plain):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self.net(batch).sum())
            self.optimizers().step()  # type: ignore[union-attr]

    trainer = trainer_for({"optimizer": SGD, "scheduler": {"type": "WarmupLR"}})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(Manual())
    assert any("self.lr_schedulers().step()" in str(w.message) for w in seen)


def _errors_on_both_ranks() -> None:
    os.environ.update(torchrun_env())
    rank = dist.get_rank()
    different = {"optimizer": {"type": "SGD", "params": {"lr": 0.5 + rank}}}
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr is 0\.5 on rank 0, 1\.5 on rank 1"):
        trainer_for(different, devices=2).fit(Plain())
    with pytest.raises(ConfigError, match=r"stage is 1 on rank 0, 2 on rank 1"):
        trainer_for({"zero_optimization": {"stage": 1 + rank}, "optimizer": SGD}, devices=2).fit(Plain())
    with pytest.raises(ConfigError, match=r"stage is 1 on rank 0, 2 on rank 1"):
        lt_zero.shard(nn.Linear(2, 2), {"zero_optimization": {"stage": 1 + rank}})
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr is 0\.25 on rank 0, 0\.5 on rank 1"):
        trainer_for(AUTO, devices=2).fit(Plain(lr=0.25 + rank / 4))
    said = "Reading the configuration failed on another rank: rank 1: .*neither `lr`" if rank == 0 else "neither `lr`"
    with pytest.raises(ConfigError, match=said):
        trainer_for(AUTO, devices=2).fit(Plain(**({"lr": 0.5} if rank == 0 else {})))
    said = "Reading the configuration failed on another rank: rank 1: .*8 is the size" if rank == 0 else "8 is the size"
    config = {"optimizer": SGD, "train_micro_batch_size_per_gpu": 4}
    with pytest.raises(ConfigError, match=said):
        trainer_for(config, devices=2).fit(Plain(batch=4 + 4 * rank))
    local = {"optimizer": SGD, "tensorboard": {"output_path": f"/tmp/{rank}"}, "max_cpu_gb": 100 + rank}
    trainer_for(local, devices=2).fit(Plain())


def test_ranks_agree_or_all_stop(pool: Pool) -> None:
    pool.run(2, _errors_on_both_ranks)
