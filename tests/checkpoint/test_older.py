"""A directory that an earlier lt_zero wrote (two ranks, stage 3) loads, and is read in full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.core.engine.whole_model import full_state_dict
from tests.support.checkpoint_tools import same
from tests.support.paths import ROOT
from tests.support.pool import Pool

FOLDER = ROOT / "tests" / "data" / "checkpoints"  # v1-full.pt has what was saved, gathered


class Tied(nn.Module):
    """A tied matrix that ranks cut within a row, a 0D parameter, and a buffer: the model that was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(5, 7, bias=False), nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tied.weight = self.first.weight
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (self.first(x) + self.tied(x)) * self.scale
        return found


def _loads(stage: int) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    model = Tied()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = lt_zero.initialize(model=model, optimizer=adam, config=config, dist_init_required=False)[0]
    _, client_state = engine.load_checkpoint(FOLDER, tag="v1")
    assert client_state == {"note": "before boxes"}
    assert engine.global_steps == 2
    found = {"weights": full_state_dict(engine.engine), "optimizer": full_optimizer_state(engine._sharded)}
    if engine.world.rank == 0:
        same(found, torch.load(FOLDER / "v1-full.pt"))


def test_a_directory_of_an_earlier_version_loads(pool: Pool) -> None:
    pool.run(3, _loads, 2)
    archive, want = Archive(str(FOLDER / "v1")), torch.load(FOLDER / "v1-full.pt")["weights"]
    assert archive.verify() > 0
    same({name: archive.read(name) for name in archive.weights}, dict(want))
    archive.close()
