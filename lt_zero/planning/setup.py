"""Facts of a run that a forecast needs beside the configuration: ranks, device, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from lt_zero.common import accelerator
from lt_zero.config.blocks import ZeroOptimization
from lt_zero.core.comm.process_groups import Communicators
from lt_zero.core.comm.send_sizes import BACKEND, GLOO, WINDOWS, SendSizes
from lt_zero.core.comm.transport import Mesh
from lt_zero.core.engine.partition import GroupFacts
from lt_zero.core.step.fused_step import FusedStep
from lt_zero.core.step.supported_optimizers import states_by_group

MANY_SHARDS = 64  # from so many on rings may take longer than the computing that hides them


@dataclass(frozen=True)
class PlannedGroup:
    """A group of ranks without processes; the fields are those of ``ShardGroup``."""

    size: int
    mesh: Mesh
    alone: bool
    sends: SendSizes
    sums_wide: bool
    gathers_in_background: bool
    zero: ZeroOptimization = field(compare=False, repr=False)
    nodes: Sequence[Sequence[int]] = field(compare=False, repr=False)
    of_experts: bool = False  # the ranks have the same experts, and other groups have others

    @property
    def secondary_shards(self) -> int:
        return self.zero.secondary_shards(self.size)

    @classmethod
    def assumed(
        cls,
        size: int,
        world: int,
        zero: ZeroOptimization,
        device: str,
        in_node: bool,
        neighbours: int,
        of_experts: bool = False,
    ) -> PlannedGroup:
        """``size`` of ``world`` ranks: NCCL on GPUs; on CPUs shared memory within a node, else gloo.

        Args:
            in_node: all of the world are on one node.
            neighbours: ranks of the group that are on a node.
            of_experts: of ranks with the same experts.
        """
        alone, on_cpu = world == 1, device == "cpu"
        shares = on_cpu and in_node and not alone
        sends = BACKEND if alone or not on_cpu else WINDOWS if shares else GLOO
        return cls(
            size,
            Mesh(size, 0, zero.shards(size)),
            alone,
            sends,
            sums_wide=alone or shares or (on_cpu and zero.reduce_scatter),
            gathers_in_background=not alone and not shares,
            zero=zero,
            nodes=[range(first, min(first + neighbours, size)) for first in range(0, size, neighbours)],
            of_experts=of_experts,
        )

    @classmethod
    def like(cls, group: GroupFacts, zero: ZeroOptimization) -> PlannedGroup:
        """A running group under another configuration."""
        return cls(
            group.size,
            Mesh(group.size, 0, zero.shards(group.size)),
            group.alone,
            group.sends,
            group.sums_wide,
            group.gathers_in_background,
            zero,
            group.nodes,
        )


def kind_of(device: torch.device) -> str:
    """The kind of ``device`` for forecasts: whether it has memory of its own ("cuda") or is the host ("cpu")."""
    return "cuda" if accelerator.is_accelerator(device) else "cpu"


def states_and_kernel(optimizer: Optimizer) -> tuple[float, str]:
    """The number of element-wise states of an optimizer (mean of its groups), and the kernel that steps it, or ''."""
    counts = states_by_group(optimizer)
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    mean = sum(count * size for count, size in zip(counts, sizes, strict=True)) / max(1, sum(sizes))
    return mean if any(sizes) else max(counts, default=0), FusedStep.operation_of(optimizer)


@dataclass(frozen=True)
class Setup:
    """Facts of a run that a forecast needs beside the configuration."""

    group: GroupFacts  # the ranks of a stage (all, without pipelines), which shard the buckets without another group
    per_node: int  # ranks on one node, which share its host memory and NVMe
    device: str = "cuda"  # "cpu", or "cuda" for every kind of accelerator: see ``kind_of``
    states: float = 2.0  # element-wise states of the optimizer; 2 for Adam
    kernels: frozenset[str] = frozenset({"adam_step"})  # of ``lt_zero.ops``, that step it; none: torch does
    accumulates: bool = False  # several micro-batches per step
    training: bool = True  # there are gradients
    saves: bool = True  # there are checkpoints
    averages: int = 0  # of the weights, kept in fp32 beside the states
    # Of NCCL, on each rank; none: unknown, or made before the memory is looked at.
    communicators: Communicators = field(default_factory=Communicators)
    elsewhere: int = 0  # parameters of the model that other ranks of a pipeline have

    @property
    def fused(self) -> bool:
        """True if kernels step the optimizer, which take any dtype of gradients."""
        return bool(self.kernels)

    @property
    def world(self) -> int:
        """The ranks of a stage: all, without pipelines."""
        return self.group.size
