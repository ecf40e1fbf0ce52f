"""Reductions that send compressed gradients, with error feedback (arXiv:1809.07599; both ways: arXiv:1905.05957).

Note [Compressed reductions]
    A rank adds its residual, which is what it has not sent so far, to its gradients, and encodes a part for each rank
    that owns one. What the codes do not represent is the new residual. An owner adds up the decoded parts in rank
    order, in fp32. Where all ranks need the mean (stage 0) it encodes the sum with a residual of its own and sends it
    to all. All ranks decode the same bytes, so they stay equal to the bit.
    So nothing is lost: what was put in is what has arrived plus all residuals.
    With ``hierarchical`` the ranks of a node add up their gradients first, uncompressed: less is sent between nodes,
    and a sum is compressed once per node. Compressed sums are gathered between nodes first, then inside each node, so
    that each crosses the network once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.codec import Codec
from lt_zero.core.comm.costs import Costs
from lt_zero.core.comm.residuals import Residuals
from lt_zero.core.comm.topology import whole_nodes
from lt_zero.core.comm.transport import Group, Mesh, exchange, sum_in_rank_order
from lt_zero.core.comm.work import CollectiveId, CollectiveMonitor, CollectiveWorker, Work, WorkList
from lt_zero.kernels.flat import store

_ALIGN = 16  # bytes: where encoded parts begin
_PROBE = 1 << 20  # bytes to each rank
_FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class CompressionPlan:
    """Plan of the compressed reductions of a group.

    Attributes:
        ranks, nodes: of the group.
        codec: encodes parts.
        inner: ranks of a node, which are neighbours; 1: nodes do not count.
        hierarchical: see Note [Compressed reductions].
        inside: encodes what ranks of a node add up first, without residuals; None: it is sent as it is.
    """

    ranks: int
    nodes: int
    codec: Codec
    inner: int = 1
    hierarchical: bool = False
    inside: Codec | None = None

    def crossing_nbytes(self, numel: int, everywhere: bool) -> float:
        """Bytes that a node sends to others in a reduction of ``numel`` elements; with Huffman codes at most.

        ``everywhere``: all ranks need all sums.
        """
        own = self.ranks / self.nodes
        peers = self.nodes - 1 if self.hierarchical else self.ranks - own
        peers += self.ranks // self.inner - 1 if everywhere else 0
        return own * self.codec.nbytes(numel // self.ranks) * peers

    def scratch_nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of copies, of codes in both ways and of sums in a reduction of ``numel`` elements, at most."""
        if not self.hierarchical or self.inner == 1:
            return 2 * self.codec.nbytes(numel) + numel // self.ranks * _FP32
        received = numel * itemsize if self.inside is None else 2 * self.inside.nbytes(numel)
        return numel * itemsize + received + numel // self.inner * _FP32


def plan_compression(nodes: Sequence[Sequence[int]], codec: Codec, hierarchical: bool) -> CompressionPlan | None:
    """Plan reductions that send codes over the ranks of ``nodes``, or between nodes only; None: there is one of them.

    Where ``hierarchical`` ranks do not form equal nodes, the plan cannot be run.
    """
    ranks, inner = sum(map(len, nodes)), _neighbours(nodes)
    if ranks == 1 or (hierarchical and len(nodes) == 1):
        return None
    return CompressionPlan(ranks, len(nodes), codec, inner, hierarchical)


def plan_quantized_sums(nodes: Sequence[Sequence[int]], codec: Codec, inside: Codec) -> CompressionPlan | None:
    """Plan sums in nodes, encoded with ``inside``, then between them, with ``codec``; None: there is one rank."""
    ranks, inner = sum(map(len, nodes)), _neighbours(nodes)
    if ranks == 1:
        return None
    if inner > 1:
        return CompressionPlan(ranks, len(nodes), codec, inner, True, inside)
    return CompressionPlan(ranks, len(nodes), inside if len(nodes) == 1 else codec)


def _neighbours(nodes: Sequence[Sequence[int]]) -> int:
    """The ranks of each of several nodes, if these are equal; else 1."""
    return (whole_nodes(nodes) or 1) if len(nodes) > 1 else 1


def gather_encoded(
    flat: Tensor, mesh: Mesh, codec: Codec, gather: Callable[[Tensor], Work], own: Tensor | None = None
) -> WorkList:
    """Fill ``flat`` (1D) with the decoded shards of all ranks, the own one too. This rank's shard is in place already.

    ``gather``: starts an all-gather of bytes (1D, one equal part per shard), of which the own part is in place.
    ``own``: this rank's encoded shard, which is not in place then.
    """
    parts = _rows(flat, mesh.shards)
    costs = Costs()
    others = mesh.shards - 1
    with costs.coded(flat.device):
        codes = torch.empty(mesh.shards, codec.nbytes(parts.shape[1]), dtype=torch.uint8, device=flat.device)
        if own is None:
            codec.encode(parts[mesh.shard_rank], None, codes[mesh.shard_rank])
        else:
            codes[mesh.shard_rank].copy_(own)
    costs.count(parts[0].nbytes * others, codes[0].numel() * others)

    def decode() -> None:
        with costs.coded(flat.device):
            # ``codes`` was allocated on the stream of the launch. Without a record on the stream that decodes, its
            # memory could be reused while it is still being read.
            if accelerator.has_streams(codes.device):
                accelerator.record(codes, accelerator.current_stream(flat.device))
            codec.decode_rows(codes, parts)

    return WorkList([gather(codes.view(-1))], decode, costs=costs)


class _Event:
    """End of the work that was launched on a stream so far."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._event = accelerator.event(device)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.wait()


class Compressor:
    """Compressed reductions over the ranks of one group.

    Args:
        plan: of the group.
        rank: of the group.
        device: of the tensors; on a GPU reductions run on a stream of their own, on a CPU in a thread.
        watch: waits for the thread.
        new_group: makes a process group of those of the given ranks which have this rank. Collective.
    """

    def __init__(
        self,
        plan: CompressionPlan,
        rank: int,
        device: torch.device,
        watch: CollectiveMonitor,
        new_group: Callable[[Sequence[Sequence[int]]], Group],
    ) -> None:
        world = plan.ranks
        inner = plan.inner
        self._inside = plan.inside
        self._world = world
        self._rank = rank
        self._inner = inner
        self._nodes = world // inner
        self._watch = watch
        self._codec = plan.codec
        self._hierarchical = plan.hierarchical
        self.plan = plan
        self._everyone = new_group([range(world)])
        self._across, self._node = self._everyone, None
        if inner > 1:
            self._across = new_group([range(first, world, inner) for first in range(inner)])
            self._node = new_group([range(first, first + inner) for first in range(0, world, inner)])
        self._stream = accelerator.stream(device) if accelerator.has_streams(device) else None
        self._device = device
        self._thread = CollectiveWorker("compression")
        self.costs = Costs()

    def reduce(
        self, out: Tensor, flat: Tensor, residuals: Residuals, add: bool, factor: float, launch: CollectiveId | None
    ) -> WorkList:
        """Write ``factor`` times the sum over the ranks to ``out``, or add it: all of it, or this rank's shard.

        Args:
            out: 1D; all elements if ``residuals`` has a server's, else a shard.
            flat: 1D, one equal part per rank; left alone until the wait.
            residuals: updated.
        """

        costs = Costs()

        def run() -> None:
            total = self._sum(flat, residuals.worker, costs)
            # Codes of few bits decode gaps to values other than zero, and residuals would carry these on.
            _clear(residuals.worker, residuals.gaps if residuals.worker.numel() else ())
            _clear(total, residuals.shard_gaps)
            if residuals.server is not None:
                sums = self._share(total, residuals.server, out, add, factor, costs)
                _clear(residuals.server, residuals.shard_gaps)
                _clear(sums, residuals.gaps)
                if sums is not out:
                    store(out, sums, add, 1.0)
            else:
                store(out, total, add, factor)
            dense, peers = flat.nbytes * (1 if residuals.server is None else 2), self._world
            # Count what is left to send after the sum inside the node.
            if self._hierarchical:
                dense, peers = dense // self._inner, self._nodes
            costs.count(dense * (peers - 1) // peers)
            self.costs.add(costs)

        return self._launch(run, launch, costs)

    def _launch(self, run: Callable[[], None], launch: CollectiveId | None, costs: Costs | None = None) -> WorkList:
        if self._stream is None:
            return WorkList([self._thread.submit(run)], None, self._watch, launch, costs)
        # The gradients are still being written on the current stream.
        self._stream.wait_stream(accelerator.current_stream(self._device))
        with torch.no_grad(), accelerator.use(self._stream):
            run()
        return WorkList([_Event(self._device, self._stream)], costs=costs)

    def _sum(self, flat: Tensor, residual: Tensor, costs: Costs) -> Tensor:
        """This rank's shard (1D fp32) of the sum of decoded gradients."""
        nodes = self._nodes
        inner = self._inner
        mine = self._rank % self._inner
        group, count = (self._across, nodes) if self._hierarchical else (self._everyone, self._world)
        parts, residuals = _rows(flat, count), _rows(residual, count) if residual.numel() else None
        if self._hierarchical and self._node is not None:
            # Part (m, i) is owned by rank i of node m. Send to each rank of this node its parts of all nodes.
            blocks = flat.view(nodes, inner, -1).transpose(0, 1).reshape(inner, -1)
            if self._inside is not None:
                summed = self._exchange(blocks, None, self._inside, self._node, costs)
            else:
                summed = sum_in_rank_order(_swapped(blocks, self._node).unbind(), torch.float32)
            parts = _rows(summed, nodes)
            if residual.numel():
                residuals = residual.view(nodes, inner, -1)[:, mine]
        return self._exchange(parts, residuals, self._codec, group, costs)

    def _exchange(self, parts: Tensor, residuals: Tensor | None, codec: Codec, group: Group, costs: Costs) -> Tensor:
        """The sum (1D fp32) over ``group`` of its ranks' encoded parts for this rank; a part is a row."""
        sent = self._encoded(parts, residuals, codec, group, costs)
        received = _swapped(sent, group)
        with costs.coded(self._device):
            total = torch.empty(parts.shape[1], dtype=torch.float32, device=sent.device)
            codec.decode_sum(received.unbind(), total)
        # Bytes inside the node do not count.
        if group is not self._node:
            costs.count(sent=sent[0].numel() * (len(parts) - 1))
        return total

    def _encoded(self, parts: Tensor, residuals: Tensor | None, codec: Codec, group: Group, costs: Costs) -> Tensor:
        """The rows of ``parts`` as rows of bytes [parts, bytes], with as many bytes on all ranks of ``group``."""
        count, numel = parts.shape
        if codec.fixed_size:
            with costs.coded(self._device):
                rows = torch.empty(count, codec.nbytes(numel), dtype=torch.uint8, device=parts.device)
                codec.encode_rows(parts, residuals, rows)
            return rows
        with costs.coded(self._device):
            left = residuals.unbind() if residuals is not None else [None] * count
            found = [codec.encode(part, residual) for part, residual in zip(parts.unbind(), left, strict=True)]
        # All ranks must send rows of one size, so the codes are padded to the longest ones of any rank. The host waits
        # here, as it has waited for each part: such codes are made on the host.
        longest = accelerator.send(torch.tensor([max(row.numel() for row in found)]), parts.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
        size = -(-int(longest) // _ALIGN) * _ALIGN
        rows = torch.zeros(count, size, dtype=torch.uint8, device=parts.device)
        for row, bytes_of in zip(rows.unbind(), found, strict=True):
            row[: bytes_of.numel()] = bytes_of
        return rows

    def _share(self, total: Tensor, residual: Tensor, out: Tensor, add: bool, factor: float, costs: Costs) -> Tensor:
        """Send this rank's sum to all; returns ``factor`` times all sums, in ``out`` if they replace what is there."""
        mine = self._encoded(total[None], residual[None], self._codec, self._everyone, costs)[0]
        # First between the ranks that have the same place in their nodes, then inside the node: each sum crosses
        # between two nodes once.
        rows = mine.new_empty(self._nodes, mine.numel())
        _gather(rows, mine, self._across)
        if self._node is not None:
            every = mine.new_empty(self._inner, *rows.shape)
            _gather(every, rows, self._node)
            # Rank (m, i) is number i of node m.
            rows = every.transpose(0, 1).reshape(self._world, -1)
        direct = out.dtype == torch.float32 and not add
        sums = out if direct else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        with costs.coded(self._device):
            self._codec.decode_rows(rows, _rows(sums, self._world), factor)
        costs.count(sent=mine.numel() * (self._nodes - 1 + (self._inner - 1) * self._nodes))
        return sums

    def restart_costs(self) -> None:
        """Begin ``costs`` at zero."""
        self.costs = Costs()

    def measure_rate(self, launch: CollectiveId) -> float:
        """Bytes per second of this rank to others while all ranks send, from one small exchange. Collective."""
        seconds: list[float] = []

        def run() -> None:
            sent = torch.zeros(self._world * _PROBE, dtype=torch.uint8, device=self._device)
            received = torch.empty_like(sent)
            dist.barrier(self._everyone)
            start = time.perf_counter()
            dist.all_to_all_single(received, sent, group=self._everyone)
            if self._stream is not None:
                self._stream.synchronize()
            seconds.append(time.perf_counter() - start)

        self._launch(run, launch).wait()
        return (self._world - 1) * _PROBE / seconds[0]


def _rows(flat: Tensor, count: int) -> Tensor:
    """The ``count`` equal parts of ``flat`` (1D) as rows."""
    return flat.view(count, flat.numel() // count)


def _clear(flat: Tensor, gaps: Sequence[tuple[int, int]]) -> None:
    for lo, hi in gaps:
        flat[lo:hi].zero_()


def _swapped(rows: Tensor, group: Group) -> Tensor:
    """Exchange rows: row i of ``rows`` ([ranks, ...]) goes to rank i of ``group``, row i of the result is from it."""
    received = torch.empty_like(rows)
    if accelerator.holds(rows):
        dist.all_to_all_single(received, rows, group=group)
        return received
    peers, mine = dist.get_process_group_ranks(group), dist.get_rank(group)
    exchange(list(zip(peers, rows, strict=True)), list(zip(peers, received, strict=True)), group)
    received[mine] = rows[mine]
    return received


def _gather(out: Tensor, mine: Tensor, group: Group) -> None:
    """Fill ``out`` [ranks, ...] from the ranks' tensors."""
    if not accelerator.holds(out):
        peers = dist.get_process_group_ranks(group)
        exchange([(peer, mine) for peer in peers], list(zip(peers, out, strict=True)), group)
        out[dist.get_rank(group)] = mine
        return
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out.view(-1), mine.reshape(-1), group=group)
