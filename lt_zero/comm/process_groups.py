"""Process groups of torch.distributed: made, connected, tried."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def with_index(device: torch.device) -> torch.device:
    """``device`` with an index: "cuda" becomes the calling thread's current device, which is per thread."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def one_queue() -> bool:
    """Whether all kernels of a GPU take one queue: then collectives of different groups cannot pass each other."""
    return dist.get_backend() != "gloo" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def new_group(
    ranks: list[int] | None, timeout: timedelta | None, backend: str | None, device: torch.device, inside: bool = True
) -> dist.ProcessGroup:
    """A connected group: connecting at its first use could deadlock with other groups' collectives. Collective.

    ``inside``: whether this rank is one of ``ranks``.

    Raises:
        RuntimeError: the ranks cannot connect.
    """
    try:
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
