"""In a notebook the strategies start what works, or say what to write; the Trainer there knows how far the run came."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import imports
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.process_groups import init_alone

MAKERS = [(L.Trainer, lt_zero.ZeroStrategy), (L.Fabric, lt_zero.FabricZeroStrategy)]
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def _interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "lightning.pytorch.trainer.connectors.accelerator_connector",
        "lightning.fabric.connector",
        "lightning.fabric.strategies.launchers.multiprocessing",
    ):
        monkeypatch.setattr(f"{module}._IS_INTERACTIVE", True)
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("make", "kind"), MAKERS)
def test_one_device_needs_no_launcher_and_several_are_forked(make: Any, kind: Any) -> None:
    for strategy in (kind(3), "zero_3", "zero_1_offload"):
        made = make(strategy=strategy, accelerator="cpu", devices=1)
        assert made.strategy.launcher is None
    several = make(strategy="zero_3", accelerator="cpu", devices=2).strategy
    assert several._start_method == "fork"
    assert several.launcher.is_interactive_compatible
    chosen = make(strategy="zero_3_notebook", accelerator="cpu", devices=1).strategy
    assert chosen.launcher is not None


@pytest.mark.parametrize(("make", "kind"), MAKERS)
def test_processes_that_others_have_started_are_ranks(make: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert make(strategy=kind(3), accelerator="cpu", devices=2).strategy.launcher is None


@pytest.mark.parametrize("kind", [kind for _, kind in MAKERS])
@pytest.mark.parametrize(
    ("device", "nodes", "told"),
    [("cuda", 1, r'strategy="zero_2_notebook".*devices=1'), ("cpu", 2, r"Run a script on each node")],
)
def test_what_cannot_be_started_is_an_error_that_says_what_to_write(
    kind: Any, device: str, nodes: int, told: str
) -> None:
    strategy = kind(2)
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device(device, index) for index in range(2)]
    strategy._num_nodes = nodes
    with pytest.raises(ConfigError, match=told):
        strategy._configure_launcher()


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _fit(model: Model, devices: int, *callbacks: L.Callback) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    files = {"enable_checkpointing": bool(callbacks), "callbacks": list(callbacks)}
    # At stage 3 an engine lets no weights be read without it: those of a forked rank's parent do not count.
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    strategy = lt_zero.ZeroStrategy(config=config)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_steps=3, **files, **QUIET)
    trainer.fit(model)
    return trainer


class Writes(L.Callback):
    """Metrics of types that Lightning does not send, and one that nothing can send."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.callback_metrics.update(scalar=np.float32(3.5), array=np.arange(3), text="best", lock=threading.Lock())


def _weights(model: Model) -> dict[str, torch.Tensor]:
    with lt_zero.gathered(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_cells_train_a_model_with_one_device_then_with_two(tmp_path: Path) -> None:
    """Forked ranks train together, though their parent has an engine and a group of one rank. It knows their run."""
    best = ModelCheckpoint(tmp_path / "saved", monitor="loss_step", every_n_train_steps=1, save_top_k=2)
    stopping, model, copied, alone = (
        EarlyStopping("loss_epoch", patience=3),
        Model(),
        Model(),
        not dist.is_initialized(),
    )
    try:
        _fit(model, 1)
        assert "MASTER_PORT" not in os.environ, "its store needs no port, which the next run would find taken"
        before = _weights(model)
        copied.load_state_dict(before)
        trainer = _fit(model, 2, best, stopping, Writes())
    finally:
        if alone and dist.is_initialized():
            dist.destroy_process_group()
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
    assert {"loss_step", "loss_epoch"} <= trainer.logged_metrics.keys()
    assert trainer.callback_metrics["loss_epoch"] == trainer.logged_metrics["loss_epoch"]
    metrics = trainer.callback_metrics
    assert (metrics["scalar"], metrics["array"].tolist(), metrics["text"]) == (3.5, [0, 1, 2], "best")
    assert "lock" not in metrics
    assert len(best.best_k_models) == 2
    assert best.best_model_score == best.best_k_models[best.best_model_path] == min(best.best_k_models.values())
    assert Path(best.best_model_path).parent == tmp_path / "saved"
    assert stopping.best_score == trainer.callback_metrics["loss_epoch"]
    _fit(copied, 2)
    trained = _weights(model)
    assert not torch.equal(trained["layer.weight"], before["layer.weight"])
    for name, value in copied.state_dict().items():
        assert torch.equal(value, trained[name])


def _results(fabric: L.Fabric) -> dict[str, Any]:
    return {"loss": torch.full((3,), 2.0), "ranks": fabric.world_size, "seen": np.float64(0.5)}


def test_what_a_function_returns_on_rank_0_comes_back() -> None:
    """Tensors would travel through memory of a process that has ended."""
    found = L.Fabric(strategy="zero_1", accelerator="cpu", devices=2).launch(_results)
    assert (found["loss"].tolist(), found["ranks"], found["seen"]) == ([2.0] * 3, 2, 0.5)


def _tell(index: int, folder: Path) -> None:
    (folder / f"{index}").write_text(str(dist.is_initialized()))


def test_ranks_of_other_launchers_leave_a_group_of_one_rank_and_other_processes_keep_it(tmp_path: Path) -> None:
    """As in a cell with strategy="ddp_notebook" after one with devices=1; and as in a worker of a DataLoader."""
    alone = not dist.is_initialized()
    try:
        init_alone("gloo")
        torch.multiprocessing.start_processes(_tell, (tmp_path,), nprocs=1, start_method="fork")
        worker = multiprocessing.get_context("fork").Process(target=_tell, args=(1, tmp_path))
        worker.start()
        worker.join()
        assert dist.is_initialized()
    finally:
        if alone:
            dist.destroy_process_group()
    assert [(tmp_path / name).read_text() for name in "01"] == ["False", "True"]
