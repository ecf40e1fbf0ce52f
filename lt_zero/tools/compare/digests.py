"""Digests of the weights after each step, by which two runs are shown to have the same bits. Written: digest_writer.py.

``digests0.jsonl`` in the folder, for the first module of a run, one JSON object a line:

kind    fields
start   version, at (steps before), ranks, stage, mode, torch (its version)
step    at (optimizer steps taken until then, the first is 1), digest (weights_digest.py)

A run that is resumed, or begins anew, goes on in the same file: later steps than that of its start do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lt_zero.core.stores.regular_file import parse_json, read_text

DIGESTS = "LT_ZERO_DIGESTS"  # in the environment: the folder
VERSION = 1  # of the file
_MOST = 1 << 30  # bytes of a file


def file_of(folder: Path, number: int = 0) -> Path:
    """The file of the ``number``-th module of a run."""
    return folder / f"digests{number}.jsonl"


class DigestsError(ValueError):
    """Digests cannot be read or compared. Names the file and the remedy."""


class Digests(NamedTuple):
    """The digests of a run.

    Attributes:
        name: as the user wrote the folder.
        about: fields of the last start.
        steps: the digest of each step.
    """

    name: str
    about: Mapping[str, Any]
    steps: Mapping[int, str]

    def __str__(self) -> str:
        shown = ", ".join(
            f"{key} {self.about[key]}" for key in ("stage", "ranks", "mode", "torch") if key in self.about
        )
        return f"{self.name} ({shown}, steps {min(self.steps)} to {max(self.steps)})"


def read_digests(folder: Path, number: int = 0) -> Digests:
    """The digests of the ``number``-th module of a run.

    Raises:
        DigestsError: there are none, or the file is damaged.
    """
    path = file_of(folder, number)
    about: Mapping[str, Any] = {}
    steps = dict[int, str]()
    try:
        lines = read_text(path, _MOST, errors="replace").splitlines(keepends=True)
    except OSError as error:
        remedy = f"Run it with {DIGESTS}={folder} in its environment."
        raise DigestsError(f"{path} cannot be read ({error.strerror or error}). {remedy}") from None
    for count, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # it is being written
        try:
            found = parse_json(line)
            if found["kind"] == "step":
                steps[int(found["at"])] = str(found["digest"])
            elif found["kind"] == "start":
                about = dict(found)
                begun = int(found.get("at", 0))
                steps = {step: digest for step, digest in steps.items() if step <= begun}
        except (ValueError, KeyError, TypeError) as error:
            raise DigestsError(f"{path}, line {count}: {error}. Remove the line.") from None
        if about.get("version") != VERSION:
            wrote = f"is of version {about.get('version')}, and this package reads {VERSION}"
            raise DigestsError(f"{path} {wrote}. Run both with the same version of lt_zero.")
    if not steps:
        raise DigestsError(f"{path} has no step yet. Wait for the first one.")
    return Digests(str(folder), about, steps)


class Parting(NamedTuple):
    """The step at which two runs get other weights.

    Attributes:
        last_equal: the last step up to which all common steps have the same weights; None: there is none.
        first: the first step with others; None: all common steps have the same weights.
        common: how many steps both have.
    """

    last_equal: int | None
    first: int | None
    common: int


def parting_of(one: Digests, two: Digests) -> Parting:
    """Find the first step after which two runs have other weights.

    Raises:
        DigestsError: they have no step in common.
    """
    common = sorted(one.steps.keys() & two.steps.keys())
    if not common:
        spans = (f"steps {min(run.steps)} to {max(run.steps)}" for run in (one, two))
        raise DigestsError(
            f"{one.name} has {next(spans)} and {two.name} {next(spans)}: none in common. Run both longer."
        )
    first = next((step for step in common if one.steps[step] != two.steps[step]), None)
    equal = [step for step in common if first is None or step < first]
    return Parting(equal[-1] if equal else None, first, len(common))
