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
    """The ``optimizer`` block: what is built if the module has no ``configure_optimizers``."""

    type: str = Field(
        min_length=1, description="Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, a torch.optim class or a dotted path"
    )
    params: Params = Field({}, validate_default=True, description="arguments of its constructor")
    param_groups: ParamGroups = Field(
        (),
        description="groups with arguments of their own, the first that matches: match, shell patterns of full names "
        "of parameters joined by |, and arguments, which may be auto as in params; also name, and optional: may match "
        "nothing; all other parameters are the last group",
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
        description="arguments of its constructor, beside the optimizer; ReduceLROnPlateau, which steps at the end of "
        "each epoch, also needs monitor, a logged metric",
    )


class LeafModule(Block):
    """Which modules are gathered as one although the model does not repeat them."""

    classes: Names = Field(
        (), description="class names, bare or dotted, whose instances are units (DeepSpeed: transformers' MoE blocks)"
    )
    names: Names = Field((), description="full names of modules that are units")
    name_suffixes: Names = Field((), description="ends of the names of modules that are units")


def check_training(config: ZeroConfig) -> Iterator[Problem]:
    """Batch arithmetic as far as it needs no number of ranks."""
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


_WHOLE = ("muon", "adafactor")  # optimizers that a configuration can name and that need whole matrices


def check_whole(config: ZeroConfig) -> Iterator[Problem]:
    """Some optimizers need whole matrices."""
    block, zero = config.optimizer, config.zero_optimization
    name = block.type if block is not None else ""
    if zero.stage > 0 and zero.shard_along == "element" and name.rpartition(".")[2].lower() in _WHOLE:
        yield Problem(
            "zero_optimization.shard_along",
            f"optimizer.type={name!r} computes its update from whole matrices, and at stage {zero.stage} with "
            "zero_optimization.shard_along='element' a rank holds pieces of them. Set "
            "zero_optimization.shard_along=parameter (optimizer=muon does both).",
        )


def check_leaves(config: ZeroConfig) -> Iterator[Problem]:
    """Parameters are chosen by one rule only."""
    zero = config.zero_optimization
    both = sorted(set(zero.zero_allowed_param_types) & set(zero.zero_force_param_types))
    if both:
        yield Problem(
            "zero_optimization.zero_force_param_types",
            f"{both[0]!r} is in zero_optimization.zero_allowed_param_types (sharded) and in "
            "zero_optimization.zero_force_param_types (never sharded). Remove it from one.",
        )
