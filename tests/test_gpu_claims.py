"""benchmarks/gpu_*.py without a GPU: every row of the table of claims is measured, parts end, verdicts are right."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_claims
import gpu_largest
import gpu_measures
import gpu_parts
import host_cost
import pytest
import torch.distributed as dist
from gpu_claims import CLAIMS, FAIL, NOT_JUDGED, NOT_RUN, PARTS, PASS, Claim, Left, Row
from rich.console import Console

import lt_zero
from tests.support import gpu_collectives
from tests.support.features import needs
from tests.support.gpu_ranks import over_nccl, place_of, texts_of
from tests.support.paths import ROOT
from tests.support.pool import HERE, Pool

TINY = gpu_measures.Sizes(
    device="cpu",
    rounds=1,
    numel=20_000,
    depth=1,
    width=32,
    sequences=1,
    gigabytes=1e-3,
    heads=1,
    length=128,
    attention_mib=4,
    traces=1,
    largest=gpu_largest.Search("cpu", limit_mib=74, width=64, seconds=60, most=1.5, trials=1),
)

# ---- measurements --------------------------------------------------------------------------------------------------


def here(trial: gpu_largest.Trial, seconds: float) -> dict[str, Any]:
    """A trial in this process, whose memory is not the trial's alone."""
    found = trial.run()
    return found | {"trains": math.isfinite(found["loss"])}


OF_FEATURES = {  # that a measurement is about
    "few_bits": ("low_bit_states", "quantize"),
    "attention": ("sparse_attention",),
    "overlap": ("offload",),
    "largest": ("offload",),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs(*OF_FEATURES[n])) if n in OF_FEATURES else n for n in gpu_measures.MEASURES],
)
def test_a_measurement_gives_the_rows_of_its_claims(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "DEPTH", 2)
    monkeypatch.setattr(gpu_largest.Trial, "run_apart", here)
    rows = list(gpu_measures.MEASURES[name](TINY))
    assert [row.key for row in rows] == [claim.key for claim in CLAIMS if claim.shown_by == name]
    if name == "deepspeed" and not gpu_measures.deepspeed_is_installed():
        assert {(row.value, row.note) for row in rows} == {(None, "deepspeed is not installed")}
        return
    for row in rows:
        assert row.value is not None, row
        assert math.isfinite(row.value), row
        assert row.value > 0 or name in ("fp16", "memory", "host"), row
    if name in ("fp16", "memory"):  # no times: the bars hold on every machine
        assert gpu_claims.verdict(next(claim for claim in CLAIMS if claim.shown_by == name), rows[0], "cpu") == PASS


def test_a_stand_in_is_not_taken_for_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu_measures.deepspeed_is_installed()
    monkeypatch.setitem(sys.modules, "deepspeed", lt_zero)
    assert gpu_measures.deepspeed_is_installed() == before


def test_a_test_has_more_time_where_its_part_has() -> None:
    """On a loaded machine the limit is raised; a test that takes longer than its own ends all of its part."""
    for limit, seconds in ((None, "60"), (1200.0, "200")):
        parts = gpu_parts.parts_of("cpu") if limit is None else gpu_parts.parts_of("cpu", limit)
        found = [step.words for steps in parts.values() for step in steps if step.tests]
        assert found
        assert all(words[words.index("--timeout") + 1] == seconds for words in found)


def test_every_claim_has_a_name_and_somebody_who_shows_it() -> None:
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.part in PARTS
        assert claim.of_tests or claim.shown_by in gpu_measures.MEASURES
    for steps in (gpu_parts.parts_of("cpu"), gpu_parts.parts_of("cuda")):
        assert tuple(steps) == PARTS
        for part in PARTS:
            assert set(gpu_claims.measurements(part)) < {step.name for step in steps[part]}


def test_the_table_that_is_kept_has_every_claim() -> None:
    """A claim that no GPU has measured says so there."""
    lines = (ROOT / "benchmarks" / "results" / "gpu_claims.md").read_text().splitlines()
    kept = [line.split(" | ")[1] for line in lines if line.startswith(tuple(f"| {part} |" for part in PARTS))]
    assert kept == [claim.key for claim in CLAIMS]


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 13, 100])
def test_the_longest_that_fits_within_an_eighth(limit: int) -> None:
    found = gpu_measures.longest(lambda length: length <= 100 * limit, 100, 1600)
    assert found == {0: 0, 1: 100, 5: 500, 8: 800, 13: 1300, 100: 1600}[limit]


@pytest.mark.parametrize(
    ("deepest", "tried", "best"),
    [
        (40, [20, 21, 22, 23], 23),  # the number of trials ends it
        (21, [20, 21, 22], 21),
        (18, [20, 18], 18),
        (10, [20, 18, 16, 15], None),  # the number of trials, too
    ],
)
def test_trials_start_at_the_forecast(
    deepest: int, tried: list[int], best: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(trial: gpu_largest.Trial, seconds: float) -> dict[str, Any]:
        seen.append(trial.depth)
        return {"trains": trial.depth <= deepest, "problem": "out of memory", "peak": 0.0}

    monkeypatch.setattr(gpu_largest.Trial, "run_apart", run)
    monkeypatch.setattr(gpu_largest.Trial, "should_fit", property(lambda trial: trial.depth <= 20))
    start = gpu_largest.Trial("cpu", 8, 16, 1, False)
    found, why = gpu_largest.Search("cpu", 8, 16, 60).find(start, None, math.inf)
    assert seen == tried
    assert (found.depth if found is not None else None) == best
    assert why == ("the number of trials" if deepest == 40 else "out of memory")


# ---- the table -----------------------------------------------------------------------------------------------------


def test_verdicts() -> None:
    low, high = Claim("engine", "a", 1.05, "steps"), Claim("engine", "b", 10, "largest", at_least=True)
    seen = [gpu_claims.verdict(low, Row("a", value), "cuda") for value in (1.05, 1.06, None)]
    assert seen == [PASS, FAIL, NOT_RUN]
    seen = [gpu_claims.verdict(high, Row("b", value), "cuda") for value in (10, 9.9)]
    assert seen == [PASS, FAIL]
    only = Claim("engine", "c", 1.0, "host", only_gpu="needs a GPU: why")
    assert gpu_claims.verdict(only, Row("c", 9.0), "cpu") == NOT_JUDGED
    assert gpu_claims.verdict(only, Row("c", 9.0), "cuda") == FAIL
    assert gpu_claims.verdict(only, None, "cpu") == NOT_RUN


REPORT = """<testsuites><testsuite>
<testcase name="test_late_collectives[1]"/>
<testcase name="test_late_collectives[2]"><failure message="no"/></testcase>
<testcase name="test_the_host_never_waits[0]"><skipped message="needs a GPU"/></testcase>
<testcase name="test_other"><skipped message="needs a GPU"/></testcase>
<testcase name="tests.gpu.test_engine"><error message="cannot import"/></testcase>
</testsuite></testsuites>"""


def test_rows_from_a_report(tmp_path: Path) -> None:
    (tmp_path / "engine.xml").write_text(REPORT)
    rows = {row.key: row for row in gpu_claims.rows_of_tests("engine", tmp_path / "engine.xml")}
    assert rows["tests of engine that fail"].value == 2
    assert rows["tests of engine that fail"].note == "1 passed, 2 skipped: needs a GPU"
    assert rows["late collectives: tests that fail"].value == 1
    waits = rows["waits of the host in a step: tests that fail"]
    assert (waits.value, waits.note) == (None, "needs a GPU")
    early = {row.key: row for row in gpu_claims.rows_of_tests("engine", tmp_path / "engine.xml", whole=False)}
    assert early["late collectives: tests that fail"].value == 1
    (tmp_path / "engine.xml").write_text(REPORT.replace("failure", "properties"))
    early = {row.key: row for row in gpu_claims.rows_of_tests("engine", tmp_path / "engine.xml", whole=False)}
    assert early["late collectives: tests that fail"] == Row(
        "late collectives: tests that fail", None, "ended early: 2 passed"
    )
    missing = gpu_claims.rows_of_tests("engine", tmp_path / "none.xml")
    assert {row.key for row in missing} == set(rows)
    assert {row.note for row in missing} == {"its tests did not end"}


# ---- parts ---------------------------------------------------------------------------------------------------------

ROW = '{"key": "save, GB/s of torch.save\'s", "value": 2.0, "note": "[of it]"}'


def test_a_part_goes_on_after_a_failure_and_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    outcomes = {
        "tests": (3, 10.0, ""),
        "fp16": (1, 20.0, "Traceback\n"),
        "saves": (None, 70.0, f"RESULT {ROW}\nRESULT {{"),
    }
    rooms = []

    def run(words: Sequence[str], device: str, limit: float) -> tuple[int | None, str]:
        code, seconds, printed = outcomes[words[0]]
        rooms.append(limit)
        now[0] += seconds
        return code, printed

    monkeypatch.setattr(gpu_parts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu_parts, "run", run)
    monkeypatch.setattr(gpu_parts, "versions", lambda device: "torch")
    steps = [gpu_parts.Step(name, (name,), tests=name == "tests") for name in (*outcomes, "table")]
    left, report = gpu_parts.run_part("trainer", steps, "cpu", 100, tmp_path)
    assert rooms == [100, 90, 70]
    ended = ["failed (3), 10 s", "failed (1), 20 s", "ended by the limit, 70 s", "not begun, the limit was over"]
    assert list(left.steps.values()) == ended
    rows = {row.key: row for row in left.rows}
    assert {key for key, row in rows.items() if row.value is not None} == {"save, GB/s of torch.save's"}
    assert rows["fp16: loss scales that differ from DeepSpeed's"].note == "fp16 failed (1), 20 s"
    assert rows["load, GB/s of torch.load's"].note == "saves ended by the limit, 70 s"
    assert "## fp16: failed (1), 20 s" in report
    left.write(tmp_path / "trainer.json")
    assert Left.read(tmp_path / "trainer.json") == left
    counts = gpu_claims.write_table("cpu", folder=tmp_path)
    assert counts == {PASS: 1, NOT_RUN: len(CLAIMS) - 1}
    table = (tmp_path / "claims.md").read_text()
    assert "| trainer | save, GB/s of torch.save's | 2 | >= 1 | pass | [of it] |" in table
    assert "- engine: not run" in table


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_passes_with_the_cpu_in_the_place_of_the_gpu(part: str, tmp_path: Path) -> None:
    left, report = gpu_parts.run_part(part, gpu_parts.parts_of("cpu")[part], "cpu", 1100, tmp_path)
    assert {name: ended for name, ended in left.steps.items() if not ended.startswith("passed")} == {}, report


def test_a_command_that_hangs_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_parts.run(["-c", "import time; time.sleep(600)"], "cpu", 0.0)[0] is None
    code, printed = gpu_parts.run(["-c", "import os; print(os.environ['ZERO_TEST_DEVICE']); os._exit(3)"], "cpu", 300)
    assert (code, printed) == (3, "cpu\n")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def test_notes_are_not_taken_for_colours() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    gpu_claims.show([("engine", "what", "1", "<= 1", PASS, "note [red]")], "title", console)
    assert "note [red]" in console.export_text()


# ---- ranks on one device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", gpu_collectives.FORMS)
def test_collectives_between_ranks(pool: Pool, form: str) -> None:
    pool.run(2, gpu_collectives.check, "cpu", form)


def _says(silent: int) -> str:
    if dist.get_rank() == silent:
        os._exit(0)
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def test_a_rank_that_ends_has_no_text(tmp_path: Path) -> None:
    assert texts_of("cpu", 2, tmp_path, _says, 1) == {0: "rank 0 of 2"}


def test_ranks_of_nccl_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    places = [place_of("cuda", rank) for rank in range(4)]
    assert len({place.environment["NCCL_HOSTID"] for place in places}) == 4
    assert {place.environment["NCCL_SOCKET_IFNAME"] for place in places} == {"lo"}
    assert {place.environment["NCCL_ALGO"] for place in places} == {"Tree"}, "what the user sets stays"
    assert {place.join for place in places} == {over_nccl}
    assert place_of("cpu", 1) == HERE
