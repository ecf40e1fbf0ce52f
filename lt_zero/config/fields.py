"""Types of configuration values, and the base of all blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

_DTYPES: Mapping[str, torch.dtype] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "torch.float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "torch.half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


def _dtype(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in _DTYPES:
        return _DTYPES[value.lower()]
    if isinstance(value, torch.dtype) and value in _DTYPES.values():
        return value
    raise ValueError("it is not one of fp32, fp16, bf16")


def _number(value: Any) -> Any:
    """Convert text that is a number, such as "2e8" or "500_000_000"."""
    if isinstance(value, str):
        try:
            return float(value.replace("_", "")) if not value.strip().isdigit() else int(value)
        except ValueError:
            return value
    return value


def _whole_number(value: Any) -> Any:
    """Convert 5e8, "2e8" or "500_000_000" to an integer; pydantic refuses fractions."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _FrozenDict(dict[str, Any]):
    """A mapping that cannot be changed, for blocks without a schema."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("A configuration is frozen. Make another: ZeroConfig.of(config, overrides=[...]).")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:  # pickle and deepcopy would set the items of a dict
        return type(self), (dict(self),)


def thawed(value: Any) -> Any:
    """A mutable copy of a frozen dict, or of a list of these."""
    if isinstance(value, tuple) and any(isinstance(item, _FrozenDict) for item in value):
        return [thawed(item) for item in value]
    return dict(value) if isinstance(value, _FrozenDict) else value


def _names(value: Any) -> Any:
    """One name is a list of one."""
    return (value,) if isinstance(value, str) else value


Dtype = Annotated[
    torch.dtype, BeforeValidator(_dtype), WithJsonSchema({"type": "string", "enum": ["fp32", "fp16", "bf16"]})
]
Whole = Annotated[int, BeforeValidator(_whole_number), Field(strict=True)]
Elements = Annotated[int, BeforeValidator(_whole_number), Field(ge=0, strict=True)]
PositiveElements = Annotated[int, BeforeValidator(_whole_number), Field(gt=0, strict=True)]
Real = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]
Params = Annotated[dict[str, Any], AfterValidator(_FrozenDict)]
_GROUP = {
    "type": "object",
    "required": ["match"],
    "properties": {
        "match": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "name": {"type": "string"},
        "optional": {"type": "boolean"},
    },
}
ParamGroups = Annotated[tuple[Params, ...], WithJsonSchema({"type": "array", "items": _GROUP})]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class Block(BaseModel):
    """A block of keys: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, arbitrary_types_allowed=True)
