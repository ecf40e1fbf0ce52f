"""What a saved training state is, whoever wrote it: names, shapes and values, read one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


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

    ``groups``: torch's ``param_groups`` with names in ``params``. ``state``: for each parameter that has one, its
    entries: a ``Spec`` for element-wise tensors (read with ``Source.read_state``), the value itself (a number, a 0D
    tensor) for the rest.
    """

    groups: list[dict[str, Any]]
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Source(Protocol):
    """A saved training state. Tensors are read one at a time; nothing else is held in memory.

    ``weights``: all entries of the module's state dict that are tensors (parameters and buffers), in its order,
    tied names included. ``aliases``: tied name -> the name whose values it shares. ``meta``: the rest of a Lightning
    checkpoint (loops, hyper-parameters, ...), plain containers; {} if there is none.
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
        """The whole tensor, contiguous, on the CPU, in its saved dtype.

        Raises:
            CheckpointError: the file is damaged; names it.
        """

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """An element-wise state of a parameter, with the parameter's shape."""


class Foreign(Source, Protocol):
    """A source that others wrote. ``notes``: what could not be taken over, one sentence each."""

    notes: list[str]

    def verify(self) -> list[str]:
        """Read every byte that has a checksum; the files that have none.

        Raises:
            CheckpointError: a file is not what was written; names it.
        """
