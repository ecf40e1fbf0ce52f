"""Where a configuration's values are looked for in loggers; what is not installed is faked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl

from tests.support.reach_engine import Config, Lab
from tests.support.reach_trainer import Enough, fit


class Stop(pl.Callback):
    """Ends a run when its loggers are there."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        raise Enough


def loggers(lab: Lab, config: Config) -> Any:
    """What the Trainer logs to: class and folder."""
    flag = "lightning.fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE"
    writer = SimpleNamespace(SummaryWriter=mock.MagicMock())
    with mock.patch(flag, True), mock.patch.dict(sys.modules, {"torch.utils.tensorboard": writer}):
        found = fit(lab, config, callbacks=[Stop()])
    assert isinstance(found.error, Enough), found.error
    return [(type(o).__name__, str(Path(o.log_dir).relative_to(lab.folder))) for o in found.trainer.loggers]


@contextmanager
def fake(package: str, **members: Any) -> Iterator[None]:
    """An installed package of that name."""
    parts = {"wandb.sdk.lib": SimpleNamespace(RunDisabled=int), "wandb.wandb_run": SimpleNamespace(Run=int)}
    flag = {"wandb": "wandb._WANDB_AVAILABLE", "comet_ml": "comet._COMET_AVAILABLE"}[package]
    modules = {package: SimpleNamespace(**members), **(parts if package == "wandb" else {})}
    with mock.patch.dict(sys.modules, modules), mock.patch(f"lightning.pytorch.loggers.{flag}", True):
        yield


def wandb(lab: Lab, config: Config) -> Any:
    """With what a run of Weights & Biases is opened."""
    calls: list[dict[str, Any]] = []
    opened = SimpleNamespace(name="n", define_metric=None)
    with fake("wandb", run=None, init=lambda **given: calls.append(given) or opened):
        for logger in fit(lab, config, callbacks=[Stop()]).trainer.loggers:
            assert logger.experiment is opened
    return [{k: v for k, v in call.items() if k in ("project", "group", "entity") and v is not None} for call in calls]


def comet(lab: Lab, config: Config) -> Any:
    """With what an experiment of Comet is opened."""
    calls: list[dict[str, Any]] = []
    experiment = mock.MagicMock()

    def start(**given: Any) -> Any:
        calls.append({**given, **vars(given["experiment_config"])})
        return experiment

    with (
        fake("comet_ml", ExperimentConfig=SimpleNamespace, start=start),
        mock.patch("lt_zero.training.lightning.monitor.loggers.rank_zero_info") as info,
    ):
        fit(lab, config, callbacks=[Stop()])
    told = [str(call.args[0]).split("=")[0] for call in info.call_args_list]
    ours = {"project", "workspace", "api_key", "name", "experiment_key", "online", "mode"}
    return told + [{k: v for k, v in call.items() if k in ours and v is not None} for call in calls]
