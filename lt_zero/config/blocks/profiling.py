"""The blocks ``flops_profiler`` and ``comms_logger``: what one step computes, and what all collectives cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from lt_zero.common.errors import Problem
from lt_zero.config.fields import Block, Elements, Names, PositiveElements, Real, Whole

if TYPE_CHECKING:
    from lt_zero.config.schema import ZeroConfig

# Operations of comm/communicator.py, by the names that they have in torch.distributed and in DeepSpeed.
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
    """The operation that somebody means; None if there is no such.

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
        1, description="optimizer steps before the one whose first micro-batch is counted; a fit's very first never is"
    )
    module_depth: Annotated[Whole, Field(ge=-1)] = Field(
        -1, description="levels of modules below the root in both tables; -1: all (DeepSpeed: in the aggregate only)"
    )
    top_modules: PositiveElements = Field(1, description="classes of modules that the aggregate names per level")
    detailed: bool = Field(True, description="false: only the aggregate, without a row for each module")
    output_file: Annotated[str, BeforeValidator(_file)] | None = Field(
        None, description="text file that rank 0 writes; null: stdout"
    )
    recompute_fwd_factor: Real = Field(
        0.0, ge=0, description="part of the forward taken as recomputed in backward, if no recomputation was seen"
    )


class CommsLogger(Block):
    """The ``comms_logger`` block: what the collectives of the engine cost."""

    enabled: bool = Field(
        False, description="record each collective and show a table when a fit ends (DeepSpeed: true beside any key)"
    )
    verbose: bool = Field(False, description="rank 0 prints each collective when it is over; a GPU is waited for")
    prof_all: bool = Field(True, description="all operations; false: those of prof_ops")
    debug: bool = Field(False, description="tell apart what a collective is for: unit, bucket or purpose")
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
            f"comms_logger.prof_ops has {unknown[0]!r}, which is no collective of lt_zero: choose from "
            f"{', '.join(OPERATIONS)}.",
        )
