"""Makes a ``ZeroConfig``: files, overrides, old spellings, key statuses, values, rules.

All problems are collected and raised as one ``ConfigError``.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from lt_zero.common.errors import ConfigError, Mark, Path, Problem, dotted, path_of
from lt_zero.config import overrides as changes
from lt_zero.config.classify_keys import classify_keys
from lt_zero.config.document import MISSING, Notice, Tree
from lt_zero.config.error_messages import message_of
from lt_zero.config.fields import Block, thawed
from lt_zero.config.read import files
from lt_zero.config.read.interpolation import resolve
from lt_zero.config.redact import Mask
from lt_zero.config.rename_old_keys import rename_old_keys
from lt_zero.config.rules import inactive
from lt_zero.config.schema import ZeroConfig
from lt_zero.optim.from_config import check_optimizer, check_scheduler

Given = ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None
_RANKS = (  # rank of the process and of the node; some launchers set only one
    *("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)


class ConfigWarning(UserWarning):
    """A key was renamed or has no effect."""


@dataclass(frozen=True)
class Loaded:
    """A configuration with its problems and notices.

    Attributes:
        config: validated; None if there are problems.
        problems: in the order of the file.
        notices: about keys that were accepted.
        written: keys and values as written, after overrides and interpolations.
        marks: their places.
        secret: values that must not be shown.
    """

    config: ZeroConfig | None
    problems: Sequence[Problem]
    notices: Sequence[Notice]
    written: Mapping[str, Any]
    marks: Mapping[Path, Mark]
    secret: frozenset[Path] = field(default=frozenset())

    def hides(self, path: Path) -> bool:
        """Whether the value at ``path`` must not be shown."""
        return any(path[:length] in self.secret for length in range(1, len(path) + 1))

    def announce(self) -> None:
        """Warn of each notice, on the first rank only."""
        if all(os.environ.get(name, "0") in ("0", "") for name in _RANKS):
            level = _level_outside()
            for notice in self.notices:
                if notice.kind != "inactive":
                    warnings.warn(str(notice), ConfigWarning, stacklevel=level)
            idle: dict[str, list[str]] = {}
            for notice in self.notices:
                if notice.kind == "inactive":
                    idle.setdefault(notice.message, []).append(notice.key)
            if idle:
                told = ", ".join(f"{', '.join(keys)} ({why})" for why, keys in idle.items())
                warnings.warn(f"These keys have no effect here: {told}.", ConfigWarning, stacklevel=level)


def _level_outside() -> int:
    """The ``stacklevel``, as seen by the caller, of the code that called into this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "lt_zero":
        level, frame = level + 1, frame.f_back
    return level


def load(
    config: Given = None,
    stage: int | None = None,
    overrides: Sequence[str] = (),
    default_stage: int | None = None,
    activations: Any = None,
) -> tuple[ZeroConfig, Loaded]:
    """Read and validate.

    Args:
        config: a mapping, a file's path, or a configuration.
        stage: sets ``zero_optimization.stage``.
        overrides: ``key=value`` and ``group=option`` in Hydra's grammar.
        default_stage: the stage if none is given.
        activations: keys of the ``activation_checkpointing`` block, or its ``mode``; True: full, False: none.

    Raises:
        ConfigError: names every problem.
    """
    if isinstance(config, ZeroConfig):
        if stage is None and not overrides and activations is None:
            return config, Loaded(config, (), (), {}, {})
        config = plain(config)
    loaded = examine(config, stage, overrides, default_stage, activations)
    if loaded.config is None:
        raise ConfigError(loaded.problems)
    return loaded.config, loaded


def examine(
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
    stage: int | None = None,
    overrides: Sequence[str] = (),
    default_stage: int | None = None,
    activations: Any = None,
) -> Loaded:
    """Read and validate; problems with keys and values are returned.

    Raises:
        ConfigError: the configuration cannot be read at all.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} is a single string. Write a list: overrides=[{overrides!r}].")
    source = files.read(config)
    if overrides:
        source = changes.apply(source, overrides)
    source = resolve(source)
    written = copy.deepcopy(source.values)
    tree = Tree(source.values, dict(source.marks), [Notice("file", "", text) for text in source.notices])
    _set_stage(tree, stage)
    if not isinstance(tree.get(("zero_optimization",)), bool) and tree.get(("zero_optimization", "stage")) is MISSING:
        _set_stage(tree, default_stage)
    _set_activations(tree, activations)
    rename_old_keys(tree)
    autos = classify_keys(tree, ZeroConfig)
    made = _validate(tree)
    _check_named(tree, autos)
    if made is not None:
        made._autos = autos
        for path, why in inactive(made, plain(made)):
            tree.notices.append(Notice("inactive", dotted(path), why, tree.mark(path)))
    mask = Mask(written, source.secret)
    return Loaded(
        None if tree.problems else made,
        sorted(dict.fromkeys(replace(p, message=mask(p.message)) for p in tree.problems), key=_place),
        tuple(dict.fromkeys(replace(n, message=mask(n.message)) for n in tree.notices)),
        written,
        tree.marks,
        frozenset(source.secret | tree.moved(source.secret)),
    )


def plain(config: ZeroConfig) -> dict[str, Any]:
    """The written keys as plain containers, from which ``load`` makes the same configuration."""
    tree = Tree(_written(config))
    for path in sorted(config.autos, key=dotted):
        tree.put(path, "auto")
    return tree.values


def _written(block: Block) -> dict[str, Any]:
    values = {name: getattr(block, name) for name in type(block).model_fields if name in block.model_fields_set}
    return {
        name: _written(value) if isinstance(value, Block) else thawed(copy.deepcopy(value))
        for name, value in values.items()
    }


def _set_stage(tree: Tree, stage: int | None) -> None:
    path: Path = ("zero_optimization", "stage")
    if stage is None:
        return
    if isinstance(there := tree.get(path[:1]), bool):
        there = int(there)
        tree.pop(path[:1])
    else:
        there = tree.get(path)
    if there is MISSING or there is None or there == "auto":
        if tree.put(path, stage):
            tree.marks[path] = Mark(f"stage={stage}")
    elif there != stage and str(there) != str(stage):
        tree.problem(path, f"stage={stage} contradicts zero_optimization.stage={there}. Remove one of them.")


def _set_activations(tree: Tree, given: Any) -> None:
    if isinstance(given, bool):
        given = "full" if given else "none"
    if isinstance(given, str):
        given = {"mode": given}
    values = _written(given) if isinstance(given, Block) else {} if given is None else given
    if not isinstance(values, Mapping):
        text = f"activation_checkpointing={given!r} is neither a mode nor a mapping of keys of the block."
        tree.problem(("activation_checkpointing",), text)
        return
    for key, value in values.items():
        path: Path = ("activation_checkpointing", str(key))
        there = tree.get(path)
        if there is MISSING or there is None:
            tree.put(path, value)
            tree.marks[path] = Mark(f"activation_checkpointing={values!r}")
        elif _plainly(there) != _plainly(value):
            tree.problem(
                path,
                f"ZeroStrategy(activation_checkpointing=...) says {key}={value!r}, which contradicts {dotted(path)}="
                f"{there!r}. Remove one of them.",
            )


def _plainly(value: Any) -> list[str]:
    """Normalize for a comparison: a name equals a list of one, and numbers may be text."""
    return [str(entry) for entry in (value if isinstance(value, (list, tuple)) else [value])]


def _check_named(tree: Tree, autos: frozenset[Path]) -> None:
    """Check the arguments of optimizers and schedulers, which the schema leaves to their classes."""
    for block, check in (("optimizer", check_optimizer), ("scheduler", check_scheduler)):
        kind, params = tree.get((block, "type")), tree.get((block, "params"))
        if isinstance(kind, str) and kind and (params is MISSING or params is None or isinstance(params, Mapping)):
            later = {str(path[-1]): "auto" for path in autos if path[:-1] == (block, "params")}
            given = [{**(params if isinstance(params, Mapping) else {}), **later}]
            if block == "optimizer":
                given.append(tree.get((block, "param_groups")))
            for problem in check(kind, *given):
                tree.problems.append(replace(problem, mark=tree.mark(path_of(problem.key))))


def _validate(tree: Tree) -> ZeroConfig | None:
    """Check values, then rules between keys, even if some values are wrong, to report all problems at once."""
    try:
        return ZeroConfig.model_validate(tree.values)
    except ValidationError as error:
        wrong = _take(tree, error)
    if any(wrong):
        for path in wrong:
            tree.pop(path)
        try:
            ZeroConfig.model_validate(tree.values)
        except ValidationError as error:
            before = len(tree.problems)
            _take(tree, error)
            names = [dotted(path) for path in wrong]
            tree.problems[before:] = [p for p in tree.problems[before:] if not any(n in p.message for n in names)]
    return None


def _take(tree: Tree, error: ValidationError) -> list[Path]:
    """Turn pydantic's errors into problems; returns the paths of wrong values."""
    wrong: list[Path] = []
    for entry in error.errors(include_url=False):
        inner = entry.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            tree.problems += [replace(p, mark=tree.mark(tuple(p.key.split(".")))) for p in inner.problems]
            continue
        path, message = message_of(tree, entry)
        if entry["type"] == "missing":
            path = path[:-1]
        if path not in wrong:
            wrong.append(path)
            tree.problem(path, message)
    return wrong


def _place(problem: Problem) -> tuple[str, int, int]:
    mark = problem.mark
    return ("", 0, 0) if mark is None else (mark.source, mark.line or 0, mark.column or 0)
