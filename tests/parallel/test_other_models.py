"""Ranks whose code makes other layers where a model is divided or cut: the error names the first difference."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.parallel import LayerSpec, Pipeline, PipelineModule, TiedLayerSpec
from tests.support.lightning_tools import quick, sharded_trainer, torchrun_env
from tests.support.mixtures import FeedForwards
from tests.support.pool import Pool


def other() -> bool:
    return dist.get_rank() == 1


# ---- layers of a pipeline --------------------------------------------------------------------------------------------


def linears(count: int) -> list[Any]:
    return [LayerSpec(nn.Linear, 8, 8) for _ in range(count)]


def with_second(layer: Callable[[], Any]) -> Callable[[], list[Any]]:
    """Four layers; the last rank's code has another one in the stage of the first rank."""
    return lambda: [linears(1)[0], layer(), *linears(2)] if other() else linears(4)


class Same(nn.Linear):
    """Has the shapes of what it stands for."""


UNIFORM = {"partition_method": "uniform"}
# What the error says, the layers that the ranks' code makes, and its arguments: a tuple has one for each rank.
SPLITS: list[tuple[str, Callable[[], list[Any]], dict[str, Any]]] = [
    ("the number of layers of the pipeline is 4 on rank 0 and 6 on rank 1", lambda: linears(6 if other() else 4), {}),
    ("the number of layers of the pipeline is 6 on rank 0 and 4 on rank 1", lambda: linears(4 if other() else 6), {}),
    (
        "layer 1 of the pipeline is Linear on rank 0 and Same on rank 1",
        with_second(lambda: LayerSpec(Same, 8, 8)),
        {},
    ),
    (
        "parameter 'layers.1.bias' (of Linear) of the pipeline is (8,) float32 on rank 0 and missing on rank 1",
        with_second(lambda: LayerSpec(nn.Linear, 8, 8, bias=False)),
        UNIFORM,
    ),
    (
        "'layers.1.weight' (of Linear) of the pipeline is (8, 8) float32 on rank 0 and (8, 8) float32, frozen on rank",
        with_second(lambda: nn.Linear(8, 8).requires_grad_(False)),
        {},
    ),
    (
        "layer 1 of the pipeline is Linear on rank 0 and Linear, tied as 'w' on rank 1",
        with_second(lambda: TiedLayerSpec("w", nn.Linear, 8, 8)),
        {},
    ),
    (
        "'layers.1.weight' (of Linear) of the pipeline is (8, 8) float32 on rank 0 and (8, 8) float64 on rank 1",
        with_second(lambda: LayerSpec(nn.Linear, 8, 8, dtype=torch.float64)),
        {"seed_layers": True, **UNIFORM},
    ),
    (
        "module 'layers.1' of the pipeline is Dropout(p=0.1, inplace=False) on rank 0 and Dropout(p=0.2",
        lambda: [*linears(1), nn.Dropout(0.2 if other() else 0.1), *linears(2)],
        UNIFORM,
    ),
    (
        "stage 0 of the pipeline is layers 0 to 1 on rank 0 and layers 0 to 2 on rank 1",
        lambda: [*linears(3), LayerSpec(nn.Linear, 8, 60)],
        {"partition_method": ("uniform", "parameters")},
    ),
]


def _split(row: int) -> str:
    """The error of a loop."""
    _, layers, options = SPLITS[row]
    own = {key: value[dist.get_rank()] if isinstance(value, tuple) else value for key, value in options.items()}
    model = PipelineModule(layers(), num_stages=2, loss_fn=nn.functional.mse_loss, **own)
    config = {"zero_optimization": {"stage": 1}, "train_batch_size": 4, "pipeline": {"stages": 2}}
    with quick(), pytest.raises(RuntimeError) as caught:
        lt_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    return str(caught.value)


class Piped(pl.LightningModule):
    """A pipeline of as many layers as the rank's code has."""

    def __init__(self) -> None:
        super().__init__()
        self.pipe: Any = None

    def configure_model(self) -> None:
        if self.pipe is None:
            self.pipe = Pipeline(linears(6 if other() else 4), loss_fn=nn.functional.mse_loss)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.pipe(batch, batch * 0.5)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 8), batch_size=4)  # type: ignore[arg-type]


def _trained() -> str:
    with quick(), pytest.raises(RuntimeError) as caught:
        sharded_trainer(1, config={"pipeline": {"stages": 2}}, max_steps=1).fit(Piped())
    return str(caught.value)


def _splits() -> list[str]:
    return [*map(_split, range(len(SPLITS))), _trained()]


def test_stages_compare_all_layers_before_they_train(pool: Pool) -> None:
    """Else a layer is on no stage, or on two, with different values."""
    for errors in pool.run(2, _splits):
        for (text, _, _), told in zip(SPLITS, errors[:-1], strict=True):
            assert text in told, told
        assert "the number of layers of the pipeline 'pipe' is 4 on rank 0 and 6 on rank 1" in errors[-1]


# ---- what tensor ranks and expert ranks cut --------------------------------------------------------------------------


def blocks(count: int, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) for _ in range(count)))


class Cut(pl.LightningModule):
    """Parallelized by its user, with another number of blocks on the last rank."""

    def configure_model(self) -> None:
        self.net = blocks(3 if other() else 2)
        for block in self.net:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)  # type: ignore[index, arg-type]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 6), batch_size=4)  # type: ignore[arg-type]


RULES = [
    {"patterns": [r".*\.0\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.1\.weight"], "partition_type": "row"},
]
TENSORS = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": RULES}}


def _cut_by_user() -> str:
    with quick(), pytest.raises(RuntimeError) as caught:
        sharded_trainer(1, config={"tensor_parallel": {"autotp_size": 2}}, max_steps=1).fit(Cut())
    return str(caught.value)


def _cut_by_fabric(module: nn.Module, keys: dict[str, Any]) -> str:
    os.environ.update(torchrun_env())
    strategy = FabricZeroStrategy(config={"zero_optimization": {"stage": 1}, **keys})
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with quick():
        fabric.launch()
        with pytest.raises(RuntimeError) as caught:
            fabric.setup_module(module)
    return str(caught.value)


def _unchecked() -> str:
    """One rank does not check its memory, which is a collective."""
    if other():
        os.environ["LT_ZERO_MEMORY_CHECK"] = "0"
    with quick(), pytest.raises(lt_zero.ConfigError) as caught:
        lt_zero.initialize(model=nn.Linear(2, 2), config={"zero_optimization": {"stage": 1}})
    return str(caught.value)


class Unordered(nn.Module):
    """Registers what it finds in a set, whose order is another one in each process; ``of``: its tensors."""

    def __init__(self, register: str, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        for number in [1, 2, 0] if other() else [0, 1, 2]:
            getattr(self, register)(f"tensor{number}", of(torch.full((2,), number + 10.0 * dist.get_rank())))
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def _unordered() -> str:
    model = Unordered("register_buffer", torch.clone)
    with quick():
        engine, *_ = lt_zero.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={"zero_optimization": {"stage": 1}, "train_batch_size": 2},
        )
    engine(torch.ones(1, 2))
    assert {name: buffer[0].item() for name, buffer in model.named_buffers()} == {f"tensor{n}": n for n in range(3)}
    with pytest.raises(RuntimeError) as caught:
        lt_zero.shard(Unordered("register_parameter", nn.Parameter), lt_zero.ZeroConfig())
    return str(caught.value)


def _cuts() -> list[str]:
    number = 6 if other() else 4
    return [
        _cut_by_fabric(blocks(2, 12 if other() else 8), {"tensor_parallel": TENSORS}),
        _cut_by_fabric(FeedForwards(number), {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
        _cut_by_user(),
        _unordered(),
        _unchecked(),
    ]


def test_models_are_compared_before_they_are_cut(pool: Pool) -> None:
    """Afterwards each rank has as much as the first one, and what the others have more is gone."""
    texts = (
        r"parameter '0.0.weight' (of Linear) is (8, 6) float32 on rank 0 and (12, 6) float32 on rank 1",
        r"parameter 'up' (of FeedForwards) is (4, 6, 5) float32 on rank 0 and (6, 6, 5) float32 on rank 1",
        r"parameter 'net.2.0.weight' (of Linear) is missing on rank 0 and (8, 6) float32 on rank 1",
        r"parameter number 0 is 'tensor0' on rank 0 and 'tensor1' on rank 1",
        r"LT_ZERO_MEMORY_CHECK is 1 on rank 0, 0 on rank 1",
    )
    for errors in pool.run(2, _cuts):
        for text, told in zip(texts, errors, strict=True):
            assert text in told, told
