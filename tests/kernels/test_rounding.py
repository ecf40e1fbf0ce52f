"""Stochastic rounding to bf16: right in the mean, the same bits in any part, by a kernel and in torch."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.common import accelerator
from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.kernels import rounding
from lt_zero.kernels.moments import coded_nbytes
from lt_zero.kernels.places import ElementPlace, place_table
from lt_zero.kernels.rounding import (
    ElementRows,
    RoundStochastic,
    philox,
    random_bits,
    round_stochastic,
    round_stochastic_reference,
    rows_of,
)
from tests.support import kernel_inputs
from tests.support.kernel_inputs import STATES, options_of, places_of, rounded_apart

SEED = 0x9ABCDEF012345678


def rounded(values: Tensor, step: int = 1, first: int = 0, seed: int = SEED) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    round_stochastic(values, out, ElementRows(values.numel(), first, values.numel()), seed=seed, step=step)
    return out


def with_special(numel: int) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for number, value in enumerate(
        [math.inf, -math.inf, math.nan, 3.3961e38, -3.389e38, 1e-40, -1e-44, 0.0, -0.0, 1.0]
    ):
        x[number::37] = value
    return x


def test_philox_has_its_known_answers() -> None:
    """The vectors of Random123 for Philox4x32 with 7 rounds: counter, key, words."""
    every = 0xFFFFFFFF
    vectors = [
        ([0, 0, 0, 0], (0, 0), [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([every] * 4, (every, every), [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ]
    for counter, key, words in vectors:
        a, b, c, d = (torch.tensor(word) for word in counter)
        assert [int(word) for word in philox((a, b, c, d), key)] == words


ROWS = [
    *(
        ElementRows(numel, first, numel)
        for numel, first in itertools.product([1, 127, 129, 140_003], [0, 8, 4_000_123])
    ),
    ElementRows(40, (1 << 36) + 5, 40),  # numbers of more than 32 bits
    *(ElementRows(11 * row, 77, row, stride) for row, stride in [(1, 1), (3, 64), (200, 1003), (140_000, 200_000)]),
]


@pytest.mark.parametrize("step", [1, (1 << 32) + 3])
def test_a_kernel_rounds_as_torch_does(isa: str, step: int) -> None:
    for rows in ROWS:
        values = with_special(rows.numel)
        got, want = (torch.empty(rows.numel, dtype=torch.bfloat16) for _ in range(2))
        round_stochastic(values, got, rows, seed=SEED, step=step)
        round_stochastic_reference(values, want, rows, seed=SEED, step=step)
        assert torch.equal(got.isnan(), values.isnan()), rows
        assert torch.equal(want.isnan(), values.isnan()), rows
        numbers = ~values.isnan()
        assert torch.equal(got.view(torch.int16)[numbers], want.view(torch.int16)[numbers]), rows


def test_a_counter_on_the_device_is_a_step_and_is_not_read(isa: str) -> None:
    """Where torch's fused and capturable optimizers count."""
    values, spec = with_special(1000), ParamSpec.whole("w", (1000,))
    want, got = (torch.empty(1000, dtype=torch.bfloat16) for _ in range(2))
    RoundStochastic(3).store(values, want, spec, 0, {"step": 7})

    def read(self: Tensor) -> int:
        raise AssertionError("the device was waited for")

    for rounds in (round_stochastic, round_stochastic_reference):
        with (
            mock.patch.object(accelerator, "holds", return_value=True),
            mock.patch.object(Tensor, "__int__", read),
            mock.patch.object(Tensor, "item", read),
            mock.patch.object(rounding, "round_stochastic", rounds),
        ):
            RoundStochastic(3).store(values, got.zero_(), spec, 0, {"step": torch.tensor(7.0)})
        numbers = ~values.isnan()
        assert torch.equal(got.view(torch.int16)[numbers], want.view(torch.int16)[numbers])
    with pytest.raises(ValueError, match=r"step has shape \(2,\)"):
        round_stochastic(values, got, ElementRows(1000, 0, 1000), seed=SEED, step=torch.ones(2))


def test_neighbours_are_taken_and_nothing_becomes_infinite() -> None:
    values = with_special(100_000)
    values = values[values.isfinite()]
    up = torch.tensor([0x7F7F8000 - 1, 0x7F7F8000, 0x7F7F0000], dtype=torch.int32).view(torch.float32)
    assert rounded(up).isinf().tolist() == up.bfloat16().isinf().tolist() == [False, True, False]
    bits = values.view(torch.int32)
    low, high = (row.view(torch.float32) for row in (bits & -0x10000, (bits & -0x10000) + 0x10000))
    inside = (bits & 0x7FFFFFFF) < 0x7F7F0000
    got = rounded(values).float()
    exact = (bits & 0xFFFF) == 0
    assert torch.equal(got[exact].view(torch.int32), bits[exact])
    assert ((got == low) | (got == high))[inside].all()
    assert (got != values.bfloat16().float())[inside].any()


def test_the_mean_is_exact() -> None:
    """Over steps for each element, and over elements in each step; errors are independent, so their squares add up."""
    numel, steps = 2000, 400
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).double().float()
    low = (values.view(torch.int32) & -0x10000).view(torch.float32).double()
    unit = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double() - low
    share = (values.double() - low) / unit
    ups = torch.stack([(rounded(values, step).double() - low) / unit for step in range(1, steps + 1)])
    assert set(ups.unique().tolist()) == {0.0, 1.0}
    deviation = ups - share
    variance = share * (1 - share)
    assert abs(deviation.sum() / (steps * variance.sum()).sqrt()) < 4
    some = variance > 0.05
    of_elements = (deviation.sum(0) / (steps * variance).sqrt())[some]
    of_steps = deviation.sum(1) / variance.sum().sqrt()
    for scores in (of_elements, of_steps):
        # Of normal scores one in 16,000 exceeds 4, and their mean square is 1.
        assert scores.abs().max() < 4.5
        assert abs(scores.square().mean() - 1) < 4 * math.sqrt(2 / scores.numel())
    # Neighbours in elements and in steps do not know each other.
    for one, other in ((deviation[:, 1:], deviation[:, :-1]), (deviation[1:], deviation[:-1])):
        product = one * other
        assert abs(product.sum() / product.square().sum().sqrt()) < 4


BOXES = [  # shape of the parameter, and the part of a rank
    ((7, 300), Box((0, 100), (7, 150))),  # columns
    ((90, 7), Box((31, 0), (13, 7))),  # rows
    ((5, 6, 40), Box((2, 0, 7), (3, 6, 9))),  # columns of some experts
    ((5, 6, 40), Box((1, 3, 8), (3, 2, 8))),  # in all axes
    ((5, 6, 8), Box((0, 2, 0), (5, 3, 8))),
    ((3, 4, 2, 5), Box((0, 1, 0, 2), (3, 2, 2, 1))),
    ((1, 9), Box((0, 4), (1, 3))),
    ((), Box((), ())),
]


@pytest.mark.parametrize(("shape", "box"), BOXES)
def test_parts_get_the_bits_of_the_whole(shape: tuple[int, ...], box: Box) -> None:
    generator, stochastic = torch.Generator().manual_seed(0), RoundStochastic(3)
    values = torch.randn(shape, generator=generator)
    want, state = torch.empty(shape, dtype=torch.bfloat16), {"step": 4}
    stochastic.store(values, want, ParamSpec.whole("w", shape), 0, state)
    assert (want != values.bfloat16()).any() or not shape
    mine, spec = box.of(values).contiguous().view(-1), ParamSpec("w", shape, box)
    for cuts in ([0, mine.numel()], sorted({0, 1, mine.numel() // 3, mine.numel() // 2 + 1, mine.numel()})):
        got = torch.empty(mine.shape, dtype=torch.bfloat16)
        for lo, hi in itertools.pairwise(cuts):
            stochastic.store(mine[lo:hi], got[lo:hi], spec, lo, state)
        assert torch.equal(got, box.of(want).reshape(-1)), cuts
    indices = torch.arange(values.numel()).view(shape)
    for rows in rows_of(spec, 0, mine.numel()):
        assert rows.numel % rows.row == 0
    found = [
        r.first + n * r.stride + k
        for r in rows_of(spec, 0, mine.numel())
        for n in range(r.numel // r.row)
        for k in range(r.row)
    ]
    assert found == box.of(indices).reshape(-1).tolist()


def test_bits_depend_on_seed_name_and_step() -> None:
    values, outs = torch.randn(4096, generator=torch.Generator().manual_seed(0)), []
    for seed, name, step in ((1, "a", 1), (2, "a", 1), (1, "b", 1), (1, "a", 2)):
        outs.append(torch.empty(4096, dtype=torch.bfloat16))
        RoundStochastic(seed).store(
            values, outs[-1], ParamSpec.whole(name, (4096,)), 0, {"step": torch.tensor(float(step))}
        )
    for one, other in itertools.combinations(outs, 2):
        assert 0.2 < (one != other).float().mean() < 0.45  # a third: the mean of 2 p (1 - p)
    bits = random_bits(ElementRows(1 << 16, 0, 1 << 16), 5, 1, torch.device("cpu")).double()
    assert abs(bits.mean() - 32767.5) < 4 * 65536 / math.sqrt(12 * bits.numel())


def test_steps_are_counted_where_the_optimizer_does_not() -> None:
    values, state = torch.randn(4096, generator=torch.Generator().manual_seed(0)), dict[str, Tensor]()
    for number in (1, 2):
        got, want = (torch.empty(4096, dtype=torch.bfloat16) for _ in range(2))
        RoundStochastic(1).store(values, got, ParamSpec.whole("a", (4096,)), 0, state)
        RoundStochastic(1).store(values, want, ParamSpec.whole("a", (4096,)), 0, {"step": number})
        assert torch.equal(got, want)
        assert {key: float(value) for key, value in state.items()} == {"rounding_step": number, "rounding_seed": 1}


def test_a_parameter_without_elements() -> None:
    (rows,) = rows_of(ParamSpec.whole("a", (3, 0)), 0, 0)
    around = torch.ones(2, dtype=torch.bfloat16)
    for operation in (round_stochastic, round_stochastic_reference):
        operation(torch.empty(0), around[1:1], rows, seed=0, step=1)
        assert around.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "out", "rows"),
    [
        (torch.ones(4), torch.ones(4), ElementRows(4, 0, 4)),
        (torch.ones(4).double(), torch.ones(4).bfloat16(), ElementRows(4, 0, 4)),
        (torch.ones(4), torch.ones(5).bfloat16(), ElementRows(4, 0, 4)),
        (torch.ones(8)[::2], torch.ones(4).bfloat16(), ElementRows(4, 0, 4)),
        (torch.ones(4), torch.ones(4).bfloat16(), ElementRows(4, 0, 3)),
        (torch.ones(4), torch.ones(4).bfloat16(), ElementRows(4, -1, 4)),
    ],
)
def test_what_does_not_fit_is_refused(values: Tensor, out: Tensor, rows: ElementRows) -> None:
    for operation in (round_stochastic, round_stochastic_reference):
        with pytest.raises(ValueError, match=r"values|out|rows"):
            operation(values, out, rows, seed=0, step=1)


# ---- in the kernels of steps -----------------------------------------------------------------------------------------

CPU = torch.device("cpu")
KERNELS = ["adam_step", "adam_step in codes", "lion_step", "adagrad_step", "sgd_step", "lamb_apply"]


def step_of(name: str, sizes: list[int], rng: random.Random) -> tuple[str, list[Any], dict[str, Any]]:
    """An operation, its lists without those of the weights' copies, and its options. Weights are in bf16."""
    offset = rng.randint(0, 3)
    state = rng.choice([torch.float32, torch.bfloat16])
    operation, _, coded = name.partition(" ")
    lists: list[Any] = [kernel_inputs.rows(sizes, torch.bfloat16, offset)]
    if operation != "lamb_apply":
        lists.append(kernel_inputs.rows(sizes, rng.choice(kernel_inputs.LOW), offset))
    for _ in range(STATES.get(operation, 1)):
        made = kernel_inputs.rows(sizes, state, offset, torch.rand)
        lists.append([torch.ones(coded_nbytes(n), dtype=torch.uint8) for n in sizes] if coded else made)
    if operation == "lamb_apply":
        lists.append(torch.rand(len(sizes)))
        return operation, lists, {"eps": 1e-6, "weight_decay": rng.choice([0.0, 0.1])}
    return operation, lists, options_of(operation, rng) | {"scale": torch.tensor(0.37)}


def cloned(lists: list[Any]) -> list[Any]:
    return [some.clone() if isinstance(some, Tensor) else [x.clone() for x in some] for some in lists]


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_has_the_bits_of_a_step_in_fp32_and_a_pass_that_rounds(isa: str, name: str) -> None:
    """Also where parameters begin within a vector, or rows of them have one element; states and copies, too."""
    rng = random.Random(f"{isa} {name}")
    torch.manual_seed(rng.randrange(10**6))
    for at_random in (True, True, False):
        empty = () if name.endswith("codes") else (0,)  # what has no elements is never encoded
        sizes = [*(rng.choice([*empty, 1, 7, 16, 33, 127, 129, 1000, 1025]) for _ in range(3)), 40_001]
        operation, lists, options = step_of(name, sizes, rng)
        places = places_of(sizes, rng)
        run = getattr(ops, operation)
        wide = cloned(lists)
        wide[0] = [x.float() for x in wide[0]]
        run(*wide, **options)
        want = rounded_apart(wide[0], places) if at_random else [x.bfloat16() for x in wide[0]]
        options["places"] = place_table(places, CPU) if at_random else None
        for step in (run, getattr(ops, f"{operation}_reference")):
            got = cloned(lists)
            outs = [torch.empty_like(x) for x in lists[0]]
            step(*got, outs, **options)
            for own in (got[0], outs):
                assert all(map(torch.equal, own, want)), step
            for mine, theirs in zip(got[1:], wide[1:], strict=True):
                assert all(map(torch.equal, mine, theirs)), step


def test_weights_that_are_not_finite_in_a_step(isa: str) -> None:
    values = with_special(2000).bfloat16()
    got = values.clone()
    zeros = torch.zeros(2000)
    places = place_table([ElementPlace(0, 0, 3, 2000, 0, SEED, 1)], CPU)
    flags = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "first": True}
    ops.sgd_step([got], [zeros], [], lr=1.0, places=places, **flags)
    # Nothing is added, and what is exact stays.
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got[~got.isnan()], values[~got.isnan()])


@pytest.mark.parametrize(
    ("params", "outs", "places", "error", "match"),
    [
        (torch.ones(9), [], [ElementPlace(0, 0, 0, 9, 0, 1, 1)], ValueError, "params has dtype torch.float32"),
        (torch.ones(9).half(), [], [], ValueError, "params.0. has dtype torch.float16"),
        (torch.ones(9).bfloat16(), [torch.ones(9)], [], ValueError, "outs.0. has dtype torch.float32"),
        (torch.ones(9).bfloat16(), [], torch.ones(1, 6, dtype=torch.int64), ValueError, "places has shape .1, 6."),
        (torch.ones(9).bfloat16(), [], torch.ones(1, 7), ValueError, "places has shape .1, 7., dtype torch.float32"),
        (torch.ones(9).bfloat16(), [], [ElementPlace(0, 1, 0, 9, 0, 1, 1)], RuntimeError, "bad argument"),
        (torch.ones(9).bfloat16(), [], [ElementPlace(1, 0, 0, 9, 0, 1, 1)], RuntimeError, "bad argument"),
        (torch.ones(9).bfloat16(), [], [ElementPlace(0, 0, 0, 0, 0, 1, 1)], RuntimeError, "bad argument"),
        (torch.ones(9).bfloat16(), [], [ElementPlace(0, 0, -1, 9, 0, 1, 1)], RuntimeError, "bad argument"),
        (
            torch.ones(9).bfloat16(),
            [],
            [ElementPlace(0, n, 0, 9, 0, 1, 1) for n in (0, 5, 4)],
            RuntimeError,
            "bad argument",
        ),
    ],
)
def test_weights_and_places_that_do_not_fit_are_refused(
    params: Tensor, outs: list[Tensor], places: Any, error: type[Exception], match: str
) -> None:
    table = places if isinstance(places, Tensor) else place_table(places, CPU) if places else None
    before = params.clone()
    (grad, momentum) = (torch.ones(9), torch.zeros(9))
    with pytest.raises(error, match=match):
        ops.lion_step([params], [grad], [momentum], outs, lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, places=table)
    assert torch.equal(params, before)
