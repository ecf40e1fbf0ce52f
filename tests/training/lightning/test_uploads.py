"""Loggers that upload checkpoints: directories, once they are complete, as they upload files under DDP.

The packages of the loggers are faked; Lightning's loggers are real.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, LitLogger, MLFlowLogger, WandbLogger

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.common.compat.of_loggers import LoggedCheckpoints
from lt_zero.common.errors import CheckpointError
from lt_zero.training.checkpoints import Saver
from lt_zero.training.lightning.uploads import DirectoryUploads, Listed
from tests.support.lightning_tools import FULL, GPT, sharded_trainer
from tests.support.pool import Pool

Uploaded = list[tuple[str, list[str], Any]]  # logger and file's name, aliases, score


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


class Server:
    """What the three packages have received; a directory is copied, as it is at that moment."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen = Path(folder), Uploaded()

    def receive(self, path: str, into: str) -> None:
        assert os.path.lexists(path), f"{path} was removed, or is not there yet"
        (shutil.copytree if os.path.isdir(path) else shutil.copy)(path, self.folder / into)

    # ---- wandb

    def artifact(self, name: str, type: str, metadata: dict[str, Any]) -> Any:
        made = SimpleNamespace(name=name, type=type, metadata=metadata)
        into = f"wandb-{len(self.seen)}"
        made.add_file = lambda path, name, policy: self.receive(path, into)
        made.add_dir = lambda path, name, policy: self.receive(path, into)
        return made

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        assert (artifact.type, artifact.name) == ("model", "model-one")
        assert artifact.metadata["ModelCheckpoint"]["monitor"] == "loss"
        self.seen.append((f"wandb {artifact.metadata['original_filename']}", aliases, artifact.metadata["score"]))

    # ---- MLflow, whose log_artifact takes files and directories

    def log_mlflow(self, run: str, path: str, into: str) -> None:
        if Path(path, "aliases.txt").exists():
            (aliases,) = (line for line in Path(path, "aliases.txt").read_text().splitlines() if line)
            self.seen.append((f"mlflow {into}", [word for word in ("latest", "best") if word in aliases], None))
        else:
            self.receive(path, f"mlflow-{len(self.seen)}")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the packages are there."""
        run = SimpleNamespace(id="one", name="n", define_metric=None, log_artifact=self.log_artifact, summary={})
        run.log, run.config = (lambda *args, **kwargs: None), mock.MagicMock()
        client = mock.MagicMock(log_artifact=self.log_mlflow, log_artifacts=self.log_mlflow)
        experiment = mock.MagicMock(name="experiment")
        experiment.name = "model"
        experiment.__setitem__.side_effect = self.log_lightning
        modules = {
            "wandb": _module("wandb", run=None, init=lambda **given: run, Artifact=self.artifact),
            "wandb.sdk.lib": _module("wandb.sdk.lib", RunDisabled=int),
            "wandb.wandb_run": _module("wandb.wandb_run", Run=int),
            "mlflow": mock.MagicMock(),
            "mlflow.tracking": _module("mlflow.tracking", MlflowClient=lambda uri: client, context=object()),
            "mlflow.entities": mock.MagicMock(),
            "litlogger": _module("litlogger", Experiment=lambda **given: experiment, Model=SimpleNamespace),
            "litlogger.generator": mock.MagicMock(_create_name=lambda: "name"),
        }
        modules["litlogger"].Model = lambda path, version: (path, version)
        flags = ("wandb._WANDB_AVAILABLE", "mlflow._MLFLOW_AVAILABLE", "litlogger._LITLOGGER_AVAILABLE")
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(sys.modules, modules))
            for flag in flags:
                stack.enter_context(mock.patch(f"lightning.pytorch.loggers.{flag}", True))
            yield

    def log_lightning(self, key: str, value: Any) -> None:
        if isinstance(value, tuple):  # else it is a metric
            self.receive(value[0], f"lightning-{len(self.seen)}")
            self.seen.append((f"lightning {Path(value[0]).name}", [], value[1]))


class Foreign(CSVLogger):
    """A logger of another package."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        pass


def _fit(server: Server, log_model: Any, config: dict[str, Any], top: int, stage: int = 2) -> list[str]:
    """Train four steps, with a save after each; returns the warnings of set-up."""
    folder = str(server.folder)
    loggers = [
        WandbLogger(save_dir=folder, log_model=log_model),
        MLFlowLogger(tracking_uri="file:nowhere", log_model=log_model),
        LitLogger(folder, log_model=True),
        Foreign(folder),
    ]
    keeps = ModelCheckpoint(
        f"{folder}/saved", "{step}", "loss", every_n_train_steps=1, save_top_k=top, save_last=True, mode="max"
    )
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lt_zero").addHandler(handler)
    options = {"callbacks": [keeps], "limit_val_batches": 0, "max_steps": 4, "max_epochs": 9, "log_every_n_steps": 1}
    trainer = sharded_trainer(stage, config=config, logger=loggers, enable_checkpointing=True, **options)
    try:
        trainer.fit(GPT(dist.get_world_size()))
    finally:
        logging.getLogger("lt_zero").removeHandler(handler)
    return [text for text in warnings if "after_save_checkpoint" in text]


def _uploads(folder: str, log_model: Any, top: int, slow: bool) -> Any:
    """The uploads of directories, in the background if ``slow``, and of files, for comparison."""
    config: dict[str, Any] = {"checkpoint": {"format": "sharded", "async": slow}}
    found = []
    for name, block in (("directories", config), ("files", FULL)):
        into = Path(folder, name)
        into.mkdir(exist_ok=True)
        server = Server(str(into))
        with server.installed():
            warnings = _fit(server, log_model, block, top)
        found.append((server.seen, warnings))
        dist.barrier()
    (seen, warnings), (files, none) = found
    if dist.get_rank() != 0:
        assert not seen
        assert not warnings
        return None
    assert not none
    assert len(warnings) == 1
    assert "Foreign.after_save_checkpoint" in warnings[0]
    assert "checkpoint.format: full" in warnings[0]
    assert ("checkpoint.async" in warnings[0]) == slow
    for copy in Path(folder, "directories").glob("*-*"):
        archive = Archive(str(copy))
        archive.verify()  # all of its files, and those that belong together
        archive.close()
    return seen, files


@pytest.mark.parametrize(
    ("log_model", "top", "slow"),
    [
        ("all", 1, True),
        pytest.param(True, 2, False, marks=pytest.mark.slow),
        pytest.param(True, 2, True, marks=pytest.mark.slow),
        pytest.param("all", 1, False, marks=pytest.mark.slow),
    ],
)
def test_directories_are_uploaded_as_files_are(
    pool: Pool, tmp_path: Path, log_model: Any, top: int, slow: bool
) -> None:
    """Each when it is complete, with the same names, scores and aliases, before the best one of k takes its place."""
    (seen, files), _ = pool.run(2, _uploads, str(tmp_path), log_model, top, slow)
    for logger in ("wandb", "mlflow", "lightning"):
        want = [upload for upload in files if upload[0].startswith(logger)]
        assert want
        assert [upload for upload in seen if upload[0].startswith(logger)] == want


class _Held(LoggedCheckpoints):
    """What a logger keeps, without one."""

    def __init__(self) -> None:
        self.kept: dict[str, float] = {}

    @property
    def times(self) -> dict[str, float]:
        return self.kept

    def list_files(self, callback: Any) -> None:
        pass


def _complete(path: Path) -> str:
    path.mkdir()
    (path / "manifest.json").write_text("")
    return str(path)


def test_what_is_uploaded_when(tmp_path: Path) -> None:
    """What is written now waits for the end of its save, and is not uploaded if that fails; the rest is not held up."""
    saver, got = Saver(), list[Listed]()
    uploads = DirectoryUploads(_Held(), got.append, saver)
    old, new = _complete(tmp_path / "old.ckpt"), str(tmp_path / "new.ckpt")
    os.symlink("new.ckpt", tmp_path / "last.ckpt")
    callback = SimpleNamespace(last_model_path=str(tmp_path / "last.ckpt"), current_score=None)
    callback.best_model_path = new
    callback.best_model_score = 2.0
    callback.best_k_models = {old: 1.0, new: 2.0}
    saver.pending, saver.writing = Future(), new
    uploads(callback)
    assert [found.path for found in got] == [old]
    saver.pending.set_exception(CheckpointError("full"))
    with pytest.raises(CheckpointError):
        saver.wait(None)
    assert [found.path for found in got] == [old]
    # A save that succeeds; by then ModelCheckpoint has forgotten the directory.
    saver.pending, saver.writing = Future(), new
    uploads(callback)
    callback.best_k_models, callback.best_model_path = {}, ""
    saver.pending.set_result(None)
    _complete(tmp_path / "new.ckpt")
    saver.wait(None)
    assert [(found.path, found.best, found.score) for found in got[1:]] == [
        (callback.last_model_path, False, None),
        (new, True, 2.0),
    ]
    uploads(callback)
    assert len(got) == 3, "nothing twice"
    os.utime(f"{new}/manifest.json", (1 << 32, 1 << 32))
    uploads(callback)
    assert [found.path for found in got[3:]] == [callback.last_model_path], "it was written again"
    assert uploads.__getstate__()["_saver"] is None
