"""Attention of sequences that are cut over ranks, against one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lt_zero.parallel import sequence_attention, to_zigzag
from tests.support.pool import Pool

LENGTH, DIM, BATCH = 16, 3, 2


class Case(NamedTuple):
    """How attention is cut, and of what."""

    heads: int
    kv: int
    method: str = "ulysses"
    gather: int = 1
    zigzag: bool = False
    mask: str = "none"


def options_of(case: Case) -> dict[str, Any]:
    at = torch.arange(LENGTH)
    back = at[:, None] - at
    if case.mask == "causal":
        return {"is_causal": True}
    masks = {
        "window": (back >= 0) & (back < 5),
        "packed": (at[:, None] // 6 == at // 6) & (back >= 0),
        "padding": (at < 13)[None, None, None],
        "bias": torch.randn(case.heads, LENGTH, LENGTH, dtype=torch.float64),
        "heads": torch.randn(BATCH, case.heads, 1, LENGTH, dtype=torch.float64),
    }
    return {"attn_mask": masks[case.mask]} if case.mask in masks else {}


def inputs_of(case: Case) -> list[Tensor]:
    shapes = ((case.heads, DIM), (case.kv, DIM), (case.kv, DIM + (case.mask == "window")))
    return [torch.randn(BATCH, heads, LENGTH, dim, dtype=torch.float64, requires_grad=True) for heads, dim in shapes]


def check(case: Case) -> None:
    """Compare outputs and gradients with those of one process."""
    torch.manual_seed(1)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs, options = inputs_of(case), {**options_of(case), "enable_gqa": case.heads != case.kv, "scale": 0.7}
    for tensor in options.values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()
    wanted = F.scaled_dot_product_attention(*inputs, **options)
    factors = torch.randn_like(wanted)
    leaves = [x for x in [*inputs, *options.values()] if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad((wanted * factors).sum(), leaves)

    parts = ranks if case.method == "gather" and case.gather == 1 else case.gather
    order = (lambda x: to_zigzag(x, 2, parts)) if case.zigzag else (lambda x: x)
    attend = sequence_attention(group=group, method=case.method, gather=case.gather, zigzag=case.zigzag)
    out = attend(*(order(x).chunk(ranks, 2)[rank] for x in inputs), **options)
    torch.testing.assert_close(out, order(wanted).chunk(ranks, 2)[rank], rtol=0, atol=1e-12)
    found = torch.autograd.grad((out * order(factors).chunk(ranks, 2)[rank]).sum(), leaves)
    for mine, whole in zip(found, grads, strict=True):
        dist.all_reduce(mine)  # parts of one sum
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)


def check_all(cases: list[Case]) -> None:
    for case in cases:
        try:
            check(case)
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error


HEADS = (4, 4), (4, 2), (4, 1), (8, 2), (6, 3)
MASKS = "none", "causal", "window", "packed", "padding", "bias", "heads"
METHODS = ("ulysses", 1, False), ("gather", 1, False), ("gather", 1, True), ("ulysses", 2, False), ("ulysses", 2, True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_masks_heads_and_methods(pool: Pool, ranks: int) -> None:
    cases = [
        Case(*heads, *method, mask)
        for heads in HEADS
        for method in METHODS
        for mask in MASKS
        if (heads != (6, 3) or ranks == 2) and (ranks > 2 or method[1] == 1)
    ]
    pool.run(ranks, check_all, cases)


def test_outputs_and_gradients_are_those_of_one_process(pool: Pool) -> None:
    """Each method, mask and kind of heads once."""
    cases = [
        Case(4, 4, mask="causal"),
        Case(6, 3, mask="bias"),
        Case(4, 1, mask="heads"),
        Case(4, 2, mask="window"),
        Case(4, 2, "gather", mask="causal"),
        Case(3, 1, "gather", zigzag=True, mask="causal"),
        Case(4, 4, "gather", zigzag=True, mask="packed"),
        Case(8, 2, "gather", zigzag=True, mask="heads"),
        Case(4, 2, "gather", zigzag=True),
    ]
    pool.run(2, check_all, cases)
    pool.run(4, check_all, [Case(4, 1, "ulysses", 2, True, "causal"), Case(2, 2, "ulysses", 2, True, "bias")])
