"""Where an engine's saved inputs rest: in host memory, in files, in one block; a disk that fails stops all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero.common import accelerator
from lt_zero.core.engine.engine import Engine
from lt_zero.core.stores.io_options import SwapError
from lt_zero.features.activation_checkpointing import stores
from lt_zero.features.activation_checkpointing.checkpointing import installed
from lt_zero.features.activation_checkpointing.stores import ActivationStore
from tests.support.checkpointed_nets import net, run, same
from tests.support.matrix import only_rows
from tests.support.models import next_token_loss
from tests.support.offload_tools import change
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

PLACES: dict[str, dict[str, Any]] = {
    "host": {"cpu_checkpointing": True},
    "block": {"contiguous_memory_optimization": True},
    "files": {"nvme_path": "here"},
}


@contextmanager
def apart() -> Iterator[None]:
    """As if the device had memory of its own; tensors of any size are stored."""
    with (
        mock.patch.object(accelerator, "_apart", True),
        mock.patch.object(stores, "_MIN_BYTES", 1),
    ):
        yield


def block_of(place: str, folder: Path) -> dict[str, Any]:
    return {key: folder if key == "nvme_path" else value for key, value in PLACES[place].items()}


def _rests(stage: int, place: str, folder: Path) -> None:
    stored: list[int] = []
    real = ActivationStore.end_backward

    def counting(store: ActivationStore) -> None:
        stored.append(store.stats()["most"])
        real(store)

    want = run(net(), stage, {"mode": "none"}, forwards=2)
    for mode in ("full", "selective"):
        stored.clear()
        block = {"mode": mode, **block_of(place, folder)}
        with apart(), mock.patch.object(ActivationStore, "end_backward", counting):
            same(run(net(), stage, block, forwards=2), want, (place, mode))
        assert len(stored) == 2, "the store is told of each backward"
        assert min(stored) > 0
    dist.barrier()
    assert not list(folder.iterdir()), "detached engines leave no files"


@pytest.mark.parametrize(("stage", "place"), only_rows([(1, "block"), (3, "files")], itertools.product([1, 3], PLACES)))
def test_gradients_are_those_without(pool: Pool, stage: int, place: str, tmp_path: Path) -> None:
    pool.run(2, _rests, stage, place, tmp_path)


@apart()
def _fails(folder: Path) -> None:
    config = config_of(
        3, RELEASE, activation_checkpointing={"nvme_path": folder, "mode": "full"}, aio={"checksum": True}
    )
    model = net()
    engine: Engine = lt_zero.shard(model, config)
    found: Any = installed(engine)
    assert str(folder) in str(found)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    losses = [next_token_loss(model, 0, micro, 0) for micro in range(4)]  # more than stay on the way
    rest = found.store.storage
    rest.end_pass()
    if dist.get_rank() == 1:
        change(rest.files.folder.path / "activations-1", 100, b"\1\2\3")
    before = {name: value.clone() for name, value in full_values(engine).items()}
    for loss in reversed(losses):
        loss.backward()
    assert (rest.problem is None) == (dist.get_rank() == 0)
    with pytest.raises(SwapError, match=("rank 1: .*" if dist.get_rank() == 0 else "") + "checksum.*activations-1"):
        optimizer.step()
    same(full_values(engine), before, "no step is taken from NaN")
    engine.detach()


def test_a_failing_disk_stops_all_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _fails, tmp_path)


def _no_folder(folder: Path) -> None:
    path = folder / ("file" if dist.get_rank() else "folder")
    model = net()
    with pytest.raises(SwapError, match="rank 1: .*file" if dist.get_rank() == 0 else "file"):
        lt_zero.shard(model, config_of(3, activation_checkpointing={"mode": "full", "nvme_path": path}))


def test_a_folder_that_one_rank_cannot_use(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    pool.run(2, _no_folder, tmp_path)


def _tables(every: int | None) -> list[int]:
    block = {"mode": "full", "profile": True}
    engine = lt_zero.shard(net(), config_of(1, activation_checkpointing=block, steps_per_print=every))
    found: Any = installed(engine)
    optimizer = torch.optim.SGD(engine.root.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    due = []
    for step in range(4):
        next_token_loss(engine.root, step, 0, 0).backward()
        calls = {name: times.calls for name, times in found.boundary.times.items()}
        optimizer.step()
        if not found.boundary.times:
            due.append(step)
            assert set(calls) == {"blocks.0", "blocks.1", "blocks.2"}
            assert all(forward == again > 0 for forward, again in calls.values())
    engine.detach()
    assert not engine.after_step
    return due


def test_times_are_shown_when_steps_are(pool: Pool) -> None:
    assert pool.run(1, _tables, 2) == [[1, 3]]
    assert pool.run(1, _tables, None) == [[]]


def _line() -> None:
    def line(**block: Any) -> str:
        engine = lt_zero.shard(net(), config_of(1, activation_checkpointing={"mode": "full", **block}))
        text = str(installed(engine)).removeprefix("activation checkpointing: full, 3 of 3 Dropping modules")
        engine.detach()
        return text

    assert line() == ""
    assert line(cpu_checkpointing=True) == ", inputs in host memory (the model's device)"
    assert line(contiguous_memory_optimization=True) == ", inputs in one block"
    with apart():
        both = line(cpu_checkpointing=True, contiguous_memory_optimization=True)
        assert both == ", inputs in host memory in one block"


def test_the_line_at_the_start_tells_where_inputs_rest(pool: Pool) -> None:
    pool.run(1, _line)


def _given_up(folder: Path) -> None:
    path = folder / "used"
    if dist.get_rank() == 1:
        path = folder / "file"
        path.touch()
    with pytest.raises(SwapError, match="it is not a folder"):
        lt_zero.shard(net(), config_of(3, activation_checkpointing={"mode": "full", "nvme_path": path}))
    dist.barrier()
    assert not list((folder / "used").iterdir()), "the rank that had opened its files has none any more"


def test_no_files_are_left_when_another_rank_has_none(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _given_up, tmp_path)


def test_a_model_without_parameters(pool: Pool) -> None:
    pool.run(1, _no_parameters)


def _no_parameters() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    lt_zero.shard(model, config_of(3, activation_checkpointing={"mode": "full", "modules": ["ReLU"]}))
    assert model(torch.ones(2)).sum() == 2
