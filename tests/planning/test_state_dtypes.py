"""States of a model for each choice of dtypes: forecasts against engines, and the table of the command."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import lt_zero
from lt_zero import Sizes, ZeroConfig, estimate
from lt_zero.cli import app
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.engine.storage_plan import HOST, NVME
from lt_zero.planning.check import RESTING, measured
from lt_zero.planning.forecast import GRADS, MASTER, MOMENTS, REDUCE, STATES, WEIGHTS
from lt_zero.planning.state_dtypes import CHOICES, StateDtypes
from tests.support.features import needs, there
from tests.support.pool import Pool

WIDTH, ADAPTER, LAYERS = 128, 16, 4
# Those whose feature is installed.
INSTALLED = [choice for choice in CHOICES if there("quantize") or "quantize=" not in repr(choice.overrides)]
OF_LAYER = WIDTH * WIDTH, WIDTH * ADAPTER  # parameters: of the matrix, of its adapter


class SizedLayer(nn.Module):
    """A matrix, and beside it an adapter if it is frozen; no more than ``Sizes`` know."""

    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.adapter = nn.Parameter(torch.zeros(WIDTH, ADAPTER)) if adapted else None
        if adapted:
            self.base.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        return out if self.adapter is None else out + (x @ self.adapter).repeat(1, WIDTH // ADAPTER)


def _config(choice: StateDtypes, stage: int, path: str) -> ZeroConfig:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 500}
    if path:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": path}
    given = ["bf16.enabled=true", *choice.overrides, f"zero_optimization.stage={stage}"]
    return ZeroConfig.of({"zero_optimization": zero}, overrides=given)


def _compare(stage: int, path: str) -> None:
    for choice in INSTALLED:
        if stage < choice.least:
            continue
        config = _config(choice, stage, path)
        total, adapters = OF_LAYER[0] * LAYERS, OF_LAYER[1] * LAYERS * choice.adapted
        sizes = Sizes(total, OF_LAYER[0], adapters=adapters)
        cast = estimate(sizes, config, dist.get_world_size(), device="cpu")
        model = nn.Sequential(*(SizedLayer(choice.adapted) for _ in range(LAYERS)))
        engine = lt_zero.shard(model, config, policy=dtype_policy(config, resolve_mode(config, "32-true")))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        sharded = lt_zero.ShardedOptimizer(engine, optimizer)
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        have, case = measured(engine, [sharded]), (choice.name, stage, path)
        for kind in (WEIGHTS, MASTER, GRADS, MOMENTS):
            got, want = have.get(kind, 0), cast.kinds(HOST).get(kind, 0)
            assert abs(got - want) <= 0.02 * max(got, want), (*case, kind, got, want)
        assert have.get(RESTING, 0) == cast.model_states(NVME), case
        if choice.least == 3:
            assert have[REDUCE] < OF_LAYER[0] * 2, (case, "codes are never sent as gradients")
        kept = sum(have.get(kind, 0) for kind in STATES)
        assert kept == pytest.approx(cast.model_states(HOST), rel=0.02), case
        engine.offload_manager.close()


@needs("low_bit_states", "offload", "quantize")
def test_states_are_those_of_an_engine(pool: Pool, tmp_path: Any) -> None:
    pool.run(2, _compare, 1, "")
    pool.run(2, _compare, 3, "")
    pool.run(2, _compare, 3, str(tmp_path))


def _table(*arguments: str) -> tuple[dict[str, list[str]], str]:
    """The cells of each row, and all that is printed."""
    done = CliRunner().invoke(app, ["estimate", "--dtypes", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    found = {}
    for line in done.output.splitlines():
        for choice in CHOICES:
            if line.strip().startswith(f"{choice.name} "):
                found[choice.name] = (
                    line.strip().removeprefix(choice.name).replace(" GB", "").replace(" MB", "e-3").split()
                )
    return found, done.output


@needs("low_bit_states", "offload", "quantize")
def test_the_command_has_a_row_for_each_choice() -> None:
    rows, text = _table("--params", "8e9", "--largest", "256e6", "--world", "8")
    assert list(rows) == [choice.name for choice in INSTALLED]
    missing = [choice.name for choice in CHOICES if choice not in INSTALLED]
    assert [name for name in missing if f"{name}: quantize: " not in text] == [], "the reason is told"
    # Bytes of a parameter: the compute copy of all, and of each rank's part master weights, gradients, moments.
    assert [float(cell) for cell in rows["moments fp32"][:4]] == [144.0, 16 + 16, 16 + 16, 16.0]
    assert [float(cell) for cell in rows["moments bf16"][:4]] == [112.0, 16 + 12, 16 + 12, 12.0]
    assert float(rows["moments int8"][3]) == pytest.approx(8 + 2 * 260 / 256, abs=0.06)
    assert [float(cell) for cell in rows["all in bf16"][:4]] == [64.0, 16 + 6, 16 + 6, 8.0]
    assert float(rows["frozen bf16, adapters"][3]) == pytest.approx(2 + 0.16, abs=0.06)
    more, _ = _table("--params", "8e9", "--largest", "256e6", "--world", "8", "--adapters", "800M")
    assert float(more["frozen bf16, adapters"][3]) == pytest.approx(2 + 1.6, abs=0.06)
    assert more["moments fp32"] == rows["moments fp32"]
    if there("quantize"):
        assert rows["frozen 4 bits, adapters"][:3] == ["-"] * 3
        assert float(rows["frozen 4 bits, adapters"][3]) == pytest.approx(0.5625 + 0.16, abs=0.001)
        assert float(more["frozen 4 bits, adapters"][3]) == pytest.approx(0.5625 + 1.6, abs=0.06)
    assert "bf16-true" in text


@needs("low_bit_states", "offload", "quantize")
def test_what_contradicts_the_configuration_is_left_out_with_its_reason() -> None:
    rows, text = _table("--params", "1B", "--precision", "16-mixed", "--device", "cpu")
    assert "all in bf16" not in rows
    assert "all in bf16: " in text
    assert len(rows) == len(INSTALLED) - 1


@needs("low_bit_states", "offload", "quantize")
def test_a_module_has_rows_of_adapters_if_some_of_it_is_frozen() -> None:
    plain, _ = _table("--module", "tests.support.models:Net")
    assert not any("frozen" in name for name in plain)
    adapted, _ = _table("--module", "tests.planning.test_state_dtypes:SizedLayer.adapted")
    assert list(adapted) == [choice.name for choice in INSTALLED]


@needs("parallel")
def test_stages_of_a_pipeline_have_their_share_of_adapters() -> None:
    rows, _ = _table("--params", "8e9", "--world", "8", "--pipeline", "2", "--adapters", "800M")
    assert float(rows["frozen bf16, adapters"][3]) == pytest.approx(2 + 1.6, abs=0.06)


SizedLayer.adapted = staticmethod(lambda: SizedLayer(True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [["--params", "1e6"], ["--dtypes", "--module", "torch.nn:Identity"]])
def test_adapters_that_nothing_would_count_are_refused(given: list[str]) -> None:
    done = CliRunner().invoke(app, ["estimate", *given, "--adapters", "1e5"], env={"COLUMNS": "160"})
    assert done.exit_code == 2
    assert "--adapters 1e5 goes with --dtypes" in done.output
