"""The blocks about offload: ``offload_optimizer``, ``offload_param``, ``aio``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from lt_zero.common.errors import Problem
from lt_zero.config.fields import Block, Elements, PositiveElements, Real

if TYPE_CHECKING:
    from lt_zero.config.schema import ZeroConfig

Device = Literal["none", "cpu", "nvme"]


class _Offload(Block):
    device: Device = Field("none", description="where to offload to")
    nvme_path: Path | None = Field(None, description="folder for the files, on a fast local disk")
    pin_memory: bool = Field(
        True, description="use pinned host memory if there is a GPU; false in either offload block applies to both"
    )

    @field_validator("nvme_path", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        if isinstance(value, (str, Path)) and (not str(value).strip() or "\0" in str(value)):
            raise ValueError("it is empty or not a path; name a folder on a local NVMe disk, or remove the key")
        try:
            return Path(value).expanduser() if isinstance(value, (str, Path)) else value
        except RuntimeError as error:  # ~name of an unknown user
            raise ValueError(f"{error} (write the whole path)") from None


class OffloadOptimizer(_Offload):
    """The ``zero_optimization.offload_optimizer`` block."""

    buffer_count: PositiveElements = Field(4, description="maximum buckets in memory at a time, with nvme")
    pipeline_read: bool = Field(
        True, description="read the next bucket during the step of the current one (DeepSpeed: false)"
    )
    pipeline_write: bool = Field(
        True, description="write the previous bucket during the step of the current one (DeepSpeed: false)"
    )
    fast_init: bool = Field(
        False, description="true: write weights to files as they are initialized (DeepSpeed: false)"
    )
    ratio: Real = Field(1.0, ge=0, le=1, description="fraction of the elements to offload")
    overlap_step: bool | Literal["auto"] = Field(
        "auto",
        description="overlap the step with backward (auto), also with the next forward (true), or not at all (false)",
    )


class OffloadParam(_Offload):
    """The ``zero_optimization.offload_param`` block."""

    device: Device = Field(
        "none",
        description="where to offload to; trained parameters need offload_optimizer too, as they are gathered from "
        "the master weights",
    )
    buffer_count: PositiveElements = Field(5, description="maximum buckets to read ahead, with nvme")
    buffer_size: PositiveElements = Field(100_000_000, description="maximum elements to read ahead, with nvme")
    max_in_cpu: Elements = Field(0, description="elements to keep in host memory even with nvme (DeepSpeed: 1e9)")


class Aio(Block):
    """The ``aio`` block: how files are read and written."""

    block_size: PositiveElements = Field(
        4 << 20, description="bytes per request, a multiple of 4096 (DeepSpeed: 1048576)"
    )
    queue_depth: PositiveElements = Field(8, description="maximum requests in flight per tensor")
    intra_op_parallelism: PositiveElements = Field(4, description="number of I/O threads (DeepSpeed: 1)")
    single_submit: bool = Field(False, description="true: one request in flight per tensor, like queue_depth=1")
    overlap_events: bool = Field(True, description="false: one request in flight per tensor, like queue_depth=1")
    checksum: bool = Field(False, description="verify a checksum of the data on every read")

    @field_validator("block_size")
    @classmethod
    def _whole_blocks(cls, value: int) -> int:
        if value % 4096:
            raise ValueError(f"{value} is not a multiple of 4096, as direct I/O requires")
        return value

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return 1 if self.single_submit or not self.overlap_events else self.queue_depth


def _is_device(path: Path) -> bool:
    return path.parts[:2] == ("/", "dev") and path.parts[2:3] != ("shm",)


def check_offload(config: ZeroConfig) -> Iterator[Problem]:
    """Find keys about offload that contradict each other."""
    zero = config.zero_optimization
    for name, block in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.param_offload)):
        if block.device == "nvme" and block.nvme_path is None:
            yield Problem(
                f"zero_optimization.{name}.nvme_path",
                f"zero_optimization.{name}.device='nvme' needs zero_optimization.{name}.nvme_path: a folder on a local "
                "NVMe disk.",
            )
        if block.device == "nvme" and block.nvme_path is not None and _is_device(block.nvme_path):
            yield Problem(
                f"zero_optimization.{name}.nvme_path",
                f"zero_optimization.{name}.nvme_path={str(block.nvme_path)!r} is a raw device. Make a file system on "
                "it and name a folder there.",
            )
    if zero.offload_optimizer.device == "none" and zero.offload_optimizer.overlap_step is True:
        yield Problem(
            "zero_optimization.offload_optimizer.overlap_step",
            "zero_optimization.offload_optimizer.overlap_step=true needs offload_optimizer.device='cpu' or 'nvme': "
            "only an offloaded step can overlap with compute.",
        )
