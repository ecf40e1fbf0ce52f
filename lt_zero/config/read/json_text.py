"""JSON text: its values, the places of its keys, and in plain words what is wrong with it.

One scan finds the tokens; what DeepSpeed's reader (HJSON) accepts beyond JSON and nobody can misread, comments and
trailing commas, is blanked without moving a character; the standard library reads the rest strictly. So numbers and
strings are exactly json's, and every offset is one in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted
from lt_zero.config.read.source import DEEPEST, MOST_VALUES, Budget, Source, Text, names_secret

_MOST_PROBLEMS = 20
_TOKEN = re.compile(
    r"""(?P<space>[ \t\n\r]+)
      | (?P<string>"[^"\\\n\r]*(?:\\[^\n\r][^"\\\n\r]*)*")
      | (?P<comment>//[^\n\r]*|\#[^\n\r]*|/\*.*?\*/)
      | (?P<hole><[^<>"\n\r]*>|\$\{[^{}"\n\r]*\}|\{\{[^{}"\n\r]*\}\}|[A-Z][A-Z_]+(?:\ [A-Z][A-Z_]+)+)
      | (?P<sign>[{}\[\],:])
      | (?P<open>"|/\*)
      | (?P<word>[^\s{}\[\],:"\#]+?(?=//|/\*|[\s{}\[\],:"\#]|\Z)|.)""",
    re.VERBOSE | re.DOTALL,
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"{": "}", "[": "]"}


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


def parse(text: str, name: str) -> Source:
    """Values of a JSON text whose top level is a mapping.

    Raises:
        ConfigError: it is no JSON even without comments and trailing commas, with file, line, column and hint; a key
            stands twice; it is nested too deeply.
    """
    where = Text(text, name)
    tokens = _scan(where)
    kept = [token for token in tokens if token.kind != "comment"]
    if not kept:
        raise ConfigError(f"{name} is empty (or holds nothing but comments); write at least {{}}")
    cleaned, notices = _blank(where, tokens)
    values = _strict(where, cleaned, kept)
    if not isinstance(values, dict):
        raise ConfigError([where.problem(kept[0].start, f"the top level is a {_kind(values)}, not a mapping {{...}}")])
    return Source(values, _places(where, kept), name, notices)


def _kind(value: Any) -> str:
    names = {list: "list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")


def _scan(where: Text) -> list[_Token]:
    """Everything but white space."""
    tokens: list[_Token] = []
    budget, depth, position = Budget(where.name), 0, 0
    while found := _TOKEN.match(where.text, position):
        kind, start, position = str(found.lastgroup), found.start(), found.end()
        kind = "word" if kind == "hole" else kind  # one, also with spaces and brackets in it
        if kind == "space":
            continue
        text = found.group()
        if kind == "open":  # what follows cannot be told apart from the inside
            what = "a comment starts here and has no */" if text == "/*" else _unclosed(where.text, start)
            before = [entry.problem for entry in _wrong_words(where, tokens)]
            raise ConfigError([*before, where.problem(start, what)])
        depth += (text in _CLOSES) - (text in _CLOSES.values()) if kind == "sign" else 0
        if kind in ("string", "word") or text in _CLOSES:
            budget.take(depth, where.mark(start) if depth > DEEPEST else None)
        tokens.append(_Token(kind, text, start))
        if len(tokens) > 4 * MOST_VALUES:
            raise ConfigError(f"{where.name} is no configuration: it has more than {4 * MOST_VALUES:,} words and signs")
    return tokens


def _unclosed(text: str, start: int) -> str:
    line = re.split(r"[\n\r]", text[start:], maxsplit=1)[0]
    if line.endswith("\\"):
        return "a string goes on in the next line; write it in one line, with \\n for a line break"
    return 'a string starts with this " and does not end in this line'


def _blank(where: Text, tokens: Sequence[_Token]) -> tuple[str, list[str]]:
    """The text without comments and trailing commas, at unchanged offsets, and the one notice about them."""
    kept = [token for token in tokens if token.kind != "comment"]
    extra = [("a comment", token) for token in tokens if token.kind == "comment"]
    for before, comma, after in zip(kept, kept[1:], kept[2:], strict=False):
        if comma.text == "," and after.text in ("}", "]") and before.text not in ("{", "[", ",", ":"):
            extra.append((f"a comma before {after.text}", comma))
    if not extra:
        return where.text, []
    extra.sort(key=lambda entry: entry[1].start)
    pieces, position = [], 0
    for _, token in extra:
        end = token.start + len(token.text)
        pieces += [where.text[position : token.start], re.sub(r"[^\n\r]", " ", token.text)]
        position = end
    what, first = extra[0]
    more = f" (and {len(extra) - 1} more places)" if len(extra) > 1 else ""
    notice = f"{where.mark(first.start)}: {what} is not JSON{more}; it is read as DeepSpeed reads it"
    return "".join([*pieces, where.text[position:]]), [notice]


class _Wrong(NamedTuple):
    token: _Token
    is_key: bool
    problem: Problem


def _wrong_words(where: Text, tokens: Sequence[_Token]) -> list[_Wrong]:
    """Words that are no JSON value.

    DeepSpeed's reader takes them for text up to the end of the line, the comma included: ``"enabled": True,`` becomes
    the text ``True,`` and whatever tests it finds it true, ``False,`` too. Here they are errors.
    """
    wrong: list[_Wrong] = []
    significant = [token for token in tokens if token.kind != "comment"]
    for i, token in enumerate(significant):
        if token.kind != "word" or token.text in ("true", "false", "null"):
            continue
        is_key = significant[i + 1 : i + 2] != [] and significant[i + 1].text == ":"
        word = "this" if names_secret(where.line(token.start)) else token.text
        hint = _number_hint(token.text) if _NUMBER.fullmatch(token.text) else _word_hint(token.text, word, is_key)
        if hint:
            wrong.append(_Wrong(token, is_key, where.problem(token.start, hint)))
        if len(wrong) == _MOST_PROBLEMS:
            break
    return wrong


def _number_hint(text: str) -> str:
    if len(text) > 400 or abs(float(text)) == float("inf"):
        return f"the number {text[:30]}{'...' if len(text) > 30 else ''} is too large"
    return ""


def _word_hint(word: str, shown: str, is_key: bool) -> str:
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if word in _PYTHON:
        return f"{word} is Python's; JSON writes {_PYTHON[word]}"
    if word.startswith("```"):
        return "``` is a Markdown fence, not JSON; delete it, and what stands outside of it"
    if word[0] == "=":
        return 'JSON writes : between a key and its value, and the key in quotes: "key": value'
    if word[0] in "'\u2018\u2019\u201c\u201d\u00ab\u00bb":
        return f'{shown}: JSON knows only the straight double quotes "'
    if word.isspace() or not word.isprintable():
        return f"the character U+{ord(word[0]):04X} is not white space of JSON; type a plain space instead"
    if re.fullmatch(r"[-+]?(nan|inf|infinity|\.nan|\.inf)", word, re.IGNORECASE):
        return f"{shown} is no JSON number; leave the key out, or write a finite number"
    if re.fullmatch(r"[-+.]?[0-9][0-9a-fA-FxX_.eE+-]*", word):
        return f"{shown} is no JSON number; JSON writes 5e8, 0.5, -1, 500000000: no +, no _, no leading 0, no bare dot"
    if is_key:
        return f'the key {shown} needs double quotes: "{shown}"'
    if re.fullmatch(r"[A-Z][A-Z0-9_ ]+|\$.*|<.*|\{\{.*|%.*%|@.*@|_[A-Z0-9_]+", word):
        return f"{shown} is a placeholder that was never filled in; write the value, text in double quotes"
    return f'{shown} is no JSON value; text needs double quotes: "{shown}"'


def _strict(where: Text, cleaned: str, tokens: Sequence[_Token]) -> Any:
    """What json reads, or everything that keeps it from reading."""
    wrong = _wrong_words(where, tokens)
    cleaned = _with_stand_ins(cleaned, wrong)  # so that json finds what else is wrong
    problems = {entry.token.start: entry.problem for entry in wrong}
    while len(problems) < _MOST_PROBLEMS:
        try:
            values = json.loads(cleaned)
            break
        except json.JSONDecodeError as error:
            message, gap = _explained(where, error, tokens), error.pos - 1
            problems.setdefault(error.pos, where.problem(error.pos, message))
            if "comma is missing" not in message or gap < 0 or not cleaned[gap].isspace():
                break
            cleaned = f"{cleaned[:gap]},{cleaned[gap + 1 :]}"  # and go on: there may be more
    if problems:
        raise ConfigError([problems[start] for start in sorted(problems)])
    return values


def _with_stand_ins(cleaned: str, wrong: Sequence[_Wrong]) -> str:
    """``cleaned`` with something acceptable of equal length for each wrong word."""
    pieces, position = [], 0
    for word, is_key, _ in wrong:
        if word.text.startswith("```") or word.text.isspace():
            stand_in = ""
        else:
            stand_in = f'"{"x" * (len(word.text) - 2)}"' if is_key and len(word.text) > 1 else "0"
        pieces += [cleaned[position : word.start], stand_in.ljust(len(word.text))]
        position = word.start + len(word.text)
    return "".join([*pieces, cleaned[position:]])


def _explained(where: Text, error: json.JSONDecodeError, tokens: Sequence[_Token]) -> str:
    here = next((token.text for token in tokens if token.start >= error.pos), "")
    if not here and error.msg.startswith("Expecting"):
        return f"the text ends too early{_still_open(where, tokens)}"
    if error.msg == "Extra data":
        return {
            "{": "a second document starts here; a file holds one configuration",
            "}": "there is one } too many",
            "]": "there is one ] too many",
        }.get(here, "there is text after the last }")
    if error.msg.startswith("Expecting ',' delimiter"):
        if here in ("}", "]", ":"):
            return f"{here} does not fit here{_still_open(where, tokens, error.pos)}"
        return "a comma is missing before this"
    if error.msg.startswith("Invalid control character"):
        return "a string holds a tab or another control character; write \\t in it"
    if error.msg.startswith("Invalid \\"):
        return "a backslash in a string starts an escape that JSON does not know; write \\\\ for a backslash"
    if error.msg.startswith("Expecting property name"):
        return f'a key in double quotes is expected here, not {here}; like "stage": 3'
    if error.msg.startswith("Expecting ':'"):
        return f"a colon and a value are missing after the key, before {here}"
    if error.msg.startswith("Expecting value"):
        return f"a value is missing before {here}"
    return error.msg


def _still_open(where: Text, tokens: Sequence[_Token], before: int | None = None) -> str:
    """Which bracket waits for its partner."""
    opened: list[_Token] = []
    for token in tokens:
        if before is not None and token.start >= before:
            break
        if token.kind == "sign" and token.text in _CLOSES:
            opened.append(token)
        elif opened and token.text == _CLOSES[opened[-1].text]:
            opened.pop()
    if not opened:
        return ""
    mark = where.mark(opened[-1].start)
    return f": the {opened[-1].text} of line {mark.line}, column {mark.column} has no {_CLOSES[opened[-1].text]}"


def _places(where: Text, tokens: Sequence[_Token]) -> dict[Path, Mark]:
    """Marks of keys and items of what json has accepted.

    Raises:
        ConfigError: keys that stand twice in a mapping.
    """
    marks: dict[Path, Mark] = {}
    twice: list[Problem] = []
    here: list[str | int] = []  # path of the value that comes next; its last part is the key or index
    inside: list[str] = []  # { or [ of each part
    after = ""
    for i, token in enumerate(tokens):
        is_key = token.kind == "string" and i + 1 < len(tokens) and tokens[i + 1].text == ":"
        if (after == "[" or (after == "," and inside[-1] == "[")) and token.text != "]":
            here[-1] = int(here[-1]) + 1
            marks[tuple(here)] = where.mark(token.start)
        if is_key:
            here[-1] = str(json.loads(token.text))
            path = tuple(here)
            mark = where.mark(token.start)
            if path in marks:
                message = f"the key {dotted(path)} stands twice, first at line {{}}, column {{}}; keep one"
                first = marks[path]
                twice.append(where.problem(token.start, message.format(first.line, first.column), dotted(path)))
            marks.setdefault(path, mark)
        elif token.kind == "sign" and token.text in _CLOSES:
            inside.append(token.text)
            here.append(-1 if token.text == "[" else "")
        elif token.kind == "sign" and token.text in ("}", "]"):
            inside.pop()
            here.pop()
        after = token.text if token.kind == "sign" else ""
    if twice:
        raise ConfigError(twice)
    return marks
