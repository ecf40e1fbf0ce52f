"""Runs whose ranks have parts of the model, or of rows, have the same bits at any number of data ranks."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from lt_zero.common.errors import ConfigError
from lt_zero.training.turns import StepTurns
from tests.features.virtual_ranks.fits import same
from tests.features.virtual_ranks.parts import (
    KINDS,
    loop_digests,
    refusal,
    refusal_of_fabric,
    values,
)
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

FAST = [("tensor", 3), ("sequence", 2), ("pipeline", 1), ("experts", 2)]


@pytest.mark.parametrize(("kind", "stage"), only_rows(FAST, [(kind, stage) for kind in KINDS for stage in range(4)]))
def test_two_data_ranks_have_the_bits_of_one(pool: Pool, kind: str, stage: int) -> None:
    wanted = pool.run(2, values, kind, stage)[0]
    found = pool.run(4, values, kind, stage)[0]
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not same(found[name], value)] == []


@pytest.mark.parametrize("kind", only(["tensor"], list(KINDS)))
def test_a_run_goes_on_at_another_number_of_data_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "saved.ckpt")
    wanted = pool.run(4, values, kind, 2)[0]
    pool.run(2, values, kind, 2, path)
    found = pool.run(4, values, kind, 2, None, path)[0]
    assert "epoch 1, round 1: weights" in found
    assert "epoch 1, round 0: weights" not in found
    assert [name for name, value in found.items() if not same(value, wanted[name])] == []


def test_parameters_that_stages_share_are_refused_on_all_ranks(pool: Pool) -> None:
    for text in pool.run(2, refusal):
        assert "reproducible.virtual_ranks=4" in text
        assert "several stages of the pipeline train 'net.tied.embed.weight'" in text
        assert "Let one stage have it" in text


def test_a_loop_runs_parts_of_sequences(pool: Pool) -> None:
    wanted = pool.run(2, loop_digests)[0]
    assert wanted
    assert pool.run(4, loop_digests)[0] == wanted


def test_what_loops_and_fabric_cannot_divide_is_refused(pool: Pool) -> None:
    """A pipeline runs several backwards for a batch, which a loop would take for turns."""
    with pytest.raises(ConfigError, match=r"pipeline\.stages=2\. Train it in a Trainer"):
        StepTurns(mock.Mock(count=4), mock.Mock(), stages=2)
    for text in pool.run(2, refusal_of_fabric):
        assert "sequence_parallel_size=2. Train in a Trainer or by lt_zero.initialize" in text
