"""Master weights that loads and edits have replaced since the last step, of all buckets of an engine.

See bucket_weights.py, Note [Replaced weights].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lt_zero.common.users_code import warn
from lt_zero.core.engine.bucket_weights import AllReplaced
from lt_zero.core.stores.store import put_away

if TYPE_CHECKING:
    from lt_zero.core.engine.bucket import Bucket


class ReplacedWeights:
    """The buckets of an engine that keep what was replaced; false if there are none, as in most steps.

    Args:
        buckets: all of the engine.
        tell: this rank warns for all.
        training: there are steps, until which everything is kept; otherwise from ``begin_training`` on.
    """

    def __init__(self, buckets: Iterable[Bucket], tell: bool, training: bool) -> None:
        self._buckets = {bucket.weights: bucket for bucket in buckets}
        self._tell, self._warned = tell, False
        self._all = AllReplaced()
        self._all.keeps_codes = training
        for weights in self._buckets:
            weights.keep_replaced_in(self._all)

    def __bool__(self) -> bool:
        return bool(self._all.weights)

    @property
    def keeps(self) -> bool:
        """True if what is replaced is kept."""
        return self._all.keeps

    def begin_training(self) -> None:
        """Keep everything from now on."""
        self._all.keeps_codes = True

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Context for loads of a checkpoint, with which training begins anew: nothing is kept, before or inside."""
        self.forget()
        self._all.keeps = False
        try:
            yield
        finally:
            self._all.keeps = True

    def forget(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Drop what ``buckets`` keep, by default all: training goes on from the weights that there are."""
        for weights in list(self._all.weights) if buckets is None else [bucket.weights for bucket in buckets]:
            weights.forget_replaced()

    def drop_returned(self) -> None:
        """Drop what was kept of buckets that have their weights back: activations need the memory next."""
        for weights in list(self._all.weights):
            if weights.is_as_replaced():
                weights.forget_replaced()
            put_away(weights.stores())

    def warn_of_rounded(self) -> None:
        """Warn, once, of master weights that training goes on from although a load has rounded them."""
        if self._warned or not self._tell:
            return
        found = []
        for weights in list(self._all.weights):
            if weights.has_rounded():
                found.append(self._buckets[weights])
            put_away(weights.stores())
        if not found:
            return
        self._warned = True
        names = [span.name for bucket in found for span in bucket.layout.spans]
        shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        weights = found[0].weights
        warn(
            f"Training goes on from rounded weights: `load_state_dict` (or a copy to a parameter) has put values of "
            f"{str(weights.plan.dtype).removeprefix('torch.')} in the place of master weights in "
            f"{str(weights.precision).removeprefix('torch.')}, among {shown}. A state dict of the module has the dtype "
            "in which forward computes, and only the weights of the last step get their full precision back from it. "
            "To return to earlier weights, load those of `trainer.strategy.full_state_dict()`, or a checkpoint; "
            "`lt_zero.EMA` averages and swaps without rounding."
        )
