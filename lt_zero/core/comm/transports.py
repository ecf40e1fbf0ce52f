"""The registered transports, of which a group of ranks gets the first one that fits it.

A package adds its own on all ranks, before the first group is made:

    class Rdma(Backend):
        name = "rdma"

        @classmethod
        def fits(cls, connections: Connections) -> bool:
            return connections.backend == "gloo" and has_adapter(connections.device)

        def all_gather(...): ...

    register(Rdma)
"""

from __future__ import annotations

import zlib

import torch

from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.transport import Alone, Backend, Connections, Gloo, Transport


class InDimensions(Transport):
    """gloo in several dimensions: hierarchy.py, which is loaded where the ranks have some."""

    name = "hierarchy"

    @classmethod
    def fits(cls, connections: Connections) -> bool:
        return bool(connections.sizes)

    @classmethod
    def connect(cls, connections: Connections) -> Transport:
        from lt_zero.core.comm.hierarchy import Hierarchy

        return Hierarchy.connect(connections)


class InSharedMemory(Transport):
    """Memory that all ranks read: windows.py, which is loaded where the ranks share some."""

    name = "windows"

    @classmethod
    def fits(cls, connections: Connections) -> bool:
        return connections.arena is not None

    @classmethod
    def connect(cls, connections: Connections) -> Transport:
        from lt_zero.core.comm.windows import SharedMemoryTransport

        return SharedMemoryTransport.connect(connections)


_registered: list[type[Transport]] = [Alone, InDimensions, InSharedMemory, Gloo, Backend]


def register(transport: type[Transport], before: str | None = None) -> None:
    """Register ``transport``, to be asked before the one named ``before``; None: before all others.

    Raises:
        ValueError: its name is taken, or there is none named ``before``.
    """
    names = [known.name for known in _registered]
    if transport.name in names:
        raise ValueError(f"register({transport.__name__}): a transport named {transport.name!r} exists: rename one.")
    if before is not None and before not in names:
        raise ValueError(f"register(before={before!r}): there is no such transport. Name one of {', '.join(names)}.")
    _registered.insert(names.index(before) if before is not None else 0, transport)


def unregister(name: str) -> None:
    """Forget the transport of that name; groups that have it keep it."""
    _registered[:] = [known for known in _registered if known.name != name]


def connect(connections: Connections, world: Ranks) -> Transport:
    """Make the first transport that fits. Collective, of all groups of ``world`` at once.

    Raises:
        RuntimeError: on all ranks, if another one fits on some.
    """
    found = next(known for known in _registered if known.fits(connections))
    mine = zlib.crc32(found.name.encode())
    extremes = torch.tensor([mine, -mine])
    # The maximum and the negative minimum over the ranks, whose sum is 0 if all have the same. This is a barrier, too:
    # from here on no rank reads windows of the transport that is replaced.
    world.host_max(extremes, "transports").wait()
    if extremes.sum():
        names = world.host_gather(found.name, "transports")
        shown = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(names))
        raise RuntimeError(
            f"The ranks would move tensors by different transports ({shown}). Call "
            "lt_zero.core.comm.transports.register on all ranks, before the first group is made, and let `fits` answer "
            "the same on each."
        )
    return found.connect(connections)
