"""What hooks of the module and of callbacks do to a checkpoint on its way out and in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.plain import MISSING
from lt_zero.core.engine.lazy_tensor import LazyTensor
from tests.support.checkpoint_tools import SHARDED, error_of, everything, resume, same, train
from tests.support.features import needs
from tests.support.lightning_tools import FULL, GPT, sharded_trainer, weights
from tests.support.matrix import only
from tests.support.pool import Pool


class Hooked(GPT):
    """Runs functions given to it as hooks."""

    def __init__(self, saving: Any = None, loading: Any = None) -> None:
        super().__init__(dist.get_world_size(), "adamw")
        self.saving, self.loading = saving, loading

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.saving is not None:
            self.saving(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.loading is not None:
            self.loading(checkpoint)


class Adds(pl.Callback):
    """A callback with states and additions of its own."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.mine: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"count": 5, "values": torch.arange(4.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["copy"] = {"t": torch.full((3,), 2.0), "net.scale": checkpoint["state_dict"]["net.scale"]}
        del checkpoint["state_dict"]["net.blocks.2.norm.bias"]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["copy"]
        checkpoint["state_dict"]["net.blocks.2.norm.bias"] = torch.full((10,), 7.0)


def _saving(stage: int, folder: str) -> None:
    rank = dist.get_rank()

    def change(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["added"] = torch.full((2, 2), float(1 + rank))
        state["alias"] = state["net.blocks.0.up.weight"]
        del state["net.blocks.1.up.weight"]
        if rank == 0:  # other ranks keep it
            del state["net.blocks.1.down.weight"]
        checkpoint["state_dict"] = dict(reversed(state.items()))
        checkpoint["note"] = f"rank {rank}"

    adds = Adds()
    trainer = train(stage, Hooked(change), config=SHARDED, callbacks=[adds])
    want = everything(trainer)
    trainer.save_checkpoint(f"{folder}/hooked")
    names = set(Archive(f"{folder}/hooked").weights)
    gone = {"net.blocks.1.up.weight", "net.blocks.1.down.weight", "net.blocks.2.norm.bias"}
    assert names == (GPT().state_dict().keys() - gone) | {"added", "alias"}
    for path in Path(folder, "hooked").glob("weights-*.pt"):
        assert not any(name in str(key) for key in torch.load(path, weights_only=True) for name in gone), path.name
    seen: dict[str, Any] = {}

    def restore(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert all(isinstance(value, LazyTensor) for value in state.values() if value.numel() != 10)
        seen["added"] = state.pop("added") * 1  # an operation reads it
        seen["alias"] = state.pop("alias").clone()
        seen["note"] = checkpoint["note"]
        seen["sum"] = state["net.scale"].sum().item()
        for name in gone & {"net.blocks.1.up.weight", "net.blocks.1.down.weight"}:
            state[name] = torch.full_like(seen["alias"] if "up" in name else seen["alias"].t(), 0.5)
        state["temperature"] = state["temperature"] * 2

    back = Adds()
    got, _ = resume(f"{folder}/hooked", stage, Hooked(None, restore), callbacks=[back])
    assert seen["note"] == "rank 0"
    assert torch.equal(seen["added"], torch.ones(2, 2)), "plain tensors are rank 0's"
    same(back.loaded, {"count": 5, "values": torch.arange(4.0)})
    assert torch.equal(back.mine["t"], torch.full((3,), 2.0))
    if rank == 0:
        assert torch.equal(back.mine["net.scale"].clone(), want["weights"]["net.scale"])
        assert torch.equal(seen["alias"], want["weights"]["net.blocks.0.up.weight"])
        assert seen["sum"] == pytest.approx(float(want["weights"]["net.scale"].sum()))
        want["weights"]["temperature"] *= 2
        want["weights"]["net.blocks.2.norm.bias"].fill_(7)
        for name in ("net.blocks.1.up.weight", "net.blocks.1.down.weight"):
            want["weights"][name].fill_(0.5)
    same(got, want)


@pytest.mark.parametrize("stage", only([3], [0, 1, 3]))
def test_changes_by_hooks(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _saving, stage, str(tmp_path))


def _renaming(folder: str) -> None:
    """Names of an older model, replaced and dropped while nothing is read."""
    trainer = train(3, config=SHARDED)
    want = everything(trainer)
    trainer.save_checkpoint(f"{folder}/old")

    def rename(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            state[f"old.{name}"] = state.pop(name)
        state["old.junk"] = torch.zeros(3)

    def back(checkpoint: dict[str, Any]) -> None:
        state = checkpoint.pop("state_dict")
        del state["old.junk"]
        checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}

    old = train(2, Hooked(rename), config=SHARDED)
    old.save_checkpoint(f"{folder}/renamed")
    got, _ = resume(f"{folder}/renamed", 1, Hooked(None, back))
    same(got["weights"], want["weights"])
    text = error_of(resume, f"{folder}/renamed", 1)
    assert "old.net.scale" in text
    assert "net.embedding.weight" in text


def test_renaming_by_hooks(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _renaming, str(tmp_path))


class NewNames(GPT):
    """A model whose parameters have other names now, two of them exchanged, and which maps those of old checkpoints."""

    def __init__(self, passes_on: bool = True) -> None:
        super().__init__(dist.get_world_size(), "adamw")
        self.passes_on = passes_on
        self.heat = self.temperature
        del self.temperature
        blocks = self.net.blocks
        blocks[0], blocks[1] = blocks[1], blocks[0]

    @property
    def temperature(self) -> Any:
        return self.heat

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        exchanged = {"net.blocks.0.": "net.blocks.1.", "net.blocks.1.": "net.blocks.0.", "temperature": "heat"}
        state = {}
        for name, value in checkpoint["state_dict"].items():
            start = next((old for old in exchanged if name.startswith(old)), "")
            state[exchanged.get(start, "") + name.removeprefix(start)] = value if self.passes_on else value * 1
        checkpoint["state_dict"] = state


def _new_names(folder: str) -> None:
    """The states of optimizers follow the names that a hook gives to the weights."""
    options: dict[str, Any] = {"config": SHARDED, "callbacks": [lt_zero.EMA(0.9)]}
    trainer = train(3, **options)
    want = everything(trainer)
    trainer.save_checkpoint(f"{folder}/before")
    got, _ = resume(f"{folder}/before", 2, NewNames(), callbacks=[lt_zero.EMA(0.9)])
    if dist.get_rank() == 0:
        assert torch.equal(got["weights"]["heat"], want["weights"]["temperature"])
        one = got["weights"]["net.blocks.1.up.weight"]
        assert torch.equal(one, want["weights"]["net.blocks.0.up.weight"])

    def moments(found: Any) -> list[float]:
        states = found["optimizers"][0]["state"].values()
        return sorted(float(state["exp_avg"].double().norm()) for state in states)

    if dist.get_rank() == 0:
        assert moments(got) == moments(want), "each moment once"
        number = [name for name, _ in NewNames().named_parameters()].index("net.blocks.1.up.weight")
        before = [name for name, _ in GPT().named_parameters()].index("net.blocks.0.up.weight")
        state, saved = (found["optimizers"][0]["state"] for found in (got, want))
        assert torch.equal(state[number]["exp_avg"], saved[before]["exp_avg"]), "that of the renamed weight"
    text = error_of(resume, f"{folder}/before", 2, NewNames(passes_on=False))
    assert "only in the model: heat" in text


@needs("ema")
def test_optimizer_states_follow_renamed_weights(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _new_names, str(tmp_path))


def _full(stage: int, folder: str) -> None:
    """A hook may look at the state dict on every rank, and change its names; rank 0 has the values."""
    seen: dict[str, Any] = {}

    def look(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        seen.update({name: (value.shape, value.dtype) for name, value in state.items()})
        if dist.get_rank() != 0:
            with pytest.raises(RuntimeError, match=r"[Mm]eta"):
                float(state["temperature"].sum())
        checkpoint["state_dict"] = {f"new.{name}": value for name, value in state.items()}
        checkpoint["copies"] = {name: value.clone() for name, value in state.items()}

    trainer = train(stage, Hooked(look), config=FULL)
    want = everything(trainer)["weights"]
    trainer.save_checkpoint(f"{folder}/full.ckpt")
    names = set(GPT().state_dict())
    assert set(seen) == names
    if dist.get_rank() == 0:
        assert seen == {name: (value.shape, value.dtype) for name, value in want.items()}
        found = torch.load(f"{folder}/full.ckpt", weights_only=True)
        for name, value in want.items():
            assert torch.equal(found["state_dict"][f"new.{name}"], value)
            assert torch.equal(found["copies"][name], value)


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_hooks_on_full_state_dicts(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _full, stage, str(tmp_path))


def _on_one_rank(folder: str) -> list[str]:
    rank = dist.get_rank()

    def replace_on_zero(checkpoint: dict[str, Any]) -> None:
        if rank == 0:
            state = checkpoint["state_dict"]
            state["net.scale"] = torch.full((4,), 9.0)  # another shape
            state["net.embedding.weight"] = torch.zeros(11, 10)  # the first of two tied names
            state["net.blocks.0.up.weight"] = torch.ones(31, 10)

    trainer = train(3, Hooked(replace_on_zero), config=SHARDED)
    want = everything(trainer)["weights"]
    trainer.save_checkpoint(f"{folder}/replaced")
    archive = Archive(f"{folder}/replaced")
    assert torch.equal(archive.read("net.scale"), torch.full((4,), 9.0))
    assert torch.equal(archive.read("net.embedding.weight"), torch.zeros(11, 10))
    assert torch.equal(archive.read("net.blocks.0.up.weight"), torch.ones(31, 10))
    if rank == 0:
        assert torch.equal(archive.read("net.head.weight"), want["net.head.weight"])
    archive.close()

    def delete(checkpoint: dict[str, Any]) -> None:
        if rank == 1:
            del checkpoint["state_dict"]["net.scale"]

    def swap(checkpoint: dict[str, Any]) -> None:
        if rank == 1:
            checkpoint["state_dict"]["net.scale"] = torch.ones(10)

    def fail(checkpoint: dict[str, Any]) -> None:
        if rank == 1:
            checkpoint["state_dict"]["net.scale"] + 1

    texts = []
    for hook in (delete, swap):
        trainer.lightning_module.saving = hook  # type: ignore[union-attr, assignment]
        texts.append(error_of(trainer.save_checkpoint, f"{folder}/failed"))
    assert not Path(folder, "failed").exists()
    assert not list(Path(folder).glob(".*"))
    return texts


def test_hooks_that_change_one_rank_only(pool: Pool, tmp_path: Path) -> None:
    for deleted, swapped in pool.run(2, _on_one_rank, str(tmp_path)):
        for text in (deleted, swapped):
            assert "rank 1" in text
            assert "net.scale" in text
            assert "all ranks" in text


def _values(folder: str) -> str:
    """A hook that wants values that lie on several ranks is told what to do."""

    def read(checkpoint: dict[str, Any]) -> None:
        checkpoint["norm"] = checkpoint["state_dict"]["net.scale"].norm()

    trainer = train(3, Hooked(read), config=SHARDED)
    return error_of(trainer.save_checkpoint, f"{folder}/read")


def test_hooks_that_read_fragments(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, _values, str(tmp_path)):
        assert "lt_zero.gathered" in text
        assert 'checkpoint.format="full"' in text
    assert not list(tmp_path.iterdir())


def _kept(folder: str) -> list[list[str]]:
    """What a hook was given, as it is when all is saved."""
    seen: list[dict[str, Any]] = []
    names: list[list[str]] = []

    def keep(checkpoint: dict[str, Any]) -> None:
        seen.append(checkpoint)
        names.append(sorted(checkpoint))

    for form in ("sharded", "full"):
        trainer = train(3, Hooked(keep), config={"checkpoint": {"format": form}})
        trainer.save_checkpoint(f"{folder}/{form}")
    assert len(seen) == 2
    assert [sorted(kept) for kept in seen] == names
    return names


def test_what_a_hook_keeps_stays_as_it_was(pool: Pool, tmp_path: Path) -> None:
    """Lightning's own tests compare it: the strategy's additions go into the file, not into the user's dict."""
    for names in pool.run(1, _kept, str(tmp_path)):
        assert names[0] == names[1]
        assert not [name for name in names[0] if name.startswith("lt_zero")]


class Sub(Tensor):
    pass


def _tensors(folder: str) -> None:
    """User's tensors of all kinds come back."""
    mine = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "transposed": torch.arange(6).view(2, 3).t(),
        "sub": torch.ones(2).as_subclass(Sub),
        "sparse": torch.eye(3).to_sparse(),
        "shape only": torch.ones(3, device="meta"),
        "conj": torch.tensor([1 + 2j]).conj(),
        "meta": torch.Size([1, 2]),
        "list": [torch.zeros(()), torch.empty(0, 2)],
        "int": torch.tensor([1, 2], dtype=torch.uint8),
        "expanded": torch.ones(1).expand(1000),
    }

    def put(checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = mine

    train(2, Hooked(put), config=SHARDED).save_checkpoint(f"{folder}/kinds")
    seen: list[Any] = []
    load = Hooked(None, lambda checkpoint: seen.append(checkpoint["mine"]))
    resume(f"{folder}/kinds", 2, load)
    resume(f"{folder}/kinds", 2, load, weights_only=False)
    for name in ("sub", "sparse", "shape only"):  # these need their code, or have no values
        assert seen[0].pop(name) == MISSING
        got, value = seen[1].pop(name), mine.pop(name)
        assert type(got) is type(value)
        assert got.shape == value.shape  # type: ignore[attr-defined]
    for name, value in mine.items():
        got = seen[0][name]
        if isinstance(value, Tensor):
            assert torch.equal(got, value.detach().as_subclass(Tensor)), name  # type: ignore[arg-type]
            assert got.dtype == value.dtype
        elif name == "list":
            assert torch.equal(got[0], value[0])  # type: ignore[index]
            assert got[1].shape == (0, 2)
        else:
            assert got == value


def test_tensors_of_the_user(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _tensors, str(tmp_path))


class Registers(GPT):
    """Takes what is as long as it was saved, in a hook."""

    def __init__(self, *args: Any, length: int = 1) -> None:
        super().__init__(*args)
        self.register_buffer("table", torch.arange(float(length)))
        self.extra = nn.Parameter(torch.arange(float(length)))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.table = checkpoint["state_dict"]["table"]
        self.extra = nn.Parameter(checkpoint["state_dict"]["extra"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (self.extra * self.table).sum()


def _registers(folder: str) -> Any:
    world, path = dist.get_world_size(), f"{folder}/one.ckpt"
    trainer = sharded_trainer(3, max_steps=1, limit_val_batches=0)
    trainer.fit(Registers(world, length=5))
    trainer.save_checkpoint(path)
    want = weights(trainer)
    loaded = lt_zero.load_from_checkpoint(Registers, path)
    resumed = sharded_trainer(3, max_steps=2, limit_val_batches=0)
    module = Registers(world)

    class Removes(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.got = weights(trainer)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            dist.barrier()

    removes = Removes()
    resumed.callbacks.append(removes)  # type: ignore[attr-defined]
    resumed.fit(module, ckpt_path=path)
    same = all(np.array_equal(removes.got[name], want[name]) for name in want)
    return same, type(module.table) is Tensor, type(loaded.table) is Tensor, type(loaded.extra) is nn.Parameter


def test_what_a_hook_registers_outlives_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _registers, str(tmp_path)) == [(True,) * 4] * 2
