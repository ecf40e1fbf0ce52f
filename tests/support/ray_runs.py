"""Training functions of Ray's workers, and a cluster of two nodes on this machine; started by tests/test_ray.py."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.lightning_tools import QUIET, single_trainer
from tests.support.paths import ROOT

STEPS, ROWS = 6, 6  # optimizer steps of a run, two in each epoch; rows of all ranks in a step
OPTIMIZERS = ("sgd", "adam")
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_memory_monitor_refresh_ms": "0",  # what other programs use must not end workers
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def cluster() -> Iterator[None]:
    """A cluster of two nodes, with one CPU and two, and this process as its driver."""
    import ray
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    with mock.patch.dict(os.environ, _VARIABLES):
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
        try:
            # Ray tells hosts apart by their addresses.
            nodes.add_node(num_cpus=2, object_store_memory=80 << 20, node_ip_address="127.0.0.2")
            ray.init(address=nodes.address, log_to_driver=True)
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


def fit(
    function: Any, config: dict[str, Any], storage: Path, workers: int = 2, placement: str = "SPREAD", **run: Any
) -> Any:
    """Ray's result of a training function on workers, which are spread over the nodes unless ``placement`` differs."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=workers, placement_strategy=placement)
    run_config = RunConfig(name="run", storage_path=str(storage), **run)
    return TorchTrainer(function, train_loop_config=config, scaling_config=scaling, run_config=run_config).fit()


class Model(pl.LightningModule):
    """Layers of odd sizes in fp64, none of which two or three ranks share evenly."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).double()
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.Adam(self.parameters(), lr=0.01)


def batches(rank: int = 0, ranks: int = 1) -> DataLoader[Any]:
    """Two steps of an epoch, in the batches of one rank. Over all ranks, a step has the same rows for any number."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(2 * ROWS, 7, dtype=torch.float64, generator=draw)
    rows = TensorDataset(inputs, inputs[:, :5].square())
    return DataLoader(rows, ROWS // ranks, sampler=DistributedSampler(rows, ranks, rank, shuffle=False))


def alone(optimizer: str, steps: int = STEPS) -> dict[str, Tensor]:
    """The weights that one process trains, with the batches of all ranks as one."""
    model = Model(optimizer)
    single_trainer(max_steps=steps, precision="64-true").fit(model, batches())
    return dict(model.state_dict())


def trainer_of(stage: int, config: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """The Trainer of a worker. Ray's own check of it passes."""
    from ray.train.lightning import prepare_trainer

    from lt_zero.ray import RayZeroStrategy

    warnings.filterwarnings("ignore")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    strategy = RayZeroStrategy(config={"zero_optimization": zero, **(config or {})})
    trainer = pl.Trainer(**{**QUIET, "max_steps": STEPS, "precision": "64-true", "strategy": strategy, **options})
    prepare_trainer(trainer)
    return trainer


def train(config: dict[str, Any]) -> None:
    """Train each of ``config["cases"]``, pairs of stage and optimizer; rank 0 saves the weights to the folder."""
    import ray.train

    for stage, optimizer in config["cases"]:
        trainer = trainer_of(stage)
        context = ray.train.get_context()
        assert (trainer.global_rank, trainer.world_size) == (context.get_world_rank(), context.get_world_size())
        model = Model(optimizer)
        trainer.fit(model, batches(trainer.global_rank, trainer.world_size))
        assert len(trainer.strategy.session.world.nodes) == 2
        _save(trainer, Path(config["folder"], f"{stage}-{optimizer}.pt"))


def _save(trainer: pl.Trainer, file: Path) -> None:
    weights = trainer.strategy.full_state_dict()
    if trainer.is_global_zero:
        torch.save(weights, file)


class Ends(pl.Callback):
    """Ends the first life of rank 1 by a kill, and notes in a folder where each life begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with open(self.folder / "began", "a", encoding="utf-8") as file:
                file.write(f"{trainer.global_step}\n")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        first = not (self.folder / "killed").exists()
        if first and trainer.global_rank == 1 and trainer.global_step == STEPS - 1:
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def restarted(config: dict[str, Any]) -> None:
    """Train from where the run was, with reports to Ray; rank 0 saves the weights to the folder."""
    from lt_zero.ray import RayZeroReportCallback, reported_checkpoint

    folder = Path(config["folder"])
    callbacks = [RayZeroReportCallback(**config["report"]), Ends(folder)]
    trainer = trainer_of(3, config["config"], callbacks=callbacks, max_steps=config["steps"])
    model = Model("adam")
    trainer.fit(model, batches(trainer.global_rank, trainer.world_size), ckpt_path=reported_checkpoint())
    _save(trainer, folder / "weights.pt")


def from_the_start(config: dict[str, Any]) -> None:
    """Train the same twice under one name, as a script does that does not ask for the last checkpoint."""
    from lt_zero.ray import RayZeroReportCallback

    for _ in range(2):
        trainer = trainer_of(2, callbacks=[RayZeroReportCallback()], max_steps=4)
        trainer.fit(Model("sgd"), batches(trainer.global_rank, trainer.world_size))


def reported_by_ray(config: dict[str, Any]) -> None:
    """Train with Ray's own callback; rank 0 saves the weights to the folder."""
    from ray.train.lightning import RayTrainReportCallback

    trainer = trainer_of(3, callbacks=[RayTrainReportCallback()])
    trainer.fit(Model("adam"), batches(trainer.global_rank, trainer.world_size))
    assert len(trainer.strategy.session.world.nodes) == 1
    _save(trainer, Path(config["folder"], "weights.pt"))


def refused(config: dict[str, Any]) -> None:
    """Each rank writes the errors of fits that cannot report checkpoints to the folder."""
    import ray.train
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback

    from lt_zero.ray import RayZeroReportCallback

    def error(trainer: pl.Trainer) -> str:
        try:
            trainer.fit(Model("sgd"), batches(trainer.global_rank, trainer.world_size))
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return ""

    ddp = pl.Trainer(
        **QUIET, strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], callbacks=[RayZeroReportCallback()]
    )
    told = {
        "other strategy": error(ddp),
        "callback of Ray": error(trainer_of(3, callbacks=[RayTrainReportCallback()])),
    }
    context = ray.train.get_context()
    if context.get_world_rank() == 1:  # as on a host where it is not mounted
        context.get_storage().storage_fs_path = "/proc/unmounted"
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_RANK"]
        try:
            trainer_of(3)
        except RuntimeError as raised:
            told["no group"] = str(raised)
    told["storage"] = error(trainer_of(3, callbacks=[RayZeroReportCallback()]))
    Path(config["folder"], f"told-{context.get_world_rank()}").write_text(json.dumps(told), encoding="utf-8")
