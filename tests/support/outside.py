"""Packages outside of lt_zero, which tests register for a while (tests/outside)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lt_zero.core.comm import transports
from lt_zero.core.comm.transport import Transport
from lt_zero.core.feature import Entry, register, unregister


@contextmanager
def transport(found: type[Transport], before: str | None = None) -> Iterator[None]:
    """Context in which a transport is registered."""
    transports.register(found, before)
    try:
        yield
    finally:
        transports.unregister(found.name)


@contextmanager
def features(*entries: Entry) -> Iterator[None]:
    """Context in which these features are registered."""
    added = list[str]()
    try:
        for entry in entries:
            register(entry)
            added.append(entry.name)
        yield
    finally:
        for name in added:
            unregister(name)
