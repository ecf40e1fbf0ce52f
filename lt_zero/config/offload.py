"""The blocks that say where states rest between uses: ``offload_optimizer``, ``offload_param``, ``aio``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AliasChoices, Field, field_validator

from lt_zero.config.fields import Block, Elements, PositiveElements

if TYPE_CHECKING:
    from lt_zero.config.schema import ZeroConfig

log = logging.getLogger("lt_zero")

Device = Literal["none", "cpu", "nvme"]


class _Offload(Block):
    device: Device = Field("none", description="where it rests between uses")
    nvme_path: Path | None = Field(None, description="folder for the files, on a fast local disk")
    pin_memory: bool = Field(True, description="page-locked host memory, if there is a GPU")

    @field_validator("nvme_path", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        if isinstance(value, (str, Path)) and not str(value).strip():
            raise ValueError("it is empty; name a folder on a local NVMe disk, or leave it out")
        return Path(value).expanduser() if isinstance(value, (str, Path)) else value

    @field_validator("device", mode="before")
    @classmethod
    def _no_device(cls, value: Any) -> Any:
        return "none" if value is None else value


class OffloadOptimizer(_Offload):
    """The ``zero_optimization.offload_optimizer`` block."""

    buffer_count: PositiveElements = Field(4, description="buckets in memory at a time at most, with nvme")
    pipeline_read: bool = Field(True, description="read the next bucket while one is stepped")
    pipeline_write: bool = Field(True, description="write the last bucket while one is stepped")
    fast_init: bool = Field(False, description="always on: weights are written as they are made")
    ratio: float = Field(1.0, ge=0, le=1, description="part of the elements that is offloaded, the rest stays")
    overlap_step: bool | Literal["auto"] = Field(
        "auto", description="step beside backward (auto), beside the next forward too (true), or on its own (false)"
    )


class OffloadParam(_Offload):
    """The ``zero_optimization.offload_param`` block."""

    buffer_count: PositiveElements = Field(5, description="buckets that are read ahead at most, with nvme")
    buffer_size: PositiveElements = Field(100_000_000, description="elements that are read ahead at most, with nvme")
    max_in_cpu: Elements = Field(1_000_000_000, description="elements that stay in memory in spite of nvme")


class Aio(Block):
    """The ``aio`` block: how files are read and written."""

    block_size: PositiveElements = Field(4 << 20, description="bytes per request")
    queue_depth: PositiveElements = Field(8, description="requests in flight at most")
    intra_op_parallelism: PositiveElements = Field(
        4,
        validation_alias=AliasChoices("intra_op_parallelism", "thread_count"),
        description="threads that read and write",
    )
    single_submit: bool = Field(False, description="one request in flight")
    overlap_events: bool = Field(True, description="false: one request in flight")
    use_gds: bool = Field(False, description="not supported: see the error")
    checksum: bool = Field(False, description="what is read is compared with what was written")

    @field_validator("block_size")
    @classmethod
    def _whole_blocks(cls, value: int) -> int:
        if value % 4096:
            raise ValueError(f"{value} is not a multiple of 4096, which direct reads and writes need")
        return value

    @field_validator("use_gds")
    @classmethod
    def _no_gds(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "use_gds=true needs NVIDIA GPUDirect Storage, which lt_zero does not use: blocks pass through host "
                "memory. Remove the key"
            )
        return value

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return 1 if self.single_submit or not self.overlap_events else self.queue_depth


# Spellings in files that were written for something else: key -> (block, what it means there).
_OLD: dict[str, tuple[str, str]] = {
    "cpu_offload": ("offload_optimizer", "device"),
    "cpu_offload_param": ("offload_param", "device"),
    "cpu_offload_params": ("offload_param", "device"),
    "cpu_offload_use_pin_memory": ("offload_optimizer", "pin_memory"),
    "pin_memory": ("offload_optimizer", "pin_memory"),
    "fast_init": ("offload_optimizer", "fast_init"),
}


def modernise(block: Mapping[str, Any]) -> dict[str, Any]:
    """``zero_optimization`` with old and misplaced offload keys where they belong; each is told once.

    Raises:
        ValueError: an old key and its replacement contradict each other.
    """
    new = dict(block)
    if "offload_params" in new:
        _tell("offload_params", "offload_param")
        if "offload_param" in new:
            raise ValueError(
                "offload_params is an old name of offload_param, and both are given. Remove offload_params."
            )
        new["offload_param"] = new.pop("offload_params")
    for name in ("offload_optimizer", "offload_param"):
        if isinstance(new.get(name), bool):
            _tell(f"{name}: {str(new[name]).lower()}", f"{name}: {{device: {'cpu' if new[name] else 'none'}}}")
            new[name] = {"device": "cpu" if new[name] else "none"}
    for key, (name, meaning) in _OLD.items():
        if key not in new:
            continue
        value = new.pop(key)
        value = (
            ("cpu" if value else "none") if meaning == "device" and value in (True, False) else value
        )  # 1 and 0, too
        _tell(key, f"{name}.{meaning}: {value}")
        if value is None:
            continue
        target = new.get(name)
        target = target.model_dump(exclude_unset=True) if isinstance(target, Block) else dict(target or {})
        if meaning == "device" and target.get("device", value) != value:
            raise ValueError(f"{key} says {value!r}, {name}.device says {target['device']!r}. Remove {key}.")
        new[name] = {meaning: value, **target}
    return new


def _tell(old: str, new: str) -> None:
    warnings.warn(f"zero_optimization.{old} is read as {new}. Write the latter.", stacklevel=2)


def check_offload(config: ZeroConfig) -> None:
    """Keys that fit together.

    Raises:
        ValueError: they do not.
    """
    zero = config.zero_optimization
    if zero.offload_param.device != "none" and zero.stage < 3:
        raise ValueError(
            f"zero_optimization.offload_param.device={zero.offload_param.device!r} needs stage 3, stage is "
            f"{zero.stage}: below it every rank uses all parameters all the time. Set stage=3, or remove offload_param "
            "(offload_optimizer works at every stage)."
        )
    for name in ("offload_optimizer", "offload_param"):
        block = getattr(zero, name)
        if block.device == "nvme" and block.nvme_path is None:
            raise ValueError(
                f"zero_optimization.{name}.device='nvme' needs zero_optimization.{name}.nvme_path: a folder on a local "
                "NVMe disk."
            )
        if block.device == "none" and name == "offload_optimizer" and block.overlap_step is True:
            raise ValueError(
                "zero_optimization.offload_optimizer.overlap_step=true needs offload_optimizer.device='cpu' or 'nvme': "
                "what is stepped on the device itself has nothing to overlap with."
            )
        if block.device != "nvme" and block.nvme_path is not None:
            log.info("zero_optimization.%s.nvme_path is not used: device is %r", name, block.device)
