"""Optimizers and schedulers from the ``optimizer`` and ``scheduler`` blocks, and all that is wrong with such blocks."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.optim import grouping
from lt_zero.optim.param_types import Reader, shown
from lt_zero.optim.registry import REFUSED, Kind, optimizer_kind, scheduler_kind

# Keys that somebody else may fill in before anything is built.
AUTO = grouping.AUTO | {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"}


def build_optimizer(kind: str, params: Mapping[str, Any], parameters: Iterable[Any]) -> Optimizer:
    """Make the optimizer that a configuration describes.

    Args:
        kind: ``optimizer.type``: a name of DeepSpeed's in any case, a class of ``torch.optim``, or the import path of a
            subclass of ``Optimizer``.
        params: ``optimizer.params``. Adam is AdamW, with a weight decay of 0, as in DeepSpeed.
        parameters: of the model, or dicts of groups. For Muon ``muon_groups(model)``; of bare parameters it takes
            all matrices, embeddings and output layers too.

    Raises:
        ConfigError: all that is wrong with the block.
    """
    known = optimizer_kind(kind)
    return cast(Optimizer, _make("optimizer", known, lambda: list(parameters), _checked("optimizer", known, params)))


def build_grouped(
    kind: str,
    params: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    named: Iterable[tuple[str, Parameter]],
) -> Optimizer:
    """Make the optimizer that a configuration with ``optimizer.param_groups`` describes.

    Args:
        kind, params: as for ``build_optimizer``.
        entries: ``optimizer.param_groups``; see ``grouping.py``.
        named: all parameters of the model, ``named_parameters(remove_duplicate=False)``.

    Raises:
        ConfigError: all that is wrong with the block, or an entry fits no parameter.
    """
    known = optimizer_kind(kind)
    values = _checked("optimizer", known, params)
    made = grouping.grouped(known, values, entries, named)
    return cast(Optimizer, _make("optimizer", known, lambda: made, values))


def build_scheduler(kind: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Make the scheduler that a configuration describes, to be stepped once per optimizer step.

    ``ReduceLROnPlateau`` is stepped with ``params["monitor"]``, a metric, at the end of each epoch.

    Args:
        kind: ``scheduler.type``: one of DeepSpeed's five, or a class of ``torch.optim.lr_scheduler``.
        params: ``scheduler.params``.
        optimizer: to be scheduled; has the scheduler's first rates at once.

    Raises:
        ConfigError: all that is wrong with the block.
    """
    known = scheduler_kind(kind)
    values = _checked("scheduler", known, params)
    if _can_try(known, values):
        _try("scheduler", known, _trial_optimizer, values)
    return cast(LRScheduler, _make("scheduler", known, lambda: optimizer, values))


def check_optimizer(kind: str, params: Mapping[str, Any], entries: Any = ()) -> list[Problem]:
    """All that is wrong with an ``optimizer`` block, before there is a model; "auto" is right where it has a meaning.

    Args:
        kind, params: as for ``build_optimizer``.
        entries: ``optimizer.param_groups``.
    """
    found = _problems("optimizer", optimizer_kind, kind, params, _trial_parameters)
    if entries and not any(problem.key == "optimizer.type" for problem in found):
        known = optimizer_kind(kind)
        values = _read("optimizer", known, params, auto=True)[0]
        found += grouping.check_groups(known, None if found else values, entries)
    return found


def check_scheduler(kind: str, params: Mapping[str, Any]) -> list[Problem]:
    """All that is wrong with a ``scheduler`` block, before there is an optimizer; see ``check_optimizer``.

    Args:
        kind, params: as for ``build_scheduler``.
    """
    return _problems("scheduler", scheduler_kind, kind, params, _trial_optimizer)


def _problems(
    block: str, find: Callable[[Any], Kind], name: Any, params: Any, first: Callable[[], Any]
) -> list[Problem]:
    try:
        kind = find(name)
        values, problems = _read(block, kind, params, auto=True)
        if not problems and _can_try(kind, values):
            _try(block, kind, first, values)
    except ConfigError as error:
        return list(error.problems)
    return problems


def _can_try(kind: Kind, values: Mapping[str, Any]) -> bool:
    """Lists are for groups that a trial does not have; what has to be a list is a tuple by now."""
    return (
        kind.is_own
        and kind.signature.required <= values.keys()
        and not any(isinstance(value, list) for value in values.values())
    )


def _try(block: str, kind: Kind, first: Callable[[], Any], values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _make(block, kind, first, values)
        if isinstance(made, LRScheduler):
            with _named(block, kind, values):  # some look at their values only here
                made.step(0.0) if isinstance(made, ReduceLROnPlateau) else made.step()


def _trial_parameters() -> list[Parameter]:
    return [Parameter(torch.zeros(2, 2, device="cpu"))]


def _trial_optimizer() -> Optimizer:
    return AdamW(_trial_parameters())


def _checked(block: str, kind: Kind, params: Any) -> dict[str, Any]:
    values, problems = _read(block, kind, params, auto=False)
    if problems:
        raise ConfigError(problems)
    return values


def _make(block: str, kind: Kind, first: Callable[[], Any], values: dict[str, Any]) -> Any:
    with _named(block, kind, values):
        return kind.make(first(), values)


@contextmanager
def _named(block: str, kind: Kind, values: dict[str, Any]) -> Iterator[None]:
    """What a constructor raises becomes a problem of the block."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # classes of all origins
        text, place = str(error), f"{block}.params"
        name = text.partition("=")[0]
        if name in kind.signature.readers:
            raise ConfigError([Problem(f"{place}.{name}", f"{place}.{text}")]) from error
        said = text.rstrip(".") or type(error).__name__
        text = f"{place}={shown(values)} does not fit {kind.name}: {said}. Correct the value that this is about."
        raise ConfigError([Problem(place, text)]) from error


def _read(block: str, kind: Kind, params: Any, auto: bool) -> tuple[dict[str, Any], list[Problem]]:
    """The values, converted, and what is wrong with them.

    Args:
        auto: whether "auto" is still to be filled in; such values are left out.
    """
    place = f"{block}.params"
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        return {}, [Problem(place, f"{place}={shown(params)}: write a mapping of names to values.")]
    values: dict[str, Any] = {}
    problems, given = [], set()
    for key, value in params.items():
        key = key if isinstance(key, str) else shown(key)
        given.add(key)
        reader = kind.signature.readers.get(key) or REFUSED.get(key)
        if reader is None and not kind.signature.is_open:
            problems.append(Problem(f"{place}.{key}", _unknown(f"{place}.{key}", key, value, kind)))
        elif not (auto and key in AUTO and _is_auto(value)):
            try:
                values[key] = _take(reader, value, key)
            except ValueError as error:
                problems.append(Problem(f"{place}.{key}", f"{place}.{key}={shown(value)}: {error}."))
    for key in sorted(kind.signature.required - given):
        problems.append(Problem(f"{place}.{key}", f"{place}.{key} is missing, and {kind.name} needs it. Write it."))
    return values, problems


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _take(reader: Reader | None, value: Any, key: str) -> Any:
    """The value, converted; one without a reader as it is.

    Raises:
        ValueError: what to write instead.
    """
    if key in AUTO and _is_auto(value):
        raise ValueError("nothing fills it in here; write the value itself")
    return value if reader is None else reader(value)


def _unknown(place: str, key: str, value: Any, kind: Kind) -> str:
    names = sorted(kind.signature.readers)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Remove it; there are {', '.join(names)}."
    return f"{place}={shown(value)} is not a parameter of {kind.name}. {hint}"
