"""Parameter groups by the names of parameters: ``optimizer.param_groups``, and the same for code.

Note [Groups]
    There is one group per entry, in their order, and one more, the last, for what no entry matches. A parameter goes to
    the first entry that has a pattern for one of its names (a tied one has several). Groups without parameters stay, so
    that a schedule with one value per group means the same groups whatever the model is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.compat import clean_name
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.optim.param_types import Reader, flag, shown
from lt_zero.optim.registry import Kind

if TYPE_CHECKING:
    from rich.table import Table

AUTO = frozenset(["lr", "betas", "eps", "weight_decay"])  # that somebody else may fill in, here and in optimizer.params
REST = "rest"
_OWN = ("match", "name", "optional")
_ONCE = ("initial_accumulator_value",)  # torch's Adagrad has it in its groups, and reads what the constructor got
_LONGEST = 40  # characters of a name that is made


@dataclass(frozen=True)
class Entry:
    """One of ``optimizer.param_groups``.

    Attributes:
        place: of it, for messages.
        patterns: of names of parameters, as in a shell; case counts.
        options: arguments of the optimizer for this group.
        name: as written.
        optional: whether it may match nothing.
    """

    place: str
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
        entries: ``match`` is a shell pattern over full names, several joined by ``|``, or a list of them. Other keys
            become the group's, but for ``name``, which ``LearningRateMonitor`` shows, and ``optional``, which allows
            that nothing matches. See Note [Groups].
        place: how messages name ``entries``.

    Raises:
        ConfigError: an entry is wrong, or a pattern matches nothing.
    """
    found, problems = _entries(place, entries)
    if problems:
        raise ConfigError(problems)
    return _grouped(found, named)


def grouped(
    kind: Kind, params: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, Parameter]]
) -> list[dict[str, Any]]:
    """``param_groups`` of the configuration, with options that the optimizer knows.

    What an entry matches is in its group, frozen or not. The last group has only what is trained, as the optimizer has
    without groups: a frozen model in it would have master weights.

    Args:
        kind, params: of the optimizer; checked.
        entries: ``optimizer.param_groups``, without "auto".
        named: all parameters by all their names.

    Raises:
        ConfigError: all that is wrong.
    """
    found, problems = _read(kind, params, entries, auto=False)
    if problems:
        raise ConfigError(problems)
    groups = _grouped(found, named)
    groups[-1]["params"] = [p for p in groups[-1]["params"] if p.requires_grad]
    return groups


def check_groups(kind: Kind, params: Mapping[str, Any] | None, entries: Any) -> list[Problem]:
    """All that is wrong with ``optimizer.param_groups``, before there is a model.

    Args:
        kind: of the optimizer.
        params: its checked parameters; None: they are wrong themselves.
        entries: as written; "auto" is right where it has a meaning.
    """
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
        return []  # the schema says it
    return _read(kind, params, entries, auto=True)[1]


def table(optimizer: Optimizer) -> Table:
    """Which parameters each group has, and its rate and decay, as they are now."""
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


def _entries(place: str, entries: Sequence[Mapping[str, Any]]) -> tuple[list[Entry], list[Problem]]:
    """The entries with their options as written, and what is wrong with all but the options."""
    found: list[Entry] = []
    problems: list[Problem] = []
    names: set[str] = set()
    for number, entry in enumerate(entries):
        here = f"{place}[{number}]"
        values: dict[str, Any] = {}
        for key, read in (("match", _patterns), ("name", _name), ("optional", flag)):
            try:
                values[key] = read(entry[key]) if key in entry else None
            except ValueError as error:
                problems.append(_problem(f"{here}.{key}", entry[key], f": {error}."))
        if "match" not in entry:
            text = f"{here}.match is missing: patterns of names of parameters, such as *.bias. Write it."
            problems.append(Problem(f"{here}.match", text))
        if (name := values.get("name")) is not None:
            if name in names or name == REST:
                problems.append(_problem(f"{here}.name", name, ": another group has this name. Write another."))
            names.add(name)
        options = {key if isinstance(key, str) else shown(key): v for key, v in entry.items() if key not in _OWN}
        found.append(Entry(here, values.get("match") or (), options, name, bool(values.get("optional"))))
    return found, problems


def _patterns(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    wanted = "write a pattern of names of parameters, such as *.bias, several joined by |, or a list of patterns"
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(wanted)
    found = tuple(dict.fromkeys(part.strip() for text in texts for part in text.split("|")))
    if not found or "" in found:
        raise ValueError(wanted)
    return found


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("write some text")
    return value


def _read(
    kind: Kind, params: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]], auto: bool
) -> tuple[list[Entry], list[Problem]]:
    """The entries with their options converted, and all that is wrong with them."""
    place = "optimizer.param_groups"
    if kind.ungrouped:
        return [], [Problem(place, f"{place}: {kind.ungrouped}")]
    found, problems = _entries(place, entries)
    known = {key: reader for key, reader in kind.signature.readers.items() if key not in _ONCE}
    read: list[Entry] = []
    for entry in found:
        options: dict[str, Any] = {}
        before = len(problems)
        for key, value in entry.options.items():
            here = f"{entry.place}.{key}"
            if key not in known and (key in kind.signature.readers or not kind.signature.is_open):
                problems.append(_unknown(here, key, value, kind))
                continue
            if auto and key in AUTO and isinstance(value, str) and value == "auto":
                continue
            try:
                options[key] = _take(known.get(key), key, value)
            except ValueError as error:
                problems.append(_problem(here, value, f": {error}."))
        if params is not None and kind.is_own and len(problems) == before:
            problems += _tried(kind, params, options, entry.place)
        read.append(Entry(entry.place, entry.patterns, options, entry.name, entry.optional))
    return read, problems


def _take(reader: Reader | None, key: str, value: Any) -> Any:
    if key in AUTO and isinstance(value, str) and value == "auto":
        raise ValueError("nothing fills it in here; write the value itself")
    return value if reader is None else reader(value)


def _tried(kind: Kind, params: Mapping[str, Any], options: dict[str, Any], place: str) -> list[Problem]:
    """What an optimizer says that has these options for all it steps: torch does not look at those of groups."""
    try:
        made = kind.make([Parameter(torch.zeros(2, 2, device="cpu"))], {**params, **options})
    except Exception as error:  # a class's own checks
        said = str(error).rstrip(".").replace("optimizer.params.", f"{place}.")
        return [_problem(place, options, f" does not fit {kind.name}: {said}. Correct the value that this is about.")]
    whole = [key for key in options if key not in made.defaults]
    text = f" is for all groups of {kind.name} at once. Write it in optimizer.params."
    return [_problem(f"{place}.{key}", options[key], text) for key in whole]


def _unknown(place: str, key: str, value: Any, kind: Kind) -> Problem:
    if key in _ONCE:
        return _problem(place, value, f" is for all groups of {kind.name} at once. Write it in optimizer.params.")
    names = sorted((set(kind.signature.readers) - set(_ONCE)) | set(_OWN))
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Remove it; there are {', '.join(names)}."
    return _problem(place, value, f" is not a parameter of {kind.name}. {hint}")


def _problem(place: str, value: Any, text: str) -> Problem:
    return Problem(place, f"{place}={shown(value)}{text}")


# ---- matching --------------------------------------------------------------------------------------------------------


def _grouped(entries: Sequence[Entry], named: Iterable[tuple[str, Parameter]]) -> list[dict[str, Any]]:
    """See Note [Groups].

    Raises:
        ConfigError: an entry, or one of its patterns, matches nothing and is not optional.
    """
    parameters: dict[int, tuple[Parameter, list[str]]] = {}
    for name, parameter in named:
        parameters.setdefault(id(parameter), (parameter, []))[1].append(clean_name(name))
    members: list[list[Parameter]] = [[] for _ in range(len(entries) + 1)]
    hit: set[tuple[int, str]] = set()
    for parameter, names in parameters.values():
        fits = {(i, p) for i, e in enumerate(entries) for p in e.patterns if any(fnmatchcase(n, p) for n in names)}
        hit |= fits
        members[min((number for number, _ in fits), default=len(entries))].append(parameter)
    every = [name for _, names in parameters.values() for name in names]
    problems = []
    for number, entry in enumerate(entries):
        if entry.optional:
            continue
        missed = [pattern for pattern in entry.patterns if (number, pattern) not in hit]
        problems += [_no_match(entry, pattern, every) for pattern in missed]
        if not missed and not members[number]:
            text = ": groups before it have all that it matches. Move it up, or remove it, or write optional: true."
            problems.append(_problem(f"{entry.place}.match", "|".join(entry.patterns), text))
    if problems:
        raise ConfigError(problems)
    options = [*(entry.options for entry in entries), {}]
    parts = zip(_names(entries), members, options, strict=True)
    return [{"name": name, "params": params, **some} for name, params, some in parts]


def _no_match(entry: Entry, pattern: str, names: Sequence[str]) -> Problem:
    near = _near(pattern, names)
    hint = f" Near names are {', '.join(near)}." if near else f" Names are such as {', '.join(names[:3])}."
    text = f"{entry.place}.match: {pattern!r} matches no parameter.{hint} Correct it, or write optional: true."
    return Problem(f"{entry.place}.match", text)


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Names whose ends are like the pattern without its signs, one for each such end."""
    plain = re.sub(r"[*?\[\]!]+", "", pattern).strip(".")
    parts = plain.count(".") + 1
    inner = {part: name for name in reversed(names) for part in name.split(".")} if parts == 1 else {}
    ends = {**inner, **{".".join(name.split(".")[-parts:]): name for name in reversed(names)}}
    return list(dict.fromkeys(ends[end] for end in difflib.get_close_matches(plain, ends, n=3)))


def _names(entries: Sequence[Entry]) -> list[str]:
    """One for each group, all different: what is written, else letters of the patterns."""
    taken = {REST, *(entry.name for entry in entries)}
    names: list[str] = []
    for number, entry in enumerate(entries):
        name = entry.name
        if name is None:
            words = (re.sub(r"[^\w.]+", "_", pattern).strip("._") for pattern in entry.patterns)
            name = "_".join(filter(None, words))[:_LONGEST] or f"group{number}"
            name = f"{name}-{number}" if name in taken else name
        taken.add(name)
        names.append(name)
    return [*names, REST]
