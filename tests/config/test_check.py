"""``lt-zero config check``: a line for each key, in a terminal of 80 columns, in a pipe and in CI; names of units."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.config.cli import config_command
from lt_zero.config.load import examine
from lt_zero.training.lightning.model_report import dtype_table, unit_table
from tests.support.pool import Pool

CONFIG: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": False, "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "contiguous_gradients": False,
        "cpu_offload": False,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": "auto",
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme/with/a/name/that/is/longer/than/any/column"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}},
    "tensorboard": {"enabled": False, "output_path": "logs"},
    "tokenizer": {"name": "gpt2-medium"},
    "wandb": {"enabled": True, "api_key": "hunter2"},
}
LINES = {
    "works": ["train_batch_size", "fp16.enabled", "optimizer.type"],
    "off": ["fp16.loss_scale", "tensorboard.output_path"],
    "no effect": ["zero_optimization.allgather_partitions"],
    "inactive": ["zero_optimization.contiguous_gradients", "zero_optimization.offload_param.device"],
    "alias": ["zero_optimization.cpu_offload"],
    "auto": ["optimizer.params.lr", "zero_optimization.stage3_param_persistence_threshold"],
    "error": ["tokenizer.name", "wandb.api_key"],
}


@pytest.mark.parametrize("columns", ["80", "40", "200"])
def test_a_line_for_each_key(columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIG))
    result = CliRunner().invoke(config_command, ["check", str(file)])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    for status, keys in LINES.items():
        for key in keys:
            (line,) = [line for line in lines if f"  {key}" in line and line.startswith(f"{status} ")]
            value = line.removeprefix(status).split("  " + key)[0].strip()
            assert value, "its value stands between them"
    written = examine(CONFIG).values
    count = sum(len(_leaves(value)) for value in written.values())
    assert sum(line.startswith(tuple(f"{status} " for status in LINES)) for line in lines) == count
    assert "gpt2-medium" in result.output
    assert "hunter2" not in result.output
    assert lines[-1].endswith("ds_config.json: 2 problems")


def _leaves(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        return [value]
    return [leaf for inner in value.values() for leaf in _leaves(inner)]


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, "accumulate_grad_batches) becomes 16 / ranks"),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, "batch_size has to be 16 / ranks"),
        ({"train_batch_size": 64}, "batch_size has to be 64 / accumulation / ranks"),
    ],
)
def test_what_the_batches_leave_open(batches: dict[str, int], says: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(batches))
    result = CliRunner().invoke(config_command, ["check", str(file)])
    assert says in result.output
    assert result.output.splitlines()[-1].endswith("it can be used")


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Model(nn.Module):
    """Names as PEFT and transformers make them."""

    def __init__(self) -> None:
        super().__init__()
        inner: nn.Module = self
        for name in ("base_model", "model", "model", "language_model", "conditional_generation"):
            inner.add_module(name, nn.Module())
            inner = inner.get_submodule(name)
        inner.encoder_layers = nn.ModuleList(Layer() for _ in range(3))
        inner.decoder_layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("width", [60, 80, 200])
def test_units_are_told_apart_by_the_end_of_their_names(width: int) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = lt_zero.shard(Model(), ZeroConfig.of({"zero_optimization": zero}))
    file = io.StringIO()
    unit_table(engine, Console(file=file, width=width))
    engine.detach()
    prefix = "base_model.model.model.language_model.conditional_generation"
    for name, kind in (("encoder_layers", "Layer"), ("decoder_layers", "Bilinear")):
        (line,) = [line for line in file.getvalue().splitlines() if f"  {kind} " in line]
        assert line.endswith(f"{prefix}.{name}.0 ... 2 (3)")


def _table_of(threshold: int) -> tuple[str, bool]:
    """The table of a model on two ranks; whether a gradient of this rank is a shard."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    engine = lt_zero.shard(nn.Linear(5, 3), ZeroConfig.of({"zero_optimization": zero}))
    file = io.StringIO()
    unit_table(engine, Console(file=file))
    grads_are_sharded = all(bucket.sharding.grads for bucket in engine.buckets)
    engine.detach()
    return file.getvalue(), grads_are_sharded


def test_the_table_tells_why_nothing_is_sharded(pool: Pool) -> None:
    for (text, grads_are_sharded), (sharded, _) in zip(
        pool.run(2, _table_of, 16), pool.run(2, _table_of, 15), strict=True
    ):
        assert "the largest has 15 elements" in text
        assert "stage3_param_persistence_threshold is 16" in text
        assert grads_are_sharded
        assert "No parameter is sharded" not in sharded


def test_both_tables_count_what_the_module_has() -> None:
    model = nn.Linear(5, 3)
    engine = lt_zero.shard(model, ZeroConfig.of({"zero_optimization": {"stage": 2}}))
    file = io.StringIO()
    for table in (unit_table, dtype_table):
        table(engine, Console(file=file))
    engine.detach()
    padded = sum(bucket.layout.numel for bucket in engine.buckets)
    assert padded > 18
    text = file.getvalue()
    assert f"and {padded - 18} elements of padding" in text.splitlines()[0]
    assert [line.split()[1] for line in text.splitlines() if "Linear" in line] == ["18"]
    assert [line.split()[3] for line in text.splitlines() if "trained" in line] == ["18"]
