"""What ranks run while the network between them fails: short trainings by each face, which tell how far they are."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from tests.support.models import Net, next_token_loss


def digest(module: nn.Module) -> str:
    """Of the whole weights, to the bit. Collective."""
    found = hashlib.sha256()
    with lt_zero.gathered(module):
        for parameter in module.parameters():
            found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(
    folder: str,
    face: str = "loop",
    stage: int = 2,
    steps: int = 12,
    pause: float = 0.05,
    save_at: int = 0,
    slow_save: float = 0.0,
    config: dict[str, Any] | None = None,
    differs: str = "",
    wait_for: str = "",
    alone_at: int = 0,
) -> None:
    """Train, and write ``step-RANK`` after each step and ``digest-RANK`` at the end.

    Args:
        folder: where these files are written, and the checkpoint ``saved``.
        pause: seconds between steps.
        save_at: save after this step; ``slow_save``: seconds that writing a file takes at least.
        differs: what the last rank has otherwise.
        wait_for: a file that has to be there before ranks connect.
        alone_at: the last rank runs a forward of its own after this step.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    odd = rank == world - 1
    tell(folder, rank, "begun", "")
    while wait_for and not Path(wait_for).exists():
        time.sleep(0.02)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    keys = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": zero, **(config or {})}
    run = {"loop": _loop, "fabric": _fabric, "trainer": _trainer}[face]
    run(folder, keys, steps, pause, save_at, differs if odd else "", alone_at if odd else 0)


def tell(folder: str, rank: int, name: str, text: str) -> None:
    part = Path(folder, f".{name}-{rank}")
    part.write_text(text)
    part.rename(Path(folder, f"{name}-{rank}"))


def _model(differs: str) -> Net:
    torch.manual_seed(1 if differs == "seed" else 0)
    if differs == "threads":
        torch.set_num_threads(3)
    return Net(depth=4 if differs == "model" else 3)


def _sgd(net: nn.Module, differs: str) -> torch.optim.Optimizer:
    if differs == "optimizer":
        return torch.optim.Adam(net.parameters(), lr=0.05)
    return torch.optim.SGD(net.parameters(), lr=0.06 if differs == "lr" else 0.05, momentum=0.9)


def _config(keys: dict[str, Any], differs: str) -> dict[str, Any]:
    return {**keys, "gradient_clipping": 0.5} if differs == "config" else keys


def _loop(folder: str, keys: dict[str, Any], steps: int, pause: float, save_at: int, differs: str, alone: int) -> None:
    net = _model(differs)
    engine = lt_zero.initialize(model=net, optimizer=_sgd(net, differs), config=_config(keys, differs))[0]
    rank, first = dist.get_rank(), 0
    if (source := Path(folder, "older" if differs == "checkpoint" else "start")).exists():
        engine.load_checkpoint(str(source))
        first = int(engine.global_steps)
    for step in range(first, steps - (2 if differs == "batches" else 0)):
        engine.backward(next_token_loss(engine, step, 0, rank))
        engine.step()
        if save_at == step + 1:
            tell(folder, rank, "saving", "")
            engine.save_checkpoint(f"{folder}/saved")
        if alone == step + 1:
            _do_alone(engine, differs)
        tell(folder, rank, "step", str(step + 1))
        time.sleep(pause)
    tell(folder, rank, "digest", digest(engine.module))


def _do_alone(engine: Any, what: str) -> None:
    if what == "gathered":
        digest(engine.module)
        return
    engine.eval()
    engine(torch.zeros(2, 3, dtype=torch.int64))
    engine.train()


def _fabric(
    folder: str, keys: dict[str, Any], steps: int, pause: float, save_at: int, differs: str, alone: int
) -> None:
    import lightning as L

    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = L.Fabric(
        accelerator="cpu", devices=local, num_nodes=world // local,
        strategy=lt_zero.FabricZeroStrategy(config=_config(keys, differs)),
    )  # fmt: skip
    fabric.launch()
    net = _model(differs)
    module, optimizer = fabric.setup(net, _sgd(net, differs))
    for step in range(steps):
        fabric.backward(next_token_loss(module, step, 0, fabric.global_rank))
        optimizer.step()
        optimizer.zero_grad()
        if save_at == step + 1:
            tell(folder, fabric.global_rank, "saving", "")
            fabric.save(f"{folder}/saved", {"model": module, "optimizer": optimizer})
        tell(folder, fabric.global_rank, "step", str(step + 1))
        time.sleep(pause)
    tell(folder, fabric.global_rank, "digest", digest(module))


def _trainer(
    folder: str, keys: dict[str, Any], steps: int, pause: float, save_at: int, differs: str, alone: int
) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from tests.support.lightning_tools import QUIET

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model(differs)

        def training_step(self, batch: Any, index: int) -> Any:
            return next_token_loss(self.net, index, 0, self.global_rank)

        def configure_optimizers(self) -> Any:
            return _sgd(self, differs)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.zeros(3 * (steps - (2 if differs == "batches" else 0)), 1), batch_size=3)

        def on_train_batch_end(self, *_: Any) -> None:
            step = self.trainer.global_step
            if save_at == step:
                tell(folder, self.global_rank, "saving", "")
                self.trainer.save_checkpoint(f"{folder}/saved")
            tell(folder, self.global_rank, "step", str(step))
            time.sleep(pause)

        def on_train_end(self) -> None:
            tell(folder, self.global_rank, "digest", digest(self.net))

    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = lt_zero.ZeroStrategy(config=_config(keys, differs))
    options = {"devices": local, "num_nodes": world // local, "max_epochs": 1, "use_distributed_sampler": False}
    pl.Trainer(**{**QUIET, **options, "strategy": strategy, "default_root_dir": folder}).fit(Module())
