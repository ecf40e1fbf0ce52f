"""What a run tells about itself: loggers of the configuration, the line every N steps, the configuration, messages."""

from __future__ import annotations

import csv
import gc
import io
import logging
import os
import pickle
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CometLogger, CSVLogger, TensorBoardLogger, WandbLogger
from pydantic import ValidationError
from rich.table import Table
from torch import Tensor
from typer.testing import CliRunner

from lt_zero import ZeroConfig, ZeroStrategy
from lt_zero.cli import app
from lt_zero.common.console import Console
from lt_zero.common.errors import ConfigError
from lt_zero.common.fields import Block
from lt_zero.common.garbage import gc_disabled
from lt_zero.common.tensor_tree import rows_of
from lt_zero.config.blocks import Comet, CsvMonitor, TensorBoard, Wandb
from lt_zero.training.lightning.monitor.loggers import attach_loggers
from lt_zero.training.lightning.monitor.run_monitor import config_lines, dump_state
from lt_zero.training.lightning.monitor.step_metrics import StepPrinter
from lt_zero.training.lightning.monitoring import logger_level
from tests.support.console_tools import _observe, monitored, parsed
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.pool import Pool

KEY = "k3y" * 9


# ---- loggers, in real runs -----------------------------------------------------------------------------------------


class Hyper(GPT):
    def __init__(self, world: int, optimizer: str = "adamw") -> None:
        super().__init__(world, optimizer)
        self.save_hyperparameters()


def _logged(root: str, own: bool) -> Any:
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": root, "log_every_n_steps": 1}
    options |= {"callbacks": [LearningRateMonitor()], "enable_checkpointing": True, "gradient_clip_val": 0.5}
    if own:
        trainer = sharded_trainer(3, **options, logger=CSVLogger(f"{root}/logs", name="job"))
    else:
        block = CsvMonitor(enabled=True, output_path=f"{root}/logs", job_name="job")
        trainer = monitored(3, [block], **options, logger=None)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Hyper(dist.get_world_size()))
    (checkpoint,) = [c.dirpath for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    return [os.path.relpath(str(path), root) for path in (trainer.log_dir, checkpoint)], len(trainer.loggers)


def test_values_are_those_of_a_logger_of_ones_own(pool: Pool, tmp_path: Path) -> None:
    rows, hyper = [], []
    for name in ("theirs", "ours"):
        places = pool.run(2, _logged, str(tmp_path / name), name == "theirs")
        assert places == [(["logs/job/version_0", "logs/job/version_0/checkpoints"], 1)] * 2
        log = tmp_path / name / "logs" / "job"
        assert os.listdir(log) == ["version_0"], "the second fit goes on in the same files"
        read = csv.DictReader((log / "version_0" / "metrics.csv").open())
        theirs = [{key: value for key, value in row.items() if not key.startswith("zero/")} for row in read]
        rows.append([row for row in theirs if set(row) - {"step"} and any(row[key] for key in set(row) - {"step"})])
        hyper.append((log / "version_0" / "hparams.yaml").read_text())
    assert not (tmp_path / "ours" / "lightning_logs").exists(), "Lightning's default logger is replaced"
    assert rows[0] == rows[1]
    assert len([row for row in rows[1] if row["loss"]]) == 4
    assert {"loss", "grad_norm", "lr-AdamW", "val/dataloader_idx_0"} <= set(rows[1][0])
    assert hyper[0] == hyper[1]
    assert "adamw" in hyper[1]


# ---- loggers, which ones -------------------------------------------------------------------------------------------


def trainer_with(root: Path, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "default_root_dir": root, **kwargs})


def csv_block(**kwargs: Any) -> CsvMonitor:
    return CsvMonitor(enabled=True, **kwargs)


def test_only_what_is_enabled(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path)
    before = trainer.loggers
    assert attach_loggers(trainer, [CsvMonitor(), TensorBoard(), Wandb(), Comet()]) == []
    assert trainer.loggers is before


@pytest.mark.parametrize("asked", [None, True, False])
def test_default_logger_is_replaced_and_none_is_no_refusal(tmp_path: Path, asked: bool | None) -> None:
    trainer = trainer_with(tmp_path, logger=asked)
    (made,) = attach_loggers(trainer, [csv_block()])
    assert trainer.loggers == [made]
    assert (made.save_dir, made.name) == (str(tmp_path), "DeepSpeedJobName")
    assert attach_loggers(trainer, [csv_block()]) == []
    assert trainer.loggers == [made]


@pytest.mark.parametrize("options", [{"version": 3}, {"name": "mine"}, {"flush_logs_every_n_steps": 1}])
def test_logger_of_the_user_is_kept(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    own = CSVLogger(tmp_path, **options)
    trainer = trainer_with(tmp_path, logger=own)
    with caplog.at_level(logging.INFO):
        assert attach_loggers(trainer, [csv_block()]) == []
    assert trainer.loggers == [own]
    assert "csv_monitor: the Trainer has a CSVLogger of its own" in caplog.text


def test_logger_of_another_kind_stays_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    own = CSVLogger(tmp_path, name="mine")
    trainer = trainer_with(tmp_path, logger=own)
    (made,) = attach_loggers(trainer, [Wandb(enabled=True)])
    assert trainer.loggers == [own, made]


def test_fast_dev_run_has_no_loggers_and_barebones_contradicts(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, fast_dev_run=True)
    assert attach_loggers(trainer, [csv_block()]) == []
    with pytest.raises(ConfigError, match="csv_monitor.enabled=true contradicts Trainer\\(barebones=True\\)"):
        attach_loggers(trainer_with(tmp_path, barebones=True), [csv_block()])


def test_missing_packages_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard._TENSORBOARD", "tensorboard._TENSORBOARDX"):
        monkeypatch.setattr(f"lightning.fabric.loggers.{name}_AVAILABLE", False)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", False)
    trainer = trainer_with(tmp_path, logger=CSVLogger(tmp_path, name="mine"))
    before = list(trainer.loggers)
    with pytest.raises(ConfigError, match="pip install -U wandb") as caught:
        attach_loggers(trainer, [Wandb(enabled=True), Comet(enabled=True), TensorBoard(enabled=True)])
    assert [problem.key for problem in caught.value.problems] == ["tensorboard.enabled", "wandb.enabled"]
    assert trainer.loggers == before


def test_tensorboard(tmp_path: Path) -> None:
    block = TensorBoard(enabled=True, output_path=str(tmp_path / "events"), job_name="job")
    trainer = trainer_with(tmp_path)
    if find_spec("tensorboard") is None and find_spec("tensorboardX") is None:
        with pytest.raises(ConfigError, match="tensorboard.enabled=true needs the package tensorboard"):
            attach_loggers(trainer, [block])
        return
    (made,) = attach_loggers(trainer, [block])
    assert isinstance(made, TensorBoardLogger)
    made.log_metrics({"loss": 1.0}, step=0)
    made.finalize("success")
    assert list((tmp_path / "events" / "job" / "version_0").glob("events.out.*"))


def test_wandb_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    run = SimpleNamespace(name="n", define_metric=None)
    wandb = SimpleNamespace(run=None, init=lambda **kwargs: calls.append(kwargs) or run)
    parts = {"sdk.lib": SimpleNamespace(RunDisabled=int), "wandb_run": SimpleNamespace(Run=int)}
    for name, module in {"wandb": wandb, **{f"wandb.{k}": v for k, v in parts.items()}}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    trainer = trainer_with(tmp_path, logger=False)
    (made,) = attach_loggers(trainer, [Wandb(enabled=True, group="g", team="t", project="p")])
    assert isinstance(made, WandbLogger)
    assert not calls, "no run is opened before there is something to log"
    assert made.experiment is run
    given = {key: value for key, value in calls[0].items() if value is not None}
    assert given == {"project": "p", "group": "g", "entity": "t", "dir": str(tmp_path), "resume": "allow"}


def test_comet_arguments_and_one_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    experiment = SimpleNamespace(get_key=lambda: "e", project_name="p", log_other=lambda *_: None)
    comet = SimpleNamespace(ExperimentConfig=dict, start=lambda **kwargs: calls.append(kwargs) or experiment)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    monkeypatch.setattr("lightning.pytorch.loggers.comet._COMET_AVAILABLE", True)
    for name in ("RANK", "LOCAL_RANK", "COMET_DISABLE_AUTO_LOGGING"):
        monkeypatch.delenv(name, raising=False)
    names = {"project": "p", "workspace": "w", "api_key": KEY, "experiment_key": "a" * 32, "mode": "get"}
    block = Comet(enabled=True, experiment_name="n", online=True, **names)
    for rank in (1, 0):
        plain = SimpleNamespace(
            fast_dev_run=0, default_root_dir=tmp_path, loggers=[], barebones=False, global_rank=rank
        )
        (made,) = attach_loggers(plain, [block])  # type: ignore[arg-type]
        assert isinstance(made, CometLogger)
        assert len(calls) == 1 - rank, "one experiment, although spawned processes have no rank in their environment"
    config = {"name": "n", "offline_directory": str(tmp_path)}
    assert calls == [{**names, "online": True, "experiment_config": config}]
    assert "LOCAL_RANK" not in os.environ


# ---- the blocks ----------------------------------------------------------------------------------------------------


class Everything(Block):
    comet: Comet = Comet()
    csv_monitor: CsvMonitor = CsvMonitor()
    dtype: torch.dtype = torch.float16
    many: tuple[str, ...] = ("a",)


def test_the_key_is_told_to_nobody() -> None:
    config = Everything(comet={"api_key": KEY})
    assert config.comet.api_key is not None
    assert config.comet.api_key.get_secret_value() == KEY
    assert pickle.loads(pickle.dumps(config)) == config
    told = [repr(config), str(config), str(config.model_dump()), config.model_dump_json(exclude={"dtype"})]
    assert not [text for text in (*told, *config_lines(config)) if KEY in text]
    assert "api_key" not in config.model_dump()["comet"], "each checkpoint holds a dump"
    lines = config_lines(config, {("dtype",)})
    assert lines[0] == "  comet:"
    assert {'    api_key: "**********"', '  dtype: "***"', '  many: ["a"]'} <= set(lines)
    assert "    api_key: null" in config_lines(Everything())
    number = Everything(comet={"api_key": 123456})  # YAML reads it so
    assert number.comet.api_key is not None
    assert number.comet.api_key.get_secret_value() == "123456"


@pytest.mark.parametrize(
    ("block", "values"),
    [
        (Wandb, {"group_name": "g"}),
        (Wandb, {"team_name": "t"}),
        (Wandb, {"project_name": "p"}),
        (Wandb, {"host_name": "h"}),
        (CsvMonitor, {"path": "p"}),
        (Comet, {"mode": "new"}),
        (Comet, {"experiment_key": "short"}),
        (Comet, {"samples_log_interval": 0}),
    ],
)
def test_what_deepspeed_refuses_is_refused(block: type[Block], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        block(**values)


def test_null_is_no_path() -> None:
    assert CsvMonitor(output_path=None).output_path == ""  # type: ignore[arg-type]


# ---- the line ------------------------------------------------------------------------------------------------------


def test_numbers_of_the_line(pool: Pool) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "val_check_interval": 4}
    (lines, *own), (silent, *other) = pool.run(2, _observe, 2, options, True)
    assert silent == []
    losses = torch.tensor([own[0], other[0]])  # 2D, ranks and micro-batches
    got = [parsed(line) for line in lines]
    assert [line["step"] for line in got] == [2, 4]
    for line in got:
        number = line.pop("step")
        scale = 0.5 ** (number - 1)
        assert line.pop("loss") == pytest.approx(losses[:, 2 * number - 2 : 2 * number].mean().item(), rel=1e-5)
        assert line.pop("lr") == pytest.approx([0.1 * scale, 0.02 * scale])
        assert line.pop("grad_norm") == pytest.approx(own[1][number - 1], rel=1e-5)
        assert line.pop("samples/s") == pytest.approx(2 + 3)  # 4 batches on 2 ranks in 4 s; validation does not count
        assert line.pop("memory_gb") > 0
        assert line.pop("TFLOP/s") > 0
        assert not line
    assert own[2] == 2, "one reduction per line"


def test_nothing_happens_between_lines(pool: Pool) -> None:
    for lines, _, _, reductions in pool.run(2, _observe, 100, {}, False):
        assert (lines, reductions) == ([], 0)


def test_overflow_in_the_line(pool: Pool) -> None:
    fp16 = {"initial_scale_power": 6, "hysteresis": 1}
    options = {"plugins": ["16-mixed"], "gradient_clip_val": 0.05, "config": {"fp16": fp16}}
    lines = pool.run(2, _observe, 1, options, False, {"broken": 3})[0][0]
    got = [parsed(line) for line in lines]
    assert [line["loss_scale"] for line in got] == [64] * 3 + [32] * 5
    assert [line["skipped_steps"] for line in got] == [0] * 3 + [1] * 5
    assert [line["step"] for line in got if "grad_norm" not in line] == [4], "a skipped step has no norm"
    assert got[3]["loss"] == float("inf")
    assert got[4]["lr"] == got[3]["lr"], "schedules wait"


def test_manual_optimization_with_two_optimizers(pool: Pool) -> None:
    (lines, losses, norms, _), (_, others, _, _) = pool.run(2, _observe, 1, {}, False, {"manual": True})
    got = [parsed(line) for line in lines]
    assert [line["step"] for line in got] == list(range(1, 17))
    for line in got:
        batch, which = divmod(line["step"] - 1, 2)
        assert line["optimizer"] == which
        assert line["lr"] == [0.1, 0.2][which]
        assert line["loss"] == pytest.approx((losses[batch] + others[batch]) / 2, rel=1e-5)
        assert line.get("grad_norm") == (pytest.approx(norms[line["step"] - 1], rel=1e-5) if which else None)
        assert line["samples/s"] == pytest.approx(5)


def test_steps_are_positive() -> None:
    with pytest.raises(ConfigError, match="steps_per_print=0"):
        ZeroConfig.of({"steps_per_print": 0})


@dataclass
class Sample:
    rows: Tensor


def test_rows_of_a_batch() -> None:
    rows = torch.zeros(4, 2)
    batches: dict[int, Any] = {0: rows, 1: ["text", (rows, torch.zeros(9))], 2: {"x": None, "y": rows}}
    batches |= {3: [torch.zeros(()), rows], 4: Sample(rows)}
    assert [rows_of(batch) for batch in batches.values()] == [4] * 5
    endless: list[Any] = []
    endless.append(endless)
    assert [rows_of(batch) for batch in (None, ["a"], {}, torch.zeros(()), endless)] == [None] * 5


# ---- the configuration, messages, garbage --------------------------------------------------------------------------


def _dump() -> str:
    trainer = sharded_trainer(3, max_steps=1)
    trainer.fit(GPT(dist.get_world_size()))
    strategy = trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    with redirect_stdout(io.StringIO()) as stdout:
        dump_state(strategy.run)
    report = strategy.memory_report()
    text = stdout.getvalue()
    return text if not text or all(f"{here:,}" in text for here, _ in report.values()) else "wrong bytes"


def test_state_is_printed_by_rank_0(pool: Pool) -> None:
    text, nothing = pool.run(2, _dump)
    assert nothing == ""
    assert "  zero_optimization:\n    stage: 3\n" in text
    assert "    stage3_param_persistence_threshold: 0\n" in text
    assert re.search(r"optimizer │ +[\d,]+ │ +8,784", text)


def test_level_lasts_as_long_as_the_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger, root = logging.getLogger("lt_zero"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a script of a user; pytest has some
    for rank, shown in ((0, "lt_zero DEBUG: one\nlt_zero WARNING: two\n"), (1, "lt_zero WARNING: two\n")):
        with pytest.raises(KeyError), logger_level("debug", rank):  # noqa: PT012
            logging.getLogger("lt_zero.core.engine").debug("one")
            logger.warning("two")
            raise KeyError
        assert capsys.readouterr().err.replace("lt_zero.core.engine", "lt_zero") == shown
        assert (logger.level, logger.handlers) == (logging.NOTSET, [])
    with logger_level("error"):
        logger.warning("three")
    with logger_level(None):
        logger.info("four")
    assert capsys.readouterr().err == ""


def test_handlers_of_the_user_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lt_zero")
    with logger_level("info", rank=3):
        assert not logger.handlers
        logger.info("five")
    assert caplog.messages == ["five"]


def test_garbage_collection_comes_back() -> None:
    assert gc.isenabled()
    with gc_disabled(False):
        assert gc.isenabled()
    with pytest.raises(KeyError), gc_disabled(True):  # noqa: PT012
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled(True):
            pass
        assert not gc.isenabled(), "what the user turned off stays off"
    finally:
        gc.enable()


def test_a_command_that_cannot_be_imported_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lt_zero.config.cli", None)
    assert CliRunner().invoke(app, ["config"]).exit_code == 1
    assert gc.isenabled()


def test_tensors_stay_where_they_are_until_a_line_is_due() -> None:
    class Loud(Tensor):
        def item(self) -> Any:  # type: ignore[override]
            raise AssertionError("read")

        def __float__(self) -> float:
            raise AssertionError("read")

    printer = StepPrinter(100)
    module: Any = SimpleNamespace(automatic_optimization=False)
    for _ in range(3):
        printer.before_forward(module)
        printer.after_forward(module, torch.zeros(2, 3), torch.ones(1).as_subclass(Loud))
    assert float(printer._loss.as_subclass(Tensor)) == 3  # type: ignore[union-attr]


# ---- nothing that only prints ends a run -----------------------------------------------------------------------------

PRINTS: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "comms_logger": {"enabled": True},
    "flops_profiler": {"enabled": True, "profile_step": 1},
    **dict.fromkeys(("dump_state", "memory_breakdown", "wall_clock_breakdown"), True),
    "steps_per_print": 1,
}


class _Full(io.StringIO):
    """A stream without a reader, or on a full disk."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def _steps_with(kind: str) -> int:
    before = sys.stdout, os.dup(1)
    try:
        if kind == "full":
            with open("/dev/full", "w") as full:
                os.dup2(full.fileno(), 1)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        else:
            sys.stdout = None if kind == "closed" else _Full()  # type: ignore[assignment]
        trainer = sharded_trainer(3, config=PRINTS, max_steps=3, max_epochs=2)
        trainer.fit(GPT(dist.get_world_size()))
        if kind == "full":
            sys.stdout.flush()  # as at the exit, where Python ends with another status if something is left
        return trainer.global_step
    finally:
        sys.stdout = before[0]
        os.dup2(before[1], 1)
        os.close(before[1])


def _steps_of_all() -> list[int]:
    return [_steps_with(kind) for kind in ("full", "pipe", "closed")]


def test_what_prints_does_not_end_a_run(pool: Pool) -> None:
    assert pool.run(1, _steps_of_all) == [[3, 3, 3]]


def test_names_do_not_control_the_terminal() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None)
    table = Table("\x1b[31mname")
    table.add_row("a\x1b]0;title\x07b\u202ec", "\x9b2J")
    console.print("loss\x1b[2J", "é ü\t漢", markup=False)
    console.print(table)
    shown = text.getvalue()
    assert not set("\x1b\x07\x9b\u202e") & set(shown)
    assert r"loss\x1b[2J" in shown
    assert "é ü" in shown
    assert "漢" in shown


def test_commands_show_control_characters(tmp_path: Path) -> None:
    """Names in files of strangers: keys, metrics, tensors, paths."""
    (tmp_path / "c.yaml").write_text('"zero\\e[2Jbad": 1\n')
    (tmp_path / "metrics.csv").write_text("step,zero/\x1b[2Jloss\n0,1.0\n1,0.5\n")
    torch.save({"a\x1b[2J": torch.ones(1), "net.b": torch.ones(1)}, tmp_path / "w.pt")
    out = str(tmp_path / "o.pt")
    for command in (
        ["config", "check", str(tmp_path / "c.yaml")],
        ["config", "show", str(tmp_path / "c.yaml")],
        ["logs", str(tmp_path)],
        ["export", str(tmp_path / "w.pt"), out, "--strip-prefix", "net."],
        ["verify", str(tmp_path / "x\x1b[2J")],
    ):
        done = CliRunner().invoke(app, command)
        assert "\x1b" not in done.output, command
        assert r"\x1b[2J" in done.output.replace("\n", ""), (command, done.output)
