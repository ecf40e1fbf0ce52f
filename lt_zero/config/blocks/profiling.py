"""The blocks ``flops_profiler`` and ``comms_logger``: operations of one step, and cost of collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from lt_zero.common.errors import Problem
from lt_zero.config.fields import Block, Elements, Names, PositiveElements, Real, Whole

if TYPE_CHECKING:
    from lt_zero.config.schema import ZeroConfig

# Operations of comm/communicator.py, by their names in torch.distributed and DeepSpeed.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "all_gather": ("all_gather_into_tensor", "all_gather_single", "all_gather_base"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_base"),
    "all_reduce": (),
    "broadcast": (),
    "barrier": (),
    "all_gather_object": (),
    "broadcast_object_list": (),
}


def operation_of(name: str) -> str | None:
    """The operation with this name; None if unknown.

    >>> operation_of("all-gather"), operation_of("all_gather_into_tensor"), operation_of("send")
    ('all_gather', 'all_gather', None)
    """
    name = name.strip().lower().replace("-", "_")
    return next((known for known, others in OPERATIONS.items() if name in (known, *others)), None)


def _file(value: Any) -> Any:
    """An empty name means stdout, as in DeepSpeed."""
    return value or None


class FlopsProfiler(Block):
    """The ``flops_profiler`` block: a table of one micro-batch, counted by torch's ``FlopCounterMode``."""

    enabled: bool = Field(False, description="count the floating-point operations of one micro-batch per module")
    profile_step: Elements = Field(
        1, description="count the first micro-batch after this many optimizer steps; never the first one of a fit"
    )
    module_depth: Annotated[Whole, Field(ge=-1)] = Field(
        -1, description="levels of modules below the root in both tables; -1: all (DeepSpeed: in the aggregate only)"
    )
    top_modules: PositiveElements = Field(1, description="number of module classes per level in the aggregate")
    detailed: bool = Field(True, description="false: print the aggregate only, without a row per module")
    output_file: Annotated[str, BeforeValidator(_file)] | None = Field(
        None, description="text file that rank 0 writes; null: stdout"
    )
    recompute_fwd_factor: Real = Field(
        0.0, ge=0, description="fraction of forward assumed to be recomputed in backward, if no recomputation was seen"
    )


class CommsLogger(Block):
    """The ``comms_logger`` block: time and volume of the engine's collectives."""

    enabled: bool = Field(
        False,
        description="record collectives and print a table at the end of fit (DeepSpeed: true if the block has any key)",
    )
    verbose: bool = Field(False, description="rank 0 prints each collective when it completes; synchronizes the GPU")
    prof_all: bool = Field(True, description="record all operations; false: only those in prof_ops")
    debug: bool = Field(False, description="break down by unit, bucket or purpose")
    prof_ops: Names = Field((), description="operations to record if prof_all is false: " + ", ".join(OPERATIONS))

    @property
    def operations(self) -> frozenset[str]:
        """Those that are recorded."""
        if self.prof_all:
            return frozenset(OPERATIONS)
        return frozenset(known for name in self.prof_ops if (known := operation_of(name)) is not None)


def check_profiling(config: ZeroConfig) -> Iterator[Problem]:
    """Names of operations."""
    unknown = [name for name in config.comms_logger.prof_ops if operation_of(name) is None]
    if unknown:
        yield Problem(
            "comms_logger.prof_ops",
            f"comms_logger.prof_ops has {unknown[0]!r}, which is not a collective of lt_zero. Choose from "
            f"{', '.join(OPERATIONS)}.",
        )
