"""docs/exactness.md says what its measurements find: which runs give the same bits, and which do not."""

from __future__ import annotations

import pytest

from tests.support.exactness import CLAIMS, PAGE, TABLE, Claim
from tests.support.features import skip_without
from tests.support.matrix import only
from tests.support.pool import Pool

STARTS = (
    "stages 1 and 2",
    "stages 0 and 1, three micro-batches a step, clipped",
    "2 ranks, and",
)  # one micro-batch: tests/core/engine/test_bitwise.py
FAST = [claim for claim in CLAIMS if claim.compared.startswith(STARTS)]


def _rows() -> list[str]:
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found.group().splitlines()[2:]


def test_the_table_has_all_claims_in_order() -> None:
    stale = "run: python -m tests.support.exactness"
    assert [row.split(" | ")[0].removeprefix("| ") for row in _rows()] == [claim.compared for claim in CLAIMS], stale


@pytest.mark.parametrize("claim", only(FAST, CLAIMS), ids=lambda claim: claim.compared)
def test_a_claim_is_what_is_measured(pool: Pool, claim: Claim) -> None:
    if "recomputed" in claim.compared:
        skip_without("activation_checkpointing")
    assert claim.row(pool) in _rows(), "the page is stale, run: python -m tests.support.exactness"
