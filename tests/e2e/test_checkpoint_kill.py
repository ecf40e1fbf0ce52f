"""Killed while it saves, a run has a complete checkpoint, and goes on from it as if nothing had happened."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero.checkpoint.native import directory as places
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import PendingDirectory, find
from lt_zero.checkpoint.native.load import as_lightning, load_module, number_states
from lt_zero.checkpoint.native.load_states import load_full_optimizer_state
from lt_zero.checkpoint.native.pieces import (
    optimizer_fragments,
    parameter_names,
    weight_fragments,
)
from lt_zero.checkpoint.native.save import bundle, write
from lt_zero.checkpoint.open import open_source
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

WORLD = 2
MORE = 4  # steps after the last kill


class Run:
    """Two ranks that train a small model; each step is saved under one name."""

    def __init__(self, folder: str, stage: int) -> None:
        self.path = f"{folder}/last"
        torch.manual_seed(0)
        model = Net()
        self.engine = lt_zero.shard(model, config_of(stage))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.sharded = lt_zero.ShardedOptimizer(self.engine, optimizer)
        self.step = 0

    def resume(self) -> None:
        source = open_source(self.path)
        saved = as_lightning(source)
        load_module(self.engine.root, saved["state_dict"], strict=True)
        names = parameter_names(self.sharded.optimizer, self.engine)
        load_full_optimizer_state(self.sharded, number_states(saved["optimizer_states"][0], names, 0))
        self.step = saved["global_step"]
        source.close()  # type: ignore[attr-defined]

    def train(self) -> None:
        self.sharded.optimizer.zero_grad()
        next_token_loss(self.engine.root, self.step, 0, dist.get_rank()).backward()
        self.sharded.optimizer.step()
        self.step += 1

    def save(self) -> None:
        world = self.engine.world
        content = {
            "state_dict": weight_fragments(self.engine),
            "optimizer_states": [optimizer_fragments(self.sharded)],
            "global_step": self.step,
        }
        made = bundle(content, [parameter_names(self.sharded.optimizer, self.engine)], self.engine.world, {}, {})
        place = PendingDirectory.make(self.path) if world.rank == 0 else None
        name, where = world.host_broadcast((place.name, place.folder) if place else None, "place")
        write(made, place or PendingDirectory(name, where), world, world.saving_group(background=False))


def _live(rank: int, folder: str, store: str, stage: int, steps: int | None, exchange: bool) -> None:
    """One life, until it is killed or has made so many steps."""
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timeout)
    if not exchange:
        places._exchange = lambda one, other: False  # two renames, as on file systems without renameat2
    run = Run(folder, stage)
    if any(Path(folder).iterdir()):
        run.resume()
    while steps is None or run.step < steps:
        run.train()
        run.save()
    dist.barrier()
    os._exit(0)


def _undisturbed(stage: int, steps: int) -> list[dict[str, Tensor]]:
    """The weights after each step of a run that saves nothing."""
    run = Run("", stage)
    values = []
    for _ in range(steps):
        run.train()
        values.append({name: value.clone() for name, value in full_values(run.engine).items()})
    return values


def _start(folder: Path, number: int, stage: int, steps: int | None, exchange: bool) -> list[Any]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    store = str(folder.parent / f"store{number}")
    arguments = (str(folder), store, stage, steps, exchange)
    lives = [context.Process(target=_live, args=(rank, *arguments), daemon=True) for rank in range(WORLD)]
    for life in lives:
        life.start()
    return lives


def _look(folder: Path) -> tuple[int, dict[str, Tensor]]:
    """The step and the weights of what a kill left, every byte checked."""
    archive = Archive(find(folder / "last"))
    archive.verify()
    step, names = archive.meta["global_step"], list(archive.weights)
    assert all(int(state["step"]) == step for state in archive.optimizers[0].state.values())
    found = {name: archive.read(name) for name in names}
    archive.close()
    return step, found


def _kill(folder: Path, number: int, stage: int, chance: random.Random) -> None:
    """Start a life, let it save, and kill it at any moment."""
    before = _identity(folder)
    lives = _start(folder, number, stage, None, exchange=number % 2 == 0)
    deadline = time.monotonic() + 60
    while _identity(folder) == before:  # its first save is there
        assert all(life.is_alive() for life in lives), "died by itself"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(chance.random() * 0.3)
    chance.shuffle(lives)
    lives[0].kill()
    time.sleep(chance.choice([0.0, 0.0, 0.02]))
    lives[1].kill()
    for life in lives:
        life.join()


def _identity(folder: Path) -> int:
    try:
        return (folder / "last").stat().st_ino
    except FileNotFoundError:
        return 0


def _survives(pool: Pool, tmp_path: Path, stage: int, kills: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    chance = random.Random(stage * 100 + kills)
    found = []
    for number in range(kills):
        _kill(folder, number, stage, chance)
        found.append(_look(folder))
    steps = [step for step, _ in found]
    assert steps == sorted(steps), "each life went on where the one before was"
    assert len(set(steps)) > 1
    last = steps[-1] + MORE
    for left in folder.glob(".*"):
        os.utime(left, (0, 0))  # an empty directory counts as in use for two seconds
    lives = _start(folder, kills, stage, last, exchange=True)
    for life in lives:
        life.join(60)
        assert life.exitcode == 0
    assert [p.name for p in folder.iterdir()] == ["last"], "nothing is left of those that were killed"
    found.append(_look(folder))
    want = pool.run(WORLD, _undisturbed, stage, last)[0]
    assert found[-1][0] == last
    for step, weights in found:
        for name, value in want[step - 1].items():
            assert torch.equal(weights[name], value), (step, name)


def test_kills(pool: Pool, tmp_path: Path) -> None:
    _survives(pool, tmp_path, 3, 2)  # of the second one, a directory is published in two renames


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 3])
def test_many_kills(pool: Pool, tmp_path: Path, stage: int) -> None:
    _survives(pool, tmp_path, stage, 30)
