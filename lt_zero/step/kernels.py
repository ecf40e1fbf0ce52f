"""Which kernel computes the step of which optimizer, and with which options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lt_zero import ops
from lt_zero.engine.bucket import Bucket
from lt_zero.optim.lamb import Lamb, corrected_rate
from lt_zero.optim.lion import Lion

Options = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """The operation that computes the step of an optimizer.

    Attributes:
        operation: its name in ``lt_zero.ops``.
        keys: of the element-wise states, in the operation's order.
        options: the operation's options out of a group.
        at: the options of a step, out of these and the number of the step of the elements, from 1.
        takes: whether the operation computes the update of such a group.
        has_states: whether such a group has states.
        counts: whether the state holds the number of steps, as ``step``.
        initial: what a state begins with.
        collective: whether a step needs norms over all ranks (lamb.py).
    """

    operation: str
    keys: tuple[str, ...]
    options: Callable[[Options], Options]
    at: Callable[[Options, float], Options]
    takes: Callable[[Options], bool] = lambda group: True
    has_states: Callable[[Options], bool] = lambda group: True
    counts: bool = True
    initial: Callable[[Optimizer], float] = lambda optimizer: 0.0
    collective: bool = False


def _adam_options(group: Options) -> Options:
    beta1, beta2 = map(float, group["betas"])
    options = {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2}
    return {**options, **_same(group, "eps", "weight_decay", "maximize"), "decoupled": group["decoupled_weight_decay"]}


def _sgd_options(group: Options) -> Options:
    numbers = _same(group, "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return {"lr": float(group["lr"]), **numbers}


def _adagrad_options(group: Options) -> Options:
    return {"lr": float(group["lr"]), **_same(group, "lr_decay", "eps", "weight_decay", "maximize")}


def _adagrad_at(options: Options, step: float) -> Options:
    rest = {key: value for key, value in options.items() if key != "lr_decay"}
    return {**rest, "lr": options["lr"] / (1 + (step - 1) * options["lr_decay"])}


def _lion_options(group: Options) -> Options:
    beta1, beta2 = map(float, group["betas"])
    return {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, **_same(group, "weight_decay", "maximize")}


def _lamb_options(group: Options) -> Options:
    numbers = _same(group, "bias_correction", "eps", "weight_decay", "min_coeff", "max_coeff")
    return {"lr": float(group["lr"]), "betas": tuple(map(float, group["betas"])), **numbers}


def _lamb_at(options: Options, step: float) -> Options:
    (beta1, beta2), rate = options["betas"], corrected_rate(options, step)
    bounds = {"lower": options["min_coeff"], "upper": options["max_coeff"]}
    return {"beta1": beta1, "beta2": beta2, **_same(options, "eps", "weight_decay"), "lr": rate, **bounds}


def _same(group: Options, *keys: str) -> Options:
    return {key: group[key] for key in keys}


# Exactly these classes: a subclass may compute something else. Without eps, Adam and Adagrad would make NaN of the
# zeros in alignment gaps.
_ADAM = Kernel(
    "adam_step",
    ("exp_avg", "exp_avg_sq"),
    options=_adam_options,
    at=lambda options, step: {**options, "step": step},
    takes=lambda group: group["eps"] > 0 and not group["amsgrad"],
)
KERNELS: dict[type[Optimizer], Kernel] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    SGD: Kernel(
        "sgd_step",
        ("momentum_buffer",),
        options=_sgd_options,
        at=lambda options, step: {**options, "first": step == 1},
        has_states=lambda group: group["momentum"] != 0,
        counts=False,
    ),
    Adagrad: Kernel(
        "adagrad_step",
        ("sum",),
        options=_adagrad_options,
        at=_adagrad_at,
        takes=lambda group: group["eps"] > 0,
        initial=lambda optimizer: float(optimizer.defaults["initial_accumulator_value"]),
    ),
    Lion: Kernel(
        "lion_step",
        ("exp_avg",),
        options=_lion_options,
        at=lambda options, step: options,
        counts=False,
    ),
    Lamb: Kernel(
        "lamb",
        ("exp_avg", "exp_avg_sq"),
        options=_lamb_options,
        at=_lamb_at,
        takes=lambda group: not group["eps_inside_sqrt"],
        collective=True,
    ),
}


def is_plain(kernel: Kernel, group: Options) -> bool:
    """Whether the kernel supports the group's options, and its numbers are on the host."""
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

    def add(
        self, bucket: Bucket, index: int, elements: tuple[int, int], states: list[Tensor], out: Tensor | None
    ) -> None:
        """Add elements [lo, hi) of this rank's shard; ``out`` (1D, as the shard) takes their compute copy."""
        lo, hi = elements
        self.places.append((bucket, index))
        self.params.append(bucket.weights.master_rows[lo:hi])
        self.grads.append(bucket.grads.read()[lo:hi])
        for rows, state in zip(self.states, states, strict=False):  # a group may have none
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
