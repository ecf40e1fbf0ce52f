"""A configuration on its way from text to a validated object: values, their places, and what was found on the way."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()
HIDDEN = "***"
DEEPEST = 50  # mappings and lists inside each other; real files have 6
MOST_VALUES = 10_000  # real files have 100; shared mappings, such as YAML's aliases, can expand to more than memory
LONGEST_TEXT = 10_000  # characters of a text with interpolations


_INTERPOLATION = re.compile(r"\$\{|^\?\?\?\Z")


@dataclass(frozen=True)
class Notice(Problem):
    """A message about a key that is accepted: read as another one (alias), ignored (no effect), or without effect in
    combination with the other keys (inactive); or about the file itself, a default, or overrides in the environment.
    """

    kind: Literal["alias", "no effect", "inactive", "file", "environment", "default"] = "alias"


@dataclass
class Document:
    """Nested mappings with the places of their values. Each step of loading takes one and returns one."""

    values: dict[str, Any]  # dict, list, scalars; objects that no file can hold (torch.dtype, Path) stay what they are
    marks: dict[Path, Mark] = field(default_factory=dict)  # of keys and list items; of renamed keys, the old places
    name: str = "config"  # of the file, or of what else it is, for messages
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    # Values that must not be shown: from environment variables, or with the name of a secret. The path of an
    # interpolation stands for all that it is resolved to.
    secret: set[Path] = field(default_factory=set)
    read: frozenset[str] = frozenset()  # all that was read from environment variables: no message shows it
    autos: frozenset[Path] = frozenset()  # written "auto", and taken out

    def check(self) -> Document:
        """Return this document, or raise a ConfigError of its problems."""
        if self.problems:
            raise ConfigError(self.problems)
        return self

    def copy(self) -> Document:
        """A document that can be changed without changing this one. Scalars are shared."""
        return replace(
            self,
            values=mapped(self.values),
            marks=dict(self.marks),
            notices=list(self.notices),
            problems=list(self.problems),
            secret=set(self.secret),
        )

    def interpolations(self) -> dict[Path, str]:
        """The texts that have to be resolved (interpolations.py), by their paths."""
        found = ((path, leaf) for path, leaf in leaves(self.values) if isinstance(leaf, str))
        return {path: text for path, text in found if _INTERPOLATION.search(text)}

    def get(self, path: Path) -> Any:
        """The value, or ``MISSING``."""
        node: Any = self.values
        for key in path:
            in_list = isinstance(node, list) and isinstance(key, int) and 0 <= key < len(node)
            if not in_list and not (isinstance(node, Mapping) and key in node):
                return MISSING
            node = node[key]
        return node

    def put(self, path: Path, value: Any) -> bool:
        """Set a value and create the blocks around it; False if one of these is not a mapping."""
        node: Any = self.values
        for key in path[:-1]:
            if isinstance(node, list) and isinstance(key, int):
                node = node[key]
                continue
            if not isinstance(node, dict):
                return False
            if node.get(key) is None:
                node[key] = {}
            node = node[key]
        if not isinstance(node, dict):
            return False
        node[path[-1]] = copy.deepcopy(value)
        return True

    def pop(self, path: Path) -> None:
        node: Any = self.get(path[:-1])
        if isinstance(node, dict):
            node.pop(path[-1], None)

    def forget(self, path: Path) -> None:
        """Remove the marks and secrets at and below ``path``."""
        self.marks = {at: mark for at, mark in self.marks.items() if at[: len(path)] != path}
        self.secret = {at for at in self.secret if at[: len(path)] != path}

    def mark(self, path: Path) -> Mark | None:
        """Place where the value, or the innermost block around it, was written."""
        return next((self.marks[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.marks), None)

    def hides(self, path: Path) -> bool:
        """True if the value at ``path`` must not be shown."""
        return any(path[:end] in self.secret for end in range(1, len(path) + 1))

    def move(self, old: Path, new: Path, value: Any, quiet: bool = False) -> None:
        """Move ``value`` from ``old`` to ``new``; a different value there is a problem."""
        there = self.get(new)
        mark = self.mark(old)
        names = dotted(old), dotted(new)
        self.pop(old)
        if there is not MISSING and there is not None and there != value:
            text = f"{names[0]} says {value!r}, {names[1]} says {there!r}, and the first is another spelling of the "
            self.problem(old, f"{text}second. Remove {names[0]}.", mark)
        elif not self.put(new, value):
            self.problem(old, f"{names[0]} is read as {names[1]}, but {dotted(new[:-1])} is no block.", mark)
        else:
            if mark is not None:
                self.marks[new] = mark
            inside = {(*new, *at[len(old) :]) for at in self.secret if at[: len(old)] == old}
            self.secret |= inside | ({new} if self.hides(old) else set())
            if not quiet:
                shown = str(value).lower() if isinstance(value, bool) else value
                self.tell(old, f"{names[0]} is read as {names[1]}={shown}. Write the latter.", mark)

    def tell(self, path: Path, message: str, mark: Mark | None = None) -> None:
        self.notices.append(Notice(dotted(path), message, mark or self.mark(path)))

    def problem(self, path: Path, message: str, mark: Mark | None = None) -> None:
        self.problems.append(Problem(dotted(path), message, mark or self.mark(path)))


def leaves(value: Any, path: Path = (), lists: bool = True) -> Iterator[tuple[Path, Any]]:
    """All values that hold no others, with their paths; without ``lists``, a list is one value."""
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[Any, Any]] = value.items()
    elif lists and isinstance(value, list) and value:
        items = enumerate(value)
    else:
        if path:
            yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key), lists)


def mapped(value: Any, change: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A copy of dicts and lists with ``change`` of every other value."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return change(value)


def literal(values: Any) -> Any:
    """``values`` as interpolations.py has to be given them if it is to leave them as they are."""
    return mapped(values, lambda leaf: _quoted(leaf) if isinstance(leaf, str) else leaf)


def _quoted(text: str) -> str:
    """A text that OmegaConf reads as ``text``, whatever is in it."""
    if len(text) > LONGEST_TEXT and "${" in text:
        raise ConfigError(
            f"{text[:60]!r}... may become too long, more than {LONGEST_TEXT:,} characters with ${{ in them"
        )
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)


def too_many(name: str, what: str) -> ConfigError:
    return ConfigError(f"{name} has more than {MOST_VALUES:,} values ({what} counted as often as used)")


def too_deep(name: str) -> ConfigError:
    return ConfigError(f"{name}: mappings and lists are nested more than {DEEPEST} deep; a configuration is not")


# ---- secrets ---------------------------------------------------------------------------------------------------------

_BLOCKS = r"(?:(?:api|access|private|auth)[_-]?key|passw(?:or)?d|passphrase|secret|credential)"
_TOKENS = r"tokens?(?!\w)"  # hf_token; neither tokenizer nor token_dropping
_HIDES_BLOCK = re.compile(_BLOCKS, re.IGNORECASE)
_NAMES_TOKEN = re.compile(_TOKENS, re.IGNORECASE)
# What follows the name of a secret in one text: in YAML, "api_key:KEY" is a key or value, as a space is missing.
_TOLD = re.compile(
    rf"((?:{_BLOCKS}|{_TOKENS})\w*[\"']?\s*[:=]\s*)(?!\*\*\*|\.\.\.|None)(?:\"[^\"]*\"|'[^']*'|\S+)", re.IGNORECASE
)
_SHORT = 4
_CUT = 12  # length to which reprlib truncates text


def names_secret(text: str) -> bool:
    """True if a key of this name, or one in this line, has a value that must not be shown."""
    return bool(_HIDES_BLOCK.search(text) or _NAMES_TOKEN.search(text))


def without_told(text: str) -> str:
    """A text with the values after names of secrets hidden."""
    return _TOLD.sub(rf"\1{HIDDEN}", text)


def masked(value: Any, secret: Set[Path], sign: str = HIDDEN, path: Path = ()) -> Any:
    """A copy of containers, with ``sign`` in place of the values at the paths ``secret``."""
    if path in secret:
        return sign
    if isinstance(value, Mapping):
        return {key: masked(entry, secret, sign, (*path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(entry, secret, sign, (*path, number)) for number, entry in enumerate(value)]
    return value


def secrets(values: dict[str, Any]) -> set[Path]:
    """Paths of values with the name of a secret, their own or of a block around them.

    A token is text that has this name itself: a number is none ("max_tokens": 512), nor is a block of tokens one.
    """
    found = set()
    for path, value in leaves(values):
        names = [part for part in path if isinstance(part, str)]
        is_token = isinstance(value, str) and bool(names) and bool(_NAMES_TOKEN.search(names[-1]))
        says_something = value not in (None, "", {}, []) and not isinstance(value, bool)
        tells = isinstance(value, str) and "${" not in value and _TOLD.search(value) is not None
        if says_something and (tells or is_token or any(map(_HIDES_BLOCK.search, names))):
            found.add(path)
    return found


def masking(document: Document) -> Callable[[str], str]:
    """A function that replaces secret texts in messages, plain, quoted or cut off, whatever these are about.

    Secret are the document's values at the paths ``secret``, and all that was read from environment variables, as a
    message can also show what no value has become.
    """
    secret = set(document.read)
    for path, value in leaves(document.values) if document.secret else ():
        is_shown = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        if is_shown and document.hides(path):
            secret.add(str(value))
    found: set[tuple[str, str]] = set()  # text that a message has to hold, and the pattern of what is replaced in it
    long: set[str] = set()  # texts that messages cut off
    for text in secret - {""}:
        # Whole words only (4 is not in 48), and short values only where a value is expected.
        before, around = ("(?<==)", "(?<==)") if len(text) < _SHORT else (r"(?<!\w)", "")
        found |= {(quoted, around + re.escape(quoted)) for quoted in (repr(text), json.dumps(text))}
        found.add((text, rf"{before}{re.escape(text)}(?!\w)"))
        if len(text) > _CUT:
            long |= {text, repr(text)[1:-1], json.dumps(text)[1:-1]}

    def without_secrets(message: str) -> str:
        message = without_told(message)
        # One pattern of all would be tried at each character.
        patterns = sorted((pattern for text, pattern in found if text in message), key=len, reverse=True)
        message = re.sub("|".join(patterns), HIDDEN, message) if patterns else message
        for text in long:
            message = _without_parts(message, text)
        return message

    return without_secrets


def _without_parts(message: str, secret: str) -> str:
    """Hide where ``message`` has the beginning of a long secret, with "..." and its end if these follow."""
    start = message.find(secret[:_CUT])
    while start >= 0:
        end = start + len(os.path.commonprefix([message[start:], secret]))
        if message.startswith("...", end):
            end += 3
            rest = message[end : end + len(secret)]
            end += next((length for length in range(len(rest), 0, -1) if secret.endswith(rest[:length])), 0)
        message = message[:start] + HIDDEN + message[end:]
        start = message.find(secret[:_CUT], start + len(HIDDEN))
    return message
