"""Inputs of the optimizer kernels."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from lt_zero.kernels.places import ElementPlace
from lt_zero.kernels.rounding import ElementRows, round_stochastic

LOW = [torch.float32, torch.bfloat16, torch.float16]


STEPS = ["adam_step", "lion_step", "adagrad_step", "sgd_step", "lamb_update"]
STATES = {"adam_step": 2, "lamb_update": 2, "lamb_apply": 2}  # of the others: 1


def rows(sizes: list[int], dtype: torch.dtype, offset: int, make: Any = torch.randn) -> list[Tensor]:
    """Tensors that start ``offset`` elements into their storage."""
    return [make(size + offset).to(dtype)[offset:] for size in sizes]


def places_of(sizes: list[int], rng: random.Random) -> list[ElementPlace]:
    """Tensors of these sizes, cut anywhere into parts of parameters: whole rows, columns, one element."""
    found = []
    for tensor, size in enumerate(sizes):
        cuts = {0, *(rng.randrange(size) for _ in range(rng.randint(0, 3)))} if size else set[int]()
        for begin in sorted(cuts):
            row = rng.choice([1, 3, 130, 5000, 1 << 40])
            first = rng.choice([0, 8, 4_000_123, (1 << 36) + 5])
            stride = row + rng.choice([0, 64, 1003])
            step = rng.choice([1, 1 << 33])
            found.append(ElementPlace(tensor, begin, first, row, stride, rng.randrange(1 << 64), step))
    return found


def rounded_apart(wide: list[Tensor], places: list[ElementPlace]) -> list[Tensor]:
    """The weights of a step in fp32, rounded in a pass of its own: what a step of bf16 weights must give."""
    low = [torch.empty(x.shape, dtype=torch.bfloat16) for x in wide]
    for place, after in zip(places, [*places[1:], None], strict=True):
        end = after.begin if after is not None and after.tensor == place.tensor else wide[place.tensor].numel()
        begin = place.begin
        first = place.first
        while begin < end:
            numel = min(place.row, end - begin)
            rows = ElementRows(numel, first, numel)
            part = slice(begin, begin + numel)
            round_stochastic(wide[place.tensor][part], low[place.tensor][part], rows, seed=place.seed, step=place.step)
            begin = begin + numel
            first = first + place.stride
    return low


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
