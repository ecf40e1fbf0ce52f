"""``LT_ZERO_RECORD``: a run is recorded for ``lt-zero compare``."""

from __future__ import annotations

import os
from pathlib import Path

from typing_extensions import override

from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Feature, PlaceInRun
from lt_zero.tools.compare.recorder import RECORD, Recorder


class Recording(Feature):
    """A file of fingerprints for each engine of a run; a module that a caller of ``shard`` trains has none."""

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> None:
        if run.number is not None:
            path = Path(os.environ[RECORD]).expanduser() / f"engine{run.number}.jsonl"
            Recorder(engine, path, self.config, run.ranks_of_model)
