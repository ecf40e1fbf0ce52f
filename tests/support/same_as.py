"""Compares the bits of short runs on this checkout with those on another commit: ``make same-as BASE=<commit>``.

For changes that may move anything but results. Nothing that depends on a CPU is stored: both checkouts train on the
same machine, one after the other. Each run of this checkout also goes on from the checkpoint of the other commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from tests.support.launchers import environment
from tests.support.paths import ROOT
from tests.support.same_as_runs import RUNS, SAVED, Values

SCRIPT = Path(__file__).with_name("same_as_runs.py")


def checkout(commit: str, folder: Path) -> Path:
    """Put the package of ``commit`` into ``folder``; returns it.

    Raises:
        subprocess.CalledProcessError: the repository has no such commit.
    """
    packed = subprocess.run(["git", "archive", commit, "lt_zero"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder)
    return folder


def train(package: Path, names: Iterable[str], into: Path, checkpoints: Path, resumes: bool = False) -> None:
    """Take the runs ``names`` with the package in the folder ``package``; their values go ``into`` a folder.

    Args:
        checkpoints: a folder, into which runs save, or whose checkpoints they go on from.

    Raises:
        RuntimeError: a run has failed; has the end of what was printed.
    """
    for ranks, group in groupby(sorted(names, key=_ranks), _ranks):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        mode = "resume" if resumes else "save"
        command = [*launcher, str(SCRIPT), str(into), str(checkpoints), mode, *group]
        done = subprocess.run(
            command, env=environment(PYTHONPATH=str(package)), cwd=into.parent, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"The runs of {package} on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}"[-8000:])


def _ranks(name: str) -> int:
    return RUNS[name].ranks


def values_of(folder: Path, name: str) -> list[Values]:
    """What each rank of a run has written."""
    return [torch.load(folder / name / f"{rank}.pt") for rank in range(_ranks(name))]


def differences(found: Sequence[Values], wanted: Sequence[Values], bits: bool = True) -> Iterator[str]:
    """What differs, or is there on one side only, on any rank.

    Args:
        found: the values of each rank.
        wanted: those that they are compared with.
        bits: a bit makes a difference; else only a shape or a dtype.
    """
    for rank, (here, there) in enumerate(zip(found, wanted, strict=True)):
        for key in dict.fromkeys([*there, *here]):
            text = f"rank {rank}, step {key[0]}: {key[1]}"
            if key not in here or key not in there:
                yield f"{text} is {'new' if key in here else 'missing'}"
            elif not _same(here[key], there[key], bits):
                yield text


def _same(value: Tensor, other: Tensor, bits: bool) -> bool:
    """True if shape and dtype, and all ``bits``, are the same: NaN equals itself, and 0.0 is not -0.0."""
    if value.dtype != other.dtype or value.shape != other.shape:
        return False
    return not bits or torch.equal(_bytes(value), _bytes(other))


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def resumed(values: Sequence[Values]) -> list[Values]:
    """Of uninterrupted runs, what those have, too, that go on from their checkpoints."""
    return [{(step, name): value for (step, name), value in rank.items() if step > SAVED} for rank in values]


def compare(base: Path, here: Path, names: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """The differences of each run.

    Args:
        base: folder with the package that is compared with.
        here: folder with the package that is examined.
        folder: for what runs write.
    """
    wanted = folder / "base"
    found = folder / "here"
    again = folder / "resumed"
    for place in (wanted, found, again):
        place.mkdir(parents=True)
    train(base, names, wanted, wanted)
    train(here, names, found, found)
    train(here, names, again, wanted, resumes=True)
    told: dict[str, list[str]] = {}
    for name in names:
        before, after, went_on = (values_of(place, name) for place in (wanted, found, again))
        bits = not RUNS[name].depends_on_time
        told[name] = list(differences(after, before, bits))
        told[name] += [f"resumed, {text}" for text in differences(went_on, resumed(before), bits)]
    return told


def main() -> int:
    """Print a line for each run; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="the commit that is compared with")
    parser.add_argument("runs", nargs="*", default=list(RUNS), help="names of runs; default: all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = checkout(arguments.base, Path(folder) / "package")
        told = compare(base, ROOT, arguments.runs, Path(folder) / "runs")
    for name, texts in told.items():
        result = f"{len(texts)} differences: {'; '.join(texts[:3])}" if texts else "same"
        print(f"{name:36} {result}")
    return int(any(told.values()))


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main())
