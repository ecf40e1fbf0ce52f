"""A fault given to a run, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        ok: Whether what the package promises held: nothing hung, was lost or silently wrong, and errors were sentences.
        what: A few words for the table, such as `named error on all ranks`; of a failure, what went wrong.
        evidence: Of a failure, the end of the output, for the report.
    """

    ok: bool
    what: str
    evidence: str = ""


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        group: The row of the table that counts it, such as `kills` or `full disk`.
        name: What is done, unique within the group.
        run: Runs it in an empty folder of its own and returns the outcome. It has a time limit of its own; an exception
            that it raises counts as a failure of the case.
        alone: Whether it needs the machine to itself (namespaces, limits on memory): no other case runs beside it.
    """

    group: str
    name: str
    run: Callable[[Path], Outcome]
    alone: bool = False
