"""Training scripts in DeepSpeed's style train to the weights of plain torch once their import is changed."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.features import skip_without
from tests.support.matrix import cover
from tests.support.paths import ROOT
from tests.support.pool import Pool


def _runs(name: str, stage: int, folder: str) -> None:
    sys.path.append(str(ROOT / "examples"))
    script: Any = importlib.import_module(f"tests.training.loop.scripts.{name}")
    config = copy.deepcopy(script.CONFIG)
    config["zero_optimization"]["stage"] = stage
    found = script.train(config, folder)
    wanted = script.plain(dist.get_world_size())
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    ("name", "stage", "ranks"), cover(["hello", "cifar", "bert", "gan", "lora"], [0, 1, 2, 3], [2, 3])
)
def test_weights_are_those_of_plain_torch(pool: Pool, tmp_path: Path, name: str, stage: int, ranks: int) -> None:
    if name == "cifar":
        skip_without("offload")
    if name == "lora":
        pytest.importorskip("peft", reason="needs transformers and peft")
    pool.run(ranks, _runs, name, stage, str(tmp_path))
