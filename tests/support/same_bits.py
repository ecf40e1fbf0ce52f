"""Compares the bits of short runs between numbers of ranks: ``make same-bits``.

The runs hold each pair of a stage, a precision and a kind. Each has 12 virtual ranks, and is taken on 1, 2, 3, 4 and 6
ranks; one of each stage also has 8 virtual ranks, on 8 and 1. All of them save in the middle of an epoch, and go on
from that checkpoint on another number of ranks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.launchers import environment
from tests.support.matrix import covering
from tests.support.same_bits_runs import RANKS, RUNS, SAVED, Values

SCRIPT = Path(__file__).with_name("same_bits_runs.py")
WIDE = 8  # ranks, each of one virtual rank


def default_runs() -> list[str]:
    """The names of few runs that hold each pair of a stage, a precision and a kind."""
    rows = [(run.stage, run.precision, run.kind) for run in RUNS.values()]
    chosen = set(covering(rows, [(0, 1), (0, 2), (1, 2)]))
    return [name for name, run in RUNS.items() if (run.stage, run.precision, run.kind) in chosen]


def one_of_each_stage(names: Sequence[str]) -> list[str]:
    """Of these runs one of each stage, with different precisions and kinds."""
    found = []
    for stage in sorted({RUNS[name].stage for name in names}):
        of_stage = [name for name in names if RUNS[name].stage == stage]
        found.append(of_stage[2 * stage % len(of_stage)])
    return found


def train(ranks: int, names: Sequence[str], into: Path, checkpoints: Path, resumes: bool, virtual: int = 0) -> None:
    """Take the runs ``names`` on ``ranks`` ranks; their values go ``into`` a folder.

    Args:
        checkpoints: a folder, into which runs save, or whose checkpoints they go on from.
        virtual: virtual ranks; 0: those of the runs.

    Raises:
        RuntimeError: a run has failed; has the end of what was printed.
    """
    into.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(SCRIPT), str(into), str(checkpoints), "resume" if resumes else "save", *names]
    variables = {"SAME_BITS_VIRTUAL": str(virtual)} if virtual else {}
    done = subprocess.run(command, env=environment(**variables), cwd=into.parent, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The runs on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}"[-8000:])


def differences(found: Values, wanted: Values) -> Iterator[str]:
    """The names of values that are not the same to the bit, or that only one of the runs has."""
    for name in dict.fromkeys([*wanted, *found]):
        if name not in found or name not in wanted:
            yield f"{name} is {'new' if name in found else 'missing'}"
        elif not _same(found[name], wanted[name]):
            yield name


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(one == two)
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    bits = [value.contiguous().flatten().view(torch.uint8) for value in (one, two)]
    return torch.equal(*bits)


def after(values: Values, steps: int) -> Values:
    """Of the values of a whole run, those that one has, too, that goes on after so many steps.

    The checkpoint is saved in the round that ends the last of these steps. Rounds that follow may end no step.
    """
    counts = {name.removesuffix(": steps"): count for name, count in values.items() if name.endswith(": steps")}
    saved = next((place for place, count in counts.items() if count == steps), None)
    before = {place for place, count in counts.items() if count < steps or place == saved}
    last = max(map(_epoch, before), default=0)
    left = {name: value for name, value in values.items() if name.partition(": ")[0] not in before}
    return {name: value for name, value in left.items() if _epoch(name) >= last}


def _epoch(name: str) -> int:
    """The number of the epoch that a value is of; a large one for those at the end of the run."""
    found = re.match(r"epoch (\d+)", name)
    return int(found[1]) if found else sys.maxsize


def compare(names: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """The differences of each run on any number of ranks from that on one."""
    told: dict[str, list[str]] = {name: [] for name in names}

    def read(place: str, name: str) -> Values:
        return dict(torch.load(folder / place / f"{name}.pt", weights_only=False))

    for ranks in RANKS:
        train(ranks, names, folder / f"{ranks}", folder / f"{ranks}", resumes=False)
    # Each goes on from a checkpoint of the next number of ranks.
    for ranks, other in zip(RANKS, [*RANKS[1:], RANKS[0]], strict=True):
        train(ranks, names, folder / f"{other} to {ranks}", folder / f"{other}", resumes=True)
        for name in names:
            whole = read("1", name)
            told[name] += [f"{ranks} ranks, {text}" for text in differences(read(f"{ranks}", name), whole)]
            went_on = differences(read(f"{other} to {ranks}", name), after(whole, SAVED))
            told[name] += [f"{other} to {ranks} ranks, {text}" for text in went_on]
    if many := one_of_each_stage(names):
        for ranks in (1, WIDE):
            train(ranks, many, folder / f"wide {ranks}", folder / f"wide {ranks}", resumes=False, virtual=WIDE)
        for name in many:
            wide = differences(read(f"wide {WIDE}", name), read("wide 1", name))
            told[name] += [f"{WIDE} virtual ranks, {text}" for text in wide]
    return told


def main() -> int:
    """Print a line for each run; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help=f"names of runs, such as {next(iter(RUNS))!r}; default: pairs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = compare(arguments.runs or default_runs(), Path(folder))
    for name, texts in told.items():
        result = f"{len(texts)} differences: {'; '.join(texts[:3])}" if texts else "same"
        print(f"{name:36} {result}")
    return int(any(told.values()))


if __name__ == "__main__":
    sys.exit(main())
