"""Optimizers that DeepSpeed knows, or knew, and that are not available yet: what their parameters may be.

They are checked all the same, so that a configuration that waits for one of them is right when it comes.
Meanings: 1-bit Adam (arXiv:2102.02888), 1-bit LAMB (arXiv:2104.06069), 0/1 Adam (arXiv:2202.06009).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import AdamW

from lt_zero.optim.values import Choice, Number, Reader, Refused, Signature, flag

_STEPS = Number(1, whole=True, example="1000")
_COMPRESSED: Mapping[str, Reader] = {
    "cuda_aware": flag,
    "comm_backend_name": Choice(("nccl", "mpi", "gloo", "compressed", "hccl")),
}
_LAMB: Mapping[str, Reader] = {
    "max_coeff": Number(0, example="10.0"),
    "min_coeff": Number(0, example="0.01"),
}
_OWN: Mapping[str, Mapping[str, Reader]] = {  # by name in lower case
    "onebitadam": {**_COMPRESSED, "freeze_step": _STEPS},
    "zerooneadam": {
        **_COMPRESSED,
        "var_freeze_step": _STEPS,
        "var_update_scaler": _STEPS,
        "local_step_scaler": _STEPS,
        "local_step_clipper": _STEPS,
    },
    "onebitlamb": {
        **_COMPRESSED,
        **_LAMB,
        "freeze_step": _STEPS,
        "coeff_beta": Number(0, 1, example="0.9"),
        "factor_max": Number(0, example="4.0"),
        "factor_min": Number(0, example="0.5"),
        "factor_threshold": Number(0, example="0.1"),
    },
}


def future_signature(name: str, rules: Mapping[str, Reader]) -> Signature | None:
    """What the parameters of such an optimizer may be; None for all others.

    Args:
        name: ``optimizer.type``.
        rules: readers of Adam's parameters.
    """
    own = _OWN.get(name.lower())
    if own is None:
        return None
    common: dict[str, Reader] = {
        "bias_correction": flag,
        "eps_inside_sqrt": flag,
        "max_grad_norm": Refused("remove it, and set gradient_clipping, at the top of the configuration, to this norm"),
    }
    return Signature.of(AdamW, rules).plus({**common, **own})
