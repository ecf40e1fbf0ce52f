"""``reproducible.virtual_ranks``: weights have the same bits, whatever ranks run the micro-batches of a round."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero import ConfigError, optim
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from tests.features.virtual_ranks.runs import CASES, VIRTUAL, Bits, Case, differing, train, train_case
from tests.support.features import needs, skip_without
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_grads
from tests.support.pool import Pool

pytestmark = needs("virtual_ranks")

ROWS = [(name, ranks, stage) for name in CASES for ranks in (1, 2, 3, 6) for stage in range(4)]
FAST = [
    ("plain", 2, 2),
    ("plain", 3, 0),
    ("synchronised", 2, 1),
    ("many buckets", 3, 3),
    ("rare", 2, 3),
    ("twice", 3, 2),
    ("frozen", 2, 1),
    ("edited", 3, 3),
    ("adamw", 3, 2),
    ("lamb", 3, 3),
    ("overflow", 2, 2),
    ("wire bf16", 3, 1),
    ("8-bit moments", 2, 3),
    ("stochastic rounding", 3, 3),
    ("offload", 2, 3),
]


@functools.cache
def wanted_of(pool: Pool, name: str, folder: str) -> Bits:
    """What one rank gets at stage 0."""
    found: Bits = pool.run(1, train_case, name, 0, folder)[0]
    return found


@pytest.mark.parametrize("shared", ["1", pytest.param("0", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "ranks", "stage"), only_rows(FAST, ROWS))
def test_the_same_bits(
    pool: Pool, name: str, ranks: int, stage: int, shared: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    skip_without(CASES[name].zero, CASES[name].keys, *(["ema"] if CASES[name].averages else []))
    folder = str(tmp_path_factory.mktemp("states"))
    wanted = wanted_of(pool, name, str(tmp_path_factory.getbasetemp()))
    for found in pool.run(ranks, train_case, name, stage, folder, env={"LT_ZERO_SHARED_MEMORY": shared}):
        assert differing(found, wanted) == []


# ---- against a loop of torch ---------------------------------------------------------------------------------------


def _gradients(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a step, and those that a loop over virtual ranks adds up."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    wanted: dict[str, Tensor] = {}
    for virtual in range(VIRTUAL):
        reference.zero_grad()
        next_token_loss(reference, 0, 0, virtual).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            contribution = parameter.grad * (1 / VIRTUAL)
            wanted[name] = wanted[name] + contribution if name in wanted else contribution
    engine = lt_zero.shard(model, config_of(stage, reproducible={"virtual_ranks": VIRTUAL}))
    for turn in range(VIRTUAL // ranks):
        next_token_loss(model, 0, 0, turn * ranks + rank).backward()
    return full_grads(engine), wanted


@pytest.mark.parametrize(("ranks", "stage"), only_rows([(2, 2)], [(1, 0), (2, 0), (2, 2), (3, 3)]))
def test_gradients_are_the_sums_of_a_loop(pool: Pool, ranks: int, stage: int) -> None:
    for found, wanted in pool.run(ranks, _gradients, stage):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


def _fold(dtype: torch.dtype, out_dtype: torch.dtype, whole: bool, reusable: bool) -> None:
    """Two turns of a transport, of contributions whose sum depends on its order. The last rank's is the first one."""
    from lt_zero.features.virtual_ranks.fold import folding

    group = ShardGroup.of_all(World.join(torch.device("cpu")))
    group.configure(group.size, "auto", True, False, None)
    order = [group.size - 1, *range(group.size - 1)]
    group.sum_by(folding(group, 2, order))
    numel = 24 * group.size
    buffers = group.send_buffers({dtype: numel} if reusable else {})
    part = slice(None) if whole else slice(24 * group.rank, 24 * (group.rank + 1))
    out = torch.empty(numel, dtype=out_dtype)[part].clone()
    wanted = torch.zeros(numel, dtype=out_dtype)
    for turn in range(2):
        send = buffers.take(numel, dtype)
        for place, rank in enumerate(order):
            generator = torch.Generator().manual_seed(10 * turn + rank)
            row = (torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-4, 4, (numel,))).to(dtype)
            row[0] = (1e30, 1.0, -1e30)[rank % 3] if dtype == torch.float32 else row[0]
            product = row.to(out_dtype) * (1 / (2 * group.size))
            wanted = wanted + product if turn or place else product
            if rank == group.rank:
                send.flat.copy_(row)
        reduce = group.all_reduce if whole else group.reduce_scatter
        reduce(out, send, add=turn > 0, name="test").wait()
        buffers.give_back(send)
    assert torch.equal(out, wanted[part])


def _folds() -> None:
    for dtype, out_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        for whole in (False, True):
            for reusable in (False, True):
                torch.manual_seed(2)
                _fold(dtype, out_dtype, whole, reusable)


@pytest.mark.parametrize(
    ("ranks", "shared"), only_rows([(2, "0"), (4, "1")], [(r, s) for r in (1, 2, 4) for s in "01"])
)
def test_transports_add_one_by_one(pool: Pool, ranks: int, shared: str) -> None:
    pool.run(ranks, _folds, env={"LT_ZERO_SHARED_MEMORY": shared})


# ---- what is refused -----------------------------------------------------------------------------------------------


def _refusal(name: str) -> str:
    """The error of a run."""
    with pytest.raises((ConfigError, RuntimeError)) as error:
        train(REFUSED[name][0], 3)
    return str(error.value)


class Borrowing(Net):
    """Uses a weight of a block outside of that block, whose gradient comes after those of the block."""

    def forward(self, tokens: Tensor) -> Tensor:
        borrowed = self.blocks[2].norm.weight.sum()
        found: Tensor = super().forward(tokens) * borrowed
        return found


def _adam_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


class _OwnSquares(optim.Lamb):
    """As an optimizer of somebody else, which does not know of parts."""

    takes_parts = False


REFUSED: dict[str, tuple[Case, str]] = {
    "ranks": (Case(keys={"reproducible": {"virtual_ranks": 3}}), "virtual_ranks=3 is no multiple of 2, the number"),
    "16-bit sums": (
        Case(dtype=torch.bfloat16, keys={"data_types": {"grad_accum_dtype": "bf16"}}),
        "Set data_types.grad_accum_dtype=fp32",
    ),
    "noise scale": (Case(keys={"gradient_noise_scale": True}), "gradient_noise_scale=true compares them between ranks"),
    "own squares": (Case(optimizer=_OwnSquares), "set zero_optimization.shard_along=parameter, or let _OwnSquares"),
    "torch's fused step": (Case(optimizer=_adam_of_torch, keys={"fused_step": False}), "pass fused=False to AdamW"),
    "borrowed": (Case(model=Borrowing), "Gradients of blocks.2 came after they were reduced"),
}


def _all_refusals() -> dict[str, str]:
    return {name: _refusal(name) for name in REFUSED}


def test_what_is_refused_is_named(pool: Pool) -> None:
    for found in pool.run(2, _all_refusals):
        for name, (_, text) in REFUSED.items():
            assert text in found[name], (name, found[name])
