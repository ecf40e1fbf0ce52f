"""Operations for which the host waits for a GPU, counted on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

aten = torch.ops.aten
_READ = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.bincount.default,
}
_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class HostWaits(TorchDispatchMode):
    """Counts operations whose results, or their shapes, the host needs before it goes on.

    Args:
        lists: count ``Tensor.tolist``, too, also of tensors that would be on the host.

    Attributes:
        seen: the operations in order.
    """

    def __init__(self, lists: bool = False) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._lists = lists
        self._patch: Any = nullcontext()

    def __enter__(self) -> Self:
        read = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.seen.append("tolist")
            return read(tensor)

        self._patch = mock.patch.object(Tensor, "tolist", tolist) if self._lists else nullcontext()
        self._patch.__enter__()
        made: Self = super().__enter__()
        return made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patch.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        masks = func in _INDEX and any(index is not None and index.dtype == torch.bool for index in args[1])
        repeats = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in _READ or masks or repeats:
            self.seen.append(str(func))
        return func(*args, **kwargs)
