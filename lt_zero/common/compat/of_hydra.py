"""Private APIs of Hydra (checked on hydra-core 1.3.2 to 1.3.8) and OmegaConf (checked on omegaconf 2.3).

Release candidates that work as well: 1.4.0rc3 of Hydra, 2.4.1rc1 of OmegaConf.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

_swapping = threading.RLock()  # resolvers are global in OmegaConf


def yaml_loader(text: str) -> Any:
    """PyYAML's loader as OmegaConf sets it up: 1e-5 is a number, a date is text."""
    try:
        from omegaconf._utils import get_yaml_loader
    except ImportError:  # 2.4 has a module for it
        get_yaml_loader = importlib.import_module("omegaconf._yaml").get_yaml_loader
    return get_yaml_loader()(text)


def is_part_of_config(config: Any) -> bool:
    """True if an OmegaConf container has a parent, to which interpolations may refer."""
    return config._get_parent() is not None


@contextmanager
def environment_read() -> Iterator[set[str]]:
    """Context that yields a set, to which each value is added that a resolver reads from the environment meanwhile.

    Only the resolver itself knows: the name of a variable, and that of the resolver, may be put together from values.
    ``oc.env`` is such a resolver, and by custom any whose name ends in ``env``.
    """
    from omegaconf.basecontainer import BaseContainer

    values: set[str] = set()

    def recording(original: Any) -> Any:
        def resolver(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if value is not None:
                values.add(str(value))
            return value

        return resolver

    with _swapping:
        resolvers = BaseContainer._resolvers
        readers = {name: found for name, found in resolvers.items() if name.rpartition(".")[2] == "env"}
        try:
            resolvers.update({name: recording(found) for name, found in readers.items()})
            yield values
        finally:
            resolvers.update(readers)


Kind = Literal["change", "add", "force", "delete"]


class HydraOverride(NamedTuple):
    """An override as Hydra's parser reads it."""

    text: str
    kind: Kind  # ``a=1`` changes, ``+a=1`` adds, ``++a=1`` forces, ``~a`` deletes
    key: str  # ``a.b``, or ``a/b`` for a group
    package: str | None  # the part after @
    value: Any  # plain; also None if there is none
    has_value: bool
    is_quoted: bool  # the value was text in quotes
    is_sweep: bool  # there are several values


class HydraSyntaxError(ValueError):
    """Text that is not an override; ``column`` counts from 0, None if Hydra does not report it."""

    def __init__(self, message: str, column: int | None) -> None:
        super().__init__(message)
        self.column = column


def parse_override(text: str) -> HydraOverride:
    """Parse an override in Hydra's grammar.

    Raises:
        HydraSyntaxError: ``text`` is not an override.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType, QuotedString
    from hydra.errors import HydraException

    change = OverrideType.CHANGE
    add = OverrideType.ADD
    force = OverrideType.FORCE_ADD
    delete = OverrideType.DEL
    kinds: dict[OverrideType, Kind] = {change: "change", add: "add", force: "force", delete: "delete"}
    try:
        found = OverridesParser.create().parse_override(text)
    except HydraException as error:
        cause = error.__cause__
        column = getattr(cause, "startIndex", None)  # the lexer's error; the parser's has a token instead
        if column is None:
            column = getattr(getattr(cause, "offendingToken", None), "column", None)
        raise HydraSyntaxError(str(error).split("\n", 1)[0], column) from None
    except RecursionError:
        raise HydraSyntaxError("nested too deeply", None) from None
    is_sweep, has_value = found.is_sweep_override(), found.value_type is not None
    value, is_quoted = None if is_sweep else found.value(), isinstance(found._value, QuotedString)
    kind, key = kinds[found.type], found.key_or_group
    return HydraOverride(text, kind, key, found.package, value, has_value, is_quoted, is_sweep)
