"""Runs the fast tests of a checkout without features: once without all of them, then without each one.

Without all of them the tests of the rest have to pass, and those that need a feature are skipped. Without one of them
the skipped ones and the tests of the other features have to pass: none may need the one that is gone unless it says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.support.house.taken_out import feature_folders, only_from_copy

_REASON = "not installed: "  # of tests.support.features


class Verdict(NamedTuple):
    """What became of tests.

    Attributes:
        passed: how many.
        failed: those that did, also at set-up.
        lacking: those that are skipped as a feature is not installed.
    """

    passed: int
    failed: list[str]
    lacking: list[str]


def verdicts(root: Path, folder: Path) -> Iterator[tuple[str, Verdict]]:
    """What is gone and what became of the tests, for all features and for each one.

    Args:
        root: of a checkout, of which what is committed is tested.
        folder: for the copies, empty.
    """
    folders = feature_folders(root / "lt_zero")
    every = run_tests(copy_without(root, folder / "all", folders), ["tests"])
    yield "all", every
    for gone in folders:
        copy = copy_without(root, folder / gone.name, [gone])
        yield gone.as_posix(), run_tests(copy, ["tests/features", "tests/tools", *every.lacking])
        shutil.rmtree(copy)


def copy_without(root: Path, copy: Path, gone: Iterable[Path]) -> Path:
    """Copy what is committed of a checkout, without some of its features and their tests; returns the copy's path."""
    subprocess.run(["git", "clone", "--quiet", str(root), str(copy)], check=True)
    for each in gone:
        shutil.rmtree(copy / "lt_zero" / each)
        shutil.rmtree(copy / "tests" / each)
    return copy


def run_tests(checkout: Path, tests: Sequence[str], processes: int = 2) -> Verdict:
    """What became of fast tests of a checkout.

    Raises:
        RuntimeError: they could not be run; has the end of what pytest printed.
    """
    report = checkout / "report.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "--dist", "loadfile", "-p", "no:cacheprovider"]
    words += [f"--junit-xml={report}", "-o", "junit_family=xunit1"]  # which has the files of tests
    environment = only_from_copy(checkout)
    done = subprocess.run([*words, *tests], cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout[-2000:] + done.stderr)
    passed = 0
    failed = list[str]()
    lacking = list[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('file')}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif skipped is None:
            passed += 1
        elif _REASON in skipped.get("message", ""):
            lacking.append(name)
    return Verdict(passed, failed, lacking)
