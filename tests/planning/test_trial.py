"""A trial inside a script: facts before the first step, a report after the last, and no step more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import lt_zero
from lt_zero.cli import app
from lt_zero.config.load import ConfigWarning, examine
from lt_zero.parallel import Pipeline, PipelineModule
from lt_zero.planning.estimate import Setting
from lt_zero.planning.search_space import Facts, choices_of, configured, plans_of
from lt_zero.planning.sizes import stages_of_module
from lt_zero.planning.trial import Order
from lt_zero.training.lightning.function_trial import made_by
from tests.support.features import skip_without, there
from tests.support.lightning_tools import QUIET
from tests.support.paths import ROOT
from tests.support.pipelines import batch, mean_loss, specs
from tests.support.pool import Pool
from tests.support.simulated import one_of

pytestmark = pytest.mark.filterwarnings("ignore::lt_zero.config.load.ConfigWarning")
STEPS = 1 + 1 + 2  # the first, the warm-up, and those that are timed
ORDER = Order(warmup=1, steps=2, plans=True)
CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 2}, "comet": {"api_key": "secret"}}


class Ended(BaseException):
    """In place of the process's end."""


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(300, 300), nn.ReLU()) for _ in range(4)))
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.net(batch).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(200, 300), batch_size=5)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def with_trainer(config: dict[str, Any]) -> int:
    module = Module()
    strategy = lt_zero.ZeroStrategy(config=config)
    with pytest.raises(Ended):
        L.Trainer(strategy=strategy, devices=1, accumulate_grad_batches=2, **QUIET).fit(module)
    return module.steps // 2


def with_loop(config: dict[str, Any]) -> int:
    module = Module()
    keys = {**config, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}
    # Not made yet: with tensor ranks parameters are replaced when the model is cut.
    engine, *_ = lt_zero.initialize(model=module.net, optimizer=lambda ps: torch.optim.AdamW(ps), config=keys)
    try:
        while engine.global_steps < 9:
            engine.backward(engine(torch.randn(5, 300)).square().mean())
            engine.step()
    except Ended:
        engine.destroy()
        return engine.global_steps
    raise AssertionError("the trial did not end")


def with_fabric(config: dict[str, Any]) -> int:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=lt_zero.FabricZeroStrategy(config=config))
    fabric.launch()
    module, steps = Module(), 0
    model, optimizer = fabric.setup(module.net, torch.optim.AdamW(module.parameters()))
    try:
        while steps < 9:
            fabric.backward(model(torch.randn(5, 300)).square().mean())
            steps += 1
            optimizer.step()
    except Ended:
        return steps
    raise AssertionError("the trial did not end")


def _end(code: int) -> None:
    assert code == 0
    raise Ended


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "_exit", _end)
    monkeypatch.setenv("LT_ZERO_TRIAL", str(tmp_path))
    ORDER.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("train", [with_trainer, with_loop, with_fabric])
def test_a_trial(train: Callable[[dict[str, Any]], int], folder: Path) -> None:
    assert train(CONFIG) == STEPS
    report = json.loads((folder / "report.json").read_text())
    assert len(report["seconds"]) == 2
    assert all(0 < seconds < 5 for seconds in report["seconds"])
    assert 0 < report["running"] <= report["peak"]
    assert report["batch"] == (None if train is with_fabric else 5)
    facts = Facts.read(folder / "facts.json")
    assert (facts.device, facts.data_ranks) == ("cpu", 1)
    if there("activation_checkpointing"):
        assert facts.unrepeated == ""
    else:
        assert "activation checkpointing is not installed" in facts.unrepeated
    assert (facts.accumulation, facts.micro) == ((1, None), (2, None), (2, 5))[
        [with_fabric, with_trainer, with_loop].index(train)
    ]
    assert facts.loop is (train is with_loop)
    assert configured(examine(facts.base).usable()) == Setting(2)
    assert "secret" not in (folder / "facts.json").read_text()
    assert 0 < facts.bare < report["peak"]
    assert {plan.setting for plan in facts.plans} == {Setting(0), Setting(2)}, "one rank has nothing to shard"


def _two_ranks(folder: Path) -> None:
    with mock.patch.dict(os.environ, {"LT_ZERO_TRIAL": str(folder)}), mock.patch.object(os, "_exit", _end):
        assert with_loop(CONFIG) == STEPS


def test_plans_of_two_ranks(tmp_path: Path, pool: Pool) -> None:
    """361,200 parameters in one unit: a bucket of 131,072 elements cuts it into its layers."""
    folder = tmp_path  # not the fixture: workers would keep its environment
    ORDER.write(folder)
    pool.run(2, _two_ranks, folder)
    assert len(json.loads((folder / "report.json").read_text())["seconds"]) == 2
    facts = Facts.read(folder / "facts.json")
    assert facts.data_ranks == 2
    plans = {(plan.setting, plan.bucket, plan.accumulates): plan for plan in facts.plans}
    assert all(plan.problem == "" for plan in facts.plans)
    rungs = [*map(Setting, range(4)), Setting(3, releases=True)]
    assert list(dict.fromkeys(plan.setting for plan in facts.plans)) == rungs
    assert {plan.bucket for plan in facts.plans} == {None, 1 << 17}
    needs = [plans[setting, None, True].running for setting in rungs]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] > max(361_200 * 4 * 4, needs[-1]), "weights, gradients, two moments"
    assert all(plan.most >= plan.running for plan in facts.plans)


@pytest.mark.parametrize(
    ("ranks", "sharing"),
    [
        (128, {"zero_optimization.mics_shard_size=64", "zero_optimization.zero_hpz_partition_size=8"}),
        (64, {"zero_optimization.zero_hpz_partition_size=8"}),
        (32, set()),
    ],
)
def test_plans_of_many_shards(ranks: int, sharing: set[str], tmp_path: Path) -> None:
    """On nodes of eight, those of shard groups and of second copies, in each setting that can have them."""
    skip_without(*("zero_plus_plus" for key in sharing if "hpz" in key))
    with one_of(ranks, torch.device("cpu")) as group:
        group.nodes = [list(range(first, first + 8)) for first in range(0, ranks, 8)]
        net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
        made = lt_zero.ZeroConfig.of({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
        engine = lt_zero.shard(net, made, torch.device("cpu"), group=group)
        lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(net.parameters()))
        plans = tuple(plans_of(engine, made, False, None))
        inexact = tuple(choice.keys for choice in choices_of(engine, made) if not choice.exact)
    assert {key for plan in plans for key in plan.sharing} == sharing
    assert not any(plan.problem for plan in plans)
    assert inexact == ((("communication_data_type=bf16",),) if ranks >= 64 else ())
    least = {(plan.setting, plan.sharing): plan.running for plan in plans if plan.bucket is None}
    for key in sharing:
        stages = {setting.stage for setting, keys in least if key in keys}
        assert stages == ({3} if "hpz" in key else {1, 2, 3})
        assert least[Setting(3), (key,)] > least[Setting(3), ()], "more is kept"
    told = Facts("cpu", ranks, {}, None, 1, False, 0, "", plans, rounding=inexact)
    told.write(tmp_path / "facts.json")
    assert Facts.read(tmp_path / "facts.json") == told


RULES = [
    {"patterns": [r".*[02]\.0\.weight"], "partition_type": "column"},
    {"patterns": [r".*[13]\.0\.weight"], "partition_type": "row"},
]
CUT: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},  # weights are released
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": RULES}},
}


def _tensor_ranks(folder: Path) -> None:
    with mock.patch.dict(os.environ, {"LT_ZERO_TRIAL": str(folder)}), mock.patch.object(os, "_exit", _end):
        assert with_loop(CUT) == STEPS


def test_plans_of_tensor_ranks(tmp_path: Path, pool: Pool) -> None:
    """They are what ``estimate`` says of the module before it is cut; two ranks see the same samples."""
    ORDER.write(tmp_path)
    pool.run(2, _tensor_ranks, tmp_path)
    facts = Facts.read(tmp_path / "facts.json")
    assert facts.data_ranks == 1
    assert facts.base["tensor_parallel"]["autotp_size"] == 2
    known = [plan for plan in facts.plans if plan.bucket is None]
    assert {plan.setting for plan in known} == {*map(Setting, range(4)), Setting(3, releases=True)}
    for plan in known:
        made = plan.setting.of(lt_zero.ZeroConfig.of(CUT))
        cast = lt_zero.estimate(
            Module().net, made, 2, device="cpu", accumulate_grad_batches=1 + plan.accumulates, saves=False
        )
        needs = {phase: sum(cast.need_of_rank(phase, "host", first=True).values()) for phase in cast.phases}
        assert (plan.problem, plan.most) == ("", max(needs.values()))
        assert plan.running == max(nbytes for phase, nbytes in needs.items() if phase != "build")


STAGED: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 12, "pipeline": {"stages": 2}}


def _stages(folder: Path) -> None:
    lt_zero.init_distributed()
    with mock.patch.dict(os.environ, {"LT_ZERO_TRIAL": str(folder)}), mock.patch.object(os, "_exit", _end):
        net = PipelineModule(specs(), num_stages=2, loss_fn=mean_loss)
        engine, *_ = lt_zero.initialize(model=net, optimizer=lambda ps: torch.optim.AdamW(ps), config=STAGED)
        engine.set_dataiterator(batch(step, 0, rows=2) for step in range(6 * STEPS))
        for _ in range(STEPS - 1):
            engine.train_batch()
        with pytest.raises(Ended):
            engine.train_batch()
        assert engine.global_steps == STEPS
        engine.destroy()


def test_plans_of_stages(tmp_path: Path, pool: Pool) -> None:
    """They are what ``estimate`` says of the stage that needs most; 12 samples per step are 6 micro-batches."""
    ORDER.write(tmp_path)
    pool.run(2, _stages, tmp_path)
    facts = Facts.read(tmp_path / "facts.json")
    assert (facts.data_ranks, facts.micro, facts.accumulation, facts.layers) == (1, 2, 6, len(specs()))
    base = examine(facts.base).usable()
    assert base.micro_batches == 6
    known = {plan.setting: plan for plan in facts.plans if plan.bucket is None and plan.accumulates}
    assert set(known) == {*map(Setting, range(4)), Setting(3, releases=True)}
    stages = stages_of_module(lambda: Pipeline(specs(), mean_loss), base, world=2)
    for setting, plan in known.items():
        casts = [lt_zero.estimate(stage, setting.of(base), 2, device="cpu", saves=False) for stage in stages]
        needs = [
            {phase: sum(cast.need_of_rank(phase, "host", first=True).values()) for phase in cast.phases}
            for cast in casts
        ]
        assert (plan.problem, plan.most) == ("", max(max(of_stage.values()) for of_stage in needs))
        running = [nbytes for of_stage in needs for phase, nbytes in of_stage.items() if phase != "build"]
        assert plan.running == max(running)


def test_only_the_first_run_plans(folder: Path) -> None:
    Order(warmup=0, steps=1).write(folder)
    assert with_loop(CONFIG) == 2
    assert not (folder / "facts.json").exists()


def test_overrides_of_the_environment_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_OVERRIDES", "zero_optimization.stage=1 gradient_clipping=0.5")
    said = "LT_ZERO_OVERRIDES in the environment sets zero_optimization.stage, gradient_clipping"
    with pytest.warns(ConfigWarning, match=said):
        strategy = lt_zero.ZeroStrategy(stage=3, overrides=["gradient_clipping=2.0"])
    assert (strategy.stage, strategy.config.gradient_clipping) == (1, 0.5)
    with pytest.warns(ConfigWarning, match=said):
        assert lt_zero.FabricZeroStrategy(config=lt_zero.ZeroConfig(stage=2)).config.zero_optimization.stage == 1
    with pytest.warns(ConfigWarning, match=said):
        engine, *_ = lt_zero.initialize(model=nn.Linear(2, 2), config={"zero_optimization": {"stage": 3}})
    assert engine.zero_optimization_stage() == 1
    assert lt_zero.ZeroConfig.of({"zero_optimization": {"stage": 2}}).zero_optimization.stage == 2, "no run"
    monkeypatch.setenv("LT_ZERO_OVERRIDES", "zero_optimization.stages=1")
    with pytest.raises(lt_zero.ConfigError, match="override 'zero_optimization.stages=1'.*Did you mean"):
        lt_zero.ZeroStrategy()


def make_module() -> L.LightningModule:
    return Module()


def make_parts(batch_size: int = 4) -> Any:
    return Module().net, lambda net, batch: net(batch).mean(), lambda: torch.ones(batch_size, 300)


def make_nothing() -> int:
    return 3


def test_functions_make_what_is_trained() -> None:
    assert isinstance(made_by(f"{__name__}:make_module", None, optimizer=False), Module)
    made = made_by(f"{__name__}:make_parts", 7, optimizer=False)
    batch = next(iter(made.train_dataloader()))
    assert batch.shape == (7, 300)
    assert made.training_step(batch, 0).ndim == 0
    assert isinstance(made.configure_optimizers(), torch.optim.AdamW)
    configured_elsewhere = made_by(f"{__name__}:make_parts", None, optimizer=True)
    assert type(configured_elsewhere).configure_optimizers is L.LightningModule.configure_optimizers
    with pytest.raises(TypeError, match="make_nothing returned int, which is not a LightningModule"):
        made_by(f"{__name__}:make_nothing", None, optimizer=False)


SCRIPT = """
import sys
from tests.planning.test_trial import Module, QUIET, L, lt_zero

strategy = lt_zero.ZeroStrategy(config={"zero_optimization": {"stage": 3}})
module = Module()
L.Trainer(strategy=strategy, devices=2, max_steps=50, **QUIET).fit(module)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "script with ranks", "function"])
def test_the_command(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(SCRIPT)
    few = ["--trials", "2", "--rounds", "0", "--warmup", "0", "--steps", "2", "--output", "found.yaml"]
    ranks = [] if how == "script" else ["--ranks", "2"]
    target = f"{__name__}:make_parts" if how == "function" else "train.py"
    done = CliRunner().invoke(app, ["tune", *few, *ranks, "--memory", "8GiB", target])
    assert done.exit_code == 0, done.output
    assert "fastest: " in done.output
    assert "samples" in done.output
    made = yaml.safe_load(Path("found.yaml").read_text())
    strategy = lt_zero.ZeroStrategy(config="found.yaml")
    assert strategy.stage == made["zero_optimization"]["stage"]
    assert f"stage {strategy.stage}" in done.output


TENSOR_SCRIPT = """
from tests.planning.test_trial import CUT, Module, QUIET, L, lt_zero

strategy = lt_zero.ZeroStrategy(config={**CUT, "train_batch_size": 10, "gradient_accumulation_steps": 1})
L.seed_everything(0)  # tensor ranks draw the same samples
L.Trainer(strategy=strategy, devices=4, max_steps=50, **QUIET).fit(Module())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "function"])
def test_the_command_with_tensor_ranks(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's micro-batch has 5 samples: 10 of all data ranks are two of these, and not one of 4 ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(TENSOR_SCRIPT)
    Path("zero.json").write_text(json.dumps(CUT))
    few = ["--trials", "2", "--rounds", "0", "--warmup", "0", "--steps", "2", "--output", "found.yaml"]
    target = ["train.py"]
    if how == "function":
        target = ["--ranks", "4", "--config", "zero.json", f"{__name__}:make_random_parts"]
    done = CliRunner().invoke(app, ["tune", *few, *target])
    assert done.exit_code == 0, done.output
    made = yaml.safe_load(Path("found.yaml").read_text())
    assert made["tensor_parallel"]["autotp_size"] == 2
    assert "samples" in done.output


PIPELINE_SCRIPT = """
import torch
from tests.support.pipeline_module import Module
from tests.planning.test_trial import QUIET, L, lt_zero

strategy = lt_zero.ZeroStrategy(stage=1, pipeline_parallel_size=2)
L.Trainer(strategy=strategy, devices=2, max_epochs=50, **QUIET).fit(Module())
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen runs of two processes each
def test_the_command_with_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches of 8 samples 4 micro-batches are the default, and 2 and 8 are tried, as all schedules are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(PIPELINE_SCRIPT)
    few = ["--rounds", "0", "--warmup", "0", "--steps", "2", "--output", "found.yaml", "--trials", "11"]
    done = CliRunner().invoke(app, ["tune", *few, "--memory", "8GiB", "train.py"])
    assert done.exit_code == 0, done.output
    assert "failed: " not in done.output, done.output
    for said in ("stage 0: ", "stage 3: ", *(f"num_microbatches: {count}" for count in (2, 8))):
        assert said in done.output
    for schedule in ("GPipe", "Interleaved1F1B", "LoopedBFS"):
        assert f"pipeline.schedule: {schedule}" in done.output
    strategy = lt_zero.ZeroStrategy(config="found.yaml")
    assert strategy.config.pipeline.ranks == 2
    done = CliRunner().invoke(app, ["tune", *few, "--micro-batch", "--batch-size {}", "train.py"])
    assert done.exit_code == 1
    assert "pipeline.num_microbatches is tried without it" in done.stderr


@pytest.mark.slow
def test_ranks_that_tensor_ranks_do_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("zero.json").write_text(json.dumps(CUT))
    done = CliRunner().invoke(app, ["tune", "--ranks", "3", "--config", "zero.json", f"{__name__}:make_random_parts"])
    assert done.exit_code == 1
    assert "autotp_size=2 does not divide the 3 ranks" in done.stderr


def make_random_parts() -> Any:
    return Module().net, lambda net, batch: net(batch).mean(), lambda: torch.randn(4, 300)


@pytest.mark.slow
def test_the_command_when_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = CliRunner().invoke(app, ["tune", "--memory", "50MB", "--timeout", "60", f"{__name__}:make_module"])
    assert done.exit_code == 1
    assert not Path("tuned.yaml").exists()
