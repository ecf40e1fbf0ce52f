"""What the tests of imports share: the checkpoints that others made, and the modules that they are of."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lt_zero.checkpoint.import_ import import_checkpoint
from tests.support.paths import DATA

CASES = sorted(str(file.parent.relative_to(DATA)) for file in DATA.glob("deepspeed/*/expected.pt"))
CASES += ["fsdp/fsdp", "fsdp/model_parallel", "tensor_parallel/tp2/folder", "tensor_parallel/tp2_dp2/folder"]
_BESIDE = ("fsdp", "tensor_parallel")  # kinds whose checkpoints are beside what is expected of them


def source_of(case: str) -> Path:
    folder = DATA / case
    return folder / "last" if (folder / "last").is_dir() else folder


def expected_of(case: str) -> dict[str, Any]:
    folder = DATA / case
    found: dict[str, Any] = torch.load((folder.parent if case.startswith(_BESIDE) else folder) / "expected.pt")
    return found


def imported(case: str, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Path(import_checkpoint(source_of(case), folder / "imported"))


def makers(kind: str) -> Any:
    """The module that made the fixtures: its model and its groups."""
    spec = importlib.util.spec_from_file_location(f"make_{kind}", DATA / kind / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module_for(case: str, everything: bool = False, rate: float = 0.5) -> pl.LightningModule:
    """The fixture's model. ``everything``: the optimizer also gets the frozen parameter; ``rate`` is to be replaced."""
    make = makers(case.split("/")[0])
    sgd = case == "deepspeed/stage3"

    def configure(self: nn.Module) -> Any:
        groups = make.groups(self)
        if everything:
            groups[0]["params"] = [p for p in self.parameters() if p.dim() > 1]
        groups = [{**group, "weight_decay": 0.7} for group in groups]
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(groups, lr=rate, momentum=0.5) if sgd else torch.optim.AdamW(groups, lr=rate)
        )
        if "lightning" not in case:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def training_step(self: nn.Module, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = (self.net if "lightning" in case else self)(batch)
        return loss

    hooks = {"configure_optimizers": configure, "training_step": training_step, "validation_step": training_step}
    torch.manual_seed(99)
    if case.startswith("fsdp"):
        kind = type("Sharded", (make.Module,), {"configure_model": lambda self: None})
        return kind()
    if "lightning" not in case:
        return type("Plain", (make.Tiny, pl.LightningModule), hooks)()

    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make.Tiny()

    return type("Module", (Wrapped,), hooks)()
