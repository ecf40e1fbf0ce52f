"""The table of DeepSpeed's names, with the answer to each of them.

Note [Answers]
    A row of ``names.tsv`` has a module, names (``*``: all others), and their answer:

    module:name    an object; without a name it has the same one, and ``*`` is the module itself.
    =literal       a value.
    !remedy        lt_zero has nothing for this name. It can be imported, as scripts import more than they use; its use
                   is an error with the remedy. With ``*`` this holds for all modules below, too.
"""

from __future__ import annotations

import ast
import functools
import importlib
from importlib import resources
from typing import Any, NamedTuple

from lt_zero.deepspeed.missing import missing

ROOT = "deepspeed"
DOCS = "docs/from-deepspeed.md"


class Answer(NamedTuple):
    """The answer to a name, of which one attribute is set. See Note [Answers]."""

    target: str = ""
    literal: str = ""
    remedy: str = ""

    @classmethod
    def parse(cls, text: str) -> Answer:
        """The answer that a cell of the table says."""
        kinds = {"=": "literal", "!": "remedy"}
        return cls(**{kinds[text[0]]: text[1:]}) if text[0] in kinds else cls(target=text)

    def value(self, module: str, name: str) -> Any:
        """The value of ``module.name`` for a script.

        Raises:
            AttributeError: the module that answers for all others has no such name.
        """
        if self.literal:
            return ast.literal_eval(self.literal)
        if self.remedy:
            return missing(f"{module}.{name}", self.remedy)
        place, _, other = self.target.partition(":")
        found = importlib.import_module(place)
        return found if other == "*" else getattr(found, other or name)


@functools.cache
def table() -> dict[str, dict[str, Answer]]:
    """Module -> name -> its answer, also for modules that only hold others."""
    found: dict[str, dict[str, Answer]] = {}
    text = resources.files(__package__).joinpath("names.tsv").read_text(encoding="utf-8")
    for line in text.splitlines()[1:]:
        module, names, answer = line.split("\t")
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:length]), {})
        found[module] |= dict.fromkeys(names.split(), Answer.parse(answer))
    return found


def answers_of(module: str) -> dict[str, Answer] | None:
    """The answers of a module; None if there is no such module.

    A module below one whose names all have a remedy has that remedy for all of its names.
    """
    if module in table():
        return table()[module]
    parent = module.rpartition(".")[0]
    every = (answers_of(parent) or {}).get("*") if parent else None
    return {"*": every} if every is not None and every.remedy else None


def unknown(name: str) -> str:
    """The text of the error about a name that is not in the table."""
    return (
        f"{name}: lt_zero stands for deepspeed here, and has no such name. Remove the import, or see {DOCS} for what "
        "lt_zero calls it."
    )
