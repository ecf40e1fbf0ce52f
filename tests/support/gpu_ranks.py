"""Ranks that share one device: over NCCL on a GPU, over gloo if the CPU stands in for it.

NCCL refuses two ranks on a GPU only if their hosts are the same, too, and takes for a host what ``NCCL_HOSTID`` names.
With one for each rank it moves data between them as between nodes, here through sockets of the loopback. Kernels of the
ranks then take turns on the GPU, so that a collective takes milliseconds whatever its size: models have to be tiny, and
times say nothing.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from tests.support.pool import HERE, Place, Pool

SHARE = 0.2  # of the GPU's memory, for each of at most four ranks
LIMIT_S = 100.0
ALONE_S = 60.0  # for a rank to end after the first one that has

NCCL = {
    # Ways between hosts, of which only sockets lead through the loopback.
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    # All thread blocks of a collective have to be on the GPU while those of other ranks are.
    "NCCL_MAX_NCHANNELS": "2",
    # Fewer steps between ranks that take turns than with the default for small messages.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "WARN",
}


def over_nccl(rank: int, world: int, store: str) -> None:
    """Make the default process group of a task as Lightning makes it: bound to the GPU, which all ranks share."""
    import torch
    import torch.distributed as dist

    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    torch.cuda.set_per_process_memory_fraction(SHARE)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LIMIT_S),
        device_id=gpu,
    )


def place_of(kind: str, rank: int) -> Place:
    """Where a rank lives on the device ``kind``, "cuda" or "cpu". Variables of NCCL that are set stay as they are."""
    if kind == "cpu":
        return HERE
    given = {name: value for name, value in os.environ.items() if name in NCCL}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # of several GPUs: ranks share it
    own = {"NCCL_HOSTID": f"rank-{rank}", "CUDA_VISIBLE_DEVICES": first}
    return Place({**HERE.environment, **NCCL, **given, **own}, join=over_nccl)


def pool_of(kind: str) -> Pool:
    return Pool(partial(place_of, kind), LIMIT_S)


def _run_apart(
    kind: str, rank: int, world: int, store: str, fn: Callable[..., str], args: Any, answer: Connection
) -> None:
    import torch

    torch.set_num_threads(1)
    place = place_of(kind, rank)
    os.environ.update(place.environment)
    place.join(rank, world, store)
    torch.manual_seed(0)
    answer.send(fn(*args))
    os._exit(0)  # a group that was aborted need not come to its end


def texts_of(kind: str, world: int, folder: Path, fn: Callable[..., str], *args: Any) -> dict[int, str]:
    """What ``fn(*args)`` returned, by rank, in processes that end with it; a rank that ended otherwise has no text.

    ``folder``: for the store of the ranks.
    """
    context = mp.get_context("forkserver")  # that of the pool
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = []
    for rank, (_, theirs) in enumerate(pipes):
        arguments = (kind, rank, world, str(folder / "store"), fn, args, theirs)
        processes.append(context.Process(target=_run_apart, args=arguments))
        processes[-1].start()
        theirs.close()  # so that the end of the process is the end of the pipe
    try:
        return dict(_answers([ours for ours, _ in pipes]))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(connections: list[Connection]) -> Iterator[tuple[int, str]]:
    """Ranks and their texts, until all have ended, or the rest is late after the first."""
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    until = monotonic() + LIMIT_S
    first = True
    while waiting and (ready := wait(list(waiting), max(0.0, until - monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            if connection.poll():
                with suppress(EOFError):
                    yield rank, connection.recv()
        if first:
            until = monotonic() + ALONE_S
            first = False
