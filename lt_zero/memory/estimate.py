"""``estimate``: the memory forecast for a model, or for sizes alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.config import ZeroConfig
from lt_zero.config.blocks.precision import MODES, dtype_policy, resolve_mode
from lt_zero.engine.hidden_size import with_sizes
from lt_zero.engine.partition import plan_engine
from lt_zero.memory.forecast import Forecast, forecast
from lt_zero.memory.rows import Setup
from lt_zero.step.fused_step import FusedAdam
from lt_zero.step.supported_optimizers import states_by_group

_MOST_UNITS = 1024  # units of a model given by size; more would not change the result
_OF_HIDDEN = ("bucket_size", "persistence_threshold")  # suffixes of keys that "auto" derives from the hidden size
_USUAL_UNITS = 32  # default number of layers of a model given by size


@dataclass(frozen=True)
class Sizes:
    """A fully trainable model that is given by its size only.

    Attributes:
        total: parameters.
        largest: parameters of the largest unit (a transformer block, an embedding); default: a 32nd of all.
    """

    total: int
    largest: int | None = None

    def __post_init__(self) -> None:
        if self.total < 1 or not 1 <= (self.largest or 1) <= self.total:
            raise ValueError(
                f"Sizes(total={self.total}, largest={self.largest}): both are numbers of parameters, at least 1, and "
                "the largest unit is a part of the total."
            )


def estimate(
    model: nn.Module | Sizes | float,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int = 1,
    *,
    ranks_per_node: int | None = None,
    optimizer: str | float | Optimizer = "adam",
    precision: str | None = None,
    device: str = "cuda",
    accumulate_grad_batches: int = 1,
    saves: bool = True,
) -> Forecast:
    """The bytes that each rank and node needs. Allocates nothing and needs no process group.

    Args:
        model: a module on any device, also "meta"; or ``Sizes``, or the number of parameters. For a module that is not
            sharded yet the engine's own plan is used. For sizes the padding of ``shard_along=parameter`` is unknown and
            not counted.
        config: as for ``ZeroStrategy``.
        world: ranks.
        ranks_per_node: ranks on one node; default: all on CPUs, at most 8 on GPUs.
        optimizer: a class of ``torch.optim`` ("adam", "sgd", ...; "momentum" is SGD with momentum), an optimizer, or
            the bytes of its states per parameter (8 for Adam).
        precision: as for ``Trainer``; default: what the config says, or "32-true".
        device: "cuda" or "cpu", where the ranks will compute.
        accumulate_grad_batches: as for ``Trainer``; stages 0 and 1 keep whole gradients if it is above 1.
        saves: whether checkpoints will be saved; for full ones rank 0 collects a full copy in host memory.

    Raises:
        ValueError: a value is wrong, or precision and config contradict each other.
    """
    config = ZeroConfig.of(config)
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r} is not 'cuda' or 'cpu'.")
    if precision is not None and precision not in MODES:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(MODES)}.")
    per_node = ranks_per_node or (world if device == "cpu" else min(world, 8))
    if world < 1 or not 1 <= per_node <= world:
        raise ValueError(f"world={world}, ranks_per_node={per_node}: 1 <= ranks_per_node <= world is needed.")
    if isinstance(model, nn.Module):
        config = with_sizes(config, model)
    elif sizes_left := sorted(path[1] for path in config.autos if path[1:] and str(path[1]).endswith(_OF_HIDDEN)):
        raise ValueError(f'{", ".join(map(str, sizes_left))} "auto" needs the model, not its size: write numbers.')
    policy = dtype_policy(config, resolve_mode(config, precision or "32-true", device))
    if not isinstance(model, nn.Module):
        along = config.zero_optimization.model_copy(update={"shard_along": "element"})
        config = config.model_copy(update={"zero_optimization": along})
        sizes = model if isinstance(model, Sizes) else Sizes(int(model))
        limit = min(config.zero_optimization.reduce_bucket_size, config.zero_optimization.allgather_bucket_size)
        model = skeleton(sizes, limit)
        policy = replace(policy, keep_fp32=())  # the names of modules are unknown
    states, fused = states_of(optimizer)
    setup = replace(
        Setup.imagined(config, world, per_node, device),
        states=states,
        fused=fused and config.fused_step,
        accumulates=accumulate_grad_batches > 1,
        saves=saves,
    )
    return forecast(plan_engine(model, config, policy, world), config, policy, setup)


class _Layer(nn.Module):
    """A unit of ``numel`` parameters, in pieces of at most ``limit``."""

    def __init__(self, numel: int, limit: int) -> None:
        super().__init__()
        for number, lo in enumerate(range(0, numel, limit)):
            shape = (min(limit, numel - lo), 1)  # 2D: vectors would be taken for norms, which stay fp32
            self.register_parameter(f"weight_{number}", Parameter(torch.empty(shape, device="meta")))

    def forward(self) -> None:
        """A module with a forward of its own can be a unit."""


def skeleton(sizes: Sizes, limit: int) -> nn.Module:
    """A module on the meta device with these sizes; ``limit`` is that of a bucket, in elements."""
    largest = sizes.largest or -(-sizes.total // _USUAL_UNITS)
    size = max(largest, -(-sizes.total // _MOST_UNITS))
    return nn.ModuleList(_Layer(min(size, sizes.total - lo), limit) for lo in range(0, sizes.total, size))


def states_of(optimizer: str | float | Optimizer) -> tuple[float, bool]:
    """The number of element-wise states of an optimizer (mean of its groups), and whether the native kernel steps it.

    Raises:
        ValueError: the optimizer is unknown.
    """
    if isinstance(optimizer, (int, float)):
        if optimizer < 0:
            raise ValueError(f"optimizer={optimizer}: bytes of state per parameter are not negative.")
        return optimizer / torch.float32.itemsize, False
    if isinstance(optimizer, str):
        name = optimizer.lower()
        known: Any = _class_named("sgd" if name == "momentum" else name)
        try:
            optimizer = known([Parameter(torch.zeros(1, 1))], **({"momentum": 0.9} if name == "momentum" else {}))
        except TypeError as error:
            raise ValueError(f"optimizer={name!r} has no defaults ({error}). Pass an instance.") from error
        assert isinstance(optimizer, Optimizer)
    counts = states_by_group(optimizer)
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    mean = sum(count * size for count, size in zip(counts, sizes, strict=True)) / max(1, sum(sizes))
    return mean if any(sizes) else max(counts, default=0), FusedAdam.fits(optimizer)


def _class_named(name: str) -> type[Optimizer]:
    classes = {n.lower(): c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, Optimizer)}
    del classes["optimizer"]
    if name not in classes:
        raise ValueError(
            f"optimizer={name!r} is not one of {', '.join(sorted([*classes, 'momentum']))}. Pass the bytes of its "
            "states per parameter as a number."
        )
    return classes[name]
