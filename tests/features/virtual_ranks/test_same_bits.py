"""Eight runs of ``make same-bits``, shorter and with fewer virtual ranks, and resumes at another number of ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import same_bits_runs
from tests.support.features import skip_without
from tests.support.lightning_tools import torchrun_env
from tests.support.pool import Pool
from tests.support.same_bits import after, differences
from tests.support.same_bits_runs import RUNS, SAVED, Values

VIRTUAL = 6
STEPS = 9  # after one of fp16 that overflows, and after the checkpoint
CASES = {
    "12-0-32-true-accumulation": 2,
    "12-0-bf16-mixed-dropout": 3,
    "12-1-16-true-batch norm": 2,
    "12-1-bf16-mixed-offload": 3,
    "12-2-32-true-clipping": 2,
    "12-2-16-true-dropout": 3,
    "12-3-bf16-mixed-batch norm": 2,
    "12-3-16-true-clipping": 3,
}
RESUMED = ("12-2-16-true-dropout", "12-3-bf16-mixed-batch norm")


def _take(name: str, folder: Path, resumes: bool) -> Values:
    os.environ.update(torchrun_env())
    run = replace(RUNS[name], virtual=VIRTUAL)
    place = folder / f"files of {dist.get_world_size()}"
    place.mkdir(exist_ok=True)
    return same_bits_runs.take(run, dist.get_world_size(), place, folder / "checkpoint", resumes, STEPS)


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_some_ranks_is_that_on_one(pool: Pool, tmp_path: Path, name: str) -> None:
    skip_without(*(["offload"] if "offload" in name else []))
    [whole] = pool.run(1, _take, name, tmp_path, False)
    found = pool.run(CASES[name], _take, name, tmp_path, False)[0]
    assert list(differences(found, whole)) == []
    assert len({value for key, value in whole.items() if key.endswith(": weights")}) > STEPS // 2
    if name in RESUMED:  # from the checkpoint of some ranks
        [went_on] = pool.run(1, _take, name, tmp_path, True)
        assert list(differences(went_on, after(whole, SAVED))) == []
    if "16-true" in name:
        assert whole["skipped steps"] > 0


def test_differences_are_told() -> None:
    one: Values = {"epoch 0, round 0: steps": 1, "epoch 0, round 0: weights": "a", "epoch 0, round 1: weights": "b"}
    assert list(differences({**one, "epoch 0, round 1: weights": "c", "more": 1}, one)) == [
        "epoch 0, round 1: weights",
        "more is new",
    ]
    assert after(one, 1) == {"epoch 0, round 1: weights": "b"}
    later: Values = {"epoch 0: metric": 1.0, "epoch 1, round 0: steps": 2, "epoch 1: metric": 2.0, "buffer a": 3}
    assert after({**one, **later}, 2) == {"epoch 1: metric": 2.0, "buffer a": 3}
