"""Experts of a mixture over ranks, against one process in which each expert sees all tokens."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.parallel import Experts, combine, dispatch
from lt_zero.parallel.experts import SIZE, cut_experts
from lt_zero.parallel.mesh import ParallelSizes
from tests.support.features import skip_without
from tests.support.matrix import only_rows
from tests.support.mixtures import NUMBER, FeedForwards, Mixture, dense, go_on, square, start, train_as_one_process
from tests.support.pool import Pool

# ---- dispatch and combine --------------------------------------------------------------------------------------------


def _choices(kind: str, rank: int, count: int) -> Tensor:
    drawn = torch.Generator().manual_seed(rank)
    if kind == "one":
        return torch.full((count, 1), 1)
    # With "none", ranks after the first get nothing.
    return torch.rand(count, 2 if kind == "none" else NUMBER, generator=drawn).argsort(1)[:, :2]


def _layer(kinds: list[str], dtype: torch.dtype) -> None:
    """Values and gradients of tokens, scores and experts, with other numbers of tokens on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    for kind in kinds:
        torch.manual_seed(0)
        whole = FeedForwards().to(dtype)
        mine = [nn.Parameter(p.detach().chunk(size)[rank].clone()) for p in (whole.up, whole.down)]
        for other in range(size):
            count = 3 + other if kind != "no tokens" else 4 * (other > 0)
            torch.manual_seed(other)
            tokens, ids = torch.randn(count, 6, dtype=dtype), _choices(kind, other, count)
            scores = torch.rand(ids.shape, dtype=dtype)
            given = tokens.clone().requires_grad_(), scores.clone().requires_grad_()
            want = dense(whole, given[0], ids, given[1])
            want.square().sum().backward()
            if other == rank:
                own = tokens.requires_grad_(), scores.requires_grad_()
                sent = dispatch(tokens, ids, NUMBER, group)
                pairs = zip(sent.split(), *mine, strict=True)
                rows = torch.cat([torch.tanh(x @ up) @ down for x, up, down in pairs])
                found = combine(rows, sent, scores)
                wanted = want, *given
        bound: Any = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.1}
        torch.testing.assert_close(found, wanted[0], **bound)
        found.square().sum().backward()
        for one, other in zip(own, wanted[1:], strict=True):
            torch.testing.assert_close(one.grad, other.grad, **bound)
        for one, other in zip(mine, (whole.up, whole.down), strict=True):
            assert other.grad is not None
            torch.testing.assert_close(one.grad, other.grad.chunk(size)[rank], **bound)


KINDS = ["two", "one", "none", "no tokens"]


@pytest.mark.parametrize(
    ("ranks", "dtype"), only_rows([(2, torch.float64)], [(2, torch.float64), (4, torch.float64), (2, torch.bfloat16)])
)
def test_tokens_go_to_experts_and_back(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    pool.run(ranks, _layer, KINDS, dtype)


# ---- training --------------------------------------------------------------------------------------------------------


def _train(stage: int, size: int, optimizer: str, sends_all_to: int | None) -> None:
    run = start(stage, size, optimizer, partial(Mixture, sends_all_to=sends_all_to))
    reference = Mixture(dense=True, sends_all_to=sends_all_to)
    train_as_one_process(run, reference, optimizer, square, 1e-6, 2e-6)


@pytest.mark.parametrize(
    ("ranks", "stage", "size", "optimizer", "sends_all_to"),
    only_rows(
        [(2, 3, 2, "adamw", None), (2, 1, 2, "sgd", 2)],
        [
            *((2, stage, 2, "adamw", None) for stage in (0, 1, 2, 3)),
            *((2, stage, 2, "sgd", 2) for stage in (1, 3)),
            *((4, stage, size, "sgd", None) for stage in (0, 1, 2, 3) for size in (2, 4)),
            *((4, stage, 2, "adamw", 1) for stage in (2, 3)),
        ],
    ),
)
def test_experts_train_as_in_one_process(
    pool: Pool, ranks: int, stage: int, size: int, optimizer: str, sends_all_to: int | None
) -> None:
    pool.run(ranks, _train, stage, size, optimizer, sends_all_to)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


PATHS = [(2, [(3, 2), (1, 1), (2, 2)]), (4, [(1, 2), (3, 4), (0, 1), (3, 2), (0, 4)])]


@pytest.mark.parametrize(("ranks", "runs"), only_rows(PATHS[:1], PATHS))
def test_checkpoints_go_on_at_another_number_of_expert_ranks(
    pool: Pool, tmp_path: Path, ranks: int, runs: list[tuple[int, int]]
) -> None:
    pool.run(ranks, go_on, str(tmp_path), runs, Mixture, square, 2e-6)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    tokens, ids = torch.ones(3, 2), torch.tensor([0, 1, 4])
    for given, text in (
        ((tokens, ids, 4), "from 0 to 4, and there are 4 experts"),
        ((tokens, ids - 1, 4), "from -1 to 3"),
        ((tokens, ids[:2], 4), r"\[2\] for 3 tokens"),
        ((tokens, ids.float(), 5), "Pass whole numbers"),
    ):
        with pytest.raises(ValueError, match=text):
            dispatch(*given)
    sent = dispatch(tokens, ids, 5)
    with pytest.raises(ValueError, match="got 2 rows, and dispatch gave 3"):
        combine(tokens[:2], sent)
    with pytest.raises(ValueError, match="scores of shape"):
        combine(tokens, sent, tokens)


class _Ranks:
    size = 2


class Odd(Experts):
    """Experts with a parameter of any shape."""

    def __init__(self, number: int, *shape: int) -> None:
        super().__init__(number)
        self.weight = nn.Parameter(torch.ones(shape))


def test_copies_say_what_they_are() -> None:
    experts = Odd(4, 4, 2)
    experts.spread(_Ranks())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a copy of experts that are on several ranks"):
        copy.deepcopy(experts).dispatch(torch.ones(2, 2), torch.tensor([0, 1]))


def test_modules_that_cannot_be_cut_are_refused() -> None:
    tied, alone = Odd(4, 4, 2), nn.Linear(2, 4, bias=False)
    alone.weight = tied.weight
    for module, text in (
        (nn.Linear(2, 2), "Linear has no lt_zero.parallel.Experts"),
        (nn.Sequential(Odd(3, 3, 2)), "does not divide the 3 experts of 0.weight"),
        (Odd(4, 2, 4), r"weight of shape \[2, 4\] is no stack of 4 experts"),
        (nn.ModuleDict({"experts": tied, "head": alone}), "head.weight is a parameter of lt_zero.parallel.Experts"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            cut_experts(module, None, _Ranks())  # type: ignore[arg-type]
        assert caught.value.problems[0].key == SIZE


BLOCK = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def test_keys_that_exclude_experts_over_ranks() -> None:
    skip_without("compression")
    with pytest.raises(ConfigError, match="gradient_compression.algorithm needs the same parameters"):
        ZeroConfig.of({**BLOCK, "gradient_compression": {"algorithm": "topk"}})


def test_sizes_have_to_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match="autoep_size=2 does not divide the 3 data ranks"):
        ParallelSizes.of(ZeroConfig.of(BLOCK), 3)
    with pytest.raises(ConfigError, match="autoep_size=2 does not divide the 3 data and sequence ranks"):
        ParallelSizes.of(ZeroConfig.of({**BLOCK, "sequence_parallel_size": 3}), 3)
    sizes = ParallelSizes.of(ZeroConfig.of({**BLOCK, "tensor_parallel": {"autotp_size": 2}}), 8)
    assert sizes.expert_rows().tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]], "each tensor rank among its own"
    assert sizes.expert_parts().tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert sizes.parts().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
