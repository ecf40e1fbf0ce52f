"""One table of what lt_zero claims on a GPU: measured, bar, and whether it holds, from the rows that parts left.

    python benchmarks/gpu_claims.py --device cuda

`make gpu` runs it after each part. A claim without a figure says why. With ``--device cpu`` the CPU stands in for the
GPU: claims that have a meaning there are judged alike, and the others are measured, but not judged.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measuring import ROOT, markdown
from rich.console import Console
from rich.table import Table

PARTS = ("kernels", "engine", "nccl", "states", "offload", "trainer", "bench")
PASS, FAIL, NOT_RUN, NOT_JUDGED = "pass", "FAIL", "not run", "not judged"


@dataclass(frozen=True)
class Claim:
    """What a part has to show.

    Attributes:
        key: of the row; unique.
        bar: the worst figure that passes.
        shown_by: a measurement of gpu_measures.py, or the start of the names of tests, whose failures are counted.
        at_least: passing figures are at or above the bar, not below.
        only_gpu: why the figure of a CPU says nothing; "" if it does.
    """

    part: str
    key: str
    bar: float
    shown_by: str
    at_least: bool = False
    only_gpu: str = ""

    @property
    def of_tests(self) -> bool:
        return self.shown_by.startswith("test_")


@dataclass(frozen=True)
class Row:
    """The figure of a claim; None: there is none, and the note says why."""

    key: str
    value: float | None
    note: str = ""


# Every kernel that moves whole tensors, by the names that ``ops.traffic_cases`` gives them.
KERNELS = (
    "AdamW, fp32",
    "AdamW, bf16 to bf16",
    "SGD with momentum, bf16 to bf16",
    "Lion, bf16 to bf16",
    "Adagrad, bf16 to bf16",
    "Lamb, bf16 to bf16",
    "norm, fp32",
    "quantise to int8",
    "quantise to int4",
    "quantise to 1 bit",
    "dequantise and sum 4 of int8",
    "dequantise and sum 4 of 1 bit",
    "select top 1 %, five reads",
)
_CORES = "needs a GPU: here copies, computing and the step share the same cores"
_SMALL = "needs a GPU: what does not grow with the model fills a small part of its memory only"
_ARITHMETIC = "needs a GPU: on a CPU arithmetic, and not memory, limits it"
_SHORT = "needs a GPU: here sequences are shorter, of which dense attention takes less time"
_GLOO = "needs a GPU: here the ranks exchange over gloo"
_HOST_TIME = "needs a GPU: here the step's time is not only the host's launches"


def _tests(part: str) -> Claim:
    return Claim(part, f"tests of {part} that fail", 0, "test_")


def _between_ranks(what: str, tests: str) -> Claim:
    return Claim("nccl", f"NCCL between ranks, {what}: tests that fail", 0, tests, only_gpu=_GLOO)


# The bars of the largest model and of sparse attention are what DeepSpeed announced for its own in 2020: 10, 10 and 6.
CLAIMS = (
    _tests("kernels"),
    *(Claim("kernels", f"bandwidth, of a copy's: {name}", 0.8, "bandwidth", at_least=True) for name in KERNELS),
    _tests("engine"),
    Claim("engine", "waits of the host in a step: tests that fail", 0, "test_the_host_never_waits"),
    Claim("engine", "late collectives: tests that fail", 0, "test_late_collectives"),
    Claim("engine", "memory, of the forecast: farthest from 1", 0.1, "memory"),
    *(Claim("engine", f"step time, stage {stage} / DDP", 1.05, "steps") for stage in (1, 2, 3)),
    Claim("engine", "step time, stage 3 / FSDP2", 1.05, "steps"),
    *(Claim("engine", f"step time, stage {stage} / DeepSpeed", 1.05, "deepspeed") for stage in (1, 2, 3)),
    Claim("engine", "host time per unit, stage 2 / FSDP2 with weights kept", 1.05, "host", only_gpu=_HOST_TIME),
    Claim("engine", "host time per unit, stage 3 / FSDP2", 1.05, "host", only_gpu=_HOST_TIME),
    _tests("nccl"),
    _between_ranks("collectives", "test_collectives"),
    _between_ranks("stages 0 to 3", "test_stages"),
    _between_ranks("MiCS and hpZ", "test_replicas"),
    _between_ranks("qwZ and qgZ", "test_exchanges_in_few_bits"),
    _between_ranks("waits of the host in a step", "test_the_host_never_waits"),
    _between_ranks("tensor ranks", "test_tensor_ranks"),
    _between_ranks("experts", "test_expert_ranks"),
    _between_ranks("sequences", "test_sequence_ranks"),
    _between_ranks("pipelines", "test_pipelines"),
    _between_ranks("checkpoints, bit for bit", "test_checkpoints"),
    _between_ranks("hangs and ranks that end", "test_a_fault"),
    _tests("states"),
    Claim("states", "bandwidth, of a copy's: AdamW, moments in 8 bits", 0.4, "few_bits", True, _ARITHMETIC),
    Claim("states", "time of AdamW, moments in 8 bits / in fp32", 1.3, "few_bits", only_gpu=_ARITHMETIC),
    Claim("states", "bandwidth, of a copy's: encode to NF4", 0.3, "few_bits", True, _ARITHMETIC),
    Claim("states", "bandwidth, of a copy's: decode NF4", 0.5, "few_bits", True, _ARITHMETIC),
    Claim(
        "states",
        "time of AdamW with bf16 masters, rounded at random / to the nearest",
        1.3,
        "few_bits",
        only_gpu=_ARITHMETIC,
    ),
    _tests("offload"),
    Claim("offload", "step with offload / longest of compute, copies, CPU's step", 1.2, "overlap", only_gpu=_CORES),
    Claim("offload", "step with offload beside the next forward / longest of these", 1.2, "overlap", only_gpu=_CORES),
    Claim("offload", "largest model, with offload / without", 10, "largest", at_least=True, only_gpu=_SMALL),
    _tests("trainer"),
    Claim("trainer", "fp16: loss scales that differ from DeepSpeed's", 0, "fp16"),
    Claim("trainer", "save, GB/s of torch.save's", 1, "saves", at_least=True),
    Claim("trainer", "load, GB/s of torch.load's", 1, "saves", at_least=True),
    Claim("bench", "sparse attention: longest sequence / dense attention's", 10, "attention", at_least=True),
    Claim("bench", "sparse attention: time of dense attention / its", 6, "attention", True, _SHORT),
    Claim("bench", "sparse attention: time of torch's SDPA / its", 6, "attention", True, _SHORT),
)


def measurements(part: str) -> list[str]:
    """Those that show claims of a part, each once."""
    return list(dict.fromkeys(claim.shown_by for claim in CLAIMS if claim.part == part and not claim.of_tests))


# ---- what a part leaves --------------------------------------------------------------------------------------------


@dataclass
class Left:
    """What a part leaves in build/gpu/DEVICE/PART.json.

    Attributes:
        about: date, versions and hardware.
        steps: name -> how it ended.
    """

    about: str = ""
    steps: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Left:
        """Nothing, if there is no file."""
        if not file.exists():
            return cls()
        found = json.loads(file.read_text())
        return cls(found["about"], found["steps"], [Row(**row) for row in found["rows"]])


def folder_of(device: str) -> Path:
    return ROOT / "build" / "gpu" / device


def rows_of_tests(part: str, junit: Path, whole: bool = True) -> list[Row]:
    """The rows of a part's claims that tests show, from pytest's report; tests that were skipped show nothing.

    If it is not ``whole``, tests that passed show nothing, either.
    """
    if not junit.exists():
        return [
            Row(claim.key, None, "its tests did not end") for claim in CLAIMS if claim.part == part and claim.of_tests
        ]
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    rows = [_of_tests(claim, cases) for claim in CLAIMS if claim.part == part and claim.of_tests]
    return [row if whole or row.value else Row(row.key, None, f"ended early: {row.note}") for row in rows]


def _of_tests(claim: Claim, cases: Iterable[ElementTree.Element]) -> Row:
    ended: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in cases:
        # An error while a file is collected has no test's name.
        if case.get("name", "").startswith(claim.shown_by) or (
            case.find("error") is not None and claim.shown_by == "test_"
        ):
            kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
            ended[kinds[0] if kinds else "passed"] += 1
            skipped = case.find("skipped")
            reasons[skipped.get("message", "") if skipped is not None else ""] += 1
    del reasons[""]
    bad, passed, left_out = ended["failure"] + ended["error"], ended["passed"], ended["skipped"]
    why = ", ".join(reasons)
    if not bad + passed:
        return Row(claim.key, None, why or "no such test ran")
    return Row(claim.key, bad, f"{passed} passed" + (f", {left_out} skipped: {why}" if left_out else ""))


# ---- the table -----------------------------------------------------------------------------------------------------


def verdict(claim: Claim, row: Row | None, device: str) -> str:
    if row is None or row.value is None:
        return NOT_RUN
    if device == "cpu" and claim.only_gpu:
        return NOT_JUDGED
    return PASS if (row.value >= claim.bar if claim.at_least else row.value <= claim.bar) else FAIL


def lines_of(lefts: Mapping[str, Left], device: str) -> list[tuple[str, str, str, str, str, str]]:
    """Of each claim: part, what, measured, bar, verdict, note."""
    rows = {row.key: row for left in lefts.values() for row in left.rows}
    found = []
    for claim in CLAIMS:
        row = rows.get(claim.key)
        outcome = verdict(claim, row, device)
        note = row.note if row is not None else f"{claim.part} has not run"
        note = claim.only_gpu if outcome == NOT_JUDGED else note
        value = "" if row is None or row.value is None else f"{row.value:.3g}"
        found.append((claim.part, claim.key, value, f"{'>=' if claim.at_least else '<='} {claim.bar:g}", outcome, note))
    return found


def page(lefts: Mapping[str, Left], lines: Sequence[Sequence[str]], device: str) -> list[str]:
    """The table as Markdown, below what ran when and where."""
    counts = Counter(line[4] for line in lines)
    total = ", ".join(f"{counts[kind]} {kind}" for kind in (PASS, FAIL, NOT_RUN, NOT_JUDGED) if counts[kind])
    head = "Claims on a GPU" if device == "cuda" else "Claims on a GPU, tried on a CPU"
    text = [f"# {head}: {total}", "", "`make gpu`; each part when it was run last:", ""]
    for part, left in lefts.items():
        steps = "; ".join(f"{name} {ended}" for name, ended in left.steps.items())
        text.append(f"- {part}: {left.about}: {steps}" if left.steps else f"- {part}: not run")
    text += ["", *markdown(["part", "claim", "measured", "bar", "", "note"], lines)]
    return text


def show(lines: Sequence[Sequence[str]], title: str, console: Console) -> None:
    table = Table("part", "claim", "measured", "bar", "", "note", title=title)
    colours = {PASS: "green", FAIL: "red", NOT_RUN: "yellow", NOT_JUDGED: "dim"}
    for part, what, value, bar, outcome, note in lines:
        table.add_row(part, what, value, bar, f"[{colours[outcome]}]{outcome}[/]", note.replace("[", r"\["))
    console.print(table)


def write_table(device: str, out: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Print the table and write it; the number of claims by verdict."""
    folder = folder or folder_of(device)
    lefts = {part: Left.read(folder / f"{part}.json") for part in PARTS}
    lines = lines_of(lefts, device)
    text = page(lefts, lines, device)
    show(lines, text[0].removeprefix("# "), Console(width=None if Console().is_terminal else 160))
    out = out or (ROOT / "benchmarks" / "results" / "gpu_claims.md" if device == "cuda" else folder / "claims.md")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(text) + "\n")
    return dict(Counter(line[4] for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    write_table(args.device)


if __name__ == "__main__":
    main()
