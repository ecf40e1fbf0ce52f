"""A run that is resumed on two ranks is the one that was not interrupted, for each kind of loader, at each point."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.matrix import only, only_rows
from tests.support.pool import Pool
from tests.support.resumes import (
    CASES,
    differences,
    differences_after_a_requeue,
    differences_after_a_run,
    differences_after_a_stop,
    differences_by_a_save_at_the_start,
    differences_of_a_second_fit,
    differences_of_a_second_resume,
)

PACKAGES = ["torchdata.stateful_dataloader", "datasets", "litdata", "webdataset"]  # which cases are named after
POINTS = ["b1", "b2", "b4", "b6", "b9", "b12", "e0", "e1"]
FAST = {  # the points of the fast suite, by loader
    "three lengths": ["b6"],
    "weighted beside stateful": ["b3", "e0"],
    "stateful stream": ["b2"],
    "around, reopened": ["b3", "e0"],
    "consuming, restored": ["b15"],
    "opened late": ["b3"],
    "epoch of a callback": ["e0"],
    "max_size_cycle, stream last": ["e0"],
    "reloaded": ["b3"],
}

TWICE = ["shuffled", "three lengths, windows", "stateful, windows", "epoch of a callback", "weighted, windows"]
TWICE += ["stateful", "stateful, limited", "around, reopened", "counting late, reopened", "opened late"]
TWICE += [
    "counting twice",
    "torchdata, Repeated",
    "slots",
    "buckets, windows",
    "torchdata, Around",
    "torchdata, stream",
    "datasets, torchdata",
    "litdata, shuffled",
    "litdata, weights",
    "webdataset, by pass",
    "torchdata, workers, windows",
    "datasets, shuffled, workers",
    "litdata, shuffled, workers",
]

STATEFUL = [  # a loader or two for each way to keep state
    *("slots", "weighted, windows", "around, reopened", "counting late, reopened", "consuming, restored"),
    *("opened late, windows", "buckets, windows", "epochs with a state", "three lengths, windows"),
    *("weighted cycles beside stateful", "stateful, combined", "stateful stream, windows"),
    *("epoch of a callback, max_steps", "max_size_cycle, stream last", "reloaded"),
    *("torchdata, Counting, own order", "torchdata, Around", "torchdata, weighted", "torchdata, stream"),
    *("torchdata, combined", "torchdata, Repeated", "datasets", "datasets, shuffled", "datasets, torchdata"),
    *("litdata, shuffled", "litdata, max_steps", "litdata, weights", "webdataset", "webdataset, by pass"),
    *("datasets, mapped", "torchdata, workers, windows", "torchdata, stream, workers", "datasets, shuffled, workers"),
    *("litdata, shuffled, workers", "webdataset, resampled, workers"),
]

SECOND_FITS = ["shuffled", "weighted", "counting", "counting, reopened", "shuffling, reopened"]
SECOND_FITS += ["stateful", "opened late", "epoch of a callback"]


@pytest.fixture(scope="module")
def parents() -> Iterator[Pool]:
    """Ranks that may start the workers of loaders."""
    ranks = Pool(limit=600, parents=True, preload=["tests.support.resumes", *PACKAGES])
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(name: str, request: pytest.FixtureRequest) -> Pool:
    """Ranks for a case; skips if a package that it reads with is missing."""
    for module in PACKAGES:
        package = module.partition(".")[0]
        if package in name:
            pytest.importorskip(package)
    found: Pool = request.getfixturevalue("parents" if "workers" in name else "pool")
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_every_loader_at_every_point(name: str, ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, differences, name, POINTS, tmp_path) == [[], []]


@pytest.mark.parametrize("name", FAST)
def test_a_cover_of_them(name: str, ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, differences, name, FAST[name], tmp_path) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_checkpoints_of_one_file_at_stage_1(name: str, ranks: Pool, tmp_path: Path) -> None:
    run = partial(differences, stage=1, format="full")
    assert ranks.run(2, run, name, POINTS, tmp_path) == [[], []]


@pytest.mark.parametrize("name", only(["counting late, reopened"], STATEFUL))
def test_a_run_that_sigterm_has_stopped(name: str, ranks: Pool, tmp_path: Path) -> None:
    batches = [3] if name == "counting late, reopened" else [2, 3, 6, 9]
    assert ranks.run(2, differences_after_a_stop, name, batches, tmp_path) == [[], []]


@pytest.mark.parametrize("name", only(["slots"], STATEFUL))
def test_a_run_that_slurm_has_requeued(name: str, ranks: Pool, tmp_path: Path) -> None:
    batches = [3] if name == "slots" else [0, 2, 3, 6, 9]
    assert ranks.run(2, differences_after_a_requeue, name, batches, tmp_path) == [[], []]


def test_a_save_after_a_run(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, differences_after_a_run, tmp_path) == [[], []]


@pytest.mark.parametrize(
    "name",
    only(["drawing, reopened"], ["drawing, reopened", "torchdata, Drawing", "stateful", "stateful stream", "weighted"]),
)
def test_a_save_before_the_first_batch_changes_nothing(name: str, ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, differences_by_a_save_at_the_start, name, tmp_path) == [[], []]


@pytest.mark.parametrize(
    ("name", "points"),
    only_rows(
        [("counting", ["b2"])],
        [
            (name, ["start", "b1", "b4", "e0"])
            for name in (*SECOND_FITS, "torchdata, Counting", "torchdata", "torchdata, weighted")
        ]
        + [("counting", ["b2"])],
    ),
)
def test_a_second_fit_with_the_same_loaders(name: str, points: list[str], ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, differences_of_a_second_fit, name, points, tmp_path) == [[], []]


@pytest.mark.parametrize("name", only(["counting twice"], TWICE))
def test_a_second_resume(name: str, ranks: Pool, tmp_path: Path) -> None:
    fast = name == "counting twice"
    for point in ("b2",) if fast else ("b2", "e0"):
        seconds = ["b1"] if fast else ["start", "b1", "b3", "e1"]
        found = ranks.run(2, differences_of_a_second_resume, name, point, seconds, tmp_path / point)
        assert found == [[], []]
