"""``wall_clock_breakdown`` and ``memory_breakdown``: print the time and memory of the phases of a step; late ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

import lightning.pytorch as pl
import psutil
import torch
from rich.table import Table
from torch.optim import Optimizer

from lt_zero.common import accelerator
from lt_zero.common.compat import logged_step
from lt_zero.common.console import RunConsole
from lt_zero.common.phases import NOTHING, PARTS, STAGES, TimedSpan, phase
from lt_zero.common.tables import show
from lt_zero.planning.limits import peak_rss
from lt_zero.training.lightning.model_report import memory_report
from lt_zero.training.lightning.monitor.printing import print_line
from lt_zero.training.lightning.monitor.step_metrics import RunObserver, is_due
from lt_zero.training.lightning.monitor.timing import Clock, Times
from lt_zero.training.lightning.setup import RunSnapshot

EVERY = 10  # optimizer steps between lines without steps_per_print
_WAITS = ("gather", "reduce", "offload")
LATE_SHARE = 0.2  # of a step: if the others wait longer for a rank, a line names it
_LINE = "line"  # the part of ``rest`` in which ranks exchange their times
# All stages without the parts in which a fast rank waits for a slow one.
_BUSY = [(kind, 1) for kind in STAGES] + [(kind, -1) for kind in ("gather", "reduce", "publish", _LINE)]


class StepClock(RunObserver):
    """Rank 0 logs which rank is late, and with ``wall_clock_breakdown`` prints and logs the times of steps.

    They cover the steps since the last line.

    * ``total``: from the end of one optimizer step to the end of the next, over all micro-batches, without validation.
      It is the sum of ``forward``, ``backward``, ``step`` and ``rest`` (phases.py, Note [Stages and parts]).
    * ``gather_wait``, ``reduce_wait``, ``offload_wait``: parts of those. ``clip``, ``publish``: parts of ``step``.
    * the slowest rank: the one with the most time outside of gather, reduce and publish. Waits in collectives of
      others, such as Lightning's at the end of a batch, are not subtracted. With several ranks it is logged as
      ``zero/late_rank``, and ``zero/lateness_ms`` is by how much its time exceeds the mean of the others, who wait as
      long. If that is more than a fifth of a step, a line names the rank and its host. With slow_node_tolerance
      ``zero/late_gradients`` is the share of gradients that were missing in sums.

    All are milliseconds per step, averaged over steps and ranks, and logged as ``time/forward_ms`` and so on. The host
    never waits for a GPU: a line covers the steps that the devices have completed, and is left out if there are none.

    Args:
        every: optimizer steps, counted as ``trainer.global_step`` does; None: when Lightning logs.
        times: whether times are printed and logged; else only which rank is late.
    """

    def __init__(self, every: int | None, times: bool = True) -> None:
        self.every, self._shows_times = every, times
        self._clock: Clock | None = None
        self._pause: TimedSpan = NOTHING
        self._missing_share: Callable[[], float] | None = None  # of sums that late ranks may miss

    def start(self, run: RunSnapshot) -> None:
        self._world = run.engine.world
        exchange = run.engine.exchange
        self._missing_share = exchange.missing_share if exchange.sums_late else None
        if self._world.size == 1 and not self._shows_times:
            return
        self._clock = Clock(self._world.device)
        self._clock.start()

    def stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
        self._clock = None
        self._missing_share = None

    def pause(self) -> None:
        if self._clock is not None:
            self._pause = self._clock.paused().open()

    def resume(self) -> None:
        self._pause.close()

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Collective if a line is due."""
        if self._clock is None:
            return
        self._clock.end_step()
        number = module.trainer.global_step + 1
        if not is_due(module.trainer, number, self.every):
            return
        own = tuple(self._clock.times)
        # Count the exchange: the wait of a fast rank is part of its run.
        with phase(_LINE):
            times = [Times(*rank) for rank in self._world.host_gather(own, "times of steps")]
        if not all(time.steps for time in times):
            return
        self._clock.reset()
        with self._clock.paused():
            shown = metrics(times) if self._shows_times else {}
            if self._shows_times:
                print_line(module, time_line(number, times))
            if len(times) > 1:
                rank, lateness = late_rank(times)
                shown |= {"zero/late_rank": rank, "zero/lateness_ms": lateness}
                if self._missing_share is not None:
                    shown["zero/late_gradients"] = self._missing_share()
                if lateness > LATE_SHARE * metrics(times)["time/total_ms"]:
                    print_line(module, late_line(number, rank, self._world.hosts[rank], lateness, times))
            for logger in module.trainer.loggers:
                logger.log_metrics(shown, step=logged_step(module.trainer))


def metrics(ranks: list[Times]) -> dict[str, float]:
    """Milliseconds per optimizer step, averaged over the ranks."""
    names = {kind: f"{kind}_wait" if kind in _WAITS else kind for kind in (*STAGES, *PARTS)}
    means = {names[kind]: fmean(t.seconds.get(kind, 0.0) / t.steps for t in ranks) * 1e3 for kind in names}
    total = sum(means[kind] for kind in STAGES)
    return {f"time/{name}_ms": value for name, value in {"total": total, **means}.items()}


def time_line(number: int, ranks: list[Times]) -> str:
    """The line that is printed at step ``number``."""
    pairs = [f"{name.removeprefix('time/').removesuffix('_ms')}={ms:.1f}" for name, ms in metrics(ranks).items()]
    stages, parts = ", ".join(pairs[: 1 + len(STAGES)]), ", ".join(pairs[1 + len(STAGES) :])  # the first is the total
    line = f"step {number}, ms per step (mean of {ranks[0].steps}): {stages}; including {parts}"
    if len(ranks) == 1:
        return line
    busy = busy_ms(ranks)
    slowest, _ = late_rank(ranks)
    own = f"{busy[slowest]:.1f} without gather, reduce and publish, mean {fmean(busy):.1f}"
    return f"{line}; slowest rank {slowest}: {own}"


def busy_ms(ranks: list[Times]) -> list[float]:
    """Milliseconds per step that each rank does not wait for others."""
    return [sum(t.seconds.get(kind, 0.0) * sign for kind, sign in _BUSY) / t.steps * 1e3 for t in ranks]


def late_rank(ranks: list[Times]) -> tuple[int, float]:
    """The rank that the others wait for, and how long they do, on average, in milliseconds per step.

    Ranks take equally long for a step, so who waits longer is busy for less: no clocks have to agree.
    """
    busy = busy_ms(ranks)
    late = max(range(len(busy)), key=lambda rank: busy[rank])
    return late, busy[late] - fmean(ms for rank, ms in enumerate(busy) if rank != late)


def late_line(number: int, rank: int, host: str, lateness: float, ranks: list[Times]) -> str:
    """The line that is printed at step ``number`` if ``rank`` is late."""
    share = lateness / metrics(ranks)["time/total_ms"]
    return (
        f"late at step {number}: the others wait {lateness:.1f} ms per step ({share:.0%} of it, mean of"
        f" {ranks[0].steps}) for rank {rank} on host {host}"
    )


# ---- memory --------------------------------------------------------------------------------------------------------


class MemoryPhases(RunObserver):
    """``memory_breakdown``: rank 0 prints its memory at the phases of the first step and of every ``every``-th one.

    It shows the memory that torch has allocated and reserved on a GPU, with the peak since the start of the process or
    the last reset; the resident memory of the process and its peak; and the model states of
    ``ZeroStrategy.memory_report``. With accumulation it shows the last micro-batch.

    Args:
        every: optimizer steps, counted as ``trainer.global_step`` does.
        write: also gets the step of the loggers, the rank, and bytes by kind at each moment.
    """

    def __init__(self, every: int, write: Callable[[int, int, Mapping[str, Mapping[str, int]]], None]) -> None:
        self.every, self._write = every, write

    def start(self, run: RunSnapshot) -> None:
        self._run = run
        self._rows: dict[str, dict[str, int]] = {}
        self._shown = False

    def before_forward(self, module: pl.LightningModule) -> None:
        self._note("before forward", module)

    def before_backward(self, module: pl.LightningModule) -> None:
        self._note("after forward", module)

    def after_backward(self, module: pl.LightningModule) -> None:
        self._note("after backward", module)

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._note("after step", module)
        number = module.trainer.global_step + 1
        if self._rows and self._due(number):
            console = RunConsole()
            with console.capture() as text:
                show(memory_table(number, self._rows), console)
            print_line(module, text.get())
            self._write(logged_step(module.trainer), self._run.rank, self._rows)
            self._shown, self._rows = True, {}

    def _due(self, number: int) -> bool:
        return not self._shown or number % self.every == 0

    def _note(self, moment: str, module: pl.LightningModule) -> None:
        if self._run.rank != 0:
            return
        following = module.trainer.global_step + 1
        # With manual optimization each optimizer may step after a forward.
        if any(self._due(following + index) for index in range(max(1, len(module.trainer.strategy.optimizers)))):
            states = {kind: here for kind, (here, _) in memory_report(self._run.engine, self._run.sharded).items()}
            self._rows.pop(moment, None)  # rows stay in the order of their last update
            self._rows[moment] = {**memory_now(self._run.engine.device), **states}


def memory_now(device: torch.device) -> dict[str, int]:
    """Memory in bytes, of a GPU and of this process."""
    memory = {}
    if accelerator.is_accelerator(device):
        memory["allocated"] = accelerator.allocated(device)
        memory["allocated, peak"] = accelerator.peak_allocated(device)
        memory["reserved"] = accelerator.reserved(device)
    resident = psutil.Process().memory_info().rss
    return {**memory, "process": resident, "process, peak": max(resident, peak_rss())}


def memory_table(number: int, rows: dict[str, dict[str, int]]) -> Table:
    """The bytes at the moments of step ``number``, by kind."""
    table = Table(title=f"Memory in MB (1e6 bytes) at step {number}, rank 0")
    table.add_column("moment")
    for name in next(iter(rows.values())):
        table.add_column(name, justify="right")
    for moment, values in rows.items():
        table.add_row(moment, *(f"{value / 1e6:,.1f}" for value in values.values()))
    return table
