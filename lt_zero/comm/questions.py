"""The collectives about which ranks ask each other, in the store."""

from __future__ import annotations

import json

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lt_zero.comm.work import CollectiveId

_KNOWN = 64  # different questions that an answer deals with, the last ones


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
