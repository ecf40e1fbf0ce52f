"""Errors. The problems of a configuration are reported together, each with its position in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lt_zero.common.output import printable

Path = tuple[str | int, ...]  # of a value: keys of mappings, positions in lists


class Mark(NamedTuple):
    """Place where a value was written; lines and columns count from 1 and are None without a file."""

    source: str  # a file, or another source ("overrides[2]", "argument stage")
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}, line {self.line}, column {self.column}"


MOST_SHOWN = 50  # of the problems, or notices, of a configuration
_LONGEST = 1000  # characters of a message


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration."""

    key: str  # dotted, "" for the whole configuration
    message: str  # what is wrong and what to do; names the key and its value
    mark: Mark | None = None

    def __str__(self) -> str:
        text = self.message if len(self.message) <= _LONGEST else f"{self.message[:_LONGEST]}..."
        return printable(text if self.mark is None else f"{self.mark}: {text}")


# Checks of configuration blocks whose classes the configuration does not import, by the block's name. A check gets the
# block's type and params, and for optimizers its param_groups. ``lt_zero/__init__`` provides them.
Check = Callable[..., list[Problem]]
BLOCK_CHECKS: dict[str, Check] = {}


class ConfigError(ValueError):
    """A configuration that cannot be used; ``problems`` has all reasons."""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        self.problems = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        lines, count = [str(problem) for problem in self.problems[:MOST_SHOWN]], len(self.problems)
        if count > MOST_SHOWN:
            lines.append(f"... and {count - MOST_SHOWN:,} more")
        super().__init__(lines[0] if count == 1 else "\n  ".join([f"{count:,} problems:", *lines]))

    @classmethod
    def about(cls, key: str, message: str) -> ConfigError:
        """An error about one key."""
        return cls([Problem(key, message)])

    def masked(self, mask: Callable[[str], str]) -> ConfigError:
        """The same error with the messages that ``mask`` makes of its own."""
        return type(self)([replace(problem, message=mask(problem.message)) for problem in self.problems])

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def path_of(place: str) -> Path:
    """``a[0].b`` or ``a.0.b`` -> ``("a", 0, "b")``."""
    parts = place.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def dotted(path: Path) -> str:
    """``("a", 0, "b")`` -> ``a.0.b``, as overrides and OmegaConf write it."""
    return ".".join(str(part) for part in path)


def differences(ranks: Mapping[int, Mapping[str, Any]], shown: int = 3) -> str:
    """Text that tells, key by key, the values in which ``ranks`` differ; at most ``shown`` keys.

    A value may be a tuple of names: the text has their number, and the first name that not all ranks have.
    """
    every = list(ranks.values())
    keys = [key for key in dict.fromkeys(k for has in every for k in has) if len({_of(has, key) for has in every}) > 1]
    told = [f"{key} {_by_rank(key, ranks)}" for key in keys[:shown]]
    return "; ".join(told) + (f"; and {len(keys) - shown} more" if len(keys) > shown else "")


_MISSING = object()


def _of(has: Mapping[str, Any], key: str) -> Any:
    return has.get(key, _MISSING)


def _by_rank(key: str, ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """``is 0.1 on rank 0 and 0.2 on ranks 1, 2``."""
    by_value: dict[Any, list[int]] = {}
    for rank, has in ranks.items():
        by_value.setdefault(_of(has, key), []).append(rank)
    parts, names = [], [set(value) if isinstance(value, tuple) else set() for value in by_value]
    common = set.intersection(*names)
    for value, found in list(by_value.items())[:3]:
        text = "missing" if value is _MISSING else repr(value) if not isinstance(value, str) else value
        if isinstance(value, tuple):
            own = next((name for name in value if name not in common), None)
            text = f"{len(value)}{f' (with {own})' if own is not None else ''}"
        some = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
        parts.append(f"{text} on rank{'s' if len(found) > 1 else ''} {some}")
    return f"is {' and '.join(parts)}"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, read or trusted; names the file and the remedy.

    Names that a file has may control a terminal, so they are printable in its text.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in args))


def add_note(error: BaseException, text: str) -> None:
    """Add a line that is printed below an error; before Python 3.11, which has no notes, it ends the message."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}",)
        error.__notes__ = [*_notes(error), text]


def fold_notes(error: BaseException) -> None:
    """Move the notes of an error into the last line of its message, so that this is the last line that is printed.

    No-op if it has none, or if its message is not a single text.
    """
    notes = _notes(error)
    if not notes or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    text = error.args[0]
    for note in reversed(notes):
        text = text.removesuffix(f"\n{note}")
    error.args = (f"{text} ({' '.join(notes)})",)
    error.__notes__ = []


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def missing_part(module: str, error: ModuleNotFoundError) -> str | None:
    """The module of its own package that an import of ``module`` has not found; None: it lacks a library.

    >>> missing_part("lt_zero.features.ema.callback", ModuleNotFoundError(name="lt_zero.features.ema"))
    'lt_zero.features.ema'
    >>> missing_part("lt_zero.parallel.feature", ModuleNotFoundError(name="lt_zero.parallel.experts"))
    'lt_zero.parallel.experts'
    >>> missing_part("lt_zero.features.ema.callback", ModuleNotFoundError(name="numpy"))
    """
    package, _, _ = module.partition(".")
    return error.name if error.name is not None and f"{error.name}.".startswith(f"{package}.") else None
