"""Where keys that say how states are sharded and sent are looked for: in what two ranks hold."""

from __future__ import annotations

import math
from typing import Any

from tests.support.pool import Pool
from tests.support.reach_engine import Config, Lab, engine_of


def _cut(config: Config, folder: Any) -> bool:
    buckets = engine_of(Lab(folder, Pool()), config).buckets
    return any(p.numel < math.prod(b.shapes[p.index]) for b in buckets for p in b.pieces)


def cut(lab: Lab, config: Config) -> Any:
    """Whether a rank holds a part of a parameter only."""
    return all(lab.pool.run(2, _cut, config, lab.folder))


def _dimensions(config: Config, folder: Any) -> list[int]:
    return list(engine_of(Lab(folder, Pool()), config).comm.topology.sizes)


def dimensions(lab: Lab, config: Config) -> Any:
    """In which dimensions two ranks run collectives."""
    return lab.pool.run(2, _dimensions, config, lab.folder)[0]
