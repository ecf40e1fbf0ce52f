"""Imports between the files of a package, wherever the statement stands.

At the top, in a function, under ``TYPE_CHECKING``, or as a call of ``import_module`` with a name that can be read off.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.house.parts import PARTS, files_of, is_optional, part_of, parts_of
from tests.support.paths import PACKAGE

COMPUTED = "(computed)"  # in place of the file, where only a run knows what is imported
_CALLS = ("import_module", "__import__")


class Import(NamedTuple):
    """A file that imports another one.

    Attributes:
        file: that has the statement.
        other: that is imported, or ``COMPUTED``.
    """

    file: str
    other: str

    def __str__(self) -> str:
        return f"{self.file} -> {self.other}"


class Package:
    """The Python files of a package, parsed.

    Attributes:
        folder: of the package, which has its name.
        name: of the package.
        files: by name, relative to the package and without the ending.
        trees: the same, parsed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.files = files_of(folder)

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {file: ast.parse(path.read_text(encoding="utf-8")) for file, path in self.files.items()}

    def file_of(self, name: str) -> str | None:
        """The file that a dotted name is in; None for a name of another package."""
        head, *rest = name.split(".")
        if head != self.name:
            return None
        for length in range(len(rest), -1, -1):
            module = "/".join(rest[:length])
            for candidate in (module, f"{module}/__init__".lstrip("/")):
                if candidate in self.files:
                    return candidate
        return None

    def names_in(self, node: ast.AST, file: str) -> Iterator[str]:
        """The dotted names that a statement or a call imports; ``COMPUTED`` for one that cannot be read off."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = self._absolute("." * node.level + (node.module or ""), file)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import(node.func):
            given = node.args[0] if node.args else None
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                yield self._absolute(given.value, file)
            else:
                yield COMPUTED

    @functools.cached_property
    def names(self) -> dict[str, set[str]]:
        """The dotted names that each file imports, wherever the statement stands."""
        return {
            file: {name for node in ast.walk(tree) for name in self.names_in(node, file)}
            for file, tree in self.trees.items()
        }

    def imports(self) -> set[Import]:
        """All imports of files of the package; a file that imports itself is left out."""
        found = set[Import]()
        for file in self.files:
            for name in self.names[file]:
                other = COMPUTED if name == COMPUTED else self.file_of(name)
                if other is not None and other != file:
                    found.add(Import(file, other))
        return found

    def _absolute(self, name: str, file: str) -> str:
        """The name of a module; one that begins with dots is relative to the folder of ``file``."""
        rest = name.lstrip(".")
        level = len(name) - len(rest)
        if not level:
            return name
        folders = [self.name, *file.split("/")[:-1]]
        return ".".join([*folders[: len(folders) - level + 1], *filter(None, [rest])])


@functools.cache
def this_package() -> Package:
    """The package that is tested."""
    return Package(PACKAGE)


def _is_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _CALLS


def between_parts(found: set[Import], parts: Mapping[str, tuple[str, ...]] = PARTS) -> Counter[tuple[str, str]]:
    """How many imports lead from one part to another."""
    files = {file for one in found for file in one}
    part = {**parts_of(files, parts), COMPUTED: COMPUTED}
    return Counter((part[one.file], part[one.other]) for one in found if part[one.file] != part[one.other])


def core_to_features(found: set[Import], parts: Mapping[str, tuple[str, ...]] = PARTS) -> list[Import]:
    """The imports of the core that lead into features and tools, or nobody can tell where to."""
    return [
        one
        for one in _of_core(found, parts)
        if one.other == COMPUTED or is_optional(part_of(one.other, parts) or "unknown")
    ]


def core_to_config(found: set[Import], parts: Mapping[str, tuple[str, ...]] = PARTS) -> list[Import]:
    """The imports of the core that lead into the configuration."""
    return [one for one in _of_core(found, parts) if part_of(one.other, parts) == "config"]


def _of_core(found: set[Import], parts: Mapping[str, tuple[str, ...]]) -> list[Import]:
    return sorted(one for one in found if (part_of(one.file, parts) or "unknown").startswith("core."))
