"""benchmarks/bench_all.py: ratios of pairs, disturbed measurements again, and the pages show the stored figures."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_all
import bench_pictures
import bench_report
import pytest
import scale
from bench_rows import Group, LeftOut, Options, Row, groups, isas
from measuring import Rounds, interleaved, ratio

from tests.support.features import needs, needs_all
from tests.support.paths import ROOT

OPTIONS = Options(quick=False, deepspeed_python="", path=Path("/tmp"))
ROW = Row("a save", ("torch.save",), limit="plain write")
CALM: Rounds = {"torch.save": [2.0, 4.0, 2.0], "lt_zero": [1.0, 2.0, 1.0], "plain write": [0.5, 1.0, 0.5]}
WILD: Rounds = {"torch.save": [2.0, 4.0, 2.0], "lt_zero": [1.0, 4.0, 8.0], "plain write": [0.5, 1.0, 0.5]}


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What other programs take in each attempt; nothing when it is empty."""
    shares: list[float] = []
    monkeypatch.setattr(bench_all.Watch, "shares", lambda self: (shares.pop(0) if shares else 0.0, 0.0))
    return shares


def measured(*found: Rounds | Exception, budget: float = 60.0, row: Row = ROW) -> bench_all.Result:
    """A group that measures this, one after the other."""
    left: Iterator[Rounds | Exception] = iter(found)

    def measure(options: Options) -> Rounds:
        value = next(left)
        if isinstance(value, Exception):
            raise value
        return value

    (result,) = bench_all.measure_all([Group("save", measure, (row,))], OPTIONS, budget, lambda line: None)
    return result


# ---- measuring -------------------------------------------------------------------------------------------------


def test_cases_take_turns_after_a_round_to_warm_up() -> None:
    order: list[str] = []

    def case(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or float(len(order))  # type: ignore[func-returns-value]

    found = interleaved({name: case(name) for name in "ab"}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_ratios_are_those_of_pairs() -> None:
    slower_machine_in_between = ratio([1.0, 10.0, 1.2, 1.0, 0.9], [2.0, 20.0, 2.0, 2.0, 2.0])
    assert slower_machine_in_between == (0.5, 0.5, 0.5)
    assert ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == (3.0, 2.0, 4.0)
    assert ratio([1.0], [4.0]) == (0.25, 0.25, 0.25)


# ---- disturbances ----------------------------------------------------------------------------------------------


def test_what_was_disturbed_is_measured_again(others: list[float]) -> None:
    others += [0.4, 0.01]
    result = measured(CALM, CALM)
    assert [attempt.others for attempt in result.attempts] == [0.4, 0.01]
    assert result.attempts[0].reasons == ["other programs, 40% of the CPUs"]
    assert (result.kept, result.again) == (1, False)


def test_a_wide_spread_is_measured_again_at_most_twice(others: list[float]) -> None:
    others += [0.3, 0.2, 0.1]
    result = measured(WILD, WILD, WILD)
    assert len(result.attempts) == 3
    assert result.attempts[1].reasons[-1] == "quartiles of lt_zero 175% apart"
    assert (result.kept, result.again) == (2, True)


def test_nothing_is_repeated_after_the_budget(others: list[float]) -> None:
    assert len(measured(WILD, budget=0.0).attempts) == 1


def test_a_failure_and_what_is_left_out_stand_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    failed, left_out = measured(RuntimeError("a rank died\nwhere")), measured(LeftOut("no DeepSpeed"))
    assert failed.failed
    assert not left_out.failed
    assert "RuntimeError: a rank died" in capsys.readouterr().err
    content = bench_all.content_of([failed, left_out], OPTIONS, 0.0)
    cells = [row.missing for row in bench_report.rows_of(content)]
    assert cells == ["failed: a rank died", "no DeepSpeed"]
    assert "| a save | not measured: no DeepSpeed |  |  |  |" in bench_report.page(content)


# ---- what is written -------------------------------------------------------------------------------------------


@pytest.fixture
def content(others: list[float]) -> dict[str, Any]:
    found = bench_all.content_of([measured(CALM)], OPTIONS, 0.5)
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def test_tables(content: dict[str, Any]) -> None:
    text = bench_report.page(content)
    assert "| a save | torch.save, 2.00 s | 0.50 |  | plain write 0.25 |" in text
    assert "| a save | lt_zero | 1.00 s | 0.500 | 0.500-0.500 |" in text
    assert content["cpu"] in text
    assert re.search(r"^\| save \| \d+ s \| 0.0% \| 0.0% \|", text, re.MULTILINE)


def test_rows_are_added_to_stored_results_with_their_own_machine(content: dict[str, Any], others: list[float]) -> None:
    other = Row("an export", ("torch.save",), ("torch.save", "lt_zero"))
    (found,) = bench_all.measure_all([Group("export", lambda _: CALM, (other,))], OPTIONS, 60.0, lambda line: None)
    later = bench_all.content_of([found], OPTIONS, 3.0) | {"date": "2030-01-02", "cpu": "a newer processor"}
    both = json.loads(json.dumps(bench_all.added(content, later)))
    assert [group["name"] for group in both["groups"]] == ["save", "export"]
    assert both["cpu"] == content["cpu"]
    assert len(bench_all.added(both, later)["groups"]) == 2, "a second time replaces them"
    for text in (bench_report.page(both), bench_report.of_performance({"all_x.md": both})):
        assert "Measured apart: an export: 2030-01-02, a newer processor" in text
        assert "a save" in text
    assert "Measured apart" not in bench_report.page(content)


def test_a_reference_that_was_not_measured_gives_way_to_the_next(others: list[float]) -> None:
    row = Row("a step", ("DeepSpeed", "DDP"), ("DDP", "DeepSpeed", "lt_zero stage 2"))
    result = measured({"DDP": [2.0], "lt_zero stage 2": [1.0], "lt_zero stage 3": [9.0]}, row=row)
    (found,) = bench_report.rows_of(bench_all.content_of([result], OPTIONS, 0.0))
    assert [(case.name, case.ratio.median) for case in found.cases] == [("DDP", 1.0), ("lt_zero stage 2", 0.5)]


def test_pages_are_rewritten_between_their_marks(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in bench_report.PLACES:
        text = f"before\n{bench_report.BEGIN}\nold\n{bench_report.END}\nafter\n"
        (tmp_path / name).write_text(text)
    fsdp: Rounds = {"DDP": [2.0], "FSDP2": [3.0], "lt_zero stage 3": [1.5]}
    deepspeed: Rounds = {"DDP": [2.0], "DeepSpeed stage 3": [5.0]}
    steps = [
        measured(fsdp, row=Row(bench_report.STEP, ("DDP",))),
        measured(deepspeed, row=Row(bench_report.STEP_BESIDE_DEEPSPEED, ("DDP",))),
    ]
    with pytest.raises(ValueError, match="no results have both"):
        bench_report.rewrite({"benchmarks/results/all_x.md": content}, tmp_path)
    results = {
        "benchmarks/results/all_x.md": content,
        "benchmarks/results/all_y.md": bench_all.content_of(steps, OPTIONS, 3.0),
    }
    assert len(bench_report.rewrite(results, tmp_path)) == 2
    assert bench_report.rewrite(results, tmp_path) == []
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n")
    assert readme.endswith("\nafter\n")
    assert "takes 0.75 times as long as DDP's" in readme
    assert "FSDP2 takes 1.50 and DeepSpeed 2.50 times" in readme
    assert "old" not in readme
    assert "`benchmarks/results/all_x.md`" in (tmp_path / "docs/performance.md").read_text()


@pytest.mark.parametrize("name", bench_report.PLACES)
def test_the_pages_show_the_stored_figures(name: str) -> None:
    place, results = bench_report.place_in((ROOT / name).read_text()), bench_report.stored()
    if results:
        assert place == bench_report.PLACES[name](results), "run python benchmarks/bench_all.py --docs"


@needs("offload")
def test_the_pictures_show_the_stored_figures() -> None:
    for name, content in bench_pictures.pictures(next(iter(bench_report.stored().values()))).items():
        assert (bench_pictures.FOLDER / name).read_text() == content, "run python benchmarks/bench_pictures.py"


def test_peers_take_turns_with_the_reference_as_far_as_memory_goes() -> None:
    needed = {"ddp": 4.0, "a": 3.0, "b": 2.0, "c": 5.0, "d": 9.0}
    assert scale.groups(needed, room=8.0) == [["ddp", "a"], ["ddp", "b"], ["c"]]
    assert scale.groups(needed, room=3.5) == [["a"], ["b"]]
    assert scale.groups({"ddp": 4.0, "a": 9.0}, room=8.0) == [["ddp"]]


def test_needs_of_peers_are_those_of_the_estimate() -> None:
    one, eight = scale.needs(scale.SIZES["10M"], 1), scale.needs(scale.SIZES["10M"], 8)
    assert 16 * 10e6 < one["lt_zero-0"] < one["ddp"] < 40 * 10e6 + 0.1e9
    assert eight["lt_zero-3"] < eight["lt_zero-1"] < eight["lt_zero-0"] < eight["ddp"]


def test_every_row_can_be_asked_for_by_name() -> None:
    names = [group.name for group in groups()]
    assert len(set(names)) == len(names)
    assert {"step", "step-deepspeed", "offload", "load", "save", "export", "nvme", "host", "startup", "predict"} < set(
        names
    )
    assert {"frozen", "memory-budget", f"moments-{isas()[0]}-1"} < set(names)
    assert all(row.references for group in groups() for row in group.rows)


@pytest.mark.slow
def test_command_writes_table_figures_and_pictures(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/bench_all.py",
        "--quick",
        "--only",
        "load,memory",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    (file,) = tmp_path.glob("all_*.json")
    content = json.loads(file.read_text())
    (load,) = content["groups"]
    assert set(load["attempts"][0]["rounds"]) >= {"torch.load", "DCP", "lt_zero (checked)", "plain read"}
    assert all(max(mb for _, mb in content["memory"][peer]) > 1 for peer in ("DDP", "lt_zero stage 3"))
    text = file.with_suffix(".md").read_text()
    assert re.search(
        r"^\| load of 1.0 GB.*\| torch.load, \d.* \| \d+\.\d\d \| DCP \d+\.\d\d \| plain read", text, re.MULTILINE
    )
    assert file.with_suffix(".png").stat().st_size > 0
    assert (tmp_path / "step_memory.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)  # ten processes
def test_fewer_bits_and_a_memory_budget_take_less(tmp_path: Path) -> None:
    names = f"moments-{isas()[0]}-1,frozen,memory-budget"
    command = [sys.executable, "benchmarks/bench_all.py", "--quick", "--only", names, "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (file,) = tmp_path.glob("all_*.json")
    found = {
        row.what: {case.name: case.ratio.median for case in row.cases}
        for row in bench_report.rows_of(json.loads(file.read_text()))
    }
    (bf16, coded, weights, received, peak) = found.values()
    assert bf16["lt_zero"] > 0
    assert coded["lt_zero"] > 0
    assert weights["lt_zero, 4 bits"] < weights["lt_zero, 8 bits"] < 1
    assert received["lt_zero, 4 bits"] == pytest.approx(0.5625 / 2, rel=0.05)
    assert received["lt_zero, 8 bits"] == pytest.approx(260 / 512, rel=0.05)
    assert peak["full recomputation"] < peak["lt_zero, memory_budget"] <= 1


def test_shares_of_other_programs_and_the_hypervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, clock = iter([(10.0, 1.0), (12.0, 1.5)]), iter([0.0, 10.0])
    monkeypatch.setattr(bench_all.Watch, "_read", staticmethod(lambda: next(seconds)))
    monkeypatch.setattr(bench_all.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bench_all.psutil, "cpu_count", lambda: 2)
    assert bench_all.Watch().shares() == pytest.approx((0.1, 0.025))


# ---- scripts that no test runs -----------------------------------------------------------------------------------


@needs_all()
@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_what_scripts_import_of_the_package_is_there(folder: str) -> None:
    lacking = []
    for script in sorted((ROOT / folder).glob("*.py")):
        for found in ast.walk(ast.parse(script.read_text())):
            if not isinstance(found, ast.ImportFrom) or not (found.module or "").startswith("lt_zero."):
                continue
            assert found.module is not None
            module = importlib.import_module(found.module)
            lacking += [f"{script.name}: {found.module}.{name.name}" for name in found.names if not _has(module, name)]
    assert lacking == []


def _has(module: Any, name: ast.alias) -> bool:
    place = Path(module.__file__).parent / name.name
    return hasattr(module, name.name) or place.is_dir() or place.with_suffix(".py").is_file()
