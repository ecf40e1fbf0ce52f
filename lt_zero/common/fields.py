"""Building blocks of configurations: types of values, and frozen blocks of keys (pydantic's models)."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn, Union, get_args, get_origin

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo

from lt_zero.common.errors import Problem
from lt_zero.common.numbers import to_number, to_whole_number

# ---- values ----------------------------------------------------------------------------------------------------------

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_DTYPES: Mapping[str, torch.dtype] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "torch.float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "torch.half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


def _dtype(value: Any, known: str = "fp32, fp16, bf16") -> Any:
    found = _DTYPES.get(str(value).lower()) if isinstance(value, (str, torch.dtype)) else None
    if found is None:
        raise ValueError(f"it is not one of {known}")
    return found


def _moment_dtype(value: Any) -> Any:
    is_coded = str(value).lower() in ("int8", "torch.int8", "8")
    return torch.int8 if is_coded else _dtype(value, known="fp32, bf16, int8")


def _folder(value: Any) -> Any:
    if not isinstance(value, (str, Path)):
        return value
    if not str(value).strip() or "\0" in str(value):
        raise ValueError("it is empty or not a path; name a folder on a local NVMe disk, or remove the key")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise ValueError(f"{error} (write the whole path)") from None


class FrozenDict(dict[str, Any]):
    """A mapping that cannot be changed, for blocks without a schema."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("A configuration is frozen. Make another: ZeroConfig.of(config, overrides=[...]).")

    def __hash__(self) -> int:  # type: ignore[override]
        # Values may be lists. Equal mappings have the same keys.
        return hash(frozenset(self))

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:  # pickle and deepcopy would set the items of a dict
        return type(self), (dict(self),)


def thawed(value: Any) -> Any:
    """A mutable copy of a frozen dict, or of a list of these."""
    if isinstance(value, tuple) and any(isinstance(item, FrozenDict) for item in value):
        return [thawed(item) for item in value]
    return dict(value) if isinstance(value, FrozenDict) else value


def scalars(value: Any) -> Any:
    """Convert to types that JSON, YAML and ``torch.load(weights_only=True)`` support."""
    if isinstance(value, Mapping):
        return {str(key): scalars(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [scalars(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


Folder = Annotated[Path, BeforeValidator(_folder)]
Dtype = Annotated[
    torch.dtype, BeforeValidator(_dtype), WithJsonSchema({"type": "string", "enum": [*DTYPE_NAMES.values()]})
]
MomentDtype = Annotated[
    torch.dtype,
    BeforeValidator(_moment_dtype),
    WithJsonSchema({"type": "string", "enum": [*DTYPE_NAMES.values(), "int8"]}),
]
Whole = Annotated[int, BeforeValidator(to_whole_number), Field(strict=True)]
Elements = Annotated[int, BeforeValidator(to_whole_number), Field(ge=0, strict=True)]
Positive = Annotated[int, BeforeValidator(to_whole_number), Field(gt=0, strict=True)]
Real = Annotated[float, BeforeValidator(to_number), Field(strict=True, allow_inf_nan=False)]
Params = Annotated[dict[str, Any], AfterValidator(FrozenDict)]
lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
off_if_false = BeforeValidator(lambda value: {} if value in (False, "none") else value)  # of a block
# One name is a list of one.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


# ---- blocks ----------------------------------------------------------------------------------------------------------


class IdleKeys(NamedTuple):
    """A rule about keys that have no effect."""

    applies: bool
    block: str  # dotted
    names: str  # of keys in it, with spaces between them; "": all
    why: str


def key(default: Any, description: str, **more: Any) -> Any:
    """A key of a block; ``more`` as for ``Field``."""
    return Field(default, description=description, **more)


class Block(BaseModel):
    """A block of keys: immutable, and an unknown key is an error.

    It can be read like the dictionary of a file: ``block["stage"]`` is the value of a key, written or not, and
    ``"stage" in block`` tells whether the key was written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, arbitrary_types_allowed=True)

    place: ClassVar[str] = ""  # the block's dotted key in a configuration; "" for the whole and for items of lists

    @classmethod
    def at_top(cls) -> tuple[Any, Any]:
        """The type and default of the key at the top level that holds this block, for a block that a feature brings.

        By default the key is described by the first line of the docstring.
        """
        return cls, key(cls(), (cls.__doc__ or "").partition("\n")[0].removesuffix("."))

    def problems_in(self, config: Any) -> Iterator[Problem]:
        """Find what is wrong with a configuration that has this block, for a block that a feature brings."""
        return iter(())

    def idle_in(self, config: Any) -> Iterable[IdleKeys]:
        """Tell which keys of this block have no effect in a configuration, for a block that a feature brings."""
        return ()

    def __getitem__(self, key: str) -> Any:
        """The value of a key. Raises KeyError: there is no such key."""
        field = keys_of(type(self)).get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), keys_of(type(self)), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(keys_of(type(self)))}"
            raise KeyError(f"{self._dotted(key)} is not a key of lt_zero; {hint}")
        return getattr(self, _name_of(type(self), field))

    def __contains__(self, key: object) -> bool:
        field = keys_of(type(self)).get(str(key))
        return field is not None and _name_of(type(self), field) in self.model_fields_set

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        self._refuse_to_set(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            self._refuse_to_set(name, value)
        super().__setattr__(name, value)

    def _refuse_to_set(self, key: str, value: Any) -> NoReturn:
        dotted = self._dotted(key)
        written = str(value).lower() if isinstance(value, bool) else value
        text = f'overrides=["{dotted}={written}"]' if isinstance(value, (str, int, float)) else "overrides=[...]"
        raise TypeError(
            f"{dotted} = {value!r}: a configuration is frozen once it is checked. Pass {text} to the strategy, or "
            "write the key into config before you pass it; ZeroConfig.of(config, overrides=[...]) makes another."
        )

    def _dotted(self, key: object) -> str:
        return f"{self.place}.{key}" if self.place else str(key)


def _name_of(schema: type[BaseModel], field: FieldInfo) -> str:
    """The attribute of a field, which may have another key."""
    return next(name for name, other in schema.model_fields.items() if other is field)


@cache
def keys_of(schema: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The fields of a block by their keys; one with an alias has the alias, then its name."""
    found: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        if field.validation_alias is not None:
            found[str(field.validation_alias)] = field
        found[name] = field
    return found


def block_of(field: FieldInfo) -> type[Block] | None:
    """The block that a field holds, or None."""
    is_union = get_origin(field.annotation) in (Union, types.UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Block)), None)


def item_block_of(field: FieldInfo) -> type[Block] | None:
    """The block of the items of a list, or None."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Block)), None)


def set_places(schema: type[Block]) -> None:
    """Tell each block inside of a configuration, by ``Block.place``, under which dotted key it stands."""
    for name, field in keys_of(schema).items():
        if (block := block_of(field)) is not None and not block.place:
            block.place = f"{schema.place}.{name}" if schema.place else name
            set_places(block)


def dotted_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a schema and of the blocks in it, in their order."""
    for name, field in keys_of(schema).items():
        block = block_of(field)
        yield from (f"{prefix}{name}",) if block is None else dotted_keys(block, f"{prefix}{name}.")
