"""The flags of a step: sections by name, in one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.comm.work import Work
from lt_zero.core.comm.world import World
from lt_zero.core.engine.step_flags import Section, StepFlags
from tests.support.parity import config_of
from tests.support.pool import Pool

CPU = torch.device("cpu")
SIZES = {"first": 3, "second": 0, "third": 5, "fourth": 1}


def _mine(name: str, rank: int) -> list[int]:
    """What a rank reports: odd sizes, one of them 0, and another maximum in each place."""
    return [(7 * place + 40 * rank + len(name)) % 256 for place in range(SIZES[name])]


def _exchanged(turns: int) -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]], list[str]]:
    """The maxima that owners handled; those of what was launched, read after all exchanges; the exchanges' names."""
    world = World.join(CPU)
    rank = dist.get_rank()
    handled = list[tuple[str, list[int]]]()
    launched = list[tuple[str, Work, Tensor]]()
    sent = list[str]()

    def section(name: str) -> Section:
        def note(work: Work, flags: Tensor) -> None:
            launched.append((name, work, flags))

        keeps = note if name == "third" else None
        return Section(name, lambda: _mine(name, rank), lambda flags: handled.append((name, list(flags))), keeps)

    flags = StepFlags(world, [section(name) for name in SIZES])
    host_max = world.host_max
    with mock.patch.object(world, "host_max", lambda tensor, name: (sent.append(name), host_max(tensor, name))[1]):
        for found in [flags.launch() for _ in range(turns)]:
            found.wait()
            flags.handle(found.numbers())
    for _, work, _ in launched:
        work.wait()
    return handled, [(name, own.tolist()) for name, _, own in launched], sent


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shared", ["0", "1"])
def test_each_owner_gets_the_maxima_of_its_own_section(pool: Pool, ranks: int, shared: str) -> None:
    turns = 3
    want = [(name, [max(row) for row in zip(*(_mine(name, r) for r in range(ranks)), strict=True)]) for name in SIZES]
    for handled, launched, sent in pool.run(ranks, _exchanged, turns, env={"LT_ZERO_SHARED_MEMORY": shared}):
        assert handled == want * turns
        assert launched == [row for row in want if row[0] == "third"] * turns
        assert sent == ["used parameters"] * turns, "one exchange for all sections"


def _flags(*sections: Section) -> StepFlags:
    return StepFlags(World(None, CPU), sections)


def test_a_section_is_found_by_its_name_only() -> None:
    found = _flags(Section("a", lambda: [1, 2]), Section("b", lambda: [True])).launch()
    assert found["a"].tolist() == [1, 2]
    found["a"].zero_()
    assert found["b"].tolist() == [1]
    with pytest.raises(KeyError, match="no section 'c' of the step's flags, which has a, b"):
        found["c"]


def test_two_sections_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="Two sections of the step's flags are named 'a'"):
        _flags(Section("a", lambda: [1]), Section("a", lambda: [2]))


def test_a_flag_is_a_byte() -> None:
    with pytest.raises(ValueError, match="range"):
        _flags(Section("a", lambda: [256])).launch()


def test_an_exchange_of_nothing_is_as_the_owners_say() -> None:
    flags = _flags(Section("a", lambda: [1, 2, 3]), Section("b", lambda: [9, 9], nothing=bytes([0, 255])))
    found = flags.launch()
    nothing = flags.nothing(found)
    assert (nothing["a"].tolist(), nothing["b"].tolist()) == ([0, 0, 0], [0, 255])
    copied = found.copied()
    copied["a"].zero_()
    assert found["a"].tolist() == [1, 2, 3]


def test_an_error_of_one_owner_ends_the_step() -> None:
    handled = list[str]()

    def refuse(flags: Sequence[int]) -> None:
        raise RuntimeError("refused")

    flags = _flags(
        Section("a", lambda: [1], lambda flags: handled.append("a")),
        Section("b", lambda: [1], refuse),
        Section("c", lambda: [1], lambda flags: handled.append("c")),
    )
    with pytest.raises(RuntimeError, match="refused"):
        flags.handle(flags.launch())
    assert handled == ["a"]


def _late_and_not_finite() -> list[bool]:
    """Whether the ranks know of a loss that is not finite, when two things ask for the gradients of a step."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    engine = lt_zero.shard(model, config_of(2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # no backward has reduced it
    engine.unused_parameters.nonfinite = dist.get_rank() == 1
    known = []
    for _ in range(2):
        engine.finish_reductions()
        known.append(engine.unused_parameters.nonfinite)
        next(model.parameters()).grad = None  # what the next one finds is not what this one left
    return known


def test_a_second_reduction_forgets_nothing_but_late_buckets(pool: Pool) -> None:
    assert pool.run(2, _late_and_not_finite) == [[True, True]] * 2
