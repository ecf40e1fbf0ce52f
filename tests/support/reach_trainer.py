"""Where a configuration's values are looked for in a run of the Trainer: steps, what is printed, saved and resumed."""

from __future__ import annotations

import gc
import io
import logging
import threading
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import ZeroConfig, ZeroStrategy
from lt_zero.checkpoint.open import open_source
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.ranks import LaunchOrder
from lt_zero.core.step.fused_step import FusedStep
from lt_zero.core.step.loss_scale import LossScaleError, NonFiniteError
from lt_zero.training import checkpoints
from tests.support.lightning_tools import QUIET, torchrun_env, trust
from tests.support.reach_engine import Config, Lab, nested, short


class Enough(Exception):
    """What was to be seen was seen."""


class Module(pl.LightningModule):
    """Notes what it sees; four samples a batch. Gradients of the steps in ``broken`` overflow."""

    def __init__(self, own: bool = True, broken: frozenset[int] = frozenset()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.second = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.first.bias.requires_grad_(False)
        self.broken = broken
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.levels: set[int] = set()
        self.collects: set[bool] = set()
        self.batches = 0
        if own:
            self.configure_optimizers = self.optimize  # type: ignore[method-assign]

    def optimize(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches += 1
        self.levels.add(logging.getLogger("lt_zero").level)
        self.collects.add(gc.isenabled())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = self.second(self.norm(self.first(batch))).float().square().mean()
        return loss * (float("inf") if batch_idx in self.broken else 1.0)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        return DataLoader(torch.randn(64, 3, generator=generator), batch_size=4)  # type: ignore[arg-type]


class Clipped(Module):
    """Notes the norm of the gradients that are stepped."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.norms.append(round(float(self.trainer.strategy.grad_norm(optimizer)), 3))


@dataclass
class Run:
    """A run and what it said."""

    trainer: pl.Trainer
    module: Module
    text: str
    error: Exception | None
    told: list[str] = field(default_factory=list)  # warnings

    @property
    def strategy(self) -> Any:
        return self.trainer.strategy


BASE = {"zero_optimization.stage": 3, "zero_optimization.stage3_param_persistence_threshold": 0}


def fit(lab: Lab, config: Config, module: Module | None = None, resume: str | None = None, **options: Any) -> Run:
    """Two steps, unless ``options`` say something else."""
    module = module or Module()
    with warnings.catch_warnings(record=True) as told, redirect_stdout(io.StringIO()) as text:
        warnings.simplefilter("always")
        strategy = ZeroStrategy(config=nested({**BASE, **config}, lab.folder))
        options = {"devices": 1, "max_steps": 2, "use_distributed_sampler": False, "strategy": strategy, **options}
        trainer = pl.Trainer(**{**QUIET, "default_root_dir": lab.folder, **options})
        error = None
        try:
            trainer.fit(module, ckpt_path=resume, **trust(False))
        except (ConfigError, LossScaleError, NonFiniteError, Enough, MemoryError) as problem:
            error = problem
    return Run(trainer, module, text.getvalue(), error, [str(warning.message) for warning in told])


Look = Callable[[Lab, Config], Any]
_RUNS: dict[str, Run] = {}


def fit_once(lab: Lab, config: Config, own: bool = True, broken: tuple[int, ...] = (), **options: Any) -> Run:
    """``fit`` of equal configurations in one folder or another, once; for looks that change nothing in it."""
    key = repr((sorted(config.items()), own, broken, sorted(options.items())))
    if "{folder}" in key:
        return fit(lab, config, Module(own, frozenset(broken)), **options)
    if key not in _RUNS:
        _RUNS[key] = fit(lab, config, Module(own, frozenset(broken)), **options)
    return _RUNS[key]


def run(find: Callable[[Run], Any], **options: Any) -> Look:
    """A look at a run."""
    return lambda lab, config: find(fit_once(lab, config, **options))


def refused(found: Run) -> Any:
    """The key that an error is about."""
    return [problem.key for problem in getattr(found.error, "problems", [])]


def outcome(found: Run) -> Any:
    """An error's class, or how many warnings tell of overflow."""
    return type(found.error).__name__ if found.error else sum("not finite" in text for text in found.told)


def clipped(lab: Lab, config: Config) -> Any:
    """Whether the norms of what is stepped exceed 0.001."""
    return [norm > 0.001 for norm in fit(lab, config, Clipped()).module.norms]


def overflowing(find: Callable[[Run], Any], *steps: int) -> Look:
    """A look at a run in which these of four steps overflow."""
    return lambda lab, config: find(
        fit_once(lab, config, broken=steps, max_epochs=1, max_steps=-1, limit_train_batches=4)
    )


def optimizer(find: Callable[[torch.optim.Optimizer], Any]) -> Look:
    """A look at the optimizer that steps a module which has none of its own."""
    return lambda lab, config: find(fit_once(lab, config, own=False).trainer.optimizers[0])


def rates(lab: Lab, config: Config) -> Any:
    """The learning rates of a module without schedule."""
    return fit(lab, {"optimizer.type": "SGD", "optimizer.params.lr": 0.5, **config}, Module(own=False)).module.rates


def threads(lab: Lab, config: Config) -> Any:
    """In which threads the kernel steps, in a plain run."""
    seen: set[str] = set()
    launch = FusedStep.launch

    def look(fused: FusedStep, *args: Any, **kwargs: Any) -> Any:
        seen.add("background" if threading.current_thread().name == "lt_zero-step" else "main")
        return launch(fused, *args, **kwargs)

    with mock.patch.object(FusedStep, "launch", look):
        fit(lab, config)
    return seen


def norms(lab: Lab, config: Config) -> Any:
    """The classes of norms in a run."""
    seen: list[str] = []

    class Spy(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            seen.append(type(module.norm).__name__)
            raise Enough

    fit(lab, config, callbacks=[Spy()])
    return seen


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def saved(find: Callable[[Path], Any]) -> Look:
    """A look at a checkpoint."""

    def look(lab: Lab, config: Config) -> Any:
        found = fit(lab, config)
        found.trainer.save_checkpoint(lab.folder / "last.ckpt")
        return find(lab.folder / "last.ckpt")

    return look


def names(path: Path) -> Any:
    """The weights in a sharded checkpoint."""
    return sorted(name for name in open_source(path).weights if "first" in name)


def savers(lab: Lab, config: Config) -> Any:
    """Which thread writes a checkpoint in the middle of a run."""
    seen: list[str] = []
    write = checkpoints.write

    def look(*args: Any) -> None:
        seen.append(threading.current_thread().name.partition("_")[0])
        write(*args)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(lab.folder / "last.ckpt")

    with mock.patch.object(checkpoints, "write", look):
        fit(lab, config, callbacks=[Save()])
    return seen


def resumed(find: Callable[[Run], Any], before: Config | None = None) -> Look:
    """A look at a run that goes on from a checkpoint of two steps for another one."""

    def look(lab: Lab, config: Config) -> Any:
        fit(lab, before or config).trainer.save_checkpoint(lab.folder / "last.ckpt")
        return find(fit(lab, config, resume=str(lab.folder / "last.ckpt"), max_steps=3))

    return look


def moment_steps(found: Run) -> Any:
    """How many steps the optimizer's moments have seen."""
    return {int(state["step"]) for state in found.trainer.optimizers[0].state.values()}


def rounding(lab: Lab, config: Config) -> Any:
    """Whether master weights start with more digits than bf16 has."""
    config = {"bf16.enabled": True, **config}
    fit(lab, config).trainer.save_checkpoint(lab.folder / "last.ckpt")
    found = fit(lab, config, resume=str(lab.folder / "last.ckpt"), max_steps=2)
    weight = found.strategy.full_state_dict()["first.weight"]
    return "rounded" if torch.equal(weight, weight.bfloat16().float()) else "as saved"


# ---- two ranks -----------------------------------------------------------------------------------------------------


def _sent(config: dict[str, Any], grad: float) -> dict[str, Any]:
    """What travels in one backward, whose gradients are ``grad`` on rank 0 and three times that on rank 1."""
    import torch.distributed as dist

    calls: list[tuple[str, str, float]] = []

    def noting(name: str, place: int) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, short(args[place].dtype), float(args[place].float().max())))
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    model = nn.Linear(64, 4, bias=False)
    engine = lt_zero.shard(model, ZeroConfig.of(config))
    compared: list[bool] = []
    with noting("all_to_all_single", 1), noting("all_reduce", 0), _noting_reductions(compared):
        factor = grad * (1 + 2 * dist.get_rank())
        model(torch.full((1, 64), factor)).sum().backward()
    (bucket,) = [b for b in engine.buckets if b.params]
    ((name, dtype, value),) = [call for call in calls if call[1] != "uint8" and call[0] != "broadcast"][:1]
    return {"by": name, "as": dtype, "sent": value, "got": float(bucket.grads.read()[0]), "compared": bool(compared)}


def sent(*fields: str, grad: float = 1.0) -> Look:
    """A look at a backward on two ranks that do not share memory: of rank 1."""

    def look(lab: Lab, config: Config) -> Any:
        given = nested({**BASE, "zero_optimization.stage": 2, **config}, lab.folder)
        found = lab.pool.run(2, _sent, given, grad, env={"LT_ZERO_SHARED_MEMORY": "0"})[1]
        return [found[name] for name in fields]

    return look


def _noting_reductions(agreed: list[bool]) -> Any:
    """Notes reductions that ranks agree upon before they launch them."""
    agree = LaunchOrder._compare

    def look(self: LaunchOrder, launch: Any) -> None:
        if launch.channel == "reduction":
            agreed.append(True)
        agree(self, launch)

    return mock.patch.object(LaunchOrder, "_compare", look)


def _compared(config: dict[str, Any]) -> int:
    seen: list[bool] = []
    with _noting_reductions(seen), mock.patch.dict("os.environ", torchrun_env()):
        fit(Lab(Path(), None), config, devices=2, max_steps=1)  # type: ignore[arg-type]
    return bool(seen)


def compared(lab: Lab, config: Config) -> Any:
    """Whether two ranks compare collectives: in a run of the Trainer, in an engine alone."""
    return [lab.pool.run(2, _compared, config)[0], *sent("compared")(lab, config)]
