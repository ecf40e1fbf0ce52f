"""Resolves keys written "auto" from the Trainer, the module and its size.

The rules are those of Hugging Face's Trainer, for which most files with "auto" were written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lt_zero.common.errors import ConfigError, Problem, path_of
from lt_zero.config.document import Document
from lt_zero.config.keys import AUTO, TRAINER
from lt_zero.config.load import ZeroConfig, plain, validate


class Resolution(NamedTuple):
    """The value that an "auto" was resolved to, and its source."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class RunFacts:
    """Values known at set-up of a run."""

    trainer: Mapping[str, Any]  # values of the Trainer, by their keys here (keys.TRAINER)
    hidden: Callable[[], tuple[int, str]]  # the hidden size and how it was found; raises ConfigError
    # The value of the module or its hparams by the first of several names that is there, with its source; or None.
    named: Callable[[Sequence[str]], tuple[Any, str] | None]
    steps: Callable[[], int]  # optimizer steps of the run; may set up data loaders


def resolve(config: ZeroConfig, facts: RunFacts) -> tuple[ZeroConfig, list[Resolution]]:
    """Resolve all keys but batch sizes, which stay in ``autos`` until the first batch.

    Raises:
        ConfigError: names all keys that cannot be resolved.
    """
    found: list[Resolution] = []
    problems: list[Problem] = []
    batch = ("train_micro_batch_size_per_gpu", "train_batch_size")
    for key in (key for key in AUTO if path_of(key) in config.autos and key not in batch):
        try:
            found.append(Resolution(key, *_value(key, facts, config, found)))
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
    rules = {f"zero_optimization.{name}": rule for name, rule in _SIZES.items()}
    wanted = [key for key in rules if path_of(key) in config.autos]
    if not wanted:
        return config
    size, source = hidden()
    return _with(config, [Resolution(key, rules[key](size), source) for key in wanted])


def resolve_batch(config: ZeroConfig, micro: int, accumulation: int, world: int) -> tuple[ZeroConfig, list[Resolution]]:
    """Resolve the batch sizes from the first batch."""
    sizes = (
        Resolution("train_micro_batch_size_per_gpu", micro, "the first batch"),
        Resolution("train_batch_size", micro * accumulation * world, f"{micro} * {accumulation} * {world} ranks"),
    )
    found = [size for size in sizes if (size.key,) in config.autos]
    return _with(config, found), found


def _with(config: ZeroConfig, found: Sequence[Resolution]) -> ZeroConfig:
    """The configuration with these values; problems that they cause name their sources."""
    document = Document(plain(config))
    for path in config.autos:
        document.pop(path)
    for entry in found:
        document.put(path_of(entry.key), entry.value)
    made = validate(document, type(config))
    if made is None:
        problems = []
        for problem in document.problems:
            said = problem.message
            sources = [f"{e.key} was auto, {e.value} is from {e.source}" for e in found if e.key in said]
            problems.append(Problem(problem.key, f"{said} ({'; '.join(sources)})" if sources else said))
        raise ConfigError(problems)
    made._autos = config.autos - {path_of(entry.key) for entry in found}
    made._secret = config.secret
    return made


_SIZES: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: 9 * hidden * hidden // 10,
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
FROM_MODEL = frozenset(f"zero_optimization.{name}" for name in _SIZES)  # "auto" needs no Trainer


def _value(key: str, facts: RunFacts, config: ZeroConfig, before: Sequence[Resolution]) -> tuple[Any, str]:
    head, _, name = key.rpartition(".")
    if head == "zero_optimization" and name in _SIZES:
        hidden, source = facts.hidden()
        return _SIZES[name](hidden), f"hidden size {hidden}: {source}"
    if key in TRAINER:
        return facts.trainer[key], f"Trainer({TRAINER[key]})"
    if head == "optimizer.params":
        return _of_optimizer(name, facts)
    if name == "total_num_steps":
        return facts.steps(), "Trainer.estimated_stepping_batches"
    if name == "warmup_max_lr":
        return _warmup_rate(facts, config, before)
    if name == "warmup_num_steps":
        return _warmup_steps(facts)
    defaults = {"warmup_min_lr": 0.0, "device": "none", "stage3_gather_16bit_weights_on_model_save": False}
    return defaults[name], "Hugging Face's default"


def _of_optimizer(name: str, facts: RunFacts) -> tuple[Any, str]:
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
    names, default = {
        "betas": (("betas",), [0.9, 0.999]),
        "eps": (("eps", "adam_epsilon"), 1e-8),
        "weight_decay": (("weight_decay",), 0.0),
    }[name]
    return facts.named(names) or (default, "the default")


def _of_groups(config: ZeroConfig, facts: RunFacts, problems: list[Problem]) -> Iterator[Resolution]:
    """Resolve "auto" in ``optimizer.param_groups`` to the values in ``optimizer.params``."""
    for number, entry in enumerate(config.optimizer.param_groups if config.optimizer is not None else ()):
        place = f"optimizer.param_groups[{number}]"
        for name, value in entry.items():
            if not (isinstance(value, str) and value == "auto" and f"optimizer.params.{name}" in AUTO):
                continue  # other arguments are the user's own
            try:
                yield Resolution(f"{place}.{name}", *_of_optimizer(name, facts))
            except ConfigError as error:
                for problem in error.problems:
                    key, message = (t.replace("optimizer.params", place) for t in (problem.key, problem.message))
                    problems.append(Problem(key, message))


def _warmup_rate(facts: RunFacts, config: ZeroConfig, before: Sequence[Resolution]) -> tuple[Any, str]:
    params = {} if config.optimizer is None else config.optimizer.params
    if "muon_lr" in params or "adam_lr" in params:
        return None, "the rates of the optimizer's groups"
    if config.optimizer is not None and any("lr" in entry for entry in config.optimizer.param_groups):
        return None, "the lr of each parameter group"
    rate = next((e.value for e in before if e.key == "optimizer.params.lr"), params.get("lr"))
    if rate is None:
        return facts.named(("lr", "learning_rate")) or (None, "the optimizer's lr")
    return rate, "optimizer.params.lr"


def _warmup_steps(facts: RunFacts) -> tuple[int, str]:
    for names in (("warmup_steps", "warmup_num_steps", "num_warmup_steps"), ("warmup_ratio",)):
        if (found := facts.named(names)) is None:
            continue
        value, place = found
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{place}={value!r} is not a finite number. Correct it, or write warmup_num_steps.")
        if "warmup_ratio" in names:
            return max(1, int(value * facts.steps())), f"{place} * Trainer.estimated_stepping_batches"
        return max(1, int(value)), place
    return 1, "no `warmup_steps` or `warmup_ratio` in the module or its hparams"
