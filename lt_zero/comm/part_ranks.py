"""The ranks that have parts of the same tensors: what they compute alike, each of them keeps a part of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lt_zero.comm.world import World


class PartRanks:
    """Collectives of these ranks inside of layers, all of which they launch in the same order.

    Args:
        world: all ranks of the run.
        group: those that have the parts. Hang detection knows that layers wait for them (``World.expect_in_layers``).

    Attributes:
        device: of what they exchange.
        size: of the group.
        rank: which part this one has.
    """

    def __init__(self, world: World, group: ProcessGroup) -> None:
        self._world, self._group, self.device = world, group, world.device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._sliced = dist.get_backend(group) == "gloo"
        # torch renamed it in 2.13, and warns on the old name.
        self._all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_gather(self, part: Tensor) -> Tensor:
        """Join the parts (1D, of one length) of all ranks. Collective."""
        work, whole = self._launch(part)
        self._wait(work)
        return whole

    def compare(self, numbers: Tensor) -> Comparison:
        """Start to compare ``numbers`` (1D int64, as many on all ranks). Collective."""
        work, of_ranks = self._launch(numbers)
        if self._sliced:
            return Comparison(lambda: self._wait(work), of_ranks.view(self.size, -1), numbers)
        work.wait()  # the current stream, not the host
        host = torch.empty(of_ranks.shape, dtype=of_ranks.dtype, pin_memory=True)
        host.copy_(of_ranks, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Comparison(copied.synchronize, host.view(self.size, -1), numbers)

    def _launch(self, part: Tensor) -> tuple[Any, Tensor]:
        whole = part.new_empty(part.numel() * self.size)
        return self._all_gather(whole, part, group=self._group, async_op=True), whole

    def _wait(self, work: Any) -> None:
        if self._sliced:
            self._world.watch.wait(work, None)
        else:
            work.wait()


class Comparison:
    """Numbers that ranks compare: ``wait`` for the end, and read ``of_ranks`` [ranks, numbers].

    ``sent`` must not be freed before.
    """

    def __init__(self, wait: Callable[[], object], of_ranks: Tensor, sent: Tensor) -> None:
        self._wait, self._of_ranks, self._sent = wait, of_ranks, sent

    def equal(self) -> list[bool]:
        """Wait, and return which of the numbers are equal on all ranks."""
        self._wait()
        same: list[bool] = (self._of_ranks == self._of_ranks[0]).all(0).tolist()
        return same


def local_of(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """What this rank has of a DTensor, and what makes such a one of that again; of others the tensor itself, and None.

    The local tensor shares memory, but does not count all writes to the DTensor as its own version.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def distributed(local: Tensor) -> Tensor:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    with torch.no_grad():
        return tensor.to_local(), distributed
