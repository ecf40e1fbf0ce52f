"""A save publishes all of a checkpoint or nothing, and a caller who goes on after its error has lost nothing."""

from __future__ import annotations

import os
import signal
import threading
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero import CheckpointError, ZeroConfig
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.save import Bundle, bundle, make_directory, stage, write
from lt_zero.core.comm.world import World
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.training import checkpoints
from lt_zero.training.checkpoints import Saver, Saving
from tests.conformance.faces import GAS, Face, Settings, adamw, run
from tests.support.matrix import only
from tests.support.pool import Pool


def _saving(value: float, then: Any = lambda path: None) -> Saving:
    """A checkpoint of weights that all ranks have, as at stage 0."""
    return Saving({"state_dict": {"w": torch.full((5,), value)}}, (), ZeroConfig(), {}, "32-true", then=then)


# ---- the process group is gone ---------------------------------------------------------------------------------------


def _left(path: str) -> tuple[str, float]:
    """A save whose writer begins after ``destroy_process_group``, in place of an earlier one."""
    world = World.join(torch.device("cpu"))
    Saver().save(_saving(1.0), path, world, background=False)
    made = bundle({"state_dict": {"w": torch.full((5,), 2.0)}}, (), world, {}, {})
    group = world.saving_group(background=True)
    place = make_directory(world, path)
    dist.destroy_process_group()
    with pytest.raises(CheckpointError) as caught:
        write(made, place, world, group)
    archive = Archive(path)
    archive.verify()
    value = float(archive.read("w")[0])
    archive.close()
    return str(caught.value), value


def test_a_save_that_lost_its_process_group_publishes_nothing(pool: Pool, tmp_path: Path) -> None:
    for text, value in pool.run(2, _left, str(tmp_path / "one")):
        assert "wait_for_save" in text
        assert value == 1.0, "that of before"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


# ---- what follows a save ---------------------------------------------------------------------------------------------


def _fails(path: str) -> None:
    raise OSError("no")


def _published(path: str) -> None:
    world = World.join(torch.device("cpu"))
    with pytest.raises(CheckpointError, match="no"):
        Saver().save(_saving(1.0, _fails), path, world, background=False)
    archive = Archive(path)
    archive.verify()
    archive.close()


@pytest.mark.parametrize("remote", [False, True])
def test_a_published_checkpoint_stays_if_what_follows_fails(pool: Pool, tmp_path: Path, remote: bool) -> None:
    """The file that names the latest one, or an export."""
    pool.run(1, _published, "memory://published/one" if remote else str(tmp_path / "one"))


# ---- the copies of a save in the background --------------------------------------------------------------------------


def test_copies_are_of_the_same_ranks() -> None:
    """Where groups of ranks cut the same elements in other places, they tell which group writes."""
    values = torch.arange(3.0)
    made = Bundle({"w": Fragment(lambda: values, (4,), 0, 3, torch.float32, ranks=(1, 2))})
    stage(made, None)
    assert made.tensors["w"].ranks == (1, 2)


def _interrupted(folder: str) -> None:
    """Ctrl-C while the next save waits for the one before; then the user saves again."""
    world, saver, go = World.join(torch.device("cpu")), Saver(), threading.Event()

    def held(*args: Any) -> None:
        assert go.wait(30)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "write", held)
        saver.save(_saving(1.0), f"{folder}/one", world, background=True)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            saver.wait(world)
        threading.Timer(0.3, go.set).start()
        saver.save(_saving(2.0), f"{folder}/two", world, background=True)
        saver.wait(world)
    saver.close()
    for name, value in (("one", 1.0), ("two", 2.0)):
        archive = Archive(f"{folder}/{name}")
        assert torch.equal(archive.read("w"), torch.full((5,), value)), name
        archive.close()


def test_an_interrupted_wait_leaves_the_save_pending(pool: Pool, tmp_path: Path) -> None:
    """Its copy in host memory is not that of the next save before it is written."""
    pool.run(1, _interrupted, str(tmp_path))


# ---- a step after an error -------------------------------------------------------------------------------------------


def _refused(*_: Any) -> None:
    raise OSError("no")


def _tries_again(path: str, fails: bool, face: Face) -> tuple[list[Tensor], list[int]]:
    """Three steps; the second is told of a failed save first, and made again."""
    for step in range(3):
        for micro in range(GAS):
            face.backward(step, micro)
        if step == 1 and fails:
            with pytest.raises(OSError, match="no"):
                face.step()
        face.step()
        if step == 0 and fails:
            saver = getattr(face, "engine", None) or face.fabric.strategy  # type: ignore[attr-defined]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoints, "write", _refused)
                face.save(path)
                futures.wait([saver.session.saver.pending])
    engine = getattr(face, "engine", None)
    counts = [] if engine is None else [engine.micro_steps, engine.global_steps, engine.global_samples]
    return [lt_zero.full_master(p) for p in face.net.parameters()], counts


def _goes_on(face: str, path: str) -> None:
    settings = Settings(2, "16-true", config={"checkpoint": {"async": True}}, optimizer=adamw)
    found, counts = run(face, settings, partial(_tries_again, path, True))
    wanted, same_counts = run(face, settings, partial(_tries_again, path, False))
    assert all(map(torch.equal, found, wanted))
    assert counts == same_counts


@pytest.mark.parametrize("face", only(["loop"], ["fabric", "loop"]))
def test_a_step_after_the_error_of_a_save(pool: Pool, tmp_path: Path, face: str) -> None:
    """A caller who catches it steps again, with the same gradients and counters."""
    pool.run(2, _goes_on, face, str(tmp_path / "one"))
