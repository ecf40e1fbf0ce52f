"""The three ways into lt_zero behind one interface: a Trainer, Fabric, and a loop of one's own.

``run(face, settings, contract)`` calls the contract with a model that is set up, inside of the face's loop. Losses are
those of ``models.next_token_loss``, with ``GAS`` micro-batches a step; ``Plain`` takes the same steps in one process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import FabricZeroStrategy
from tests.support.lightning_tools import sharded_trainer, torchrun_env
from tests.support.models import Net, next_token_loss

FACES = ["trainer", "fabric", "loop"]
GAS = 3  # not a power of two: a factor that is forgotten, or rounded, is seen
ROUGH = {"rtol": 0.2, "atol": 0.02}  # of gradients in 16 bits


def close(found: Any, wanted: Any, what: str, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without states, which would tell that steps were taken."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Settings:
    """Of a run.

    ``zero``: keys of the zero_optimization block; ``config``: of the top level; ``schedule``: is stepped by
    ``Face.step``.
    """

    stage: int
    precision: str = "32-true"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    schedule: Callable[[Any], Any] | None = None

    def whole(self, **keys: Any) -> dict[str, Any]:
        block = {"stage": self.stage, "stage3_param_persistence_threshold": 0, **self.zero}
        return {"zero_optimization": block, **self.config, **keys}

    @property
    def data_rank(self) -> int:
        """Which data this rank sees."""
        tensor: int = self.config.get("tensor_parallel", {}).get("autotp_size", 1)
        return dist.get_rank() // tensor


class Plain:
    """The same steps in one process."""

    def __init__(
        self, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, net: Callable[[], nn.Module] = Net
    ) -> None:
        torch.manual_seed(0)
        self.net = net()
        self.optimizer = optimizer(self.net)

    def backward(self, step: int, micros: int = GAS, world: int | None = None) -> None:
        """``world``: of the ranks whose micro-batches are trained on; default: those of this task."""
        self.optimizer.zero_grad()
        world = world or dist.get_world_size()
        for micro, rank in itertools.product(range(micros), range(world)):
            (next_token_loss(self.net, step, micro, rank) / (GAS * world)).backward()

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.net.parameters() if p.grad is not None]


class Face:
    """What a contract sees.

    Attributes:
        net: the module, whose parameters are sharded.
        optimizer: torch's.
        rank: which data this rank sees.
        scaled: by what ``p.grad`` is too large before it is clipped or stepped.
        loss_scale: now.
        schedule: of the settings; None: there is none.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    scaled: float = 1.0
    loss_scale: float = 1.0
    schedule: Any = None

    def backward(self, step: int, micro: int, factor: float = 1.0) -> None:
        """The backward of one micro-batch, and what comes between two."""
        raise NotImplementedError

    def clip(self, max_norm: float | None = None, clip_val: float | None = None) -> None:
        raise NotImplementedError

    def step(self) -> None:
        """With ``zero_grad``."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Until the save in the background is done."""
        raise NotImplementedError

    def load(self, path: str, states: bool = True) -> None:
        """Load what ``save`` wrote, if the face has not done so already; without ``states`` only the weights."""


Contract = Callable[[Face], Any]


def run(
    face: str,
    settings: Settings,
    contract: Contract,
    resume: str | None = None,
    net: Callable[[], nn.Module] = Net,
) -> Any:
    """What the contract returns, with the model of seed 0.

    ``resume``: a checkpoint that the contract loads; under a Trainer, which loads itself, it is loaded then.
    """

    def ranked(made: Face) -> Any:
        made.rank = settings.data_rank
        return contract(made)

    torch.manual_seed(0)
    if face == "trainer":
        return _run_trainer(settings, ranked, net(), resume)
    return {"fabric": _run_fabric, "loop": _run_loop}[face](settings, ranked, net())


# ---- a loop of one's own ---------------------------------------------------------------------------------------------


class LoopFace(Face):
    def __init__(self, engine: Any) -> None:
        self.engine, self.net, self.optimizer = engine, engine.module, engine.optimizer
        self.schedule = engine.lr_scheduler

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        return float(self.engine.loss_scale())

    def backward(self, step: int, micro: int, factor: float = 1.0) -> None:
        self.engine.backward(next_token_loss(self.engine, step, micro, self.rank) * factor)
        if micro < GAS - 1:
            self.engine.step()

    def clip(self, max_norm: float | None = None, clip_val: float | None = None) -> None:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), max_norm)
        else:
            assert clip_val is not None
            nn.utils.clip_grad_value_(self.net.parameters(), clip_val)

    def step(self) -> None:
        self.engine.step()

    def save(self, path: str) -> None:
        self.engine.save_checkpoint(*os.path.split(path))

    def wait(self) -> None:
        self.engine.wait_for_save()

    def load(self, path: str, states: bool = True) -> None:
        self.engine.load_checkpoint(*os.path.split(path), load_module_only=not states)


def _run_loop(settings: Settings, contract: Contract, net: nn.Module) -> Any:
    width, kind = settings.precision.split("-")
    config = settings.whole(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=GAS)
    block = {"16": "fp16", "bf16": "bf16"}.get(width)
    if block is not None:
        config[block] = {"enabled": True, **config.get(block, {})}
        config["torch_autocast"] = {"enabled": kind == "mixed", "dtype": block}
    optimizer = settings.optimizer(net)
    made = lt_zero.initialize(model=net, optimizer=optimizer, lr_scheduler=settings.schedule, config=config)
    engine = made[0]
    try:
        return contract(LoopFace(engine))
    finally:
        engine.destroy()


# ---- Fabric ----------------------------------------------------------------------------------------------------------


class FabricFace(Face):
    def __init__(self, fabric: Any, model: Any, optimizer: Any, schedule: Any = None) -> None:
        self.fabric, self.model, self.wrapped, self.schedule = fabric, model, optimizer, schedule
        self.net, self.optimizer = model.module, optimizer.optimizer
        self._controller = fabric.strategy.precision.loss_scale_controller

    @property
    def scaled(self) -> float:  # type: ignore[override]
        return float(self._controller.scale)

    loss_scale = scaled  # type: ignore[assignment]

    def backward(self, step: int, micro: int, factor: float = 1.0) -> None:
        with self.fabric.no_backward_sync(self.model, enabled=micro < GAS - 1):
            self.fabric.backward(next_token_loss(self.model, step, micro, self.rank) * factor / GAS)

    def clip(self, max_norm: float | None = None, clip_val: float | None = None) -> None:
        given = {"clip_val": clip_val} if max_norm is None else {"max_norm": max_norm}
        self.fabric.clip_gradients(self.model, self.wrapped, **given)

    def step(self) -> None:
        self.wrapped.step()
        self.wrapped.zero_grad()
        if self.schedule is not None:
            self.schedule.step()

    def save(self, path: str) -> None:
        self.fabric.save(path, {"model": self.model, **self._of_training})

    def wait(self) -> None:
        self.fabric.strategy.wait_for_save()

    def load(self, path: str, states: bool = True) -> None:
        self.fabric.load(path, {"model": self.model, **(self._of_training if states else {})})

    @property
    def _of_training(self) -> dict[str, Any]:
        """What a script saves beside the model."""
        return {"optimizer": self.wrapped, **({} if self.schedule is None else {"schedule": self.schedule})}


def _run_fabric(settings: Settings, contract: Contract, net: nn.Module) -> Any:
    os.environ.update(torchrun_env())
    strategy = FabricZeroStrategy(config=settings.whole())
    fabric: Any = L.Fabric(
        accelerator="cpu",
        strategy=strategy,
        devices=dist.get_world_size(),
        precision=settings.precision,  # type: ignore[arg-type]
    )
    fabric.launch()
    optimizer = settings.optimizer(net)
    schedule = {} if settings.schedule is None else {"scheduler": settings.schedule(optimizer)}
    return contract(FabricFace(fabric, *fabric.setup(net, optimizer, **schedule)))


# ---- a Trainer -------------------------------------------------------------------------------------------------------


class TrainerFace(Face):
    def __init__(self, module: ContractModule) -> None:
        self.module, self.net = module, module.net
        self.optimizer = module.trainer.optimizers[0]
        self.schedule = module.lr_schedulers()
        self._controller = module.trainer.precision_plugin.loss_scale_controller  # type: ignore[attr-defined]

    @property
    def scaled(self) -> float:  # type: ignore[override]
        return float(self._controller.scale)

    loss_scale = scaled  # type: ignore[assignment]

    def backward(self, step: int, micro: int, factor: float = 1.0) -> None:
        trainer = self.module.trainer
        waits: AbstractContextManager[Any] = nullcontext()
        if micro < GAS - 1:
            waits = trainer.strategy.block_backward_sync()  # type: ignore[attr-defined]
        with waits:
            self.module.manual_backward(next_token_loss(self.net, step, micro, self.rank) * factor / GAS)

    def clip(self, max_norm: float | None = None, clip_val: float | None = None) -> None:
        optimizer: Any = self.module.optimizers()
        limit, how = (clip_val, "value") if max_norm is None else (max_norm, "norm")
        self.module.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=how)

    def step(self) -> None:
        optimizer: Any = self.module.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()

    def save(self, path: str) -> None:
        self.module.trainer.save_checkpoint(path)

    def wait(self) -> None:
        self.module.trainer.strategy.wait_for_save()  # type: ignore[attr-defined]


class ContractModule(pl.LightningModule):
    """Runs a contract in its only training step."""

    def __init__(self, net: nn.Module, settings: Settings, contract: Contract) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.settings, self.contract = net, settings, contract
        self.result: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.result = self.contract(TrainerFace(self))

    def configure_optimizers(self) -> Any:
        optimizer = self.settings.optimizer(self.net)
        return optimizer if self.settings.schedule is None else ([optimizer], [self.settings.schedule(optimizer)])

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(1, 1))  # type: ignore[arg-type]  # one batch on each data rank


def _run_trainer(settings: Settings, contract: Contract, net: nn.Module, resume: str | None) -> Any:
    module = ContractModule(net, settings, contract)
    keys = settings.whole()
    zero = keys.pop("zero_optimization")
    trainer = sharded_trainer(settings.stage, zero, keys, precision=settings.precision, max_epochs=1)
    trainer.fit(module, ckpt_path=resume)
    return module.result
