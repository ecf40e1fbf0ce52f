"""Runs of one process, one after the other: what each has made is closed when the next begins, at the latest."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.support.features import skip_without
from tests.support.many_fits import FACES, KINDS, Held, fits
from tests.support.matrix import only_rows
from tests.support.pool import Pool

LIMIT = 200  # further descriptors: a fit with a mesh has about 90
FAST = [("tensor", "trainer"), ("none", "loop")]
SLACK = 2  # a thread that ends, or a connection that closes, may still be counted


@pytest.mark.parametrize(("kind", "face"), only_rows(FAST, list(product(KINDS, FACES))))
def test_what_a_run_made_is_closed(pool: Pool, tmp_path: Path, kind: str, face: str) -> None:
    skip_without(KINDS[kind])
    count = 5 if (kind, face) in FAST else 12
    for left in pool.run(2, fits, kind, face, count, str(tmp_path), LIMIT):
        for name in Held._fields:
            counts = [getattr(held, name) for held in left.held[2:]]
            assert max(counts) - min(counts) <= (SLACK if name in ("descriptors", "threads") else 0), (name, left.held)
        # A few come and go; what each fit leaves is more than one.
        assert not {name: more for name, more in left.grown.items() if more >= 4 * (count - 3)}, left.grown
