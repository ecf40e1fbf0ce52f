"""Optimizers that nobody here has heard of: what cannot work on pieces is found out by a trial, before training."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

import lt_zero
from lt_zero.core.engine.optimizer_spec import Separability
from lt_zero.core.step.supported_optimizers import check_parts, check_supported, tried
from tests.support.features import needs
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import STAGES, Case, check, config_of, full_values
from tests.support.pool import Pool


class Plain(Optimizer):
    """Momentum; ``lr`` is all that it lets its groups have."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("momentum")
                    self.state[p]["momentum"] = p.grad.clone() if old is None else self.merge(old, p.grad)
                    p.sub_(self.update(p, self.state[p]["momentum"]), alpha=group["lr"])

    def merge(self, old: Tensor, grad: Tensor) -> Tensor:
        return 0.9 * old + grad

    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        return momentum


class Trusting(Plain):
    """As LARS: steps in proportion to the norm of each parameter."""

    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        return momentum * (p.norm() / (momentum.norm() + 1e-6)).clamp(max=2)


class Coarse(Plain):
    """A state of 8 bits with one scale per tensor, for tensors that are worth it."""

    def merge(self, old: Tensor, grad: Tensor) -> Tensor:
        merged = super().merge(old, grad)
        scale = merged.abs().max() / 127
        return (merged / scale).round() * scale if merged.numel() >= 4096 else merged


class Together(Plain):
    """As Prodigy: a step size for all parameters, from all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt() if grads else torch.ones(())
        for grad in grads:
            grad.div_(total)
        return super().step()


class Noisy(Plain):
    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        return momentum + 1e-3 * torch.randn_like(momentum)


class ScalableShampoo(Plain):
    """As that of pytorch_optimizer: whole matrices count only after 1,000 steps, when a trial is over."""


class MyAdam(torch.optim.Adam):
    """Of an element-wise parent, and not element-wise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        return super().step()


def _told(cls: type[Optimizer], stage: int, zero: dict[str, Any], **options: Any) -> str:
    """The error or the warning, before training."""
    engine = lt_zero.shard(Net(), config_of(stage, zero))
    optimizer = cls(engine.root.parameters(), **options)  # type: ignore[call-arg]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            lt_zero.ShardedOptimizer(engine, optimizer)
        except TypeError as error:
            return str(error)
    assert torch.equal(before, torch.get_rng_state())
    return "; ".join(str(w.message) for w in seen if "lt_zero" in str(w.message))


PIECES = "on pieces of a parameter .* zero_optimization.shard_along=parameter"


TRIALS: list[tuple[type[Optimizer], str, str]] = [  # what is told by default, and along parameters
    (Plain, "^$", "^$"),
    (Trusting, f"Trusting computes something else {PIECES}", "^$"),
    (Together, "Together .* all parameters at once .* stage 0", "Together .* all parameters at once .* stage 0"),
    (Noisy, "Noisy cannot be tried .* random .*optimizer_is_elementwise=true", "Noisy cannot be tried .*one by one"),
    (ScalableShampoo, "ScalableShampoo .* whole matrices .*zero_optimization.shard_along=parameter", "^$"),
    (Coarse, f"Coarse computes something else {PIECES}", "^$"),
    (MyAdam, f"MyAdam computes something else {PIECES}", "^$"),
]


@pytest.mark.parametrize(
    ("cls", "by_default", "along_parameters"),
    only_rows(TRIALS[:5], TRIALS),
)
def test_a_trial_tells(pool: Pool, cls: type[Optimizer], by_default: str, along_parameters: str) -> None:
    for zero, match in (({}, by_default), ({"shard_along": "parameter"}, along_parameters)):
        for told in pool.run(2, _told, cls, 2, zero):
            assert re.search(match, told), told


def test_nothing_is_tried_where_nothing_is_sharded(pool: Pool) -> None:
    assert pool.run(2, _told, Together, 0, {}) == ["", ""]


def test_each_group_is_tried(pool: Pool) -> None:
    class Free(Trusting):
        def update(self, p: Tensor, momentum: Tensor) -> Tensor:
            (group,) = (group for group in self.param_groups if any(p is other for other in group["params"]))
            return super().update(p, momentum) if group["lars"] else momentum

    for lars, refused in ((True, True), (False, False)):
        plain = Free([torch.nn.Parameter(torch.zeros(2))], lars=False)
        plain.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lars": lars})
        assert tried(plain) == (Separability.PARAMETERS if refused else Separability.ELEMENTS, "")


class Counted(Plain):
    """With an argument that is no option, counters and an accumulator of its own, and what it does by and by."""

    def __init__(self, params: Iterable[Any], total: int, lr: float = 0.05, **more: Any) -> None:
        super().__init__(params, lr, **more)
        self.total, self.steps = total, 0
        self.seen: dict[Any, int] = {}

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        self.seen[p] = self.seen.get(p, 0) + 1
        return momentum * (1 - self.steps / self.total)


class Late(Counted):
    """Centralizes from the tenth step on."""

    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        found = super().update(p, momentum)
        return found - found.mean() if self.steps >= 10 else found


class Factored(Counted):
    """As Adafactor: one scale for each row of a matrix that is large enough."""

    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        found = super().update(p, momentum)
        return found / found.norm(dim=1, keepdim=True) if p.dim() == 2 and min(p.shape) >= 128 else found


class Distance(Counted):
    """As D-Adaptation: a sum over all parameters, which the step size follows only later."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            total = sum(float((p.grad * p).sum()) for p in group["params"])
            group["sum"] = group.get("sum", 0.0) + total
            group["lr"] *= 1 if group["sum"] < 1e9 else 2
        return super().step(closure)


class Polyak(Counted):
    """Steps in proportion to the loss."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.loss = float(closure()) if closure is not None else 1.0
        return super().step()

    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        return momentum * self.loss


class Around(Optimizer):
    """Steps another optimizer, whose groups it shares, and averages weights every fifth time."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.calls = inner, 0
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.calls += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.calls % 5 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class Drawn(Counted):
    """With numbers of a generator of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.generator = torch.Generator().manual_seed(3)

    def update(self, p: Tensor, momentum: Tensor) -> Tensor:
        return momentum * torch.rand(p.shape, generator=self.generator)


class Locked(Counted):
    """With a member that cannot be copied."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lock = threading.Lock()


FOUND: dict[Any, tuple[Separability, str]] = {
    Counted: (Separability.ELEMENTS, ""),
    Late: (Separability.PARAMETERS, ""),
    Factored: (Separability.PARAMETERS, ""),
    Distance: (Separability.NOTHING, ""),
    Polyak: (Separability.NOTHING, ""),
    Drawn: (Separability.UNKNOWN, "it draws random numbers"),
    Locked: (Separability.UNKNOWN, "it cannot be copied"),
}


@pytest.mark.parametrize("cls", FOUND)
def test_a_trial_steps_copies_of_the_optimizer(cls: Any) -> None:
    """Whatever its constructor asks for; and the optimizer is left as it was."""
    sizes = ((200, 150), (7,), ())
    optimizer = cls([torch.nn.Parameter(torch.full(size, 2.0)) for size in sizes], total=50)
    divided, why = FOUND[cls]
    found, told = tried(optimizer)
    assert (found, told.startswith(why)) == (divided, True), (found, told)
    assert (optimizer.steps, optimizer.seen, dict(optimizer.state)) == (0, {}, {})
    assert all(bool((p == 2).all()) for p in optimizer.param_groups[0]["params"])
    if divided is not Separability.ELEMENTS:
        known = {id(optimizer.param_groups[0]["params"][0]): "some.weight"}
        with pytest.raises(TypeError, match="'some.weight'"):
            check_parts(optimizer, known)  # of which tensor ranks have a part


def test_a_trial_steps_copies_of_wrapped_optimizers() -> None:
    weights = [torch.nn.Parameter(torch.ones(3, 5))]
    for inner, found in ((Plain, Separability.ELEMENTS), (Trusting, Separability.PARAMETERS)):
        around = Around(inner(weights))
        schedule = torch.optim.lr_scheduler.ConstantLR(around)  # binds ``step`` to this optimizer
        assert tried(around) == (found, "")
        assert (around.calls, schedule.last_epoch) == (0, 0)
        assert bool((weights[0] == 1).all())


def _trusting(stage: int) -> None:
    case = Case(Net, next_token_loss, stage, lambda model: Trusting(model.parameters()))
    check(Case(**{**vars(case), "zero": {"shard_along": "parameter"}, "rtol": 1e-4, "atol": 1e-5}))


class Bare(torch.optim.SGD):
    """A wrapper like some packages' Lookahead: it has what an optimizer has, and never calls its constructor."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self.state = inner.state


def test_a_wrapper_without_hooks_is_refused_by_name() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(TypeError, match=r"Bare does not call Optimizer\.__init__.*Pass the optimizer that it wraps"):
        check_supported(Bare(inner), sharded=False)


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_whole_parameters_are_the_remedy(pool: Pool, stage: int) -> None:
    pool.run(2, _trusting, stage)


# ---- schedule-free ---------------------------------------------------------------------------------------------


class ScheduleFree(Optimizer):
    """SGD whose weights are those of the gradients (y) in train mode, and their average (x) in eval mode."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self) -> str:
        return self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> str:
        return self._switch(True, lambda beta: 1 - beta)

    def _switch(self, mode: bool, weight: Any) -> str:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight(group["beta"]))
            group["train_mode"] = mode
        self.last = mode  # an attribute that has to arrive at the optimizer itself
        return "switched"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def _schedule_free(stage: int, keys: dict[str, Any], zero: dict[str, Any], tolerance: float) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, zero, **keys))
    optimizer, expected = ScheduleFree(model.parameters()), ScheduleFree(reference.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    wrapper: Any = LightningOptimizer(optimizer)  # what ``self.optimizers()`` returns

    def compare(what: str) -> None:
        got = full_values(engine)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(
                got[name].float(), p.detach(), rtol=tolerance, atol=tolerance, msg=lambda t: what + t
            )

    for step in range(3):
        assert wrapper.train() == "switched"
        expected.train()
        assert optimizer.last is True
        compare(f"train mode {step} ")
        next_token_loss(model, step, 0, rank).backward()
        for r in range(world):
            (next_token_loss(reference, step, 0, r) / world).backward()
        for mine in (optimizer, expected):
            mine.step()
            mine.zero_grad()
        compare(f"step {step} ")
        for mine in (optimizer, expected):
            mine.eval()
        compare(f"eval mode {step} ")
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_schedule_free(pool: Pool, stage: int) -> None:
    pool.run(2, _schedule_free, stage, {}, {}, 1e-5)


def test_schedule_free_in_sixteen_bits(pool: Pool) -> None:
    keys = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    pool.run(2, _schedule_free, 2, keys, {}, 3e-2)


@needs("offload")
def test_schedule_free_with_states_in_files(pool: Pool, tmp_path: Any) -> None:
    pool.run(2, _schedule_free, 3, {}, {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}, 1e-5)
