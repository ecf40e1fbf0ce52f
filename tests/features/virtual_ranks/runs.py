"""Trains models on the micro-batches of virtual ranks, and compares bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_zero
from lt_zero import optim
from lt_zero.common import accelerator
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from tests.support import lamb_tools
from tests.support.models import Net, next_token_loss
from tests.support.parity import OPTIMIZERS, config_of, full_values

VIRTUAL = 6  # that 1, 2 and 3 divide
STEPS = 3

Bits = dict[str, Any]  # by name


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        model: makes it.
        loss: of the model, a step, a micro-batch and a virtual rank.
        optimizer: of its parameters.
        dtype: of the weights in forward; None: that of the model.
        zero: keys of the block zero_optimization.
        keys: of the top level.
        clip: norm to which gradients are clipped; 0: they are not.
        clip_value: to which elements are clipped; 0: they are not.
        norms: global norms of several orders, and the norm of each gradient, are compared, too.
        syncs: each backward is synchronised; else the last one of a step.
        overflow: step and virtual rank whose loss is too large.
        averages: of the weights are kept, and compared.
        apart: the device has memory of its own, as a GPU.
        meddle: called by the rank that has just run this virtual rank.
    """

    model: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, int, int, int], Tensor] = next_token_loss
    optimizer: Callable[[Any], Optimizer] = OPTIMIZERS["sgd"]
    dtype: torch.dtype | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    clip_value: float = 0.0
    norms: bool = False
    syncs: bool = False
    overflow: tuple[int, int] | None = None
    apart: bool = False
    averages: bool = False
    meddle: Callable[[Engine, int, int], None] | None = None


def rare_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    """A part of the model is used by virtual ranks 0 and 3 of the second step."""
    return lamb_tools.loss(model, step, micro, rank if rank != 3 else 0)


class Halves(nn.Module):
    """A net that is frozen but for its second half, until the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(tied=False)
        self.steps = 0
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_("blocks.2" in name or "head" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.net(tokens)
        return found


class Wide(nn.Module):
    """Matrices whose moments are kept in 8 bits, in blocks that shards cut at odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(67, 71), nn.Tanh(), nn.Linear(71, 73))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def wide_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    loss: Tensor = model(torch.randn(3, 67, generator=generator)).square().mean()
    return loss


def thaw(engine: Engine, step: int, virtual: int) -> None:
    """Unfreeze all of ``Halves`` after the first step's gradients are there."""
    if step == 0 and virtual >= VIRTUAL - dist.get_world_size():
        engine.root.requires_grad_(True)


def double(engine: Engine, step: int, virtual: int) -> None:
    """Edit gradients in place after the last micro-batch, as all ranks do."""
    if virtual >= VIRTUAL - dist.get_world_size():
        for parameter in engine.root.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.7)


def train(case: Case, stage: int) -> Bits:
    """The weights after some steps of ``VIRTUAL`` micro-batches each, of which rank r runs every N-th, and norms."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    keys = {"reproducible": {"virtual_ranks": VIRTUAL}, **case.keys}
    config = config_of(stage, case.zero, case.dtype, **keys)
    policy = dtype_policy(config, resolve_mode(config, "16-true" if case.dtype == torch.float16 else "32-true"))
    accelerator._apart = case.apart
    try:
        torch.manual_seed(0)
        model = case.model()
        engine = lt_zero.shard(model, config, policy=policy if case.dtype == torch.float16 else None)
    finally:
        accelerator._apart = False
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad or case.model is Halves])
    sharded, controller = lt_zero.ShardedOptimizer(engine, optimizer), LossScaleController(engine.policy)
    found: Bits = {}
    average = average_of(engine) if case.averages else None
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(VIRTUAL // ranks):
            virtual = turn * ranks + rank
            last = turn == VIRTUAL // ranks - 1
            with nullcontext() if last or case.syncs else engine.no_sync():
                loss = case.loss(model, step, 0, virtual).float() * (1e9 if case.overflow == (step, virtual) else 1.0)
                controller.before_backward([sharded])
                (loss * controller.scale).backward()
                if case.meddle is not None:
                    case.meddle(engine, step, virtual)
        if case.norms:
            found |= norms_of(sharded, step)
        if case.clip_value:
            controller.clip_value(sharded, case.clip_value)
        taken, norm = controller.step(sharded, 0, case.clip, optimizer.step)
        found |= {f"step {step} is taken": taken, f"scale {step}": controller.scale}
        found |= {f"norm {step}": norm.item()} if norm is not None and case.clip else {}
        if average is not None:
            average.update(0.9)
            with average.showing(True):
                found |= {f"average of {name}, {step}": value.numpy() for name, value in full_values(engine).items()}
    found |= {
        name: (value if value.dtype == torch.float64 else value.float()).numpy()
        for name, value in full_values(engine).items()
    }
    engine.offload_manager.close()
    return found


def average_of(engine: Engine) -> Any:
    """An average of the weights."""
    from lt_zero.features.ema.average import WeightAverage  # skipped where it was taken out

    return WeightAverage(engine)


def norms_of(sharded: ShardedOptimizer, step: int) -> Bits:
    """Global norms of several orders, and those that ``p.grad`` shows."""
    found: Bits = {f"norm {order}, {step}": sharded.grads.norm(order).item() for order in (2.0, 1.0, 3.5, 0.0)}
    with sharded.engine.unused_parameters.user_access():
        shown = {name: p.grad for name, p in sharded.engine.root.named_parameters() if p.grad is not None}
        found |= {f"norm of {name}, {step}": grad.norm().item() for name, grad in shown.items()}
        found[f"total norm, {step}"] = torch.nn.utils.get_total_norm(list(shown.values())).item()
    return found


def differing(found: Bits, wanted: Bits) -> list[str]:
    """The names of what has other bits."""

    def bits(value: Any) -> Any:
        return value.tobytes() if hasattr(value, "tobytes") else repr(value)

    assert found.keys() == wanted.keys()
    return [name for name, value in wanted.items() if bits(value) != bits(found[name])]


_BF16, _FP16 = torch.bfloat16, torch.float16
_CPU = {"offload_optimizer": {"device": "cpu"}}
_OVERLAP = {"offload_optimizer": {"device": "cpu", "overlap_step": True}}
_LOW_MASTER = {"bf16_master_weights_and_grads": True}
_WIDE_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

CASES: dict[str, Case] = {
    "plain": Case(),
    "synchronised": Case(syncs=True),
    "sum": Case(keys={"gradient_allreduce_op": "sum"}),
    "no reduce-scatter": Case(zero={"reduce_scatter": False}),
    "no overlap": Case(zero={"overlap_comm": False}),
    "many buckets": Case(zero={"reduce_bucket_size": 50}),
    "owners": Case(zero={"shard_along": "parameter"}),
    # models
    "rare": Case(model=lamb_tools.Odd, loss=rare_loss, norms=True),
    "twice": Case(model=lambda: Net(twice=True), clip=0.5),
    "recomputed": Case(model=lambda: Net(twice=True, checkpointed="outside")),
    "frozen": Case(model=Halves, meddle=thaw),
    "edited": Case(meddle=double),
    "double": Case(model=lambda: Net().double(), clip=0.1, norms=True),
    # steps
    "adamw": Case(optimizer=OPTIMIZERS["adamw"], clip=0.1, norms=True),
    "adamw of torch": Case(optimizer=OPTIMIZERS["adamw"], keys={"fused_step": False}, clip=0.1),
    "adam": Case(optimizer=lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=False), clip_value=1e-3),
    "adagrad": Case(optimizer=lambda params: torch.optim.Adagrad(params, lr=1e-2, eps=1e-8)),
    "lion": Case(optimizer=lambda params: optim.Lion(params, lr=1e-3)),
    "rmsprop": Case(optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3)),
    # In fp64, as its factors are rounded to the dtype of the weights.
    "lamb": Case(
        model=lambda: Net().double(),
        optimizer=lambda params: optim.Lamb(params, lr=1e-2, weight_decay=0.1),
        clip=0.1,
    ),
    "lamb in fp32": Case(optimizer=lambda params: optim.Lamb(params, lr=1e-2)),
    "lamb of owners": Case(optimizer=lambda params: optim.Lamb(params, lr=1e-2), zero={"shard_along": "parameter"}),
    "lamb in files": Case(
        model=Wide,
        loss=wide_loss,
        optimizer=lambda params: optim.Lamb(params, lr=1e-2, weight_decay=0.1),
        zero={"offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"}},
    ),
    "lamb in bf16": Case(
        dtype=_BF16,
        optimizer=lambda params: optim.Lamb(params, lr=1e-2, weight_decay=0.1),
        zero=_CPU,
        keys={"bf16": {**_LOW_MASTER, "bf16_optimizer_states": True}, **_WIDE_SUMS},
        clip=0.1,
    ),
    # precision
    "bf16": Case(dtype=_BF16, optimizer=OPTIMIZERS["adamw"], clip=0.1, norms=True),
    "fp16": Case(dtype=_FP16, optimizer=OPTIMIZERS["adamw"], clip=0.1, keys={"fp16": {"initial_scale_power": 8}}),
    "overflow": Case(
        dtype=_FP16,
        optimizer=OPTIMIZERS["adamw"],
        clip=0.1,
        overflow=(1, 4),
        keys={"fp16": {"initial_scale_power": 8, "hysteresis": 1}},
    ),
    "wire bf16": Case(keys={"communication_data_type": "bf16"}, clip=0.1),
    "wire fp16": Case(dtype=_BF16, keys={"communication_data_type": "fp16"}, clip=0.1),
    # states
    "averages": Case(averages=True),
    "8-bit moments": Case(
        model=Wide, loss=wide_loss, optimizer=OPTIMIZERS["adamw"], keys={"optimizer_states": {"dtype": "int8"}}
    ),
    "bf16 moments": Case(optimizer=OPTIMIZERS["adamw"], keys={"optimizer_states": {"dtype": "bf16"}}),
    "stochastic rounding": Case(
        dtype=_BF16,
        optimizer=OPTIMIZERS["adamw"],
        zero=_CPU,
        keys={"bf16": {**_LOW_MASTER, "stochastic_rounding": True}, **_WIDE_SUMS},
        clip=0.1,
    ),
    "low master": Case(
        dtype=_BF16,
        optimizer=OPTIMIZERS["adamw"],
        zero=_CPU,
        keys={"bf16": {**_LOW_MASTER, "bf16_optimizer_states": True}, **_WIDE_SUMS},
        clip=0.1,
    ),
    # places
    "offload": Case(optimizer=OPTIMIZERS["adamw"], zero=_CPU, apart=True, clip=0.1),
    "overlapping offload": Case(optimizer=OPTIMIZERS["adamw"], zero=_OVERLAP, apart=True),
    "files": Case(
        optimizer=OPTIMIZERS["adamw"], zero={"offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"}}
    ),
}


def train_case(name: str, stage: int, folder: str) -> Bits:
    """``train`` a case of ``CASES``; its files are in ``folder``."""
    case = CASES[name]
    for place in case.zero.values():
        if isinstance(place, dict) and "nvme_path" in place:
            case = Case(**{**vars(case), "zero": {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}})
    return train(case, stage)
