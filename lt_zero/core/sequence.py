"""Debug mode: all ranks compare the name of the next collective before they launch it (``LT_ZERO_DEBUG=1``).

A collective that one rank launches and another does not hangs until a watchdog fires, and two different ones of equal
size swap data silently. This check costs a round trip per collective through a TCP store of its own, so it is off by
default.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 20.0


def debug_enabled() -> bool:
    """Whether ``LT_ZERO_DEBUG`` asks for the checks that cost time."""
    return os.environ.get("LT_ZERO_DEBUG", "0").lower() not in ("", "0", "false", "no", "off")


class SequenceCheck:
    """Numbers the collectives of this rank and compares each with the other ranks' collective of the same number."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._timeout = timedelta(seconds=timeout_s)
        self._count: dict[str, int] = {}
        self._last: dict[str, str] = {}

    @classmethod
    def create(cls) -> SequenceCheck:
        """A check over all ranks of the default group; rank 0 serves the store on a free port."""
        rank, world = dist.get_rank(), dist.get_world_size()
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        timeout = timedelta(seconds=60)
        server = (
            TCPStore(host, 0, world, is_master=True, timeout=timeout, wait_for_workers=False) if rank == 0 else None
        )
        port = [server.port if server is not None else 0]
        dist.broadcast_object_list(port, src=0)
        store = server or TCPStore(host, port[0], world, is_master=False, timeout=timeout, wait_for_workers=False)
        return cls(store, rank, world, TIMEOUT_S)

    def compare(self, operation: str, name: str, numel: int, channel: str = "collective") -> None:
        """Raise on the first collective of a channel that is not the same on all ranks.

        Raises:
            RuntimeError: another rank is about to launch something else, or launched nothing within ``TIMEOUT_S``.
        """
        mine = f"{operation} of {name} ({numel:,} elements)"
        number = self._count.get(channel, 0)
        self._count[channel] = number + 1
        key = f"{channel} {number}"
        self._store.set(f"{key}/{self._rank}", mine)
        here = f"Ranks diverge at {key}: rank {self._rank} is about to launch the {mine}"
        before = f"the last one in common was the {self._last.get(channel, 'none so far')}"
        for rank in range(self._world):
            if rank == self._rank:
                continue
            try:
                self._store.wait([f"{key}/{rank}"], self._timeout)
            except Exception as error:
                raise RuntimeError(
                    f"{here}, rank {rank} launched nothing for {self._timeout.total_seconds():.0f} s ({before}). "
                    f"Rank {rank} left this path, or does not run the module named here: under stage 3 every rank has "
                    "to run the same modules the same number of times."
                ) from error
            theirs = self._store.get(f"{key}/{rank}").decode()
            if theirs != mine:
                raise RuntimeError(
                    f"{here}, rank {rank} the {theirs} ({before}). Look for a branch that depends on the rank or on "
                    "its data: under stage 3 every rank has to run the same modules in the same order."
                )
        self._last[channel] = mine
        if number >= 2:  # everybody who could still ask for it has passed it
            self._store.delete_key(f"{channel} {number - 2}/{self._rank}")
