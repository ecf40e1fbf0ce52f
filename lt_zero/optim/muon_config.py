"""Muon as the ``optimizer`` block describes it: which keys there are, and what they mean.

DeepSpeed's keys (0.19.8): ``lr`` is of both halves, ``muon_lr`` and ``adam_lr`` of one; ``momentum`` and ``ns_method``
are Muon's, ``betas`` and ``eps`` Adam's, ``weight_decay`` of both. ``nesterov``, ``ns_steps`` and ``adjust_lr_fn`` are
ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lt_zero.optim.muon import NS_METHODS, RATES, Muon
from lt_zero.optim.param_types import Choice, Number, Only, Reader, Signature, flag

_RATE = Number(0, example="1e-3")
_HEADS = "the projections of attention are one matrix each; remove it. A matrix for each head has its own update"
_SWITCHES: Mapping[str, Reader] = {
    "torch_adam": flag,  # which code computes the same
    "fp32_optimizer_states": Only(True, "write true; for moments in bf16 set bf16.bf16_optimizer_states=true"),
    "per_head_muon": Only(False, _HEADS),
}


def muon_signature(rules: Mapping[str, Reader]) -> Signature:
    """What ``optimizer.params`` of Muon may hold; ``rules``: readers of names that other optimizers have, too."""
    own: dict[str, Reader] = {
        "lr": _RATE,
        "muon_lr": _RATE,
        "adam_lr": _RATE,
        "ns_method": Choice(NS_METHODS),
        "ns_steps": Number(1, 99, whole=True, example="5"),
        "adjust_lr_fn": Choice(RATES),
    }
    return Signature.of(Muon, {**rules, **own}).plus({**_SWITCHES, "lr": _RATE})


def make_muon(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    """The optimizer of checked ``values``. Bare parameters are divided by their dimensions alone."""
    options = {key: value for key, value in values.items() if key not in _SWITCHES}
    if "lr" in options:
        rate = options.pop("lr")
        options = {"muon_lr": rate, "adam_lr": rate, **options}
    groups = list(parameters)
    if not any(isinstance(group, dict) for group in groups):
        halves = [(use, [p for p in groups if (_tensor(p).dim() == 2) is use]) for use in (True, False)]
        groups = [{"params": members, "use_muon": use} for use, members in halves if members]
    return Muon(groups, **options)


def _tensor(parameter: Any) -> Tensor:
    """Torch takes parameters with their names, too."""
    found: Tensor = parameter[1] if isinstance(parameter, tuple) else parameter
    return found
