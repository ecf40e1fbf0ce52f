"""``csv_monitor``, ``tensorboard``, ``wandb`` and ``comet`` in a loop: events by DeepSpeed's names, in its files.

An event is a name, a value, and the samples that were trained so far.

Note [When events are written]
    A step's loss is a mean over ranks, and on a GPU it is known when the device has finished the step. The host does
    not wait: it writes the events of a step at the next one, or at the end. On a CPU they are written at once.
"""

from __future__ import annotations

import csv
import math
import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import Comet, CsvMonitor, TensorBoard, Wandb
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.followers import Figure, figures_of
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.core.stores.regular_file import open_for_update
from lt_zero.training.loop.monitoring import Event, LoopMonitor
from lt_zero.training.run_file import RunFile, cut_incomplete_line

_PREFIX = "Train/Samples/"


def _folder(block: CsvMonitor | TensorBoard) -> Path:
    return Path(block.output_path).expanduser() / block.job_name


class CsvFiles:
    """A file for each name: ``Train_Samples_lr.csv`` with the columns ``step`` and ``lr``. Files are gone on with."""

    def __init__(self, block: CsvMonitor) -> None:
        self._folder = _folder(block)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._seen = set[Path]()

    def write(self, events: list[Event]) -> None:
        for name, value, step in events:
            path = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            if path not in self._seen:
                cut_incomplete_line(path)
                self._seen.add(path)
            opened = open_for_update(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with open(opened, "a", encoding="utf-8", newline="") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])


def _tensorboard(block: TensorBoard) -> Callable[[list[Event]], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(_folder(block)))

    def write(events: list[Event]) -> None:
        for event in events:
            writer.add_scalar(*event)
        writer.flush()

    return write


def _wandb(block: Wandb) -> Callable[[list[Event]], object]:
    run: Any = import_module("wandb").init(project=block.project, group=block.group, entity=block.team)
    return lambda events: [run.log({name: value}, step=step) for name, value, step in events]


def _comet(block: Comet) -> Callable[[list[Event]], None]:
    names = ("workspace", "project", "experiment_key", "mode", "online")
    given = {name: value for name in names if (value := getattr(block, name)) is not None}
    key = block.api_key.get_secret_value() if block.api_key is not None else None
    experiment: Any = import_module("comet_ml").start(**given, **({"api_key": key} if key is not None else {}))
    if block.experiment_name is not None:
        experiment.set_name(block.experiment_name)
    sent: dict[str, int] = {}

    def write(events: list[Event]) -> None:
        for name, value, step in events:
            if name not in sent or step - sent[name] >= block.samples_log_interval:
                sent[name] = step
                experiment.log_metric(name=name, value=value, step=step)

    return write


# Packages of the blocks, by key.
_PACKAGES = {"csv_monitor": "", "tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
_OPENS: dict[str, Callable[[Any], Callable[[list[Event]], object]]] = {
    "csv_monitor": lambda block: CsvFiles(block).write,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "comet": _comet,
}


class _Step(NamedTuple):
    """A step whose events are not written yet. ``values``: sum of losses, ranks that know one, and gradient norm."""

    samples: int
    rate: float | None
    values: Tensor
    copied: Any  # the event after which ``values`` may be read; None: at once
    figures: dict[str, float | None]  # of features, by name


class _Output:
    """Writes events on rank 0; holds those of a step that may be running."""

    def __init__(self) -> None:
        self.writers: list[Callable[[list[Event]], object]] = []
        self.file: RunFile | None = None
        self.due: list[_Step] = []

    def write_due(self, scale: float | None = None, skipped: int | None = None) -> None:
        """Write the events of the last step; ``scale``, ``skipped``: under fp16, after it."""
        for step in self.due:
            if step.copied is not None:
                step.copied.synchronize()
            total, known, norm = step.values.tolist()
            loss = total / known if known else math.nan
            found = {"train_loss": loss, "lr": step.rate, "loss_scale": scale, "skipped_steps": skipped}
            found |= step.figures
            found |= {"grad_norm": norm if math.isfinite(norm) else None}  # of a skipped step, or not computed
            if not known:
                del found["train_loss"]
            self.write([(_PREFIX + name, value, step.samples) for name, value in found.items() if value is not None])
        self.due.clear()

    def write(self, events: list[Event]) -> None:
        """Write events. A monitor whose disk fails is left out from then on, with a warning: the run goes on."""
        for writer in list(self.writers):
            try:
                writer(events)
            except OSError as error:
                self.writers.remove(writer)
                warn(f"A monitor cannot write ({error}), and gets no more events in this run.")

    def end(self) -> None:
        self.write_due()
        if self.file is not None:
            self.file.flush()


class LoopMonitors(LoopMonitor):
    """DeepSpeed's ``engine.monitor``: writes events on rank 0. Collective.

    All names begin with ``Train/Samples/``. ``train_loss``: of a step, averaged over the ranks, if ``engine.backward``
    got it. ``lr``: the rate that the step used. ``grad_norm``: before clipping, if the step computes it.
    ``loss_scale``, ``skipped_steps``: under fp16, after the step. ``gradient_noise_scale``: if the key is true.

    Raises:
        ConfigError: on all ranks: a package is missing, or a folder cannot be written; names the key.
    """

    enabled = True

    def __init__(self, config: ZeroConfig, world: World, mode: str) -> None:
        self._world, self._output = world, _Output()
        self._new_file: Callable[[int], RunFile] | None = None
        with world.agree("opening the monitors", ConfigError):
            if world.rank == 0:
                self._open(config, mode)
        self._samples = 0  # trained so far
        self._figures: dict[Figure, Callable[[], object]] = {}  # with what ends each
        self._loss: Tensor | None = None  # 0D, of the micro-batches since the last step
        self._end = weakref.finalize(self, self._output.end)  # also at the end of the process

    def _open(self, config: ZeroConfig, mode: str) -> None:
        blocks: list[tuple[str, Any, str]] = [
            (key, getattr(config, key), package) for key, package in _PACKAGES.items()
        ]
        for key, block, package in blocks:
            if not block.enabled:
                continue
            try:
                self._output.writers.append(_OPENS[key](block))
            except ModuleNotFoundError as error:
                text = f"{key}.enabled=true needs the package {package}, which is missing or too old ({error}). Run "
                text += f"`pip install -U {package}`, or set it to false."
                raise ConfigError.about(f"{key}.enabled", text) from None
            except OSError as error:
                text = f"{key}.output_path={block.output_path!r}: {error.strerror or error}. Name another folder."
                raise ConfigError.about(f"{key}.output_path", text) from None
        files = [block for _, block, _ in blocks if block.enabled and isinstance(block, CsvMonitor | TensorBoard)]
        if files:
            about: dict[str, Any] = {"ranks": self._world.size, "stage": config.zero_optimization.stage, "mode": mode}
            self._new_file = partial(RunFile, _folder(files[0]), **about)

    @override
    def write_events(self, events: Iterable[Event]) -> None:
        self._output.write([(name, float(value), int(step)) for name, value, step in events])

    @override
    def add_loss(self, loss: Tensor, share: float) -> None:
        part = loss.detach().reshape(()).float() * share
        self._loss = part if self._loss is None else self._loss + part

    @override
    def measure(self, engine: Engine, micro_batches: int, micro: int, weight: Callable[[], float]) -> None:
        for figure in figures_of(engine):
            figure.begin(micro_batches, weight)
            see = partial(figure.see_batch, micro)
            engine.after_backward.append(see)
            self._figures[figure] = partial(engine.after_backward.remove, see)

    @override
    def begin_step(self, samples: int, controller: LossScaleController) -> None:
        """Write the events of the step before, see Note [When events are written]. ``samples``: before this step."""
        self._samples = samples
        if self._output.due:
            self._write_due(controller)

    @override
    def end_step(self, samples: int, rates: list[float], norm: Tensor | None, controller: LossScaleController) -> None:
        device, loss = self._world.device, self._loss
        figures = {figure.name: figure.read() for figure in self._figures}
        none = torch.zeros((), device=device)
        values = torch.stack([none if loss is None else loss.to(device), torch.full_like(none, loss is not None)])
        values = self._world.sum_all(values, "loss of a monitor")
        self._loss = None
        if self._world.rank != 0:
            return
        nan = torch.full_like(none, math.nan)
        values, copied = torch.cat([values, (nan if norm is None else norm.detach().to(nan))[None]]), None
        if accelerator.has_streams(device):
            values, copied = accelerator.fetch(values)
        self._output.due.append(_Step(samples, rates[0] if rates else None, values, copied, figures))
        if self._output.file is None and self._new_file is not None:
            self._output.file = self._new_file(self._samples)
        if self._output.file is not None:
            self._output.file.end_step(samples)
        if copied is None:
            self._write_due(controller)

    def _write_due(self, controller: LossScaleController) -> None:
        fp16 = controller.scaler is not None
        self._output.write_due(*((controller.scale, controller.skipped) if fp16 else ()))

    @override
    def end(self, controller: LossScaleController) -> None:
        self.begin_step(self._samples, controller)
        for figure, forget in self._figures.items():
            figure.end()
            forget()
        self._figures.clear()
        self._output.end()
