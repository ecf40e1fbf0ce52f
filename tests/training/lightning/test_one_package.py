"""Scripts that import ``pytorch_lightning`` get the package ``lightning``, whose Trainer takes the strategies."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry

import lt_zero
from lt_zero.training.lightning.names import register_strategies
from tests.support.docs_tools import BLOCKS, execute
from tests.support.lightning_tools import GPT, QUIET

PACKAGES = ("pytorch_lightning", "lightning_fabric")


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither package is imported, and what a test changes about imports ends with it."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    known = {name: module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES}
    for name in known:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.modules.update(known)


def test_every_import_is_that_of_lightning() -> None:
    spec = lightning.pytorch.__spec__
    assert lt_zero.as_pytorch_lightning() is lightning.pytorch
    lt_zero.as_pytorch_lightning()  # again
    other: Any = importlib.import_module("pytorch_lightning")
    assert other.Trainer is lightning.pytorch.Trainer
    for package, name in (("pytorch_lightning", "lightning.pytorch"), ("lightning_fabric", "lightning.fabric")):
        for part in ("", ".strategies", ".strategies.ddp", ".plugins.precision"):
            assert importlib.import_module(package + part) is importlib.import_module(name + part)
    assert find_spec("pytorch_lightning.no_such") is None
    with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.no_such"):
        importlib.import_module("pytorch_lightning.no_such")
    assert lightning.pytorch.__spec__ is spec
    trainer = other.Trainer(**QUIET, devices=1, strategy=lt_zero.ZeroStrategy(stage=2), max_steps=1)
    trainer.fit(GPT(1))
    assert trainer.global_step == 1


def test_the_lines_of_the_page_run() -> None:
    (block,) = [b for b in BLOCKS if b.page == "docs/quickstart.md" and b.marks.get("run by") == "test_one_package"]
    execute(block)
    assert sys.modules["pytorch_lightning"] is lightning.pytorch


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_imported_already_is_told(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    with pytest.raises(RuntimeError, match=rf"{package} is imported already, .*first lines of the script"):
        lt_zero.as_pytorch_lightning()


@pytest.mark.parametrize(
    ("package", "name"), [("pytorch_lightning", "StrategyRegistry"), ("lightning_fabric", "STRATEGY_REGISTRY")]
)
def test_names_and_strategies_in_the_other_package_name_the_call(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, registry = ModuleType(f"{package}.strategies"), _StrategyRegistry()
    vars(module)[name] = registry
    monkeypatch.setitem(sys.modules, f"{package}.strategies", module)
    register_strategies()
    with pytest.raises(lt_zero.ConfigError, match=rf'"zero_2" .* this is {package}\. Call lt_zero\.as_pytorch_light'):
        registry.get("zero_2")
    # Lightning's error for a strategy of the other package shows its text.
    make = lt_zero.ZeroStrategy if package == "pytorch_lightning" else lt_zero.FabricZeroStrategy
    assert f"package {package} takes this one after lt_zero.as_pytorch_lightning()" in repr(make(stage=2))


@pytest.mark.slow
@pytest.mark.parametrize("call", [False, True])
def test_with_the_package_itself(call: bool) -> None:
    pytest.importorskip("pytorch_lightning", reason="the package itself is tried")
    first = "import lt_zero; lt_zero.as_pytorch_lightning()\n" if call else ""
    code = (
        "import pytorch_lightning as pl\nfrom pytorch_lightning.demos.boring_classes import BoringModel\n"
        "import lt_zero\n"
        "trainer = pl.Trainer(strategy=lt_zero.ZeroStrategy(stage=2), accelerator='cpu', devices=1, max_steps=2,\n"
        "    logger=False, enable_checkpointing=False)\n"
        "trainer.fit(BoringModel())\nprint('steps', trainer.global_step)\n"
    )
    done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True)
    assert ("steps 2" in done.stdout) == call, done.stderr
    assert ("lt_zero.as_pytorch_lightning()" in done.stderr) != call
