"""Resolves keys written "auto" from the Trainer, the module and its size.

The rules are those of Hugging Face's Trainer, for which most files with "auto" were written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lt_zero.common.errors import ConfigError, Problem, dotted, path_of
from lt_zero.config.document import Document
from lt_zero.config.keys import AUTO
from lt_zero.config.load import ZeroConfig, plain, validate

_BATCH = ("train_micro_batch_size_per_gpu", "train_batch_size")


class Resolution(NamedTuple):
    """The value that an "auto" was resolved to, and its source."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class Facts:
    """Values known at set-up of a run.

    Attributes:
        accumulation: micro-batches per optimizer step, of the Trainer.
        clipping: norm limit of the Trainer, 0 without one.
        hidden: finds the hidden size and how it was found; raises ConfigError.
        named: finds a value of the module or its hparams by the first of several names, with its source; or None.
        steps: optimizer steps of the run; may set up data loaders.
    """

    accumulation: int
    clipping: float
    hidden: Callable[[], tuple[int, str]]
    named: Callable[[Sequence[str]], tuple[Any, str] | None]
    steps: Callable[[], int]


def resolve(config: ZeroConfig, facts: Facts) -> tuple[ZeroConfig, list[Resolution]]:
    """Resolve all keys but batch sizes, which stay in ``autos`` until the first batch.

    Raises:
        ConfigError: names all keys that cannot be resolved.
    """
    found: list[Resolution] = []
    problems: list[Problem] = []
    order = list(AUTO)
    for path in sorted(config.autos, key=lambda p: order.index(dotted(p))):
        if dotted(path) in _BATCH:
            continue
        try:
            found.append(Resolution(dotted(path), *_value(dotted(path), facts, config, found)))
        except ConfigError as error:
            problems += error.problems
    found += _of_groups(config, facts, problems)
    if problems:
        raise ConfigError(problems)
    return _with(config, found), found


def resolve_sizes(config: ZeroConfig, hidden: Callable[[], tuple[int, str]]) -> ZeroConfig:
    """Resolve the sizes that depend on the model only; other keys stay in ``autos``.

    Raises:
        ConfigError: the model has no hidden size.
    """
    found = []
    for name, rule in _SIZES.items():
        if ("zero_optimization", name) in config.autos:
            size, source = hidden()
            found.append(Resolution(f"zero_optimization.{name}", rule(size), source))
    return _with(config, found) if found else config


def resolve_batch(config: ZeroConfig, micro: int, accumulation: int, world: int) -> tuple[ZeroConfig, list[Resolution]]:
    """Resolve the batch sizes from the first batch."""
    values = {
        "train_micro_batch_size_per_gpu": (micro, "the first batch"),
        "train_batch_size": (micro * accumulation * world, f"{micro} * {accumulation} * {world} ranks"),
    }
    found = [Resolution(key, *values[key]) for key in _BATCH if (key,) in config.autos]
    return _with(config, found), found


def _with(config: ZeroConfig, found: Sequence[Resolution]) -> ZeroConfig:
    """The configuration with these values; problems that they cause name their sources."""
    document = Document(plain(config))
    for path in config.autos:
        document.pop(path)
    for entry in found:
        document.put(path_of(entry.key), entry.value)
    made = validate(document, ZeroConfig)
    if made is None:
        problems = []
        for problem in document.problems:
            said = problem.message
            sources = [f"{e.key} was auto, {e.value} is from {e.source}" for e in found if e.key in said]
            problems.append(Problem(problem.key, f"{said} ({'; '.join(sources)})" if sources else said))
        raise ConfigError(problems)
    made._autos = config.autos - {path_of(entry.key) for entry in found}
    return made


def _value(key: str, facts: Facts, config: ZeroConfig, before: Sequence[Resolution]) -> tuple[Any, str]:
    head, _, name = key.rpartition(".")
    if head == "zero_optimization" and name in _SIZES:
        hidden, source = facts.hidden()
        return _SIZES[name](hidden), f"hidden size {hidden}: {source}"
    if key == "gradient_accumulation_steps":
        return facts.accumulation, "Trainer(accumulate_grad_batches)"
    if key == "gradient_clipping":
        return facts.clipping, "Trainer(gradient_clip_val)"
    if head == "optimizer.params":
        return _of_optimizer(name, facts)
    if head == "scheduler.params":
        return _of_schedule(name, facts, config, before)
    # "device" of an offload block, or stage3_gather_16bit_weights_on_model_save
    return "none" if name == "device" else False, "Hugging Face's default"


_SIZES: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: 9 * hidden * hidden // 10,
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
_DEFAULT = "the default"


def _of_optimizer(name: str, facts: Facts) -> tuple[Any, str]:
    if name == "lr":
        rate = facts.named(("lr", "learning_rate"))
        if rate is None:
            text = 'optimizer.params.lr="auto", and the module has neither `lr` nor `learning_rate`, '
            remedy = "nor have its hparams. Write a number, or set one of them."
            raise ConfigError.about("optimizer.params.lr", text + remedy)
        return rate
    if name == "betas":
        first, second = facts.named(("adam_beta1",)), facts.named(("adam_beta2",))
        if first is not None and second is not None:
            return [first[0], second[0]], f"{first[1]}, {second[1]}"
        return facts.named(("betas",)) or ([0.9, 0.999], _DEFAULT)
    if name == "eps":
        return facts.named(("eps", "adam_epsilon")) or (1e-8, _DEFAULT)
    return facts.named(("weight_decay",)) or (0.0, _DEFAULT)


def _of_groups(config: ZeroConfig, facts: Facts, problems: list[Problem]) -> Iterator[Resolution]:
    """Resolve "auto" in ``optimizer.param_groups`` to the values in ``optimizer.params``."""
    for number, entry in enumerate(config.optimizer.param_groups if config.optimizer is not None else ()):
        place = f"optimizer.param_groups[{number}]"
        for name in (key for key, value in entry.items() if isinstance(value, str) and value == "auto"):
            if f"optimizer.params.{name}" not in AUTO:
                continue  # a user's own argument
            try:
                yield Resolution(f"{place}.{name}", *_of_optimizer(name, facts))
            except ConfigError as error:
                for problem in error.problems:
                    key, message = (t.replace("optimizer.params", place) for t in (problem.key, problem.message))
                    problems.append(Problem(key, message))


def _of_schedule(name: str, facts: Facts, config: ZeroConfig, before: Sequence[Resolution]) -> tuple[Any, str]:
    if name == "warmup_min_lr":
        return 0.0, "Hugging Face's default"
    if name == "total_num_steps":
        return facts.steps(), "Trainer.estimated_stepping_batches"
    if name == "warmup_max_lr":
        params = {} if config.optimizer is None else config.optimizer.params
        if "muon_lr" in params or "adam_lr" in params:
            return None, "the rates of the optimizer's groups"
        if config.optimizer is not None and any("lr" in entry for entry in config.optimizer.param_groups):
            return None, "the lr of each parameter group"
        rate = next((e.value for e in before if e.key == "optimizer.params.lr"), params.get("lr"))
        if rate is None:
            return facts.named(("lr", "learning_rate")) or (None, "the optimizer's lr")
        return rate, "optimizer.params.lr"
    if (steps := facts.named(("warmup_steps", "warmup_num_steps", "num_warmup_steps"))) is not None:
        return max(1, int(_number(steps))), steps[1]
    if (ratio := facts.named(("warmup_ratio",))) is not None:
        return max(1, int(_number(ratio) * facts.steps())), f"{ratio[1]} * Trainer.estimated_stepping_batches"
    return 1, "no `warmup_steps` or `warmup_ratio` in the module or its hparams"


def _number(named: tuple[Any, str]) -> float:
    value, place = named
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{place}={value!r} is not a finite number. Correct it, or write warmup_num_steps.")
    return value
