"""Lightning's own clipping: hooks see and set the gradients before and after it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from tests.conformance.faces import close
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

LIMIT = 0.25  # of the norm, which is about 0.7
FP16 = {"fp16": {"initial_scale_power": 10, "hysteresis": 1}}


class Clips(GPT):
    """Reads gradients before and after Lightning clips them, and sets them to what was read."""

    def __init__(self, world: int, look: bool) -> None:
        super().__init__(world)
        self.look = look
        self.norms: list[Tensor] = []

    def total(self) -> Tensor:
        grads = [lt_zero.full_grad(p) for p in self.parameters()]
        for p, grad in zip(self.parameters(), grads, strict=True):
            assert grad is not None
            assert p.grad is not None
            close(p.grad.norm().float(), grad.norm(), "shown")
            lt_zero.set_full_grad(p, grad)
        first = next(self.parameters())
        if dist.get_rank() == 0:  # as before they were set, one rank alone may read norms
            assert first.grad is not None
            assert first.grad.norm() > 0
        return torch.stack([grad.norm() for grad in grads if grad is not None]).norm()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        before = self.total() if self.look else None
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        if before is not None:
            self.norms.append(torch.stack([before, self.total(), self.trainer.precision_plugin.grad_norm]))  # type: ignore


def _automatic(stage: int, precision: Any) -> None:
    found = []
    for look in (False, True):
        module = Clips(dist.get_world_size(), look)
        config: dict[str, Any] = FP16 if precision == "16-true" else {}
        clips = {"gradient_clip_val": LIMIT, "accumulate_grad_batches": 2, "max_epochs": 2}
        sharded_trainer(stage, {}, config, precision=precision, use_distributed_sampler=False, **clips).fit(module)
        found.append([lt_zero.full_master(p) for p in module.parameters()])
    for before, after, known in module.norms:
        assert before > LIMIT
        close(after, torch.tensor(LIMIT), "clipped", rtol=1e-4)
        close(known, before, "known", rtol=1e-4)
    assert len(module.norms) == 2
    for one, other in zip(*found, strict=True):
        close(one, other, "weights", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "precision"),
    only_rows([(3, "16-true")], itertools.product([0, 1, 2, 3], ["32-true", "16-true"])),
)
def test_lightnings_own_clipping_is_seen(pool: Pool, stage: int, precision: str) -> None:
    pool.run(2, _automatic, stage, precision)


class Assigns(GPT):
    """Clears one gradient and enlarges another before Lightning clips them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        cleared, larger = itertools.islice(self.parameters(), 2)
        cleared.grad = None
        assert lt_zero.full_grad(cleared) is None
        before = lt_zero.full_grad(larger)
        assert larger.grad is not None
        assert before is not None
        if type(larger.grad) is Tensor:
            larger.grad = 4 * larger.grad
        else:
            larger.grad *= 4
        close(lt_zero.full_grad(larger), 4 * before, "assigned")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        grads = [lt_zero.full_grad(p) for p in self.parameters()]
        assert grads[0] is None
        close(torch.stack([grad.norm() for grad in grads if grad is not None]).norm(), torch.tensor(LIMIT), "clipped")
        zero = torch.zeros(())
        steps = [0.1 * (zero if grad is None else grad) for grad in grads]
        self.wanted = [lt_zero.full_master(p) - step for p, step in zip(self.parameters(), steps, strict=True)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        for p, wanted in zip(self.parameters(), self.wanted, strict=True):
            close(lt_zero.full_master(p), wanted, "weights", rtol=1e-5, atol=1e-6)


def _assigns(stage: int) -> None:
    keys = {"gradient_clip_val": LIMIT, "max_epochs": 1, "use_distributed_sampler": False}
    module = Assigns(dist.get_world_size())
    sharded_trainer(stage, {}, {}, **keys).fit(module)
    assert module.wanted


@pytest.mark.parametrize("stage", only([2], [0, 2]))
def test_what_a_hook_assigns_is_clipped(pool: Pool, stage: int) -> None:
    pool.run(2, _assigns, stage)
