"""The blocks that say where states rest between uses: ``offload_optimizer``, ``offload_param``, ``aio``."""

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
    device: Device = Field("none", description="where it rests between uses")
    nvme_path: Path | None = Field(None, description="folder for the files, on a fast local disk")
    pin_memory: bool = Field(
        True, description="page-locked host memory, if there is a GPU; false in one of the offload blocks is for both"
    )

    @field_validator("nvme_path", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        if isinstance(value, (str, Path)) and (not str(value).strip() or "\0" in str(value)):
            raise ValueError("it is empty or no path; name a folder on a local NVMe disk, or leave it out")
        try:
            return Path(value).expanduser() if isinstance(value, (str, Path)) else value
        except RuntimeError as error:  # ~name of nobody
            raise ValueError(f"{error} (write the whole path)") from None


class OffloadOptimizer(_Offload):
    """The ``zero_optimization.offload_optimizer`` block."""

    buffer_count: PositiveElements = Field(4, description="buckets in memory at a time at most, with nvme")
    pipeline_read: bool = Field(True, description="read the next bucket while one is stepped (DeepSpeed: false)")
    pipeline_write: bool = Field(True, description="write the last bucket while one is stepped (DeepSpeed: false)")
    fast_init: bool = Field(False, description="true: weights are written as they are made (DeepSpeed: false)")
    ratio: Real = Field(1.0, ge=0, le=1, description="part of the elements that is offloaded, the rest stays")
    overlap_step: bool | Literal["auto"] = Field(
        "auto", description="step beside backward (auto), beside the next forward too (true), or on its own (false)"
    )


class OffloadParam(_Offload):
    """The ``zero_optimization.offload_param`` block."""

    device: Device = Field(
        "none",
        description="where it rests between uses; what is trained only if offload_optimizer is on, as gathers read the "
        "master weights otherwise",
    )
    buffer_count: PositiveElements = Field(5, description="buckets that are read ahead at most, with nvme")
    buffer_size: PositiveElements = Field(100_000_000, description="elements that are read ahead at most, with nvme")
    max_in_cpu: Elements = Field(0, description="elements that stay in memory in spite of nvme (DeepSpeed: 1e9)")


class Aio(Block):
    """The ``aio`` block: how files are read and written."""

    block_size: PositiveElements = Field(
        4 << 20, description="bytes per request, a multiple of 4096 (DeepSpeed: 1048576)"
    )
    queue_depth: PositiveElements = Field(8, description="requests of one tensor in flight at most")
    intra_op_parallelism: PositiveElements = Field(4, description="threads that read and write (DeepSpeed: 1)")
    single_submit: bool = Field(False, description="true: one request of a tensor in flight, as queue_depth=1")
    overlap_events: bool = Field(True, description="false: one request of a tensor in flight, as queue_depth=1")
    checksum: bool = Field(False, description="what is read is compared with what was written")

    @field_validator("block_size")
    @classmethod
    def _whole_blocks(cls, value: int) -> int:
        if value % 4096:
            raise ValueError(f"{value} is not a multiple of 4096, which direct reads and writes need")
        return value

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return 1 if self.single_submit or not self.overlap_events else self.queue_depth


def _is_device(path: Path) -> bool:
    return path.parts[:2] == ("/", "dev") and path.parts[2:3] != ("shm",)


def check_offload(config: ZeroConfig) -> Iterator[Problem]:
    """Keys about offload that do not fit together."""
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
                "it, and name a folder there.",
            )
    if zero.offload_optimizer.device == "none" and zero.offload_optimizer.overlap_step is True:
        yield Problem(
            "zero_optimization.offload_optimizer.overlap_step",
            "zero_optimization.offload_optimizer.overlap_step=true needs offload_optimizer.device='cpu' or 'nvme': "
            "what is stepped on the device itself has nothing to overlap with.",
        )
