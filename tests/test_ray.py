"""Ray Train: workers on two nodes of a local cluster train, report and resume as one process does.

``make compat-peers`` runs this at the versions of ``constraints-peers.txt``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lt_zero
from tests.support import ray_runs
from tests.support.docs_tools import BLOCKS
from tests.support.paths import ROOT
from tests.support.ray_runs import OPTIMIZERS, STEPS, Model, alone

pytestmark = pytest.mark.timeout(900)
STAGES = (2, 3)


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lt_zero.ray", raising=False)
    for name in ("ray", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'pip install "ray\[train\]"'):
        importlib.import_module("lt_zero.ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    pytest.importorskip("ray")
    with ray_runs.cluster():
        yield


def check(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.allclose(got[name], value, rtol=1e-12, atol=1e-14), name


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_weights_are_those_of_one_process(cluster: None, tmp_path: Path, workers: int) -> None:
    cases = [(stage, optimizer) for stage in STAGES for optimizer in OPTIMIZERS]
    ray_runs.fit(ray_runs.train, {"cases": cases, "folder": str(tmp_path)}, tmp_path / "storage", workers)
    for stage, optimizer in cases:
        check(torch.load(tmp_path / f"{stage}-{optimizer}.pt"), alone(optimizer))


@pytest.mark.slow
def test_a_killed_worker_and_a_new_script_go_on_from_the_last_checkpoint(cluster: None, tmp_path: Path) -> None:
    from ray.train import CheckpointConfig, FailureConfig

    from lt_zero.ray import location_of

    how = {"failure_config": FailureConfig(max_failures=1), "checkpoint_config": CheckpointConfig(num_to_keep=2)}
    config = {"folder": str(tmp_path), "steps": STEPS, "report": {}, "config": {}}
    result = ray_runs.fit(ray_runs.restarted, config, tmp_path / "storage", **how)
    began = [int(step) for step in (tmp_path / "began").read_text().split()]
    # When the worker is killed, Ray may not have heard of the second report.
    assert began in ([0, 2], [0, 4])
    assert (result.metrics["epoch"], result.metrics["step"]) == (2, 6)
    assert result.metrics["loss"] > 0
    check(torch.load(tmp_path / "weights.pt"), alone("adam"))
    loaded = lt_zero.load_from_checkpoint(Model, location_of(result.checkpoint), optimizer="adam")
    check(dict(loaded.state_dict()), alone("adam"))

    # The same run by another script, on other workers, with saves in the background.
    config |= {"steps": STEPS + 3, "report": {"every_n_train_steps": 1}, "config": {"checkpoint": {"async": True}}}
    result = ray_runs.fit(ray_runs.restarted, config, tmp_path / "storage", 3, **how)
    assert (tmp_path / "began").read_text().split()[2:] == ["6"]
    check(torch.load(tmp_path / "weights.pt"), alone("adam", STEPS + 3))
    assert result.metrics["step"] == STEPS + 3
    kept = [location_of(checkpoint) for checkpoint, _ in result.best_checkpoints]
    names = ["checkpoint_epoch=3-step=8", "checkpoint_epoch=4-step=9"]
    assert [Path(path).parent.name for path in kept] == names
    assert sorted(path.name for path in (tmp_path / "storage" / "run").glob("checkpoint_epoch*")) == names
    for path in kept:
        lt_zero.load_from_checkpoint(Model, path, optimizer="adam")


@pytest.mark.slow
def test_a_run_from_the_start_keeps_the_checkpoints_of_an_earlier_one(cluster: None, tmp_path: Path) -> None:
    result = ray_runs.fit(ray_runs.from_the_start, {}, tmp_path)
    names = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    first = ["checkpoint_epoch=0-step=2", "checkpoint_epoch=1-step=4"]
    assert names == [*first, *(f"{name}-v1" for name in first)]
    for checkpoint, metrics in result.best_checkpoints:
        assert Path(checkpoint.path, "checkpoint.ckpt", "manifest.json").exists()
        assert metrics["step"] == int(checkpoint.path.partition("step=")[2][0])


@pytest.mark.slow
def test_rays_own_callback_reports_from_one_host(cluster: None, tmp_path: Path) -> None:
    from lt_zero.ray import location_of

    storage = tmp_path / "storage"
    result = ray_runs.fit(ray_runs.reported_by_ray, {"folder": str(tmp_path)}, storage, placement="STRICT_PACK")
    trained = torch.load(tmp_path / "weights.pt")
    check(trained, alone("adam"))
    loaded = lt_zero.load_from_checkpoint(Model, location_of(result.checkpoint), optimizer="adam")
    check(dict(loaded.state_dict()), trained)


@pytest.mark.slow
def test_what_cannot_be_saved_is_refused_before_the_first_batch(cluster: None, tmp_path: Path) -> None:
    ray_runs.fit(ray_runs.refused, {"folder": str(tmp_path)}, tmp_path / "storage")
    first, second = (json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8")) for rank in range(2))
    for told in (first, second):
        assert "the strategy is RayDDPStrategy" in told["other strategy"]
        assert "RayTrainReportCallback saves to a folder of one host" in told["callback of Ray"]
        assert "are on 2 hosts" in told["callback of Ray"]
        assert "Start the training function with ray.train.torch.TorchTrainer" in told["no group"]
    assert "storage_path='/proc/unmounted'" in second["storage"]
    assert "rank 1 does not see /proc/unmounted/run" in second["storage"]
    assert "Rank 1 ended with ValueError: RunConfig(storage_path" in first["storage"]


@pytest.mark.slow
def test_the_script_of_the_page_runs(cluster: None, tmp_path: Path) -> None:
    import ray

    (block,) = (b for b in BLOCKS if Path(b.page).name == "ray.md" and "run by" in b.marks)
    text = block.text.replace("num_workers=16, use_gpu=True", "num_workers=2")
    text = text.replace("/shared/runs", str(tmp_path / "runs"))
    assert text.count(str(tmp_path)) == 1
    (tmp_path / "script.py").write_text(text)
    address = ray.get_runtime_context().gcs_address
    env = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path}/runs/first/checkpoint_epoch=2-step=96" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_ranks_are_started_and_connected_by_ray_only() -> None:
    pytest.importorskip("ray")
    from lt_zero.ray import RayZeroReportCallback, RayZeroStrategy

    with pytest.raises(lt_zero.ConfigError, match="start_method='spawn': Ray starts the workers"):
        RayZeroStrategy(stage=2, start_method="spawn")
    with pytest.raises(lt_zero.ConfigError, match=r"torch_config=TorchConfig\(backend='gloo'\)"):
        RayZeroStrategy(stage=2, process_group_backend="gloo")
    with pytest.raises(ValueError, match="every_n_epochs=2, every_n_train_steps=3.*one of the two"):
        RayZeroReportCallback(2, 3)
    with pytest.raises(ValueError, match="every_n_epochs=0"):
        RayZeroReportCallback(0)


@pytest.mark.slow
def test_checkpoints_of_ray_are_found_by_path_or_url() -> None:
    pytest.importorskip("ray")
    from pyarrow.fs import LocalFileSystem

    from lt_zero.ray import location_of

    def at(path: str, filesystem: Any) -> str:
        return location_of(SimpleNamespace(path=path, filesystem=filesystem))

    assert at("/shared/runs/first/checkpoint_1", LocalFileSystem()) == "/shared/runs/first/checkpoint_1/checkpoint.ckpt"
    assert at("bucket/first", SimpleNamespace(type_name="s3")) == "s3://bucket/first/checkpoint.ckpt"
    assert at("bucket/first", SimpleNamespace(type_name="gcs")) == "gs://bucket/first/checkpoint.ckpt"
    with pytest.raises(ValueError, match=r"kind 'py::fsspec\+mock'.*Remove storage_filesystem"):
        at("first", SimpleNamespace(type_name="py::fsspec+mock"))
