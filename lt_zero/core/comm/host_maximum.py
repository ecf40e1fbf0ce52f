"""Element-wise maxima of small tensors on the host over a group of gloo, in as few hops as there can be."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.core.comm.work import CollectiveWorker, Procedure

_TAG = 0x5AC0  # of the messages of the first round


class HostMaxima:
    """Maxima over the ranks of ``group``, one after the other in a thread. In the same order on all ranks.

    gloo sums small tensors on a ring, too: 2 (ranks - 1) hops, each after the one before. Here ranks exchange in
    rounds: in round k each sends what it has to the rank 2**k after it, and has the maximum of the 2**(k + 1) ranks up
    to itself then. An element may count twice, which changes a sum, but no maximum. 1,024 ranks take 10 hops.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._worker = CollectiveWorker("flags")

    def launch(self, tensor: Tensor) -> Procedure:
        """Start the maximum of ``tensor``, in place; nothing else may use it until the end."""
        return self._worker.submit(partial(maximum, tensor, self._group))

    def stop(self) -> None:
        """End the thread; the next ``launch`` starts it again."""
        self._worker.stop()


def maximum(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replace ``tensor`` by its element-wise maximum over the ranks of ``group``. Collective.

    Raises:
        RuntimeError: a connection is closed.
    """
    ranks = dist.get_process_group_ranks(group)
    rank = dist.get_rank(group)
    distance = 1
    tag = _TAG
    while distance < len(ranks):
        sent = tensor.clone()
        received = torch.empty_like(tensor)
        after = ranks[(rank + distance) % len(ranks)]
        before = ranks[rank - distance]
        works = [dist.irecv(received, before, group, tag), dist.isend(sent, after, group, tag)]
        for work in works:
            assert work is not None
            work.wait()
        torch.maximum(tensor, received, out=tensor)
        distance *= 2
        tag += 1
