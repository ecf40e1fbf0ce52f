"""What a save must not do: publish half of a checkpoint, or take a step's work from a caller who goes on after its error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lt_zero import CheckpointError, ZeroConfig
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.save import make_place, write
from lt_zero.comm.world import World
from lt_zero.session.saving import Saver, Saving
from tests.support.pool import Pool


def _saving(value: float, then: Any = lambda path: None) -> Saving:
    """A checkpoint of weights that all ranks have, as at stage 0."""
    return Saving({"state_dict": {"w": torch.full((5,), value)}}, (), ZeroConfig(), "32-true", then=then)


# ---- the process group is gone ---------------------------------------------------------------------------------------


def _left(path: str) -> tuple[str, float]:
    """A save whose writer begins after ``destroy_process_group``, in place of an earlier one."""
    world = World.join(torch.device("cpu"))
    Saver().save(_saving(1.0), path, world, background=False)
    made, group = _saving(2.0).bundle(world), world.saving_group(background=True)
    place = make_place(world, path)
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
