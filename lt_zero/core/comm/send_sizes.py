"""The memory from which gradients are sent: how many buffers, of how many bytes. Pure data, also for forecasts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lt_zero.core.comm.shared_memory import SEND_BUFFERS


@dataclass(frozen=True)
class SendSizes:
    """Buffers that the reductions of a group need.

    Attributes:
        turns: reusable buffers of one dtype, which take turns.
        in_place: peers read reusable buffers in place, so these need no scratch memory.
        scratch: another reduction receives as much as it sends, in scratch memory.
    """

    turns: int = 2
    in_place: bool = False
    scratch: bool = False

    def scratch_numel(self, numel: int, reusable: bool) -> int:
        """Elements of scratch memory beside a buffer of ``numel``."""
        return numel if self.scratch and not (reusable and self.in_place) else 0

    def nbytes(self, numel: int, dtype: torch.dtype, reusable: bool) -> int:
        """Bytes of one buffer of ``numel`` elements with its scratch memory."""
        return (numel + self.scratch_numel(numel, reusable)) * dtype.itemsize


BACKEND = SendSizes()  # of a device, such as NCCL; also of a single process
GLOO = SendSizes(scratch=True)
NODE_WINDOWS = SendSizes(in_place=True, scratch=True)  # windows in each node, sockets between nodes
WINDOWS = SendSizes(SEND_BUFFERS, in_place=True, scratch=True)
