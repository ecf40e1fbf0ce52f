"""The loss scale moves exactly as DeepSpeed's does: traces observed on DeepSpeed 0.19.8."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lt_zero.common.errors import CheckpointError
from lt_zero.core.engine.dtypes import ScalerRules
from lt_zero.core.step.loss_scaler import LossScaler
from tests.support.paths import DATA

TRACES: list[dict[str, Any]] = json.loads((DATA / "loss_scale_traces.json").read_text())["traces"]


def rules_of(trace: dict[str, Any]) -> ScalerRules:
    return ScalerRules(
        initial=trace["initial_scale"],
        window=trace["loss_scale_window"],
        hysteresis=trace["hysteresis"],
        consecutive_hysteresis=trace["consecutive_hysteresis"],
        minimum=trace["min_loss_scale"],
    )


def replay(scaler: LossScaler, trace: dict[str, Any], start: int = 0) -> None:
    raised = trace["raised"]["step"] if trace["raised"] else None
    for step, overflow in enumerate(trace["overflow"]):
        if step < start:
            continue
        fine = scaler.update(bool(overflow))
        if trace["raise_error_at_min_scale"] and not fine:
            assert step == raised
            return
        assert scaler.scale == trace["scale_after"][step], f"after step {step}"
    assert raised is None


@pytest.mark.parametrize("number", range(len(TRACES)))
def test_deepspeed_traces(number: int) -> None:
    replay(LossScaler(rules_of(TRACES[number])), TRACES[number])


@pytest.mark.parametrize("number", range(0, len(TRACES), 7))
def test_state_survives_a_restart_at_any_step(number: int) -> None:
    trace = TRACES[number]
    for cut in range(0, len(trace["overflow"]), 9):
        before = LossScaler(rules_of(trace))
        for overflow in trace["overflow"][:cut]:
            before.update(bool(overflow))
        after = LossScaler(rules_of(trace))
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        replay(after, trace, start=cut)


def test_static_scale_stays() -> None:
    scaler = LossScaler(ScalerRules(initial=128.0, dynamic=False))
    assert all(scaler.update(overflow) for overflow in (True, False, True, True))
    assert scaler.scale == 128.0
    assert not scaler.at_minimum


@pytest.mark.parametrize("scale", ["nan", "inf", 0.0, -1.0])
def test_a_saved_scale_that_is_none_is_refused(scale: Any) -> None:
    scaler = LossScaler(ScalerRules(16.0))
    with pytest.raises(CheckpointError, match="has the loss scale"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": float(scale)})
    assert scaler.scale == 16.0
