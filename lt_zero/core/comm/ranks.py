"""Some ranks of a run, and the order in which they launch collectives: all of them (world.py), or a shard group.

Note [Order of launches]
    Ranks must launch the same collectives in the same order. Nothing in this folder reorders; the callers launch in an
    order that depends only on the module and the recorded schedule, not on data (grad_reducer.py, gather.py).
    When a bucket's gradients are complete, relative to the gathers around it, does depend on data: a rank whose router
    skipped an expert reduces later. So reductions have their own process group and their own numbers. (One group with
    ``CUDA_DEVICE_MAX_CONNECTIONS=1``, where a second one could only deadlock with the first.) A user's module
    may break the rule, so it is checked: work.py, Note [Unforeseen collectives].
    Each set of ranks has numbers of its own. A rank that belongs to several sets launches the collectives of all of
    them in one order, that of the engine's units.
"""

from __future__ import annotations

import os
import pickle
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common.descriptors import explain_full_table, fullness, is_full_table
from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.common.users_code import user_line
from lt_zero.core.comm.objects import gather, packed
from lt_zero.core.comm.process_groups import backend_of
from lt_zero.core.comm.shared_memory import FENCES, Barrier, Maxima, SharedArena
from lt_zero.core.comm.work import CALL, Channel, CollectiveId, CollectiveMonitor, Done, Work, WorkList
from lt_zero.core.health.hang_detection import HangDetector
from lt_zero.core.health.verdict import CALLED, OVER

if TYPE_CHECKING:
    from lt_zero.core.comm.host_maximum import HostMaxima

RING = 4  # ranks, up to which gloo's own all-reduce takes no more time than a thread does


class LaunchOrder:
    """Numbers the collectives of one set of ranks, and compares them before their launch where ranks might diverge.

    Args:
        watch: the state of this rank's collectives.
        ranks: of the run, in order; this is one of them.
        name: of this set of ranks, which no other has; "": all ranks.

    Attributes:
        host: a gloo group over the ranks; None for a single process.
        of_reductions: another one, by which reductions are compared.
        compares_all: compare each collective, reductions too (debug mode).
        arena: memory that the ranks share, by which other collectives are compared; None: they share none.
        detector: finds ranks that diverge; None: there are no others, or they are simulated.
    """

    def __init__(self, watch: CollectiveMonitor, ranks: Sequence[int], name: str = "") -> None:
        self._watch = watch
        self.ranks = tuple(ranks)
        self._collectives = watch.open(f"collective {name}".strip(), self.ranks)
        self._reductions = watch.open(f"reduction {name}".strip(), self.ranks)
        self.host: dist.ProcessGroup | None = None
        self.of_reductions: dist.ProcessGroup | None = None
        self.compares_all = False
        self.arena: SharedArena | None = None
        self.detector: HangDetector | None = None
        self._comparisons = 0
        self._maxima: Maxima | None = None  # in ``arena``
        self._host_maxima: HostMaxima | None = None  # over ``host``

    def launch(self, operation: str, name: str, numel: int, compare: bool = False) -> CollectiveId:
        """Number the collective that is launched next, and compare it over the ranks if it was not predicted.

        Raises:
            RuntimeError: ranks diverge, see Note [Unforeseen collectives].
        """
        launch, predicted = self._number(self._collectives, operation, name, numel)
        if compare or not predicted or self.compares_all:
            self._compare(launch)
        return launch

    def launch_reduction(self, operation: str, name: str, numel: int) -> CollectiveId:
        """Number the reduction that is launched next. Raises as ``launch``."""
        launch, _ = self._number(self._reductions, operation, name, numel)
        if self.compares_all:
            self._compare(launch)
        return launch

    def _number(self, channel: Channel, operation: str, name: str, numel: int) -> tuple[CollectiveId, bool]:
        # After a verdict connections are closed, and no collective works any more.
        self._watch.raise_verdict()
        if self.detector is not None and self.detector.ends.posted:
            self.detector.go_on()
        return channel.launch(operation, name, numel)

    def _compare(self, launch: CollectiveId) -> None:
        """Compare the ranks' collectives up to ``launch``; a barrier."""
        channel = self._watch.channels[launch.channel]
        group = self.of_reductions if channel is self._reductions else self.host
        if self.detector is None or group is None:
            return
        mine = channel.checksum
        if self.arena is not None and channel is self._collectives:
            self._comparisons += 1
            # Two numbers take turns: a peer may still read this one when this rank posts its next. It cannot be two
            # behind, as each comparison is a barrier.
            self.arena.post(self._comparisons % 2, mine)
            self._watch.wait(Barrier(self.arena, FENCES), launch)
            checksums = self.arena.posted(self._comparisons % 2)
        else:
            rows = [torch.empty(1, dtype=torch.int64) for _ in self.ranks]
            self._watch.wait(dist.all_gather(rows, torch.tensor([mine]), group=group, async_op=True), launch)
            checksums = [int(row) for row in rows]
        if checksums.count(mine) < len(checksums):
            self.detector.raise_divergence(launch)

    def launch_maximum(self, tensor: Tensor, launch: CollectiveId) -> Work:
        """Start the element-wise maximum over the ranks of a tensor on the host, in place."""
        if self.arena is not None:
            self._maxima = self._maxima or Maxima(self.arena)
            return self._maxima.launch(tensor, partial(self._watch.wait, launch=launch))
        assert self.host is not None
        work: Any
        if self.detector is not None and len(self.ranks) > RING:
            if self._host_maxima is None:
                from lt_zero.core.comm.host_maximum import HostMaxima

                self._host_maxima = HostMaxima(self.host)
            work = self._host_maxima.launch(tensor)
        else:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.host, async_op=True)
        return WorkList([work], None, self._watch if self.detector is not None else None, launch)

    def rest(self) -> None:
        """End the thread for maxima, if there is one, until the next."""
        if self._host_maxima is not None:
            self._host_maxima.stop()

    def expect(self, labels: Iterable[tuple[str, str, int]]) -> None:
        """Predict that these are launched next, in this order: (operation, name, elements)."""
        self._collectives.expect(labels)


class Unlogged:
    """A log of the collectives of a run that records nothing."""

    def open(self, operation: str, name: str, nbytes: int, host: bool = False) -> Any:
        """Call before a launch; None if it is not recorded. ``host``: the collective is on the host, not the device."""
        return None

    def follow(self, opened: Any, work: Work) -> Work:
        """Record ``work``, launched after ``open``, once it was waited for; returns the work to wait for."""
        return work

    def ended(self, opened: Any) -> None:
        """Record a collective that was waited for where it was launched."""


# Makes a log out of the device, the number of ranks, and what prints a line (None: this rank prints nothing).
NewLog = Callable[[torch.device, int, Callable[[str], None] | None], Unlogged]


class Ranks(ProcessLocal):
    """Some ranks of a run, this one among them, and the collectives of all of them.

    Args:
        process_group: over the ranks; None: a single process without one.
        ranks: of the run, in order.
        rank: this one's number among them.
        device: of tensors in collectives.
        order: numbers the collectives.
        log: records them.

    Attributes:
        size: the number of ranks.
        backend: of ``process_group`` for ``device``; "" without one.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        watch: CollectiveMonitor,
        order: LaunchOrder,
        log: Unlogged,
    ) -> None:
        self.process_group = process_group
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = rank
        self.device = device
        self.watch = watch
        self.order = order
        self.log = log
        self.backend = backend_of(device, process_group) if process_group is not None else ""
        self._gloo = self.backend == "gloo"
        self._pid = os.getpid()

    @cached_property
    def of_process(self) -> tuple[int, ...]:
        """The ranks as torch numbers them in the default process group; () in a single process without one."""
        return tuple(dist.get_process_group_ranks(self.process_group)) if self.process_group is not None else ()

    @property
    def alone(self) -> bool:
        """True for a single rank without a process group."""
        return self.process_group is None and self.size == 1

    def broadcast(self, tensor: Tensor, name: str, src: int = 0) -> None:
        """Give every rank the values that ``tensor`` has on rank ``src`` of these."""
        self._require_device(tensor, name)
        if self.process_group is not None:
            opened = self.log.open("broadcast", name, tensor.nbytes)
            launch = self.order.launch("broadcast", name, tensor.numel())
            work = dist.broadcast(tensor, self._peer(src), group=self.process_group, async_op=self._gloo)
            self._wait(work, launch)
            self.log.ended(opened)

    def sum_all(self, value: Tensor, name: str) -> Tensor:
        """The sum over all ranks of a tensor, in place."""
        return self._reduce_small(value, dist.ReduceOp.SUM, name)

    def sum_scalar(self, value: Tensor, name: str) -> Tensor:
        """The sum over the ranks that have different elements, in place; these are all."""
        return self.sum_all(value, name)

    def max_all(self, value: Tensor, name: str) -> Tensor:
        """The maximum over all ranks of a tensor, in place."""
        return self._reduce_small(value, dist.ReduceOp.MAX, name)

    def _reduce_small(self, value: Tensor, op: Any, name: str) -> Tensor:
        self._require_device(value, name)
        if self.process_group is not None:
            opened = self.log.open("all_reduce", name, value.nbytes)
            launch = self.order.launch("all-reduce", name, value.numel())
            work = dist.all_reduce(value, op=op, group=self.process_group, async_op=self._gloo)
            self._wait(work, launch)
            self.log.ended(opened)
        return value

    def host_max(self, flags: Tensor, name: str) -> Work:
        """Element-wise maximum over the ranks of a CPU tensor, in place, by shared memory or the gloo group."""
        if self.process_group is None:
            return Done()
        opened = self.log.open("all_reduce", name, flags.nbytes, host=True)
        launch = self.order.launch("flags", name, flags.numel())
        return self.log.follow(opened, self.order.launch_maximum(flags, launch))

    def roll_call(self, what: str) -> None:
        """Wait until each of these ranks has called this for ``what``, an operation of all of them. Collective.

        Raises:
            RuntimeError: a rank never will, or called it for another operation. No collective works afterwards.
        """
        detector = self.order.detector
        if detector is None:
            return
        if os.getpid() != self._pid:
            raise RuntimeError(f"`{what}` was called in a forked process, which is no rank. Call it in rank processes.")
        try:
            self.order.launch(CALL, what, 0, compare=True)
        except RuntimeError as error:
            if self.watch.verdict is not None:
                raise
            place = user_line(sys._getframe())
            # The call is to blame only if the others have come to their end without it. If one was killed, or failed,
            # the error names that one; the rest may have ended since because of it.
            over = [rank for rank in detector.ends.all_over() if rank in self.ranks]
            if over:
                raise RuntimeError(
                    f"`{what}` was called on rank {self.ranks[self.rank]} ({place}) and not on"
                    f" {', '.join(f'rank {rank}' for rank in over)}, which {OVER}. {CALLED}"
                ) from error
            raise RuntimeError(f"{error} It waited in `{what}` ({place}), which all ranks have to call.") from error

    def expect_broadcasts(self, tensors: Iterable[tuple[str, int]]) -> None:
        """Compare the broadcasts that follow, (name, elements), at once, not each before its launch. Collective.

        If ranks expect different ones, or launch other collectives in between, these are compared as always.
        """
        if self.process_group is None:
            return
        labels = [("broadcast", name, numel) for name, numel in tensors]
        mine = zlib.crc32(repr(labels).encode())
        extremes = torch.tensor([mine, -mine])
        # The result is the maximum and the negative minimum, whose sum is zero if all ranks have the same number.
        self.host_max(extremes, "broadcasts to come").wait()
        if not extremes.sum():
            self.order.expect(labels)

    def _require_device(self, tensor: Tensor, name: str) -> None:
        """Raise for a tensor on another device. A GPU's backend would raise, too, but tests on the CPU have none."""
        if tensor.device.type != self.device.type:
            raise RuntimeError(
                f"A collective for {name!r} got a tensor on {tensor.device}, its group is of {self.device}."
            )

    def _wait(self, work: Any, launch: CollectiveId) -> None:
        if work is not None:  # None: the backend has waited
            self.watch.wait(work, launch)

    def _peer(self, rank: int) -> int:
        assert self.process_group is not None
        return dist.get_global_rank(self.process_group, rank)

    # ---- objects ---------------------------------------------------------------------------------------------------

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Context for torch's blocking collectives: explains their errors."""
        try:
            yield
        except RuntimeError as error:
            if self.order.detector is not None:
                self.order.detector.explain(error)
            raise

    def problems(self, problem: str | None, name: str) -> list[str]:
        """The problems of all ranks ("rank 1: ..."), on every rank; [] if there are none. Collective."""
        flag = torch.tensor([problem is not None], dtype=torch.uint8)
        self.host_max(flag, name).wait()
        if not flag.item():
            return []
        found = zip(self.ranks, self.host_gather(problem, name), strict=True)
        return [f"rank {rank}: {text}" for rank, text in found if text is not None]

    @contextmanager
    def agree(self, what: str, error: type[Exception]) -> Iterator[None]:
        """Context for work that each rank does for itself: if it fails on one rank, all ranks raise. Collective.

        Raises:
            Exception: what this rank's work raised; ``error`` with the problems of the others if only they failed.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as caught:
            problem = caught
        text = None if problem is None else str(problem) or repr(problem)
        if problem is not None and is_full_table(problem):
            text = f"{text} {fullness()}"
            explain_full_table(problem)
        found = self.problems(text, what)
        if problem is not None:
            raise problem
        if found:
            raise error(f"{what[0].upper()}{what[1:]} failed on another rank: {' '.join(found)}")

    def host_broadcast(self, value: Any, name: str) -> Any:
        """The first rank's (small, picklable) Python value on every rank."""
        if self.process_group is None:
            return value
        mine = packed(value) if self.rank == 0 else b""
        opened = self.log.open("broadcast_object_list", name, len(mine), host=True)
        # torch's collective blocks: make sure that all ranks enter it.
        self.order.launch("object", name, 0, compare=True)
        box = [mine]
        with self.explaining():
            dist.broadcast_object_list(box, src=self._peer(0), group=self.order.host)
        self.log.ended(opened)
        return pickle.loads(box[0])

    def host_gather(self, value: Any, name: str) -> list[Any]:
        """The (small, picklable) Python values of all ranks, on every rank. Equal ones are one object there."""
        if self.process_group is None:
            return [value]
        mine = packed(value)
        opened = self.log.open("all_gather_object", name, len(mine), host=True)
        self.order.launch("objects", name, 0, compare=True)
        with self.explaining():
            found = gather(mine, self.rank, self.size, self.order.host)
        self.log.ended(opened)
        return found
