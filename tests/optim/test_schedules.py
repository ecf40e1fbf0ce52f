"""DeepSpeed's schedules: its rates, on any groups, resumed anywhere, and under the Trainer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lt_zero.optim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, build_scheduler
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.paths import DATA
from tests.support.pool import Pool

RECORDED = DATA / "deepspeed_schedules.json"
STEPS = [0, 1, 2, 5, 10, 11, 15, 21, 30, 49, 60]
# Rates of DeepSpeed 0.19.8 with AdamW(lr=1e-3) after so many steps, as they were observed.
RATES: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 5},
        [1e-4, 0.00017142857142857143, 0.00024285714285714286, 0.00045714285714285713, 0.0008142857142857142]
        + [0.0008857142857142858, 0.0011714285714285713, 0.0016, 0.002242857142857143, 0.0036, 0.004385714285714285],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 7,
            "lr_range_test_step_rate": 2.5,
            "lr_range_test_staircase": True,
        },
        [1e-4, 1e-4, 1e-4, 1e-4, 0.00035, 0.00035, 0.0006, 0.00085, 0.0011, 0.00185, 0.0021],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 10,
            "cycle_second_step_size": 20,
            "decay_lr_rate": 0.1,
            "decay_step_size": 5,
            "cycle_max_mom": 0.95,
            "decay_mom_rate": 0.05,
        },
        [1e-4, 0.00109, 0.00208, 0.00505, 0.01, 0.009505, 0.007525, 0.004555, 1e-4, 7.246376811594204e-05, 6.25e-05],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 12,
            "cycle_first_stair_count": 4,
            "cycle_second_step_size": 12,
            "cycle_second_stair_count": 3,
        },
        [1e-4, 1e-4, 1e-4, 0.002575, 0.007525, 0.007525, 0.0067, 1e-4, 1e-4, 1e-4, 1e-4],
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": 0.001, "warmup_num_steps": 20},
        [0, 0, 0.00023137821315975918, 0.0005372435736804816, 0.000768621786840241, 0.0008004371064686714]
        + [0.0009039693650225663, 0.001, 0.001, 0.001, 0.001],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-5, "warmup_num_steps": 20, "warmup_type": "linear"},
        [1e-5, 1e-5, 5.95e-05, 0.000208, 0.0004555, 0.000505, 0.000703, 0.001, 0.001, 0.001, 0.001],
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, [0, 0, *[0.001] * 9]),
    (
        "WarmupDecayLR",
        {"total_num_steps": 50, "warmup_num_steps": 10},
        [0, 0, 0.00030102999566398113, 0.0006989700043360187, 0.001, 0.001, 0.0009, 0.00075, 0.000525, 5e-05, 0],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 50, "warmup_num_steps": 10},
        [0, 0, 0.00030102999566398113, 0.0006989700043360187, 0.001, 0.0009984588209998775, 0.0009619435722790178]
        + [0.0008247415517626752, 0.00050005, 1.6411790001226746e-06, 1e-07],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 50,
            "warmup_min_ratio": 0.1,
            "warmup_num_steps": 10,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
        [0, 0.0001, 0.00019, 0.00046, 0.00091, 0.000998535733523236, 0.0009638427779428612, 0.0008334878229568372]
        + [0.000525, 5.146426647676422e-05, 5e-05],
    ),
]


def make_optimizer(*rates: float, cls: type[AdamW] | type[SGD] = AdamW) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (1e-3,)]
    return cls(groups, lr=0.5)


def rates_of(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def run(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """What each of ``steps`` optimizer steps sees, and what the next one would."""
    seen = [rates_of(optimizer)]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == rates_of(optimizer)
        seen.append(rates_of(optimizer))
    return seen


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "params", "expected"), RATES, ids=[f"{c[0]}-{i}" for i, c in enumerate(RATES)])
def test_rates_of_deepspeed(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    optimizer = make_optimizer()
    seen = run(optimizer, build_scheduler(kind, params, optimizer), 60)
    assert [seen[i][0] for i in STEPS] == pytest.approx(expected, rel=0, abs=1e-12)


def test_all_recorded_rates() -> None:
    for case in json.loads(RECORDED.read_text())["cases"]:
        optimizer = make_optimizer(case["optimizer_lr"])
        scheduler = build_scheduler(case["type"], case["params"], optimizer)
        for rate, beta in zip(case["lr"], case["beta1"], strict=True):
            assert rates_of(optimizer) == pytest.approx([rate], rel=0, abs=1e-12), case
            assert optimizer.param_groups[0]["betas"][0] == pytest.approx(beta, rel=0, abs=1e-12), case
            optimizer.step()
            scheduler.step()


def test_momentum_runs_against_the_rate() -> None:
    optimizer = make_optimizer(1e-3, 1e-3)
    scheduler = OneCycle(
        optimizer, 1e-4, 1e-2, cycle_first_step_size=10, cycle_second_step_size=20, cycle_max_mom=[0.95, 0.9]
    )
    seen = []
    for _ in range(35):
        seen.append([group["betas"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    expected = {0: (0.8, 0.8), 1: (0.935, 0.89), 5: (0.875, 0.85), 10: (0.8, 0.8), 20: (0.875, 0.85), 30: (0.95, 0.9)}
    for step, (one, other) in expected.items():
        for beta, (first, second) in zip((one, other), seen[step], strict=True):
            assert (first, second) == (pytest.approx(beta), 0.99), step
    assert seen[34] == [(0.95, 0.99), (0.9, 0.99)], "decay_step_size=0 is no decay"


def test_a_cycle_of_broken_length_ends_where_deepspeeds_does() -> None:
    optimizer = make_optimizer()
    seen = run(optimizer, OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2.25, cycle_momentum=False), 6)
    places = [0, 1, 2, 1.5, 0.5, 0.5, 0]  # of 2.25 up; the fifth step is within a second cycle
    assert [rate for (rate,) in seen] == pytest.approx([0.1 + 0.9 * place / 2.25 for place in places], abs=1e-12)


def test_momentum_needs_betas() -> None:
    optimizer = make_optimizer(cls=SGD)
    with pytest.warns(UserWarning, match="cycle_momentum=True, but SGD has no betas"):
        scheduler = OneCycle(optimizer, 0.1, 0.2)
    run(optimizer, scheduler, 1)
    assert "betas" not in optimizer.param_groups[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OneCycle(make_optimizer(cls=SGD), 0.1, 0.2, cycle_momentum=False)


def test_each_group_has_its_rates() -> None:
    optimizer = make_optimizer(1e-3, 4e-3)
    assert run(optimizer, WarmupLR(optimizer, [0.0, 1e-3], None, 10, "linear"), 11)[6::5] == [
        pytest.approx([0.5e-3, 2.5e-3]),
        pytest.approx([1e-3, 4e-3]),
    ]
    optimizer = make_optimizer(1e-3, 4e-3)
    last = run(optimizer, WarmupCosineLR(optimizer, 20, warmup_num_steps=5, cos_min_ratio=0.1), 30)[-1]
    assert last == pytest.approx([1e-4, 4e-4])
    for make in (
        lambda lrs: WarmupLR(make_optimizer(1.0, 1.0), lrs),
        lambda lrs: LRRangeTest(make_optimizer(1.0, 1.0), lrs),
        lambda lrs: OneCycle(make_optimizer(1.0, 1.0), 0.1, lrs),
    ):
        with pytest.raises(ValueError, match="has 3 values for 2 parameter groups"):
            make([0.1, 0.2, 0.3])


def test_goes_on_behind_an_iteration() -> None:
    """As in DeepSpeed: the optimizer keeps its rate (a checkpoint's) until the first step."""
    whole = make_optimizer()
    seen = run(whole, WarmupDecayLR(whole, 20, warmup_num_steps=5), 20)
    late = make_optimizer()
    rest = run(late, WarmupDecayLR(late, 20, warmup_num_steps=5, last_batch_iteration=7), 12)
    assert rest == [[1e-3], *seen[9:]]
    with pytest.raises(ValueError, match="last_batch_iteration=-2"):
        WarmupLR(make_optimizer(), last_batch_iteration=-2)


@pytest.mark.parametrize(("kind", "params", "expected"), RATES, ids=[f"{c[0]}-{i}" for i, c in enumerate(RATES)])
def test_resumes_bitwise(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    def groups(optimizer: Optimizer) -> list[Any]:
        return [(group["lr"], group["betas"]) for group in optimizer.param_groups]

    first = make_optimizer(1e-3, 2e-3)
    scheduler = build_scheduler(kind, params, first)
    run(first, scheduler, 13)
    state = json.loads(json.dumps(scheduler.state_dict()))
    assert set(state) == {"last_epoch", "last_lr"}, "no parameters: the configuration has them"
    second = make_optimizer(1e-3, 2e-3)
    again = build_scheduler(kind, params, second)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(state)
    assert again.get_last_lr() == scheduler.get_last_lr()
    third = make_optimizer(1e-3, 2e-3)
    of_deepspeed = build_scheduler(kind, params, third)
    third.load_state_dict(first.state_dict())
    of_deepspeed.load_state_dict({"last_batch_iteration": 12})
    assert of_deepspeed.get_last_lr() == scheduler.get_last_lr()
    for _ in range(30):
        assert groups(first) == groups(second) == groups(third)
        for optimizer, its in ((first, scheduler), (second, again), (third, of_deepspeed)):
            optimizer.step()
            its.step()
    with pytest.raises(ValueError, match="this one has .*'foo'"):
        again.load_state_dict({"foo": 1})


def test_the_configuration_says_how_it_goes_on() -> None:
    first, second = make_optimizer(), make_optimizer()
    state = WarmupDecayLR(first, 20, warmup_num_steps=5).state_dict()
    longer = WarmupDecayLR(second, 105, warmup_num_steps=5)
    longer.load_state_dict({**state, "last_epoch": 55})
    assert run(second, longer, 1)[-1] == pytest.approx([5e-4])


def test_rates_in_tensors_stay_tensors() -> None:
    rate = torch.tensor(1e-3)
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate)
    run(optimizer, WarmupCosineLR(optimizer, 50, warmup_num_steps=10), 30)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.00050005)


def test_values_out_of_range() -> None:
    for cls, params, match in (
        (WarmupLR, {"warmup_num_steps": 0}, "warmup_num_steps=0: write"),
        (WarmupLR, {"warmup_type": "cosine"}, "warmup_type='cosine': write log or linear"),
        (WarmupCosineLR, {"total_num_steps": -1}, "total_num_steps=-1"),
        (LRRangeTest, {"lr_range_test_step_size": 0}, "lr_range_test_step_size=0"),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_second_step_size": -1}, "cycle_second_step_size"),
    ):
        made: Any = cls
        with pytest.raises(ValueError, match=match):
            made(make_optimizer(), **params)
    with pytest.warns(UserWarning, match="total_num_steps=5 is less than warmup_num_steps=10"):
        WarmupDecayLR(make_optimizer(), 5, warmup_num_steps=10)


class Scheduled(GPT):
    """Notes the rate that each optimizer step sees."""

    def configure_optimizers(self) -> Any:
        self.seen = []
        optimizer = AdamW(self.parameters(), lr=1e-3)
        scheduler = WarmupDecayLR(optimizer, 12, warmup_num_steps=4, warmup_type="linear")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def _train(folder: str) -> tuple[list[float], list[float], list[float]]:
    def fit(steps: int, **options: Any) -> tuple[Any, list[float]]:
        module = Scheduled(2)
        trainer = sharded_trainer(2, max_epochs=9, max_steps=steps, limit_val_batches=0)
        trainer.fit(module, **options)
        return trainer, module.seen

    _, whole = fit(10)
    trainer, first = fit(5)
    trainer.save_checkpoint(f"{folder}/five.ckpt")
    return whole, first, fit(10, ckpt_path=f"{folder}/five.ckpt")[1]


def test_under_the_trainer(pool: Pool, tmp_path: Path) -> None:
    for whole, first, rest in pool.run(2, _train, str(tmp_path)):
        assert whole == pytest.approx([0, 0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 8.75e-4, 7.5e-4, 6.25e-4, 5e-4], abs=1e-12)
        assert first + rest == whole, "bitwise"
