"""docs/internals/walks.md lists the files that run."""

from __future__ import annotations

from pathlib import Path

from tests.support.features import needs_all_blocks
from tests.support.pool import Pool
from tests.support.walks import PAGE, page, walks


@needs_all_blocks()
def test_the_page_of_walks_is_what_runs(tmp_path: Path) -> None:
    """If it is not: look whether the way became shorter, then ``python -m tests.support.walks``."""
    pool = Pool()  # fresh processes, as the command's: what other tests left loaded is not entered again
    try:
        found = page(walks(pool, str(tmp_path)))
    finally:
        pool.close()
    assert found.splitlines() == PAGE.read_text(encoding="utf-8").splitlines()
