"""docs/internals/walks.md lists the files that run."""

from __future__ import annotations

from pathlib import Path

from tests.support.pool import Pool
from tests.support.walks import PAGE, page, walks


def test_the_page_of_walks_is_what_runs(pool: Pool, tmp_path: Path) -> None:
    """If it is not: look whether the way became shorter, then ``python -m tests.support.walks``."""
    assert page(walks(pool, str(tmp_path))).splitlines() == PAGE.read_text(encoding="utf-8").splitlines()
