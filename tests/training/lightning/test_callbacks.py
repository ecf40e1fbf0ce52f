"""Lightning's callbacks under ZeRO with 2 ranks, beside one process; the table of docs/callbacks.md."""

from __future__ import annotations

import csv
import re
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.text import Perplexity

from lt_zero import ZeroStrategy
from lt_zero.config import ZeroConfig
from lt_zero.training.lightning.checkpoint_service import CheckpointService
from lt_zero.training.lightning.data_position.position import DataPosition
from tests.support.features import there
from tests.support.lightning_tools import GPT, assert_same, quick, sharded_trainer, single_trainer, weights
from tests.support.matrix import cover
from tests.support.paths import ROOT
from tests.support.pool import Pool

RUN: dict[str, Any] = {"max_epochs": 3, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
Fit = tuple[dict[str, Any], Any]  # weights, and what was seen


def _rows(folder: str, *names: str) -> list[list[str]]:
    (path,) = Path(folder).rglob("metrics.csv")
    with path.open(newline="") as file:
        return [[row[name] for name in names] for row in csv.DictReader(file) if any(row.get(name) for name in names)]


def _stops(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
    return [
        callbacks.EarlyStopping("val/dataloader_idx_0", min_delta=10.0, patience=1)
    ], lambda trainer: trainer.global_step


def _accumulates(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
    return [callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], lambda trainer: trainer.global_step


def _calls(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
    seen: list[str] = []
    hooks = ("on_fit_start", "on_train_epoch_start", "on_before_zero_grad", "on_validation_end", "on_fit_end")
    named = {name: lambda *_, name=name: seen.append(name) for name in hooks}
    return [callbacks.LambdaCallback(**named)], lambda trainer: seen


def _rates(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
    return [callbacks.LearningRateMonitor("step")], lambda trainer: _rows(folder, "lr-SGD")


def _statistics(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
    def names(trainer: pl.Trainer) -> int:
        (path,) = Path(folder).rglob("metrics.csv")
        return sum("DeviceStatsMonitor" in name for name in path.read_text().splitlines()[0].split(",")) > 0

    return [callbacks.DeviceStatsMonitor(cpu_stats=True)], names


def _timed(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
    timer = callbacks.Timer(timedelta(seconds=0))
    return [timer], lambda trainer: (trainer.global_step, timer.time_elapsed("train") > 0)


def _spikes(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
    class Quiet(pl.callbacks.SpikeDetection):  # the protocol of Fabric's class
        pass

    found = Quiet(window=2, warmup=1, exclude_batches_path=f"{folder}/skip.json")
    return [found], lambda trainer: found.bad_batches


def _summary(kind: str) -> Callable[[str], tuple[list[Callback], Callable[..., Any]]]:
    def make(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
        told: list[Any] = []
        base: Any = getattr(callbacks, kind)

        class Kept(base):  # type: ignore[misc]
            @staticmethod
            def summarize(*args: Any, **kwargs: Any) -> None:
                told.append([args[1], args[2]])  # parameters in all, trainable ones

        return [Kept(max_depth=2)], lambda trainer: told

    return make


def _bar(kind: str) -> Callable[[str], tuple[list[Callback], Callable[..., Any]]]:
    def make(folder: str) -> tuple[list[Callback], Callable[..., Any]]:
        made: Any = getattr(callbacks, kind)()
        return [made], lambda trainer: sorted(made.get_metrics(trainer, trainer.lightning_module))

    return make


OBSERVERS: dict[str, Callable[[str], tuple[list[Callback], Callable[..., Any]]]] = {
    "EarlyStopping": _stops,
    "GradientAccumulationScheduler": _accumulates,
    "LambdaCallback": _calls,
    "LearningRateMonitor": _rates,
    "DeviceStatsMonitor": _statistics,
    "Timer": _timed,
    "SpikeDetection": _spikes,
    "ModelSummary": _summary("ModelSummary"),
    "RichModelSummary": _summary("RichModelSummary"),
    "TQDMProgressBar": _bar("TQDMProgressBar"),
    "RichProgressBar": _bar("RichProgressBar"),
}


# Those that do not decide how long training goes on are observed together; a Trainer has one bar.
GROUPS = [
    ("EarlyStopping",),
    ("GradientAccumulationScheduler",),
    ("Timer",),
    (
        "LambdaCallback",
        "LearningRateMonitor",
        "DeviceStatsMonitor",
        "SpikeDetection",
        "ModelSummary",
        "TQDMProgressBar",
    ),
    ("RichModelSummary", "RichProgressBar"),
]


def _observed(names: tuple[str, ...], stage: int | None, folder: str) -> Fit:
    pairs = {name: OBSERVERS[name](folder) for name in names}
    made = [callback for callbacks_, _ in pairs.values() for callback in callbacks_]
    options: dict[str, Any] = {**RUN, "callbacks": made, "logger": CSVLogger(folder), "log_every_n_steps": 1}
    if len(names) > 1:
        options |= {"enable_progress_bar": True, "enable_model_summary": True}
    world = dist.get_world_size() if stage is not None else 1
    trainer = sharded_trainer(stage, **options) if stage is not None else single_trainer(**options)
    trainer.fit(GPT(world))
    return weights(trainer), {name: look(trainer) for name, (_, look) in pairs.items()}


@pytest.mark.parametrize(("names", "stage"), cover(GROUPS, [3, 2, 1]))
def test_it_does_what_it_does_in_one_process(pool: Pool, tmp_path: Path, names: tuple[str, ...], stage: int) -> None:
    (got, seen), _ = pool.run(2, _observed, names, stage, str(tmp_path / "two"))
    want, wanted = _observed(names, None, str(tmp_path / "one"))
    assert seen == wanted
    assert all(found or name == "SpikeDetection" for name, found in wanted.items()), "it saw something"
    assert_same(got, want)


def test_every_observer_is_in_a_group() -> None:
    assert sorted(name for names in GROUPS for name in names) == sorted(OBSERVERS)


# ---- predictions, metrics, saves -------------------------------------------------------------------------------------


class Writes(callbacks.BasePredictionWriter):
    def __init__(self, folder: str) -> None:
        super().__init__("batch_and_epoch")
        self.folder = Path(folder)

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, i: int, j: int
    ) -> None:
        torch.save((indices, prediction), self.folder / f"batch-{trainer.global_rank}-{i}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save(indices, self.folder / f"epoch-{trainer.global_rank}.pt")


def _predicts(stage: int | None, folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    options = {"callbacks": [Writes(folder)]}
    trainer = sharded_trainer(stage, **options) if stage is not None else single_trainer(**options)
    trainer.predict(GPT(), GPT(1).loader())


def test_predictions_are_written_by_each_rank(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _predicts, 3, str(tmp_path / "two"))
    _predicts(None, str(tmp_path / "one"))
    found: list[dict[int, Tensor]] = []
    for folder in ("one", "two"):
        rows = [torch.load(path) for path in (tmp_path / folder).glob("batch-*")]
        found.append({i: row for indices, part in rows for i, row in zip(indices, part, strict=True)})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][i], row) for i, row in found[0].items())
    assert len(list((tmp_path / "two").glob("epoch-*"))) == 2


class Measured(GPT):
    """Metrics of torchmetrics as children, logged as objects."""

    def __init__(self, world: int = 1) -> None:
        super().__init__(world)
        self.metrics = MetricCollection({"perplexity": Perplexity()})
        self.mean = MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = self.net(batch) * self.temperature.mean(0)
        self.metrics.update(logits.float(), batch.roll(-1, 1))
        self.mean.update(self.loss(batch), weight=len(batch))

    def on_validation_epoch_end(self) -> None:
        self.seen += [float(self.metrics.compute()["perplexity"]), float(self.mean.compute())]
        self.metrics.reset()
        self.mean.reset()


def _metrics(stage: int) -> list[float]:
    model = Measured(dist.get_world_size())
    sharded_trainer(stage, **RUN).fit(model)
    return model.seen


def test_torchmetrics_in_the_module(pool: Pool) -> None:
    model = Measured()
    single_trainer(**RUN).fit(model)
    for seen in pool.run(2, _metrics, 3):
        assert seen == pytest.approx(model.seen, rel=1e-5)


def _written_beside(folder: str) -> dict[str, Any]:
    saves = callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    options = {**RUN, "callbacks": [saves], "plugins": [AsyncCheckpointIO()], "enable_checkpointing": True}
    trainer = sharded_trainer(3, {}, {"checkpoint": {"format": "full"}}, **options)
    trainer.fit(GPT(dist.get_world_size()))
    return weights(trainer)


def test_async_checkpoint_io(pool: Pool, tmp_path: Path) -> None:
    """Full checkpoints; with sharded ones ``checkpoint.async`` does it."""
    want = pool.run(2, _written_beside, str(tmp_path))[0]
    saved = torch.load(tmp_path / "epoch=2.ckpt", weights_only=True)["state_dict"]
    assert_same({name: value.numpy() for name, value in saved.items()}, want, 0, 0)


def test_a_plugin_that_writes_files_is_refused_at_set_up() -> None:
    run: Any = SimpleNamespace(config=ZeroConfig(checkpoint={"format": "sharded"}), checkpoint_io=AsyncCheckpointIO())
    with pytest.raises(ValueError, match="checkpoint.format"):
        CheckpointService(DataPosition()).set_up(run)


def _fails_on_one(folder: str) -> str:
    class Fails(GPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.trainer.global_step == 2 and self.trainer.global_rank == 1:
                raise ZeroDivisionError("one rank")
            return super().training_step(batch, batch_idx)

    callback = callbacks.OnExceptionCheckpoint(folder, "x")
    with quick():
        trainer = sharded_trainer(3, callbacks=[callback], enable_checkpointing=True, **RUN)
        with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
            trainer.fit(Fails(dist.get_world_size()))
    return "".join(traceback.format_exception(caught.value))


def test_an_exception_on_one_rank_saves_nothing_and_ends_all(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint needs all ranks."""
    first, second = pool.run(2, _fails_on_one, str(tmp_path))
    assert "one rank" in second
    assert "rank 1" in first
    assert not (tmp_path / "x.ckpt").exists()


def _watched(stage: int) -> int:
    """As ``WandbLogger.watch`` does: hooks on the gradients of parameters."""
    seen: list[float] = []

    class Watches(Callback):
        def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            for _, p in module.named_parameters():
                p.register_hook(lambda grad: seen.append(float(grad.detach().abs().max())))

    sharded_trainer(stage, callbacks=[Watches()], **{**RUN, "max_epochs": 1}).fit(GPT(dist.get_world_size()))
    assert all(value == value for value in seen)
    return len(seen)


@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_on_gradients(pool: Pool, stage: int) -> None:
    count = sum(1 for _ in GPT().parameters())
    assert pool.run(2, _watched, stage) == [2 * count] * 2  # two steps


# ---- refusals, and the table -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [callbacks.BatchSizeFinder, lambda: type("Mine", (callbacks.BatchSizeFinder,), {})()])
def test_batch_size_finder_is_refused(make: Callable[[], Callback]) -> None:
    trainer = single_trainer(strategy=ZeroStrategy(stage=2), callbacks=[make()], max_steps=1)
    with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
        trainer.fit(GPT())


ABSTRACT = {"Callback", "Checkpoint", "ProgressBar"}
TABLE = re.compile(r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\| `([^`]+)` \|$", re.MULTILINE)


def test_the_table_has_all_callbacks_and_their_tests() -> None:
    rows = TABLE.findall((ROOT / "docs/callbacks.md").read_text())
    known = {name for name in dir(callbacks) if name[0].isupper()} - ABSTRACT
    assert known <= {name for name, *_ in rows}
    for name, *_, test in rows:
        file, function = test.split("::")
        if file.startswith("tests/features/") and not there(file.split("/")[2]):
            continue
        assert f"def {function}(" in (ROOT / file).read_text(), f"{name}: {test}"
