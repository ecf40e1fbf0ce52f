"""What a review of checkpoints found: saves that training overtakes, lost edits, what outlives a checkpoint."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.collect import _pack, _unpack
from lt_zero.checkpoint.native.directory import Place
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.lazy_tensor import LazyTensor
from lt_zero.lightning import checkpoint_service
from tests.support.lightning_tools import FULL, GPT, sharded_trainer, weights
from tests.support.pool import Pool

ASYNC: dict[str, Any] = {"checkpoint": {"async": True, "format": "sharded"}}


# ---- saves in the background -----------------------------------------------------------------------------------------


class Moving(GPT):
    """Hooks hand over tensors that training changes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.average = torch.zeros(3)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = {"now": [self.average]}

    def get_extra_state(self) -> Any:
        return {"average": self.average}

    def set_extra_state(self, state: Any) -> None:
        self.average = state["average"]


class SavesAt2(Callback):
    def __init__(self, path: str, release: threading.Event, fail: bool = False) -> None:
        self.path, self.release, self.fail = path, release, fail

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 3 and self.fail:
            raise ZeroDivisionError
        if trainer.global_step == 4:
            self.release.set()


def _overtaken(path: str, fused: bool) -> None:
    release, write = threading.Event(), checkpoint_service.write

    def held(*args: Any) -> None:
        assert release.wait(30)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_service, "write", held)
        config = {**ASYNC, "fused_step": fused}
        saves = SavesAt2(path, release)
        trainer = sharded_trainer(2, config=config, max_steps=5, max_epochs=9, limit_val_batches=0, callbacks=[saves])
        trainer.fit(Moving(dist.get_world_size(), "adamw"))


@pytest.mark.parametrize("fused", [True, False])
def test_counters_and_tensors_of_hooks_are_those_of_the_moment(pool: Pool, tmp_path: Path, fused: bool) -> None:
    path = str(tmp_path / "one.ckpt")
    pool.run(2, _overtaken, path, fused)
    archive = Archive(path)
    own = archive.meta["lt_zero"]
    assert {float(state["step"]) for state in own["optimizers"][0]["state"].values()} == {2.0}
    (now,) = archive.meta["average"]["now"]
    (extra,) = own["extra_state"].values()
    assert now.tolist() == extra["average"].tolist() == [1.0] * 3


def _abandons(folder: str) -> Any:
    """An error in training while a save is held back; a fit of the same strategy saves before that one has ended."""
    release, write, count = threading.Event(), checkpoint_service.write, [0]

    def held(*args: Any) -> None:
        count[0] += 1
        assert count[0] > 1 or release.wait(30)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_service, "write", held)
        patch.setattr(checkpoint_service, "GRACE", 0.1)
        options: dict[str, Any] = {"config": ASYNC, "max_steps": 5, "max_epochs": 9, "limit_val_batches": 0}
        trainer = sharded_trainer(2, **options, callbacks=[SavesAt2(f"{folder}/first", release, fail=True)])
        with pytest.raises(ZeroDivisionError):
            trainer.fit(GPT(dist.get_world_size(), "adamw"))
        comm = trainer.strategy.comm  # type: ignore[attr-defined]
        again = sharded_trainer(2, **options, callbacks=[SavesAt2(f"{folder}/second", release)])
        again.strategy._comm = comm
        again.fit(GPT(dist.get_world_size(), "adamw"))
        for thread in [t for t in threading.enumerate() if t.name.startswith("lt_zero-async-save")]:
            thread.join(30)
    dist.barrier()
    return [Archive(f"{folder}/{name}").verify() > 0 for name in ("first", "second")]


def test_a_save_that_was_left_behind_disturbs_no_later_one(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _abandons, str(tmp_path)) == [[True, True]] * 2


class _Tuned(GPT):
    lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def _finds(folder: str) -> Any:
    os.chdir(folder)
    trainer = sharded_trainer(3, config=ASYNC, max_epochs=1, limit_val_batches=0, default_root_dir=folder)
    module = _Tuned(dist.get_world_size())
    want = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    Tuner(trainer).lr_find(module, num_training=6)
    got = weights(trainer)
    return all(np.array_equal(got[name], want[name]) for name in got), os.listdir(folder)


def test_lr_find_restores_what_is_still_being_saved(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _finds, str(tmp_path)) == [(True, [])] * 2


# ---- tensors of a checkpoint in hooks --------------------------------------------------------------------------------

ROWS = torch.arange(12.0).view(3, 4)


def _lazy() -> LazyTensor:
    return LazyTensor((3, 4), torch.float32, lambda lo, hi: ROWS.reshape(-1)[lo:hi].clone())


def _assign(tensor: Tensor) -> None:
    tensor.data = tensor.data + 1


EDITS: dict[str, Callable[[Tensor], object]] = {
    "operation": lambda w: w.mul_(2),
    "item": lambda w: w.__setitem__(0, 7),
    "mask": lambda w: w.__setitem__(w > 5, -1),
    "data": lambda w: w.data.add_(1),
    "detached": lambda w: w.detach()[1].zero_(),
    "view": lambda w: w.view(-1)[3:5].fill_(9),
    "transposed": lambda w: w.t().mul_(3),
    "out": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "numpy": lambda w: w.numpy().__imul__(4),
    "parameter": lambda w: nn.Parameter(w).data.mul_(2),
    "init": lambda w: nn.init.constant_(w, 3.5),
    "assigned": _assign,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_of_lazy_tensors_are_kept(edit: Callable[[Tensor], object]) -> None:
    lazy, plain = _lazy(), ROWS.clone()
    before = copy.deepcopy(lazy)
    edit(lazy)
    edit(plain)
    assert not torch.equal(plain, ROWS)
    assert torch.equal(lazy.whole(), plain)
    assert torch.equal(lazy.elements(2, 9), plain.view(-1)[2:9])
    assert torch.equal(before.whole(), ROWS)


def test_what_only_reads_lazy_tensors_keeps_nothing() -> None:
    lazy = _lazy()
    reads = [lazy.norm(), lazy.clone(), lazy + 1, lazy.to(torch.float16), torch.empty(3, 4).copy_(lazy)]
    assert len(reads) == 5
    assert lazy._held.kept is None


def test_lazy_tensors_leave_torch() -> None:
    lazy, buffer = _lazy(), io.BytesIO()
    assert np.array_equal(np.asarray(lazy), ROWS.numpy())
    assert lazy.tolist() == ROWS.tolist()
    assert torch.equal(torch.from_dlpack(lazy), ROWS)
    assert torch.equal(_lazy().share_memory_() + 0, ROWS)
    assert lazy.untyped_storage().data_ptr() == lazy.data_ptr() != 0
    loaded = pickle.loads(pickle.dumps(lazy))
    assert type(loaded) is Tensor
    assert torch.equal(loaded, ROWS)
    torch.save({"w": lazy}, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["w"], ROWS)
    with pytest.raises(RuntimeError, match="changes the shape"):
        lazy.resize_(12)
    with pytest.raises(RuntimeError, match="cannot become"):
        lazy.data = torch.zeros(2)


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


# ---- places ----------------------------------------------------------------------------------------------------------


def test_a_url_with_something_else_is_not_replaced() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/review/thesis.tex", b"important")
    with pytest.raises(CheckpointError, match="would remove"):
        Place.make("memory://review")
    assert files.cat_file("/review/thesis.tex") == b"important"
    files.pipe("/broken/weights-00000.pt", b"of a save that was broken off")
    Place.make("memory://broken")
    assert not files.exists("/broken/weights-00000.pt")


def _onto_a_directory(path: str) -> str:
    trainer = sharded_trainer(2, config=FULL, max_steps=1, limit_val_batches=0)
    trainer.fit(GPT(dist.get_world_size()))
    with pytest.raises(IsADirectoryError) as caught:
        trainer.save_checkpoint(path)
    return str(caught.value)


def test_a_file_onto_a_directory_fails_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    assert all("is a directory" in text for text in pool.run(2, _onto_a_directory, str(tmp_path)))


def test_files_have_the_rights_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        place = Place.make(str(tmp_path / "one"))
        place.sink("a").close()
    finally:
        os.umask(before)
    assert os.stat(Path(place.folder, "a")).st_mode & 0o777 == 0o664
    place.discard()


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_counters_are_packed_and_unpacked() -> None:
    own = {3: {"step": torch.tensor(2.0), "name": "x"}, 5: {"step": torch.tensor(4.0), "t": torch.tensor(7)}, 6: {}}
    assert _unpack(*pickle.loads(pickle.dumps(_pack(own)))) == own


def test_counters_are_saved_without_their_neighbours(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _overtaken, str(tmp_path / "one"), True)
    extras = torch.load(tmp_path / "one" / "extras.pt", weights_only=True)
    steps = [value for name, value in extras.items() if name.endswith(".step")]
    assert len(steps) == 1, "equal counters are one entry"
    assert torch.load(io.BytesIO(steps[0].numpy().tobytes())).untyped_storage().nbytes() == 4


class _Adagrad(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def _state_dtypes(stage: int) -> set[torch.dtype]:
    trainer = sharded_trainer(stage, precision="bf16-mixed", max_steps=1, limit_val_batches=0)
    trainer.fit(_Adagrad(dist.get_world_size()))
    return {state["sum"].dtype for state in trainer.optimizers[0].state.values()}


@pytest.mark.parametrize("stage", [1, 3])
def test_states_that_a_constructor_makes_are_as_precise_as_others(pool: Pool, stage: int) -> None:
    assert pool.run(2, _state_dtypes, stage) == [{torch.float32}] * 2
