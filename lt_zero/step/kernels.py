"""Kernels of optimizers: the one that computes a step, its options, and the rows of memory that it works on.

LAMB's trust ratios need norms of full parameters, of which a rank has fragments (optim/lamb.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lt_zero import ops
from lt_zero.comm.ranks import Ranks
from lt_zero.comm.shard_group import combine_rows
from lt_zero.common import accelerator
from lt_zero.engine.bucket import Bucket
from lt_zero.optim.lamb import Lamb, corrected_rate, trust_rates
from lt_zero.optim.lion import Lion
from lt_zero.step.fragments import Member

Options = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """The operation that computes the step of an optimizer.

    Attributes:
        operation: its name in ``lt_zero.ops``.
        keys: of the element-wise states, in the operation's order.
        options: the operation's options out of a group and the number of the elements' step, from 1.
        takes: whether the operation computes the update of such a group.
        has_states: whether such a group has states.
        counts: whether the state holds the number of steps, as ``step``.
        initial: what a state begins with.
        collective: whether a step needs norms over all ranks.
    """

    operation: str
    keys: tuple[str, ...]
    options: Callable[[Options, float], Options]
    takes: Callable[[Options], bool] = lambda group: True
    has_states: Callable[[Options], bool] = lambda group: True
    counts: bool = True
    initial: Callable[[Optimizer], float] = lambda optimizer: 0.0
    collective: bool = False


def numbers_of(group: Options) -> Options:
    """A copy of a group's hyper-parameters, with numbers for tensors."""
    numbers = {key: value for key, value in group.items() if key != "params"}
    numbers["lr"] = float(group["lr"])
    if "betas" in group:
        numbers["beta1"], numbers["beta2"] = numbers["betas"] = tuple(map(float, group["betas"]))
    return numbers


def _adam_options(group: Options, step: float) -> Options:
    options = _same(group, "lr", "beta1", "beta2", "eps", "weight_decay", "maximize")
    return {**options, "decoupled": group["decoupled_weight_decay"], "step": step}


def _sgd_options(group: Options, step: float) -> Options:
    options = _same(group, "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return {**options, "first": step == 1}


def _adagrad_options(group: Options, step: float) -> Options:
    rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return {**_same(group, "eps", "weight_decay", "maximize"), "lr": rate}


def _lion_options(group: Options, step: float) -> Options:
    return _same(group, "lr", "beta1", "beta2", "weight_decay", "maximize")


def _lamb_options(group: Options, step: float) -> Options:
    options = _same(group, "beta1", "beta2", "eps", "weight_decay")
    bounds = {"lower": group["min_coeff"], "upper": group["max_coeff"]}
    return {**options, "lr": corrected_rate(group, step), **bounds}


def _same(group: Options, *keys: str) -> Options:
    return {key: group[key] for key in keys}


# Exactly these classes: a subclass may compute something else. Without eps, Adam and Adagrad would make NaN of the
# zeros in alignment gaps.
_ADAM = Kernel(
    "adam_step",
    ("exp_avg", "exp_avg_sq"),
    options=_adam_options,
    takes=lambda group: group["eps"] > 0 and not group["amsgrad"],
)
KERNELS: dict[type[Optimizer], Kernel] = {
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
    Lion: Kernel("lion_step", ("exp_avg",), options=_lion_options, counts=False),
    Lamb: Kernel(
        "lamb",
        ("exp_avg", "exp_avg_sq"),
        options=_lamb_options,
        takes=lambda group: not group["eps_inside_sqrt"],
        collective=True,
    ),
}


def is_plain(kernel: Kernel, group: Options) -> bool:
    """True if the kernel supports the group's options, and its numbers are on the host."""
    numbers = [group["lr"], *group.get("betas", ())]
    on_host = all(not isinstance(n, Tensor) or (n.device.type == "cpu" and n.numel() == 1) for n in numbers)
    return on_host and kernel.takes(group) and not group.get("capturable") and not group.get("differentiable")


class Rows:
    """The rows of one kernel call.

    Args:
        kernel: that is called.
        factor: multiplies the gradients (0D fp32); None: 1.
        options: of the operation.
    """

    def __init__(self, kernel: Kernel, factor: Tensor | None, options: Options) -> None:
        self.kernel, self.options, self._factor = kernel, options, factor
        self.places: list[tuple[Bucket, int]] = []  # bucket of a row, and the index of its first parameter
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[list[Tensor]] = [[] for _ in kernel.keys]
        self.outs: list[Tensor] = []

    def add(self, bucket: Bucket, index: int, lo: int, hi: int, states: list[Tensor], out: Tensor | None) -> None:
        """Add elements [lo, hi) of this rank's shard; ``out`` (1D, as the shard) takes their compute copy."""
        self.places.append((bucket, index))
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

    def launch(self, found_inf: Tensor | None) -> None:
        """Run the kernel; it writes nothing if ``found_inf`` (0D fp32) is not zero."""
        rows = (self.params, self.grads, *self.states, self.outs)
        getattr(ops, self.kernel.operation)(*rows, **self.options, scale=self.factor, found_inf=found_inf)


# ---- LAMB ------------------------------------------------------------------------------------------------------------


class FullNorms:
    """Adds up squared norms of fragments over the ranks, in one all-reduce for all parameters of a step.

    The table that is reduced has a row for each parameter of the stepped buckets, zero where a rank has no fragment.
    Parameters that every rank has in full, or that the engine does not own, have no row. Where a parameter is a part of
    a tensor, the norm is that of the tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[tuple[Bucket, int], int] = {}  # the row of a parameter
        self._row_of: dict[int, int] = {}  # the row of a fragment, by id
        self._groups: list[Ranks] = []  # the ranks of each row
        self._repeats: set[int] = set()  # rows that another rank contributes

    def expect(self, members: Mapping[Bucket, Sequence[Member]]) -> None:
        """Prepare for a step of these buckets, the same ones in the same order on all ranks."""
        self._rows, self._row_of, self._groups, self._repeats = {}, {}, [], set()
        for bucket, mine in members.items():
            sharded = bucket.shard_range != (0, bucket.layout.numel)
            for index, span in enumerate(bucket.layout.spans):
                if sharded or not span.spec.is_whole:
                    self._rows[bucket, index] = row = len(self._groups)
                    self._groups.append(bucket.holders(index))
                    self._repeats.update([row] if bucket.repeats(index) else ())
            places = ((member.fragment, (bucket, member.piece.index)) for member in mine)
            self._row_of.update({id(fragment): self._rows[p] for fragment, p in places if p in self._rows})

    def __call__(self, fragments: list[Tensor], squares: Tensor) -> Tensor:
        """Squared norms (fp64, [fragments, any]) of the parameters that these are fragments of. Collective."""
        return self._combined([self._row_of.get(id(fragment)) for fragment in fragments], squares)

    def maxima(self, fragments: list[Tensor], values: Tensor) -> Tensor:
        """The maxima of ``values`` (fp64, [fragments, any], none below 0) in the same way. Collective."""
        return self._combined([self._row_of.get(id(fragment)) for fragment in fragments], values, maximum=True)

    def at(self, places: list[tuple[Bucket, int]], squares: Tensor) -> Tensor:
        """Squared norms as from ``__call__``, for fragments of these (bucket, index of a parameter). Collective."""
        return self._combined([self._rows.get(place) for place in places], squares)

    def _combined(self, rows: list[int | None], squares: Tensor, maximum: bool = False) -> Tensor:
        if not self._groups:
            return squares
        table = torch.zeros(len(self._groups), squares.shape[1], dtype=torch.float64, device=self._device)
        held = [(number, row) for number, row in enumerate(rows) if row is not None]
        counts = [row not in self._repeats for _, row in held]
        columns = [[number for number, _ in held], [row for _, row in held], counts]
        index = torch.tensor(columns, dtype=torch.int64)
        devices = squares.device, table.device, squares.device
        numbers, places, count = (accelerator.send(i, device) for i, device in zip(index, devices, strict=True))
        table[places] = (squares[numbers] * count[:, None]).to(table.device)
        table = combine_rows(table, self._groups, "norms of full parameters", maximum)
        full = squares.clone()
        full[numbers] = table[places].to(squares.device)
        return full


def launch_lamb(calls: Sequence[Rows], norms: FullNorms | None, found_inf: Tensor | None) -> None:
    """Step LAMB by its two kernels, one fragment per row.

    Args:
        calls: the rows; may be none.
        norms: adds up norms over the ranks, once for all calls; None: all rows are full parameters.
        found_inf: 0D fp32; if it is not zero, nothing is written.
    """
    parts = [torch.zeros(0, 2, dtype=torch.float64)]
    for rows in calls:
        options = _same(rows.options, "beta1", "beta2", "eps", "weight_decay")
        tensors = (rows.params, rows.grads, *rows.states)
        parts.append(ops.lamb_update(*tensors, **options, scale=rows.factor, found_inf=found_inf))
    squares = torch.cat([part.to(parts[-1].device) for part in parts])
    if norms is not None:
        squares = norms.at([place for rows in calls for place in rows.places], squares)
    for rows, mine in zip(calls, squares.split([len(rows.params) for rows in calls]), strict=True):
        count, bounds = len(rows.params), (rows.options["lower"], rows.options["upper"])
        rates = trust_rates(mine, [rows.options["lr"]] * count, [bounds] * count)
        rates = rates.to(rows.params[0].device, torch.float32)
        rule, (first, second) = _same(rows.options, "eps", "weight_decay"), rows.states
        ops.lamb_apply(rows.params, first, second, rates, rows.outs, **rule, found_inf=found_inf)
