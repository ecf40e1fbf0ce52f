"""JSON and YAML text: the values, the line and column of each key, and what is wrong with the text."""

from __future__ import annotations

import bisect
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted
from lt_zero.config.document import DEEPEST, Document, Notice, names_secret, too_deep

_MOST_VALUES = 100_000  # real files have 100; aliases of YAML can expand to more than memory holds


class Text:
    """Text of a file.

    Args:
        text: the whole file.
        name: of the file, for messages.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self._starts = [0, *(found.end() for found in re.finditer(r"\r\n|\n|\r", text))]

    def mark(self, offset: int) -> Mark:
        row = bisect.bisect_right(self._starts, offset) - 1
        return Mark(self.name, row + 1, offset - self._starts[row] + 1)

    def problem(self, offset: int, message: str, key: str = "") -> Problem:
        """``message`` with the place and the text of its line, unless that may hold a secret."""
        row = bisect.bisect_right(self._starts, offset)
        line = self.text[self._starts[row - 1] : self._starts[row] if row < len(self._starts) else None]
        column = offset - self._starts[row - 1]
        shown = "" if names_secret(line) else line[max(0, column - 60) : column + 60].strip()
        return Problem(key, f"{message}\n    {shown}" if shown else message, self.mark(offset))

    def problem_at(self, mark: Any, message: str, key: str = "") -> Problem:
        """``problem`` at a mark of PyYAML, which counts from 0."""
        start = self._starts[mark.line] if mark.line < len(self._starts) else len(self.text)
        return self.problem(min(start + mark.column, len(self.text)), message, key)

    def twice(self, offset: int, path: Path, first: Mark) -> Problem:
        key = dotted(path)
        places = f"first at line {first.line}, column {first.column}"
        return self.problem(offset, f"the key {key} stands twice, {places}; keep one", key)


# ---- JSON ------------------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\\n\r]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n\r]*|\#[^\n\r]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_STRING})|(?<=[^\s\[{{,:])\s*,(?=\s*[\]}}])", re.DOTALL)
_TOKEN = re.compile(rf"{_STRING}|[{{}}\[\]:,]|[^\s{{}}\[\]:,\"]+")
_HINTS = {  # by json's own message
    "Expecting ',' delimiter": "a comma or a closing bracket is missing before this",
    "Expecting ':' delimiter": "a colon and a value are missing after the key",
    "Expecting property name enclosed in double quotes": 'a key in double quotes is expected here, such as "stage": 3',
    "Expecting value": "a value is missing, or it is text without double quotes, or a placeholder to be filled in",
    "Extra data": "the configuration ended before this; a file holds one",
    "Unterminated string starting at": "a string starts here and does not end",
    "Invalid control character at": "a string holds a tab or a line break; write \\t or \\n in it",
    "Invalid \\escape": "a backslash in a string starts an escape that JSON does not know; write \\\\ for a backslash",
}
_WORDS = {  # by what stands there
    "True": "True is Python's; JSON writes true",
    "False": "False is Python's; JSON writes false",
    "None": "None is Python's; JSON writes null",
    "'": "JSON knows only the straight double quotes",
    "/*": "a comment starts here and has no */",
}


def parse_json(text: str, name: str) -> Document:
    """Values of a JSON text whose top level is a mapping. Comments and trailing commas are accepted, with a notice.

    Raises:
        ConfigError: it is no JSON, or a key stands twice; with file, line and column.
    """
    where = Text(text, name)
    cleaned, notices = _without_extras(where)
    start = len(cleaned) - len(cleaned.lstrip())
    if start == len(cleaned):
        raise ConfigError(f"{name} is empty (or holds nothing but comments); write at least {{}}")
    try:
        values = json.loads(cleaned, object_pairs_hook=_Pairs, parse_int=_int)
    except json.JSONDecodeError as error:
        raise ConfigError([where.problem(error.pos, _json_error(error, cleaned))]) from None
    except RecursionError:
        raise too_deep(name) from None
    if not isinstance(values, _Pairs):
        kind = "list" if isinstance(values, list) else "single value"
        raise ConfigError([where.problem(start, f"the top level is a {kind}, not a mapping {{...}}")])
    document = Document({}, name=name, notices=notices)
    tokens = _TOKEN.finditer(cleaned)
    document.values = _placed(values, (), next(tokens), tokens, where, document)
    if document.problems:
        raise ConfigError(document.problems)
    return document


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of a mapping, also of keys that stand twice."""


def _int(digits: str) -> float:
    return int(digits) if len(digits) <= 400 else float("inf")  # which Python refuses to convert, or to print


def _json_error(error: json.JSONDecodeError, text: str) -> str:
    rest = text[error.pos :]
    if not rest.strip() and error.msg.startswith("Expecting"):
        return "not JSON: the text ends too early; a bracket has no partner"
    hint = next((hint for word, hint in _WORDS.items() if rest.startswith(word)), _HINTS.get(error.msg, error.msg))
    return f"not JSON: {hint}"


def _without_extras(where: Text) -> tuple[str, list[Notice]]:
    """The text with blanks for comments and trailing commas, which move nothing, and a notice about them."""
    extras: list[tuple[int, str]] = []

    def blank(what: str, found: re.Match[str]) -> str:
        if found[1] is not None:  # a string, which may hold what looks like a comment
            return found[0]
        extras.append((found.end() - len(found[0].lstrip()), what))
        return re.sub(r"[^\n\r]", " ", found[0])

    cleaned = _COMMENT.sub(functools.partial(blank, "a comment"), where.text)
    cleaned = _LAST_COMMA.sub(functools.partial(blank, "a comma before a closing bracket"), cleaned)
    if not extras:
        return cleaned, []
    first, what = min(extras)
    more = f" (and {len(extras) - 1} more places)" if len(extras) > 1 else ""
    text = f"{what} is not JSON{more}; it is read as DeepSpeed reads it"
    return cleaned, [Notice("file", "", text, where.mark(first))]


def _placed(
    value: Any, path: Path, token: re.Match[str], tokens: Iterator[re.Match[str]], where: Text, document: Document
) -> Any:
    """A value of ``json`` with mappings as dicts; notes the places of the keys and items in it.

    Args:
        token: the first of the value.
        tokens: all that follow, which json has accepted; those of the value are consumed.
    """
    if len(path) > DEEPEST:
        raise too_deep(where.name)
    if isinstance(value, _Pairs):
        made: dict[str, Any] = {}
        for key, item in value:
            at, here = next(tokens).start(), (*path, key)
            if key in made:
                document.problems.append(where.twice(at, here, document.marks[here]))
            document.marks.setdefault(here, where.mark(at))
            next(tokens)  # the colon
            made[key] = _placed(item, here, next(tokens), tokens, where, document)
            next(tokens)  # a comma, or the bracket at the end
        if not value:
            next(tokens)
        return made
    if isinstance(value, list):
        items = []
        for index, item in enumerate(value):
            first = next(tokens)
            document.marks[(*path, index)] = where.mark(first.start())
            items.append(_placed(item, (*path, index), first, tokens, where, document))
            next(tokens)
        if not value:
            next(tokens)
        return items
    if isinstance(value, float) and not math.isfinite(value):
        text = f"{token[0]:.30} is no finite number; leave the key out, or write one"
        document.problems.append(where.problem(token.start(), text, dotted(path)))
    return value


# ---- YAML ------------------------------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}


def parse_yaml(text: str, name: str) -> Document:
    """Values of a YAML text whose top level is a mapping, as OmegaConf reads them.

    Raises:
        ConfigError: it is not YAML, or YAML that a configuration has no use for; with file, line and column.
    """
    import yaml  # takes time, and most files are JSON

    from lt_zero.common.compat import yaml_loader

    where = Text(text, name)
    try:
        loader = yaml_loader(text)
        return _Walk(where, loader).document(loader.get_single_node())
    except yaml.YAMLError as error:
        raise ConfigError([_explained(where, error)]) from None
    except RecursionError:
        raise too_deep(name) from None
    except UnicodeError as error:  # half a surrogate pair
        raise ConfigError(f"{name}: {error}") from None


_YAML_HINTS = {
    "cannot start any token": "YAML indents with spaces, never with tabs, and text that starts with % @ ` needs quotes",
    "mapping values are not allowed": "look for a wrong indentation, or text with ': ' in it that needs quotes",
    "expected ',' or": "a comma is missing, or a bracket in the lines before, or ${...} in braces needs quotes",
    "undefined alias": "text that starts with * needs quotes",
    "expected <block end>": "look for a wrong indentation, or a missing : or quote, in this line and the one before",
    "could not find expected ':'": "look for a missing : or quote, in this line and the one before",
    "but found another document": "a second document starts here; a file holds one configuration",
}


def _explained(where: Text, error: Any) -> Problem:
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    hint = next((f"; {hint}" for part, hint in _YAML_HINTS.items() if part in said), "")
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return where.problem(getattr(error, "position", 0), f"not YAML: {said}{hint}")
    return where.problem_at(mark, f"not YAML: {said}{hint}")


class _Walk:
    """From nodes to values; errors are collected as far as the tree makes sense.

    Making the values here, instead of letting PyYAML construct objects, is what refuses tags of Python and keys that
    are not text, and what finds keys that stand twice.
    """

    def __init__(self, where: Text, loader: Any) -> None:
        self.where, self.loader = where, loader
        self.marks: dict[Path, Mark] = {}
        self.problems: list[Problem] = []
        self.merged: dict[int, dict[str, tuple[Any, Any]]] = {}  # by the id of the node

    def document(self, node: Any) -> Document:
        if node is None or (node.tag == f"{_TAG}null" and node.value == ""):
            raise ConfigError(f"{self.where.name} is empty (or holds nothing but comments); write at least {{}}")
        if node.id != "mapping":
            what = "list" if node.id == "sequence" else "single value"
            self.complain(node, f"the top level is a {what}, not a mapping (key: value)")
        values = self.value(node, ()) if not self.problems else {}
        if self.problems:
            raise ConfigError(self.problems)
        return Document(values, self.marks, self.where.name)

    def complain(self, node: Any, message: str, path: Path = ()) -> None:
        self.problems.append(self.where.problem_at(node.start_mark, message, dotted(path)))

    def mark(self, node: Any) -> Mark:
        return Mark(self.where.name, node.start_mark.line + 1, node.start_mark.column + 1)

    def value(self, node: Any, path: Path) -> Any:
        if len(self.marks) > _MOST_VALUES:
            text = f"{self.where.name} has more than {_MOST_VALUES:,} values (aliases counted as often as used)"
            raise ConfigError(text)
        if len(path) > DEEPEST:
            raise too_deep(self.where.name)
        if node.id == "scalar":
            return self.scalar(node, path)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self.complain(node, f"{_text(path)} has the tag {_shown(node.tag)}; write it without a tag", path)
            return None
        if node.id == "sequence":
            for index, item in enumerate(node.value):
                self.marks[(*path, index)] = self.mark(item)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        values = {}
        for name, (key, item) in self.pairs(node, path).items():
            self.marks[(*path, name)] = self.mark(key)
            values[name] = self.value(item, (*path, name))
        return values

    def scalar(self, node: Any, path: Path) -> Any:
        if node.tag not in _SCALARS:
            plain = node.tag in (f"{_TAG}merge", f"{_TAG}value")
            remedy = "needs quotes" if plain else f"has the tag {_shown(node.tag)}; write it without a tag"
            self.complain(node, f"{_text(path)} {remedy}", path)
            return None
        try:
            value = self.loader.construct_object(node)
            if isinstance(value, int) and value.bit_length() > 1400:  # Python refuses to print longer ones
                raise OverflowError
        except (ValueError, KeyError, OverflowError):  # as 0b_, which looks like a number; !!bool maybe
            kind = node.tag.removeprefix(_TAG)
            self.complain(node, f"{_text(path)} cannot be read as {kind}; text needs quotes", path)
            return None
        return value

    def pairs(self, node: Any, path: Path) -> dict[str, tuple[Any, Any]]:
        """Keys of a mapping with their nodes; those that ``<<`` merges first, so that its own replace them."""
        if id(node) in self.merged:
            return self.merged[id(node)]
        merged: dict[str, tuple[Any, Any]] = {}
        own: dict[str, tuple[Any, Any]] = {}
        for key, item in node.value:
            if key.tag == f"{_TAG}merge":
                for base in item.value if item.id == "sequence" else [item]:
                    if base.id == "mapping":
                        for name, pair in self.pairs(base, path).items():
                            merged.setdefault(name, pair)
                    else:
                        self.complain(base, f"<< in {_text(path)} merges mappings only, like <<: *name", path)
            elif key.id != "scalar" or key.tag != f"{_TAG}str":
                what = repr(key.value) if key.id == "scalar" else f"a {key.id}"
                kind = f" (YAML reads it as {key.tag.removeprefix(_TAG)})" if key.id == "scalar" else ""
                self.complain(key, f"the key {what}{kind} is not text; write it in quotes", path)
            elif key.value in own:
                first = self.mark(own[key.value][0])
                self.problems.append(self.where.twice(key.start_mark.index, (*path, key.value), first))
            else:
                own[key.value] = (key, item)
        return self.merged.setdefault(id(node), {**merged, **own})


def _text(path: Path) -> str:
    return dotted(path) or "the top level"


def _shown(tag: str) -> str:
    return tag.replace(_TAG, "!!")
