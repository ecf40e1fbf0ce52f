"""The module after a fit: its parameters have storages of their own, no gradients, and serve anything."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from contextlib import nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lt_zero
from lt_zero.common.compat.of_loggers import log_graph_by
from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, weights
from tests.support.matrix import only_rows
from tests.support.pool import Pool

OPTIONS: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False, "limit_val_batches": 0}


class SavesLayers(pl.Callback):
    """Saves a layer in training, as callbacks do."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.sizes.append(_size_of(module))
        _stays(module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        _stays(module)


class SavesNothing(SavesLayers):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        _stays(module)


class Traces(CSVLogger):
    """Traces the module on rank 0 when a run begins, as ``TensorBoardLogger(log_graph=True)`` does."""

    _log_graph = True

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        torch.jit.trace(model, model.example_input_array)


def _stays(module: nn.Module) -> None:
    """Conversions that change nothing leave each parameter, and its gradient, as it is, wherever its values are."""
    before = [(id(p), id(p.grad)) for p in module.parameters()]
    module.to("cpu").cpu().float().to("cpu", torch.float32, non_blocking=True).type(torch.float32)
    assert [(id(p), id(p.grad)) for p in module.parameters()] == before


def _size_of(module: Any) -> int:
    """Bytes of a file with one layer, without those of its elements."""
    file, layer = io.BytesIO(), next(child for child in module.modules() if isinstance(child, nn.Linear))
    torch.save(layer.state_dict(), file)
    return len(file.getvalue()) - sum(p.nbytes for p in layer.parameters())


def _fitted(stage: int, uses: bool, folder: str, compiled: bool = False) -> Any:
    """The weights after two fits; ``uses``: whether the module is used between them; ``compiled``: its network is."""
    threshold = {"stage3_param_persistence_threshold": 10**6}
    module, callback = GPT(dist.get_world_size()), SavesLayers()
    if compiled:
        torch.compiler.reset()
        module.net.compile(backend="eager")
    sharded_trainer(stage, threshold, callbacks=[callback], **OPTIONS).fit(module)
    if uses:
        assert all(size < 4000 for size in [*callback.sizes, _size_of(module)]), callback.sizes
        for parameter in module.parameters():
            assert parameter.grad is None
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        save_model(module, f"{folder}/{dist.get_rank()}.safetensors")
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            other.double().to("cpu")
            assert_same(_plain(other.float()), _plain(module), 0, 0)
        _stays(module)
        module.share_memory()
    trainer = sharded_trainer(stage, threshold, **OPTIONS)
    trainer.fit(module)
    found = weights(trainer)
    if uses:
        _trains_alone(module, trainer)
        _goes_on(module, stage, threshold)
    return found


def _trains_alone(module: GPT, trainer: pl.Trainer) -> None:
    """Each rank trains the module by itself, as any other one: gradients are its own, and no engine steps."""
    for kind, options in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 1e-2})):
        other = copy.deepcopy(module)
        optimizers = [kind(m.parameters(), **options) for m in (module, other)]
        for step in range(2):
            batch = torch.arange(12).view(2, 6) % 7 + dist.get_rank() + step
            for each, optimizer in zip((module, other), optimizers, strict=True):
                optimizer.zero_grad()
                each.loss(batch).backward()
                assert all(type(p.grad) is torch.Tensor for p in each.parameters())
                optimizer.step()
        assert_same(_plain(module), _plain(other), 0, 0)
    with pytest.raises(RuntimeError, match=r"ranks have other values of '.*torch\.save\(module\.state_dict\(\)"):
        trainer.strategy.full_state_dict()


def _goes_on(module: GPT, stage: int, zero: dict[str, Any]) -> None:
    """Another fit begins with the values of rank 0, as under DDP, also in another dtype."""
    for dtype, precision in ((torch.float32, "32-true"), (torch.float64, "64-true")):
        module.to(dtype)
        first: list[Any] = [_plain(module)]
        dist.broadcast_object_list(first)
        fresh = GPT(dist.get_world_size()).to(dtype)
        with torch.no_grad():
            for name, parameter in fresh.named_parameters():
                parameter.copy_(torch.from_numpy(first[0][name]))
        found = []
        for each in (module, fresh):
            trainer = sharded_trainer(stage, zero, precision=precision, **OPTIONS)
            trainer.fit(each)
            found.append(weights(trainer))
        assert_same(found[0], found[1], 0, 0)
        if dist.get_rank() == 0:
            assert any((found[0][name] != value).any() for name, value in first[0].items())


class Fails(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("on all ranks")


def _failed() -> None:
    """After an error, too, what each rank has then changed by itself gives way to the values of rank 0."""
    module = GPT(dist.get_world_size())
    trainer = sharded_trainer(2, callbacks=[Fails()], **OPTIONS)
    with pytest.raises(ValueError, match="on all ranks"):
        trainer.fit(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * dist.get_rank())
    first: list[Any] = [_plain(module)]
    dist.broadcast_object_list(first)
    trainer.fit_loop.max_epochs = 0
    trainer.fit(module)
    assert_same(_plain(module), first[0], 0, 0)


def _sharded(folder: str) -> None:
    """Where weights are not in memory, conversions that change something are errors, as is an optimizer of torch's."""
    module, callback = GPT(dist.get_world_size()), SavesNothing()
    module.example_input_array = torch.zeros(1, 6, dtype=torch.long)
    logger = Traces(folder)
    trainer = sharded_trainer(3, callbacks=[callback], **{**OPTIONS, "logger": logger})
    told = "log_graph=True: the graph of GPT is not logged"
    with pytest.warns(UserWarning, match=told) if dist.get_rank() == 0 else nullcontext():
        trainer.fit(module)
    _stays(module)
    for convert in (nn.Module.double, nn.Module.share_memory, AveragedModel(GPT()).update_parameters):
        with pytest.raises(RuntimeError, match=r"lt_zero\.gathered.*trainer\.strategy\.export\(path\)"):
            convert(module)
    _exports(module, folder)
    with trainer.strategy.engine.forward_scope():
        loss = module.loss(torch.arange(12).view(2, 6) % 7)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"lt_zero\.gathered.*trainer\.strategy\.export\(path\)"):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    trainer = sharded_trainer(3, **OPTIONS)
    trainer.fit(module)
    assert_same(weights(trainer), _fitted(3, False, ""))


def _exports(module: GPT, folder: str) -> None:
    """Exports of torch and Lightning name what to do, also where the packages that they need next are missing."""
    tokens = (torch.arange(12).view(2, 6) % 7,)
    with pytest.raises(RuntimeError, match=r"lt_zero\.gathered.*trainer\.strategy\.export\(path\)"):
        torch.export.export(module, tokens)
    with (
        mock.patch("lightning.pytorch.core.module._ONNX_AVAILABLE", True),
        pytest.raises(RuntimeError, match=r"GPT is called inside of torch\.jit\.trace.*lt_zero\.gathered\(module\)"),
    ):
        module.to_onnx(f"{folder}/{dist.get_rank()}.onnx", tokens, dynamo=False)
    remedy = r"strict=False\)` inside of `with lt_zero\.gathered\(module\):.*trainer\.strategy\.export\(path\)"
    with pytest.raises(RuntimeError, match=remedy):
        torch.export.export(module, tokens, strict=True)
    for copied in (copy.deepcopy, AveragedModel, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"lt_zero\.gathered.*trainer\.strategy\.export\(path\)"):
            copied(module)
    with lt_zero.gathered(module):
        with pytest.raises(RuntimeError, match=remedy):
            torch.export.export(module.net, tokens, strict=True)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), AveragedModel(module).module):
            assert_same(_plain(other.double().float()), _plain(module), 0, 0)
        logits = torch.export.export(module.net, tokens).module()(*tokens)
        torch.testing.assert_close(logits, module.net(*tokens))
        AveragedModel(GPT()).update_parameters(module)


def test_the_logger_of_fast_dev_run_traces_nothing() -> None:
    logger = DummyLogger()
    log_graph_by(logger, lambda: pytest.fail("it was not asked for a graph"))
    logger.log_graph(None)


def test_a_sharded_module_after_a_fit(pool: Pool, tmp_path: Any) -> None:
    pool.run(2, _sharded, str(tmp_path))


def test_a_module_after_a_fit_that_failed(pool: Pool) -> None:
    pool.run(2, _failed)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach().clone().numpy() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("stage", "compiled"), only_rows([(2, False)], itertools.product([0, 1, 2, 3], [False, True])))
def test_a_fitted_module_is_an_ordinary_one(pool: Pool, stage: int, compiled: bool, tmp_path: Any) -> None:
    used, unused = (pool.run(2, _fitted, stage, uses, str(tmp_path), compiled)[0] for uses in (True, False))
    assert_same(used, unused, 0, 0)
