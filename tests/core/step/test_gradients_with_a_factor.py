"""Gradients of three micro-batches in a loop at stage 0: ``p.grad`` lacks a third, which the step multiplies later.

User code between the last backward and the step sees, and edits, what one process has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from tests.support.models import Net, next_token_loss
from tests.support.pool import Pool

MICRO = 3
Params = list[Any]


def _read(params: Params) -> list[Tensor]:
    found = [p.grad.clone() for p in params] + [p.grad.abs().max() for p in params]
    found += [p.grad.view(-1)[:1].clone() for p in params] + [copy.deepcopy(p.grad) for p in params]
    return [*found, torch.from_numpy(params[0].grad.numpy().copy()), torch.cat([p.grad.flatten() for p in params])]


def _norms(params: Params) -> list[Tensor]:
    own = [torch.stack([p.grad.norm(order) for p in params]) for order in (1, 2, float("inf"))]
    return [*own, torch.nn.utils.get_total_norm([p.grad for p in params])]


def _edit(params: Params) -> list[Tensor]:
    for number, p in enumerate(params):
        p.grad *= 0.5
        p.grad.view(-1)[number % 3 :: 2].add_(0.01)
        p.grad.data.mul_(2)
        p.grad.detach().clamp_(-0.05, 0.04)
        p.grad[0] = 0.02
    return _read(params)


def _assign(params: Params) -> list[Tensor]:
    for number, p in enumerate(params):
        p.grad = torch.full_like(p, 0.1 * number) if number % 2 else 0.5 * p.grad + 0.01
    return []


def _clear(params: Params) -> list[Tensor]:
    for p in params[::2]:
        p.grad = None
    return []


def _clip(params: Params) -> list[Tensor]:
    return [torch.nn.utils.clip_grad_norm_(params, 0.3)]


def _clip_values(params: Params) -> list[Tensor]:
    torch.nn.utils.clip_grad_value_(params, 0.01)
    return []


def _keep(params: Params) -> list[Tensor]:
    """Gradients that were kept before an edit show it."""
    kept = [p.grad for p in params]
    for p in params:
        p.grad.mul_(2)
    return [*kept, *_norms(params)]


USES: list[Callable[[Params], list[Tensor]]] = [_read, _norms, _edit, _assign, _clear, _clip, _clip_values, _keep]


def _used_between() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net(depth=1)
    reference = copy.deepcopy(model)
    made = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, reference)]
    config = {
        "zero_optimization": {"stage": 0},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
    }
    engine, *_ = lt_zero.initialize(model=model, optimizer=made[0], config=config)
    for step, use in enumerate(USES):
        for micro in range(MICRO):
            engine.backward(next_token_loss(model, step, micro, rank))
            for other in range(world):
                (next_token_loss(reference, step, micro, other) / (world * MICRO)).backward()
            if micro == 0 and use is _clear:  # the first micro-batch is dropped for some
                _clear(list(model.parameters()))
                _clear(list(reference.parameters()))
            if micro + 1 == MICRO:
                pairs = zip(use(_used(model)), use(_used(reference)), strict=True)
                for number, (got, want) in enumerate(pairs):
                    _compare(f"{use.__name__} {number}", torch.as_tensor(got), torch.as_tensor(want))
            engine.step()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        made[1].step()
        made[1].zero_grad()
        for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
            _compare(f"{use.__name__}, {name}", got.detach(), want.detach())


def _used(model: nn.Module) -> Params:
    return [p for p in model.parameters() if p.grad is not None]


def _compare(what: str, got: Tensor, want: Tensor) -> None:
    got = got * 1  # of a stand-in
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")


def test_user_code_sees_and_edits_whole_gradients(pool: Pool) -> None:
    pool.run(2, _used_between)
