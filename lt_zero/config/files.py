"""The text of configuration files, JSON and YAML, as documents.

The line and column of each key are kept, and errors show the place and the remedy.
"""

from __future__ import annotations

import base64
import bisect
import codecs
import difflib
import functools
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

from lt_zero.common.errors import ConfigError, Mark, Path, dotted
from lt_zero.config.document import DEEPEST, MOST_VALUES, Document, Notice, names_secret, too_deep, too_many

_MOST_BYTES = 1 << 17  # of a file; real ones have a few thousand, and YAML takes a millisecond for ten
_LONGEST_LINE = 10_000  # characters of a line that a message shows a part of
_LONGEST_NUMBER = 400  # characters of a number; Python takes long to convert longer ones, and refuses to print them
_MOST_NAMES = 1000  # of files that are looked at for a suggestion


_BYTE_ORDER_MARKS = {  # Windows PowerShell's > writes UTF-16
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def parsed(source: str | os.PathLike[str]) -> Document:
    """The values of a file of any program. Raises as ``read`` for a path."""
    given = os.fsdecode(source)
    _refuse_text(given)
    try:
        path = File(given).expanduser()
    except RuntimeError:
        raise ConfigError(f"{given}: there is no such user; write the folder out") from None
    content = _content(path, given)
    mark = next((mark for mark in _BYTE_ORDER_MARKS if content.startswith(mark)), b"")
    content = content[len(mark) :]
    try:
        text = content.decode(_BYTE_ORDER_MARKS.get(mark, "utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{given}, line {line}: it is not text in UTF-8 ({error.reason}); save it as UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{given} is not text: it holds zero bytes; is it the right file?")
    if not text.strip():
        raise ConfigError(f"{given} is empty; write at least {{}}")
    looks_like_json = re.match(r"(?:\s*#[^\r\n]*[\r\n])*\s*(?:[{\[]|//|/\*|```)", text) is not None
    parse = _SUFFIXES.get(path.suffix.lower()) or (parse_json if looks_like_json else parse_yaml)
    if parse is parse_json and path.suffix and not looks_like_json:
        raise ConfigError(
            f"{given} does not start with {{, as JSON does. If it is HJSON without the outer braces, which DeepSpeed "
            "reads, put { before and } after it, keys and text in double quotes, and a comma after each value; if it "
            f"is YAML, name it {path.stem}.yaml"
        )
    return parse(text, given)


def _refuse_text(given: str) -> None:
    """Raise an error for text that is no path: "file not found" would mislead, and quote the whole text."""
    if not given.strip():
        raise ConfigError("the path of the configuration is empty; leave it out, or name a file")
    if "\0" in given or "\n" in given:
        raise ConfigError("the configuration is text of several lines; save it as a file, or pass a mapping")
    if "://" in given:
        shown = re.sub(r"//[^/@]*@", "//", given)  # without user and password
        raise ConfigError(f"{shown}: configurations are read from local files only; download it first")
    text = given.strip().replace("+", "-").replace("/", "_")
    is_base64 = re.fullmatch(r"(?:[\w-]{4}){2,}[\w-]*={0,2}", text, re.ASCII) and not os.path.exists(given)
    if is_base64 and base64.urlsafe_b64decode(text[:8]).lstrip()[:1] in (b"{", b"["):
        what = "the configuration is base64 text, which cannot be reviewed"
        remedy = "decode it to a file: base64 -d text > ds_config.json (- and _ in it stand for + and /)"
        raise ConfigError(f"{what}; {remedy}, and pass its path")


def _content(path: File, given: str) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            names = sorted(entry.name for entry in path.iterdir() if entry.suffix in _SUFFIXES)[:5]
            held = f"; it holds {', '.join(names)}" if names else ""
            raise ConfigError(f"{given} is a folder; name the file in it{held}")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{given} is no regular file (a pipe or a device); save the configuration as a file")
        return _bytes(path, given)
    except FileNotFoundError:
        try:
            names = [entry.name for entry in itertools.islice(path.parent.iterdir(), _MOST_NAMES) if entry.is_file()]
        except OSError:
            raise ConfigError(f"there is no file {given}; there is no folder {path.parent} either") from None
    except OSError as error:
        raise ConfigError(f"{given:.200} cannot be read: {error.strerror or error}") from None
    near = f" in {path.parent.absolute()}"
    if close := difflib.get_close_matches(path.name, names, 1, 0.5):
        near = f"; did you mean {path.parent / close[0]}?"
    elif configs := sorted(name for name in names if File(name).suffix in _SUFFIXES)[:5]:
        near = f"; {path.parent.absolute()} holds {', '.join(configs)}"
    raise ConfigError(f"there is no file {given}{near}")


def _bytes(path: File, given: str) -> bytes:
    """The content of a regular file, without ever waiting for it: files without a size, as in /proc, are not read."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_size == 0:
            return b""
        content = file.read(_MOST_BYTES + 1) if state.st_size <= _MOST_BYTES else b""
    if state.st_size > _MOST_BYTES or len(content) > _MOST_BYTES:
        text = (
            f"{given} has {state.st_size:,} bytes, and a configuration at most {_MOST_BYTES:,}; is it the right file?"
        )
        raise ConfigError(text)
    return content


class _Text:
    """Text of a file, and the document that is read from it."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.document = Document({}, name=name)
        self.has_secret = names_secret(text)
        self._starts = [0, *(found.end() for found in re.finditer(r"\r\n|\n|\r", text))]

    def mark(self, offset: int) -> Mark:
        row = bisect.bisect_right(self._starts, offset) - 1
        return Mark(self.name, row + 1, offset - self._starts[row] + 1)

    def problem(self, offset: int, message: str, path: Path = ()) -> None:
        """A message with the place and the text of its line, which may be a part of a secret if the file has one."""
        row = bisect.bisect_right(self._starts, offset)
        line = self.text[self._starts[row - 1] : self._starts[row] if row < len(self._starts) else None]
        column = offset - self._starts[row - 1]
        too_long = len(line) > _LONGEST_LINE
        if not too_long and not self.has_secret and (shown := line[max(0, column - 60) : column + 60].strip()):
            message += f"\n    {shown}"
        self.document.problem(path, message, self.mark(offset))

    def twice(self, offset: int, path: Path, first: Mark) -> None:
        places = f"first at line {first.line}, column {first.column}"
        self.problem(offset, f"the key {dotted(path)} stands twice, {places}; keep one", path)

    def enter(self, path: Path) -> None:
        if len(path) > DEEPEST:
            raise too_deep(self.name)
        if len(self.document.marks) > MOST_VALUES:
            raise too_many(self.name, "aliases")


# ---- JSON ------------------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\\n\r]|\\.)*"'
# Strings and comments without an end are found, too, so that what is in them is not searched again from each character.
_COMMENT = re.compile(rf"({_STRING}?|/\*(?!.*?\*/).*)|//[^\n\r]*|\#[^\n\r]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_STRING}?)|(?<=[^\s\[{{,:])\s*,(?=\s*[\]}}])", re.DOTALL)
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


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of a mapping, also of keys that stand twice."""


def _int(digits: str) -> float:
    return int(digits) if len(digits) <= _LONGEST_NUMBER else math.inf


def parse_json(text: str, name: str) -> Document:
    """Values of a JSON text whose top level is a mapping. Comments and trailing commas are accepted, with a notice.

    Raises:
        ConfigError: it is no JSON, or a key stands twice; with file, line and column.
    """
    where = _Text(text, name)
    cleaned = _without_extras(where)
    start = len(cleaned) - len(cleaned.lstrip())
    if start == len(cleaned):
        raise ConfigError(f"{name} is empty (or holds nothing but comments); write at least {{}}")
    try:
        values = json.loads(cleaned, object_pairs_hook=_Pairs, parse_int=_int)
        if isinstance(values, _Pairs):
            tokens = _TOKEN.finditer(cleaned)
            where.document.values = _placed(values, (), next(tokens), tokens, where)
        else:
            kind = "list" if isinstance(values, list) else "single value"
            where.problem(start, f"the top level is a {kind}, not a mapping {{...}}")
    except json.JSONDecodeError as error:
        rest = cleaned[error.pos :]
        hint = next((hint for word, hint in _WORDS.items() if rest.startswith(word)), _HINTS.get(error.msg, error.msg))
        if not rest.strip() and error.msg.startswith("Expecting"):
            hint = "the text ends too early; a bracket has no partner"
        where.problem(error.pos, f"not JSON: {hint}")
    except RecursionError:
        raise too_deep(name) from None
    return where.document.check()


def _without_extras(where: _Text) -> str:
    """The text with blanks for comments and trailing commas, which move nothing; a notice tells about them."""
    extras: list[tuple[int, str]] = []

    def blank(what: str, found: re.Match[str]) -> str:
        if found[1] is not None:  # a string, which may hold what looks like a comment
            return found[0]
        extras.append((found.end() - len(found[0].lstrip()), what))
        return re.sub(r"[^\n\r]", " ", found[0])

    cleaned = _COMMENT.sub(functools.partial(blank, "a comment"), where.text)
    cleaned = _LAST_COMMA.sub(functools.partial(blank, "a comma before a closing bracket"), cleaned)
    if extras:
        first, what = min(extras)
        more = f" (and {len(extras) - 1} more places)" if len(extras) > 1 else ""
        text = f"{what} is not JSON{more}; it is read as DeepSpeed reads it"
        where.document.notices.append(Notice("", text, where.mark(first), "file"))
    return cleaned


def _placed(value: Any, path: Path, token: re.Match[str], tokens: Iterator[re.Match[str]], where: _Text) -> Any:
    """A value of ``json``, which begins at ``token``, with mappings as dicts; notes the places of keys and items in it.

    Consumes the ``tokens`` of the value, which json has accepted.
    """
    where.enter(path)
    marks = where.document.marks
    if isinstance(value, list):
        is_mapping, made = isinstance(value, _Pairs), {}
        for key, item in value if is_mapping else enumerate(value):
            here, first = (*path, key), next(tokens)
            if key in made:
                where.twice(first.start(), here, marks[here])
            marks.setdefault(here, where.mark(first.start()))
            if is_mapping:
                next(tokens)  # the colon
                first = next(tokens)
            made[key] = _placed(item, here, first, tokens, where)
            next(tokens)  # a comma, or the bracket at the end
        if not value:
            next(tokens)
        return made if is_mapping else list(made.values())
    if isinstance(value, float) and not math.isfinite(value):
        where.problem(token.start(), f"{token[0]:.30} is no finite number; leave the key out, or write one", path)
    return value


# ---- YAML ------------------------------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}
_YAML_HINTS = {
    "cannot start any token": "YAML indents with spaces, never with tabs, and text that starts with % @ ` needs quotes",
    "mapping values are not allowed": "look for a wrong indentation, or text with ': ' in it that needs quotes",
    "expected ',' or": "a comma is missing, or a bracket in the lines before, or ${...} in braces needs quotes",
    "undefined alias": "text that starts with * needs quotes",
    "expected <block end>": "look for a wrong indentation, or a missing : or quote, in this line and the one before",
    "could not find expected ':'": "look for a missing : or quote, in this line and the one before",
    "but found another document": "a second document starts here; a file holds one configuration",
}


def parse_yaml(text: str, name: str) -> Document:
    """Values of a YAML text whose top level is a mapping, as OmegaConf reads them.

    Raises:
        ConfigError: it is not YAML, or YAML that a configuration has no use for; with file, line and column.
    """
    import yaml  # takes time, and most files are JSON

    from lt_zero.common.compat.of_hydra import yaml_loader

    where = _Text(text, name)
    try:
        loader = yaml_loader(text)
        node = loader.get_single_node()
        if node is None or (node.tag == f"{_TAG}null" and node.value == ""):
            raise ConfigError(f"{name} is empty (or holds nothing but comments); write at least {{}}")
        if node.id == "mapping":
            where.document.values = _Nodes(where, loader).value(node, ())
        else:
            what = "list" if node.id == "sequence" else "single value"
            where.problem(node.start_mark.index, f"the top level is a {what}, not a mapping (key: value)")
    except yaml.YAMLError as error:
        said = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        hint = next((f"; {hint}" for part, hint in _YAML_HINTS.items() if part in said), "")
        if where.has_secret:  # as in "undefined alias '...'"
            said = re.sub(r"'[^']{4,}'|\"[^\"]{4,}\"", "'***'", said)
        mark = getattr(error, "problem_mark", None)
        where.problem(getattr(error, "position", 0) if mark is None else mark.index, f"not YAML: {said}{hint}")
    except RecursionError:
        raise too_deep(name) from None
    except UnicodeError as error:  # half a surrogate pair
        raise ConfigError(f"{name}: {error}") from None
    return where.document.check()


class _Nodes:
    """Conversion of PyYAML's nodes to values; errors are collected as far as the tree makes sense.

    Making the values here, instead of letting PyYAML construct objects, is what refuses tags of Python and keys that
    are not text, and what finds keys that stand twice.
    """

    def __init__(self, where: _Text, loader: Any) -> None:
        self.where, self.loader = where, loader
        self.merged: dict[int, dict[str, tuple[Any, Any]]] = {}  # by the id of the node

    def value(self, node: Any, path: Path) -> Any:
        self.where.enter(path)
        place = dotted(path) or "the top level"
        if node.tag not in (_SCALARS if node.id == "scalar" else (f"{_TAG}map", f"{_TAG}seq")):
            is_plain = node.id == "scalar" and node.tag in (f"{_TAG}merge", f"{_TAG}value")
            tag = node.tag.replace(_TAG, "!!")
            remedy = "needs quotes" if is_plain else f"has the tag {tag}; write it without a tag"
            remedy = "needs quotes" if self.where.has_secret else remedy  # a tag may be the secret
            self.where.problem(node.start_mark.index, f"{place} {remedy}", path)
            return None
        if node.id == "scalar":
            try:
                if node.tag != f"{_TAG}str" and len(node.value) > _LONGEST_NUMBER:
                    raise OverflowError
                return self.loader.construct_object(node)
            except (ValueError, KeyError, OverflowError):  # as 0b_, which looks like a number; !!bool maybe
                text = f"{place} cannot be read as {node.tag.removeprefix(_TAG)}; text needs quotes"
                self.where.problem(node.start_mark.index, text, path)
                return None
        if node.id == "sequence":
            pairs = {index: (item, item) for index, item in enumerate(node.value)}
        else:
            pairs = self.pairs(node, path)
        for key, (place_of, _) in pairs.items():
            self.where.document.marks[(*path, key)] = self.where.mark(place_of.start_mark.index)
        values = {key: self.value(item, (*path, key)) for key, (_, item) in pairs.items()}
        return values if node.id == "mapping" else list(values.values())

    def pairs(self, node: Any, path: Path) -> dict[Any, tuple[Any, Any]]:
        """Keys of a mapping with their nodes; those that ``<<`` merges first, so that its own replace them."""
        if id(node) in self.merged:
            return self.merged[id(node)]
        merged: dict[str, tuple[Any, Any]] = {}
        own: dict[str, tuple[Any, Any]] = {}
        for key, item in node.value:
            if key.tag == f"{_TAG}merge":
                for base in item.value if item.id == "sequence" else [item]:
                    if base.id == "mapping":
                        merged |= {**self.pairs(base, path), **merged}  # the first base wins
                    else:
                        text = f"<< in {dotted(path) or 'the top level'} merges mappings only, like <<: *name"
                        self.where.problem(base.start_mark.index, text, path)
            elif key.id != "scalar" or key.tag != f"{_TAG}str":
                what = f"a {key.id}"
                if key.id == "scalar":
                    what = f"{key.value!r} (YAML reads it as {key.tag.removeprefix(_TAG)})"
                self.where.problem(key.start_mark.index, f"the key {what} is not text; write it in quotes", path)
            elif key.value in own:
                first = self.where.mark(own[key.value][0].start_mark.index)
                self.where.twice(key.start_mark.index, (*path, key.value), first)
            else:
                own[key.value] = (key, item)
        return self.merged.setdefault(id(node), {**merged, **own})


_SUFFIXES = {
    **dict.fromkeys((".json", ".jsonc", ".hjson"), parse_json),
    **dict.fromkeys((".yaml", ".yml"), parse_yaml),
}
