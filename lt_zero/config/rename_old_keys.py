"""Maps old, misplaced and abbreviated spellings to keys and values of the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lt_zero.common.errors import Path, dotted
from lt_zero.config import key_table
from lt_zero.config.document import MISSING, Tree

Z = "zero_optimization"
# Old types of values that current keys accept, for the documentation.
FORMS: Mapping[str, str] = {
    f"{Z}: true": f"{Z}.stage: 1",
    f"{Z}: false": f"{Z}.stage: 0",
    f"{Z}.offload_optimizer: true": f"{Z}.offload_optimizer.device: cpu",
    f"{Z}.offload_param: true": f"{Z}.offload_param.device: cpu",
    f"{Z}.offload_param: nvme": f"{Z}.offload_param.device: nvme",
    "gradient_clipping: {enabled: true, clip_value: 1.0}": "gradient_clipping: 1.0",
}


def rename_old_keys(tree: Tree) -> None:
    """Move values from old keys to current ones, with a notice for each; a contradiction is a problem."""
    _zero_switch(tree)
    for name in ("offload_optimizer", "offload_param", "offload_params"):
        _offload_switch(tree, name)
    _clipping(tree)
    for row in key_table.aliases():
        whole = row.key.endswith(".**")
        old = tuple(row.key.removesuffix(".**").split("."))
        value = tree.get(old)
        if value is MISSING:
            continue
        if (special := _SPECIAL.get(dotted(old))) is not None:
            special(tree, old, value)
        elif value is None:
            tree.pop(old)  # null in an old spelling is the same as absent
        elif whole and isinstance(value, Mapping):
            tree.tell(old, f"{dotted(old)} is read as {row.to}. Write the latter.")
            for key in list(value):
                tree.move((*old, key), (*row.to.split("."), key), value[key], quiet=True)
            tree.pop(old)
        else:
            tree.move(old, tuple(row.to.split(".")), value)


def _zero_switch(tree: Tree) -> None:
    """``zero_optimization: true`` was stage 1."""
    value = tree.get((Z,))
    if isinstance(value, bool):
        tree.tell((Z,), f"{Z}: {str(value).lower()} is read as {Z}.stage={int(value)}. Write the latter.")
        tree.put((Z,), {"stage": int(value)})


def _offload_switch(tree: Tree, name: str) -> None:
    value = tree.get((Z, name))
    if isinstance(value, (bool, str)) and (isinstance(value, bool) or value in ("none", "cpu", "nvme")):
        device = value if isinstance(value, str) else "cpu" if value else "none"
        tree.tell(
            (Z, name), f"{Z}.{name}: {str(value).lower()} is read as {Z}.{name}.device={device}. Write the latter."
        )
        tree.put((Z, name), {"device": device})


def _clipping(tree: Tree) -> None:
    """``gradient_clipping: {enabled, clip_value}``."""
    value = tree.get(("gradient_clipping",))
    if not isinstance(value, Mapping) or set(value) - {"enabled", "clip_value"}:
        return
    enabled, limit = value.get("enabled", True), value.get("clip_value")
    if enabled not in (True, False) or (enabled and limit is None):
        tree.problem(
            ("gradient_clipping",),
            f"gradient_clipping={dict(value)} has no limit. Write the norm as a number: gradient_clipping: 1.0.",
        )
        tree.pop(("gradient_clipping",))
        return
    meant = limit if enabled else 0.0
    tree.tell(
        ("gradient_clipping",),
        "gradient_clipping: {enabled, clip_value} is read as a limit of the norm, "
        f"gradient_clipping={meant}. Write the latter.",
    )
    tree.put(("gradient_clipping",), meant)


def _device(tree: Tree, old: Path, value: Any) -> None:
    """``cpu_offload: true``."""
    block = "offload_optimizer" if old[-1] == "cpu_offload" else "offload_param"
    meant = ("cpu" if value else "none") if value in (True, False) else value  # 1 and 0, too
    tree.pop(old) if value is None else tree.move(old, (Z, block, "device"), meant)


def _pin_memory(tree: Tree, old: Path, value: Any) -> None:
    """One switch for both offload blocks; a block's own key takes precedence."""
    present = [n for n in ("offload_optimizer", "offload_param") if isinstance(tree.get((Z, n)), Mapping)]
    told = False
    for name in present or ["offload_optimizer"]:
        if value is not None and tree.get((Z, name, "pin_memory")) is MISSING:
            told = tree.put((Z, name, "pin_memory"), value)
    if told:
        names = " and ".join(f"{Z}.{n}.pin_memory" for n in present or ["offload_optimizer"])
        tree.tell(old, f"{dotted(old)} is read as {names}={value}. Write the latter.")
    tree.pop(old)


def _fp32_allreduce(tree: Tree, old: Path, value: Any) -> None:
    tree.move(old, ("communication_data_type",), "fp32") if value is True else tree.pop(old)


def _inverse(tree: Tree, old: Path, value: Any) -> None:
    """``find_unused_parameters``."""
    tree.move(old, (Z, "ignore_unused_parameters"), not value if isinstance(value, bool) else value)


_SPECIAL: Mapping[str, Callable[[Tree, Path, Any], None]] = {
    f"{Z}.cpu_offload": _device,
    f"{Z}.cpu_offload_param": _device,
    f"{Z}.cpu_offload_params": _device,
    f"{Z}.cpu_offload_use_pin_memory": _pin_memory,
    f"{Z}.pin_memory": _pin_memory,
    f"{Z}.find_unused_parameters": _inverse,
    f"{Z}.stage2_find_unused_parameters": _inverse,
    "fp32_allreduce": _fp32_allreduce,
    "gradient_clipping.enabled": lambda tree, old, value: None,  # see _clipping
    "gradient_clipping.clip_value": lambda tree, old, value: None,
}
