"""Inputs of the optimizer kernels."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

LOW = [torch.float32, torch.bfloat16, torch.float16]


STEPS = ["adam_step", "lion_step", "adagrad_step", "sgd_step", "lamb_update"]
STATES = {"adam_step": 2, "lamb_update": 2, "lamb_apply": 2}  # of the others: 1


def rows(sizes: list[int], dtype: torch.dtype, offset: int, make: Any = torch.randn) -> list[Tensor]:
    """Tensors that start ``offset`` elements into their storage."""
    return [make(size + offset).to(dtype)[offset:] for size in sizes]


def options_of(name: str, rng: random.Random) -> dict[str, Any]:
    decay = rng.choice([0.0, 0.1])
    if name == "adam_step":
        betas = {"beta1": rng.choice([0.9, 0.3]), "beta2": 0.999, "step": rng.choice([1, 2, 1000, 10**6])}
        return {"lr": 1e-3, "eps": 1e-8, "weight_decay": decay, "decoupled": rng.random() < 0.5, **betas}
    if name == "lion_step":
        return {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": decay}
    if name == "adagrad_step":
        return {"lr": 1e-2, "eps": 1e-10, "weight_decay": decay}
    if name == "sgd_step":
        flags = {"nesterov": rng.random() < 0.5, "first": rng.random() < 0.3}
        return {"lr": 0.1, "momentum": rng.choice([0.0, 0.9]), "dampening": 0.1, "weight_decay": decay, **flags}
    return {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": decay}
