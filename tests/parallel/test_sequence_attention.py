"""Attention of sequences that are cut over ranks, against one process."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.sequence import SequenceGroup
from lt_zero.core.comm.world import World
from lt_zero.parallel import SequenceRanks, from_zigzag, sequence_attention, to_zigzag
from lt_zero.parallel.sequence import attention
from lt_zero.parallel.sequence.ranks import check_method
from tests.support.joined import use
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


def check(case: Case, group: SequenceGroup | None) -> None:
    """Compare outputs and gradients with those of one process; ``group``: that of a run, None: a user's."""
    torch.manual_seed(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
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
    how = case.method, case.gather, case.zigzag
    used = SequenceRanks(group, group, *how) if group is not None else None
    use(used)
    attend = sequence_attention()
    if used is None:
        attend = sequence_attention(group=dist.group.WORLD, method=case.method, gather=case.gather, zigzag=case.zigzag)
    out = attend(*(order(x).chunk(ranks, 2)[rank] for x in inputs), **options)
    torch.testing.assert_close(out, order(wanted).chunk(ranks, 2)[rank], rtol=0, atol=1e-12)
    found = torch.autograd.grad((out * order(factors).chunk(ranks, 2)[rank]).sum(), leaves)
    for mine, whole in zip(found, grads, strict=True):
        dist.all_reduce(mine)  # parts of one sum
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)


def joined() -> SequenceGroup:
    """All ranks of a run."""
    world = World.join(torch.device("cpu"))
    assert world.process_group is not None
    return SequenceGroup.joined(world, [range(world.size)], world.process_group)


def check_all(cases: list[Case], of_a_run: bool) -> None:
    group = joined() if of_a_run else None
    for case in cases:
        try:
            check(case, group)
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error


HEADS = (4, 4), (4, 2), (4, 1), (8, 2), (6, 3)
MASKS = "none", "causal", "window", "packed", "padding", "bias", "heads"
METHODS = ("ulysses", 1, False), ("gather", 1, False), ("gather", 1, True), ("ulysses", 2, False), ("ulysses", 2, True)


@pytest.mark.slow
@pytest.mark.parametrize("of_a_run", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_masks_heads_and_methods(pool: Pool, ranks: int, of_a_run: bool) -> None:
    cases = [
        Case(*heads, *method, mask)
        for heads in HEADS
        for method in METHODS
        for mask in MASKS
        if (heads != (6, 3) or ranks == 2) and (ranks > 2 or method[1] == 1)
    ]
    pool.run(ranks, check_all, cases, of_a_run)


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
    pool.run(2, check_all, cases, True)
    pool.run(4, check_all, [Case(4, 1, "ulysses", 2, True, "causal"), Case(2, 2, "ulysses", 2, True, "bias")], False)


def second_derivatives(method: str) -> None:
    torch.manual_seed(2)
    rank, inputs = dist.get_rank(), [torch.randn(1, 2, 8, 3, dtype=torch.float64) for _ in range(3)]

    def second(attend: Any, part: slice) -> Tensor:
        mine = [x[:, :, part].clone().requires_grad_() for x in inputs]
        with sdpa_kernel(SDPBackend.MATH):
            (grad,) = torch.autograd.grad(attend(*mine).square().sum(), mine[:1], create_graph=True)
        found: Tensor = torch.autograd.grad(grad.square().sum(), mine[1])[0]
        return found

    part = slice(4 * rank, 4 * rank + 4)
    found = second(sequence_attention(group=dist.group.WORLD, method=method), part)
    wanted = second(F.scaled_dot_product_attention, slice(None))[:, :, part]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def small_masks() -> None:
    """Masks of few queries at a time, and torch's masks for accelerators."""
    case = Case(2, 1, "gather", zigzag=True, mask="causal")
    attention._lower_right.cache_clear()
    with mock.patch.object(attention, "_ROWS", 3):
        check(case, None)
    attention._lower_right.cache_clear()
    with mock.patch.object(accelerator, "is_accelerator", return_value=True):
        check(case, None)


def dropped(method: str) -> list[list[float]]:
    """Two parts that were dropped of ones, from one state of the generator; all ranks have the same."""
    x = torch.ones(1, 4, 8, 8)
    attend = sequence_attention(group=dist.group.WORLD, method=method)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append((attend(0 * x, 0 * x, x, dropout_p=0.5) == attend(0 * x, 0 * x, x)).tolist())
    after = float(torch.rand(()))
    return [*found, after]


def several() -> list[Any]:
    for method in ("ulysses", "gather"):
        second_derivatives(method)
    small_masks()
    return [dropped("ulysses"), dropped("gather")]


def test_second_derivatives_small_masks_and_dropout(pool: Pool) -> None:
    """Ranks with one state of the generator drop other elements, and the same again from that state."""
    ranks = pool.run(2, several)
    for (first, again, after), (other, _, after_other) in zip(*ranks, strict=True):
        assert first == again != other
        assert after == after_other


def refused(name: str, value: Any, method: str = "ulysses", heads: tuple[int, int] = (2, 2), length: int = 4) -> str:
    query, *rest = (torch.zeros(1, count, length, 3) for count in (heads[0], heads[1], heads[1]))
    attend = sequence_attention(group=dist.group.WORLD, method=method, zigzag=method == "gather")
    with pytest.raises(ValueError, match=".") as caught:
        attend(query, *rest, **({name: value} if name else {}))
    return str(caught.value)


def all_refused() -> list[str]:
    mask = torch.zeros(4, 4)
    return [
        refused("attn_mask", mask),
        refused("attn_mask", torch.zeros(4, 8, 8)),
        refused("attn_mask", causal_lower_right(8, 8)),
        refused("key_padding_mask", mask),
        refused("score_mod", lambda score, *_: score),
        refused("", None, heads=(3, 3)),
        refused("", None, heads=(4, 3)),
        refused("", None, "gather", length=3),
    ]


def test_what_would_be_wrong_for_parts_is_refused_by_name(pool: Pool) -> None:
    told = pool.run(2, all_refused)[0]
    parts = "attn_mask [4, 4]", "attn_mask [4, 8, 8]", "is_causal=True", "key_padding_mask", "score_mod"
    for text, part in zip(told, (*parts, 'method="gather"', "multiple", "zigzag"), strict=True):
        assert part in text


def test_methods_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="method='ring'"):
        check_method("ring", 1, 2)
    with pytest.raises(ConfigError, match="gather=2 does not divide the 3"):
        check_method("ulysses", 2, 3)


def test_without_sequence_ranks_it_is_the_function() -> None:
    use(None)
    inputs = [torch.randn(1, 2, 4, 3) for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*inputs, is_causal=True)
    attend = pickle.loads(pickle.dumps(copy.deepcopy(sequence_attention())))
    assert torch.equal(attend(*inputs, is_causal=True), wanted)


def test_zigzag_order_balances_and_is_undone() -> None:
    x = torch.arange(12)
    order = to_zigzag(x, 0, 3)
    assert order.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert torch.equal(from_zigzag(order, 0, 3), x)


def test_positions_of_each_rank() -> None:
    def ranks(rank: int, *how: Any) -> SequenceRanks:
        group: Any = SimpleNamespace(rank=rank, size=4)
        return SequenceRanks(group, group, *how)

    assert ranks(1).positions(8).tolist() == [2, 3]
    assert ranks(1, "gather", 1, True).positions(8).tolist() == [1, 6]
    found = [ranks(rank, "ulysses", 2, True).positions(8).tolist() for rank in range(4)]
    assert found == [[0, 1], [6, 7], [2, 3], [4, 5]]
    assert [each.multiple for each in (ranks(0), ranks(0, "gather", 1, True), ranks(0, "ulysses", 2, True))] == [
        4,
        8,
        4,
    ]
    with pytest.raises(ValueError, match="6 tokens is no multiple of 4"):
        ranks(0).positions(6)
