"""What each virtual rank sees in a Trainer is the same at any number of ranks: samples, random numbers, buffers."""

from __future__ import annotations

from typing import Any

import pytest

from lt_zero import ConfigError
from tests.features.virtual_ranks.fits import COUNT, RANKS, Module, Run, by_round, check, fit, full_weights, told
from tests.support.pool import Pool


def _seen(**loader: Any) -> Run:
    module = Module(**loader)
    fit(module)
    return told(module)


def test_each_virtual_rank_sees_the_same_at_any_number_of_ranks(pool: Pool) -> None:
    runs = {ranks: pool.run(ranks, _seen) for ranks in RANKS}
    check(runs)
    seen = by_round(runs[1])
    assert len(seen) == 2 * 4 * COUNT  # epochs, rounds
    assert [micro[0] for micro in seen[::COUNT]] == [0, 1, 2, 3] * 2, "batch_idx counts rounds"
    assert len({str(micro[4]) for micro in seen}) == len(seen), "each draws other numbers in each round"
    for epoch in range(2):
        indices = [index for micro in seen[epoch * 24 : (epoch + 1) * 24] for index in micro[1]]
        assert sorted(set(indices)) == list(range(45))
        assert len(indices) == 48
    for at in range(0, len(seen), COUNT):
        assert len({str(micro[3]) for micro in seen[at : at + COUNT]}) == 1, "a round begins with the same buffers"


def _trained(stage: int, kwargs: dict[str, Any]) -> Run:
    module = Module(lr=0.05)
    trainer = fit(module, stage=stage, **kwargs)
    return told(module, full_weights(trainer))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 2": (2, {}),
    "stage 3, clipped, two rounds to a step": (3, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "stage 0, a short window": (0, {"accumulate_grad_batches": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_same_bits_at_any_number_of_ranks(pool: Pool, case: str) -> None:
    runs = {ranks: pool.run(ranks, _trained, *CASES[case]) for ranks in RANKS}
    check(runs)


def _refused() -> str:
    with pytest.raises(ConfigError) as caught:
        fit(Module(), count=4)
    return str(caught.value)


def test_ranks_that_do_not_divide_virtual_ranks_are_refused(pool: Pool) -> None:
    text = "reproducible.virtual_ranks=4 is no multiple of 3, the number of data ranks"
    assert all(text in found for found in pool.run(3, _refused))
