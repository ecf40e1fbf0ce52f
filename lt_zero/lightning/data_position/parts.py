"""The parts of a loader: samplers and datasets, also those that others wrap, and the epochs that they were told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

_MOST_ATTRIBUTES = 6  # from the loader to a part
_KINDS = (DataLoader, Dataset, Sampler, _DatasetSamplerWrapper)
_MOST_ITEMS = 100  # of a list of parts, as those of ConcatDataset


def parts_of(loader: object) -> dict[str, Any]:
    """The loader (""), its samplers and datasets, and those that they wrap, by the path of attributes to them."""
    found: dict[str, Any] = {"": loader}
    seen, queue = {id(loader)}, deque([("", loader)])
    while queue:
        path, part = queue.popleft()
        if path.count(".") + 1 >= _MOST_ATTRIBUTES:
            continue
        for name, value in _inner(part):
            if id(value) not in seen:
                seen.add(id(value))
                inner = f"{path}.{name}" if path else name
                found[inner] = value
                queue.append((inner, value))
    return found


def _inner(part: object) -> Iterator[tuple[str, Any]]:
    for name, value in list(getattr(part, "__dict__", {}).items()):
        if _is_part(value):
            yield name, value
        elif isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
            yield from ((f"{name}[{number}]", item) for number, item in enumerate(value) if _is_part(item))


def _is_part(value: object) -> bool:
    return isinstance(value, _KINDS) or callable(getattr(type(value), "set_epoch", None))


class Epochs:
    """The epochs that the parts of a loader were told last.

    Lightning tells samplers, at moments that differ between a resumed run and one that was not interrupted; callbacks
    of users tell datasets, in hooks that a run which resumes in the middle of an epoch does not call.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """``parts``: from ``parts_of``."""
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
    return getattr(part, "set_epoch", None)


def _epoch_of(part: object) -> int | None:
    for name in ("epoch", "_epoch"):
        value = getattr(part, name, None)
        if isinstance(value, Tensor) and value.numel() == 1:  # shared with workers
            value = value.item()
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
