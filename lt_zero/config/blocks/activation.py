"""The ``activation_checkpointing`` block: which modules are recomputed, and where their inputs are stored."""

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

    A checkpointed module saves only its inputs, and backward runs its forward again.
    """

    mode: Literal["none", "full", "selective"] = Field(
        "none",
        description="what to recompute: nothing, everything, or everything but matrix products and attention; the "
        "other keys of the block need full or selective",
    )
    every: PositiveElements = Field(1, description="checkpoint every n-th module, starting with the first")
    modules: Names = Field(
        (),
        description="class names, bare or dotted, of the modules to checkpoint; empty: the repeated blocks of the "
        "model",
    )
    cpu_checkpointing: bool = Field(
        False, description="offload saved inputs to host memory between forward and backward"
    )
    nvme_path: Path | None = Field(
        None, description="offload saved inputs to files in this folder, on a fast local disk"
    )
    partition_activations: bool = Field(
        False, description="false: there is no tensor- or sequence-parallel group to split saved inputs over"
    )
    contiguous_memory_optimization: bool = Field(False, description="keep saved inputs in one preallocated buffer")
    number_checkpoints: PositiveElements | None = Field(
        None,
        description="number of saved inputs that fit into the preallocated buffer; null: one per checkpointed module",
    )
    synchronize_checkpoint_boundary: bool = Field(
        False, description="synchronize the device before and after each checkpointed module"
    )
    profile: bool = Field(False, description="print the time of checkpointed modules in forward and backward")


def check_activations(config: ZeroConfig) -> Iterator[Problem]:
    """Find keys about recomputation that contradict each other."""
    block, name = config.activation_checkpointing, "activation_checkpointing"
    if block.cpu_checkpointing and block.nvme_path is not None:
        yield Problem(
            f"{name}.nvme_path",
            f"{name}.nvme_path={str(block.nvme_path)!r} and {name}.cpu_checkpointing=true are two places for saved "
            "inputs. Remove one of them.",
        )
