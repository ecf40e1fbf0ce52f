"""Types of values in ``params`` blocks: a reader checks and converts a value from JSON or YAML."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Reader = Callable[[Any], Any]  # raises ValueError, whose message is the remedy


@dataclass(frozen=True)
class Number:
    """A finite number, or its text ("1e-5")."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    low_open: bool = False
    high_open: bool = False
    example: str = ""

    def __call__(self, value: Any) -> float | int:
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            number = float(value)
            if isinstance(value, int) and self.whole:
                number = value  # a float has 53 bits
            below = number <= self.low if self.low_open else number < self.low
            above = number >= self.high if self.high_open else number > self.high
            if below or above or not math.isfinite(number) or (self.whole and number != int(number)):
                raise ValueError
        except (ValueError, OverflowError):
            raise ValueError(f"write {self}") from None
        return int(number) if self.whole else number

    def __str__(self) -> str:
        limits = []
        if self.low > -math.inf:
            limits.append(f"{'above' if self.low_open else 'of at least'} {self.low:g}")
        if self.high < math.inf:
            limits.append(f"{'below' if self.high_open else 'of at most'} {self.high:g}")
        text = " ".join(["a whole number" if self.whole else "a number", " and ".join(limits)]).rstrip()
        return f"{text}, such as {self.example}" if self.example else text


@dataclass(frozen=True)
class Several:
    """A list of ``count`` values (None: any number of them), which becomes a tuple."""

    count: int | None
    each: Number
    example: str = ""

    def __call__(self, value: Any) -> tuple[Any, ...]:
        example = f", such as {self.example}" if self.example else ""
        length = "" if self.count is None else f" of {self.count}"
        wanted = f"write a list{length}, each {self.each}{example}"
        if not isinstance(value, (list, tuple)) or self.count not in (None, len(value)):
            raise ValueError(wanted)
        try:
            return tuple(self.each(item) for item in value)
        except ValueError:
            raise ValueError(wanted) from None


@dataclass(frozen=True)
class PerGroup:
    """One value, or a list with one for each parameter group."""

    each: Number

    def __call__(self, value: Any) -> Any:
        wanted = f"write {self.each}, or a list of such numbers, one for each parameter group"
        if isinstance(value, (list, tuple)) and not value:
            raise ValueError(wanted)
        try:
            return [self.each(item) for item in value] if isinstance(value, (list, tuple)) else self.each(value)
        except ValueError:
            raise ValueError(wanted) from None


@dataclass(frozen=True)
class Nullable:
    """A value that ``inner`` accepts, or null."""

    inner: Reader

    def __call__(self, value: Any) -> Any:
        if value is None:
            return None
        try:
            return self.inner(value)
        except ValueError as error:
            raise ValueError(f"{error}, or null") from None


@dataclass(frozen=True)
class Choice:
    """One of several strings."""

    options: tuple[str, ...]

    def __call__(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.options:
            raise ValueError(f"write {' or '.join(self.options)}")
        return value


@dataclass(frozen=True)
class Only:
    """A switch of which only one position is supported."""

    position: bool
    remedy: str

    def __call__(self, value: Any) -> bool:
        if flag(value) is not self.position:
            raise ValueError(self.remedy)
        return self.position


@dataclass(frozen=True)
class Refused:
    """A key that belongs to another optimizer or block."""

    remedy: str

    def __call__(self, value: Any) -> Any:
        raise ValueError(self.remedy)


def flag(value: Any) -> bool:
    """A boolean; not text, not a number."""
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def anything(value: Any) -> Any:
    """Any value; text that is a number, also in lists, becomes a number."""
    if isinstance(value, (list, tuple)):
        return [anything(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(value) if value.strip().lstrip("+-").isdecimal() else number


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
    applies = default is inspect.Parameter.empty or isinstance(default, tuple) == isinstance(rule, Several)
    return rule if applies else None


def _reader(parameter: inspect.Parameter) -> Reader:
    """The reader that the default and the annotation imply."""
    default, annotation = parameter.default, parameter.annotation
    if isinstance(default, bool):
        return flag
    if isinstance(default, tuple) and default and all(isinstance(item, (int, float)) for item in default):
        return Several(len(default), Number())
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if text == "int":
        return Number(whole=True)
    if "list" not in text and (isinstance(default, float) or "float" in text):
        return Number() if isinstance(default, (int, float)) or text == "float" else anything
    return anything


def shown(value: Any) -> str:
    """A value as a message shows it, shortened."""
    try:
        return reprlib.repr(value)
    except Exception:  # a value of the user's own class
        return f"<{type(value).__name__}>"
