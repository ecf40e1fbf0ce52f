"""The user's optimizer through one kernel: unscale, clip, update and low-precision copy in one pass over memory.

The optimizer stays the user's: its groups are read at every step, its state has its own keys and shapes. The kernels
agree with the optimizers' arithmetic to the last bits (``lt_zero.ops``).

Note [Deferred factor]
    Unscaling and clipping multiply all gradients by one number. Where the kernel takes all gradients of a bucket,
    the number is recorded (``Accumulator.defer``) and multiplied in by the kernel. Any other reader of the gradients
    multiplies them first (``Accumulator.apply_deferred_scale``).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_zero import ops
from lt_zero.common.compat import step_hooks
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.layout import ALIGN
from lt_zero.step.fragments import Member
from lt_zero.step.kernels import KERNELS, Kernel, Options, Rows, is_plain
from lt_zero.step.lamb import FullNorms, launch_lamb

log = logging.getLogger("lt_zero")

# ---- rows of elements ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The step of neighbouring elements, with all numbers, so that the kernel may run later in another thread."""

    run: Run
    lo: int  # first element, in the run
    hi: int
    index: int  # of the first parameter, in its bucket
    options: Options  # of the operation, when the step was planned


class Run:
    """Neighbouring fragments of one parameter group: for the kernel one row of master weights, gradients and states.

    Alignment gaps between the fragments hold zeros, which every kernel leaves at zero. Parameters that were never used
    have no state and are in no run. The state of a fragment is a view of the run's; other state (from a checkpoint, or
    user code) is copied into it by ``adopt``.

    Args:
        bucket: that the fragments are of.
        members: the fragments.
        keys: of the element-wise states.
        kernel: of the optimizer.
        initial: what states begin with.
    """

    def __init__(self, bucket: Bucket, members: list[Member], keys: tuple[str, ...], kernel: Kernel, initial: float):
        self.bucket, self._keys, self._counting, self._initial = bucket, keys, kernel.counts, initial
        self._apart = kernel.collective  # fragments are stepped one by one
        self.lo = members[0].piece.offset
        self.hi = members[-1].piece.offset + members[-1].piece.numel
        device = members[0].fragment.device
        fp32, cpu = torch.float32, torch.device("cpu")
        self._stored = [bucket.state_store(key, fp32) for key in keys]
        self._own = [torch.zeros(self.hi - self.lo, dtype=fp32, device=device) for s in self._stored if s is None]  # 1D
        self.steps = torch.zeros(len(members), dtype=fp32, device=cpu)  # 1D; on the CPU as torch's counters
        self._counted = torch.zeros_like(self.steps)  # increments of the last step
        self._new = [False] * len(members)  # without state before the last step
        self._views = [self._view(number, member) for number, member in enumerate(members)]

    @property
    def states(self) -> list[Tensor]:
        """The element-wise states (1D); stored tensors have to be in memory."""
        return self._own or [stored.tensor[self.lo : self.hi] for stored in self._stored if stored is not None]

    def _view(self, number: int, member: Member) -> dict[str, Tensor]:
        piece, shape = member.piece, member.fragment.shape
        lo = piece.offset - self.lo
        rows = [
            state[lo : lo + piece.numel].view(shape) if stored is None else stored.lend(piece.offset, shape)
            for state, stored in zip(self.states, self._stored, strict=True)
        ]
        count = {"step": self.steps[number]} if self._counting else {}
        return {**count, **dict(zip(self._keys, rows, strict=True))}

    def holds(self, states: list[Options]) -> bool:
        """Whether ``states`` are this run's views, not replaced by others."""
        return all(
            all(found.get(key) is view for key, view in views.items())
            for found, views in zip(states, self._views, strict=True)
        )

    def adopt(self, members: list[Member], state: dict[Any, Any]) -> None:
        """Make the optimizer's state of each fragment a view of this run's, keeping its values."""
        for number, (member, views) in enumerate(zip(members, self._views, strict=True)):
            if not views:
                continue
            found = state.setdefault(member.fragment, {})
            self._new[number] = all(found.get(key) is None for key in views)
            if not self._counting and any(found.get(key) is not view for key, view in views.items()):
                self.steps[number] = 0.0 if self._new[number] else 1.0  # only the first step differs from the others
            for key, view in views.items():
                given = found.get(key)
                if given is view:
                    continue
                if given is None:
                    view.fill_(0.0 if key == "step" else self._initial)
                elif not isinstance(given, Tensor):
                    view.fill_(given)
                elif given.numel() == view.numel():
                    if given.data_ptr() != view.data_ptr():
                        view.copy_(given.view(view.shape))
                else:
                    raise ValueError(
                        f"The state {key!r} of a parameter has shape {tuple(given.shape)}, {tuple(view.shape)} is "
                        "needed. Load a state that was saved for the same parameters."
                    )
                found[key] = view

    def parts(self, members: list[Member], at: Callable[[float], Options]) -> Iterator[Part]:
        """The ranges of the run that have a gradient, with the options ``at`` their step number; counts the step."""
        used = torch.tensor([float(member.used) for member in members], dtype=torch.float32, device=self.steps.device)
        self.steps += used
        self._counted = used
        counts = self.steps.tolist()
        options = {count: at(count) for count in {counts[i] for i, member in enumerate(members) if member.used}}
        numbered = [(options[counts[i]] if member.used else None, member.piece) for i, member in enumerate(members)]
        for found, row in groupby(numbered, key=lambda item: item[0]):
            pieces = [piece for _, piece in row]
            if found is not None:
                for some in [[piece] for piece in pieces] if self._apart else [pieces]:
                    lo, hi = some[0].offset - self.lo, some[-1].offset + some[-1].numel - self.lo
                    yield Part(self, lo, hi, some[0].index, found)

    def uncount(self, members: list[Member], state: dict[Any, Any]) -> None:
        """Undo the counting of the last step; what had no state before it has none."""
        self.steps -= self._counted
        self._counted = torch.zeros_like(self._counted)
        for member, views, new in zip(members, self._views, self._new, strict=True):
            if new and (found := state.get(member.parameter)) is not None:
                for key in views:
                    found.pop(key, None)
                if not found:
                    del state[member.parameter]


# ---- the step --------------------------------------------------------------------------------------------------------


class FusedStep:
    """The kernel's steps of one optimizer.

    Args:
        optimizer: that ``fits``.
        norms: of full parameters, for a kernel that needs them.
    """

    def __init__(self, optimizer: Optimizer, norms: FullNorms | None = None) -> None:
        self._optimizer, self._kernel, self._norms = optimizer, KERNELS[type(optimizer)], norms
        self._runs: dict[Bucket, tuple[list[tuple[int, int, bool]], list[Run]]] = {}
        self._last: list[tuple[Run, list[Member]]] = []  # of the last step
        self._groups: tuple[dict[int, int], list[Options]] | None = None  # of the running step
        self._told = False

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """Whether a kernel computes the updates of optimizers of this class."""
        return type(optimizer) in KERNELS

    def takes(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        """The ``buckets`` that the kernel steps."""
        if self.refusal(""):
            return set()
        return {
            bucket
            for bucket in buckets
            if bucket.step_dtype == bucket.weights.master_dtype == torch.float32
            and ops.available(torch.device("cpu") if bucket.offloaded else bucket.flat.device)
        }

    def steps_alone(self, bucket: Bucket) -> bool:
        """Whether this rank steps a bucket without collectives; the same on all ranks."""
        return not self._kernel.collective or bucket.shard_range == (0, bucket.layout.numel)

    def refusal(self, otherwise: str = "master weights that are not fp32, or kernels that are not available") -> str:
        """Why the optimizer's own step runs; ``otherwise`` if that is because of buckets or the machine."""
        if self._is_watched():
            return "hooks or a GradScaler around it"
        if not all(is_plain(self._kernel, group) for group in self._optimizer.param_groups):
            return "options of its groups that the kernel has not, or a learning rate on a GPU"
        return otherwise

    def _is_watched(self) -> bool:
        """Whether torch's step has to run: for hooks around it, or a ``GradScaler`` that passes it a scale.

        The kernel runs where torch's step would begin, so such hooks would come too late or find no fragments.
        """
        if any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return True
        return any(
            type(getattr(h, "__self__", None)).__name__ != "ShardedOptimizer" for h in step_hooks(self._optimizer)
        )

    @torch.no_grad()
    def step(self, bucket_members: dict[Bucket, list[Member]], found_inf: Tensor | None = None) -> None:
        """Step the fragments, which ``param_groups`` and ``state`` hold during a step (fragments.py).

        If ``found_inf`` (0D fp32) is not zero, nothing is written; see ``uncount``. Collective if one of the buckets
        does not ``steps_alone``.
        """
        if self._norms is not None:
            self._norms.expect(bucket_members)
        number_of, options = self._groups = self._groups or (self._numbers(), self.options())
        parts: list[Part] = []
        for bucket, everyone in bucket_members.items():
            members = [m for m in everyone if m.used or self._has_state(m.fragment)]
            numbers = [number_of[id(member.fragment)] for member in members]
            for number, run, some in self._runs_of(bucket, members, numbers):
                run.adopt(some, self._optimizer.state)
                parts += self._parts(run, some, options[number])
        self.launch(list(bucket_members), parts, found_inf, norms=self._norms)

    def _numbers(self) -> dict[int, int]:
        groups = self._optimizer.param_groups
        return {id(p): number for number, group in enumerate(groups) for p in group["params"]}

    def _has_state(self, parameter: Tensor) -> bool:
        return any(value is not None for value in self._optimizer.state.get(parameter, {}).values())

    def _parts(self, run: Run, members: list[Member], options: Options) -> Iterator[Part]:
        self._last.append((run, members))
        return run.parts(members, partial(self._kernel.at, options))

    def plan(
        self, bucket: Bucket, everyone: list[Member], number_of: dict[int, int], options: list[Options]
    ) -> list[Part] | None:
        """A step of one bucket, to be launched later; None if states have to be moved first.

        Called outside of ``step``: states are keyed by parameter, and ``number_of`` maps their ids to groups.
        """
        state = self._optimizer.state
        members = [m for m in everyone if m.used or self._has_state(m.parameter)]
        numbers = [number_of[id(m.parameter)] for m in members]
        known, runs = self._runs.get(bucket, ([], []))
        neighbours = _neighbours(members, numbers)
        if known != self._signature(members, numbers) or not all(
            run.holds([state.get(m.parameter, {}) for m in some])
            for run, (_, some) in zip(runs, neighbours, strict=True)
        ):
            return None
        found = zip(runs, neighbours, strict=True)
        return [part for run, (number, some) in found for part in self._parts(run, some, options[number])]

    @torch.no_grad()
    def launch(
        self,
        buckets: list[Bucket],
        parts: list[Part],
        found_inf: Tensor | None = None,
        write: bool = True,
        norms: FullNorms | None = None,
    ) -> None:
        """Run the planned parts of these buckets, whose states are in memory; ``write`` the compute copy, too.

        Without ``norms`` not collective: all buckets have to be such that ``steps_alone``.
        """
        targets = {b: b.weights.kernel_target(partial(_covers, b, parts)) if write else None for b in buckets}
        calls: dict[tuple[Any, ...], Rows] = {}
        for part in parts:
            bucket = part.run.bucket
            factor, out = bucket.grads.factor, targets[bucket]
            options = tuple(part.options.values())
            key = (*options, bucket.grads.read().dtype, out is None or out.dtype, id(factor))
            if key not in calls:
                calls[key] = Rows(self._kernel, factor, part.options)
            first, last = part.run.lo + part.lo, part.run.lo + part.hi
            states = [state[part.lo : part.hi] for state in part.run.states]
            calls[key].add(bucket, part.index, (first, last), states, out)
        for bucket, target in targets.items():
            bucket.weights.written = target is not None
        try:
            if self._kernel.collective:
                launch_lamb(list(calls.values()), norms, found_inf)
            else:
                for rows in calls.values():
                    rows.launch(found_inf)
        except BaseException:
            for bucket in buckets:
                bucket.weights.cancel_kernel()
            raise
        if not self._told:
            self._told = True
            log.info("%s is stepped by lt_zero's kernel; fused_step=false turns it off", type(self._optimizer).__name__)

    def options(self) -> list[Options]:
        """The current options of each parameter group, for the kernel."""
        return [self._kernel.options(group) for group in self._optimizer.param_groups]

    def begin(self) -> None:
        """Begin an optimizer step, which may take several calls of ``step``."""
        self._last, self._groups = [], None

    def uncount(self) -> None:
        """Restore step counters and states after the last step was skipped on the device."""
        for run, members in self._last:
            run.uncount(members, self._optimizer.state)
        self._last = []

    def _runs_of(
        self, bucket: Bucket, members: list[Member], numbers: list[int]
    ) -> Iterator[tuple[int, Run, list[Member]]]:
        """(group's number, run, its members), in order; runs are rebuilt if groups or parameters changed."""
        signature, neighbours = self._signature(members, numbers), _neighbours(members, numbers)
        known, runs = self._runs.get(bucket, ([], []))
        if known != signature:
            initial = self._kernel.initial(self._optimizer)
            keys = [self._kernel.keys if has else () for has in self._has_states()]
            runs = [Run(bucket, some, keys[number], self._kernel, initial) for number, some in neighbours]
            self._runs[bucket] = (signature, runs)
        for run, (number, some) in zip(runs, neighbours, strict=True):
            yield number, run, some

    def _signature(self, members: list[Member], numbers: list[int]) -> list[tuple[int, int, bool]]:
        """(parameter, group, whether it has states) of each member: runs are valid as long as this is the same."""
        has = self._has_states()
        return [(member.piece.index, number, has[number]) for member, number in zip(members, numbers, strict=True)]

    def _has_states(self) -> list[bool]:
        return [self._kernel.has_states(group) for group in self._optimizer.param_groups]


def _covers(bucket: Bucket, parts: list[Part]) -> bool:
    """Whether ``parts`` step all of this rank's pieces of a bucket."""
    mine = sorted((part.run.lo + part.lo, part.run.lo + part.hi) for part in parts if part.run.bucket is bucket)
    for piece in bucket.pieces():
        before = bisect.bisect_right(mine, piece.offset, key=lambda row: row[0]) - 1
        if before < 0 or mine[before][1] < piece.offset + piece.numel:
            return False
    return True


def _neighbours(members: list[Member], numbers: list[int]) -> list[tuple[int, list[Member]]]:
    """The members, split where the group changes or elements in between are not stepped."""
    parts: list[tuple[int, list[Member]]] = []
    end = -1
    for member, number in zip(members, numbers, strict=True):
        if not parts or parts[-1][0] != number or member.piece.offset - end >= ALIGN:
            parts.append((number, []))
        parts[-1][1].append(member)
        end = member.piece.offset + member.piece.numel
    return parts
