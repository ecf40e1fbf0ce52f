"""The search of ``lt-zero tune``: which runs are made, and which of the measured candidates is the best.

Note [Search]
    The script runs as it is first: this run tells what the planner needs. Then one coordinate after the other (stage
    and offload, shard groups, micro-batch, a pipeline's number of micro-batches and schedule, activation checkpointing,
    bucket size) is varied with the others at their best so far, until none improves or the budget is spent. What cannot
    fit by its plan is never run. The fastest few run again, one after the other in rounds: other work slows a machine
    down for seconds or minutes, never speeds it up, so the median step of a candidate's fastest run counts. There are
    more rounds while a finalist's two fastest runs differ. Of those that noise could have put first, the simplest is
    chosen. What changes results beyond the rounding of sums is measured beside it, and never chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, get_args

from lt_zero.common.errors import ConfigError
from lt_zero.common.units import format_bytes
from lt_zero.config.load import examine
from lt_zero.config.pipelines import Schedule, micro_batches
from lt_zero.planning.search_space import Candidate, Facts, Plan, configured, kept

_FINALISTS = 3
_NEAR = 1.1  # step time at most, in times of the fastest, of a simpler candidate that joins the finalists
_PATIENCE = 2  # times as many rounds at most, on a machine that does other work
_LEAST_NOISE, MOST_NOISE = 0.02, 0.05  # relative differences of step times


class TuningError(RuntimeError):
    """Nothing can be tuned, or nothing fits."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run of the script.

    Attributes:
        seconds: of optimizer steps; () if it failed.
        running, peak: most bytes of a rank, in steps and in all.
        batch: samples of the first micro-batch of a rank; None: unknown.
        problem: why it failed, in one line; "" if it did not.
        too_large: it failed for a lack of memory.
        facts: if they were asked for.
        output: the end of what it printed.
    """

    seconds: tuple[float, ...] = ()
    running: int = 0
    peak: int = 0
    batch: int | None = None
    problem: str = ""
    too_large: bool = False
    facts: Facts | None = None
    output: str = ""


Run = Callable[[Sequence[str], Candidate | None, bool], Outcome]  # (overrides, candidate, with facts)


@dataclass
class Measured:
    """All runs of a candidate."""

    runs: list[tuple[float, ...]] = field(default_factory=list)
    peak: int = 0
    problem: str = ""

    @property
    def seconds(self) -> float:
        """The median step of its fastest run."""
        return min(map(median, self.runs), default=float("inf"))

    @property
    def spread(self) -> float:
        """Share by which its second fastest run was slower."""
        fastest, *others = sorted(map(median, self.runs))
        return others[0] / fastest - 1 if others else 0.0


def choose(measured: Mapping[Candidate, Measured], complexity: Callable[[Candidate], Any]) -> Candidate:
    """The simplest candidate that is not certainly slower than the fastest.

    A candidate counts as slower only if the difference exceeds the spread of repeated runs of one candidate.
    """
    best = min(measured, key=lambda candidate: measured[candidate].seconds)
    fastest, noise = measured[best].seconds, max(_LEAST_NOISE, measured[best].spread)
    near = [one for one, found in measured.items() if found.seconds <= fastest * (1 + max(noise, found.spread))]
    return min(near, key=complexity)


class Tuner:
    """One search.

    Args:
        run: runs the script.
        limit: bytes of a rank on the device that computes; None: what the machine has.
        trials: candidates to measure at most, beside the script as it is.
        rounds: further runs of each finalist; more if they differ.
        minutes: after which nothing new is started; None: no limit.
        batches: the script's micro-batch can be set.
        nvme: folder for offload to files.
        tell: shows a line of progress.
    """

    def __init__(
        self,
        run: Run,
        limit: int | None = None,
        *,
        trials: int = 12,
        rounds: int = 2,
        minutes: float | None = None,
        batches: bool = False,
        nvme: str | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._run = run
        self._limit = limit
        self._trials = trials
        self._rounds = rounds
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._batches = batches
        self.nvme = nvme
        self._tell = tell
        self.measured: dict[Candidate, Measured] = {}
        self.pruned: dict[Candidate, str] = {}
        self._activations = 0  # bytes of a rank, of the script as it is
        self._output = ""  # the end of what the last failed run printed

    # ---- the script as it is -------------------------------------------------------------------------------------

    def begin(self, fallback: Sequence[str]) -> None:
        """Run the script as it is; with the overrides ``fallback`` if it ends before it has reported its facts.

        Raises:
            TuningError: it does not tell them.
        """
        first, changes = self._run((), None, True), list[str]()
        outcome = first
        if first.facts is None and first.too_large:
            self._tell(f"the script as it is: {first.problem}. Once more with {' '.join(fallback)}")
            changes = list(fallback)
            outcome = self._run(changes, None, True)
        if outcome.facts is None and outcome.too_large:
            raise TuningError(f"The script needs more memory before it trains: {outcome.problem}. Allow it more.")
        if outcome.facts is None or (outcome.problem and not outcome.too_large):
            raise TuningError(f"{outcome.problem}\n{outcome.output}".rstrip())
        self.facts = outcome.facts
        self.base = examine(_without(self.facts.base, changes)).usable()
        self._plans = {(plan.setting, plan.sharing, plan.bucket, plan.accumulates): plan for plan in self.facts.plans}
        self._micro = self.facts.micro or outcome.batch
        # In a loop of one's own nothing else compares the batches with the configuration.
        self._batches |= self.facts.loop and outcome.batch is not None and outcome.batch == self.facts.micro
        ladder = dict.fromkeys(plan.setting for plan in self.facts.plans)
        setting = configured(self.base)
        self.origin = Candidate(setting if setting in ladder else next(iter(ladder)))
        self.space = dict(self._coordinates())
        if not changes:
            if first.seconds:
                self._activations = max(0, first.running - self._plan(self.origin).running - self.facts.bare)
            self._note(self.origin, first)

    def _coordinates(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The values of each coordinate; the first one is the script's."""
        facts = self.facts
        found = dict.fromkeys([self.origin.setting, *(plan.setting for plan in facts.plans)])
        yield "setting", [{"setting": setting} for setting in found]
        yield "sharing", [{"sharing": keys} for keys in dict.fromkeys([(), *(plan.sharing for plan in facts.plans)])]
        yield "micro", [{"micro": micro, "accumulation": steps} for micro, steps in self._micros()]
        yield "count", [{"count": count} for count in (None, *self._counts())]
        yield "schedule", [{"schedule": schedule} for schedule in (None, *self._schedules())]
        other = "full" if self.base.activation_checkpointing.mode == "none" else "none"
        yield "checkpointing", [{"checkpointing": mode} for mode in (None, *([] if facts.unrepeated else [other]))]
        yield "bucket", [{"bucket": bucket} for bucket in dict.fromkeys([None, *(plan.bucket for plan in facts.plans)])]

    def _micros(self) -> list[tuple[int | None, int | None]]:
        """Pairs (micro-batch, accumulation): the script's, and those of about half and twice the micro-batch."""
        found: list[tuple[int | None, int | None]] = [(None, None)]
        in_loader = self.facts.layers > 0 and not self.facts.loop  # a pipeline cuts its batch: ``_counts``
        if not self._micro or not self._batches or in_loader:
            return found
        total = self._micro * self.facts.accumulation
        sizes = [size for size in range(1, total + 1) if total % size == 0]
        smaller = [size for size in sizes if 2 * size <= self._micro][-1:]
        larger = [size for size in sizes if size >= 2 * self._micro][:1]
        return found + [(size, total // size) for size in (*smaller, *larger)]

    def _counts(self) -> Iterator[int]:
        """Half and twice the micro-batches of a pipeline, if the script leaves their number open."""
        open_ = self.base.gradient_accumulation_steps is self.base.pipeline.num_microbatches is None
        if not self.facts.layers or self.facts.loop or not open_ or self.base.train_micro_batch_size_per_gpu:
            return
        known = self._cut_into(self.base.micro_batches)
        for wanted in (self.base.micro_batches // 2, self.base.micro_batches * 2):
            if (count := self._cut_into(wanted)) != known:
                yield count

    def _cut_into(self, wanted: int) -> int:
        """The micro-batches that run where so many are wanted."""
        return micro_batches(self._micro, wanted) if self._micro else wanted

    def _schedules(self) -> Iterator[str]:
        """The schedules of a pipeline that its layers allow, if the script leaves the schedule open."""
        block, layers = self.base.pipeline, self.facts.layers
        if not layers or "schedule" in block.model_fields_set:
            return
        for schedule in get_args(Schedule):
            with suppress(ConfigError):  # another number of stages on each rank is written
                made = examine(self.facts.base, overrides=[f"pipeline.schedule={schedule}"]).usable().pipeline
                remade = not self.facts.loop or made.chunks == block.chunks  # a loop has made its layers before
                if schedule != block.schedule and made.ranks * made.chunks <= layers and remade:
                    yield schedule

    # ---- what fits -----------------------------------------------------------------------------------------------

    def _exists(self, candidate: Candidate) -> bool:
        """True if it differs from the others: small models have the same buckets at several sizes."""
        return (candidate.setting, candidate.sharing, candidate.bucket, False) in self._plans

    def _plan(self, candidate: Candidate) -> Plan:
        steps = candidate.accumulation or self.facts.accumulation
        return self._plans[candidate.setting, candidate.sharing, candidate.bucket, steps > 1]

    @property
    def samples(self) -> int | None:
        """Samples of an optimizer step, on all ranks; None: not known."""
        return self.facts.data_ranks * self._micro * self.facts.accumulation if self._micro else None

    def need(self, candidate: Candidate) -> int:
        """Bytes that a rank needs at least: by the plan, and by the measurement of the script as it is."""
        plan, share = self._plan(candidate), 0.0 if candidate.checkpointing == "full" else 1.0
        share *= candidate.micro / self._micro if candidate.micro and self._micro else 1.0
        share *= self._kept(candidate)
        return self.facts.bare + max(plan.most, plan.running + int(share * self._activations))

    def _kept(self, candidate: Candidate) -> float:
        """The activations that a pipeline keeps, in times of those of the script as it is, of equal micro-batches."""
        if not self.facts.layers:
            return 1.0
        before, steps = self.base.micro_batches, candidate.accumulation if self.facts.loop else None
        count = candidate.count or steps or before
        of_size = before / candidate.count if candidate.count is not None else 1.0
        return of_size * kept(self.base, candidate.schedule, count) / kept(self.base)

    def refuse(self, candidate: Candidate) -> str:
        """Reason why a candidate is not run; "" if it is."""
        plan = self._plan(candidate)
        if plan.problem:
            return plan.problem
        if self._limit is not None and (need := self.need(candidate)) > self._limit:
            return f"{format_bytes(need)} needed at least, {format_bytes(self._limit)} allowed"
        return ""

    def fits(self, candidate: Candidate) -> bool:
        """True if it was measured, and kept to the limit."""
        return candidate in self.measured and not self.measured[candidate].problem

    def _allowed(self, candidate: Candidate) -> bool:
        if reason := self.refuse(candidate):
            self.pruned.setdefault(candidate, reason)
        return not reason

    # ---- runs ----------------------------------------------------------------------------------------------------

    def measure(self, candidate: Candidate) -> None:
        overrides = candidate.overrides(self.base, self.nvme)
        outcome = self._run(overrides, candidate, False)
        if candidate.micro is not None and outcome.batch not in (None, candidate.micro):
            text = f"the script's micro-batch has {outcome.batch} samples: it takes its size from elsewhere"
            outcome = replace(outcome, problem=text, seconds=())
        self._note(candidate, outcome)

    def _note(self, candidate: Candidate, outcome: Outcome) -> None:
        known = self.measured.setdefault(candidate, Measured())
        known.peak = max(known.peak, outcome.peak)
        if self._limit is not None and known.peak > self._limit and not outcome.problem:
            text = f"{format_bytes(known.peak)} measured, {format_bytes(self._limit)} allowed"
            outcome = replace(outcome, problem=text, seconds=())
        if outcome.problem and not known.runs:
            known.problem = outcome.problem
            self._output = "" if outcome.too_large else outcome.output
        elif outcome.seconds:
            known.runs.append(outcome.seconds)
        said = outcome.problem or f"{median(outcome.seconds):.4f} s per step"
        self._tell(f"{candidate}: {said}")

    def _left(self) -> bool:
        return len(self.measured) <= self._trials and not self._late()

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def search(self) -> Candidate:
        """Vary one coordinate after the other, see Note [Search]; returns the best candidate.

        Raises:
            TuningError: nothing fits, or every run failed.
        """
        current, before = self.origin, None
        while current != before and self._left():
            before = current
            for values in self.space.values():
                current = self._along([one for value in values if self._exists(one := replace(current, **value))])
        return self.decide()

    def _along(self, row: Sequence[Candidate]) -> Candidate:
        """The fastest of a row; if none fits, the one that needs least."""
        allowed = [candidate for candidate in row if self._allowed(candidate)]
        for candidate in allowed:
            if candidate not in self.measured and self._left():
                self.measure(candidate)
        found = [candidate for candidate in row if self.fits(candidate)]
        if found:
            return min(found, key=lambda candidate: self.measured[candidate].seconds)
        return min(allowed or row, key=self.need)

    def exhaust(self, suggested: Candidate) -> Candidate:
        """Measure every candidate that may fit, and ``suggested`` again; returns the best of all."""
        for candidate in self.everything():
            if self._allowed(candidate) and candidate not in self.measured:
                self.measure(candidate)
        return self.decide(suggested)

    def with_rounding(self, chosen: Candidate) -> Iterator[Candidate]:
        """Measure variants of ``chosen`` that round what ranks send, each as often as ``chosen``.

        They change results, so they are only suggested to the user. Yields those that are faster by more than noise.
        They need no more memory, since messages are shorter.
        """
        for keys in self.facts.rounding:
            candidate = replace(chosen, rounding=keys)
            for _ in range(1 + self._rounds):
                if not self._late():
                    self.measure(candidate)
            if self.fits(candidate) and self.ratio(candidate, chosen) < 1 - _LEAST_NOISE:
                yield candidate

    def ratio(self, one: Candidate, other: Candidate) -> float:
        """The step time of ``one`` in those of ``other``, by their last runs, as many of each."""
        count = min(len(self.measured[candidate].runs) for candidate in (one, other))
        last = [self.measured[candidate].runs[-count:] for candidate in (one, other)]
        times = [min(map(median, runs)) for runs in last]
        return times[0] / times[1]

    def everything(self) -> Iterator[Candidate]:
        """All combinations of the coordinates."""
        rows = [self.origin]
        for values in self.space.values():
            rows = [replace(candidate, **value) for candidate in rows for value in values]
        return filter(self._exists, rows)

    def decide(self, *also: Candidate) -> Candidate:
        """Run the finalists, and those ``also`` given, again, and choose one of them.

        Raises:
            TuningError: nothing fits, or every run failed.
        """
        found = [candidate for candidate in self.measured if self.fits(candidate)]
        if not found:
            raise TuningError(self._nothing())
        fastest = min(self.measured[candidate].seconds for candidate in found)
        ordered = sorted(found, key=lambda candidate: self.measured[candidate].seconds)
        near = [candidate for candidate in ordered if self.measured[candidate].seconds <= _NEAR * fastest]
        finalists = list(dict.fromkeys([*ordered[:_FINALISTS], min(near, key=self._complexity), *also]))
        for number in range(_PATIENCE * self._rounds if len(finalists) > 1 else 0):
            spreads = [self.measured[candidate].spread for candidate in finalists]
            if self._late() or (number >= self._rounds and max(spreads) <= MOST_NOISE):
                break
            for candidate in finalists:
                self.measure(candidate)
        return choose({one: self.measured[one] for one in found if self.fits(one)}, self._complexity)

    def _complexity(self, candidate: Candidate) -> tuple[int, ...]:
        ladder = list(dict.fromkeys(plan.setting for plan in self.facts.plans))
        rank = ladder.index(candidate.setting)
        changes = candidate.checkpointing, candidate.micro, candidate.bucket, candidate.schedule, candidate.count
        return rank, *(value is not None for value in changes), bool(candidate.sharing)

    def _nothing(self) -> str:
        failed = [f"{candidate}: {found.problem}" for candidate, found in self.measured.items()]
        smallest = min(self.everything(), key=self.need)
        text = f"Nothing fits. Least is needed by {smallest}: {format_bytes(self.need(smallest))} per rank at least"
        text += f", {format_bytes(self._limit)} are allowed." if self._limit is not None else "."
        return "\n".join([text, "Use more ranks, or a smaller model or micro-batch.", *failed, self._output]).rstrip()


def _without(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``values`` without the keys that ``overrides`` have set."""
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for override in overrides:
        *above, last = override.partition("=")[0].split(".")
        block: Any = kept
        for name in above:
            block = block.get(name, {})
        block.pop(last, None)
    return kept
