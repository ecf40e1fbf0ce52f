"""The keys of Muon in the ``optimizer`` block.

Keys of DeepSpeed 0.19.8: ``lr`` and ``weight_decay`` apply to both groups, ``muon_lr``, ``momentum`` and ``ns_method``
to Muon, ``adam_lr``, ``betas`` and ``eps`` to Adam. ``nesterov``, ``ns_steps`` and ``adjust_lr_fn`` are our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lt_zero.optim.muon import NS_METHODS, RATES, Muon
from lt_zero.optim.param_types import Reader, Signature, choice, flag, number, only

_RATE = number(0, example="1e-3")
_HEADS = "an attention projection is updated as one matrix; remove it. A matrix per head gets its own update"
_SWITCHES: Mapping[str, Reader] = {
    "torch_adam": flag,  # selects an implementation, not an algorithm
    "fp32_optimizer_states": only(True, "write true; for moments in bf16 set bf16.bf16_optimizer_states=true"),
    "per_head_muon": only(False, _HEADS),
}


def muon_signature(rules: Mapping[str, Reader]) -> Signature:
    """The signature of ``optimizer.params`` of Muon; ``rules``: readers of names shared with other optimizers."""
    own: dict[str, Reader] = {
        "lr": _RATE,
        "muon_lr": _RATE,
        "adam_lr": _RATE,
        "ns_method": choice(NS_METHODS),
        "ns_steps": number(1, 99, whole=True, example="5"),
        "adjust_lr_fn": choice(RATES),
    }
    return Signature.of(Muon, {**rules, **own}).plus({**_SWITCHES, "lr": _RATE})


def make_muon(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    """Build Muon from checked ``values``. Bare parameters are divided by their number of dimensions alone."""
    options = {key: value for key, value in values.items() if key not in _SWITCHES}
    if "lr" in options:
        rate = options.pop("lr")
        options = {"muon_lr": rate, "adam_lr": rate, **options}
    groups = list(parameters)
    if not any(isinstance(group, dict) for group in groups):
        divided = [(use, [p for p in groups if (_tensor(p).dim() == 2) is use]) for use in (True, False)]
        groups = [{"params": members, "use_muon": use} for use, members in divided if members]
    return Muon(groups, **options)


def _tensor(parameter: Any) -> Tensor:
    """The tensor of a parameter, which may be a (name, parameter) pair as in torch."""
    tensor: Tensor = parameter[1] if isinstance(parameter, tuple) else parameter
    return tensor
