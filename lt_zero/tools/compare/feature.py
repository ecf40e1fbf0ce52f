"""``LT_ZERO_RECORD`` and ``LT_ZERO_DIGESTS``: a run is recorded for ``lt-zero compare``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Feature, PlaceInRun, Restorable
from lt_zero.tools.compare.digest_writer import DigestWriter
from lt_zero.tools.compare.digests import DIGESTS, file_of
from lt_zero.tools.compare.recorder import RECORD, Recorder


class Recording(Feature):
    """A file of fingerprints for each engine of a run; a module that a caller of ``shard`` trains has none."""

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> None:
        if run.number is not None:
            path = Path(os.environ[RECORD]).expanduser() / f"engine{run.number}.jsonl"
            Recorder(engine, path, self.config, run.ranks_of_model)


class WeightDigests(Feature):
    """A file of digests of the weights for each engine of a run; a module of a caller of ``shard`` has none."""

    _writer: DigestWriter | None = None

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> DigestWriter | None:
        if run.number is None:
            return None
        self._writer = DigestWriter(engine, file_of(Path(os.environ[DIGESTS]).expanduser(), run.number), self.config)
        return self._writer

    @override
    def states(self) -> Mapping[str, Restorable]:
        return {"digests": self._writer} if self._writer is not None else {}
