"""What weights take without training: no master weights, one unit gathered at a time; a fit may follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.lightning_tools import GPT, sharded_trainer, single_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.parity import counted_storages
from tests.support.pool import Pool


def _predict(world: int, path: str) -> Any:
    zero = {"offload_param": {"device": "nvme", "nvme_path": path}} if path else {}
    module = GPT(world, depth=8)
    trainer = sharded_trainer(3, zero)
    with counted_storages() as gathered:
        found = trainer.predict(module)
    engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
    sizes = {unit.name: sum(b.layout.numel * 4 for b in unit.sharded) for unit in [*engine.units, engine.root_unit]}
    root = sizes.pop("")
    assert gathered.live == 0
    assert 0 < gathered.most <= root + 2 * max(sizes.values()), "the unit at hand, and one that is moved in"
    for bucket_ in [b for b in engine.buckets if b.sharding.params]:
        nbytes = sum(store.nbytes for store in bucket_.weights.stores())
        assert nbytes == (0 if path else bucket_.shard.nbytes), "one shard of the weights, or none"
    return found


@pytest.mark.parametrize("files", only([True], [False, True]))
def test_predict_keeps_a_shard_and_gathers_a_unit(pool: Pool, tmp_path: Path, files: bool) -> None:
    want = single_trainer().predict(GPT(1, depth=8))
    found = pool.run(2, _predict, 2, str(tmp_path) if files else "")
    assert torch.equal(
        torch.cat([f for rank in zip(*found, strict=True) for f in rank]).sort(0)[0], torch.cat(want).sort(0)[0]
    )  # type: ignore[arg-type]


def _predict_and_fit(stage: int, precision: str, path: str) -> None:
    zero = {"offload_param": {"device": "nvme", "nvme_path": path}} if path else {}
    runs = []
    for first in (False, True):
        module = GPT(dist.get_world_size(), "adamw")
        if first:
            sharded_trainer(stage, zero, precision=precision).predict(module)
        trainer = sharded_trainer(stage, zero, precision=precision, max_epochs=2)
        trainer.fit(module)
        trainer.predict(module)
        trainer.validate(module, verbose=False)
        runs.append(weights(trainer))
    for name, value in runs[0].items():
        assert (runs[1][name] == value).all(), (stage, precision, name)


@pytest.mark.parametrize(
    ("stage", "precision", "files"),
    only_rows(
        [(3, "bf16-true", True), (2, "bf16-true", False)],
        [(3, "32-true", False), (3, "bf16-true", True), (2, "bf16-true", False), (3, "16-mixed", False)],
    ),
)
def test_a_fit_after_predict_is_the_same(pool: Pool, tmp_path: Path, stage: int, precision: str, files: bool) -> None:
    pool.run(2, _predict_and_fit, stage, precision, str(tmp_path) if files else "")
