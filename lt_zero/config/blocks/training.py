"""Blocks about training itself: optimizer, scheduler, leaf modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from lt_zero.common.errors import Problem
from lt_zero.config.fields import Block, Names, ParamGroups, Params

if TYPE_CHECKING:
    from lt_zero.config.schema import ZeroConfig


class OptimizerBlock(Block):
    """The ``optimizer`` block: the optimizer to build if the module has no ``configure_optimizers``."""

    type: str = Field(
        min_length=1, description="Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, a torch.optim class or a dotted path"
    )
    params: Params = Field({}, validate_default=True, description="arguments of its constructor")
    param_groups: ParamGroups = Field(
        (),
        description="parameter groups; a parameter joins the first that matches. Each has match: shell patterns of "
        "full parameter names joined by |, arguments as in params (also auto), a name, and optional: true if it may "
        "match nothing. All other parameters form the last group",
    )


class SchedulerBlock(Block):
    """The ``scheduler`` block: stepped after each optimizer step, ``ReduceLROnPlateau`` after each epoch."""

    type: str = Field(
        min_length=1,
        description="LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR or torch.optim.lr_scheduler's",
    )
    params: Params = Field(
        {},
        validate_default=True,
        description="arguments of its constructor besides the optimizer; ReduceLROnPlateau, which steps at the end "
        "of each epoch, also needs monitor, a logged metric",
    )


class LeafModule(Block):
    """Modules to gather as one unit although the model does not repeat them."""

    classes: Names = Field(
        (), description="class names, bare or dotted, of unit modules (DeepSpeed: transformers' MoE blocks)"
    )
    names: Names = Field((), description="full names of unit modules")
    name_suffixes: Names = Field((), description="suffixes of names of unit modules")


def check_training(config: ZeroConfig) -> Iterator[Problem]:
    """Check the batch arithmetic that does not depend on the number of ranks."""
    total = config.train_batch_size
    factors = {
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }
    given = {name: value for name, value in factors.items() if value is not None}
    if total is not None and total % math.prod(given.values()):
        yield Problem(
            "train_batch_size",
            f"train_batch_size={total} is not a multiple of {' * '.join(f'{n}={v}' for n, v in given.items())}, so no "
            "number of ranks fits: it is train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks. Remove "
            "one of them.",
        )


_WHOLE = ("muon", "adafactor")  # configurable optimizers that need whole matrices


def check_whole(config: ZeroConfig) -> Iterator[Problem]:
    """Check that an optimizer that needs whole matrices gets them."""
    block, zero = config.optimizer, config.zero_optimization
    name = block.type if block is not None else ""
    if zero.stage > 0 and zero.shard_along == "element" and name.rpartition(".")[2].lower() in _WHOLE:
        yield Problem(
            "zero_optimization.shard_along",
            f"optimizer.type={name!r} computes its update from whole matrices, and at stage {zero.stage} with "
            "zero_optimization.shard_along='element' a rank holds only fragments of them. Set "
            "zero_optimization.shard_along=parameter (optimizer=muon does both).",
        )


def check_leaves(config: ZeroConfig) -> Iterator[Problem]:
    """Check that no class is both sharded and exempt from sharding."""
    zero = config.zero_optimization
    both = sorted(set(zero.zero_allowed_param_types) & set(zero.zero_force_param_types))
    if both:
        yield Problem(
            "zero_optimization.zero_force_param_types",
            f"{both[0]!r} is in zero_optimization.zero_allowed_param_types (sharded) and in "
            "zero_optimization.zero_force_param_types (never sharded). Remove it from one.",
        )
