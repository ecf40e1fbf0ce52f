"""What is imported at start, which decides how long it takes; times depend on the machine, modules do not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lt_zero
from tests.support.simulated import one_of

HEAVY = {"torch", "lightning", "torchmetrics", "numpy", "pydantic", "omegaconf", "hydra", "psutil", "fsspec", "yaml"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def test_after_lightning_the_package_costs_nothing_and_its_cli_knows_the_short_name() -> None:
    code = (
        "import sys, lightning.pytorch; before = set(sys.modules)\n"
        "import lt_zero; print(*sorted(set(sys.modules) - before))\n"
        "print(lt_zero.optim.Lamb.__name__, lt_zero.ops.__name__, lt_zero.inference.__name__)\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(type(StrategyRegistry.get('zero_2')) is lt_zero.ZeroStrategy)\n"
        "from lightning.pytorch.cli import LightningCLI\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "args = ['--trainer.strategy.class_path=ZeroStrategy', '--trainer.strategy.init_args.stage=2']\n"
        "cli = LightningCLI(BoringModel, run=False, args=[*args, '--trainer.accelerator=cpu'])\n"
        "print(type(cli.trainer.strategy) is lt_zero.ZeroStrategy, cli.trainer.strategy.stage)"
    )
    lines = python("-c", code).stdout.splitlines()
    imported, named, registered = lines[:3]
    of_compat = {f"lt_zero.common.compat{name}" for name in ("", ".of_lightning")}
    light = {"lt_zero", *(f"lt_zero.common{name}" for name in ("", ".errors", ".output", ".places"))}
    light |= {"lt_zero.training", "lt_zero.training.lightning", "lt_zero.training.lightning.names"}
    assert set(imported.split()) <= light | of_compat
    assert named == "Lamb lt_zero.ops inference", "as the documentation writes them"
    assert registered == "True"
    assert lines[-1] == "True 2"


def test_exports_import_little_beside_torch() -> None:
    shown = python("-X", "importtime", "-m", "lt_zero.cli", "export", "--help")
    names = re.findall(r"\|\s+([\w.]+)$", shown.stderr, re.M)
    assert "lt_zero.checkpoint.export" in names
    slow = {
        "lightning",
        "torch.distributed.checkpoint",
        "torch._dynamo.utils",
        "omegaconf",
        "lt_zero.core.engine.engine",
    }
    assert not set(names).intersection(slow)


def calls_of(action: Callable[[], object]) -> int:
    """How many functions it calls, of Python and of C."""
    count = 0

    def seen(frame: Any, event: str, value: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("stage", "meta"), [(0, False), (2, False), (3, False), (3, True)])
def test_work_at_start_grows_in_proportion_to_the_units(stage: int, meta: bool) -> None:
    """From the module to an optimizer that is ready to step, on rank 0 of 64."""
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}

    def start(units: int) -> int:
        with torch.device("meta") if meta else nullcontext():
            blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(units)]
            model = nn.Sequential(*blocks)
        return calls_of(lambda: lt_zero.initialize(model=model, optimizer=torch.optim.SGD, config=config))

    with one_of(64, torch.device("cpu")):
        start(10)  # what happens once in a process
        few, many = start(20), start(40)
    assert many <= 2.2 * few


def test_help_of_the_command_imports_no_heavy_package() -> None:
    shown = python("-X", "importtime", "-m", "lt_zero.cli", "--help")
    assert "estimate" in shown.stdout
    imported = {name.partition(".")[0] for name in re.findall(r"\|\s+([\w.]+)$", shown.stderr, re.M)}
    assert "typer" in imported
    assert not imported & HEAVY
