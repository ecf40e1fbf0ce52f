"""Reconciles the configuration, the Trainer and the module: one may set a value; if two do, they must agree.

Note [Precedence of values]
    A value set only in the configuration is set on the Trainer before the run and shown in a table. A Trainer does not
    know whether the user wrote its default (one micro-batch per step, no clipping), so defaults never conflict. Batch
    sizes are checked on the first batch, since Lightning builds the data loaders. Two of the three keys about batches
    imply the third: accumulation is set on the Trainer, the micro-batch is only shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from pydantic import TypeAdapter, ValidationError
from torch import nn

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, path_of
from lt_zero.common.names import OfRanks, alone
from lt_zero.common.tables import show_values
from lt_zero.common.tensor_tree import sizes_of
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import check_same
from lt_zero.config.auto import Resolution, RunFacts, resolve, resolve_batch
from lt_zero.config.document import Document
from lt_zero.config.keys import TRAINER
from lt_zero.config.load import ConfigWarning, shown
from lt_zero.core.comm.world import World
from lt_zero.core.engine.partition import hidden_size, widths_of
from lt_zero.core.feature import Undo

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")
_SAME = "Remove one of them, or make them equal"
_NUMBERS: TypeAdapter[Any] = TypeAdapter(int | float | list[int | float])


class Reconciler:
    """The configuration of one strategy as the user wrote it, with the ``marks`` of its values.

    Attributes:
        config: as far as it is resolved.
        shown: what checkpoints tell of it.
        seen: whether ``see`` has compared the first batch, and has nothing more to do.
    """

    def __init__(self, config: ZeroConfig, marks: Mapping[Path, Mark] | None = None) -> None:
        self._given = config  # "auto" is resolved again for each fit, with its module, Trainer and data
        self._use(config)
        self._written = Document({}, dict(marks or {}))
        self._lent = Undo()  # takes back what ``lend_optimizers`` has replaced
        self.seen, self._steps = False, 1

    def _use(self, config: ZeroConfig) -> None:
        self.config, self.shown = config, shown(config)

    # ---- before a run ------------------------------------------------------------------------------------------

    def lend_optimizers(self, module: pl.LightningModule, of_ranks: OfRanks = alone) -> None:
        """Replace ``configure_optimizers`` of the module if the configuration names an optimizer or a scheduler.

        ``of_ranks``: as for ``configured_optimizer``.

        Raises:
            ConfigError: the module already has one.
        """
        self.take_back()
        if self.config.optimizer is not None or self.config.scheduler is not None:
            from lt_zero.training.lightning.lent_optimizers import lend  # most runs have neither

            self._lent = lend(module, lambda: self.config, self._written.mark(("optimizer",)), of_ranks)

    def take_back(self) -> None:
        """Restore ``configure_optimizers`` of the module."""
        self._lent.remove()

    def agree(self, trainer: pl.Trainer, module: pl.LightningModule, world: World, ranks: int, show: bool) -> None:
        """Resolve "auto" and make the Trainer and the configuration agree. Collective.

        The ``module`` is fully constructed, and not sharded yet. ``ranks``: that see different data. ``show``: print
        the resolved values.

        Raises:
            ConfigError: on all ranks, if the values contradict each other, or an "auto" cannot be resolved.
        """
        self.seen, config, widths = False, self._given, [widths_of(module)]
        if config.pipeline.ranks > 1:  # a rank has some of the layers
            widths = world.host_gather(widths[0], "sizes of the model")
        with world.agree("reading the configuration", ConfigError), self._marked():
            rows, config = _apply_to_trainer(config, trainer, module, ranks)
            self._steps = steps = trainer.accumulate_grad_batches
            facts = RunFacts(
                trainer={
                    "gradient_accumulation_steps": steps if config.micro_batches == 1 else config.micro_batches,
                    "gradient_clipping": float(trainer.gradient_clip_val or 0.0),
                },
                hidden=lambda: hidden_size(widths),
                named=lambda names: find_value(module, names),
                steps=lambda: _steps(trainer),
            )
            config, resolutions = resolve(config, facts)
            micro, total = _loaded(config), config.train_batch_size
            if micro is not None:
                _check_batch(config, micro, steps, ranks, "is configured")
            elif total is not None:  # it implies the micro-batch, with which the first batch is compared
                micro = _quotient(total, "accumulation", steps, ranks, "micro-batch")
                source = f"train_batch_size: {total} / ({steps} * {ranks} ranks)"
                rows.append(Resolution("batch_size of the data loader", micro, source))
        check_same(config, world.host_gather)
        self._use(config)
        if show:
            show_values([*rows, *resolutions])
            if config.scheduler is not None and not module.automatic_optimization:
                call = "step(metric) after each epoch" if config.scheduler.follows_metric else "step() after each step"
                text = f"scheduler.type={config.scheduler.type!r}: the module optimizes manually, so it must call "
                warn(f"{text}self.lr_schedulers().{call}.", ConfigWarning)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Add the place of each key in its file to a ConfigError."""
        try:
            yield
        except ConfigError as error:
            marked = [replace(p, mark=p.mark or self._written.mark(path_of(p.key))) for p in error.problems]
            raise ConfigError(marked) from error.__cause__

    # ---- in a run ----------------------------------------------------------------------------------------------

    def see(self, batch: Any, trainer: pl.Trainer, world: World, ranks: int, show: bool) -> None:
        """Resolve the keys about batches and compare them with the first batch. Collective for that batch.

        If a resumed run begins with the short last batch of an epoch, the next batch is used.

        Raises:
            ConfigError: on all ranks, if a key contradicts the batch.
        """
        given = {key: value for key in _BATCH if (value := getattr(self.config, key)) is not None}
        wanted = given or any((key,) in self.config.autos for key in _BATCH)
        if wanted and trainer.is_last_batch and trainer.fit_loop.epoch_loop.batch_idx > 0:
            return
        self.seen = True
        if not wanted:
            return
        try:  # Lightning's ``extract_batch_size`` would take the first of several sizes and warn once per process
            sizes = set(sizes_of(batch))
        except RecursionError:
            sizes = set()
        size = sizes.pop() if len(sizes) == 1 else None
        with world.agree("reading the configuration", ConfigError), self._marked():
            if size is not None:
                _check_batch(self.config, size, self._steps, ranks, "is the size of the first batch")
        if size is not None:
            config, found = resolve_batch(self.config, size, self._steps, ranks)
            self._use(config)
            show_values(found if show else [])
        elif given and show:
            names = " and ".join(f"{key}={value}" for key, value in given.items())
            text = f"{names} cannot be compared with the first batch: its size is ambiguous."
            warn(text, ConfigWarning)


def _quotient(total: int, name: str, factor: int, world: int, wanted: str) -> int:
    """``train_batch_size`` divided by another factor and the ranks."""
    if total % (factor * world):
        raise ConfigError.about(
            "train_batch_size",
            f"train_batch_size={total} is not a multiple of {name} * ranks = {factor} * {world} = {factor * world}, so "
            f"no {wanted} fits. Change one of them, or remove train_batch_size.",
        )
    return total // (factor * world)


class _Wish(NamedTuple):
    """A value that the configuration has for an attribute of the Trainer.

    Attributes:
        key: of ``keys.TRAINER``.
        value: for the Trainer.
        source: the key that it is written in, with the rest of the calculation.
        told: how messages tell of it.
        refusal: why the Trainer cannot have it, and the remedy; "" if it can.
    """

    key: str
    value: Any
    source: str
    told: str
    refusal: str


def _apply_to_trainer(
    config: ZeroConfig, trainer: pl.Trainer, module: pl.LightningModule, world: int
) -> tuple[list[Resolution], ZeroConfig]:
    """Set accumulation and clipping of the Trainer, unless the Trainer or the module decides them.

    Returns what was set, and the configuration with the accumulation that two batch sizes imply, as in DeepSpeed.

    Raises:
        ConfigError: the Trainer or the module contradicts the configured or implied values.
    """
    config, implied = _implied(config, world)
    wishes = [_accumulation(config, implied, trainer, module), _clipping(config, trainer, module)]
    problems = [Problem(w.source.partition(":")[0], f"{w.told}, but {w.refusal}.") for w in wishes if w and w.refusal]
    if problems:
        raise ConfigError(problems)
    rows = []
    for wish in filter(None, wishes):
        name = TRAINER[wish.key]
        rows.append(Resolution(f"Trainer.{name}, was {getattr(trainer, name)}", wish.value, wish.source))
        setattr(trainer, name, wish.value)
    return rows, config


def _implied(config: ZeroConfig, world: int) -> tuple[ZeroConfig, str]:
    """The configuration with the accumulation that two batch sizes imply, and how it was found; "" if it is written."""
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if config.micro_batches > 1 or config.gradient_accumulation_steps is not None or total is None or micro is None:
        return config, ""
    steps = _quotient(total, _BATCH[1], micro, world, "number of micro-batches per step")
    found = config.model_copy(update={"gradient_accumulation_steps": steps})
    return found, f"train_batch_size: {total} / ({micro} * {world} ranks)"


def _accumulation(config: ZeroConfig, implied: str, trainer: pl.Trainer, module: pl.LightningModule) -> _Wish | None:
    key = "gradient_accumulation_steps"
    wanted, current = config.gradient_accumulation_steps, trainer.accumulate_grad_batches
    inside = config.micro_batches > 1  # accumulated inside of a pipeline
    # ``_check_batch`` compares the sizes, and reports an implied number that differs from the Trainer's.
    if inside or wanted is None or wanted == current or (implied and current != 1):
        return None
    if current != 1:
        refusal = f"Trainer({TRAINER[key]}={current}) contradicts it. {_SAME}"
    elif not module.automatic_optimization:
        refusal = "the module optimizes manually, so it decides when to step. Remove the key"
    elif _accumulation_scheduler(trainer) is not None:
        refusal = "the Trainer has a GradientAccumulationScheduler, which decides it. Remove the key"
    else:
        refusal = ""
    told = f"{implied} = {wanted} micro-batches per step" if implied else f"{key}={wanted}"
    return _Wish(key, wanted, implied or key, told, refusal)


def _clipping(config: ZeroConfig, trainer: pl.Trainer, module: pl.LightningModule) -> _Wish | None:
    key, limit, current = "gradient_clipping", config.gradient_clipping, trainer.gradient_clip_val
    by_value = trainer.gradient_clip_algorithm == "value"
    if limit is None or (limit == (current or 0.0) and not (by_value and limit)):
        return None
    refusal = ""
    if current or by_value:
        algorithm = ", gradient_clip_algorithm='value'" if by_value else ""
        refusal = f"Trainer({TRAINER[key]}={current}{algorithm}) contradicts it. {_SAME}"
    elif not module.automatic_optimization:
        refusal = "the module optimizes manually. Call self.clip_gradients there, and remove the key"
    return _Wish(key, limit, key, f"{key}={limit} is the maximum norm", refusal)


def _accumulation_scheduler(trainer: pl.Trainer) -> GradientAccumulationScheduler | None:
    return next((c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)), None)  # type: ignore[attr-defined]


def _loaded(config: ZeroConfig) -> int | None:
    """The batch of the data loader that the configuration asks for."""
    micro = config.train_micro_batch_size_per_gpu
    return None if micro is None else micro * config.micro_batches


def _check_batch(config: ZeroConfig, micro: int, steps: int, world: int, origin: str) -> None:
    """Compare the configuration with batches of ``micro`` samples from the data loader.

    Raises:
        ConfigError: it asks for others.
    """
    problems, total, pieces = [], micro * steps * world, config.micro_batches
    key, given = "train_micro_batch_size_per_gpu", config.train_micro_batch_size_per_gpu
    if _loaded(config) not in (None, micro):
        remedy = "Give the data loader that batch_size, or remove the key."
        if pieces > 1:
            product = f"{given} * {pieces} micro-batches of the pipeline = {_loaded(config)}"
            remedy = f"Give the data loader batch_size={_loaded(config)} ({product}), or remove the key."
        problems.append(Problem(key, f"{key}={given}, but {micro} {origin}. {remedy}"))
    key, given = "train_batch_size", config.train_batch_size
    if given not in (None, total):
        product = f"micro-batch * accumulation * ranks = {micro} * {steps} * {world} = {total}"
        remedy = "Remove the key, or change one of them."
        problems.append(Problem(key, f"{key}={given}, but {product} (the micro-batch {origin}). {remedy}"))
    if problems:
        raise ConfigError(problems)


def _steps(trainer: pl.Trainer) -> int:
    """The optimizer steps of the run.

    Raises:
        ConfigError: the Trainer cannot tell.
    """
    key, needs = "scheduler.params.total_num_steps", 'scheduler.params: "auto" needs the length of the run'
    if _accumulation_scheduler(trainer) is not None and trainer.max_epochs != -1:
        raise ConfigError.about(
            key,
            f"{needs}, which is unknown with a GradientAccumulationScheduler. Write a number, or set "
            "Trainer(max_epochs=-1, max_steps=...).",
        )
    steps = trainer.estimated_stepping_batches
    if steps == float("inf") or steps < 1:
        raise ConfigError.about(
            key, f"{needs}, and the Trainer estimates {steps} steps. Set Trainer(max_steps=...), or write a number."
        )
    return int(steps)


# ---- values of the module ------------------------------------------------------------------------------------------


def find_value(module: pl.LightningModule, names: Sequence[str]) -> tuple[Any, str] | None:
    """The number or list of numbers under the first of ``names`` that exists, and its source; hparams first.

    Accepts numbers written as text and 0D tensors. Skips methods, layers, parameters and booleans of these names.

    Raises:
        ConfigError: the value is of another type, or a property raised.
    """
    for prefix, get in ((".hparams", module.hparams.get), ("", partial(getattr, module))):
        for name in names:
            place = f"{type(module).__name__}{prefix}.{name}"
            try:
                value = get(name, None)
            except Exception as error:  # a user's property or an interpolation of OmegaConf
                raise ConfigError(
                    f'{place} would resolve "auto", but reading it raised {type(error).__name__}: {error}. Correct it, '
                    'or write a value instead of "auto".'
                ) from error
            if value is None or isinstance(value, (bool, nn.Module, nn.Parameter)) or callable(value):
                continue
            if (number := _plain(value)) is None:
                raise ConfigError(
                    f'{place}={value!r:.80} would resolve "auto", but is not a number. Make it one, or write a value '
                    'instead of "auto".'
                )
            return number, place
    return None


def _plain(value: Any) -> Any:
    """Convert to a Python number or list of numbers; None if it is neither."""
    try:
        return _NUMBERS.validate_python(value.tolist() if hasattr(value, "tolist") else value)  # tensors, numpy scalars
    except (ValidationError, RuntimeError):  # NotImplementedError of a tensor on the meta device
        return None
