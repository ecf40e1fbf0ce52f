"""YAML text: its values as OmegaConf reads them, the places of its keys, and what is refused.

PyYAML's parser gives nodes with positions; walking them here, instead of letting PyYAML construct objects, is what
refuses Python tags, keys that are not text, duplicates, and aliases that expand without end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted
from lt_zero.config.read.source import Budget, Source, Text

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}
# OmegaConf reads 1e-5 and 5e8 as numbers, which YAML 1.1 takes for text: it wants a point before and a sign after e.
_FLOAT = re.compile(
    r"""[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
      | [-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+
      | \.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
      | [-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
      | [-+]?\.(?:inf|Inf|INF)
      | \.(?:nan|NaN|NAN)""",
    re.VERBOSE,
)


def parse(text: str, name: str) -> Source:
    """Values of a YAML text whose top level is a mapping.

    Raises:
        ConfigError: it is not YAML, or YAML that a configuration has no use for; with file, line, column and hint.
    """
    import yaml  # takes 20 ms, and most files are JSON

    where = Text(text, name)
    try:
        _check_events(where)
        loader = _loader_class()(text)
        try:
            node = loader.get_single_node()
            return _Walk(where, loader).source(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError([_explained(where, error)]) from None
    except UnicodeError as error:  # half a surrogate pair
        raise ConfigError(f"{name}: {error}") from None


@functools.cache
def _loader_class() -> Any:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    Loader.add_implicit_resolver(
        f"{_TAG}float", re.compile(f"(?:{_FLOAT.pattern})$", re.VERBOSE), list("-+0123456789.")
    )
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    return Loader


def _check_events(where: Text) -> None:
    """Depth and number of documents, before PyYAML recurses into them (in C, where too deep is a crash)."""
    import yaml

    depth = documents = 0
    budget = Budget(where.name)
    for event in yaml.parse(where.text, Loader=_loader_class()):
        mark = Mark(where.name, event.start_mark.line + 1, event.start_mark.column + 1)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError([Problem("", "a second document starts here; a file holds one configuration", mark)])
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            budget.take(depth, mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            budget.take(depth, mark)


def _explained(where: Text, error: Any) -> Problem:
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    hint = ""
    if "cannot start any token" in said or "tab" in said.lower():
        hint = "; YAML indents with spaces, never with tabs, and text that starts with % @ ` needs quotes"
    elif "mapping values are not allowed" in said:
        hint = "; look for a wrong indentation, or text with ': ' in it that needs quotes"
    elif "expected ',' or" in said:
        hint = "; a comma is missing, or a bracket in the lines before, or ${...} in braces needs quotes"
    elif "undefined alias" in said:
        hint = "; text that starts with * needs quotes"
    elif "expected <block end>" in said or "could not find expected ':'" in said:
        hint = "; look for a wrong indentation, or a missing : or quote, in this line and the one before"
    if mark is None:
        at = getattr(error, "position", None)
        return Problem(
            "", f"not YAML: {said}{hint}" + ("" if at is None else f" (at character {at})"), Mark(where.name)
        )
    return where.problem_at(mark.line, mark.column, f"not YAML: {said}{hint}")


class _Walk:
    """From nodes to values; errors are collected as far as the tree makes sense."""

    def __init__(self, where: Text, loader: Any) -> None:
        self.where = where
        self.loader = loader
        self.budget = Budget(where.name)
        self.marks: dict[Path, Mark] = {}
        self.problems: list[Problem] = []

    def source(self, node: Any) -> Source:
        empty = node is None or (node.tag == f"{_TAG}null" and node.value == "")
        if empty:
            raise ConfigError(f"{self.where.name} is empty (or holds nothing but comments); write at least {{}}")
        if node.id != "mapping":
            what = "list" if node.id == "sequence" else "single value"
            self.complain(node, f"the top level is a {what}, not a mapping (key: value)")
        values = self.value(node, (), 1)
        if self.problems:
            raise ConfigError(self.problems)
        return Source(values, self.marks, self.where.name)

    def complain(self, node: Any, message: str, path: Path = ()) -> None:
        at = node.start_mark
        self.problems.append(self.where.problem_at(at.line, at.column, message, dotted(path)))

    def mark(self, node: Any) -> Mark:
        return Mark(self.where.name, node.start_mark.line + 1, node.start_mark.column + 1)

    def value(self, node: Any, path: Path, depth: int) -> Any:
        self.budget.take(depth if node.id != "scalar" else 0, self.mark(node))
        if node.id == "scalar":
            return self.scalar(node, path)
        if node.tag != f"{_TAG}{'map' if node.id == 'mapping' else 'seq'}":
            self.complain(node, f"{path_text(path)} has the tag {_shown_tag(node.tag)}; write it without a tag", path)
            return None
        if node.id == "sequence":
            for index, item in enumerate(node.value):
                self.marks[(*path, index)] = self.mark(item)
            return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        values = {}
        for name, (key, item) in self.pairs(node, path, depth).items():
            self.marks[(*path, name)] = self.mark(key)
            values[name] = self.value(item, (*path, name), depth + 1)
        return values

    def scalar(self, node: Any, path: Path) -> Any:
        if node.tag not in _SCALARS:
            plain = node.tag in (f"{_TAG}merge", f"{_TAG}value")
            remedy = "needs quotes" if plain else f"has the tag {_shown_tag(node.tag)}; write it without a tag"
            self.complain(node, f"{path_text(path)} {remedy}", path)
            return None
        try:
            value = self.loader.construct_object(node)
            if isinstance(value, int) and value.bit_length() > 1400:  # Python refuses to print longer ones
                raise OverflowError
        except (ValueError, KeyError, OverflowError):  # as 0b_, which looks like a number; !!bool maybe
            kind = node.tag.removeprefix(_TAG)
            self.complain(node, f"{path_text(path)} cannot be read as {kind}; text needs quotes", path)
            return None
        return value

    def pairs(self, node: Any, path: Path, depth: int) -> dict[str, tuple[Any, Any]]:
        """Keys of a mapping with their nodes; those that ``<<`` merges first, so that its own replace them."""
        merged: dict[str, tuple[Any, Any]] = {}
        own: dict[str, tuple[Any, Any]] = {}
        for key, item in node.value:
            if key.tag == f"{_TAG}merge":
                for base in self.merged_mappings(item, path):
                    self.budget.take(depth + 1, self.mark(item))  # ends a mapping that merges itself
                    for name, pair in self.pairs(base, path, depth + 1).items():
                        self.budget.take(0, self.mark(item))
                        merged.setdefault(name, pair)
            elif key.id != "scalar" or key.tag != f"{_TAG}str":
                what = repr(key.value) if key.id == "scalar" else f"a {key.id}"
                kind = f" (YAML reads it as {key.tag.removeprefix(_TAG)})" if key.id == "scalar" else ""
                self.complain(key, f"the key {what}{kind} is not text; write it in quotes", path)
            elif key.value in own:
                first, full = self.mark(own[key.value][0]), dotted((*path, key.value))
                places = f"first at line {first.line}, column {first.column}"
                self.complain(key, f"the key {full} stands twice, {places}; keep one", (*path, key.value))
            else:
                own[key.value] = (key, item)
        return {**merged, **own}

    def merged_mappings(self, item: Any, path: Path) -> Iterator[Any]:
        for base in item.value if item.id == "sequence" else [item]:
            if base.id == "mapping":
                yield base
            else:
                self.complain(base, f"<< in {path_text(path)} merges mappings only, like <<: *name", path)


def path_text(path: Path) -> str:
    return dotted(path) or "the top level"


def _shown_tag(tag: str) -> str:
    return tag.replace(_TAG, "!!")
