"""Checkpoints of compiled models have plain names, and load into models that are compiled in another way, or not."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.checkpoint.open import open_source
from lt_zero.common import plain_names
from lt_zero.common.compat import clean_name
from tests.support.lightning_tools import FULL, GPT, sharded_trainer, single_trainer, torchrun_env, trust
from tests.support.models import Block, Net
from tests.support.paths import ROOT
from tests.support.pool import Pool

BACKEND: dict[str, Any] = {"backend": "eager"}
WAYS = ["plain", "net", "blocks"]  # what is compiled, of the LightningModule


class Norm(nn.Module):
    """With buffers, which have names as well."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = net, nn.BatchNorm1d(6)

    def forward(self, batch: Tensor) -> Tensor:
        made: Tensor = self.norm(self.inner(batch))
        return made


class Module(GPT):
    def __init__(self, way: str, world: int = 2) -> None:
        super().__init__(world, "adamw")
        self.way = way
        net: Any = Norm(self.net)
        if way == "blocks":
            net.inner.blocks = nn.ModuleList(torch.compile(block, **BACKEND) for block in net.inner.blocks)
        self.net = torch.compile(net, **BACKEND) if way == "net" else net  # type: ignore[assignment]


def _names() -> set[str]:
    return set(Module("plain").state_dict())


def _trained(way: str, stage: int, steps: int, config: dict[str, Any], path: str | None = None) -> Any:
    trainer = sharded_trainer(stage, config=config, max_steps=steps, max_epochs=5)
    trainer.fit(Module(way, dist.get_world_size()), ckpt_path=path, **trust(None))
    return trainer


def _resumes(folder: str, old_file: str) -> None:
    whole = _trained("plain", 3, 4, {})
    wanted = whole.strategy.full_state_dict()
    for number, (way, config, stage) in enumerate([("net", {}, 3), ("blocks", FULL, 1), ("plain", {}, 3)]):
        path = f"{folder}/{number}"
        trainer = _trained(way, stage, 2, config)
        trainer.save_checkpoint(path)
        trainer.strategy.export(f"{path}.pt", dtype=torch.float32)
        assert set(trainer.strategy.full_state_dict()) == (_names() if dist.get_rank() == 0 else set())
        dist.barrier()
        assert set(torch.load(f"{path}.pt")) == _names()
        assert set(open_source(path).weights) == _names()
        # Each way loads what another one has saved; all pairs of them are in ``_loops``.
        other = WAYS[(WAYS.index(way) + 1) % 3]
        found = _trained(other, 4 - stage, 4, config, path).strategy.full_state_dict()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], msg=f"{way} -> {other}: {name}")
        lightnings = Module.load_from_checkpoint(path, way="blocks", weights_only=False)
        for module in (lt_zero.load_from_checkpoint(Module, path, way="blocks"), lightnings):
            torch.testing.assert_close(dict(plain_names.state_dict(module)), torch.load(f"{path}.pt"))
    found = _trained("plain", 3, 4, {}, old_file).strategy.full_state_dict()
    for name, value in found.items():  # one process has other batches in a BatchNorm, so the statistics differ
        assert value.shape == wanted[name].shape
        assert value.isfinite().all()


def test_trainer(pool: Pool, tmp_path: Path) -> None:
    trainer = single_trainer(max_steps=2, max_epochs=1)
    trainer.fit(Module("blocks", 1))
    trainer.save_checkpoint(tmp_path / "lightnings.ckpt")
    saved = torch.load(tmp_path / "lightnings.ckpt", weights_only=False)["state_dict"]
    assert any("_orig_mod." in name for name in saved), "Lightning saves torch's names"
    pool.run(2, _resumes, str(tmp_path), str(tmp_path / "lightnings.ckpt"))
    for number in (0, 1):  # a directory and a file
        module = Module("blocks", 1)  # another strategy loads them by the names of torch
        single_trainer().validate(module, ckpt_path=str(tmp_path / str(number)), verbose=False, **trust(False))
        torch.testing.assert_close(dict(plain_names.state_dict(module)), torch.load(tmp_path / f"{number}.pt"))


def _compiled(way: str) -> Any:
    torch.manual_seed(1)
    net: Any = Net(depth=2)
    if way == "blocks":
        net.blocks = nn.ModuleList(torch.compile(block, **BACKEND) for block in net.blocks)
    return torch.compile(net, **BACKEND) if way == "net" else net


def _config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


def _loops(folder: str) -> None:
    names = set(Net(depth=2).state_dict())
    batch = torch.ones(2, 3, dtype=torch.long)
    for way in WAYS:
        model = _compiled(way)
        engine, *_ = lt_zero.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=_config(3))
        for _ in range(2):
            engine.backward(engine(batch).square().mean())
            engine.step()
        assert set(engine.module_state_dict()) == (names if dist.get_rank() == 0 else set())
        engine.save_checkpoint(folder, way)
    for way, other in itertools.permutations(WAYS, 2):
        model = _compiled(other)
        engine, *_ = lt_zero.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=_config(2))
        engine.load_checkpoint(folder, way)
        assert set(open_source(f"{folder}/{way}").weights) == names
        for name, parameter in plain_names.named_parameters(engine.module):
            source = open_source(f"{folder}/{way}")
            assert torch.equal(parameter, source.read(source.aliases.get(name, name))), name
        assert all(len(state) == 3 for state in engine.optimizer.state.values())


def _fabric(folder: str) -> None:
    names = set(Net(depth=2).state_dict())
    for way, other in [("net", "blocks"), ("blocks", "plain"), ("plain", "net")]:
        for role in (way, other):
            fabric = L.Fabric(
                accelerator="cpu", devices=2, strategy=FabricZeroStrategy(config=_config(3 if role is way else 1))
            )
            fabric.launch()
            net = _compiled(role)
            model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
            state = {"model": model, "optimizer": optimizer}
            if role is way:
                fabric.backward(model(torch.ones(2, 3, dtype=torch.long)).square().mean())
                optimizer.step()
                fabric.save(f"{folder}/{way}", state)
            else:
                fabric.load(f"{folder}/{way}", state)
                assert set(open_source(f"{folder}/{way}").weights) == names


def _faces(folder: str) -> None:
    os.environ.update(torchrun_env())
    _loops(f"{folder}/loop")
    _fabric(f"{folder}/fabric")


def test_loop_and_fabric(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _faces, str(tmp_path))


def test_what_saves_and_loads_takes_plain_names() -> None:
    torchs = re.compile(r"(root|self\.module)\.(named_parameters|named_buffers|state_dict)\(")
    for folder in ("checkpoint", "training"):
        paths = sorted((ROOT / "lt_zero" / folder).rglob("*.py"))
        assert paths, folder
        for path in paths:
            found = torchs.search(path.read_text())
            assert found is None, f"{path}: {found}: take the function of that name in lt_zero/common/plain_names.py"


def test_names() -> None:
    block: Any = torch.compile(Block(), **BACKEND)
    model = torch.compile(nn.Sequential(block, nn.BatchNorm1d(3)), **BACKEND)
    assert list(plain_names.state_dict(model)) == list(nn.Sequential(Block(), nn.BatchNorm1d(3)).state_dict())
    names = plain_names.names_of(model)
    for name in model.state_dict():  # also those of a model that is compiled in another way
        assert names[clean_name(name)] == names[name] == names[name.removeprefix("_orig_mod.")] == name
    assert names["0.extra"] == "_orig_mod.0._orig_mod.extra"
    assert names["elsewhere.weight"] == "_orig_mod.elsewhere.weight"
    assert clean_name("the_orig_mod.weight") == "the_orig_mod.weight", (
        "only whole parts of a name are those of wrappers"
    )
    plain = nn.Sequential(Block(), nn.BatchNorm1d(3))
    loaded = plain_names.renamed(model.state_dict(), plain_names.names_of(plain))
    assert loaded._metadata["1"] == {"version": 2}  # type: ignore[attr-defined]
    plain.load_state_dict(dict(loaded))
