"""Tensors that are read when they are used: edits are kept, reads keep nothing, they leave torch as tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lt_zero.core.engine.lazy_tensor import LazyTensor

ROWS = torch.arange(12.0).view(3, 4)


def _lazy() -> LazyTensor:
    return LazyTensor((3, 4), torch.float32, lambda lo, hi, box: box.of(ROWS).reshape(-1)[lo:hi].clone())


def _assign(tensor: Tensor) -> None:
    tensor.data = tensor.data + 1


EDITS: dict[str, Callable[[Tensor], object]] = {
    "operation": lambda w: w.mul_(2),
    "item": lambda w: w.__setitem__(0, 7),
    "mask": lambda w: w.__setitem__(w > 5, -1),
    "data": lambda w: w.data.add_(1),
    "detached": lambda w: w.detach()[1].zero_(),
    "view": lambda w: w.view(-1)[3:5].fill_(9),
    "transposed": lambda w: w.t().mul_(3),
    "out": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "numpy": lambda w: w.numpy().__imul__(4),
    "parameter": lambda w: nn.Parameter(w).data.mul_(2),
    "init": lambda w: nn.init.constant_(w, 3.5),
    "assigned": _assign,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_of_lazy_tensors_are_kept(edit: Callable[[Tensor], object]) -> None:
    lazy, plain = _lazy(), ROWS.clone()
    before = copy.deepcopy(lazy)
    edit(lazy)
    edit(plain)
    assert not torch.equal(plain, ROWS)
    assert torch.equal(lazy.whole(), plain)
    assert torch.equal(lazy.elements(2, 9), plain.view(-1)[2:9])
    assert torch.equal(before.whole(), ROWS)


def test_what_only_reads_lazy_tensors_keeps_nothing() -> None:
    lazy = _lazy()
    reads = [lazy.norm(), lazy.clone(), lazy + 1, lazy.to(torch.float16), torch.empty(3, 4).copy_(lazy)]
    assert len(reads) == 5
    assert lazy._held.kept is None


def test_lazy_tensors_leave_torch() -> None:
    lazy, buffer = _lazy(), io.BytesIO()
    assert np.array_equal(np.asarray(lazy), ROWS.numpy())
    assert lazy.tolist() == ROWS.tolist()
    assert torch.equal(torch.from_dlpack(lazy), ROWS)
    assert torch.equal(_lazy().share_memory_() + 0, ROWS)
    assert lazy.untyped_storage().data_ptr() == lazy.data_ptr() != 0
    loaded = pickle.loads(pickle.dumps(lazy))
    assert type(loaded) is Tensor
    assert torch.equal(loaded, ROWS)
    torch.save({"w": lazy}, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["w"], ROWS)
    with pytest.raises(RuntimeError, match="changes the shape"):
        lazy.resize_(12)
    with pytest.raises(RuntimeError, match="cannot become"):
        lazy.data = torch.zeros(2)
