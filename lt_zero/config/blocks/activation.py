"""The ``activation_checkpointing`` block: what backward computes again, and where what it starts from rests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lt_zero.common.errors import Problem
from lt_zero.config.fields import Block, Names, PositiveElements

if TYPE_CHECKING:
    from lt_zero.config.schema import ZeroConfig


class ActivationCheckpointing(Block):
    """The ``activation_checkpointing`` block (arXiv:1604.06174): activations are recomputed in backward.

    A checkpointed module saves its inputs in place of all that backward needs, and runs its forward again there.
    """

    mode: Literal["none", "full", "selective"] = Field(
        "none",
        description="what is recomputed: nothing, all, or all but outputs of matrix products and attention; the other "
        "keys of the block count with full and selective only",
    )
    every: PositiveElements = Field(1, description="each n-th of the modules is checkpointed, from the first on")
    modules: Names = Field(
        (), description="class names, bare or dotted, of the modules; empty: the repeated blocks of the model"
    )
    cpu_checkpointing: bool = Field(False, description="saved inputs rest in host memory between forward and backward")
    nvme_path: Path | None = Field(None, description="folder of files in which saved inputs rest, on a fast local disk")
    partition_activations: bool = Field(
        False, description="false: there is no tensor- or sequence-parallel group to split saved inputs over"
    )
    contiguous_memory_optimization: bool = Field(
        False, description="saved inputs lie in one block of memory that is allocated once"
    )
    number_checkpoints: PositiveElements | None = Field(
        None,
        description="saved inputs that the block of memory has room for; null: one for each checkpointed module",
    )
    synchronize_checkpoint_boundary: bool = Field(
        False, description="wait for the device before and after each checkpointed module"
    )
    profile: bool = Field(False, description="print how long checkpointed modules take in forward and in backward")


def check_activations(config: ZeroConfig) -> Iterator[Problem]:
    """Keys about recomputation that do not fit together."""
    block, name = config.activation_checkpointing, "activation_checkpointing"
    if block.cpu_checkpointing and block.nvme_path is not None:
        yield Problem(
            f"{name}.nvme_path",
            f"{name}.nvme_path={str(block.nvme_path)!r} and {name}.cpu_checkpointing=true are two places for saved "
            "inputs. Remove one of them.",
        )
