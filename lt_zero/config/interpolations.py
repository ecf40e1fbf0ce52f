"""``${...}`` in the values of a configuration: keys, environment variables and whatever else OmegaConf resolves.

Note [Each text once]
    OmegaConf resolves what a text names, and what that names, anew for each use: forty texts that each name the one
    before twice would be resolved 2 ** 40 times. So a text is resolved when all that it names is resolved, and its
    value takes its place. Meanwhile a text that is not resolved yet holds ``_NOT_YET``, whose error tells that another
    text comes first. What the others may name is read off their words; only names that are put together from values
    need several rounds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from itertools import accumulate, combinations
from typing import Any

from lt_zero.common.errors import ConfigError, Path, dotted
from lt_zero.config.document import (
    DEEPEST,
    HIDDEN,
    LONGEST_TEXT,
    MOST_VALUES,
    Document,
    leaves,
    literal,
    mapped,
    masking,
    too_many,
)

_ENVIRONMENT = re.compile(r"\$\{\s*(?:\w+\.)*env\s*:")
_COMPOSED = re.compile(r"\$\{[^}]*\$\{")  # a name that is put together from values
_NAME = re.compile(r"[\w.\-\[\]]+")
_PLAIN = (str, int, float, bool, type(None))
_NOT_YET = "${lt_zero_resolves_this_later:}"
_ROUNDS = 10  # names that depend on values that depend on values
_MOST = 1000  # interpolations in a configuration, of which real ones have ten
_MOST_TEXT = 10_000_000  # characters that one text, or all, may become


class _Box:
    """Hides an object from OmegaConf, which would refuse a torch.dtype, and take a dataclass apart."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)


def resolve(document: Document) -> Document:
    """Replace ``${oc.env:NAME}``, ``${oc.env:NAME,default}``, ``${key.other}`` and whatever else OmegaConf resolves.

    Values from environment variables, directly or not, are noted as secret. They are text, as in OmegaConf: "1e-4"
    becomes a number by ``${oc.decode:${oc.env:NAME}}``, or where the schema wants one.

    Raises:
        ConfigError: all variables and keys that are missing, circles, unknown resolvers, values ``???``, and texts that
            are too long, or become so.
    """
    if not (texts := document.interpolations()):
        return document
    from lt_zero.common.compat.of_hydra import environment_read

    document = document.copy()
    _check(document, texts)
    with environment_read() as values:
        try:
            _Texts(document, texts, values).resolve()
            document.check()
        except ConfigError as error:
            document.read |= values
            raise error.masked(masking(document)) from None
    document.read |= values
    document.secret = _hidden(texts, document.secret, bool(values))
    return document


def _check(document: Document, texts: dict[Path, str]) -> None:
    """Raise for all texts that no interpolation can be read from, before any is resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if (count := sum(text.count("${") for text in texts.values())) > _MOST:
        raise ConfigError(
            f"{document.name} has {count:,} interpolations ${{...}}, and may have {_MOST:,}; write values"
        )
    for path, text in texts.items():
        if text == "???":
            document.problem(path, f"{dotted(path)} is ???, a value that is to be given; set it, or delete the key")
            continue
        if len(text) > LONGEST_TEXT or _depth(text) > DEEPEST:
            shown = f"{dotted(path)}: {text[:60]!r}... is too long for an interpolation, or its brackets are too deep"
            document.problem(path, f"{shown}; write it as several keys, of {LONGEST_TEXT:,} characters at most")
            continue
        try:
            OmegaConf.create([text])
        except (OmegaConfBaseException, RecursionError) as error:
            said = f"{dotted(path)}: {text!r} is no interpolation ({_said(error)})"
            document.problem(path, f"{said}; write ${{key.other}} or ${{oc.env:NAME}}")
    document.check()


def _depth(text: str) -> int:
    """Depth of nested brackets; those in quotes count, too."""
    depth = most = 0
    for bracket in re.findall(r"[\[\]{}()]", text):
        depth = depth + 1 if bracket in "[{(" else max(0, depth - 1)
        most = max(most, depth)
    return most


class _Texts:
    """The texts of a document that are not resolved yet. See Note [Each text once]."""

    def __init__(self, document: Document, texts: dict[Path, str], values: Set[str]) -> None:
        """``values`` has what was read from the environment so far."""
        from omegaconf import OmegaConf

        self._document = document
        self._texts = texts
        self._values = values
        self._hidden = _hidden(texts, document.secret, True)
        boxed = mapped(document.values, lambda leaf: leaf if type(leaf) in _PLAIN else _Box(leaf))
        self._config: Any = OmegaConf.create(boxed, flags={"allow_objects": True})
        for path in texts:
            self._put(path, _NOT_YET)
        found = [leaf for _, leaf in leaves(document.values)]
        self._count, self._size = len(found), sum(map(_size, found))  # of values, and characters of all

    def resolve(self) -> None:
        """Put the values of all texts into the document; a text without a value becomes a problem."""
        from omegaconf.errors import OmegaConfBaseException

        left = _ordered(self._texts)
        waiting = list[Path]()
        before = len(self._document.problems)
        for _ in range(_ROUNDS):
            waiting = []
            for path in left:
                try:
                    self._store(path, self._value(path))
                except (OmegaConfBaseException, RecursionError) as error:
                    if "lt_zero_resolves_this_later" in str(error):
                        waiting.append(path)
                        self._put(path, _NOT_YET)
                        continue
                    text = self._texts[path]
                    shown = f"{dotted(path)}: {text} cannot be resolved: {self._explained(path, error)}"
                    self._document.problem(path, shown)
                    self._put(path, None)
            if not waiting or len(waiting) == len(left):
                break
            left = waiting
        for path in waiting:
            shown = f"{dotted(path)}: {self._texts[path]} cannot be resolved: it leads back to itself"
            self._document.problem(path, f"{shown}, or names are put together in more than {_ROUNDS} steps")
        places = {dotted(path): number for number, path in enumerate(self._texts)}
        found = self._document.problems
        found[before:] = sorted(found[before:], key=lambda problem: places[problem.key])  # as they were written

    def _explained(self, path: Path, error: BaseException) -> str:
        """The reason in ``error`` why a text has no value, without what comes from the environment.

        A part of the reason that does not stand in the text itself is made of values, perhaps of such: neither it nor
        OmegaConf's own words are shown if the text may name one.
        """
        text, said = self._texts[path], _said(error)
        hides = path in self._hidden and bool(self._values or self._document.secret)
        for pattern, reason in _REASONS.items():
            if found := re.search(pattern, said):
                return reason.format(
                    *(HIDDEN if hides and not _stands_in(text, name) else name for name in found.groups())
                )
        if hides:
            return "the resolver cannot read what the environment variable holds"
        return said

    def _value(self, path: Path) -> Any:
        from omegaconf import OmegaConf

        text = self._texts[path]
        if self._size * text.count("${") > _MOST_TEXT:
            raise ConfigError(f"{dotted(path)}: {text} may become too long, more than {_MOST_TEXT:,} characters")
        self._put(path, text)
        found = self._holder(path)[path[-1]]
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found

    def _store(self, path: Path, value: Any) -> None:
        plain = mapped(value, lambda leaf: leaf.value if isinstance(leaf, _Box) else leaf)
        found = [leaf for _, leaf in leaves(plain, path)]
        self._count, self._size = self._count + len(found), self._size + sum(map(_size, found))
        if self._count > MOST_VALUES:
            raise too_many(self._document.name, "interpolated ones")
        self._put(path, literal(value))
        holder: Any = self._document.values
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = plain

    def _holder(self, path: Path) -> Any:
        node = self._config
        for part in path[:-1]:
            node = node[part]
        return node

    def _put(self, path: Path, value: Any) -> None:
        self._holder(path)[path[-1]] = value


def _size(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, str) else 8


def _ordered(texts: dict[Path, str]) -> list[Path]:
    """The texts, each after those that its words may name."""
    named = {path: iter(others) for path, others in _named(texts, texts).items()}
    begun: set[Path] = set()
    found: list[Path] = []
    for start in texts:
        stack = [] if start in begun else [start]
        while stack:
            begun.add(stack[-1])
            following = next((other for other in named[stack[-1]] if other not in begun), None)
            if following is None:
                found.append(stack.pop())
            else:
                stack.append(following)
    return found


_REASONS = {  # by OmegaConf's own message
    r"Environment variable '(.*?)' not found": "the environment variable {0} is not set; export it, or write "
    "${{oc.env:{0},default}}",
    r"Recursive interpolation|to parent node|maximum recursion depth": "it leads back to itself",
    r"Unsupported interpolation type (.*)": "there is no resolver {0}; oc.env is one, or register it with "
    "OmegaConf.register_new_resolver",
    r"Interpolation key '(.*?)' not found": "there is no key {0}; keys count from the top level of the configuration",
}


def _stands_in(text: str, name: str) -> bool:
    """True if a text with interpolations has this name of a key, a variable or a resolver, written out."""
    return re.search(rf"[{{:]\s*{re.escape(name)}\s*[:,}}]", text) is not None


def _said(error: BaseException) -> str:
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error)).split("\n", 1)[0]


def _hidden(texts: dict[Path, str], known: set[Path], was_read: bool) -> set[Path]:
    """Paths of secrets: ``known``, texts that read a variable, and texts that may name either. Too many do no harm.

    Args:
        was_read: a variable was read, by whichever text.
    """
    secret = known | {path for path, text in texts.items() if _ENVIRONMENT.search(text)}
    if secret or was_read:  # what these name, and which resolvers, is not known
        secret |= {path for path, text in texts.items() if _COMPOSED.search(text)}
    users: dict[Path, list[Path]] = defaultdict(list)
    for path, others in _named(texts, {*texts, *secret}).items():
        for other in others:
            users[other].append(path)
    found = list(secret)
    while found:
        new = [path for path in users[found.pop()] if path not in secret]
        secret.update(new)
        found += new
    return secret


def _named(texts: dict[Path, str], targets: Iterable[Path]) -> dict[Path, list[Path]]:
    """Find for each text the ``targets`` that its words may name, and those around or inside of such a place.

    Looked up, not compared one by one: a file can have ten thousand words and a thousand targets.
    """
    names = {f".{dotted(path)}.": path for path in targets}
    words = {path: {_word(word) for word in _NAME.findall(text)} for path, text in texts.items()}
    wanted = {name for own in words.values() for _, name in own}
    below, with_part = defaultdict[str, list[Path]](list), defaultdict[str, list[Path]](list)
    for whole, path in names.items():
        cuts = accumulate((len(str(part)) + 1 for part in path), initial=0)
        for start, end in combinations(cuts, 2):
            if (part := whole[start : end + 1]) in wanted:
                with_part[part].append(path)
                if start == 0:
                    below[part].append(path)
    around = {name: [names[above] for above in _above(name) if above in names] for name in wanted}
    found: dict[Path, list[Path]] = {}
    for path, own in words.items():
        inside: dict[Path, None] = {}
        for is_relative, name in own:  # relative names are known by their end
            inside |= dict.fromkeys([*(with_part if is_relative else below)[name], *around[name]])
        inside.pop(path, None)
        found[path] = list(inside)
    return found


def _word(word: str) -> tuple[bool, str]:
    """Split a word into a flag and a name as ``.a.b.``; the flag is True for a name relative to the word's place."""
    return word.startswith("."), "." + re.sub(r"[\[\].]+", ".", word).strip(".") + "."


def _above(name: str) -> Iterator[str]:
    """``.a.``, ``.a.b.``: a name, and what is around it."""
    return (name[: found.end()] for found in re.finditer(r"(?<!^)\.", name))
