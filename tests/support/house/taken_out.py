"""Takes a part out of a copy of the package: what is left shall train."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.house.imports import Package
from tests.support.house.parts import PARTS, part_of
from tests.support.paths import ROOT

# Runs after the files of an editable install, whose finder would fill in what a copy lacks.
_SITE = """import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

sys.meta_path[:] = [finder for finder in sys.meta_path if finder in (BuiltinImporter, FrozenImporter, PathFinder)]
sys.path[:] = [folder for folder in sys.path if folder != {root!r}]
"""


class Removed(NamedTuple):
    """How many files of the package were removed with a part, and how many files of tests cannot run without it."""

    files: int
    tests: int


def take_out(
    part: str, package: Package, suite: Package, folder: Path, parts: Mapping[str, tuple[str, ...]] = PARTS
) -> Removed:
    """Copy a package into ``folder``, and remove the part from the copy.

    Args:
        part: its name in ``parts``.
        package: which the part is of.
        suite: the tests; those count that import the part, or a file of the tests that does.
        folder: empty or not there.
    """
    copy = folder / package.name
    shutil.copytree(package.folder, copy)  # with bytecode, or each copy would be compiled anew
    files = [path for file, path in package.files.items() if part_of(file, parts) == part]
    for path in files:
        (copy / path.relative_to(package.folder)).unlink()
    _remove_empty(copy)
    return Removed(len(files), len(_tests_of(part, package, suite, parts)))


def feature_folders(package: Path) -> list[Path]:
    """The folders of features and tools that come through the door, relative to the package."""
    found = [path.parent for part in ("features", "tools") for path in (package / part).glob("*/__init__.py")]
    return sorted(path.relative_to(package) for path in found)


def without_features(package: Path, folder: Path, gone: Iterable[Path]) -> Path:
    """Copy a package into ``folder`` without some of its ``feature_folders``; returns the copy's path."""
    copy = folder / package.name
    shutil.copytree(package, copy)
    for each in gone:
        shutil.rmtree(copy / each)
    return copy


def checkout_without_features(root: Path, folder: Path, gone: Iterable[Path]) -> Path:
    """Copy a checkout into ``folder`` without some of its features and their tests; returns the copy's path.

    What git does not keep is left out: environments, builds and hidden folders.
    """
    copy = folder / root.name
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "dist", "site"))
    for each in gone:
        shutil.rmtree(copy / "lt_zero" / each)
        shutil.rmtree(copy / "tests" / each)
    return copy


def only_from_copy(copy: Path) -> dict[str, str]:
    """Variables for processes that find this package, and its tests, in ``copy`` and nowhere else."""
    site = copy / "build" / "site-of-copy"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE.format(root=str(ROOT)), encoding="utf-8")
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{copy}"}


def _tests_of(part: str, package: Package, suite: Package, parts: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The files of the suite that import a file of the part, directly or through others of the suite."""
    lost = set[str]()
    importers = dict[str, set[str | None]]()
    for file, names in suite.names.items():
        importers[file] = {suite.file_of(name) for name in names}
        if any(other is not None and part_of(other, parts) == part for other in map(package.file_of, names)):
            lost.add(file)
    while more := {file for file, others in importers.items() if others & lost} - lost:
        lost |= more
    return lost


def _remove_empty(folder: Path) -> None:
    """Remove folders in which only bytecode is left: Python would import them as packages without code."""
    for path in sorted(path for path in folder.rglob("*") if path.is_dir() and path.name != "__pycache__"):
        if path.exists() and all(inner.suffix == ".pyc" for inner in path.rglob("*") if inner.is_file()):
            shutil.rmtree(path)
