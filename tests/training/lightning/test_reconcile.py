"""Trainer, module and configuration: one of them says a value, or all of them say the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import ZeroConfig, ZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.config.options import with_sizes
from lt_zero.core.engine.partition import hidden_size, widths_of
from lt_zero.training.build import built_by
from tests.support.lightning_tools import QUIET
from tests.support.plain_module import AUTO, SGD, Own, Plain, run
from tests.support.pool import Pool


def test_an_optimizer_of_the_configuration() -> None:
    module = Plain()
    trainer = run(module, {"optimizer": SGD})
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.25, 0.5)
    assert "configure_optimizers" not in vars(module), "the module is left as it came"
    twin = Plain()
    reference = torch.optim.SGD(twin.parameters(), lr=0.25, momentum=0.5)
    for _, batch in zip(range(2), twin.train_dataloader(), strict=False):
        reference.zero_grad()
        twin.net(batch).square().mean().backward()
        reference.step()
    with torch.no_grad():
        for name, value in trainer.strategy.full_state_dict().items():
            assert torch.allclose(value, twin.state_dict()[name], atol=1e-6), name


def test_two_places_for_optimizers() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.type='SGD' is configured, and Own.configure_optimizers"):
        run(Own(), {"optimizer": SGD})
    trainer = run(Own(), {"optimizer": None})
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_a_schedule_of_the_configuration() -> None:
    module = Own()
    trainer = run(
        module,
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4}}},
        max_steps=3,
    )
    assert type(trainer.lr_scheduler_configs[0].scheduler).__name__ == "WarmupLR"
    assert trainer.lr_scheduler_configs[0].interval == "step"
    assert module.rates == [0.0, 0.0, 0.25], "as DeepSpeed: it warms up from the second step on"
    assert trainer.strategy.config.scheduler.params["warmup_max_lr"] in (None, 0.5)


def test_what_was_set_on_the_module_itself_comes_back() -> None:
    module = Plain()
    theirs = module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5)  # as LightningCLI does
    config: dict[str, Any] = {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}
    run(module, config)
    assert module.rates == [0.5, 0.25]
    assert module.configure_optimizers is theirs
    with pytest.raises(ConfigError, match="optimizer.type='SGD' is configured, and Plain.configure_optimizers"):
        run(module, {"optimizer": SGD})
    assert module.configure_optimizers is theirs


def test_accumulation_and_clipping_are_given_to_the_trainer() -> None:
    module = Own()
    trainer = run(module, {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5})
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (3, 0.5)
    assert (module.steps, len(module.rates)) == (2, 6)
    norm = trainer.strategy.precision_plugin.grad_norm
    assert norm is not None, "gradients were clipped by norm"


def test_equal_values_agree() -> None:
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 1, "train_batch_size": 8}
    config |= {"train_micro_batch_size_per_gpu": 4}
    trainer = run(Own(), config, accumulate_grad_batches=2, gradient_clip_val=1.0)
    assert trainer.global_step == 2
    assert run(Own(), {"gradient_clipping": 0}).gradient_clip_val is None


class Manual(Own):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "config", "kwargs", "words"),
    [
        (Own, {"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2}, r"=4, but .*batches=2\)"),
        (Own, {"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, r"=1.0 is .*clip_val=0.5\)"),
        (Own, {"gradient_clipping": 0}, {"gradient_clip_val": 0.5}, r"=0.0 is .*clip_val=0.5\)"),
        (
            Own,
            {"gradient_clipping": 0.5},
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
            "norm.*value",
        ),
        (Manual, {"gradient_clipping": 0.5}, {}, "gradient_clipping=0.5 .*optimizes manually"),
        (Manual, {"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps=2, .*manually"),
        (Own, {"train_batch_size": 9}, {}, r"train_batch_size=9, but .* 4 \* 1 \* 1 = 4 .*first batch"),
        (Own, {"train_micro_batch_size_per_gpu": 2}, {}, "gpu=2, but 4 is the size of the first batch"),
        (
            Own,
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
            {"accumulate_grad_batches": 2},
            r"=12, but .* 4 \* 2 \* 1 = 8",
        ),
        (Plain, {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, {}, "neither `lr` nor `learning_rate`"),
    ],
)
def test_contradictions(make: type[Plain], config: dict[str, Any], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(make(), dict(config), **kwargs)


def test_all_contradictions_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        run(
            Own(),
            {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
        )
    assert {problem.key for problem in error.value.problems} == {"gradient_accumulation_steps", "gradient_clipping"}


def test_a_scheduler_of_accumulation_decides() -> None:
    with pytest.raises(ConfigError, match="GradientAccumulationScheduler"):
        run(Own(), {"gradient_accumulation_steps": 4}, callbacks=[GradientAccumulationScheduler({0: 2})])


def test_everything_auto(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    module = Plain(learning_rate=0.125, adam_beta1=0.5, adam_beta2=0.75, weight_decay=0.0625)
    trainer = run(module, dict(AUTO), accumulate_grad_batches=2, gradient_clip_val=0.5)
    config = trainer.strategy.config
    assert config.autos == frozenset()
    assert (config.train_micro_batch_size_per_gpu, config.train_batch_size) == (4, 8)
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (2, 0.5)
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (36, 32)  # hidden size 6
    assert zero.stage3_param_persistence_threshold == 60
    group = trainer.optimizers[0].param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (
        0.125,
        (0.5, 0.75),
        1e-8,
        0.0625,
    )
    shown = capsys.readouterr().out.replace("\n", " ")
    for words in ("train_batch_size", "Plain.hparams.learning_rate", "hidden size 6", "first batch", "clip_val"):
        assert words in shown
    assert module.built == 1, "the loader is built once"


def test_schedules_know_the_length_of_the_run() -> None:
    params = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto"}
    config = {"optimizer": SGD, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    module = Plain(warmup_ratio=0.25)
    found = run(module, config, max_steps=8).strategy.config.scheduler.params
    assert found == {"total_num_steps": 8, "warmup_num_steps": 2, "warmup_max_lr": 0.25, "warmup_min_lr": 0.0}
    assert module.built == 1
    with pytest.raises(ConfigError, match="needs the length of the run"):
        run(Plain(), config, max_steps=-1, max_epochs=-1, max_time={"seconds": 1})


def test_batches_without_a_size_are_not_guessed() -> None:
    class Tensors(Own):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch["x"]).square().mean()

        def train_dataloader(self) -> Any:
            rows = [{"x": torch.ones(4, 32), "lengths": torch.ones(7)} for _ in range(4)]
            return DataLoader(rows, batch_size=None)

    config = run(Tensors(), {"train_micro_batch_size_per_gpu": "auto"}).strategy.config
    assert config.train_micro_batch_size_per_gpu is None


class Iterates(Own):
    """Takes the iterator of the loader: nothing else may take batches from it."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, number, _ = next(dataloader_iter)
        self.rates.append(number)
        return self.net(batch).square().mean()


def test_no_batch_is_taken_away() -> None:
    module = Iterates()
    run(module, {"train_batch_size": "auto"}, max_steps=3)
    assert module.rates == [0, 1, 2]


def test_hidden_size() -> None:
    class Config:
        hidden_size = 12

    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8))
    assert hidden_size([widths_of(model)])[0] == 8
    model[0].config = Config()
    assert hidden_size([widths_of(model)])[0] == 12
    model[0].config = {"hidden_sizes": [3, 5, 4]}
    assert hidden_size([widths_of(model)])[0] == 5
    model[0].config = {"text_config": None, "hidden_size": None}
    assert hidden_size([widths_of(model)])[0] == 8
    with pytest.raises(ConfigError, match="neither config.hidden_size nor a matrix"):
        hidden_size([widths_of(nn.LayerNorm(4))])


BATCHES = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": "auto"}])
def test_accumulation_is_derived_from_the_batches(more: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    module = Own()
    trainer = run(module, {**BATCHES, **more}, max_steps=2)
    assert (trainer.accumulate_grad_batches, trainer.strategy.config.gradient_accumulation_steps) == (6, 6)
    assert (module.steps, len(module.rates)) == (2, 12)
    assert "24 / (4 * 1 ranks)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="micro-batches per step, but the module optimizes manually"):
        run(Manual(), dict(BATCHES))
    with pytest.raises(ConfigError, match="= 6 micro-batches per step, but the Trainer has a GradientAccumulationS"):
        run(Own(), dict(BATCHES), callbacks=[GradientAccumulationScheduler({0: 2})])


def test_a_micro_batch_is_derived_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    run(Own(), {"train_batch_size": 8, "gradient_accumulation_steps": 2})
    shown = capsys.readouterr().out
    assert "batch_size of the data loader" in shown
    assert "8 / (2 * 1 ranks)" in shown
    with pytest.raises(ConfigError, match=r"train_batch_size=9 is not a multiple of accumulation \* ranks = 2 \* 1"):
        run(Own(), {"train_batch_size": 9}, accumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{\n"train_batch_size": 9}', 2),  # the first batch has 4
        ('{"zero_optimization": {"stage": 2},\n"gradient_clipping": 1.0\n}', 2),  # the Trainer says 0.5
        ('{"optimizer": {"type": "SGD", "params": {\n"lr": "auto"}}}', 2),  # nothing says it
    ],
)
def test_errors_of_a_run_name_file_and_line(text: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    trainer = pl.Trainer(
        **{**QUIET, "devices": 1, "max_steps": 1, "gradient_clip_val": 0.5, "strategy": ZeroStrategy(config=file)}
    )
    with pytest.raises(ConfigError, match=rf"ds_config.json, line {line}, column 1: "):
        trainer.fit(Plain() if "optimizer" in text.split("_opt")[0] else Own())


def _two_ranks() -> None:
    from tests.support.lightning_tools import sharded_trainer

    trainer = sharded_trainer(2, config={**AUTO, "zero_optimization": {}}, max_steps=2)
    trainer.fit(Plain(lr=0.5))
    assert trainer.strategy.config.train_batch_size == 8
    with pytest.raises(ConfigError, match=r"4 \* 1 \* 2 = 8"):
        sharded_trainer(2, config={"train_batch_size": 4}, max_steps=2).fit(Own())
    module = Own()
    trainer = sharded_trainer(2, config=dict(BATCHES), max_steps=2)
    trainer.fit(module)
    assert (trainer.accumulate_grad_batches, module.steps, len(module.rates)) == (3, 2, 6)
    with pytest.raises(ConfigError, match=r"train_batch_size=12 is not a multiple of .* = 4 \* 2 = 8"):
        sharded_trainer(2, config={**BATCHES, "train_batch_size": 12}, max_steps=2).fit(Own())


def test_two_ranks(pool: Pool) -> None:
    pool.run(2, _two_ranks)


def test_sizes_without_a_trainer() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
    found = with_sizes(ZeroConfig.of({"zero_optimization": zero, "train_batch_size": "auto"}), Plain())
    assert (found.zero_optimization.reduce_bucket_size, found.autos) == (36, {("train_batch_size",)})
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    sizes = [zero, {**zero, "reduce_bucket_size": 64}, {"stage": 3}]
    one, same, other = (lt_zero.estimate(model, {"zero_optimization": z}, 2, device="cpu").rank("host") for z in sizes)
    assert one == same != other


def test_validating_comes_first() -> None:
    class Validates(Own):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.net(batch)

        val_dataloader = Plain.train_dataloader

    zero = {"stage": 3, "stage3_param_persistence_threshold": "auto", "reduce_bucket_size": "auto"}
    trainer = pl.Trainer(
        **{**QUIET, "devices": 1, "max_steps": 1, "strategy": ZeroStrategy(config={"zero_optimization": zero})}
    )
    module = Validates()
    trainer.validate(module, verbose=False)
    engine = trainer.strategy.engine
    assert built_by(engine).zero_optimization.reduce_bucket_size == 36
    trainer.fit(module)
    assert trainer.strategy.engine is engine
    assert trainer.strategy.config.zero_optimization.stage3_param_persistence_threshold == 60
