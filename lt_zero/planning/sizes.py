"""Models that are given by their size, as modules to plan; and the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Parameter

from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.numbers import count_of
from lt_zero.config import ZeroConfig
from lt_zero.config.pipelines import divide, weights_of
from lt_zero.core.ask import plan_division
from lt_zero.core.division import PlannedParts
from lt_zero.features import features_of

_MOST_UNITS = 1024  # units of a model given by size; more would not change the result
_MOST_PIECES = 50_000  # buckets of a model given by size; each is planned
_WHOLE, _EXPERT, _ADAPTER = "weight", "expert", "adapter"  # names of parameters of a ``skeleton``
_USUAL_UNITS = 32  # default number of layers of a model given by size


@dataclass(frozen=True)
class Sizes:
    """A model that is given by its size only. All of it trains, unless there are adapters.

    Attributes:
        total: parameters: a number, or text such as "7e9", "7B" or "350M".
        largest: parameters of the largest unit (a transformer block, an embedding); default: a 32nd of all.
        layers: parameters of each unit, in order; default: all are as large as the largest.
        experts: parameters of experts, of the total.
        expert_layers: those of each unit, in order; default: each unit has the same share of them.
        adapters: parameters beside the total, of which each unit has its share: they train, and the total is frozen.
    """

    total: int
    largest: int | None = None
    layers: tuple[int, ...] = ()
    experts: int = 0
    expert_layers: tuple[int, ...] = ()
    adapters: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", count_of(self.total, "Sizes(total=...)"))
        if self.largest is not None:
            object.__setattr__(self, "largest", count_of(self.largest, "Sizes(largest=...)"))
        if (self.largest or 1) > self.total:
            raise ValueError(
                f"Sizes(total={self.total}, largest={self.largest}): both are numbers of parameters, at least 1, and "
                "the largest unit is a part of the total."
            )
        if self.layers and sum(self.layers) != self.total:
            raise ValueError(f"Sizes(total={self.total}): its layers have {sum(self.layers)} parameters.")
        if self.experts:
            object.__setattr__(self, "experts", count_of(self.experts, "Sizes(experts=...)"))
        if self.experts > self.total:
            raise ValueError(f"Sizes(total={self.total}, experts={self.experts}): experts are a part of the total.")
        if self.adapters:
            object.__setattr__(self, "adapters", count_of(self.adapters, "Sizes(adapters=...)"))

    def units(self) -> tuple[int, ...]:
        """The parameters of each unit."""
        if self.layers:
            return self.layers
        largest = self.largest or -(-self.total // _USUAL_UNITS)
        size = max(largest, -(-self.total // _MOST_UNITS))
        return tuple(min(size, self.total - lo) for lo in range(0, self.total, size))

    def expert_units(self) -> tuple[int, ...]:
        """The parameters of experts of each unit."""
        return self.expert_layers or tuple(unit * self.experts // self.total for unit in self.units())

    def adapter_units(self) -> tuple[int, ...]:
        """The parameters of adapters of each unit."""
        return tuple(unit * self.adapters // self.total for unit in self.units())


@dataclass(frozen=True)
class Stage:
    """The part of a model on one rank of a pipeline.

    Attributes:
        model: its layers, as a module or by their sizes.
        rank: of the pipeline.
        layers: how many it has.
        parameters: of them.
        elsewhere: parameters of the model that other ranks have.
    """

    model: nn.Module | Sizes
    rank: int
    layers: int
    parameters: int
    elsewhere: int


Model = nn.Module | Sizes | Stage | float | str


def stages_of_sizes(sizes: Sizes, config: ZeroConfig) -> list[Stage]:
    """The stages of a model for the configured pipeline. Its units are its layers.

    Raises:
        ConfigError: there are more stages than layers.
    """
    units, experts, block = sizes.units(), sizes.expert_units(), config.pipeline
    method = "uniform" if block.partition_method == "uniform" else "parameters"  # there are no classes, and no times
    parts = divide(weights_of(method, [""] * len(units), units), block.ranks * block.chunks)
    found = []
    for rank in range(block.ranks):
        numbers = [number for part in parts[rank :: block.ranks] for number in part]
        own, of_experts = (tuple(of_units[number] for number in numbers) for of_units in (units, experts))
        adapters = sizes.adapters * sum(own) // sizes.total
        made = Sizes(sum(own), None, own, sum(of_experts), of_experts, adapters)
        here = made.total + adapters
        found.append(Stage(made, rank, len(own), here, sizes.total + sizes.adapters - here))
    return found


def stages_of_module(build: Callable[[], nn.Module], config: ZeroConfig, world: int) -> list[Stage]:
    """The stages of the module that ``build`` returns, for the configured pipeline in a run of ``world`` ranks.

    Raises:
        ConfigError: it has no pipeline, or one for other ranks; or there are more stages than layers.
    """
    planned = plan_division(features_of(config), world)
    made = list[tuple[nn.Module, int, dict[str, int]]]()
    for rank in range(config.pipeline.ranks):
        with planned.building(rank):
            module = build()
        layers = planned.parts(module).layers
        made.append((module, layers, {name: p.numel() for name, p in module.named_parameters()}))
    total = sum({name: numel for _, _, numels in made for name, numel in numels.items()}.values())
    return [
        Stage(module, rank, layers, sum(numels.values()), total - sum(numels.values()))
        for rank, (module, layers, numels) in enumerate(made)
    ]


def fullest(stages: list[Stage]) -> Stage:
    """The stage with most parameters."""
    return max(stages, key=lambda stage: stage.parameters)


class _Layer(nn.Module):
    """A unit of ``numel`` parameters, some of experts, and adapters beside them.

    They are in pieces of at most the limit of their kind. Beside adapters all others are frozen, in 16 bits as most
    models are loaded: a run keeps frozen weights that were loaded in fp32 as they are.
    """

    def __init__(self, numel: int, experts: int, adapters: int, limits: tuple[int, int]) -> None:
        super().__init__()
        rows = ((_WHOLE, numel - experts, limits[0]), (_EXPERT, experts, limits[1]), (_ADAPTER, adapters, limits[0]))
        for kind, count, limit in rows:
            frozen = adapters > 0 and kind != _ADAPTER
            for number, lo in enumerate(range(0, count, limit)):
                # Two dimensions: vectors would be taken for norms, which stay in fp32.
                shape, dtype = (min(limit, count - lo), 1), torch.bfloat16 if frozen else torch.float32
                made = Parameter(torch.empty(shape, device="meta", dtype=dtype), requires_grad=not frozen)
                self.register_parameter(f"{kind}_{number}", made)

    def forward(self) -> None:
        """A module with a forward of its own can be a unit."""


def skeleton(sizes: Sizes, limit: int, tensor: int = 1, expert: int = 1) -> nn.Module:
    """A module on the meta device with these sizes.

    ``limit`` is that of a bucket, in elements, of which a tensor or expert rank has a part.
    """
    if sizes.total / limit > _MOST_PIECES:
        raise ValueError(
            f"{sizes.total:.3g} parameters are {sizes.total / limit:.3g} buckets of {limit:,} elements, and at most "
            f"{_MOST_PIECES:,} are planned. Give the number of parameters that was meant, or raise "
            "zero_optimization.reduce_bucket_size and allgather_bucket_size."
        )
    units = zip(sizes.units(), sizes.expert_units(), sizes.adapter_units(), strict=True)
    return nn.ModuleList(_Layer(*counts, (limit * tensor, limit * expert)) for counts in units)


def parts_of_all(model: nn.Module, tensor: int, expert: int) -> PlannedParts:
    """This rank's part of what tensor ranks cut of a ``skeleton``, and of experts; all is taken to be cut."""
    tensors = list[ParamSpec]()
    stacks = list[ParamSpec]()
    for name, parameter in model.named_parameters():
        of_experts = name.rpartition(".")[2].startswith(_EXPERT)
        rows, columns = parameter.shape
        ranks = expert if of_experts else tensor
        if ranks > 1:
            spec = ParamSpec(name, (rows, columns), Box((0, 0), (-(-rows // ranks), columns)))
            (stacks if of_experts else tensors).append(spec)
    return PlannedParts(tensors, stacks)
