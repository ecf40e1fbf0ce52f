"""Gloo worker processes in simulated nodes: the pool of pool.py, with a network between its ranks.

Workers are forked as all others and then enter their node, which takes milliseconds. With two ranks per node, ranks 0
and 1 are on node 0, ranks 2 and 3 on node 1. Nodes differ in network, PIDs and host name; they share the file system.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from simulated_nodes import NodesUnavailable, SimulatedNodes, enter, sent_by

from tests.support.pool import Place, Pool


@functools.cache
def unavailable() -> str:
    """Why nodes cannot be simulated here; "" if they can, which is tried."""
    try:
        with SimulatedNodes(nodes=2, mbit=1000):
            return ""
    except NodesUnavailable as error:
        return str(error)


class NodePool:
    """A worker for each rank of ``nodes``, which stays the caller's: its rates may be changed, a node deleted."""

    def __init__(self, nodes: SimulatedNodes) -> None:
        self.nodes = nodes
        self._pool = Pool(self._place)

    def _place(self, rank: int) -> Place:
        return Place(self.nodes.environment(rank), functools.partial(enter, self.nodes.holder(rank)))

    def run(self, fn: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> list[Any]:
        """``fn(*args)`` on all ranks; the results by rank.

        Raises:
            WorkerError: a rank raised, did not answer in time, or died with its node.
        """
        return self._pool.run(self.nodes.world, fn, *args, env=env)

    def close(self) -> None:
        self._pool.close()


class Traffic:
    """Context, on all ranks: ``sent`` is then what this rank's node sent meanwhile to other nodes, in bytes.

    Barriers surround what is counted, so that no rank of another node is still sending.
    """

    sent = 0

    def __enter__(self) -> Traffic:
        dist.barrier()
        self._before = sent_by()
        dist.barrier()
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            dist.barrier()
            self.sent = sent_by() - self._before
            dist.barrier()
