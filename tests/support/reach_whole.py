"""Where keys that say how states are sharded and sent are looked for: in what two ranks hold."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from typing import Any

import torch

import lt_zero
from tests.support.models import tokens
from tests.support.pool import Pool
from tests.support.reach_engine import Config, Lab, backward, engine_of


def _cut(config: Config, folder: Any) -> bool:
    buckets = engine_of(Lab(folder, Pool()), config).buckets
    return any(p.numel < math.prod(b.layout.spans[p.index].shape) for b in buckets for p in b.pieces)


def cut(lab: Lab, config: Config) -> Any:
    """Whether a rank holds a part of a parameter only."""
    return all(lab.pool.run(2, _cut, config, lab.folder))


class _OfRandomNumbers(torch.optim.SGD):
    """Element-wise, but no trial can tell: it draws random numbers."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(1)
        return super().step(closure)


def _asserted(config: Config, folder: Any) -> str:
    engine = engine_of(Lab(folder, Pool()), config)
    try:
        lt_zero.ShardedOptimizer(engine, _OfRandomNumbers(engine.root.parameters(), 0.1))
    except TypeError as error:
        return type(error).__name__
    return ""


def asserted(lab: Lab, config: Config) -> Any:
    """The error for an optimizer that cannot be tried."""
    return lab.pool.run(2, _asserted, config, lab.folder)[0]


def _launched(config: Config, folder: Any, freeze: bool) -> list[str]:
    engine = engine_of(Lab(folder, Pool()), config)
    engine.root.requires_grad_(not freeze)
    for _ in range(2):
        if freeze:
            engine.root(tokens(0, 0, 0))
        else:
            backward(engine)
    channels = engine.world.watch.channels.values()
    ways = ("encoded all-gather", "all-gather in the node", "compressed reduction")
    return [way for way in ways if any(launch.operation == way for c in channels for launch in c.history())]


def launched(lab: Lab, config: Config) -> Any:
    """Which collectives of ZeRO++ two ranks run in two passes."""
    return lab.pool.run(2, _launched, config, lab.folder, False)[0]


def launched_frozen(lab: Lab, config: Config) -> Any:
    """The same of frozen parameters."""
    return lab.pool.run(2, _launched, config, lab.folder, True)[0]


def _dimensions(config: Config, folder: Any) -> list[int]:
    return list(engine_of(Lab(folder, Pool()), config).groups[0].topology.sizes)


def link_limits(lab: Lab, config: Config) -> list[int]:
    """After how many ms the kernel gives up the peers of a rank's connections."""
    return lab.pool.run(2, _link_limits, config, lab.folder)[0]


def _link_limits(config: Config, folder: Any) -> list[int]:
    engine = engine_of(Lab(folder, Pool()), config)
    assert engine.world.size == 2
    return user_timeouts()


def user_timeouts() -> list[int]:
    """Of the TCP connections of this process that have one, in ms."""
    found = set[int]()
    for entry in os.listdir("/proc/self/fd"):
        if not os.path.realpath(f"/proc/self/fd/{entry}").rpartition("/")[2].startswith("socket:"):
            continue  # ``socket`` raises, and leaves the duplicate open
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as opened:
            if opened.type == socket.SOCK_STREAM and opened.family != socket.AF_UNIX:
                found.add(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return sorted(found - {0})


def tolerated(lab: Lab, config: Config) -> Any:
    """How many of two ranks a sum does not wait for."""
    return lab.pool.run(2, _tolerated, config, lab.folder)[0]


def _tolerated(config: Config, folder: Any) -> int | None:
    tolerance: Any = getattr(engine_of(Lab(folder, Pool()), config).groups[0].sums, "tolerant", None)
    return None if tolerance is None else tolerance._tolerated


def dimensions(lab: Lab, config: Config) -> Any:
    """In which dimensions two ranks run collectives."""
    return lab.pool.run(2, _dimensions, config, lab.folder)[0]
