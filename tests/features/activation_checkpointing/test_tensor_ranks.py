"""Inputs of recomputed layers, of which each tensor rank keeps a part: in an engine and a Trainer; ranks that fail."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lt_zero.common import accelerator
from lt_zero.features.activation_checkpointing import stores
from lt_zero.features.activation_checkpointing.checkpointing import installed
from lt_zero.features.activation_checkpointing.partitioned import PartitionedStore
from tests.support.lightning_tools import quick, sharded_trainer
from tests.support.matrix import only_rows
from tests.support.parallel_module import BATCH, Module
from tests.support.parallel_nets import Net, Ranks, Run, loss_of, start
from tests.support.parity import full_grads
from tests.support.pool import Pool

PLACES: dict[str, dict[str, Any]] = {"device": {}, "host": {"cpu_checkpointing": True}, "files": {"nvme_path": "here"}}
INPUT = 3 * 4 * 6 * 4  # bytes of the input of a layer


def _store(run: Run) -> PartitionedStore:
    found = installed(run.engine)
    assert found is not None
    assert isinstance(found.store, PartitionedStore)
    return found.store


def _gradients(
    ranks: Ranks, stage: int, sequence: bool, mode: str, **block: Any
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Of two forwards and their backwards, and bytes saved after the first, inputs that were split, and others."""
    keys = {"activation_checkpointing": {"mode": mode, **block}}
    run, found = start(ranks, stage, "sgd", lambda: Net(hidden=12), sequence, **keys), []
    run.engine.reducer.sync = False
    losses = [loss_of(run.model, 0, run.data_rank, micro) / 2 for micro in range(2)]
    if block:
        store = _store(run)
        store._settle()
        found = [store.stats()["bytes"], store.split, store.whole]
    for number, loss in enumerate(losses):
        run.engine.reducer.sync = number == 1
        loss.backward()
    grads = full_grads(run.engine)
    run.engine.detach()
    return grads, found


def _same(ranks: Ranks, stage: int, sequence: bool, place: str, mode: str, folder: Path) -> None:
    block = {key: folder if key == "nvme_path" else value for key, value in PLACES[place].items()}
    want, _ = _gradients(ranks, stage, sequence, mode)
    with mock.patch.object(accelerator, "_apart", True), mock.patch.object(stores, "_MIN_BYTES", 1):
        got, found = _gradients(ranks, stage, sequence, mode, partition_activations=True, **block)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    inputs = 2 * 3  # of two forwards through three layers
    split = 0 if sequence else inputs  # parts of the sequence differ, and are a rank's share already
    whole = INPUT // ranks.tensor * (inputs - split)
    assert found == [-(-INPUT // ranks.tensor) * split + whole, split, inputs - split]


@pytest.mark.parametrize(
    ("ranks", "stage", "sequence", "place", "mode"),
    only_rows(
        [(Ranks(1, 2), 0, False, "files", "full"), (Ranks(1, 2), 3, True, "host", "selective")],
        itertools.product([Ranks(1, 2), Ranks(2, 2)], [0, 3], [False, True], PLACES, ["full", "selective"]),
    ),
)
def test_gradients_are_the_same_and_bytes_are_shared(
    pool: Pool, ranks: Ranks, stage: int, sequence: bool, place: str, mode: str, tmp_path: Path
) -> None:
    pool.run(ranks.all, _same, ranks, stage, sequence, place, mode, tmp_path)


class Fails(Module):
    """Rank 1 ends in backward, between two gathers."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.blocks[1].norm.register_forward_hook(self.fail)

    def fail(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("of rank 1")


class Skips(Module):
    """Rank 1 leaves out a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.global_rank != 1 or number != 1:
                x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def _config(**keys: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": BATCH, "activation_checkpointing": keys}


def _ends(module: type[Module]) -> str:
    config = _config(mode="full", partition_activations=True)
    with quick(), mock.patch.object(stores, "_MIN_BYTES", 1), pytest.raises((RuntimeError, ValueError)) as caught:
        sharded_trainer(1, config=config, max_steps=2).fit(module(data=dist.get_world_size() // 2))
    return str(caught.value)


def test_an_error_before_a_gather_ends_all_ranks(pool: Pool) -> None:
    for text in pool.run(4, _ends, Fails):
        assert "of rank 1" in text


def test_ranks_that_call_other_modules_are_told(pool: Pool) -> None:
    for text in pool.run(2, _ends, Skips):
        assert "saved inputs of blocks.1" in text
        assert "saved inputs of blocks.2" in text


def _runs() -> list[float]:
    config = _config(mode="full", partition_activations=True)
    trainer, module = sharded_trainer(3, config=config, max_steps=2), Module(data=1)
    with mock.patch.object(stores, "_MIN_BYTES", 1):
        trainer.fit(module)
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module)
    return module.losses


def _plain() -> list[float]:
    trainer, module = sharded_trainer(3, config=_config(), max_steps=2), Module(data=1)
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)
    return module.losses


@pytest.mark.slow
def test_a_trainer_and_its_second_run(pool: Pool) -> None:
    assert pool.run(2, _runs) == pool.run(2, _plain)
