"""Recognition of files for FSDP, which are converted (fsdp.py) and not read as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of the block for FSDP that no other program's file has.
_TELLING = ("sharding_strategy", "reshard_after_forward", "transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading")


def is_for_fsdp(values: Mapping[str, Any]) -> bool:
    """True if these are the keys of a file for FSDP."""
    if "zero_optimization" in values or values.get("deepspeed_config"):
        return False
    names = {str(key).removeprefix("fsdp_") for key in values}
    named = bool(values.get("fsdp") or values.get("fsdp_config"))
    return (
        named
        or str(values.get("distributed_type")).upper() == "FSDP"
        or strategy_of_lightning(values) is not None
        or not names.isdisjoint(_TELLING)
    )


def strategy_of_lightning(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The path of the arguments of one of Lightning's strategies; None: there are none."""
    for path in ((), ("strategy",), ("trainer", "strategy")):
        node: Any = values
        for part in path:
            node = node.get(part) if isinstance(node, Mapping) else None
        name = str(node.get("class_path", "")).rpartition(".")[2] if isinstance(node, Mapping) else ""
        if name in ("FSDPStrategy", "ModelParallelStrategy"):
            return path
    return None
