"""``lt-zero compare``: records are the same at every stage and number of ranks, and a planted difference is named."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer import Typer
from typer.testing import CliRunner

import lt_zero
from lt_zero.tools.compare.compare import (
    RecordedRun,
    RecordError,
    Tensors,
    aligned,
    compare,
    compare_command,
    first_of,
    not_compared,
    plain,
    read_record,
)
from lt_zero.tools.compare.recorder import RECORD, Fingerprint, of_one
from tests.support.pool import Pool
from tests.tools.compare.recorded_runs import run


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
    whole = Fingerprint.of(value, torch.float32, samples=True)
    parts = [Fingerprint.of(part, torch.float32, samples=True) for part in value[[3, 1, 5, 0, 2, 4]].split([2, 4])]
    both = parts[0].plus(parts[1])
    assert (both.rows, both.numel, both.largest, both.dtype) == (6, 12, whole.largest, "float32")
    assert both.products == pytest.approx(whole.products, rel=1e-12)
    assert both.squares == pytest.approx(float((value**2).sum()))
    # The products of many tensors tell their norms.
    many = torch.randn(200, 12, dtype=torch.float64)
    found = [p**2 / float((row**2).sum()) for row in many for p in Fingerprint.of(row, torch.float32).products]
    assert sum(found) / len(found) == pytest.approx(1, rel=0.15)
    large = torch.zeros((1 << 20) + 3)
    large[-1] = 1.0
    assert Fingerprint.of(large, torch.float32).products[0] in (-1.0, 1.0)


def test_parts_of_one_tensor_have_its_norm() -> None:
    value = torch.randn(4, 6, 3)
    whole = Fingerprint.of(value, torch.float32, samples=True)
    parts = [Fingerprint.of(part, torch.float32, samples=True) for part in value.split([4, 2], dim=1)]
    both = of_one(parts)
    assert (both.rows * both.numel, both.products) == (72, [])
    assert both.squares == pytest.approx(whole.squares)
    assert of_one([whole, Fingerprint.of(value + 1e-7, torch.float32, samples=True)]) is whole  # all have the same
    losses = [Fingerprint.of(torch.tensor(number), torch.float32, samples=True) for number in (1.0, 3.0)]
    assert (of_one(losses).rows, of_one(losses).products[0] in (-4.0, 4.0)) == (2, True)


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


def test_a_disk_that_fails_ends_the_record_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = lt_zero.initialize(model=nn.Linear(3, 1), config=config)
    shutil.rmtree(tmp_path / "record")

    def train(steps: int) -> None:
        for _ in range(steps):
            engine.backward(engine(torch.ones(1, 3)).mean())
            engine.step()

    with pytest.warns(UserWarning, match="cannot be written .*the record ends before step 0") as told:
        train(2)
    engine.destroy()
    assert len(told) == 1
    assert not (tmp_path / "record").exists()


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


@pytest.mark.parametrize("swapped", [False, True])
def test_values_that_are_not_finite(swapped: bool) -> None:
    """Zeros, such as those of a fresh adapter, are no scale for NaN."""
    zero, broken = _record({"a": 0.0}, {"a": 0.0}), _record({"a": float("nan")}, {"a": float("nan")})
    found = compare(*((broken, zero) if swapped else (zero, broken)))
    assert [each.excess for each in found if each.step == 1] == [math.inf, math.inf]
    assert first_of(compare(broken, broken)) is None  # a mask of -inf, too


def test_runs_of_different_models(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        row = {"kind": "output", "name": name, "dtype": "float32", "rows": 1, "numel": 1}
        row |= {"squares": 1.0, "largest": 1.0, "products": [1.0] * 8}
        text = json.dumps({"version": 2}) + "\n" + json.dumps({"step": 1, "tensors": [row]}) + "\n"
        (tmp_path / name / "engine0.jsonl").write_text(text, encoding="utf-8")
    app = Typer()
    app.command()(compare_command)
    found = CliRunner().invoke(app, [str(tmp_path / "one"), str(tmp_path / "two")])
    assert (found.exit_code, "have no tensor in common" in found.output) == (2, True)


def test_control_characters_in_names_of_tensors_are_shown(tmp_path: Path) -> None:
    for name, size in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        row = {"kind": "weight", "name": "a\x1b[2J", "dtype": "float32", "rows": 1, "numel": 4}
        row |= {"squares": size, "largest": size, "products": [0.5, size]}
        lines = [{"version": 2, "stage": 3, "ranks": 2}, *({"step": step, "tensors": [row]} for step in range(2))]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / name / "engine0.jsonl").write_text(text, encoding="utf-8")
    app = Typer()
    app.command()(compare_command)
    found = CliRunner().invoke(app, [str(tmp_path / "one"), str(tmp_path / "two")])
    assert "\x1b" not in found.output
    assert r"\x1b[2J" in found.output.replace("\n", "")


def test_damaged_records_are_named(tmp_path: Path) -> None:
    file = tmp_path / "engine0.jsonl"
    file.write_text('{"version": 2}\n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"engine0.jsonl has no step"):
        read_record(tmp_path)
    line = json.dumps({"step": 1, "tensors": []})
    file.write_text(f'{{"version": 2}}\n{line}\n{{"step": 2, "ten', encoding="utf-8")
    assert list(read_record(tmp_path).steps) == [1]  # the run was ended while it wrote
    file.write_text(f'{{"version": 2}}\n{{"step"\n{line}', encoding="utf-8")
    with pytest.raises(RecordError, match="line 2"):
        read_record(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="line 1"):
        read_record(tmp_path)


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine0.jsonl").write_text('{"version": 1}\n{"step": 1, "tensors": []}\n', encoding="utf-8")
    with pytest.raises(RecordError, match="is of version 1, .* Record both runs with the same version"):
        read_record(tmp_path)


def test_names_differ_by_the_modules_around() -> None:
    base = _record({"a.weight": 0.1, "b.weight": 0.1}, {"a": 1.0, "b": 1.0, "(model)": 3.0})
    for prefix in ("net.", "module.net."):
        weights = {f"{prefix}a.weight": 0.1, f"{prefix}b.weight": 0.2}
        outputs = {f"{prefix}a": 1.0, f"{prefix}b": 1.0, prefix[:-1]: 3.0, "(model)": 7.0}
        inside = _record(weights, outputs)
        one, two, cut = aligned(base, inside)
        assert cut == ("", prefix)
        found: Any = first_of(compare(one, two))
        assert (found.kind, found.name) == ("update", "b.weight")
        assert ("output", "(model)") in {(each.kind, each.name) for each in compare(one, two)}
        assert not_compared(one, two) == ["output of around (model)"]
        assert aligned(inside, base)[2] == (prefix, "")
    # Both are inside of a module; and all parameters are in one module anyway.
    one, two, cut = aligned(_record({"x.a.w": 0.1, "x.b.w": 1}, {}), _record({"y.a.w": 0.1, "y.b.w": 1}, {}))
    assert (cut, not_compared(one, two)) == (("x.", "y."), [])
    assert aligned(_record({"layers.0.w": 0.1}, {}), _record({"net.layers.0.w": 0.1}, {}))[2] == ("", "net.")
    assert aligned(base, _record({"c.bias": 0.1}, {}))[2] == ("", "")


def test_what_torch_compile_adds_to_names_is_left_out() -> None:
    assert [plain(name) for name in ("_orig_mod.a.weight", "a._orig_mod.b", "a._orig_mod")] == ["a.weight", "a.b", "a"]
    assert plain("_orig_mod") == "(model)"


# ---- skipped steps ---------------------------------------------------------------------------------------------------


def _skipping(folder: Path, scale_power: int, repeats: bool) -> None:
    """Four steps in fp16; with ``repeats`` a skipped one takes its batch again."""
    config: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    config["fp16"] = {"enabled": True, "initial_scale_power": scale_power, "hysteresis": 1}
    config["zero_optimization"] = {"stage": 1}
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORD, str(folder))
        engine, *_ = lt_zero.initialize(model=nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)), config=config)
    number = 0
    for _ in range(9):
        engine.backward(engine(torch.randn(8, 4, generator=torch.Generator().manual_seed(number))).square().mean())
        engine.step()
        number += engine.was_step_applied() or not repeats
        if engine.global_steps - engine.skipped_steps == 4:
            break
    engine.destroy()


def test_skipped_steps_do_not_shift_the_others(tmp_path: Path) -> None:
    for name, power, repeats in (("none", 4, False), ("repeats", 18, True), ("goes_on", 18, False)):
        _skipping(tmp_path / name, power, repeats)
    none, repeats, goes_on = (read_record(tmp_path / name) for name in ("none", "repeats", "goes_on"))
    skipped = repeats.skips_until(1)
    assert skipped > 0
    assert (none.skipped, repeats.skipped, goes_on.skips_until(1)) == ({}, {1: skipped}, skipped)
    assert sorted(none.steps) == sorted(repeats.steps) == [0, 1, 2, 3, 4]
    assert first_of(compare(none, repeats)) is None
    found: Any = first_of(compare(none, goes_on))
    assert (found.step, found.kind, found.name) == (1, "input", "(model)[0]")
    app = Typer()
    app.command()(compare_command)
    shown = CliRunner().invoke(app, [str(tmp_path / "none"), str(tmp_path / "goes_on")])
    assert f"B skipped steps, which do not count: {skipped} before step 1." in shown.output
    assert f"until then A skipped 0 steps and B {skipped}" in shown.output


def test_a_step_that_a_gpu_skipped(tmp_path: Path) -> None:
    """It is recorded as taken, without a change of the weights."""

    def row(kind: str, value: float) -> dict[str, Any]:
        facts = {"dtype": "float32", "rows": 1, "numel": 1, "squares": value**2, "largest": value}
        return {"kind": kind, "name": "a", **facts, "products": [value] * 8}

    lines: list[dict[str, Any]] = [{"version": 2}, {"step": 0, "tensors": [row("weight", 1.0)]}]
    lines += [{"step": 1, "tensors": [row("gradient", math.inf), row("weight", 1.0)]}]
    lines += [{"step": 2, "tensors": [row("gradient", 1.0), row("weight", 0.5)]}]
    (tmp_path / "engine0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = read_record(tmp_path)
    assert (run.skipped, run.steps[1]["weight", "a"].largest) == ({1: 1}, 0.5)


def test_tokens_are_compared_exactly() -> None:
    tokens = torch.randint(50_000, (8, 512))
    other = tokens.clone()
    other[3, 7] += 1
    runs = []
    for value in (tokens, other):
        made = Tensors(**vars(Fingerprint.of(value, value.dtype, samples=True)))
        runs.append(RecordedRun("run", {}, {1: {("input", "x[0]"): made}}))
    assert first_of(compare(runs[0], runs[0])) is None
    assert first_of(compare(*runs)) is not None


# ---- faces, and ranks of other kinds ---------------------------------------------------------------------------------

# Name and options of a run on one process, and of one on two ranks; the layer with the bug, its calls before it, and
# what is named.
PAIRS: dict[str, tuple[Any, Any, str, int, tuple[int, str]]] = {
    "tensor": (("tensor", {}), ("tensor", {"tensor": 2}), "blocks.1.up", 1, (2, "blocks.1.up.weight")),
    "sequence": (("trainer", {}), ("trainer", {"sequence": 2}), "blocks.1.out", 1, (2, "net.blocks.1.out.weight")),
    "experts": (("experts", {}), ("experts", {"experts": 2}), "layers.1.router", 1, (2, "layers.1.router.weight")),
    "pipeline": (("pipeline", {}), ("pipeline", {"stages": 2}), "layers.3.up", 0, (1, "pipe.layers.3.up.weight")),
    "trainer and loop": (
        ("trainer", {"accumulates": 2}),
        ("loop", {}),
        "blocks.0.project.k",
        1,
        (2, "blocks.0.project.k.weight"),
    ),
    "fabric and loop": (("fabric", {"accumulates": 2}), ("loop", {}), "head", 2, (3, "head.weight")),
}


@pytest.mark.parametrize(
    "name", [name if name == "pipeline" else pytest.param(name, marks=pytest.mark.slow) for name in PAIRS]
)
def test_a_bug_is_named_whatever_the_ranks_and_the_face(pool: Pool, tmp_path: Path, name: str) -> None:
    (base, alone), (other, options), layer, calls, named = PAIRS[name]
    pool.run(1, run, base, str(tmp_path / "one"), 2, alone)
    pool.run(2, run, other, str(tmp_path / "right"), 1, options)
    pool.run(2, run, other, str(tmp_path / "wrong"), 1, options, layer, calls)
    one, right, wrong = (read_record(tmp_path / folder) for folder in ("one", "right", "wrong"))
    first, second, _ = aligned(one, right)
    assert not_compared(first, second) == []
    differences = compare(first, second)
    assert first_of(differences) is None
    assert {each.kind for each in differences} == {"input", "output", "gradient", "update"}
    first, second, _ = aligned(one, wrong)
    found = first_of(compare(first, second))
    assert found is not None
    assert (found.step, found.kind, found.name) == (named[0], "gradient", named[1])
