"""The stores of a bucket's optimizer states, and of what is kept beside them."""

from __future__ import annotations

import torch

from lt_zero.common.moment_form import MomentForm
from lt_zero.core.stores.store import Places, Store


class StateStores:
    """States of one bucket that are kept in stores, not beside their fragments.

    Args:
        places: of the bucket.
        numel: elements of this rank's shard.

    Attributes:
        by_key: element-wise states of the optimizer, which each step reads.
        beside: what no step reads, such as an average of the weights.
    """

    def __init__(self, places: Places, numel: int) -> None:
        self._places = places
        self._numel = numel
        self.by_key: dict[str, Store] = {}
        self.beside: dict[str, Store] = {}

    def store(self, key: str, form: MomentForm) -> Store | None:
        """The store of the optimizer's element-wise state ``key``; None if states stay beside their fragments."""
        # A store of another dtype was loaded from a run with other dtypes, and is replaced.
        if key in self.by_key and self.by_key[key].dtype == form.dtype:
            return self.by_key[key]
        store = self._places.step.state(key, self._numel, form)
        if store is not None:
            self.by_key[key] = store
        return store

    def add_beside(self, key: str, dtype: torch.dtype) -> Store:
        """A new store of elements as the master weights have, kept where optimizer states are; steps do not read it."""
        self.drop_beside(key)
        # The kind has a name of its own: an optimizer's state may have the same key.
        self.beside[key] = self._places.step.store(f"beside {key}", self._numel, dtype)
        return self.beside[key]

    def drop_beside(self, key: str) -> None:
        """Free a store of ``add_beside``, if there is one."""
        if (store := self.beside.pop(key, None)) is not None:
            store.discard()
