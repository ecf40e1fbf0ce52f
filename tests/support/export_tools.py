"""What the tests of exports share: sources in memory, and comparisons with what a file holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.checkpoint.source import SavedOptimizer, Spec


class Memory:
    """A source that holds everything; calls ``on_read`` before each tensor."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        optimizers: Sequence[SavedOptimizer] = (),
        meta: Mapping[str, Any] | None = None,
        states: Mapping[tuple[int, str, str], Tensor] | None = None,
    ) -> None:
        self.tensors, self.aliases, self.meta = tensors, aliases or {}, meta or {}
        self.weights = {name: Spec(tuple(value.shape), value.dtype) for name, value in tensors.items()}
        self.optimizers, self.states = optimizers, states or {}
        self.on_read: Callable[[str], object] = lambda name: None

    def read(self, name: str) -> Tensor:
        self.on_read(name)
        return self.tensors[name]

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        self.on_read(f"{name}.{key}")
        return self.states[optimizer, name, key]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("flags", torch.tensor([True, False, True]))


def tied(module: nn.Module | None = None) -> Memory:
    module = module or Tied()
    return Memory(dict(module.state_dict()), {"head.weight": "embed.weight"})


def odd() -> Memory:
    torch.manual_seed(0)
    return Memory(
        {
            "matrix": torch.randn(33, 7),
            "bytes": torch.arange(3, dtype=torch.uint8),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "count": torch.tensor(2**40 + 1),
            "half": torch.randn(5).bfloat16(),
            "complex": torch.randn(3, dtype=torch.complex64),
            "tiny": torch.randn(1, 1, 1),
        }
    )


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def check_equal(
    loaded: Mapping[str, Tensor], source: Memory, dtype: torch.dtype, names: set[str] | None = None
) -> None:
    assert set(loaded) == (set(source.weights) if names is None else names)
    for name, value in loaded.items():
        expected = in_dtype(source.tensors[name], dtype)
        assert value.dtype == expected.dtype
        assert value.shape == expected.shape
        assert torch.equal(value, expected), name


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def layers(count: int = 7) -> Memory:
    torch.manual_seed(1)
    tensors = {f"layers.{number}.weight": torch.randn(10, 10) for number in range(count)}  # 200 bytes each in fp16
    tensors["head"] = tensors["layers.0.weight"]
    return Memory(tensors, {"head": "layers.0.weight"})
