"""The user's optimizer through one kernel: unscale, clip, update, round and low-precision copy in one pass over memory.

The optimizer stays the user's: its groups are read at every step, its state has its own keys and shapes. The kernels
agree with the optimizers' arithmetic to the last bits (``lt_zero.ops``).

Note [Deferred factor]
    Unscaling and clipping multiply all gradients by one number. It is recorded (``GradAccumulator.defer``), and the
    kernel multiplies it in. ``GradAccumulator.stored``, which the kernel and norms read, returns it beside what is
    stored; for all other readers the accumulator returns products, and multiplies before it is written to.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lt_zero import kernels as ops
from lt_zero.common.compat import step_hooks, without_grad
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.optimizer_spec import Kernel, Options, SecondPass, chosen, kernel_of
from lt_zero.core.step.param_groups import BucketStep, ShardedParamGroups, StepParam
from lt_zero.kernels.places import ElementPlace, SteppedFragment, place_table

if TYPE_CHECKING:
    from lt_zero.core.step.full_norms import FullNorms

log = logging.getLogger("lt_zero")

# ---- kernels ---------------------------------------------------------------------------------------------------------


def numbers_of(group: Options) -> Options:
    """A copy of a group's hyper-parameters, with numbers for tensors."""
    numbers = dict(group)
    numbers.pop("params", None)
    numbers["lr"] = float(group["lr"])
    if "betas" in group:
        numbers["beta1"], numbers["beta2"] = numbers["betas"] = tuple(map(float, group["betas"]))
    return numbers


def _adam_options(group: Options, step: float) -> Options:
    options = chosen(group, "lr", "beta1", "beta2", "eps", "weight_decay", "maximize")
    return {**options, "decoupled": group["decoupled_weight_decay"], "step": step}


def _sgd_options(group: Options, step: float) -> Options:
    options = chosen(group, "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return {**options, "first": step == 1}


def _adagrad_options(group: Options, step: float) -> Options:
    rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return {**chosen(group, "eps", "weight_decay", "maximize"), "lr": rate}


# Without eps, Adam and Adagrad would make NaN of the zeros in alignment gaps.
_ADAM = Kernel(
    "adam_step",
    ("exp_avg", "exp_avg_sq"),
    options=_adam_options,
    takes=lambda group: group["eps"] > 0 and not group["amsgrad"],
)
# Exactly these classes: a subclass may compute something else. Others bring theirs: ``kernel_of``.
_OF_TORCH: dict[type[Optimizer], Kernel] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    SGD: Kernel(
        "sgd_step",
        ("momentum_buffer",),
        options=_sgd_options,
        has_states=lambda group: group["momentum"] != 0,
        counts=False,
    ),
    Adagrad: Kernel(
        "adagrad_step",
        ("sum",),
        options=_adagrad_options,
        takes=lambda group: group["eps"] > 0,
        initial=lambda optimizer: float(optimizer.defaults["initial_accumulator_value"]),
    ),
}


def _kernel_of(optimizer: Optimizer) -> Kernel | None:
    """The kernel that computes the updates of optimizers of this class; None: none does."""
    return _OF_TORCH.get(type(optimizer)) or kernel_of(type(optimizer))


def is_plain(kernel: Kernel, group: Options) -> bool:
    """True if the kernel supports the group's options, and its numbers are on the host."""
    numbers = [group["lr"], *group.get("betas", ())]
    for number in numbers:
        if isinstance(number, Tensor) and (number.device.type != "cpu" or number.numel() != 1):
            return False
    return kernel.takes(group) and not group.get("capturable") and not group.get("differentiable")


# ---- rows of elements ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The step of neighbouring elements, with all numbers, so that the kernel may run later in another thread."""

    run: Run
    lo: int  # first element, in the run
    hi: int
    index: int  # of the first parameter, in its bucket
    options: Options  # of the operation, when the step was planned
    places: list[ElementPlace]  # where the elements are in their parameters; empty: they are not rounded at random


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

    def __init__(self, bucket: Bucket, members: list[StepParam], keys: tuple[str, ...], kernel: Kernel, initial: float):
        self.bucket = bucket
        self._kernel = kernel
        self._initial = initial
        self.lo = members[0].piece.offset
        self.hi = members[-1].piece.offset + members[-1].piece.numel
        self._form, device = bucket.storage.moments, members[0].fragment.device
        length, dtype = self._form.length(self.hi - self.lo), self._form.dtype
        self._stored = [bucket.states.store(key, self._form) for key in keys]
        self._own = [torch.zeros(length, dtype=dtype, device=device) for store in self._stored if store is None]  # 1D
        self.steps = torch.zeros(len(members), dtype=torch.float32, device="cpu")  # 1D; on the CPU as torch's counters
        self._counted = torch.zeros_like(self.steps)  # increments of the last step
        self._added: dict[int, list[str]] = {}  # by number of a member: keys that the last step has added to its state
        self._used: list[bool] = []  # members that ``_counted`` is of
        fragments = [
            SteppedFragment(bucket.layout.spans[piece.index].spec, piece.offset - self.lo, piece.lo, piece.numel)
            for piece in (member.piece for member in members)
        ]
        self._random = bucket.storage.rounding.bits(bucket.weights.master_dtype, fragments)
        self._keys = keys
        # Without a counter of the optimizer, ``steps`` only says which step is the first.
        self._rounded = self.steps if kernel.counts else torch.zeros_like(self.steps)
        self._views: list[dict[str, Tensor]] = []  # the state of each member
        for step, rounded, member in zip(self.steps, self._rounded, members, strict=True):
            lo, shape = member.piece.offset - self.lo, member.fragment.shape
            views = {"step": step} if kernel.counts and keys else {}
            if self._random is not None and not kernel.counts:
                views[self._random.count_key] = rounded
            for number, (key, stored) in enumerate(zip(keys, self._stored, strict=True)):
                if stored is None:
                    views[key] = self._form.view(partial(_part_of, self._own[number]), lo, shape, key)
                else:
                    views[key] = self._form.view(stored.lend, member.piece.offset, shape, key)
            self._views.append(views)

    @property
    def states(self) -> list[Tensor]:
        """The element-wise states (1D), as they are kept; stored tensors have to be in memory."""
        return self._own or [self.rows(store.tensor, self.lo, self.hi) for store in self._stored if store is not None]

    def rows(self, state: Tensor, lo: int, hi: int) -> Tensor:
        """The part of a state (1D), as it is kept, that has the elements [lo, hi)."""
        return state[self._form.length(lo) : self._form.length(lo) + self._form.length(hi - lo)]

    def holds(self, states: list[Options]) -> bool:
        """True if ``states`` are this run's views, not replaced by others."""
        for found, views in zip(states, self._views, strict=True):
            for key, view in views.items():
                if found.get(key) is not view:
                    return False
        return self._random is None or self._random.holds(states)

    def adopt(self, members: list[StepParam], state: dict[Any, Any]) -> None:
        """Make the optimizer's state of each fragment a view of this run's, keeping its values."""
        self._added = {}
        if not self._keys and self._random is None:
            return
        states = [state.setdefault(member.fragment, {}) for member in members]
        if not self.holds(states):
            self._adopt(states)

    def _adopt(self, states: list[Options]) -> None:
        """Take over the values of these states, of which some are not views of this run's."""
        for number, (found, views) in enumerate(zip(states, self._views, strict=True)):
            keys = [*views, *([self._random.seed_key] if self._random is not None else [])]
            self._added[number] = [key for key in keys if found.get(key) is None]
            if not self._kernel.counts and any(found.get(key) is not views[key] for key in self._keys):
                # Without a counter it only matters whether a step is the first.
                self.steps[number] = 0.0 if all(found.get(key) is None for key in self._keys) else 1.0
            if self._random is not None:
                self._random.adopt(number, found)
            for key, view in views.items():
                given = found.get(key)
                if given is view:
                    continue
                if given is None:
                    view.fill_(self._initial if key in self._keys else 0.0)
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

    def parts(self, members: list[StepParam], group: Options) -> list[Part]:
        """Count a step with the numbers of a group; returns the ranges that have a gradient, with their options."""
        used = [member.used for member in members]
        if used != self._used:
            self._counted, self._used = torch.tensor(used, dtype=torch.float32, device="cpu"), used
        self._count(1)
        counts = self.steps.tolist()
        last = len(members) - 1
        if all(used) and not self._kernel.collective and counts.count(counts[0]) == len(counts):
            return [self._part(members, 0, last, self._kernel.options(group, counts[0]))]
        stepped = {n for n, has in zip(counts, used, strict=True) if has}
        options = {n: self._kernel.options(group, n) for n in stepped}
        numbered = [
            (options[n] if m.used else None, number) for number, (n, m) in enumerate(zip(counts, members, strict=True))
        ]
        parts = []
        for found, row in groupby(numbered, key=lambda item: item[0]):
            numbers = [number for _, number in row]
            if found is not None:
                for some in [[number] for number in numbers] if self._kernel.collective else [numbers]:
                    parts.append(self._part(members, some[0], some[-1], found))
        return parts

    def _part(self, members: list[StepParam], first: int, last: int, options: Options) -> Part:
        """The step of the members from ``first`` to ``last``."""
        lo = members[first].piece.offset - self.lo
        end = members[last].piece
        places = self._random.places(first, last, self._rounded.tolist()) if self._random is not None else []
        return Part(self, lo, end.offset + end.numel - self.lo, members[first].piece.index, options, places)

    def _count(self, steps: int) -> None:
        """Add a number of steps to the counts of the members that were used."""
        self.steps += steps * self._counted
        if self._rounded is not self.steps:
            self._rounded += steps * self._counted

    def uncount(self, members: list[StepParam], state: dict[Any, Any]) -> None:
        """Undo the counting of the last step, and remove what it has added to states."""
        self._count(-1)
        self._counted, self._used = torch.zeros_like(self._counted), []
        for number, added in self._added.items():
            parameter = members[number].parameter
            if added and (found := state.get(parameter)) is not None:
                for key in added:
                    found.pop(key, None)
                if not found:
                    del state[parameter]


class KernelRows(NamedTuple):
    """The rows of elements of one bucket's step.

    Attributes:
        keys: of the element-wise states, by group.
        runs: each with its group and its members.
    """

    keys: list[tuple[str, ...]]
    runs: list[tuple[Run, int, list[StepParam]]]


class Rows:
    """The rows of one kernel call.

    Args:
        kernel: that is called.
        factor: multiplies the gradients (0D fp32); None: 1.
        options: of the operation.
    """

    def __init__(self, kernel: Kernel, factor: Tensor | None, options: Options) -> None:
        self.kernel = kernel
        self.options = options
        self._factor = factor
        self.places: list[tuple[Bucket, int]] = []  # bucket of a row, and the index of its first parameter
        self.positions: list[ElementPlace] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[list[Tensor]] = [[] for _ in kernel.keys]
        self.outs: list[Tensor] = []

    def add(self, part: Part, out: Tensor | None) -> None:
        """Add a part; ``out`` (1D, as this rank's shard) takes its compute copy."""
        bucket = part.run.bucket
        lo = part.run.lo + part.lo
        hi = part.run.lo + part.hi
        states = [part.run.rows(state, part.lo, part.hi) for state in part.run.states]
        number = len(self.params)
        self.positions += [place._replace(tensor=number, begin=place.begin - part.lo) for place in part.places]
        self.places.append((bucket, part.index))
        self.params.append(bucket.weights.master_rows[lo:hi])
        self.grads.append(bucket.grads.stored()[0][lo:hi])
        # A group without states has none to add (SGD without momentum).
        for rows, state in zip(self.states, states, strict=False):
            rows.append(state)
        if out is not None:
            self.outs.append(out[lo:hi])

    @property
    def factor(self) -> Tensor | None:
        """The factor of the gradients, on their device."""
        return self._factor.to(self.params[0].device) if self._factor is not None else None

    @property
    def place_table(self) -> Tensor | None:
        """The places of all elements, on their device; None: they are not rounded at random."""
        return place_table(self.positions, self.params[0].device) if self.positions else None

    def launch(self, found_inf: Tensor | None) -> None:
        """Run the kernel; it writes nothing if ``found_inf`` (0D fp32) is not zero."""
        rows = (self.params, self.grads, *self.states, self.outs)
        options = {**self.options, "found_inf": found_inf}
        getattr(ops, self.kernel.operation)(*rows, **options, scale=self.factor, places=self.place_table)


# ---- the step --------------------------------------------------------------------------------------------------------


class FusedStep:
    """The kernel's steps of one optimizer.

    Args:
        fragments: of an optimizer that ``fits``.
        norms: of full parameters, for a kernel that needs them.
    """

    def __init__(self, fragments: ShardedParamGroups, norms: FullNorms | None = None) -> None:
        self._fragments = fragments
        self._optimizer = fragments.optimizer
        self._norms = norms
        kernel = _kernel_of(fragments.optimizer)
        assert kernel is not None
        self._kernel = kernel
        # (parameter, group, whether it has states) of the members of a bucket, and their runs, which are valid as long
        # as these are the same.
        self._runs: dict[Bucket, tuple[list[tuple[int, int, bool]], list[Run]]] = {}
        self._last: list[tuple[Run, list[StepParam]]] = []  # the runs and members of the last step
        self._groups: list[Options] | None = None  # numbers of the groups, for the running step
        self._keys: list[tuple[str, ...]] = []  # keys of the element-wise states, by group
        self._told = False

    @staticmethod
    def operation_of(optimizer: Optimizer) -> str:
        """The operation of ``lt_zero.ops`` that computes the updates of optimizers of this class; '' if none does."""
        kernel = _kernel_of(optimizer)
        return kernel.operation if kernel is not None else ""

    def takes(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        """The ``buckets`` that the kernel steps."""
        if self.refusal(""):
            return set()
        return {
            bucket
            for bucket in buckets
            if bucket.storage.suits_kernels
            and bucket.storage.moments.is_taken_by(self._kernel.operation)
            and not self._rounds_between(bucket)
            and ops.available(torch.device("cpu") if bucket.offloaded else bucket.compute.flat.device)
        }

    def _rounds_between(self, bucket: Bucket) -> bool:
        """True if the second pass would read rounded moments, which the optimizer's own step does not.

        With master weights in fp32 the optimizer's own step computes with rounded moments, too.
        """
        narrow = bucket.storage.moments.dtype in (torch.bfloat16, torch.float16)
        return self._kernel.collective and narrow and bucket.weights.master_dtype != torch.float32

    def steps_alone(self, bucket: Bucket) -> bool:
        """True if this rank steps a bucket without collectives; the same on all ranks."""
        return not self._kernel.collective or bucket.storage.is_whole

    def refusal(self, otherwise: str = "master weights in another dtype, or kernels that are not available") -> str:
        """The reason why the optimizer's own step runs; ``otherwise`` if that is because of buckets or the machine."""
        # The kernel runs where torch's step would begin: hooks around it, or a ``GradScaler`` that passes it a scale,
        # would come too late or find no fragments.
        optimizer = self._optimizer
        if self._norms is not None and not self._norms.sums_squares:
            return "norms that no kernel takes: with the same bits wherever parameters are cut"
        around = "hooks or a GradScaler around it"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return around
        for hook in step_hooks(optimizer):
            if type(getattr(hook, "__self__", None)).__name__ != "ShardedOptimizer":
                return around
        for group in optimizer.param_groups:
            if not is_plain(self._kernel, group):
                return "options of its groups that the kernel has not, or a learning rate on a GPU"
        return otherwise

    def begin(self) -> None:
        """Begin an optimizer step, which may take several calls of ``step``."""
        self._last, self._groups = [], None

    def has_same_groups(self) -> bool:
        """True if the kernel's options are those that the running step was planned with."""
        # Other keys do not matter, such as what a schedule notes in a group. The second step shows ``lr_decay``, too.
        planned, now = self._groups or [], map(numbers_of, self._optimizer.param_groups)
        return [self._kernel.options(group, 2.0) for group in planned] == [
            self._kernel.options(group, 2.0) for group in now
        ]

    @without_grad
    def step(self, steps: Sequence[BucketStep], found_inf: Tensor | None = None) -> None:
        """Step the fragments, which ``param_groups`` and ``state`` hold during a step (param_groups.py).

        If ``found_inf`` (0D fp32) is not zero, nothing is written; see ``uncount``. Collective if one of the buckets
        does not ``steps_alone``.
        """
        if self._norms is not None:
            self._norms.expect(steps)
        parts = [part for step in steps for part in self.plan(step) or ()]
        self.launch([step.bucket for step in steps], parts, found_inf, norms=self._norms)

    def plan(self, step: BucketStep) -> list[Part] | None:
        """Count a step of one bucket, to be launched later; None if its states have to be moved into runs first.

        States are moved only during a step, while they are those of fragments.
        """
        if self._groups is None:
            self._groups = [numbers_of(group) for group in self._optimizer.param_groups]
            self._keys = [self._kernel.keys if self._kernel.has_states(group) else () for group in self._groups]
        narrowed, state = self._fragments.narrowed, self._optimizer.state
        rows: KernelRows | None = step.kernel_rows
        if rows is None or not narrowed or rows.keys != self._keys:
            rows = self._find_rows(step)
            if rows is None:
                return None
        parts = []
        for run, number, some in rows.runs:
            if narrowed:
                run.adopt(some, state)
            self._last.append((run, some))
            parts += run.parts(some, self._groups[number])
        return parts

    def _find_rows(self, step: BucketStep) -> KernelRows | None:
        """The rows of a bucket's step; None if states have to be moved into them first."""
        narrowed, state = self._fragments.narrowed, self._optimizer.state
        bucket = step.bucket
        number_of = {id(p): n for n, params in enumerate(self._fragments.groups()) for p in params}
        members: list[tuple[int, list[StepParam]]] = []  # by group, also split at elements that are not stepped
        states: list[list[Options]] = []
        signature, end = [], -1
        for member in step.members:
            found = state.get(member.fragment if narrowed else member.parameter, {})
            if not member.used and all(value is None for value in found.values()):
                continue
            number, piece = number_of[id(member.parameter)], member.piece
            if not members or members[-1][0] != number or piece.offset - end >= bucket.storage.moments.align:
                members.append((number, []))
                states.append([])
            members[-1][1].append(member)
            states[-1].append(found)
            signature.append((piece.index, number, bool(self._keys[number])))
            end = piece.offset + piece.numel
        known, runs = self._runs.get(bucket, ([], []))
        if not narrowed and (known != signature or not all(map(Run.holds, runs, states))):
            return None
        if known != signature:
            initial = self._kernel.initial(self._optimizer)
            runs = [Run(bucket, some, self._keys[number], self._kernel, initial) for number, some in members]
            self._runs[bucket] = (signature, runs)
        rows = KernelRows(self._keys, [(run, number, some) for run, (number, some) in zip(runs, members, strict=True)])
        # Only then the rows can be kept: for unused members the states decide, and these may change.
        step.kernel_rows = rows if all(member.used for member in step.members) else None
        return rows

    @without_grad
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
            (grads, factor), out = bucket.grads.stored(), targets[bucket]
            dtypes = grads.dtype, bucket.weights.master_dtype, out is None or out.dtype
            key = (*part.options.values(), *dtypes, bucket.storage.moments.name, id(factor))
            if key not in calls:
                calls[key] = Rows(self._kernel, factor, part.options)
            calls[key].add(part, out)
        for bucket, target in targets.items():
            bucket.weights.note_kernel(writes_copy=target is not None)
        try:
            if self._kernel.second is not None:
                launch_both(self._kernel.second, list(calls.values()), norms, found_inf)
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

    def uncount(self) -> None:
        """Restore step counters and states after the last step was skipped on the device."""
        for run, members in self._last:
            run.uncount(members, self._optimizer.state)
        self._last = []


def _part_of(rows: Tensor, lo: int, shape: torch.Size) -> Tensor:
    return rows[lo : lo + shape.numel()].view(shape)


def _covers(bucket: Bucket, parts: list[Part]) -> bool:
    """True if ``parts`` step all of this rank's pieces of a bucket."""
    mine = sorted((part.run.lo + part.lo, part.run.lo + part.hi) for part in parts if part.run.bucket is bucket)
    for piece in bucket.pieces:
        before = bisect.bisect_right(mine, piece.offset, key=lambda row: row[0]) - 1
        if before < 0 or mine[before][1] < piece.offset + piece.numel:
            return False
    return True


def launch_both(second: SecondPass, calls: Sequence[Rows], norms: FullNorms | None, found_inf: Tensor | None) -> None:
    """Run both operations of a kernel that needs norms, one fragment per row.

    Args:
        second: of the kernel.
        calls: the rows; may be none.
        norms: adds up norms over the ranks, once for all calls; None: all rows are full parameters.
        found_inf: 0D fp32; if it is not zero, nothing is written.
    """
    parts = [torch.zeros(0, second.columns, dtype=torch.float64)]
    for rows in calls:
        options = {key: value for key, value in rows.options.items() if key not in second.own}
        measure = getattr(ops, rows.kernel.operation)
        parts.append(measure(rows.params, rows.grads, *rows.states, **options, scale=rows.factor, found_inf=found_inf))
    squares = torch.cat([part.to(parts[-1].device) for part in parts])
    if norms is not None:
        squares = norms.at([place for rows in calls for place in rows.places], squares)
    for rows, mine in zip(calls, squares.split([len(rows.params) for rows in calls]), strict=True):
        rates = second.rates(mine, rows.options).to(rows.params[0].device, torch.float32)
        options = {**chosen(rows.options, *second.shared), "found_inf": found_inf, "places": rows.place_table}
        getattr(ops, second.operation)(rows.params, *rows.states, rates, rows.outs, **options)
