"""Norms of gradients of every order that torch takes, against one process: of one parameter, of all, and clipping.

A gradient lies on several ranks, in rows that are padded with zeros, and some ranks have nothing of it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.config.precision import dtype_policy
from tests.support.matrix import only
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

ORDERS = [2.0, 0.0, math.inf, -math.inf, -1.0, -2.5, 0.5, 3.0]
SHAPES = [(7, 9), (1,), (), (5, 3, 2), (2,), (31,)]


class Odd(nn.Module):
    """Parameters of odd sizes; the gradient of the last one has zeros."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        self.tensors = nn.ParameterList(nn.Parameter(value) for value in made)

    def forward(self, x: Tensor) -> Tensor:
        *others, last = self.tensors
        return (
            sum((p * (x + 1).cos()).sum() * (number + 1) for number, p in enumerate(others))
            + (  # type: ignore
                last[::2] * x
            ).sum()
        )


def _close(got: Tensor, want: Tensor, what: object) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-12, atol=0, msg=lambda text: f"{what}: {text}")


def _every_order(stage: int, zero: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Odd()
    reference = copy.deepcopy(model)
    config = config_of(stage, {**zero, **(RELEASE if stage == 3 else {})})
    engine = lt_zero.shard(model, config, policy=dtype_policy(config, "64-true"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    sharded = lt_zero.ShardedOptimizer(engine, optimizers[0])
    for step, limited in enumerate(ORDERS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.tensor(float(rank + step + 1), dtype=torch.float64)).backward()
        for other in range(world):
            (reference(torch.tensor(float(other + step + 1), dtype=torch.float64)) / world).backward()
        engine.finish_reductions()
        grads = [p.grad for p in model.parameters()]
        wanted = [p.grad for p in reference.parameters()]
        for order in ORDERS if step == 0 else [limited]:
            for shape, grad, plain in zip(SHAPES, grads, wanted, strict=True):
                assert grad is not None
                assert plain is not None
                for norm in (
                    lambda g, o: g.norm(o),
                    lambda g, o: g.norm(p=o),
                    lambda g, o: torch.norm(g, o),
                    lambda g, o: torch.linalg.vector_norm(g, ord=o, dtype=torch.float64),
                    lambda g, o: torch._foreach_norm([g], o)[0],
                ):
                    _close(norm(grad, order), norm(plain, order), (stage, order, shape))
            total = torch.nn.utils.get_total_norm([g for g in wanted if g is not None], order)
            _close(torch.nn.utils.get_total_norm([g for g in grads if g is not None], order), total, (stage, order))
            _close(sharded.grads.norm(order), total, (stage, order, "all"))
        # By torch's function, which edits the gradients, and by the engine's.
        limit = 0.3 * float(torch.nn.utils.get_total_norm([g for g in wanted if g is not None], limited))
        limit = limit or 0.1
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit, limited)
        if step % 2:
            got = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, limited)
        else:
            got = sharded.grads.clip_norm(limit, norm_type=limited)
        _close(got, want, (stage, limited, "clipped"))
        for optimizer in optimizers:
            optimizer.step()
    for (name, value), (_, want) in zip(full_values(engine).items(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=1e-12, msg=name)


ROWS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage 0": (2, 0, {}),
    "stage 2": (3, 2, {}),
    "stage 3": (2, 3, {}),
    "owned": (2, 1, {"shard_along": "parameter"}),
    "stage 1": (3, 1, {}),
    "stage 3 on three": (3, 3, {}),
}


@pytest.mark.parametrize("row", only(["stage 0", "stage 2", "stage 3"], ROWS))
def test_norms_of_every_order(pool: Pool, row: str) -> None:
    ranks, stage, zero = ROWS[row]
    pool.run(ranks, _every_order, stage, zero)
