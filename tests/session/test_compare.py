"""``lt-zero compare``: records are the same at every stage and number of ranks, and a planted difference is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer import Typer
from typer.testing import CliRunner

import lt_zero
from lt_zero.session.compare import (
    RecordedRun,
    RecordError,
    Tensors,
    compare,
    compare_command,
    first_of,
    not_compared,
    read_record,
)
from lt_zero.session.recorder import RECORD, Fingerprint
from tests.support.pool import Pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2)])
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _run(folder: str, stage: int, micro_batches: int, wrong_from: int = 0, optimizer: str = "AdamW") -> None:
    """Train 4 steps of 8 samples; from a step on one gradient is 1.001 times what it is."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    options = {"lr": 1e-2} if optimizer == "AdamW" else {"lr": 1e-2, "momentum": 0.9}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": optimizer, "params": options},
    }
    torch.manual_seed(0)
    model, step = Net(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORD, folder)
        engine, *_ = lt_zero.initialize(model=model, config=config)
    weight = model.layers[1][2].weight  # type: ignore[index]
    weight.register_hook(lambda grad: grad * 1.001 if wrong_from and step >= wrong_from else grad)
    for step in range(1, 5):
        batch = torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(step))
        parts = batch.chunk(size * micro_batches)
        for number in range(micro_batches):
            engine.backward(engine(parts[rank * micro_batches + number]))
            engine.step()
    engine.destroy()


def test_fingerprints_do_not_depend_on_how_samples_are_spread() -> None:
    value = torch.randn(6, 3, 4, dtype=torch.float64)
    whole = Fingerprint.of(value, "a", torch.float32, samples=True)
    parts = [Fingerprint.of(part, "a", torch.float32, samples=True) for part in value[[3, 1, 5, 0, 2, 4]].split([2, 4])]
    both = parts[0].plus(parts[1])
    assert (both.rows, both.numel, both.largest, both.dtype) == (6, 12, whole.largest, "float32")
    assert both.products == pytest.approx(whole.products, rel=1e-12)
    assert both.squares == pytest.approx(float((value**2).sum()))
    other = Fingerprint.of(value, "b", torch.float32, samples=True)
    assert other.products != pytest.approx(whole.products)
    # The products of many names tell the norm.
    found = [p**2 for n in range(200) for p in Fingerprint.of(value[0], f"{n}", torch.float32).products]
    assert sum(found) / len(found) == pytest.approx(float((value[0] ** 2).sum()), rel=0.15)


def test_a_wrong_gradient_is_named_with_its_step(pool: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a", "b", "c")]
    _run(folders[0], 0, 1)
    pool.run(2, _run, folders[1], 3, 2)
    pool.run(2, _run, folders[2], 2, 1, 3)
    one, two, wrong = (read_record(Path(folder)) for folder in folders)
    assert (one.about["ranks"], two.about["ranks"], two.about["stage"]) == (1, 2, 3)
    assert max(two.steps) == 4
    assert not_compared(one, two) == []
    right = compare(one, two)
    kinds = {(each.kind, each.name) for each in right}
    assert {
        ("output", "layers.1.2"),
        ("gradient", "embed.weight"),
        ("update", "head.bias"),
        ("output", "(model)"),
    } <= kinds
    assert first_of(right) is None
    found = first_of(compare(one, wrong))
    assert found is not None
    assert (found.step, found.kind, found.name) == (3, "gradient", "layers.1.2.weight")
    assert found.size == pytest.approx(1e-3, rel=0.5)
    app = Typer()
    app.command()(compare_command)
    picture = tmp_path / "differences.png"
    shown = CliRunner().invoke(app, [folders[1], folders[2], "--output", str(picture)])
    assert shown.exit_code == 1
    assert "First difference: step 3, gradient of layers.1.2.weight: 0.00" in shown.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert CliRunner().invoke(app, folders[:2]).exit_code == 0
    missing = CliRunner().invoke(app, [folders[0], str(tmp_path / "none")])
    assert missing.exit_code == 2


def test_a_record_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(str(tmp_path), 0, 1)
    with pytest.raises(lt_zero.ConfigError, match="has a record already .* Name another folder"):
        _run(str(tmp_path), 0, 1)


def _record(
    updates: dict[str, float], outputs: dict[str, float], numel: int = 4, dtype: str = "float32"
) -> RecordedRun:
    def tensor(value: float) -> Tensors:
        return Tensors(dtype, 1, numel, value**2 * numel, value, [value * numel] * 8)

    first: dict[tuple[str, str], Tensors] = {("weight", name): tensor(1.0) for name in updates}
    second = {("output", name): tensor(value) for name, value in outputs.items()}
    second |= {("weight", name): tensor(1.0 + value) for name, value in updates.items()}
    return RecordedRun("run", {}, {0: first, 1: second})


def test_the_first_in_order_of_execution_is_found() -> None:
    base = _record({"a.weight": 0.1, "b.weight": 0.1}, {"a": 1.0, "b": 1.0})
    updates = _record({"a.weight": 0.1, "b.weight": 0.2}, {"a": 1.0, "b": 1.0})
    found: Any = first_of(compare(base, updates))
    assert (found.step, found.kind, found.name) == (1, "update", "b.weight")
    both = _record({"a.weight": 0.1, "b.weight": 0.2}, {"a": 1.0, "b": 1.01})
    found = first_of(compare(base, both))
    assert (found.kind, found.name) == ("output", "b")
    assert first_of(compare(base, both, factor=1e4)) is None
    rough = _record({"a.weight": 0.1, "b.weight": 0.1}, {"a": 1.0, "b": 1.01}, dtype="bfloat16")
    assert first_of(compare(base, rough)) is None
    broken = _record({"a.weight": float("nan")}, {"a": 1.0})
    found = first_of(compare(base, broken))
    assert (found.kind, found.name) == ("update", "a.weight")
    assert not_compared(base, _record({"a.weight": 0.1}, {"a": 1.0, "b": 1.0}, 5))[-1] == "weight of b.weight"


def test_damaged_records_are_named(tmp_path: Path) -> None:
    file = tmp_path / "engine0.jsonl"
    file.write_text('{"version": 1}\n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"engine0.jsonl has no step"):
        read_record(tmp_path)
    line = json.dumps({"step": 1, "tensors": []})
    file.write_text(f'{{"version": 1}}\n{line}\n{{"step": 2, "ten', encoding="utf-8")
    assert list(read_record(tmp_path).steps) == [1]  # the run was ended while it wrote
    file.write_text(f'{{"version": 1}}\n{{"step"\n{line}', encoding="utf-8")
    with pytest.raises(RecordError, match="line 2"):
        read_record(tmp_path)
