"""The interface of checkpoints of all formats: names, shapes, and values that are read one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Format = Literal["auto", "pt", "ckpt", "safetensors", "deepspeed-universal"]  # in which weights are exported


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class SavedOptimizer:
    """One optimizer's state, keyed by parameter *name*.

    ``groups``: torch's ``param_groups`` with names in ``params``. ``state``: entries by parameter: a ``Spec`` for
    element-wise tensors (read with ``CheckpointSource.read_state``), else the value (a number, a 0D tensor).
    """

    groups: list[dict[str, Any]]
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class CheckpointSource(Protocol):
    """An open checkpoint. Tensors are read one at a time; nothing else is held in memory.

    ``weights``: all tensors of the module's state dict (parameters and buffers) in its order, including tied names.
    ``aliases``: tied name -> the name whose values it shares. ``meta``: the rest of a Lightning checkpoint (loops,
    hyper-parameters, ...) in plain containers; {} if there is none.
    """

    @property
    def weights(self) -> Mapping[str, Spec]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def optimizers(self) -> Sequence[SavedOptimizer]: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...

    def read(self, name: str) -> Tensor:
        """The full tensor, contiguous, on the CPU, in its saved dtype.

        Raises:
            CheckpointError: the file is damaged; names it.
        """

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """An element-wise state of a parameter, with the parameter's shape."""
