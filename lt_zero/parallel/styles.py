"""Styles of tensor parallelism: torch's, and those that torch has not, by the names that plans have for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lt_zero.common.compat.of_distributed_tensors import await_collective
from lt_zero.parallel.local import mark_partial


def _await_output(module: nn.Module, args: Any, output: Any) -> None:
    """Wait for the output of a module, which its caller would do at once.

    torch keeps a collective of DTensor, with its process group, until it is waited for. An error after the module (in a
    hook, or in the caller) would drop the output, and the group's connections would stay for ever.
    """
    await_collective(output)


class _Columns(ColwiseParallel):
    """Torch's style; the output is there when the module returns."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made = super()._apply(module, device_mesh)
        made.register_forward_hook(_await_output)
        return made


class _Rows(RowwiseParallel):
    """Torch's style; the output is there when the module returns."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made = super()._apply(module, device_mesh)
        made.register_forward_hook(_await_output)
        return made


class PartialGradient(ParallelStyle):
    """A module whose own parameters are whole on each rank, and used on the rank's part of activations only.

    Norms of single heads are such (``q_norm``, ``k_norm`` of Qwen3), where each rank has some of the heads: a rank's
    gradient is then a part of a sum, and nothing in the tensors says so.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"PartialGradient: {name!r} is a DTensor, whose gradient knows what it is. Leave it out."
                )
            mark_partial(parameter, device_mesh.size())
        return module


class FusedColumns(ParallelStyle):
    """A linear layer whose output is several outputs in a row; each rank gets its part of each output.

    The weight is cut in one piece, as in checkpoints, so that the parts are not where they are needed: the output is
    gathered, and each rank takes its parts. In backward their gradients are summed and scattered.

    Args:
        sizes: of the outputs.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(sizes)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gathered = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        parallelize_module(module, device_mesh, gathered)
        sizes, rank, ranks = list(self.sizes), device_mesh.get_local_rank(), device_mesh.size()

        def own_parts(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
            outputs = output.to_local(grad_placements=[Partial()]).split(sizes, -1)
            return torch.cat([part.chunk(ranks, -1)[rank] for part in outputs], -1)

        module.register_forward_hook(own_parts)
        return module


class SequenceNorm(ParallelStyle):
    """A module that works on each position by itself: each rank has all of the sequence and computes a part of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut_sequence(module: nn.Module, inputs: Any) -> Any:
            first, *rest = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, device_mesh, [Replicate()], run_check=False)
            return (first.redistribute(placements=[Shard(1)]), *rest)

        # The hook must run before torch's, which takes a plain tensor for a part of the sequence.
        module.register_forward_pre_hook(cut_sequence)
        parallelize_module(module, device_mesh, SequenceParallel(use_local_output=False))
        module.register_forward_hook(_whole_sequence)
        return module


def _whole_sequence(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
    return output.redistribute(placements=[Replicate()]).to_local()


# What is done with a module, in words of the table.
COLUMN, GATHERED, FUSED = "column", "column, gathered", "column, fused"
ROW, SPLIT = "row", "row, input whole"
VOCABULARY, EMBEDDING = "embedding, vocabulary", "embedding, columns"
SEQUENCE, PARTIAL, WHOLE = "part of the sequence", "whole, partial gradient", "whole"

LINEAR, EMBEDDINGS = (COLUMN, GATHERED, FUSED, ROW, SPLIT), (VOCABULARY, EMBEDDING)
LOCAL_OUTPUT = (COLUMN, FUSED)  # each rank goes on with its part

# Names in plans of transformers.
OF_TRANSFORMERS = {
    "colwise": COLUMN,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise": ROW,
    "rowwise_split_input": SPLIT,
    "rowwise_rep": SPLIT,
    "embedding_rowwise": VOCABULARY,
    "embedding_colwise": EMBEDDING,
    "sequence_parallel": SEQUENCE,
    "replicated_with_grad_allreduce": PARTIAL,
    "replicate": WHOLE,
}


def style_of(kind: str, sizes: Sequence[int] = ()) -> ParallelStyle | None:
    """The style that does ``kind``; None if there is nothing to do. ``sizes``: of fused outputs."""
    if kind == COLUMN:
        return ColwiseParallel()
    if kind in (GATHERED, EMBEDDING):
        return _Columns(output_layouts=Replicate())
    if kind == FUSED:
        return FusedColumns(sizes)
    if kind == ROW:
        return _Rows()
    if kind in (SPLIT, VOCABULARY):
        return _Rows(input_layouts=Replicate())
    return {SEQUENCE: SequenceNorm, PARTIAL: PartialGradient}.get(kind, lambda: None)()


def cut_axis(kind: str, parameter: str = "weight") -> int | None:
    """The axis of the weight, or of the bias, that is cut; None if it is whole."""
    if parameter == "bias" and kind in (ROW, SPLIT):
        return None
    if kind in (COLUMN, GATHERED, FUSED, VOCABULARY):
        return 0
    return 1 if kind in (ROW, SPLIT, EMBEDDING) else None
