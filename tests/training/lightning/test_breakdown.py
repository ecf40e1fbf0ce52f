"""Times and memory of real runs, against what is known of them, or was measured some other way."""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_zero import ZeroStrategy
from lt_zero.common import accelerator
from lt_zero.common.phases import PARTS, STAGES, running_clock
from lt_zero.core.stores import direct_file
from lt_zero.planning.limits import peak_rss
from lt_zero.training.lightning.monitor import breakdown
from lt_zero.training.lightning.monitor import timing as clocks
from lt_zero.training.lightning.monitor.breakdown import EVERY, memory_now
from tests.support.fake_time import Time
from tests.support.features import needs
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

CLOCK: dict[str, Any] = {"wall_clock_breakdown": True, "steps_per_print": 1}
pytestmark = pytest.mark.filterwarnings("ignore")


class Slow(torch.autograd.Function):
    """The identity; ``passes`` is called with 20 ms in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passes: Any) -> Tensor:
        ctx.passes = passes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.passes(0.020)
        return grad, None


class Layer(nn.Module):
    """30 ms forward, 20 ms backward."""

    def __init__(self, passes: Any) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 4), passes

    def forward(self, x: Tensor) -> Tensor:
        self.passes(0.030)
        return Slow.apply(self.linear(x), self.passes)  # type: ignore[no-any-return]


class Sgd(torch.optim.SGD):
    """11 ms a step."""

    passes: Any = None

    def step(self, closure: Any = None) -> Any:
        type(self).passes(0.011)
        return super().step(closure)


class Model(pl.LightningModule):
    """Each of ``layers`` takes its time, a batch takes 7 ms, a validation step and the start of a fit seconds."""

    def __init__(self, passes: Any, layers: int = 2, manual: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(passes) for _ in range(layers))
        self.passes, self.manual = passes, manual
        self.automatic_optimization = not manual
        self.walls: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if not self.manual:
            return self.loss(batch)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.passes(0.001)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss) if self.manual == "lightning" else loss.backward()
            optimizer.step()
        self.passes(0.003)
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.passes(10.0)
        self.loss(batch)

    def on_train_start(self) -> None:
        self.passes(5.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.passes(0.005)
        self.walls.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        Sgd.passes = staticmethod(self.passes)
        halves = [layer.parameters() for layer in self.layers] if self.manual else [self.parameters()]
        return [Sgd(parameters, lr=0.01) for parameters in halves]

    def train_dataloader(self) -> Any:
        def collate(rows: list[Tensor]) -> Tensor:
            self.passes(0.007)
            return torch.stack(rows)

        return DataLoader(torch.randn(12, 4), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(2, 4), batch_size=2)  # type: ignore[arg-type]


def fit(model: pl.LightningModule, config: dict[str, Any], stage: int = 3, **options: Any) -> tuple[str, pl.Trainer]:
    """What a run on one process prints."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.pop("zero", {})}
    strategy = ZeroStrategy(config={"zero_optimization": zero, **config})
    trainer = pl.Trainer(**{**QUIET, "devices": 1, "strategy": strategy, "max_epochs": 1, **options})
    with redirect_stdout(io.StringIO()) as text:
        trainer.fit(model)
    return text.getvalue(), trainer


def parsed(text: str) -> list[dict[str, float]]:
    """The lines of times."""
    lines = re.findall(r"^step (\d+), ms per step \(mean of (\d+)\): (.*)$", text, re.MULTILINE)
    found = []
    for number, steps, rest in lines:
        values = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", rest)}
        found.append({"at": int(number), "steps": int(steps), **values})
    return found


def expected(**values: float) -> dict[str, float]:
    names = [f"{kind}_wait" if kind in ("gather", "reduce", "offload") else kind for kind in (*STAGES, *PARTS)]
    made = {**dict.fromkeys(names, 0.0), **values}
    made["total"] = sum(made[kind] for kind in STAGES)
    return made


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time in which nothing passes by itself."""
    time = Time()
    monkeypatch.setattr(clocks, "time", time)
    return time.passes


class Kept(DummyLogger):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None, **_: Any) -> None:
        self.seen += [(step, dict(metrics))] if any(name.startswith("time/") for name in metrics) else []


# ---- times, exactly ------------------------------------------------------------------------------------------------


def test_a_step_is_what_its_phases_take(passes: Any) -> None:
    loggers = [Kept(), Kept()]
    text, _ = fit(Model(passes), dict(CLOCK), logger=loggers, val_check_interval=2, num_sanity_val_steps=1)
    lines = parsed(text)
    assert [line.pop("at") for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line.pop("steps") for line in lines} == {1}
    first, *others = (expected(forward=60, backward=40, step=11, rest=rest) for rest in (0, 12, 12, 12, 12, 12))
    # The first batch came before the first step began; the callback after the last step belongs to no step.
    assert lines == [first, *others]
    for logger in loggers:
        assert [step for step, _ in logger.seen] == [0, 1, 2, 3, 4, 5], "as Lightning counts"
        for line, (_, values) in zip(lines, logger.seen, strict=True):
            assert {f"time/{name}_ms": value for name, value in line.items()} == pytest.approx(values)


def test_accumulation_is_one_step(passes: Any) -> None:
    text, _ = fit(
        Model(passes), {**CLOCK, "steps_per_print": 2, "gradient_accumulation_steps": 3}, accumulate_grad_batches=3
    )
    (line,) = parsed(text)
    assert line == {"at": 2, "steps": 2, **expected(forward=180, backward=120, step=11, rest=(24 + 36) / 2)}


@pytest.mark.parametrize("manual", ["lightning", "torch"])
@pytest.mark.parametrize("stage", [1, 3])
def test_manual_optimization(passes: Any, manual: str, stage: int) -> None:
    text, _ = fit(Model(passes, manual=manual), dict(CLOCK), stage, limit_train_batches=2, limit_val_batches=0)
    lines = parsed(text)
    assert [line.pop("at") for line in lines] == [1, 2, 3, 4]
    assert {line.pop("steps") for line in lines} == {1}
    inside = expected(forward=61, backward=40, step=11)  # from the first optimizer's step to the second's
    assert lines == [inside, inside, expected(forward=64, backward=40, step=11, rest=12), inside]


class Failing(Model):
    """The third of its steps ends half way, and the training goes on in another fit."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            loss.register_hook(self.fail)
        return loss

    def fail(self, grad: Tensor) -> None:
        raise ZeroDivisionError


def test_a_failed_run_leaves_no_clock_and_no_time_to_the_next(passes: Any) -> None:
    model = Failing(passes)
    with pytest.raises(ZeroDivisionError):
        fit(model, dict(CLOCK))
    assert running_clock() is None
    text, _ = fit(model, dict(CLOCK), limit_train_batches=1, limit_val_batches=0)
    (line,) = parsed(text)
    assert line == {"at": 1, "steps": 1, **expected(forward=60, backward=40, step=11)}


def test_every_ten_steps_without_steps_per_print(passes: Any) -> None:
    text, _ = fit(Model(passes, 1), {"wall_clock_breakdown": True}, max_epochs=4, limit_val_batches=0)
    assert [(line["at"], line["steps"]) for line in parsed(text)] == [(EVERY, EVERY), (2 * EVERY, EVERY)]


def test_off_there_is_nothing(passes: Any) -> None:
    logger = Kept()
    text, _ = fit(Model(passes), {"steps_per_print": 1}, logger=logger, limit_train_batches=2)
    assert len(re.findall(r"^step \d", text, re.MULTILINE)) == 2, "steps_per_print has its own"
    assert "ms per step" not in text
    assert "Memory in" not in text
    assert not logger.seen
    assert running_clock() is None


# ---- times, really -------------------------------------------------------------------------------------------------


def test_stages_add_up_to_the_wall(tmp_path: Path) -> None:
    model = Model(lambda seconds: time.sleep(min(seconds, 0.05)), 1)
    logger = CSVLogger(tmp_path)
    text, _ = fit(model, dict(CLOCK), logger=logger, limit_val_batches=0)
    lines = parsed(text)[1:]
    walls = [1e3 * (b - a) for a, b in zip(model.walls, model.walls[1:], strict=False)]
    # A step ends a little before its callback: the sums over several steps agree but for that and the printing.
    assert sum(line["total"] for line in lines) == pytest.approx(sum(walls), rel=0.2)
    for line in lines:
        assert sum(line[kind] for kind in STAGES) == pytest.approx(line["total"], abs=0.3)
        assert line["forward"] >= 29.5
        assert line["backward"] >= 19.5
        assert line["step"] >= 10.5
        assert line["rest"] >= 11.5
    assert "time/forward_ms" in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]


@needs("offload")
def test_slow_files_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_some, slept = direct_file.read_some, []

    def slowly(*args: Any) -> int:
        slept.append(0.025)
        time.sleep(0.025)
        return read_some(*args)

    monkeypatch.setattr(direct_file, "read_some", slowly)
    optim = {"device": "nvme", "nvme_path": str(tmp_path), "overlap_step": False, "pipeline_read": False}
    model = Model(lambda seconds: None, 2)
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters())  # type: ignore[method-assign]
    before = len(slept)
    text, _ = fit(model, {**CLOCK, "zero": {"offload_optimizer": optim}}, max_steps=2, limit_val_batches=0)
    assert len(slept) > before
    line = parsed(text)[1]
    assert line["offload_wait"] >= 45, "two units' states are read one after the other"
    assert line["offload_wait"] <= line["step"] + line["backward"] + 0.2
    assert line["step"] >= 45


LATE = 0.25  # seconds, far more than what a busy machine adds


class Straggler(Model):
    """Rank 1 sleeps before each backward or forward, or in each step."""

    def __init__(self, where: str) -> None:
        super().__init__(lambda seconds: None, 3)
        self.where, self.begun = where, False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.where == "forward" and dist.get_rank() == 1:
            time.sleep(LATE)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.where == "step" and dist.get_rank() == 1:
            self.passes = lambda seconds: time.sleep(LATE if self.begun and seconds == 0.011 else 0)
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.begun = True  # set-up has tried what the optimizer does, step by step

    def on_before_backward(self, loss: Tensor) -> None:
        if self.where == "backward" and dist.get_rank() == 1:
            time.sleep(LATE)


def _straggle(stage: int, where: str) -> Any:
    os.environ.update(torchrun_env())
    seen: list[Any] = []

    def line(number: int, times: Any) -> str:
        seen.append((number, times))
        return kept(number, times)

    kept, breakdown.time_line = breakdown.time_line, line
    try:
        text, _ = fit(Straggler(where), dict(CLOCK), stage, devices=2, max_steps=3, limit_val_batches=0)
    finally:
        breakdown.time_line = kept
    return text, seen


@pytest.mark.parametrize(
    ("stage", "where"), only_rows([(3, "forward")], [(1, "backward"), (3, "backward"), (3, "forward")])
)
def test_a_slow_rank_is_waited_for_and_named(pool: Pool, stage: int, where: str) -> None:
    (text, seen), (silent, theirs) = pool.run(2, _straggle, stage, where)
    assert not parsed(silent)
    assert seen == theirs, "both know the times of both"
    assert [line["at"] for line in parsed(text)] == [1, 2, 3]
    assert len(re.findall(r"slowest rank 1: ", text)) >= 2
    for _, (fast, slow) in seen[1:]:  # the first step has waits of its own
        waits = [sum(t.seconds.get(part, 0.0) for part in ("gather", "reduce")) for t in (fast, slow)]
        assert waits[0] >= LATE / 2, "rank 0 waits for rank 1"
        assert waits[0] - waits[1] >= LATE / 4
        assert slow.seconds[where] >= LATE
        assert fast.seconds["reduce" if stage == 1 else "backward"] >= (LATE / 2 if where == "backward" else 0.0)
        totals = [sum(t.seconds[stage] for stage in STAGES) for t in (fast, slow)]
        assert totals[0] == pytest.approx(totals[1], abs=LATE / 2)


class Rows(DummyLogger):
    """Keeps all metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None, **_: Any) -> None:
        self.rows.append(metrics)


def _late(where: str) -> tuple[str, list[dict[str, float]]]:
    os.environ.update(torchrun_env())
    logger = Rows()
    text, _ = fit(
        Straggler(where), {"steps_per_print": 2}, 2, devices=2, max_steps=2, limit_val_batches=0, logger=logger
    )
    return text, [row for row in logger.rows if "zero/late_rank" in row]


@pytest.mark.parametrize("where", only(["backward"], ["forward", "backward", "step"]))
def test_the_late_rank_is_named_with_its_host(pool: Pool, where: str) -> None:
    (text, rows), (silent, _) = pool.run(2, _late, where)
    found = re.findall(rf"late at step (\d): the others wait .* for rank 1 on host {socket.gethostname()}$", text, re.M)
    assert found == ["2"]
    assert "late" not in silent
    assert [row["zero/late_rank"] for row in rows] == [1]
    assert all(row["zero/lateness_ms"] >= LATE * 1e3 / 2 for row in rows)


@pytest.mark.parametrize("stage", only([2], [2, 3]))
def test_a_rank_that_is_slow_in_its_step_is_waited_for_and_named(pool: Pool, stage: int) -> None:
    (text, seen), _ = pool.run(2, _straggle, stage, "step")
    assert len(re.findall(r"slowest rank 1: ", text)) == 3
    for _, (fast, slow) in seen[1:]:
        assert slow.seconds["step"] >= LATE
        totals = [sum(t.seconds[stage] for stage in STAGES) for t in (fast, slow)]
        assert totals[0] >= LATE / 2, "rank 0 waits when weights are published, or when times are told"


# ---- memory --------------------------------------------------------------------------------------------------------


class Growing(Model):
    """Holds 64 MB more from each forward on; remembers what psutil says there and what its states take."""

    def __init__(self) -> None:
        super().__init__(lambda seconds: None)
        self.held: list[Tensor] = []
        self.rss: list[float] = []
        self.states: list[float] = []
        self.wide = nn.Linear(256, 1024, bias=False)  # 1 MB

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.wide(torch.ones(1, 256)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.rss.append(psutil.Process().memory_info().rss / 1e6)
        self.held.append(torch.ones(16 << 20))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rss.append(psutil.Process().memory_info().rss / 1e6)
        self.states.append(self.trainer.strategy.memory_report()["optimizer"][0] / 1e6)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def cells(text: str) -> list[tuple[int, dict[str, list[float]]]]:
    """The tables: the step, and the numbers of each row."""
    found = []
    for title, table in re.findall(r"at step (\d+), rank 0(.*?)└", text, re.DOTALL):
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
        found.append((int(title), {row[0]: [float(cell.replace(",", "")) for cell in row[1:]] for row in rows}))
    return found


def test_memory_of_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    model = Growing()
    text, _ = fit(model, {"memory_breakdown": True, "steps_per_print": 2}, limit_train_batches=3, limit_val_batches=0)
    tables = dict(cells(text))
    assert list(tables) == [1, 2], "the first, and every second"
    for step, rows in tables.items():
        assert list(rows) == ["before forward", "after forward", "after backward", "after step"]
        before, after = model.rss[2 * step - 2], model.rss[2 * step - 1]
        process = {moment: row[0] for moment, row in rows.items()}
        assert process["before forward"] == pytest.approx(before, abs=20)
        assert process["after step"] == pytest.approx(after, abs=20)
        assert process["after forward"] - process["before forward"] == pytest.approx(64 * 1.048576, abs=25)
        assert all(row[1] >= row[0] for row in rows.values()), "the peak"
        states = [row[4] for row in rows.values()]
        assert states[-1] == pytest.approx(model.states[step - 1], abs=0.06)
        assert states[-1] == pytest.approx(2 * 256 * 1024 * 4 / 1e6, rel=0.05), "two moments"
        assert (states[0] == 0) == (step == 1), "before the first step there are none"
        assert rows["after backward"][3] == pytest.approx(256 * 1024 * 4 / 1e6, rel=0.05), "gradients"


def test_memory_of_the_last_micro_batch_and_of_manual_optimization() -> None:
    model = Model(lambda seconds: None)
    text, _ = fit(model, {"memory_breakdown": True}, accumulate_grad_batches=3, max_epochs=5, limit_val_batches=0)
    assert [(step, len(rows)) for step, rows in cells(text)] == [(1, 4), (10, 4)]
    assert len(cells(text)[0][1]["after step"]) == 5
    text, _ = fit(Model(lambda seconds: None, manual="lightning"), {"memory_breakdown": True, "steps_per_print": 2})
    assert [step for step, _ in cells(text)] == [1, 2, 4, 6, 8, 10, 12]
    assert {frozenset(rows) for _, rows in cells(text)[2:]} == {
        frozenset({"before forward", "after forward", "after backward", "after step"})
    }


def test_the_peak_stays_when_memory_is_given_back() -> None:
    held = torch.ones(16 << 20)
    high = memory_now(torch.device("cpu"))["process"]
    del held
    now = memory_now(torch.device("cpu"))
    assert peak_rss() >= high - (8 << 20)
    assert now["process"] < high - (32 << 20)
    assert now["process, peak"] >= high - (8 << 20)
    assert now["process"] == pytest.approx(psutil.Process().memory_info().rss, abs=16 << 20)


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("allocated", "peak_allocated", "reserved"), 1):
        monkeypatch.setattr(accelerator, name, lambda device, number=number: number if device.index == 3 else None)
    found = memory_now(torch.device("cuda", 3))
    assert list(found.items())[:3] == [("allocated", 1), ("allocated, peak", 2), ("reserved", 3)]


# ---- ranges in torch's profilers -----------------------------------------------------------------------------------


def ranges(profile: Any) -> Counter[str]:
    return Counter(event.name for event in profile.events() if event.name.startswith("lt_zero."))


def _profiled(stage: int) -> Any:
    os.environ.update(torchrun_env())
    model = Model(lambda seconds: None)
    zero = {"stage3_max_reuse_distance": 0}
    options: dict[str, Any] = {"max_steps": 1, "limit_val_batches": 0, "gradient_clip_val": 1.0}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fit(model, {"zero": zero}, stage, devices=2, **options)
    events = {event.name: event for event in profile.events()}
    spans = {name: (e.time_range.start, e.time_range.end) for name, e in events.items() if name.startswith("lt_zero.")}
    return ranges(profile), spans


def test_ranges_are_named_after_units_and_phases(pool: Pool) -> None:
    for counts, spans in pool.run(2, _profiled, 3):
        for number in range(2):
            unit = f"layers.{number}"
            assert counts[f"lt_zero.forward: {unit}"] == counts[f"lt_zero.backward: {unit}"] == 1
            assert counts[f"lt_zero.reduce: {unit}"] == 1
            assert counts[f"lt_zero.gather: {unit}"] >= 2, "in forward and in backward"
        for name in ("forward", "backward", "step", "publish"):
            assert counts[f"lt_zero.{name}"] == 1
        assert counts["lt_zero.clip"] >= 1
        for inner, outer in [
            *((f"{kind}: layers.{number}", kind) for kind in ("forward", "backward") for number in (0, 1)),
            *(("publish", "step"), ("clip", "step")),
        ]:
            (a, b), (c, d) = spans[f"lt_zero.{inner}"], spans[f"lt_zero.{outer}"]
            assert c <= a < b <= d, (inner, outer)
        forward = [spans[f"lt_zero.forward: layers.{number}"] for number in (0, 1)]
        backward = [spans[f"lt_zero.backward: layers.{number}"] for number in (1, 0)]
        for first, second in (forward, backward):
            assert first[1] <= second[0]


def test_ranges_in_lightnings_profiler(tmp_path: Path) -> None:
    from lightning.pytorch.profilers import PyTorchProfiler

    profiler = PyTorchProfiler(tmp_path, filename="p", export_to_chrome=False, schedule=None)
    model = Model(lambda seconds: None)
    fit(model, {}, 1, profiler=profiler, max_steps=2, limit_val_batches=0)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    for name in ("lt_zero.forward", "lt_zero.backward", "lt_zero.step"):
        assert name in text


class Cut(nn.Module):
    """Fails half way in forward."""

    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_ranges_end_with_an_exception() -> None:
    model = Model(lambda seconds: None)
    model.layers[1].add_module("linear", nn.Sequential(nn.Linear(4, 4), Cut()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(ZeroDivisionError) as error:  # which keeps what the forward had made
            fit(model, {}, max_steps=1, limit_val_batches=0)
        with torch.profiler.record_function("after"):
            pass
        del error
    ends = {event.name: event.time_range.end for event in profile.events()}
    for name in ("lt_zero.forward", "lt_zero.forward: layers.1"):
        assert ends[name] <= ends["after"]
