"""Trains a model sharded and in one process on the same data, and compares every parameter and gradient each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.common.flat_storage import FlatStorage
from lt_zero.core.engine.compute_copy import State
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_parameters, gather_own

STAGES = [0, 1, 2, 3]
# The kernels fuse multiply and add, as torch's optimizers do on a CPU with AVX2 and up; elsewhere the last bits differ.
TORCH_FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
RELEASE = {"stage3_max_reuse_distance": 0}  # nothing stays gathered after its forward

Loss = Callable[[nn.Module, int, int, int], Tensor]  # model, step, micro-batch, rank -> loss

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
}


@dataclass
class Case:
    """One training run; ``zero`` are keys of the zero_optimization block (persistence threshold 0 unless given)."""

    model: Callable[[], nn.Module]
    loss: Loss
    stage: int = 3
    optimizer: str | Callable[[nn.Module], Optimizer] = "sgd"
    steps: int = 2  # the second one meets momentum, and the order of modules that the first one recorded
    micro: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    backward: Callable[[Engine | None, Tensor, int], None] | None = None
    after_step: Callable[[nn.Module, int], None] | None = None
    sync_every: bool = False  # reduce on each micro-batch instead of the last one only
    rtol: float = 1e-5
    atol: float = 1e-6
    lends: bool = False  # user code holds views of weights when the run ends
    activation_checkpointing: dict[str, Any] = field(default_factory=dict)
    communication: dict[str, Any] = field(default_factory=dict)


def config_of(
    stage: int, zero: dict[str, Any] | None = None, dtype: torch.dtype | None = None, **keys: Any
) -> ZeroConfig:
    """``dtype``: of the weights in forward; ``keys``: of the top level."""
    block = {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})}
    for low, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        if dtype == low:
            keys[name] = {"enabled": True, **keys.get(name, {})}
    return ZeroConfig.of({"zero_optimization": block, **keys})


def split_backward(engine: Engine | None, loss: Tensor, step: int) -> None:
    """A ``Case.backward`` that walks the same graph twice."""
    (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()


def make_optimizer(case: Case, model: nn.Module) -> Optimizer:
    if callable(case.optimizer):
        return case.optimizer(model)
    return OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])


class CountedStorage(FlatStorage):
    """Counts the bytes of all storages that could be freed: those there are, and the most at a time."""

    live = most = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.there = False
        self._there(True)

    def _there(self, there: bool) -> None:
        CountedStorage.live += self._nbytes * (there - self.there)
        CountedStorage.most, self.there = max(CountedStorage.most, CountedStorage.live), there

    def allocate(self) -> None:
        super().allocate()
        self._there(True)

    def free(self) -> None:
        super().free()
        self._there(False)


@contextmanager
def counted_storages() -> Iterator[type[CountedStorage]]:
    """Buckets that are made inside are counted, from 0, as long as they live."""
    CountedStorage.live = CountedStorage.most = 0
    with mock.patch("lt_zero.core.engine.compute_copy.FlatStorage", CountedStorage):
        yield CountedStorage


def full_grads(engine: Engine) -> dict[str, Tensor]:
    """The averaged gradients of all parameters that have an accumulator. Collective."""
    engine.finish_reductions()
    grads: dict[str, Tensor] = {}
    for bucket in engine.buckets:
        if not bucket.grads.accumulated:
            continue
        flat = gather_own(bucket, bucket.grads.read())
        for index, span in enumerate(bucket.layout.spans):
            if index in bucket.grads.valid:
                grads[span.name] = flat[span.lo : span.hi].view(span.shape).clone()
    return grads


def full_values(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, _, value in full_parameters(engine)}


def check(case: Case) -> Engine:
    """Run ``case`` on this rank and compare with a single process; returns the engine for further checks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = case.model()
    reference = copy.deepcopy(model)
    blocks = {"activation_checkpointing": case.activation_checkpointing, "communication": case.communication}
    config = config_of(case.stage, case.zero, **blocks)
    engine = lt_zero.shard(model, config)
    optimizer, expected = make_optimizer(case, model), make_optimizer(case, reference)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(case.steps):
        optimizer.zero_grad()
        expected.zero_grad()
        for micro in range(case.micro):
            _reference_backward(case, reference, step, micro, world)
            engine.reducer.sync = case.sync_every or micro == case.micro - 1
            loss = case.loss(model, step, micro, rank) / case.micro
            case.backward(engine, loss, step) if case.backward else loss.backward()
        _compare_grads(case, engine, reference, step)
        optimizer.step()
        expected.step()
        if case.after_step:
            case.after_step(model, step)
            case.after_step(reference, step)
        _compare_values(case, engine, reference, step)
    lent = [bucket.name for bucket in engine.buckets if bucket.state is State.LENT]
    assert case.lends or not lent, f"memory of released weights is kept, as if user code held views of them: {lent}"
    return engine


def _reference_backward(case: Case, reference: nn.Module, step: int, micro: int, world: int) -> None:
    for rank in range(world):
        loss = case.loss(reference, step, micro, rank) / (case.micro * world)
        case.backward(None, loss, step) if case.backward else loss.backward()


def _compare_grads(case: Case, engine: Engine, reference: nn.Module, step: int) -> None:
    got = full_grads(engine)
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            if name in got:
                assert not got[name].any(), f"step {step}: {name} has a gradient, the reference has none"
            continue
        close(got[name], parameter.grad, case, f"step {step}: gradient of {name}")


def _compare_values(case: Case, engine: Engine, reference: nn.Module, step: int) -> None:
    got = full_values(engine)
    assert got.keys() == dict(reference.named_parameters()).keys()
    for name, parameter in reference.named_parameters():
        close(got[name], parameter, case, f"step {step}: {name}")


def close(got: Tensor, want: Tensor, case: Case, what: str) -> None:
    want, bounds = want.detach(), {"rtol": case.rtol, "atol": case.atol}
    if got.dtype == want.dtype and got.shape == want.shape and torch.allclose(got, want, **bounds):
        return  # ten times as fast as torch.testing, which explains
    torch.testing.assert_close(got, want, **bounds, msg=lambda text: f"stage {case.stage}, {what}\n{text}")
