"""Saves in the background (``checkpoint.async``) in three faces: values of the moment, and errors on all ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero import CheckpointError
from lt_zero.core.stores import direct_file
from tests.conformance.faces import FACES, GAS, Face, Settings, adamw, run
from tests.support.checkpoint_tools import Gate
from tests.support.matrix import only
from tests.support.pool import Pool

SETTINGS = Settings(2, "bf16-mixed", config={"checkpoint": {"async": True}}, optimizer=adamw)


def _step(face: Face, step: int) -> None:
    for micro in range(GAS):
        face.backward(step, micro)
    face.step()


def _values(face: Face) -> list[Tensor]:
    parameters = list(face.net.parameters())
    return [*map(lt_zero.full_master, parameters), *(lt_zero.full_state(p, "exp_avg") for p in parameters)]


def _trains_on(path: str, gate: Gate, face: Face) -> list[Tensor]:
    """Returns what was saved while the writers were held back."""
    _step(face, 0)
    saved = _values(face)
    face.save(path)
    _step(face, 1)
    assert not os.path.exists(path), "no name before all is written"
    assert not any(map(torch.equal, saved, _values(face)))
    gate.open.set()
    face.save(f"{path}-next")  # waits for the one before
    assert os.path.isdir(path)
    face.wait()
    assert os.path.isdir(f"{path}-next")
    return saved


def _loads(path: str, face: Face) -> list[Tensor]:
    face.load(path)
    return _values(face)


def _of_the_moment(face: str, folder: str) -> None:
    gate = Gate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_file, "write_some", gate)
        try:
            saved = run(face, SETTINGS, partial(_trains_on, f"{folder}/saved", gate))
        finally:
            gate.open.set()
    found = run(face, SETTINGS, partial(_loads, f"{folder}/saved"), resume=f"{folder}/saved")
    assert all(map(torch.equal, saved, found))
    assert [name for name in os.listdir(folder) if name.startswith("latest")] == ["latest"] * (face == "loop")


@pytest.mark.parametrize("face", only(["loop"], FACES))  # of a Trainer: tests/checkpoint/test_async.py
def test_values_are_those_of_the_moment(pool: Pool, tmp_path: Path, face: str) -> None:
    pool.run(2, _of_the_moment, face, str(tmp_path))
    if face == "loop":
        assert (tmp_path / "latest").read_text() == "saved-next"


def _fails(path: str, gate: Gate, face: Face) -> str:
    """The error of a save whose writer fails on rank 1, at the next step."""
    _step(face, 0)
    face.save(path)
    face.wait()
    gate.fail = dist.get_rank()  # once
    face.save(f"{path}-next")
    with pytest.raises(CheckpointError) as caught:
        face.wait()
    face.wait()  # it was told
    return str(caught.value)


def _of_a_full_disk(face: str, folder: str) -> str:
    gate = Gate()
    gate.open.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_file, "write_some", gate)
        return str(run(face, SETTINGS, partial(_fails, f"{folder}/saved", gate)))


@pytest.mark.parametrize("face", only(["loop"], ["fabric", "loop"]))  # of a Trainer: tests/checkpoint/test_async.py
def test_an_error_is_raised_on_all_ranks(pool: Pool, tmp_path: Path, face: str) -> None:
    for text in pool.run(2, _of_a_full_disk, face, str(tmp_path)):
        assert "rank 1" in text
        assert "Free space" in text
    assert {path.name for path in tmp_path.iterdir()} == {"saved", *(["latest"] if face == "loop" else [])}
    if face == "loop":
        assert (tmp_path / "latest").read_text() == "saved"
