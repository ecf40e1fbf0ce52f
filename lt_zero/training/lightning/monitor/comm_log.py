"""``comms_logger``: how often, how large and how long the collectives of the engine are.

Note [What is measured]
    bytes   of the buffer: all shards together for all_gather and reduce_scatter, the tensor for all_reduce and
            broadcast, as the "size" of nccl-tests. For Python objects the pickled size that this rank sends, without
            a bandwidth; 0 for a barrier.
    time    from the launch to the end of ``wait``, with local sums (gloo), the wait for late ranks, and computation
            that hides the communication. The bandwidths are therefore lower bounds.
    waited  the part of the time in which the caller did nothing else; all of it in a blocking call.
    algbw   bytes / time. busbw: algbw times a factor per operation, so that it can be compared with the links:
            https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    On a GPU both times are between events on the launching stream, read once the device has passed them.

    plain, sent   bytes that this rank sends to others in compressed collectives, before and after.
    coding  the time in which it encodes and decodes, on a CPU; it is part of the time.

    A collective here may be several of torch.distributed's, or a copy through shared memory (transport.py). Checks
    of the sequence, roll calls, and Lightning's collectives are not included.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table

from lt_zero.common import accelerator
from lt_zero.core.comm.costs import Costs
from lt_zero.core.comm.options import RecordedCollectives
from lt_zero.core.comm.ranks import Unlogged
from lt_zero.core.comm.work import Work, WorkList
from lt_zero.training.lightning.monitoring import CommRecord


def bus_factor(operation: str, world: int) -> float:
    """The factor by which nccl-tests multiply algbw to compare it with the bandwidth of a link.

    >>> bus_factor("all_reduce", 4), bus_factor("reduce_scatter", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    part = (world - 1) / world
    return {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "all_to_all": part}.get(operation, 1.0)


class _Sum(NamedTuple):
    calls: int
    seconds: float
    shortest: float
    longest: float
    waited: float
    dense: int = 0
    sent: int = 0
    coding: float = 0.0


class _Open(NamedTuple):
    """A launched collective; ``launched`` is a time in seconds, or an event of a GPU."""

    operation: str
    name: str
    nbytes: int
    launched: Any  # seconds; on a GPU an event
    ended: Any = None  # on a GPU: the event after the collective, on a stream that waits for nothing else
    costs: Costs = Costs()  # of a compressed one


class CommLog(Unlogged):
    """Adds up collectives. Two threads may use it (offload/background.py).

    Args:
        device: device whose stream launches.
        world: number of ranks.
        show: prints a line; None: this rank prints nothing.
    """

    def __init__(self, device: torch.device, world: int, show: Callable[[str], None] | None = None) -> None:
        self._device = device
        self._world = world
        self._show = show
        self._recorded = RecordedCollectives()  # until ``configure``
        self._sums: dict[tuple[str, str, int], _Sum] = {}
        self._adding = threading.Lock()
        self._unread: deque[tuple[_Open, Any]] = deque()  # on a GPU: and the event when the wait began
        self._streams: dict[tuple[str, int], Any] = {}  # by operation and thread: those of one group run in order

    def configure(self, recorded: RecordedCollectives) -> None:
        """Choose the collectives to record, and drop earlier records of others."""
        self._read(wait=True)
        before = self._sums
        self._sums = {}
        self._recorded = recorded
        for (operation, name, nbytes), found in before.items():
            if operation in recorded.operations:
                self._add(operation, name, nbytes, found)

    def clear(self) -> None:
        """Drop all records."""
        self._sums.clear()
        self._unread.clear()

    def open(self, operation: str, name: str, nbytes: int, host: bool = False) -> _Open | None:
        if operation not in self._recorded.operations:
            return None
        return _Open(operation, name, nbytes, self._now(host))

    def follow(self, opened: _Open | None, work: Work) -> Work:
        if opened is not None and isinstance(work, WorkList):
            # A wait for gloo's works would block the host, so only works of streams are followed.
            works = work.works if work.watch is None else ()
            return _Recorded(self, self.launched(opened, works), work)
        self.ended(opened)  # anything else is complete
        return work

    def ended(self, opened: _Open | None) -> None:
        if opened is not None:
            self.close(opened, opened.launched)

    def launched(self, opened: _Open, works: Sequence[Work]) -> _Open:
        """Call after the launch of ``works``, which streams can wait for and which run beside the computation.

        Their end is recorded on a stream of its own: on the computation's it would come after what was computed until
        the wait.
        """
        if isinstance(opened.launched, float) or not works:
            return opened
        key = opened.operation, threading.get_ident()
        if key not in self._streams:
            self._streams[key] = accelerator.stream(self._device)
        with accelerator.use(self._streams[key]):
            self._streams[key].wait_event(opened.launched)
            for work in works:
                work.wait()
            return opened._replace(ended=self._now(host=False))

    def now(self, opened: _Open) -> Any:
        """The time by the clock of this collective."""
        return self._now(isinstance(opened.launched, float))

    def close(self, opened: _Open, waiting: Any) -> None:
        """Call after the wait, which began at ``waiting``."""
        if isinstance(opened.launched, float):
            ended = self.now(opened)
            self._end(opened, ended - opened.launched, ended - waiting)
            return
        # Launched on the computation's stream, which has waited: the end is now.
        if opened.ended is None:
            opened = opened._replace(ended=self.now(opened))
        with self._adding:
            self._unread.append((opened, waiting))
        if self._recorded.prints:
            opened.ended.synchronize()
        self._read(wait=False)

    def _now(self, host: bool) -> Any:
        if host or not accelerator.has_streams(self._device):
            return time.perf_counter()
        event = accelerator.event(self._device, timing=True)
        event.record(accelerator.current_stream(self._device))
        return event

    def _read(self, wait: bool) -> None:
        while True:
            with self._adding:
                if not self._unread:
                    return
                opened, waiting = self._unread[0]
                if not (wait or (opened.ended.query() and waiting.query() and opened.costs.settle(False))):
                    return
                self._unread.popleft()
            opened.ended.synchronize()
            waiting.synchronize()
            opened.costs.settle(wait=True)
            # Negative if the collective had ended before the wait began.
            waited = max(waiting.elapsed_time(opened.ended), 0.0)
            self._end(opened, opened.launched.elapsed_time(opened.ended) / 1e3, waited / 1e3)

    def _end(self, opened: _Open, seconds: float, waited: float) -> None:
        costs = opened.costs
        new = _Sum(1, seconds, seconds, seconds, waited, costs.dense, costs.sent, costs.coding)
        self._add(opened.operation, opened.name, opened.nbytes, new)
        if self._recorded.prints and self._show is not None:
            caller = f" ({opened.name})" if self._recorded.by_name and opened.name else ""
            self._show(f"comm: {opened.operation}{caller}, {opened.nbytes} bytes, {seconds * 1e3:.4g} ms")

    def _add(self, operation: str, name: str, nbytes: int, new: _Sum) -> None:
        key = operation, name if self._recorded.by_name else "", nbytes
        with self._adding:
            old = self._sums.get(key)
            if old is not None:
                least, most = min(old.shortest, new.shortest), max(old.longest, new.longest)
                sums = (old.waited + new.waited, old.dense + new.dense, old.sent + new.sent, old.coding + new.coding)
                new = _Sum(old.calls + new.calls, old.seconds + new.seconds, least, most, *sums)
            self._sums[key] = new

    def records(self, wait: bool = True) -> list[CommRecord]:
        """Records of all collectives, by operation, larger messages first.

        Args:
            wait: for the GPU. False after an error: the GPU may wait for a rank that has ended, so only collectives
                that it has completed are included.
        """
        self._read(wait)
        found = []
        for (operation, name, nbytes), total in self._sums.copy().items():
            algbw = nbytes * total.calls / total.seconds if total.seconds else 0.0
            busbw = algbw * bus_factor(operation, self._world)
            costs = (total.dense, total.sent, total.coding)
            found.append(CommRecord(operation, name, nbytes, *total[:5], algbw, busbw, *costs))
        return sorted(found, key=lambda record: (record.operation, -record.nbytes, record.name))


def comm_table(records: Iterable[CommRecord], rank: int = 0) -> Table:
    """Table of ``records`` for rich; bandwidths in GB/s (1e9 bytes), times in ms."""
    records = list(records)
    table = Table(title=f"Collectives of rank {rank}", title_justify="left")
    named = any(record.name for record in records)
    table.add_column("operation", no_wrap=True)
    if named:
        table.add_column("for", overflow="fold")
    times = [f"{of} ms" for of in ("total", "mean", "min", "max", "waited")]
    for column in ("bytes", "calls", *times, "algbw GB/s", "busbw GB/s"):
        table.add_column(column, justify="right")
    compresses = any(record.sent for record in records)
    for column in ("plain MB", "sent MB", "ratio", "coding ms") if compresses else ():
        table.add_column(column, justify="right")
    for r in records:
        seconds = [r.seconds, r.seconds / r.calls, r.shortest, r.longest, r.waited]
        rates = [f"{rate / 1e9:.3g}" if rate else "" for rate in (r.algbw, r.busbw)]
        if compresses and r.sent:
            rates += [f"{r.dense / 1e6:.4g}", f"{r.sent / 1e6:.4g}", f"{r.dense / r.sent:.1f}", f"{r.coding * 1e3:.4g}"]
        elif compresses:
            rates += [""] * 4
        texts = [f"{r.nbytes:,}", str(r.calls), *(f"{s * 1e3:.4g}" for s in seconds), *rates]
        table.add_row(r.operation, *([r.name] if named else []), *texts)
    return table


class _Recorded:
    """A launched collective that is recorded at its first wait."""

    def __init__(self, log: CommLog, opened: _Open, work: WorkList) -> None:
        self._log = log
        self._opened = opened
        self._work = work
        self._over = False

    def wait(self) -> None:
        waiting = self._log.now(self._opened)
        self._work.wait()
        if not self._over:
            self._over = True
            self._log.close(self._opened._replace(costs=self._work.costs or Costs()), waiting)
