"""The collectives about which ranks ask each other, in the store.

Note [How often ranks ask]
    A rank that asks reads an answer of each rank. If all n ranks of a run wait for one that is late and all ask, the
    store sends n^2 answers in each round: 400 MB at 1,024 ranks, from one process, for as long as that rank is late. So
    the first of them asks in each round, and the others so rarely that the store sends no more than ``_RATE``. They
    still ask, as each knows of collectives that the first takes no part in, and as the first may end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lt_zero.core.comm.work import CollectiveId

_KNOWN = 64  # different questions that an answer deals with, the last ones
_ANSWER = 400  # bytes of an answer, about
_RATE = 50e6  # bytes per second of answers that the store may be asked for


def pause(ranks: int, poll: float, first: bool) -> float:
    """Seconds between two examinations of one wait by a rank. See Note [How often ranks ask].

    Args:
        ranks: of the run; all may wait.
        poll: seconds between two polls of the store.
        first: this rank was the first to examine the wait.
    """
    return poll if first else max(poll, ranks * ranks * _ANSWER / _RATE)


def read_all(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """The values of ``keys``, in two requests if all are set; None for those that are not."""
    several: Any = store  # torch's stubs lack it
    if keys and several.has_extended_api() and store.check(list(keys)):
        return list(store.multi_get(list(keys)))
    return [store.get(key) if store.check([key]) else None for key in keys]


class Questions:
    """The list of questions. ``post`` may be called on any thread, ``known`` on one.

    Args:
        store: of the group.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("questions", store)
        self._read = 0
        self._known: dict[tuple[str, int], None] = {}  # in order

    def post(self, wait: CollectiveId) -> None:
        """Let the answers of all ranks tell whether they have launched ``wait``."""
        self._store.set(str(self._store.add("posted", 1)), json.dumps([wait.channel, wait.number]))

    def known(self) -> list[tuple[str, int]]:
        """Channels and numbers of the collectives that were asked about last."""
        count = self._store.add("posted", 0)
        while self._read < count and self._store.check([str(self._read + 1)]):
            self._read += 1
            channel, number = json.loads(self._store.get(str(self._read)))
            self._known.pop((channel, number), None)
            self._known[channel, number] = None
        while len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return list(self._known)
