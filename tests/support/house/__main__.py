"""``python -m tests.support.house [MEASURE...] [--json]``: prints measures of the package's structure."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.house.fit import Job
from tests.support.house.imports import Package, between_parts, core_to_config, core_to_features, this_package
from tests.support.house.loaded import by_part, fits, total
from tests.support.house.parts import PARTS, is_optional, line_count, parts_of
from tests.support.house.taken_out import take_out
from tests.support.house.tested import verdicts
from tests.support.paths import PACKAGE, ROOT

Rows = list[dict[str, Any]]


def sizes() -> Rows:
    """Files and lines of each part, in the order of the table."""
    paths = this_package().files
    part = parts_of(paths)
    found = [
        {
            "part": name,
            "files": sum(of == name for of in part.values()),
            "lines": sum(line_count(paths[file]) for file, of in part.items() if of == name),
        }
        for name in [*PARTS, "unknown"]
    ]
    return [row for row in found if row["files"]] + [_sum(found, "files", "lines")]


def loaded() -> Rows:
    """Modules and lines that a default fit loads, by stage and part: rank 0 of 2, with a checkpoint."""
    rows: Rows = []
    stages = (0, 1, 2, 3)
    outcomes = fits([Job(stage, PACKAGE) for stage in stages])
    for stage, outcome in zip(stages, outcomes, strict=True):
        if outcome.problem:
            raise RuntimeError(outcome.problem)
        parts = by_part(PACKAGE, outcome.files)
        for name, count in {"all": total(parts), **parts}.items():
            rows.append({"stage": stage, "part": name, **count._asdict()})
    return rows


def imports() -> Rows:
    """Imports between parts; those that lead out of the core into features or the configuration by file."""
    found = this_package().imports()
    rows: Rows = [
        {"from": first, "to": second, "imports": count}
        for (first, second), count in sorted(between_parts(found).items())
    ]
    into = sum(row["imports"] for row in rows if is_optional(row["to"]) and not is_optional(row["from"]))
    rows.append({"from": "all but features and tools", "to": "features and tools", "imports": into})
    for title, some in (("features and tools", core_to_features(found)), ("config", core_to_config(found))):
        rows.append({"from": "core", "to": title, "imports": len(some), "which": [str(each) for each in some]})
    return rows


def taken_out() -> Rows:
    """Whether ``ZeroStrategy(stage=3)`` and a fit of two steps run without a feature or a tool, one row each."""
    suite = Package(ROOT / "tests")
    names = [part for part in PARTS if is_optional(part)]
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, part) for part in names]
        removed = [take_out(part, this_package(), suite, folder) for part, folder in zip(names, folders, strict=True)]
        outcomes = fits([Job(3, folder / PACKAGE.name) for folder in folders])
    return [
        {"without": part, "files": gone.files, "tests": gone.tests, "a fit of two steps": outcome.problem or "runs"}
        for part, gone, outcome in zip(names, removed, outcomes, strict=True)
    ]


def tested() -> Rows:
    """Whether the fast tests pass without all features, and the tests of features without each one; about an hour."""
    with tempfile.TemporaryDirectory() as place:
        return [
            {"without": gone, "passed": of.passed, "skipped for it": len(of.lacking), "failed": of.failed}
            for gone, of in verdicts(ROOT, Path(place))
        ]


def entered_code() -> Rows:
    """The size of the functions that a step, a save, a load and a configuration enter, without common/."""
    from tests.support.house.entered import entered  # it imports torch, which the other measures do without here

    return [{"what": title, **size._asdict()} for title, size in entered()]


MEASURES: dict[str, Callable[[], Rows]] = {
    "sizes": sizes,
    "loaded": loaded,
    "imports": imports,
    "taken-out": taken_out,
    "entered": entered_code,
    "tested": tested,
}
LONG = ("tested",)


def _sum(rows: Rows, *names: str) -> dict[str, Any]:
    return {"part": "all", **{name: sum(row[name] for row in rows) for name in names}}


def table(rows: Rows) -> str:
    """Rows as a table of Markdown; their keys are its columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    text = "; ".join(value) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.house", description=__doc__)
    parser.add_argument("measures", nargs="*", help=f"of {', '.join(MEASURES)}; default: all but {', '.join(LONG)}")
    parser.add_argument("--json", action="store_true", help="print one object of JSON, by measure")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.measures if name not in MEASURES]:
        parser.error(f"no measure {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    found: dict[str, Rows] = {}
    for name in given.measures or [name for name in MEASURES if name not in LONG]:
        found[name] = MEASURES[name]()
        if not given.json:
            print(f"## {name}\n\n{MEASURES[name].__doc__}\n\n{table(found[name])}\n", flush=True)
    if given.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
