"""The place of an engine in a run, which features and the division of the run tell each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlaceInRun:
    """The place of an engine in the run that trains it.

    Attributes:
        number: of the engine, in the order of set-up; None: there is no run, a caller of ``lt_zero.shard`` trains it.
        ranks_of_model: so many neighbouring ranks see the same data, and have parts of them or of the model.
        in_parts: some ranks have parts of the model, or of sequences; then ``ranks_of_model`` may be 1 all the same.
    """

    number: int | None = None
    ranks_of_model: int = 1
    in_parts: bool = False
