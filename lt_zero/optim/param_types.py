"""Types of values in ``params`` blocks: each reader checks and converts a value from JSON or YAML."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Reader = Callable[[Any], Any]  # raises ValueError with what to write instead


@dataclass(frozen=True)
class Number:
    """A finite number, also one that was written as text ("1e-5")."""

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
    """A list of ``count`` values (None: of any number), which becomes a tuple."""

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
    """A value for ``inner``, or null."""

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
    """One of some texts."""

    options: tuple[str, ...]

    def __call__(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.options:
            raise ValueError(f"write {' or '.join(self.options)}")
        return value


@dataclass(frozen=True)
class Only:
    """A switch that supports one value only."""

    position: bool
    remedy: str

    def __call__(self, value: Any) -> bool:
        if flag(value) is not self.position:
            raise ValueError(self.remedy)
        return self.position


@dataclass(frozen=True)
class Refused:
    """A key that exists elsewhere."""

    remedy: str

    def __call__(self, value: Any) -> Any:
        raise ValueError(self.remedy)


def flag(value: Any) -> bool:
    """True or false, not text or numbers."""
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def anything(value: Any) -> Any:
    """Numbers that were written as text become numbers; lists may hold some."""
    if isinstance(value, (list, tuple)):
        return [anything(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(value) if value.strip().lstrip("+-").isdecimal() else number


@dataclass(frozen=True)
class Signature:
    """What a class takes beside its first argument, the parameters or the optimizer.

    Attributes:
        readers: by name.
        required: names without a default.
        is_open: it takes names that are not listed, too.
    """

    readers: Mapping[str, Reader]
    required: frozenset[str]
    is_open: bool = False

    @classmethod
    def of(cls, made: type, rules: Mapping[str, Reader]) -> Signature:
        """Read from the constructor.

        Args:
            made: the class.
            rules: readers that know more than the signature says, by name.

        Raises:
            ValueError: the class has no readable signature.
        """
        parameters = list(inspect.signature(made).parameters.values())[1:]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p for p in parameters if p.kind in kinds]
        return cls(
            {p.name: _rule(p, rules) or _reader(p) for p in named},
            frozenset(p.name for p in named if p.default is inspect.Parameter.empty),
            any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        )

    def plus(self, readers: Mapping[str, Reader]) -> Signature:
        """With more names that can be set."""
        return replace(self, readers={**self.readers, **readers})


def _rule(parameter: inspect.Parameter, rules: Mapping[str, Reader]) -> Reader | None:
    """The rule of this name, if it means the same: Adafactor's eps, for example, is a pair."""
    rule, default = rules.get(parameter.name), parameter.default
    same = default is inspect.Parameter.empty or isinstance(default, tuple) == isinstance(rule, Several)
    return rule if same else None


def _reader(parameter: inspect.Parameter) -> Reader:
    """What can be said from the default and the annotation."""
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
    """A value in a message, short."""
    try:
        return reprlib.repr(value)
    except Exception:  # a value of the user's own class
        return f"<{type(value).__name__}>"
