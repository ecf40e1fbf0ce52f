"""Pipelines whose stages have states in files: all of them, some, or none, against one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lt_zero.parallel import LayerSpec, Pipeline
from tests.support.features import needs
from tests.support.lightning_tools import quick
from tests.support.matrix import only_rows
from tests.support.parity import OPTIMIZERS
from tests.support.pipelines import (
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    Ranks,
    all_weights,
    mean_loss,
    reference_step,
    specs,
    start,
)
from tests.support.pool import Pool


class Bare(Model):
    """The last of two stages has no parameters, and there are none beside the pipeline."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(Block), LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
        self.pipe = Pipeline([*layers, torch.tanh, torch.tanh, torch.tanh], mean_loss, partition_method="uniform")
        self.register_buffer("scale", torch.zeros(()))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(parameters)}], lr=1e-2)  # a group may be empty


def _train(ranks: Ranks, stage: int, offload: dict[str, Any], bare: bool) -> None:
    with quick(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, "adamw", _adamw)
        make = Bare if bare else partial(Model, specs)
        run = start(ranks, stage, "adamw", make=make, zero={"offload_optimizer": offload})
        reference = make()
        expected = OPTIMIZERS["adamw"](reference.parameters())
        for step in range(3):
            run.step(step)
            reference_step(reference, expected, step, ranks.data)
        weights = all_weights(run.engine)
        run.engine.offload_manager.close()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)


CASES = [
    (Ranks(), 1, {}, True),
    (Ranks(), 1, {"ratio": 0.3}, False),  # cuts the list of buckets, in which stages have others
    (Ranks(1, 1, 3), 1, {"overlap_step": True}, False),  # the stage in the middle does not have the tied layer
]


@needs("offload")
@pytest.mark.parametrize(
    ("ranks", "stage", "how", "bare"), only_rows(CASES[:2], CASES), ids=["bare", "ratio", "overlap"]
)
def test_states_in_files(pool: Pool, tmp_path: Path, ranks: Ranks, stage: int, how: dict[str, Any], bare: bool) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path), **how}
    pool.run(ranks.all, _train, ranks, stage, offload, bare)
