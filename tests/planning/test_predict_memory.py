"""What weights take without training: no master weights, one unit gathered at a time; a fit may follow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.features import skip_without
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
    if files:
        skip_without("offload")
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
        [(3, "bf16-true", True)],
        [(3, "32-true", False), (3, "bf16-true", True), (2, "bf16-true", False), (3, "16-mixed", False)],
    ),
)
def test_a_fit_after_predict_is_the_same(pool: Pool, tmp_path: Path, stage: int, precision: str, files: bool) -> None:
    if files:
        skip_without("offload")
    pool.run(2, _predict_and_fit, stage, precision, str(tmp_path) if files else "")


_TRAINS = """
import sys, psutil, torch, lt_zero
from lt_zero.planning.limits import peak_rss
width = 1024
libraries = psutil.Process().memory_info().rss
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(48)])
config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
forecast = lt_zero.estimate(model, config, device="cpu", saves=False).rank("host")
engine, *_ = lt_zero.initialize(model=model, config=config)
for _ in range(4):
    engine.backward(engine(torch.randn(4, width)).square().mean())
    engine.step()
print(libraries, forecast, peak_rss())
"""


@pytest.mark.slow
def test_what_a_process_takes_beside_its_forecast() -> None:
    """``lt-zero estimate`` and docs/memory.md name it: libraries, and gaps of about 4 bytes per parameter."""
    taken = {}
    for gaps in (True, False):
        env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        env |= {} if gaps else {"MALLOC_MMAP_THRESHOLD_": "1000000"}
        out = subprocess.run([sys.executable, "-c", _TRAINS], env=env, capture_output=True, text=True, check=True)
        libraries, forecast, peak = map(int, out.stdout.split()[-3:])
        taken[gaps] = (peak - libraries - forecast) / (48 * 1024 * 1025)  # bytes per parameter
    assert abs(taken[False]) < 1
    assert 0 < taken[True] < 6
