"""Checks the ``optimizer`` and ``scheduler`` blocks of a configuration, and builds what they describe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.names import OfRanks, alone
from lt_zero.optim import grouping
from lt_zero.optim.params import problem, shown
from lt_zero.optim.registry import Factory, optimizer_factory, scheduler_factory


def build_optimizer(kind: str, params: Mapping[str, Any], parameters: Iterable[Any]) -> Optimizer:
    """Build the optimizer that a configuration describes.

    Args:
        kind: ``optimizer.type``: a DeepSpeed name in any case, a class of ``torch.optim``, or the import path of a
            subclass of ``Optimizer``.
        params: ``optimizer.params``. Adam is AdamW with a weight decay of 0, as in DeepSpeed.
        parameters: the model's parameters, or dicts of parameter groups. For Muon pass ``muon_groups(model)``; of bare
            parameters it takes all matrices, including embeddings and output layers.

    Raises:
        ConfigError: lists all problems of the block.
    """
    known = optimizer_factory(kind)
    return cast(Optimizer, _make("optimizer", known, lambda: list(parameters), _checked("optimizer", known, params)))


def build_grouped(
    kind: str,
    params: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    named: Iterable[tuple[str, Parameter]],
    of_ranks: OfRanks = alone,
) -> Optimizer:
    """Build the optimizer that a configuration with ``optimizer.param_groups`` describes.

    Args:
        kind, params: as for ``build_optimizer``.
        entries: ``optimizer.param_groups``; see ``grouping.py``.
        named: all parameters of the model, ``named_parameters(remove_duplicate=False)``.
        of_ranks: as for ``configured_optimizer``.

    Raises:
        ConfigError: lists all problems of the block; or an entry matches no parameter.
    """
    known = optimizer_factory(kind)
    values = _checked("optimizer", known, params)
    groups = grouping.grouped(known, values, entries, named, of_ranks)
    return cast(Optimizer, _make("optimizer", known, lambda: groups, values))


def configured_optimizer(
    block: Any, module: nn.Module, given: Sequence[Any] | None = None, of_ranks: OfRanks = alone
) -> Optimizer:
    """The optimizer of the ``optimizer`` block for a module's parameters, or those (or groups) that are ``given``.

    ``of_ranks``: returns what all ranks have, if their modules are parts of one model: all get the groups of the whole
    model, of which some may be empty. Collective then.

    Raises:
        ConfigError: lists all problems of the block; or nothing is to be trained.
    """
    parameters: list[Any] = [p for p in module.parameters() if p.requires_grad]
    if not any(of_ranks(bool(parameters))):
        raise ConfigError(
            f"optimizer.type={block.type!r} has nothing to train: no parameter requires gradients. Unfreeze some."
        )
    if given is not None:
        return build_optimizer(block.type, block.params, given or [{"params": []}])
    if block.param_groups:
        named = module.named_parameters(remove_duplicate=False)
        return build_grouped(block.type, block.params, block.param_groups, named, of_ranks)
    if (divide := optimizer_factory(block.type).divide) is not None:
        parameters = divide(module, of_ranks)
    return build_optimizer(block.type, block.params, parameters or [{"params": []}])


def configured_scheduler(block: Any, optimizer: Optimizer) -> LRScheduler:
    """The schedule of the ``scheduler`` block; without ``warmup_max_lr`` it warms up to the optimizer's rates.

    Raises:
        ConfigError: lists all problems of the block.
    """
    params = dict(block.params)
    if "warmup_max_lr" in params and params["warmup_max_lr"] is None:
        params["warmup_max_lr"] = [group["lr"] for group in optimizer.param_groups]
    return build_scheduler(block.type, params, optimizer)


def build_scheduler(kind: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Build the scheduler that a configuration describes, to be stepped once per optimizer step.

    ``ReduceLROnPlateau`` is stepped at the end of each epoch, with the metric ``params["monitor"]``.

    Args:
        kind: ``scheduler.type``: one of DeepSpeed's five, or a class of ``torch.optim.lr_scheduler``.
        params: ``scheduler.params``.
        optimizer: the optimizer to schedule; gets the scheduler's first rates.

    Raises:
        ConfigError: lists all problems of the block.
    """
    known = scheduler_factory(kind)
    values = _checked("scheduler", known, params)
    if _can_try(known, values):
        _try("scheduler", known, _trial_optimizer, values)
    return cast(LRScheduler, _make("scheduler", known, lambda: optimizer, values))


def check_optimizer(kind: str, params: Mapping[str, Any], entries: Any = ()) -> list[Problem]:
    """All problems of an ``optimizer`` block, before there is a model; "auto" is valid where it can be resolved.

    Args:
        kind, params: as for ``build_optimizer``.
        entries: ``optimizer.param_groups``.
    """
    found = _problems("optimizer", optimizer_factory, kind, params, _trial_parameters)
    if entries and not any(problem.key == "optimizer.type" for problem in found):
        known = optimizer_factory(kind)
        values = _read("optimizer", known, params, auto=True)[0]
        found += grouping.check_groups(known, None if found else values, entries)
    return found


def check_scheduler(kind: str, params: Mapping[str, Any]) -> list[Problem]:
    """All problems of a ``scheduler`` block, before there is an optimizer; see ``check_optimizer``.

    Args:
        kind, params: as for ``build_scheduler``.
    """
    return _problems("scheduler", scheduler_factory, kind, params, _trial_optimizer)


def _problems(
    block: str, find: Callable[[Any], Factory], name: Any, params: Any, first: Callable[[], Any]
) -> list[Problem]:
    try:
        known = find(name)
        values, problems = _read(block, known, params, auto=True)
        if not problems and _can_try(known, values):
            _try(block, known, first, values)
    except ConfigError as error:
        return list(error.problems)
    return problems


def _can_try(known: Factory, values: Mapping[str, Any]) -> bool:
    """True if a trial can be built. Lists (unlike tuples) have one item per parameter group; a trial has no groups."""
    return (
        known.is_own
        and known.signature.required <= values.keys()
        and not any(isinstance(value, list) for value in values.values())
    )


def _try(block: str, known: Factory, first: Callable[[], Any], values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _make(block, known, first, values)
        if isinstance(made, LRScheduler):
            with _named(block, known, values):  # some validate their values only in ``step``
                made.step(0.0) if isinstance(made, ReduceLROnPlateau) else made.step()


def _trial_parameters() -> list[Parameter]:
    return [Parameter(torch.zeros(2, 2, device="cpu"))]


def _trial_optimizer() -> Optimizer:
    return AdamW(_trial_parameters())


def _checked(block: str, known: Factory, params: Any) -> dict[str, Any]:
    values, problems = _read(block, known, params, auto=False)
    if problems:
        raise ConfigError(problems)
    return values


def _make(block: str, known: Factory, first: Callable[[], Any], values: dict[str, Any]) -> Any:
    with _named(block, known, values):
        return known.make(first(), values)


@contextmanager
def _named(block: str, known: Factory, values: dict[str, Any]) -> Iterator[None]:
    """Turn an exception of a constructor into a problem of the block."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a third-party class may raise anything
        text, key = str(error), f"{block}.params"
        name = text.partition("=")[0]
        if name in known.signature.types:
            raise ConfigError([Problem(f"{key}.{name}", f"{key}.{text}")]) from error
        reason = text.rstrip(".") or type(error).__name__
        text = f"{key}={shown(values)} is rejected by {known.signature.name}: {reason}. Correct that value."
        raise ConfigError([Problem(key, text)]) from error


def _read(block: str, known: Factory, params: Any, auto: bool) -> tuple[dict[str, Any], list[Problem]]:
    """The converted values of a block, and their problems; see ``Signature.read``."""
    key = f"{block}.params"
    if not isinstance(params, (Mapping, type(None))):
        return {}, [problem(key, params, ": write a mapping of names to values.")]
    values, problems = known.signature.read(key, params or {}, auto)
    return values, problems + known.signature.missing(key, params or {})
