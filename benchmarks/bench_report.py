"""What bench_all.py writes: tables of ratios, a picture, and their places in README.md and docs/performance.md."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from measuring import ROOT, Ratio, markdown, ratio

# Rows from which README.md quotes.
STEP = "step of a 29.5M GPT, 2 ranks, fp32"
STEP_BESIDE_DEEPSPEED = "the same beside DeepSpeed"

RESULTS = ROOT / "benchmarks" / "results"
Found = Mapping[str, Any]  # the content of a results file

# ---- rows ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One way to do what a row is about."""

    name: str
    median: float
    ratio: Ratio

    @property
    def ours(self) -> bool:
        return self.name.startswith(("lt_zero", "lt-zero"))


class Compared(NamedTuple):
    """A row with its ratios.

    Attributes:
        what: is compared.
        unit: of the medians.
        cases: peers and lt_zero; the first is the reference.
        limit: what the machine can do, if it was measured.
        missing: why there are no cases.
        disturbed: whether the machine did other things, too.
    """

    what: str
    unit: str
    cases: list[Case]
    limit: Case | None
    missing: str
    disturbed: bool


def rows_of(found: Found) -> Iterator[Compared]:
    for group in found["groups"]:
        kept = group["attempts"][group["kept"]] if group["attempts"] else {"rounds": {}, "reasons": []}
        for row in group["rows"]:
            yield _compared(group, row, kept)


def _compared(group: Found, row: Found, kept: Found) -> Compared:
    rounds, unit = kept["rounds"], group["unit"]
    names = row["cases"] if row["cases"] is not None else [name for name in rounds if name != row["limit"]]
    reference = next((name for name in row["references"] if name in rounds), None)
    missing = group["left_out"] or ("" if reference else f"{row['references'][0]} was not measured")

    def case(name: str) -> Case:
        values = rounds[name]
        return Case(name.split(": ", 1)[-1], statistics.median(values), ratio(values, rounds[reference]))

    cases = (
        [case(name) for name in (reference, *(n for n in names if n != reference)) if name in rounds]
        if reference
        else []
    )
    limit = case(row["limit"]) if reference and row["limit"] in rounds else None
    return Compared(row["what"], unit, cases, limit, missing, bool(kept["reasons"]))


# ---- tables --------------------------------------------------------------------------------------------------------


def amount(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    return f"{value:.0f} {unit}"


def ours_of(row: Compared) -> str:
    ours = [case for case in row.cases if case.ours]
    if len(ours) == 1:
        return f"{ours[0].ratio.median:.2f}"
    rest = [(case.name.removeprefix("lt_zero").strip(" ,."), case.ratio.median) for case in ours]
    return "; ".join(f"{name or 'all'}: {middle:.2f}" if name else f"{middle:.2f}" for name, middle in rest)


def peers_of(row: Compared) -> str:
    return "; ".join(f"{case.name} {case.ratio.median:.2f}" for case in row.cases[1:] if not case.ours)


def what_of(row: Compared) -> str:
    return f"{row.what} (disturbed)" if row.disturbed else row.what


def table(found: Found) -> list[str]:
    """A line per row: the reference, and how all others relate to it."""
    lines = []
    for row in rows_of(found):
        if not row.cases:
            lines.append([row.what, f"not measured: {row.missing}", "", "", ""])
            continue
        first = f"{row.cases[0].name}, {amount(row.cases[0].median, row.unit)}"
        limit = f"{row.limit.name} {row.limit.ratio.median:.2f}" if row.limit else ""
        lines.append([what_of(row), first, ours_of(row), peers_of(row), limit])
    return markdown(["what", "= 1.00", "lt_zero", "peers", "what the machine can do"], lines)


def details(found: Found) -> list[str]:
    """A line per case, with the quartiles."""
    lines = []
    for row in rows_of(found):
        for case in (*row.cases, *([row.limit] if row.limit else [])):
            middle, low, high = case.ratio
            lines.append(
                [what_of(row), case.name, amount(case.median, row.unit), f"{middle:.3f}", f"{low:.3f}-{high:.3f}"]
            )
    return markdown(["what", "case", "median", "ratio", "quartiles"], lines)


def attempts(found: Found) -> list[str]:
    """A line per measurement, also of those that were repeated."""
    lines = []
    for group in found["groups"]:
        for number, each in enumerate(group["attempts"]):
            kept = "kept" if number == group["kept"] else "repeated"
            shares = [f"{each['others']:.1%}", f"{each['steal']:.1%}", f"{each['load']:.1f}"]
            lines.append([group["name"], f"{each['seconds']:.0f} s", *shares, "; ".join(each["reasons"]), kept])
    return markdown(["measurement", "took", "CPU of others", "steal", "load before", "disturbed by", ""], lines)


def setting(found: Found) -> str:
    quick = " **Tiny sizes (`--quick`): the figures mean nothing.**" if found["quick"] else ""
    where = f"{found['cpu']}, kernels {found['isa']}; {found['versions']}"
    return f"{found['date']}, {where}; load {found['load'][0]:.1f} before, {found['load'][1]:.1f} after.{quick}"


def added_later(found: Found) -> Iterator[str]:
    """A line for each time at which rows were added to the results."""
    times: dict[str, list[str]] = {}
    for group in found["groups"]:
        if "measured" in group:
            times.setdefault(setting(group["measured"]), []).extend(row["what"] for row in group["rows"])
    yield from (f"Measured apart: {'; '.join(rows)}: {when}" for when, rows in times.items())


def page(found: Found) -> str:
    """The results file."""
    lines = [f"# Against peers, {found['isa']}", "", setting(found), ""]
    lines += [line for each in added_later(found) for line in (each, "")]
    lines += ["Each ratio is the median of ratios within rounds in which all cases took turns; lower is better.", ""]
    lines += [*table(found), "", "## All cases", "", *details(found), "", "## Runs", "", *attempts(found)]
    return "\n".join(lines) + "\n"


# ---- pictures ------------------------------------------------------------------------------------------------------


def draw(found: Found, path: Path) -> None:
    """A picture of the table: ratios of lt_zero, of peers, and of what the machine can do.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels: list[tuple[str, str]] = []  # and the weights of their fonts
    kinds: dict[str, list[tuple[float, float, float, float]]] = {
        "lt_zero": [],
        "peers": [],
        "what the machine can do": [],
    }
    for row in rows_of(found):
        if not row.cases:
            continue
        labels.append((f"{what_of(row)} / {row.cases[0].name}", "bold"))
        for case in (*row.cases[1:], *([row.limit] if row.limit else [])):
            kind = "what the machine can do" if case is row.limit else "lt_zero" if case.ours else "peers"
            kinds[kind].append(
                (
                    case.ratio.median,
                    len(labels),
                    *map(abs, (case.ratio.median - case.ratio.low, case.ratio.high - case.ratio.median)),
                )
            )
            labels.append((case.name, "normal"))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.17 * len(labels)))
    for number, (kind, points) in enumerate(kinds.items()):
        if points:
            x, y, below, above = zip(*points, strict=True)
            axes.errorbar(
                x, y, xerr=[below, above], fmt="o", color=f"C{number}", label=kind, markersize=4, elinewidth=1
            )
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_yticks(range(len(labels)), [name for name, _ in labels], fontsize=7)
    for tick, (_, weight) in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_fontweight(weight)
    axes.set(xscale="log", xlabel="time or memory relative to the peer (lower is better)", ylim=(len(labels), -1))
    axes.set_xlim(min(0.05, axes.get_xlim()[0]), max(2, axes.get_xlim()[1]))
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    axes.set_xticks(ticks, map(str, ticks))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.06), ncols=3)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


# ---- documentation -------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- bench-all: begin -->", "<!-- bench-all: end -->"
_PLACE = re.compile(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", re.DOTALL)


THEMES = {  # of the groups of measurements, by the beginnings of their names; what matches none is in the last
    "Training steps": ("step", "offload", "nvme"),
    "AdamW": ("adam", "moments"),
    "Memory": ("predict", "frozen", "memory-budget"),
    "Files": ("load", "save", "export"),
    "Processes": ("",),
}


def themes_of(results: Mapping[str, Found]) -> Iterator[tuple[str, list[dict[str, Compared]]]]:
    """The rows of each theme, each by path of the results file; the same row of several machines is one."""
    same: dict[str, dict[tuple[str, str], dict[str, Compared]]] = {theme: {} for theme in THEMES}
    for path, found in results.items():
        for group in found["groups"]:
            theme = next(theme for theme, names in THEMES.items() if group["name"].startswith(names))
            for row in rows_of({"groups": [group]}):
                key = (row.what, row.cases[0].name if row.cases else "")
                same[theme].setdefault(key, {})[path] = row
    return ((theme, list(rows.values())) for theme, rows in same.items() if rows)


def by_case(rows: list[dict[str, Compared]], paths: Iterable[str]) -> Iterator[list[str]]:
    """A line per case and a column per machine, so that no cell has to be broken."""
    for row in rows:
        first = next(iter(row.values()))
        heads = {
            path: f"{amount(each.cases[0].median, each.unit)}{' (disturbed)' if each.disturbed else ''}"
            if each.cases
            else f"not measured: {each.missing}"
            for path, each in row.items()
        }
        reference = f", relative to {first.cases[0].name}" if first.cases else ""
        yield [f"**{first.what}**{reference}", *(heads.get(path, "") for path in paths)]
        cells: dict[str, dict[str, str]] = {}
        for path, each in row.items():
            for case in (*each.cases[1:], *([each.limit] if each.limit else [])):
                name = f"*{case.name}*" if case is each.limit else case.name
                cells.setdefault(name, {})[path] = f"{case.ratio.median:.2f}"
        yield from ([name, *(values.get(path, "") for path in paths)] for name, values in cells.items())


def of_performance(results: Mapping[str, Found]) -> str:
    """The part of docs/performance.md; by path of the results file."""
    lines = ["", "## Against peers", ""]
    lines += [
        "`make bench-all` lets all cases of a row take turns. Ratios are medians over the rounds; lower is better. A",
        "line in bold has the reference and what it takes; one in italics is what the machine can do.",
    ]
    columns = [f"{found['cpu'].partition(',')[0]}, {found['isa']}" for found in results.values()]
    for theme, rows in themes_of(results):
        lines += ["", f"### {theme}", "", *markdown(["", *columns], list(by_case(rows, results)))]
    lines += ["", "### Machines", ""]
    for path, found in results.items():
        lines += [f"- {setting(found)} Quartiles and raw figures: `{path}` and the `.json` beside it."]
        lines += [f"    - {each}" for each in added_later(found)]
    return "\n".join(lines) + "\n\n"


def of_readme(results: Mapping[str, Found]) -> str:
    """The sentence of README.md about speed, from the first results that have all peers of the sentence.

    Raises:
        ValueError: no results have them.
    """
    for found in results.values():
        rows = {row.what: {case.name: f"{case.ratio.median:.2f}" for case in row.cases} for row in rows_of(found)}
        beside_fsdp = rows.get(STEP, {})
        beside_deepspeed = rows.get(STEP_BESIDE_DEEPSPEED, {})
        if "FSDP2" in beside_fsdp and "DeepSpeed stage 3" in beside_deepspeed:
            ours = beside_fsdp["lt_zero stage 3"]
            fsdp = beside_fsdp["FSDP2"]
            deepspeed = beside_deepspeed["DeepSpeed stage 3"]
            return (
                f"- **Fast.** A stage 3 step of a GPT on two CPU ranks takes {ours} times as long as DDP's.\n"
                f"  FSDP2 takes {fsdp} and DeepSpeed {deepspeed} times as long ([measurements](docs/performance.md)).\n"
            )
    raise ValueError(f"no results have both FSDP2 in {STEP!r} and DeepSpeed in {STEP_BESIDE_DEEPSPEED!r}")


PLACES = {"docs/performance.md": of_performance, "README.md": of_readme}


def stored(folder: Path = RESULTS) -> dict[str, Found]:
    """The results that are kept in the repository, the largest vectors first; by path from its root."""
    files = sorted(folder.glob("all_*.json"), reverse=True)
    return {f"benchmarks/results/{file.stem}.md": json.loads(file.read_text(encoding="utf-8")) for file in files}


def place_in(text: str) -> str:
    """What stands between the marks of a page.

    Raises:
        ValueError: the page has not exactly one place.
    """
    found = _PLACE.findall(text)
    if len(found) != 1:
        raise ValueError(f"there must be one {BEGIN} and one {END}, and there are {len(found)} such places")
    return str(found[0])


def rewrite(results: Mapping[str, Found], root: Path = ROOT) -> list[Path]:
    """Put the ratios into the pages; returns those that changed."""
    changed = []
    for name, part in PLACES.items():
        file = root / name
        text = file.read_text(encoding="utf-8")
        place_in(text)
        new = _PLACE.sub(lambda _: f"{BEGIN}\n{part(results)}{END}", text)  # noqa: B023 - called at once
        if new != text:
            file.write_text(new, encoding="utf-8")
            changed.append(file)
    return changed
