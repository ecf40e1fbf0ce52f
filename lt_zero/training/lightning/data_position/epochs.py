"""The epochs that the samplers and datasets of a loader were told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lt_zero.training.lightning.data_position.attributes import asked


class Epochs:
    """The epochs that the parts of a loader were told last.

    Lightning tells samplers, at moments that differ between a resumed run and one that was not interrupted; callbacks
    of users tell datasets, in hooks that a run which resumes in the middle of an epoch does not call.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """``parts``: of ``OwnState``."""
        self._parts = {path: part for path, part in parts.items() if callable(_setter(part))}

    def state_dict(self) -> dict[str, int]:
        """By the path of attributes to each part; without parts that do not show their epoch."""
        found = {path: _epoch_of(part) for path, part in self._parts.items()}
        return {path: epoch for path, epoch in found.items() if epoch is not None}

    def restore(self, state: Mapping[str, int]) -> None:
        """Tell the parts the epochs of ``state_dict``."""
        for path, epoch in state.items():
            if path in self._parts:
                _setter(self._parts[path])(epoch)


def _setter(part: object) -> Any:
    return asked(part, "set_epoch")


def _epoch_of(part: object) -> int | None:
    for name in ("epoch", "_epoch"):
        value = asked(part, name)
        if isinstance(value, Tensor) and value.numel() == 1:  # shared with workers
            value = value.item()
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
