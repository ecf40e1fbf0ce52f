"""Default fits in processes of their own, and the modules of the package that they load."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.house import fit
from tests.support.house.fit import Job, Outcome
from tests.support.house.parts import files_of, line_count, parts_of
from tests.support.launchers import environment

_SAME_EVERYWHERE = {"LT_ZERO_SHARED_MEMORY": "0"}  # the same modules on every machine


class Loaded(NamedTuple):
    """Loaded files, and how many lines they have."""

    modules: int
    lines: int


def fits(jobs: Sequence[Job], limit: int = 120) -> list[Outcome]:
    """What became of each fit; they are taken one after the other, and each may take ``limit`` seconds.

    Raises:
        subprocess.CalledProcessError: the process that starts the ranks has failed itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcomes.json")
        command = [sys.executable, fit.__file__, str(out), str(limit), *(f"{job.stage}:{job.package}" for job in jobs)]
        subprocess.run(command, env=environment(**_SAME_EVERYWHERE), cwd=folder, capture_output=True, check=True)
        return [Outcome(*each) for each in json.loads(out.read_text(encoding="utf-8"))]


def by_part(package: Path, files: Iterable[str]) -> dict[str, Loaded]:
    """What is loaded of each part, the one with the most lines first."""
    paths = files_of(package)
    modules = Counter[str]()
    lines = Counter[str]()
    for file, part in parts_of(files).items():
        modules[part] += 1
        lines[part] += line_count(paths[file])
    return {part: Loaded(modules[part], count) for part, count in lines.most_common()}


def total(parts: Mapping[str, Loaded]) -> Loaded:
    """The sum over all parts."""
    return Loaded(sum(each.modules for each in parts.values()), sum(each.lines for each in parts.values()))
