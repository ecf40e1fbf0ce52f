"""Process groups of torch.distributed: made, connected, tried."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

# Seconds after which a peer is given up whose kernel does not answer: on the connections by which hang detection probes
# peers, and on others, so that the probes can tell which peer it is.
PROBED_S, OTHERS_S = 20, 45


def with_index(device: torch.device) -> torch.device:
    """``device`` with an index: "cuda" becomes the calling thread's current device, which is per thread."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def one_queue() -> bool:
    """Whether all kernels of a GPU take one queue: then collectives of different groups cannot pass each other."""
    return dist.get_backend() != "gloo" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def new_group(
    ranks: list[int] | None,
    timeout: timedelta | None,
    backend: str | None,
    device: torch.device,
    inside: bool = True,
    probed: bool = False,
) -> dist.ProcessGroup:
    """A connected group: connecting at its first use could deadlock with other groups' collectives. Collective.

    ``inside``: whether this rank is one of ``ranks``. ``probed``: whether hang detection probes its connections.

    Raises:
        RuntimeError: the ranks cannot connect.
    """
    try:
        with closing_if_unanswered(probed):
            group: dist.ProcessGroup = dist.new_group(ranks, timeout, backend)
    except RuntimeError as error:
        raise RuntimeError(
            f"The ranks cannot connect a {backend or dist.get_backend()} process group: {error}\nThe interface of a "
            "host's name may lead nowhere: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every node to the one "
            "that the nodes share, as `ip addr` names it."
        ) from error
    if inside and dist.get_backend(group) != "gloo":  # gloo has connected
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return group


def exists(group: dist.ProcessGroup) -> bool:
    """Whether a process group of this rank has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


@contextmanager
def closing_if_unanswered(probed: bool) -> Iterator[None]:
    """Context: connections that are opened inside close if the peer's kernel does not answer.

    A machine that loses power or its network closes no connections, and the kernel would try for 15 minutes to reach
    it. Kernels answer for processes that are busy, so these are not given up. (Except for one that is stopped while its
    buffers are full.) No-op without /proc.
    """
    seconds = PROBED_S if probed else OTHERS_S
    before = _sockets()
    yield
    for name, number in _sockets().items() - before.items():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as opened:  # it may be closed since
            if name in before or opened.type != socket.SOCK_STREAM or opened.family == socket.AF_UNIX:
                continue
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, (seconds + 3) // 4)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)  # also for unanswered data


def _sockets() -> dict[str, int]:
    """The sockets of this process: their names in /proc, and a descriptor of each."""
    found = {}
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since
                if (name := os.readlink(f"/proc/self/fd/{entry}")).startswith("socket:"):
                    found[name] = int(entry)
    return found


def try_gloo() -> None:
    """Open and close a gloo group of this process alone, which fails as most groups do: at the network interface.

    Raises:
        RuntimeError: torch is built without gloo, or gloo cannot use the network interface.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("torch is built without gloo.")
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))  # type: ignore[attr-defined]


def nccl_version() -> str:
    """The version of torch's NCCL; "" if it is built without."""
    if not dist.is_available() or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def begin_restarted(backend: str, timeout: timedelta | None, device: torch.device | None) -> None:
    """Make the default process group if torchrun has restarted this process; else a no-op.

    torchrun serves one store to all restarts, and torch would read the addresses in it of processes that have ended.
    So each restart (``--max-restarts``) has a part of the store to itself.

    Args:
        device: a GPU to bind the group to.
    """
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else rank 0 serves a store of its own
    if number == "0" or not shared or dist.is_initialized():
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    whole, _, _ = next(dist.rendezvous("env://", rank, world))  # type: ignore[attr-defined]
    store = PrefixStore(f"restart {number}", whole)
    if timeout is not None:
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device)
    if backend == "nccl":
        atexit.register(_leave)  # as Lightning does: torch warns of a group that is left


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def init_distributed(dist_backend: str | None = None, timeout: timedelta | None = None, **_: object) -> None:
    """Make the default process group if a launcher (torchrun) has set ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``.

    No-op if there is one, or if a single process runs without a launcher.

    Args:
        dist_backend: default: "nccl" for GPUs, else "gloo".
        timeout: of its collectives; None: torch's default.
    """
    if dist.is_initialized() or "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    begin_restarted(backend, timeout, None)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout)
