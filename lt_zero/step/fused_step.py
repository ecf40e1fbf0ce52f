"""The user's Adam or AdamW through one kernel: unscale, clip, update and low-precision copy in one pass over memory.

The optimizer stays the user's: its groups are read at every step, its state has torch's keys and shapes. The kernel
agrees with torch's arithmetic to the last bits (``lt_zero.ops``).

Note [Deferred factor]
    Unscaling and clipping multiply all gradients by one number. Where the kernel takes all gradients of a bucket,
    the number is recorded (``Accumulator.defer``) and multiplied in by the kernel. Any other reader of the gradients
    multiplies them first (``Accumulator.apply_deferred_scale``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from lt_zero import ops
from lt_zero.common.compat import step_hooks
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.layout import ALIGN, Piece

log = logging.getLogger("lt_zero")

_SPECIAL = ("amsgrad", "capturable", "differentiable")
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Member:
    """A fragment in the current step."""

    parameter: Parameter
    fragment: Parameter
    piece: Piece
    used: bool  # whether any rank has a gradient for its parameter


@dataclass(frozen=True)
class Part:
    """The step of neighbouring elements, with all numbers, so that the kernel may run later in another thread."""

    run: Run
    lo: int  # first element, in the run
    hi: int
    number: int  # of the parameter group
    numbers: dict[str, Any]  # lr, beta1, ... when the step was planned, and the step number of these elements


class Run:
    """Neighbouring fragments of one parameter group: for the kernel one row of master weights, gradients and moments.

    Alignment gaps between the fragments hold zeros, which Adam leaves at zero. Parameters that were never used have no
    state and are in no run. The state of a fragment is a view of the run's; other state (from a checkpoint, or user
    code) is copied into it by ``adopt``.
    """

    def __init__(self, bucket: Bucket, members: list[Member]) -> None:
        self.bucket = bucket
        self.lo = members[0].piece.offset
        self.hi = members[-1].piece.offset + members[-1].piece.numel
        device = members[0].fragment.device
        fp32, cpu = torch.float32, torch.device("cpu")
        self._stored = [bucket.state_store(key, fp32) for key in _MOMENTS]
        self._own = [torch.zeros(self.hi - self.lo, dtype=fp32, device=device) for s in self._stored if s is None]  # 1D
        self.steps = torch.zeros(len(members), dtype=fp32, device=cpu)  # 1D; on the CPU as torch's counters
        self._counted = torch.zeros_like(self.steps)  # increments of the last step
        self._views = [self._view(number, member) for number, member in enumerate(members)]

    @property
    def moments(self) -> list[Tensor]:
        """exp_avg and exp_avg_sq (1D); stored tensors have to be in memory."""
        return self._own or [stored.tensor[self.lo : self.hi] for stored in self._stored if stored is not None]

    def _view(self, number: int, member: Member) -> dict[str, Tensor]:
        piece, shape = member.piece, member.fragment.shape
        lo = piece.offset - self.lo
        rows = [
            moment[lo : lo + piece.numel].view(shape) if stored is None else stored.lend(piece.offset, shape)
            for moment, stored in zip(self.moments, self._stored, strict=True)
        ]
        return {"step": self.steps[number], **dict(zip(_MOMENTS, rows, strict=True))}

    def holds(self, states: list[dict[str, Any]]) -> bool:
        """Whether ``states`` are this run's views, not replaced by others."""
        return all(
            all(found.get(key) is view for key, view in views.items())
            for found, views in zip(states, self._views, strict=True)
        )

    def adopt(self, members: list[Member], state: dict[Any, Any]) -> None:
        """Make the optimizer's state of each fragment a view of this run's, keeping its values."""
        for member, views in zip(members, self._views, strict=True):
            found = state.setdefault(member.fragment, {})
            for key, view in views.items():
                given = found.get(key)
                if given is view:
                    continue
                if given is None:
                    view.zero_()
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

    def segments(self, members: list[Member]) -> Iterator[tuple[float, int, int]]:
        """(step number, first element, end) of the ranges of the run that have a gradient; counts the step."""
        used = torch.tensor([float(member.used) for member in members], dtype=torch.float32, device=self.steps.device)
        self.steps += used
        self._counted = used
        counts = self.steps.tolist()
        numbered = [(counts[i] if members[i].used else 0.0, members[i].piece) for i in range(len(members))]
        for count, part in groupby(numbered, key=lambda item: item[0]):
            pieces = [piece for _, piece in part]
            if count:
                yield count, pieces[0].offset - self.lo, pieces[-1].offset + pieces[-1].numel - self.lo

    def uncount(self) -> None:
        """Undo the counting of the last step."""
        self.steps -= self._counted
        self._counted = torch.zeros_like(self._counted)


class FusedAdam:
    """The kernel's steps of one Adam or AdamW.

    Args:
        optimizer: of exactly these classes; a subclass may compute something else.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._runs: dict[Bucket, tuple[list[tuple[int, int]], list[Run]]] = {}
        self._last: list[Run] = []  # runs of the last step
        self._groups: tuple[dict[int, int], list[dict[str, Any]]] | None = None  # of the running step
        self._told = False

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """Whether the kernel computes this optimizer's update."""
        return type(optimizer) in (Adam, AdamW)

    def takes(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        """The ``buckets`` that the kernel steps."""
        if self._is_watched() or not all(map(_is_plain, self._optimizer.param_groups)):
            return set()
        return {
            bucket
            for bucket in buckets
            if bucket.step_dtype == bucket.weights.master_dtype == torch.float32
            and ops.available(torch.device("cpu") if bucket.offloaded else bucket.flat.device)
        }

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
        """Step the fragments, which ``param_groups`` and ``state`` hold during a step (sharded_optimizer.py).

        If ``found_inf`` (0D fp32) is not zero, nothing is written; see ``uncount``.
        """
        number_of, rules = self._groups = self._groups or (self._numbers(), self.rules())
        parts: list[Part] = []
        for bucket, everyone in bucket_members.items():
            members = [m for m in everyone if m.used or m.fragment in self._optimizer.state]
            numbers = [number_of[id(member.fragment)] for member in members]
            for number, run, some in self._runs_of(bucket, members, numbers):
                run.adopt(some, self._optimizer.state)
                parts += self._parts(run, some, number, rules[number])
        self.launch(list(bucket_members), parts, found_inf)

    def _numbers(self) -> dict[int, int]:
        groups = self._optimizer.param_groups
        return {id(p): number for number, group in enumerate(groups) for p in group["params"]}

    def _parts(self, run: Run, members: list[Member], number: int, rule: dict[str, Any]) -> Iterator[Part]:
        self._last.append(run)
        for count, lo, hi in run.segments(members):
            yield Part(run, lo, hi, number, {**rule, "step": count})

    def plan(
        self, bucket: Bucket, everyone: list[Member], number_of: dict[int, int], rules: list[dict[str, Any]]
    ) -> list[Part] | None:
        """A step of one bucket, to be launched later; None if states have to be moved first.

        Called outside of ``step``: states are keyed by parameter, and ``number_of`` maps their ids to groups.
        """
        state = self._optimizer.state
        members = [m for m in everyone if m.used or m.parameter in state]
        numbers = [number_of[id(m.parameter)] for m in members]
        known, runs = self._runs.get(bucket, ([], []))
        parts = _neighbours(members, numbers)
        if known != _signature(members, numbers) or not all(
            run.holds([state.get(m.parameter, {}) for m in some]) for run, (_, some) in zip(runs, parts, strict=True)
        ):
            return None
        found = zip(runs, parts, strict=True)
        return [part for run, (number, some) in found for part in self._parts(run, some, number, rules[number])]

    @torch.no_grad()
    def launch(
        self, buckets: list[Bucket], parts: list[Part], found_inf: Tensor | None = None, write: bool = True
    ) -> None:
        """Run the planned parts of these buckets, whose states are in memory; ``write`` the compute copy, too."""
        targets = {b: b.weights.kernel_target(partial(_covers, b, parts)) if write else None for b in buckets}
        calls: dict[tuple[Any, ...], _Call] = {}
        for part in parts:
            bucket = part.run.bucket
            factor = bucket.grads.factor
            out = targets[bucket]
            key = (part.number, part.numbers["step"], bucket.grads.read().dtype, out is None or out.dtype, id(factor))
            calls.setdefault(key, _Call(factor, part.numbers)).add(part.run, part.lo, part.hi, out)
        for bucket, target in targets.items():
            bucket.weights.written = target is not None
        try:
            for call in calls.values():
                call.launch(found_inf)
        except BaseException:
            for bucket in buckets:
                bucket.weights.cancel_kernel()
            raise
        if not self._told:
            self._told = True
            log.info("%s is stepped by lt_zero's kernel; fused_step=false turns it off", type(self._optimizer).__name__)

    def rules(self) -> list[dict[str, Any]]:
        """The current hyper-parameters of each parameter group, for the kernel."""
        adamw = isinstance(self._optimizer, AdamW)
        return [
            {
                "lr": float(group["lr"]),
                "beta1": float(group["betas"][0]),
                "beta2": float(group["betas"][1]),
                "eps": group["eps"],
                "weight_decay": group["weight_decay"],
                "decoupled": group.get("decoupled_weight_decay", adamw),
                "maximize": group["maximize"],
            }
            for group in self._optimizer.param_groups
        ]

    def begin(self) -> None:
        """Begin an optimizer step, which may take several calls of ``step``."""
        self._last, self._groups = [], None

    def uncount(self) -> None:
        """Restore the step counters after the last step was skipped on the device."""
        for run in self._last:
            run.uncount()
        self._last = []

    def _runs_of(
        self, bucket: Bucket, members: list[Member], numbers: list[int]
    ) -> Iterator[tuple[int, Run, list[Member]]]:
        """(group's number, run, its members), in order; runs are rebuilt if groups or parameters changed."""
        signature, parts = _signature(members, numbers), _neighbours(members, numbers)
        known, runs = self._runs.get(bucket, ([], []))
        if known != signature:
            runs = [Run(bucket, part) for _, part in parts]
            self._runs[bucket] = (signature, runs)
        for run, (number, part) in zip(runs, parts, strict=True):
            yield number, run, part


class _Call:
    """The rows of one kernel call."""

    def __init__(self, factor: Tensor | None, numbers: dict[str, Any]) -> None:
        self.factor, self.numbers = factor, numbers
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.moments: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.outs: list[Tensor] = []

    def add(self, run: Run, lo: int, hi: int, out: Tensor | None) -> None:
        """Add elements [lo, hi) of ``run``; ``out`` (1D, as the shard) takes their compute copy."""
        weights, first, last = run.bucket.weights, run.lo + lo, run.lo + hi
        grad = run.bucket.grads.read()
        self.params.append(weights.master_rows[first:last])
        self.grads.append(grad[first:last])
        for rows, moment in zip(self.moments, run.moments, strict=True):
            rows.append(moment[lo:hi])
        if out is not None:
            self.outs.append(out[first:last])

    def launch(self, found_inf: Tensor | None) -> None:
        factor = self.factor.to(self.params[0].device) if self.factor is not None else None
        rows = (self.params, self.grads, *self.moments, self.outs)
        ops.adam_step(*rows, **self.numbers, scale=factor, found_inf=found_inf)


def _covers(bucket: Bucket, parts: list[Part]) -> bool:
    """Whether ``parts`` step all of this rank's pieces of a bucket."""
    mine = [(part.run.lo + part.lo, part.run.lo + part.hi) for part in parts if part.run.bucket is bucket]
    return all(any(lo <= p.offset and p.offset + p.numel <= hi for lo, hi in mine) for p in bucket.pieces())


def _signature(members: list[Member], numbers: list[int]) -> list[tuple[int, int]]:
    """(parameter, group) of each member: runs are valid as long as this is the same."""
    return [(member.piece.index, number) for member, number in zip(members, numbers, strict=True)]


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


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether the kernel supports the group's options, and its numbers are on the host."""
    numbers = [group["lr"], *group["betas"]]
    on_host = all(not isinstance(n, Tensor) or (n.device.type == "cpu" and n.numel() == 1) for n in numbers)
    # Without eps the zeros in alignment gaps would become NaN.
    return on_host and group["eps"] > 0 and not any(group.get(key) for key in _SPECIAL)
