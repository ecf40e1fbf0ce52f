"""Parameter groups by parameter name: ``optimizer.param_groups``, and ``param_groups`` for code.

Note [Groups]
    Each entry makes one group, in order; a last group takes the parameters that no entry matches. A parameter goes to
    the first entry with a pattern for one of its names (tied parameters have several). Empty groups stay, so that a
    schedule with one value per group addresses the same groups for every model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.compat import clean_name
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.names import OfRanks, alone
from lt_zero.optim.params import Flag, Signature, problem, shown
from lt_zero.optim.registry import Factory

if TYPE_CHECKING:
    from rich.table import Table

REST = "rest"
_NOT_PER_GROUP = ("initial_accumulator_value",)  # Adagrad copies it into groups, but reads the constructor's argument
_MAX_NAME = 40  # characters of a generated group name


@dataclass(frozen=True)
class GroupEntry:
    """One entry of ``optimizer.param_groups``.

    Attributes:
        key: for messages: ``optimizer.param_groups[0]``.
        patterns: shell patterns for parameter names, case-sensitive.
        options: arguments of the optimizer for this group.
        name: as written.
        optional: whether it may match nothing.
    """

    key: str
    patterns: tuple[str, ...]
    options: dict[str, Any]
    name: str | None
    optional: bool


def param_groups(
    named: Iterable[tuple[str, Parameter]], entries: Sequence[Mapping[str, Any]], place: str = "param_groups"
) -> list[dict[str, Any]]:
    """Groups for any ``torch.optim.Optimizer``, chosen by name.

    >>> model = torch.nn.Linear(2, 2)
    >>> groups = param_groups(model.named_parameters(), [{"match": "*bias", "weight_decay": 0.0}])
    >>> [(group["name"], len(group["params"])) for group in groups]
    [('bias', 1), ('rest', 1)]

    Args:
        named: ``module.named_parameters()``; with ``remove_duplicate=False`` tied parameters match by all their names.
        entries: ``match`` is a shell pattern for full names, several joined by ``|``, or a list of them; ``name`` is
            shown by ``LearningRateMonitor``; ``optional`` allows that nothing matches. Other keys become options of
            the group. See Note [Groups].
        place: how messages name ``entries``.

    Raises:
        ConfigError: an entry is wrong, or a pattern matches nothing.
    """
    found, problems = _entries(place, entries)
    if problems:
        raise ConfigError(problems)
    return _grouped(found, named)


def grouped(
    factory: Factory,
    params: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    named: Iterable[tuple[str, Parameter]],
    of_ranks: OfRanks = alone,
) -> list[dict[str, Any]]:
    """``param_groups`` of a configuration, with the options checked against the optimizer.

    The group of an entry holds all parameters it matches, frozen or not. The last group holds trainable parameters
    only: frozen ones would get master weights.

    Args:
        factory, params: the optimizer and its checked parameters.
        entries: ``optimizer.param_groups``, without "auto".
        named: all parameters by all their names.
        of_ranks: as for ``configured_optimizer``.

    Raises:
        ConfigError: lists all problems.
    """
    found, problems = _read(factory, params, entries, auto=False)
    if problems:
        raise ConfigError(problems)
    groups = _grouped(found, named, of_ranks)
    groups[-1]["params"] = [p for p in groups[-1]["params"] if p.requires_grad]
    return groups


def check_groups(factory: Factory, params: Mapping[str, Any] | None, entries: Any) -> list[Problem]:
    """All problems of ``optimizer.param_groups``, before there is a model.

    Args:
        factory: of the optimizer.
        params: its checked parameters; None if they have problems themselves.
        entries: as written; "auto" is valid where it can be resolved.
    """
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
        return []  # the schema reports it
    return _read(factory, params, entries, auto=True)[1]


def table(optimizer: Optimizer) -> Table:
    """The groups of ``optimizer`` with their parameter counts, rates and decays."""
    from rich.table import Table

    found = Table(title="Parameter groups")
    found.add_column("group", overflow="fold")
    for column in ("parameters", "elements", "lr", "weight decay"):
        found.add_column(column, justify="right")
    for group in optimizer.param_groups:
        params = group["params"]
        frozen = sum(not p.requires_grad for p in params)
        numbers = [f"{float(group[key]):g}" if key in group else "-" for key in ("lr", "weight_decay")]
        count = f"{len(params)} ({frozen} frozen)" if frozen else str(len(params))
        found.add_row(group["name"], count, f"{sum(p.numel() for p in params):,}", *numbers)
    return found


# ---- entries ---------------------------------------------------------------------------------------------------------


def _patterns(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    remedy = "write a pattern for parameter names, such as *.bias, several joined by |, or a list of patterns"
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(remedy)
    found = tuple(dict.fromkeys(part.strip() for text in texts for part in text.split("|")))
    if not found or "" in found:
        raise ValueError(remedy)
    return found


# The keys of an entry besides options of the group.
_ENTRY = Signature(
    "param_groups",
    {
        "match": Annotated[Any, BeforeValidator(_patterns)],
        "name": Annotated[str, Field(pattern=r"\S", description="a name")],
        "optional": Flag,
    },
    frozenset(["match"]),
)


def _entries(place: str, entries: Sequence[Mapping[str, Any]]) -> tuple[list[GroupEntry], list[Problem]]:
    """The entries with their options as written, and the problems of all keys but the options."""
    found: list[GroupEntry] = []
    problems: list[Problem] = []
    names: set[str] = set()
    for number, entry in enumerate(entries):
        entry_key = f"{place}[{number}]"
        values, wrong = _ENTRY.read(entry_key, {key: entry[key] for key in _ENTRY.types if key in entry}, auto=False)
        problems += wrong
        if "match" not in entry:
            text = f"{entry_key}.match is missing. Write patterns for parameter names, such as *.bias."
            problems.append(Problem(f"{entry_key}.match", text))
        if (name := values.get("name")) is not None:
            if name in names or name == REST:
                problems.append(problem(f"{entry_key}.name", name, ": another group has this name. Write another."))
            names.add(name)
        options = {
            key if isinstance(key, str) else shown(key): v for key, v in entry.items() if key not in _ENTRY.types
        }
        found.append(GroupEntry(entry_key, values.get("match") or (), options, name, bool(values.get("optional"))))
    return found, problems


def _read(
    factory: Factory, params: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]], auto: bool
) -> tuple[list[GroupEntry], list[Problem]]:
    """The entries with converted options, and all their problems."""
    place = "optimizer.param_groups"
    if factory.ungrouped:
        return [], [Problem(place, f"{place}: {factory.ungrouped}")]
    found, problems = _entries(place, entries)
    read: list[GroupEntry] = []
    known = {*factory.signature.types, *_ENTRY.types}.difference(_NOT_PER_GROUP)
    for entry in found:
        fixed = [name for name in _NOT_PER_GROUP if name in entry.options and name in factory.signature.types]
        wrong = [_not_per_group(f"{entry.key}.{name}", entry.options[name], factory) for name in fixed]
        options = {name: value for name, value in entry.options.items() if name not in fixed}
        options, others = factory.signature.read(entry.key, options, auto, known)
        wrong += others
        if params is not None and factory.is_own and not wrong:
            wrong = _try(factory, params, options, entry.key)
        problems += wrong
        read.append(replace(entry, options=options))
    return read, problems


def _try(factory: Factory, params: Mapping[str, Any], options: dict[str, Any], entry_key: str) -> list[Problem]:
    """The problems of building an optimizer with these options for all parameters: torch does not check groups."""
    try:
        trial = factory.make([Parameter(torch.zeros(2, 2, device="cpu"))], {**params, **options})
    except Exception as error:  # a class's own checks
        reason = str(error).rstrip(".").replace("optimizer.params.", f"{entry_key}.")
        return [problem(entry_key, options, f" is rejected by {factory.signature.name}: {reason}. Correct that value.")]
    ignored = [name for name in options if name not in trial.defaults]
    return [_not_per_group(f"{entry_key}.{name}", options[name], factory) for name in ignored]


def _not_per_group(key: str, value: Any, factory: Factory) -> Problem:
    return problem(key, value, f" applies to all groups of {factory.signature.name}. Write it in optimizer.params.")


# ---- matching --------------------------------------------------------------------------------------------------------


def _grouped(
    entries: Sequence[GroupEntry], named: Iterable[tuple[str, Parameter]], of_ranks: OfRanks = alone
) -> list[dict[str, Any]]:
    """See Note [Groups].

    Raises:
        ConfigError: an entry, or one of its patterns, matches nothing and is not optional.
    """
    parameters: dict[int, tuple[Parameter, list[str]]] = {}
    for name, parameter in named:
        parameters.setdefault(id(parameter), (parameter, []))[1].append(clean_name(name))
    members: list[list[Parameter]] = [[] for _ in range(len(entries) + 1)]
    matched: set[tuple[int, str]] = set()
    for parameter, names in parameters.values():
        fits = {(i, p) for i, e in enumerate(entries) for p in e.patterns if any(fnmatchcase(n, p) for n in names)}
        matched |= fits
        members[min((number for number, _ in fits), default=len(entries))].append(parameter)
    mine = matched, [name for _, names in parameters.values() for name in names], [bool(some) for some in members]
    matches, every, filled = zip(*of_ranks(mine), strict=True)
    matched, all_names = set().union(*matches), list(dict.fromkeys(name for names in every for name in names))
    problems = []
    for number, entry in enumerate(entries):
        if entry.optional:
            continue
        unmatched = [pattern for pattern in entry.patterns if (number, pattern) not in matched]
        problems += [_no_match(entry, pattern, all_names) for pattern in unmatched]
        if not unmatched and not any(has[number] for has in filled):
            text = ": earlier entries take all parameters it matches. Move it up, remove it, or write optional: true."
            problems.append(problem(f"{entry.key}.match", "|".join(entry.patterns), text))
    if problems:
        raise ConfigError(problems)
    rows = zip(_names(entries), members, [*(entry.options for entry in entries), {}], strict=True)
    return [{"name": name, "params": params, **options} for name, params, options in rows]


def _no_match(entry: GroupEntry, pattern: str, names: Sequence[str]) -> Problem:
    similar = _similar(pattern, names)
    hint = f"Similar names: {', '.join(similar)}." if similar else f"Names are, for example, {', '.join(names[:3])}."
    text = f"{entry.key}.match: {pattern!r} matches no parameter. {hint} Correct it, or write optional: true."
    return Problem(f"{entry.key}.match", text)


def _similar(pattern: str, names: Sequence[str]) -> list[str]:
    """Names whose last parts resemble the pattern without its wildcards, one for each such suffix."""
    plain = re.sub(r"[*?\[\]!]+", "", pattern).strip(".")
    parts = plain.count(".") + 1
    inner = {part: name for name in reversed(names) for part in name.split(".")} if parts == 1 else {}
    ends = {**inner, **{".".join(name.split(".")[-parts:]): name for name in reversed(names)}}
    return list(dict.fromkeys(ends[end] for end in difflib.get_close_matches(plain, ends, n=3)))


def _names(entries: Sequence[GroupEntry]) -> list[str]:
    """A unique name for each group: the written one, else one made of the patterns."""
    taken = {REST, *(entry.name for entry in entries)}
    names: list[str] = []
    for number, entry in enumerate(entries):
        name = entry.name
        if name is None:
            parts = (re.sub(r"[^\w.]+", "_", pattern).strip("._") for pattern in entry.patterns)
            name = "_".join(filter(None, parts))[:_MAX_NAME] or f"group{number}"
            name = f"{name}-{number}" if name in taken else name
        taken.add(name)
        names.append(name)
    return [*names, REST]
