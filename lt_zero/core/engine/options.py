"""Options of an engine. ``config/options.py`` makes them from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.nn import Parameter

from lt_zero.common.codec import RestingCodec
from lt_zero.common.moment_form import MomentForm
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.layout import ALIGN
from lt_zero.core.engine.weight_rounding import WeightRounding
from lt_zero.core.stores.io_options import IoOptions

if TYPE_CHECKING:
    from lt_zero.common.norms import VectorNorm

Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class LeafModules:
    """Modules that are units although the model does not repeat them.

    Attributes:
        classes: names of their classes, bare or dotted.
        names: full names.
        name_suffixes: suffixes of names.
    """

    classes: tuple[str, ...]
    names: tuple[str, ...]
    name_suffixes: tuple[str, ...]


@dataclass(frozen=True)
class StatesOffload:
    """Places of master weights, optimizer states and accumulators.

    Attributes:
        device: "none": on the device that computes.
        nvme_path: folder for files.
        ratio: share of the elements that is offloaded.
        buffer_count: most buckets in memory at a time, with files.
        pipeline_read: read the next bucket during the step of the current one.
        pipeline_write: write the previous bucket during the step of the current one.
        overlap_step: step beside backward ("auto"), also beside the next forward (True), or after backward (False).
    """

    device: Device
    nvme_path: Path | None
    ratio: float
    buffer_count: int
    pipeline_read: bool
    pipeline_write: bool
    overlap_step: bool | Literal["auto"]


@dataclass(frozen=True)
class ParamsOffload:
    """Places of the weights that gathers read.

    Attributes:
        device: "none": on the device that computes.
        nvme_path: folder for files.
        buffer_count: most buckets to read ahead, with files.
        buffer_size: elements to read ahead, with files.
        max_in_cpu: elements that are kept in host memory even with files.
    """

    device: Device
    nvme_path: Path | None
    buffer_count: int
    buffer_size: int
    max_in_cpu: int


@dataclass(frozen=True)
class EngineOptions:
    """All by which an engine is planned and built. Sizes are in elements.

    Attributes:
        dtypes: of weights, gradients, buffers and messages.
        stage: 0: nothing is sharded, 1: optimizer states are, 2: gradients, too, 3: parameters, too.
        shard_along: where shards begin: at any element, or at boundaries of parameters.
        optimizer_is_elementwise: no trial has to find out whether an optimizer's update is.
        fused_step: step supported optimizers with native kernels.
        overlap_comm: reduce during backward, gather updated weights during forward.
        broadcast_buffers: send rank 0's buffers before each training forward.
        reduce_bucket_size: most elements of a reduction.
        allgather_bucket_size: most elements of a gather of updated weights.
        sub_group_size: most elements of a bucket whose states are offloaded.
        param_persistence_threshold: smaller parameters are not sharded.
        model_persistence_threshold: most elements that are not sharded for that reason; None: no limit.
        allowed_param_types: classes of modules that are sharded; (): all are.
        force_param_types: classes of modules that are not sharded.
        leaf_modules: further units.
        max_live_parameters: most gathered elements; beyond it nothing is kept gathered or prefetched.
        max_reuse_distance: a unit stays gathered if it is used again within so many elements.
        prefetch_bucket_size: elements to gather ahead of their use.
        offload_states: of states.
        offload_params: of parameters; off below stage 3.
        pin_memory: pin host memory if there is an accelerator.
        files: how files are read and written.
        predivides: gradients are divided by a factor before a reduction.
        moments: form in which element-wise states of the optimizer are kept; None: as the step computes them.
        rounding: makes the rounding of a step's weights out of a seed, the same on all ranks; None: to the nearest.
        resting: codec in which sharded weights that are not trained rest; None: they rest as they are.
        sent_dense: returns the parameters of a module whose gradients are never sent compressed; None: all are sent as
            they are.
        align: elements: parameters begin at multiples of so many in flat tensors, a power of 2 of at least ``ALIGN``
            (layout.py).
        adds_one_by_one: each rank's gradients are multiplied by a factor and added to the accumulator, in its dtype, by
            themselves, also those of a single rank. Reductions receive as much as they send.
        norms: makes a norm of an order, by which sums of powers of gradients are added up over ranks and buckets;
            None: sums in any order, as torch has them.
    """

    dtypes: DtypePolicy
    stage: int
    shard_along: Literal["element", "parameter"]
    optimizer_is_elementwise: bool
    fused_step: bool
    overlap_comm: bool
    broadcast_buffers: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    sub_group_size: int
    param_persistence_threshold: int
    model_persistence_threshold: int | None
    allowed_param_types: tuple[str, ...]
    force_param_types: tuple[str, ...]
    leaf_modules: LeafModules
    max_live_parameters: int
    max_reuse_distance: int
    prefetch_bucket_size: int
    offload_states: StatesOffload
    offload_params: ParamsOffload
    pin_memory: bool
    files: IoOptions
    predivides: bool
    moments: MomentForm | None
    rounding: Callable[[int], WeightRounding] | None = None
    resting: RestingCodec | None = None
    sent_dense: Callable[[nn.Module], set[Parameter]] | None = None
    align: int = ALIGN
    adds_one_by_one: bool = False
    norms: Callable[[float], VectorNorm] | None = None

    def norm_of(self, order: float) -> VectorNorm:
        """The norm of an order, by which sums of powers of gradients are added up."""
        if self.norms is not None:
            return self.norms(order)
        from lt_zero.common.norms import VectorNorm

        return VectorNorm(order)
