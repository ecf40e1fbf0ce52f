"""The door in a run: when features watch an engine, what monitors show of them, and what is said of missing ones."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from typer.testing import CliRunner
from typing_extensions import override

import lt_zero
from lt_zero import ZeroConfig, cli
from lt_zero.config.catalog import explain
from lt_zero.config.document import Document
from lt_zero.config.load import resolved, validate, with_own_blocks
from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Entry, Feature, PlaceInRun, register, unregister
from lt_zero.core.followers import Figure
from lt_zero.features import asks, own_blocks
from lt_zero.training.lightning.monitoring import monitor_of
from tests.support.lightning_tools import FULL, sharded_trainer, trust
from tests.support.matrix import only
from tests.support.outside import features
from tests.support.pool import Pool

SEEN: list[tuple[PlaceInRun, float]] = []  # the runs, and the first weight when the feature began to watch


class Backwards(Figure):
    """Counts the samples of micro-batches, and says of how many a step has how many."""

    name, label = "seen_samples", "seen"

    def __init__(self) -> None:
        self.begun: list[tuple[int, float]] = []
        self.samples = 0
        self.ended = 0

    @override
    def begin(self, micro_batches: int, weight: Callable[[], float]) -> None:
        self.begun.append((micro_batches, weight()))

    @override
    def see_batch(self, rows: int) -> None:
        self.samples += rows

    @override
    def read(self) -> float | None:
        return float(self.samples)

    @override
    def end(self) -> None:
        self.ended += 1


FIGURES: list[Backwards] = []


class Counting(Feature):
    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> Figure:
        with lt_zero.gathered(engine.root):
            SEEN.append((run, next(engine.root.parameters()).flatten()[0].item()))
        FIGURES.append(Backwards())
        return FIGURES[-1]


@contextmanager
def counting() -> Iterator[None]:
    """Context in which every configuration asks for ``Counting``."""
    SEEN.clear()
    FIGURES.clear()
    register(Entry("counts", f"{__name__}:Counting", "counts", lambda config: True))
    try:
        yield
    finally:
        unregister("counts")


def _rows(path: Path, column: str) -> list[float]:
    with path.open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


def _monitor(folder: str) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}


def _trains(folder: str, stage: int) -> None:
    with counting():
        how: dict[str, Any] = {"max_steps": 2, "limit_val_batches": 1, "accumulate_grad_batches": 2, "logger": None}
        config = {**FULL, **_monitor(folder), "steps_per_print": 1}
        trainer = sharded_trainer(stage, config=config, **how)
        trainer.validate(module := BoringModel(), verbose=False)
        assert not SEEN, "nothing is trained yet"
        trainer.fit(module)
        assert [run for run, _ in SEEN] == [PlaceInRun(0)]
        (figure,) = FIGURES
        assert (figure.begun, figure.ended) == ([(2, 0.5)], 1)
        trainer.save_checkpoint(f"{folder}/saved")
        saved = torch.load(f"{folder}/saved", weights_only=False)["state_dict"]["layer.weight"].flatten()[0].item()
        again = sharded_trainer(stage, config=FULL, max_steps=3)
        again.fit(BoringModel(), ckpt_path=f"{folder}/saved", **trust(False))
        assert [run for run, _ in SEEN] == [PlaceInRun(0)] * 2, "each Trainer has a run"
        assert SEEN[1][1] == saved, "the weights are there"
        assert FIGURES[1].begun == [], "no monitor shows it"


@pytest.mark.parametrize("stage", only([3], [0, 1, 2, 3]))
def test_a_trainer_shows_figures_of_engines_that_it_trains(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _trains, str(tmp_path), stage)
    assert _rows(tmp_path / "job/version_0/metrics.csv", "zero/seen_samples") == [2.0, 4.0]


def test_a_loop_shows_figures(tmp_path: Path) -> None:
    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 3}
    with counting():
        engine, *_ = lt_zero.initialize(model=nn.Linear(2, 1), config={**keys, **_monitor(str(tmp_path))})
        for _ in range(2):
            engine.backward(engine(torch.ones(3, 2)).sum())
            engine.step()
        engine.destroy()
    assert _rows(tmp_path / "job/Train_Samples_seen_samples.csv", "seen_samples") == [3.0, 6.0]
    assert FIGURES[0].ended == 1


def test_features_watch_a_module_outside_of_a_run(pool: Pool) -> None:
    with counting():
        lt_zero.shard(nn.Linear(2, 1), {"zero_optimization": {"stage": 1}}).detach()
        lt_zero.shard(nn.Linear(2, 1), {"zero_optimization": {"stage": 1}}, training=False).detach()
    assert [run for run, _ in SEEN] == [PlaceInRun(None)], "one trains"
    assert FIGURES[0].ended == 1, "with the engine"


# ---- what was taken out ----------------------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes imports of a module fail, as if it was taken out."""

    def take_out(module: str) -> None:
        monkeypatch.setitem(sys.modules, module, None)

    return take_out


def test_a_key_of_a_missing_feature_says_what_is_missing(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: dict[str, Any]) -> str:
        with pytest.raises(lt_zero.ConfigError) as caught:
            lt_zero.shard(nn.Linear(2, 1), config)
        return str(caught.value)

    without("lt_zero.tools.gradient_noise.feature")
    text = refused({"gradient_noise_scale": True})
    assert "gradient_noise_scale: the gradient noise scale is not installed" in text
    # Of a feature that is not there at all the folder is missing.
    missing = r"no module lt_zero\.tools\.gradient_noise(\.feature)?\. Install lt_zero with it, or remove gradient"
    assert re.search(missing, text)
    without("lt_zero.tools.compare.feature")
    monkeypatch.setenv("LT_ZERO_RECORD", "runs")
    assert "LT_ZERO_RECORD: the record of a run is not installed" in refused({})
    without("lt_zero.parallel.feature")
    text = refused({"sequence_parallel_size": 2})
    assert re.search(
        r"sequence_parallel_size: sequence parallelism is not installed, .* lt_zero\.parallel\.feature", text
    )


def test_a_key_of_missing_monitors_says_what_is_missing(without: Callable[[str], None]) -> None:
    without("lt_zero.training.lightning.monitor.run_monitor")
    with pytest.raises(lt_zero.ConfigError, match=r"^steps_per_print: monitoring is not installed, .*\.run_monitor"):
        monitor_of(ZeroConfig.of({"steps_per_print": 5}))
    without("lt_zero.training.loop.monitors")
    config = {"csv_monitor": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(lt_zero.ConfigError, match=r"^csv_monitor\.enabled: monitoring is not installed, .*\.monitors"):
        lt_zero.initialize(model=nn.Linear(2, 1), config=config)


def test_a_block_of_a_missing_feature_says_what_is_missing(without: Callable[[str], None]) -> None:
    whole = resolved(lt_zero.ZeroConfig(stage=2))["long_sequences"]
    without("lt_zero.features.tiles.keys")
    own_blocks.cache_clear()
    try:
        schema = with_own_blocks()
        document = Document({"long_sequences": {"tiled_mlp": True}})
        assert validate(document, schema) is None
        off = validate(Document({"long_sequences": False, "zero_optimization": {"stage": 2}}), schema)
        told = explain("long_sequences.tiled_mlp")
        dumped = [validate(Document({"long_sequences": block}), schema) for block in ({}, whole)]
    finally:
        own_blocks.cache_clear()
    (problem,) = document.problems
    assert problem.key == "long_sequences"
    assert problem.message == told
    missing = (
        r"long_sequences: computation in tiles is not installed, there is no module lt_zero\.features\.tiles(\.keys)?"
    )
    assert re.match(missing, told)
    assert off is not None
    assert off.zero_optimization.stage == 2
    assert None not in dumped
    assert [asks(each, "long_sequences") for each in (off, *dumped)] == [False] * 3


def test_a_missing_name_and_command_say_what_is_missing(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without("lt_zero.features.ema.callback")
    monkeypatch.delitem(vars(lt_zero), "EMA", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"lt_zero\.EMA is not installed: .* lt_zero\.features\.ema"):
        from lt_zero import EMA  # noqa: F401
    without("lt_zero.features.one_bit.onebit")
    monkeypatch.delitem(vars(lt_zero.optim), "OneBitAdam", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"lt_zero\.optim\.OneBitAdam is not installed: .* lt_zero\.features"):
        from lt_zero.optim import OneBitAdam  # noqa: F401
    without("lt_zero.features.sparse_attention")
    monkeypatch.delitem(sys.modules, "lt_zero.attention", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"lt_zero\.attention is not installed: .* lt_zero\.features"):
        importlib.import_module("lt_zero.attention")
    without("lt_zero.tools.compare.compare")
    done = CliRunner().invoke(cli.app, ["compare", "a", "b"])
    assert done.exit_code == 1
    missing = r"lt-zero compare is not installed: there is no module lt_zero\.tools\.compare(\.compare)?\."
    assert re.search(missing, done.output)


def test_a_library_that_a_feature_lacks_is_named_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    register(Entry("lacking", "lacking:Lacking", "lacking", lambda config: True))
    try:
        with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
            lt_zero.shard(nn.Linear(2, 1), {})
    finally:
        unregister("lacking")


@pytest.mark.parametrize("place", ["tests.outside.noise:Noisy", "tests.outside.noise"])
def test_a_class_that_is_not_at_its_place_is_named(place: str) -> None:
    with features(Entry("noisy", place, "noisy", lambda config: True)), pytest.raises(lt_zero.ConfigError) as caught:
        lt_zero.shard(nn.Linear(2, 1), {})
    (problem,) = caught.value.problems
    assert problem.key == "noisy"
    assert problem.message.startswith(f"noisy: noisy is to be at {place!r}, and tests.outside.noise has no ")


def test_names_of_own_features_are_taken() -> None:
    entry = Entry("gradient compression", "nowhere:Nothing", "mine", lambda config: False)
    with features(entry), pytest.raises(ValueError, match="'gradient compression'.*lt_zero has a feature of this name"):
        lt_zero.shard(nn.Linear(2, 1), {})


def test_a_name_is_registered_once() -> None:
    entry = Entry("twice", "nowhere:Nothing", "zero_optimization", lambda config: False)
    register(entry)
    try:
        with pytest.raises(ValueError, match="'twice'.*a feature of this name exists"):
            register(entry)
    finally:
        unregister("twice")
