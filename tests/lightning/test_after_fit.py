"""The module after a fit: its parameters have storages of their own, no gradients, and serve anything."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import nn

from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, weights
from tests.support.matrix import only
from tests.support.pool import Pool

OPTIONS: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False, "limit_val_batches": 0}


class SavesLayers(pl.Callback):
    """Saves a layer in training, as callbacks do."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.sizes.append(_size_of(module))


def _size_of(module: Any) -> int:
    """Bytes of a file with one layer, without those of its elements."""
    file, layer = io.BytesIO(), next(child for child in module.modules() if isinstance(child, nn.Linear))
    torch.save(layer.state_dict(), file)
    return len(file.getvalue()) - sum(p.nbytes for p in layer.parameters())


def _fitted(stage: int, uses: bool, folder: str) -> Any:
    """The weights after two fits; ``uses``: whether the module is used between them."""
    threshold = {"stage3_param_persistence_threshold": 10**6}
    module, callback = GPT(dist.get_world_size()), SavesLayers()
    sharded_trainer(stage, threshold, callbacks=[callback], **OPTIONS).fit(module)
    if uses:
        assert all(size < 4000 for size in [*callback.sizes, _size_of(module)]), callback.sizes
        for parameter in module.parameters():
            assert parameter.grad is None
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        save_model(module, f"{folder}/{dist.get_rank()}.safetensors")
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            other.double().to("cpu")
            assert_same(_plain(other), _plain(module), 0, 0)
        module.to("cpu").cpu().share_memory()
    trainer = sharded_trainer(stage, threshold, **OPTIONS)
    trainer.fit(module)
    found = weights(trainer)
    if uses:
        _trains_alone(module)
    return found


def _trains_alone(module: GPT) -> None:
    """A copy is trained by each rank alone, with any optimizer; the original stays with its engine."""
    module = copy.deepcopy(module)
    before, batch = _plain(copy.deepcopy(module)), torch.arange(12).view(2, 6) % 7 + dist.get_rank()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.loss(batch).backward()
    assert all(type(p.grad) is torch.Tensor for p in module.parameters())
    optimizer.step()
    moved = _plain(module)
    assert any((moved[name] != before[name]).any() for name in before)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach().float().numpy() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("stage", only([2], [0, 1, 2, 3]))
def test_a_fitted_module_is_an_ordinary_one(pool: Pool, stage: int, tmp_path: Any) -> None:
    used, unused = (pool.run(2, _fitted, stage, uses, str(tmp_path))[0] for uses in (True, False))
    assert_same(used, unused, 0, 0)
