"""States that features from outside save: in each face, per rank and in fragments, on other numbers of ranks."""

from __future__ import annotations

import itertools
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lt_zero import FabricZeroStrategy
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.rank_state import FEATURES
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.feature import Entry, Feature
from lt_zero.core.followers import states_of
from tests.conformance.faces import FACES, GAS, Face, Settings, run
from tests.outside import noise, sums
from tests.support.lightning_tools import torchrun_env
from tests.support.matrix import only_rows
from tests.support.outside import features
from tests.support.pool import Pool

STEPS = 2
NOISE = {"noise": {"scale": 0.01}}
Seen = dict[str, Any]


def _engine(net: nn.Module) -> Engine:
    engine = owner_of(next(net.parameters()))
    assert isinstance(engine, Engine)
    return engine


def _seen(face: Face) -> Seen:
    """The states of this rank: the number of steps, the sums of the weights that it has, its generator."""
    states = states_of(_engine(face.net))
    found: Seen = {"steps": states["sums"].steps, "sums": [], "generator": b""}
    for spec, piece, rows, _ in states["sums"]._parts():
        found["sums"].append((spec.name, piece.lo, piece.hi, rows.tolist()))
    if "noise" in states:
        found["generator"] = states["noise"].state_dict()["generator"].numpy().tobytes()
    return found


def _step(face: Face, step: int) -> None:
    for micro in range(GAS):
        face.backward(step, micro)
    face.step()


def _saves(path: str, face: Face) -> list[Seen]:
    for step in range(STEPS):
        _step(face, step)
    saved = _seen(face)
    face.save(path)
    _step(face, STEPS)
    return [saved, _seen(face)]


def _loads(path: str, face: Face) -> list[Seen]:
    face.load(path)
    loaded = _seen(face)
    _step(face, STEPS)
    return [loaded, _seen(face)]


def _run(face: str, settings: Settings, path: str, loads: bool) -> list[Seen]:
    entries = [sums.ENTRY, *([noise.ENTRY] if "noise" in settings.config else [])]
    contract = partial(_loads if loads else _saves, path)
    with features(*entries):
        found: list[Seen] = run(face, settings, contract, resume=path if loads else None)
        return found


def _resumes(face: str, settings: Settings, path: str) -> list[Seen]:
    wanted = _run(face, settings, path, loads=False)
    found = _run(face, settings, path, loads=True)
    assert found == wanted, "it goes on as if it had not ended, with the same noise"
    return wanted


@pytest.mark.parametrize(
    ("face", "stage"), only_rows([("trainer", 3), ("fabric", 1), ("loop", 3)], itertools.product(FACES, (0, 1, 2, 3)))
)
def test_a_resumed_run_goes_on_with_them(pool: Pool, tmp_path: Path, face: str, stage: int) -> None:
    config = {**NOISE, "checkpoint": {"format": "sharded"}}
    first, second = pool.run(2, _resumes, face, Settings(stage, config=config), str(tmp_path / "saved"))
    for rank in (first, second):
        assert [seen["steps"] for seen in rank] == [STEPS, STEPS + 1]
    assert first[0]["generator"] != second[0]["generator"], "each rank has its own"


@pytest.mark.parametrize("face", ["trainer", "fabric"])
def test_they_are_in_single_files(pool: Pool, tmp_path: Path, face: str) -> None:
    settings = Settings(2, config={**NOISE, "checkpoint": {"format": "full"}})
    pool.run(2, _resumes, face, settings, str(tmp_path / "saved.ckpt"))
    assert (tmp_path / "saved.ckpt").is_file()


def _whole(ranks: list[list[Seen]], time: int) -> dict[str, list[float]]:
    """The sums of all ranks, by parameter."""
    found: dict[str, dict[int, float]] = {}
    for rank in ranks:
        for name, lo, hi, values in rank[time]["sums"]:
            found.setdefault(name, {}).update(zip(range(lo, hi), values, strict=True))
    return {name: [value for _, value in sorted(elements.items())] for name, elements in found.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_with_what_is_the_same_on_all(pool: Pool, tmp_path: Path, ranks: int) -> None:
    path = str(tmp_path / "saved")
    saved = pool.run(2, _run, "loop", Settings(3), path, False)
    loaded = pool.run(ranks, _run, "loop", Settings(1), path, True)
    assert [rank[0]["steps"] for rank in loaded] == [STEPS] * ranks
    assert _whole(loaded, 0) == _whole(saved, 0)
    assert all(len(values) > 0 for values in _whole(saved, 0).values())


def _told(path: str, config: dict[str, Any], registered: bool) -> list[str]:
    """Warnings at a load of ``path``."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lt_zero")
    log.addHandler(handler)
    try:
        with features(*([sums.ENTRY, noise.ENTRY] if registered else [])):
            run("loop", Settings(1, config=config), lambda face: (face.load(path), _step(face, STEPS)))
    finally:
        log.removeHandler(handler)
    return [text for text in told if "features" in text or "Each rank has saved" in text]


def test_states_of_missing_features_are_named(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    pool.run(2, _run, "loop", Settings(1, config=NOISE), path, False)
    first, second = pool.run(2, _told, path, {}, False)
    assert second == [], "rank 0 tells"
    assert len(first) == 1
    assert "states of features that this run does not have: 'sums', 'noise'." in first[0]
    first, *others = pool.run(3, _told, path, NOISE, True)
    assert first == [
        "Each rank has saved another value of 'noise', and 3 ranks go on where 2 have saved: all get that of rank 0."
    ]
    assert others == [[], []]


def test_checkpoints_without_such_features_have_no_entry(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _plain, str(tmp_path / "saved"))
    meta = Archive(str(tmp_path / "saved")).meta
    assert FEATURES not in meta


def _plain(path: str) -> None:
    run("loop", Settings(1), lambda face: (_step(face, 0), face.save(path)))


class Twice(Feature):
    """Has a state of a name that is taken."""

    def states(self) -> dict[str, Any]:
        return {"sums": nn.Linear(1, 1)}


def _of_two(path: str) -> str:
    entry = Entry("twice", f"{__name__}:Twice", "", lambda config: True)
    with features(sums.ENTRY, entry), pytest.raises(ValueError, match="another feature has a state 'sums'") as caught:
        run("loop", Settings(1), lambda face: face.save(path))
    return str(caught.value)


def test_two_states_of_one_name_are_refused(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, _of_two, str(tmp_path / "saved")):
        assert "Twice.states" in text


def _beside_one_that_is_evaluated(path: str) -> None:
    os.environ.update(torchrun_env())
    with features(noise.ENTRY):
        strategy = FabricZeroStrategy(stage=2, config=NOISE)
        fabric: Any = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size())
        fabric.launch()
        teacher = fabric.setup_module(nn.Linear(3, 5).eval())
        module = nn.Linear(3, 2)
        student, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        fabric.save(path, {"teacher": teacher, "student": student, "optimizer": optimizer})
        (trained,) = [owner for owner in fabric.strategy.engines if states_of(owner)]
        assert trained.root is module, "nothing has begun beside the other"


def test_a_feature_that_has_not_begun_has_no_states(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _beside_one_that_is_evaluated, str(tmp_path / "saved"))


def _fails(path: str) -> str:
    """A load that fails on rank 1 fails on both."""
    with features(sums.ENTRY):
        run("loop", Settings(1), lambda face: (_step(face, 0), face.save(path)))

        def loads(face: Face) -> str:
            if dist.get_rank() == 1:
                states_of(_engine(face.net))["sums"].load_state_dict = lambda state: 1 / 0  # type: ignore[method-assign]
            with pytest.raises(Exception, match="division by zero") as caught:
                face.load(path)
            return type(caught.value).__name__

        found: str = run("loop", Settings(1), loads)
        return found


def test_an_error_of_one_rank_is_raised_on_all(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _fails, str(tmp_path / "saved")) == ["CheckpointError", "ZeroDivisionError"]
