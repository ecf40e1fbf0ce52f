"""Copies of parallelized modules: torch's DTensors with the same values, which no engine knows."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lt_zero import gathered
from lt_zero.core.engine.guard import is_guarded, owner_of
from tests.support.lightning_tools import sharded_trainer, trust
from tests.support.parallel_module import BATCH, Module
from tests.support.pool import Pool

CONFIG: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": BATCH}


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}


def look(module: Module) -> None:
    """Copy a module whose weights can be read."""
    twin = copy.deepcopy(module)
    for (name, theirs), mine in zip(twin.named_parameters(), module.parameters(), strict=True):
        assert type(theirs) is (DTensor if isinstance(mine, DTensor) else nn.Parameter), name
        assert isinstance(theirs, nn.Parameter)
        assert owner_of(theirs) is None
        assert theirs.requires_grad == mine.requires_grad
    before = {name: value.detach().clone() for name, value in values(module).items()}
    for name, value in values(twin).items():
        assert torch.equal(value, before[name]), name
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(twin(x), module(x))
    with torch.enable_grad():
        twin(x).square().sum().backward()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, foreach=False)
    optimizer.step()
    changed = values(twin)
    for name, value in values(module).items():
        assert torch.equal(value, before[name]), "the copy has memory of its own"
        assert not torch.equal(value, changed[name]), name
    for again in pickled(list(module.parameters())), copy.deepcopy(twin).parameters():
        assert all(type(p) in (DTensor, nn.Parameter) for p in again)
    for theirs, mine in zip(pickled(list(module.parameters())), module.parameters(), strict=True):
        assert torch.equal(local(theirs), local(mine))
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    for name, value in torch.load(saved).items():
        assert torch.equal(local(value), local(module.state_dict()[name])), name


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def local(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


class Copying(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        with gathered(pl_module):
            look(pl_module)
            twin = copy.deepcopy(trainer)
        assert twin.strategy.run.built is None, "it has not begun"

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.strategy.config.zero_optimization.stage == 3:
            assert is_guarded(pl_module.blocks[0].up.weight)
            for make in (copy.deepcopy, pickle.dumps):
                with pytest.raises(RuntimeError, match=r"parameter .* are sharded .*gathered"):
                    make(pl_module.blocks[0].up.weight)


def _copies(stage: int) -> None:
    module = Module("adamw", data=2)
    trainer = sharded_trainer(stage, config=CONFIG, max_steps=2, callbacks=[Copying()])
    trainer.fit(module)
    with gathered(module):
        look(module)
        twin = copy.deepcopy(module)
    # It trains like any module of its kind.
    sharded_trainer(stage, config=CONFIG, max_steps=1).fit(twin, **trust(None))


@pytest.mark.slow  # core/engine/test_copies.py copies modules that are not cut
@pytest.mark.parametrize("stage", range(4))
def test_a_copy_is_a_module_of_its_own(pool: Pool, stage: int) -> None:
    pool.run(4, _copies, stage)
