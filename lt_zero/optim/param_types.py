"""Types of values in ``params`` blocks. pydantic checks and converts a value; the message is what to write instead."""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from lt_zero.common.numbers import to_number, to_whole_number

Reader = Callable[[Any], Any]  # raises ValueError, whose message is the remedy


@dataclass(frozen=True)
class Typed:
    """A reader of values of one type.

    Attributes:
        type: annotation for pydantic.
        remedy: the type in words, after "write".
        is_list: whether the values are lists.
    """

    type: Any
    remedy: str
    is_list: bool = False

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type)

    def __call__(self, value: Any) -> Any:
        try:
            return self._adapter.validate_python(value)
        except (ValidationError, OverflowError):
            raise ValueError(f"write {self.remedy}") from None


def _annotated(*parts: Any) -> Any:
    return Annotated[parts]


def number(
    low: float = -math.inf,
    high: float = math.inf,
    *,
    whole: bool = False,
    low_open: bool = False,
    high_open: bool = False,
    example: str = "",
) -> Typed:
    """A finite number, or its text ("1e-5")."""
    bounds: dict[str, Any] = {"strict": True} if whole else {"strict": True, "allow_inf_nan": False}
    limits = []
    if low > -math.inf:
        bounds["gt" if low_open else "ge"] = low
        limits.append(f"{'above' if low_open else 'of at least'} {low:g}")
    if high < math.inf:
        bounds["lt" if high_open else "le"] = high
        limits.append(f"{'below' if high_open else 'of at most'} {high:g}")
    text = " ".join(["a whole number" if whole else "a number", " and ".join(limits)]).rstrip()
    kind = _annotated(int if whole else float, Field(**bounds))
    convert = BeforeValidator(to_whole_number if whole else to_number)
    return Typed(_annotated(kind, convert), f"{text}, such as {example}" if example else text)


def several(count: int | None, each: Typed, example: str = "") -> Typed:
    """A list of ``count`` values (None: any number of them), which becomes a tuple."""
    length, shown = "" if count is None else f" of {count}", f", such as {example}" if example else ""
    items = tuple[each.type, ...]  # type: ignore[name-defined]
    kind = _annotated(items, Field(min_length=count, max_length=count))
    return Typed(kind, f"a list{length}, each {each.remedy}{shown}", is_list=True)


def per_group(each: Typed) -> Typed:
    """One value, or a list with one for each parameter group."""
    items = list[each.type]  # type: ignore[name-defined]
    kind = each.type | _annotated(items, Field(min_length=1))
    return Typed(kind, f"{each.remedy}, or a list of such numbers, one for each parameter group")


def nullable(inner: Typed) -> Typed:
    """A value that ``inner`` accepts, or null."""
    return Typed(inner.type | None, f"{inner.remedy}, or null")


def choice(options: tuple[str, ...]) -> Typed:
    """One of several strings."""
    return Typed(Literal[options], " or ".join(options))


flag = Typed(_annotated(bool, Field(strict=True)), "true or false")


def only(position: bool, remedy: str) -> Reader:
    """A switch of which only one position is supported."""

    def read(value: Any) -> Any:
        if flag(value) is not position:
            raise ValueError(remedy)
        return position

    return read


def refused(remedy: str) -> Reader:
    """The reader of a key that belongs to another optimizer or block."""

    def read(value: Any) -> Any:
        raise ValueError(remedy)

    return read


def anything(value: Any) -> Any:
    """Any value; text that is a number, also in lists, becomes a number."""
    return [anything(item) for item in value] if isinstance(value, (list, tuple)) else to_number(value)


def is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def convert(reader: Reader | None, value: Any, may_be_auto: bool) -> Any:
    """The converted value; without a reader, the value itself.

    Args:
        reader: of the option, if its type is known.
        value: as written.
        may_be_auto: whether "auto" stands for a value that should have been resolved by now.

    Raises:
        ValueError: the message is the remedy.
    """
    if may_be_auto and is_auto(value):
        raise ValueError("auto cannot be resolved here; write a value")
    return value if reader is None else reader(value)


@dataclass(frozen=True)
class Signature:
    """The constructor arguments of a class, without the first one (the parameters or the optimizer).

    Attributes:
        readers: by name.
        required: names without a default.
        is_open: whether other names are accepted, too.
    """

    readers: Mapping[str, Reader]
    required: frozenset[str]
    is_open: bool = False

    @classmethod
    def of(cls, target: type, rules: Mapping[str, Reader]) -> Signature:
        """The signature of a constructor.

        Args:
            target: the class.
            rules: by name, readers that are stricter than the annotations.

        Raises:
            ValueError: the class has no readable signature.
        """
        parameters = list(inspect.signature(target).parameters.values())[1:]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p for p in parameters if p.kind in kinds]
        return cls(
            {p.name: _rule(p, rules) or _reader(p) for p in named},
            frozenset(p.name for p in named if p.default is inspect.Parameter.empty),
            any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        )

    def plus(self, readers: Mapping[str, Reader]) -> Signature:
        """The signature with further names."""
        return replace(self, readers={**self.readers, **readers})


def _rule(parameter: inspect.Parameter, rules: Mapping[str, Reader]) -> Reader | None:
    """The rule of this name, if it applies: Adafactor's eps, for example, is a pair."""
    rule, default = rules.get(parameter.name), parameter.default
    is_list = isinstance(rule, Typed) and rule.is_list
    return rule if default is inspect.Parameter.empty or isinstance(default, tuple) == is_list else None


def _reader(parameter: inspect.Parameter) -> Reader:
    """The reader that the default and the annotation imply."""
    default, annotation = parameter.default, parameter.annotation
    if isinstance(default, bool):
        return flag
    if isinstance(default, tuple) and default and all(isinstance(item, (int, float)) for item in default):
        return several(len(default), number())
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if text == "int":
        return number(whole=True)
    if "list" not in text and (isinstance(default, float) or "float" in text):
        return number() if isinstance(default, (int, float)) or text == "float" else anything
    return anything


def shown(value: Any) -> str:
    """A value as a message shows it, shortened."""
    try:
        return reprlib.repr(value)
    except Exception:  # a value of the user's own class
        return f"<{type(value).__name__}>"
