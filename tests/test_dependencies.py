"""No file of the project lets pip install a release that is known to be malicious."""

from __future__ import annotations

import itertools
import re

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

# GHSA-w37p-236h-pfx3: published with a stolen token, they steal credentials when they are imported. PyPI has removed
# them, but mirrors and caches may have them.
MALICIOUS = {"lightning": ["2.6.2", "2.6.3"], "pytorch-lightning": ["2.6.2", "2.6.3"]}


def _of_pyproject() -> list[str]:
    tomllib = pytest.importorskip("tomllib", reason="since Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]


def _of_constraints() -> list[str]:
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [line for line in lines if line]


def test_malicious_releases_are_excluded() -> None:
    requirements = [Requirement(line) for line in (*_of_pyproject(), *_of_constraints())]
    assert {"lightning", "pytorch-lightning"} <= {requirement.name for requirement in requirements}
    for requirement in requirements:
        for version in MALICIOUS.get(requirement.name.lower().replace("_", "-"), []):
            assert not requirement.specifier.contains(version, prereleases=True), f"{requirement} allows {version}"
