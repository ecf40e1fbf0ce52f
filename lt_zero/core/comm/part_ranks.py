"""The ranks that have parts of the same tensors: what they compute alike, each of them keeps a part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lt_zero.common import accelerator
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.work import CollectiveId
from lt_zero.core.comm.world import World


class PartRanks(Ranks):
    """Collectives of these ranks between layers, of forward and backward; ``name``: of the module that needs them.

    Args:
        world: all ranks of the run.
        parts: the ranks of each such set, in order; the same on all ranks.
        group: over that of ``parts`` which has this rank.
    """

    def __init__(self, world: World, parts: Sequence[Sequence[int]], group: ProcessGroup) -> None:
        ranks = next(part for part in parts if world.rank in part)
        super().__init__(
            group, ranks, ranks.index(world.rank), world.device, world.watch, world.order_of(ranks), world.log
        )
        if self.order.host is None:
            self.order.host = group if self._gloo else world.new_group("gloo", parts)
        # torch renamed it in 2.13, and warns on the old name.
        self._all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_gather(self, part: Tensor, name: str) -> Tensor:
        """Join the parts (1D, of one length) of all ranks. Collective."""
        opened = self.log.open("all_gather", name, part.nbytes * self.size)
        work, whole, launch = self._launch(part, name)
        self.watch.wait(work, launch) if self._gloo else work.wait()
        self.log.ended(opened)
        return whole

    def compare(self, numbers: Tensor, name: str) -> Comparison:
        """Start to compare ``numbers`` (1D int64, as many on all ranks). Collective."""
        work, of_ranks, launch = self._launch(numbers, name)
        rows = of_ranks.view(self.size, -1)
        if self._gloo:
            return Comparison(lambda: self.watch.wait(work, launch), rows, numbers)
        # The current stream waits, not the host. The event after the copy tells when ``host`` can be read.
        work.wait()
        host, copied = accelerator.fetch(rows)
        return Comparison(copied.synchronize, host, numbers)

    def _launch(self, part: Tensor, name: str) -> tuple[Any, Tensor, CollectiveId]:
        launch = self.order.launch("all-gather", f"saved inputs of {name}", part.numel())
        whole = part.new_empty(part.numel() * self.size)
        return self._all_gather(whole, part, group=self.process_group, async_op=True), whole, launch


class Comparison:
    """Numbers that ranks compare: ``of_ranks`` [ranks, numbers] after ``wait``; ``sent`` has those of this rank."""

    def __init__(self, wait: Callable[[], object], of_ranks: Tensor, sent: Tensor) -> None:
        self._wait, self._of_ranks = wait, of_ranks
        # Kept alive: the collective reads it until the end.
        self._sent = sent

    def equal(self) -> list[bool]:
        """Wait, and return which of the numbers are equal on all ranks."""
        self._wait()
        same: list[bool] = (self._of_ranks == self._of_ranks[0]).all(0).tolist()
        return same
