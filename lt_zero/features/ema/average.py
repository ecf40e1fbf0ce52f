"""An exponential moving average of the trained weights: a state "ema" of each bucket, beside the optimizer's.

Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992), with exponential weights. The first
update copies the weights, later ones are average = decay * average + (1 - decay) * weights, as in
``torch.optim.swa_utils.get_ema_avg_fn``.

Note [Frozen weights]
    Weights that are frozen have no average: it would be what they are. So if they are unfrozen after the first update,
    their average begins as what they were while they were frozen, before the first step. Weights that are frozen again
    keep their average, also after a resume, and it goes on towards them.

Note [Averages in use]
    ``swap`` exchanges averages and weights, so that forward, validation and export see the averages, and back. If
    master weights are in 16 bits, rounded averages are put there, and the weights are kept in a copy meanwhile. So the
    averages stay exact, and training goes on from the same bits.

Note [After training]
    The averages are the model's weights from then on, and the trained weights are kept for checkpoints, which have
    both: a run that is resumed goes on with the trained ones. Once the model gets other weights, from a file or by
    hand, they belong to nothing any more, and are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common import plain_names
from lt_zero.common.compat import clean_name
from lt_zero.core.engine.averaged_weights import AveragedWeights
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.inplace_edits import digest_of
from lt_zero.core.engine.lazy_tensor import elements_of
from lt_zero.core.stores.store import Store, put_away

# Keys of states of a bucket: the averages, and the weights while rounded averages are in their place.
_EMA, _TRAINED = "ema", "trained"


class WeightAverage(AveragedWeights):
    """The average of an engine's trained weights, and of floating-point buffers (of rank 0).

    Args:
        engine: of the model; ``average_of`` finds this object until ``close``.

    Attributes:
        swapped: the model has the averages now. See Note [Averages in use].
        finished: for good. See Note [After training].

    Raises:
        ValueError: ranks step apart, so that they have no common weights at times.
    """

    def __init__(self, engine: Engine) -> None:
        engine.exchange.check_common_weights("EMA")
        self._engine = engine
        self._buffers: dict[str, Tensor] = {}  # averages, or while they are in use the buffers themselves
        self.updates = 0
        self.swapped = False
        self.finished = False
        self._left: list[Tensor] = []  # digests of what ``finish`` left in the model
        for bucket in engine.buckets:
            bucket.weights.call_when_unfrozen(partial(self._unfreeze, bucket))
        engine.handles.append(self)

    def _unfreeze(self, bucket: Bucket) -> None:
        """Begin the average of weights that are about to be stepped for the first time. See Note [Frozen weights]."""
        if self.updates:
            averages = _add(bucket)
            averages.overwrite().copy_(bucket.weights.values())
            put_away([averages])

    def _buckets(self) -> Iterator[Bucket]:
        return (bucket for bucket in self._engine.buckets if bucket.weights.trains)

    def _named_buffers(self) -> dict[str, Tensor]:
        return dict(plain_names.named_buffers(self._engine.root))

    @override
    def averages(self, bucket: Bucket) -> Store | None:
        return bucket.states.beside.get(_EMA)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Average the weights of the last step. Not collective."""
        self._engine.same_on_ranks.note_value("the decay of the average of weights", decay)
        for bucket in self._buckets():
            weights, averages = bucket.weights.values(), self.averages(bucket)
            if averages is None:  # it is the first update
                averages = _add(bucket)
                averages.overwrite().copy_(weights)
            else:
                rows = averages.write()
                rows.mul_(decay).add_(weights.to(rows.dtype), alpha=1 - decay)
            if averages.streamed:
                # The others need the memory: one bucket is in it at a time.
                bucket.put_away()
        for name, buffer in self._named_buffers().items():
            known = self._buffers.get(name)
            if known is None or not buffer.is_floating_point():
                self._buffers[name] = buffer.detach().clone()
            else:
                known.mul_(decay).add_(buffer, alpha=1 - decay)
        self.updates += 1

    # ---- use ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and weights in the model, if there is an average. Collective."""
        if not self.updates:
            return
        engine = self._engine
        engine.prepare_reading()
        changed = {bucket: found for bucket in self._buckets() if (found := self.averages(bucket)) is not None}
        # A slower rank may still gather from this rank's weights for its validation.
        engine.before_write()
        for bucket, averages in changed.items():
            self._swap(bucket, averages)
        engine.publish(set(changed), stepped=False)
        # Wait for the gathers that ``publish`` may have started: the caller reads the weights next.
        engine.finish_steps()
        for name, buffer in self._named_buffers().items():
            if (known := self._buffers.get(name)) is not None:
                before = buffer.clone()
                buffer.copy_(known)
                known.copy_(before)
        self.swapped = not self.swapped
        if self.swapped:
            engine.buffers.sync()

    def _swap(self, bucket: Bucket, averages: Store) -> None:
        master, average = bucket.weights.writable_values(), averages.write()
        if master.dtype == average.dtype:
            before = master.clone()
            master.copy_(average)
            average.copy_(before)
        elif self.swapped:
            # Weights that were unfrozen meanwhile have not been exchanged.
            if (trained := bucket.states.beside.get(_TRAINED)) is not None:
                master.copy_(trained.read())
                bucket.states.drop_beside(_TRAINED)
        else:
            bucket.states.add_beside(_TRAINED, master.dtype).overwrite().copy_(master)
            master.copy_(average)
        # Weights in files are copied to what gathers read while they are in memory; ``publish`` copies the others.
        if bucket.streamed:
            bucket.weights.refresh_anew()
        bucket.put_away()

    @override
    @contextmanager
    def showing(self, averaged: bool) -> Iterator[None]:
        if averaged == self.swapped:
            yield
            return
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def finish(self) -> None:
        """End of training: leave the averages in the model. Collective. See Note [After training]."""
        if self.updates and not self.swapped:
            self.swap()
        self.finished, self._left = True, self._digests()

    def _digests(self) -> list[Tensor]:
        found = []
        for bucket in self._buckets() if self.swapped else ():
            found.append(digest_of(bucket.weights.values()))
            bucket.put_away()
        return found

    @override
    def drop_if_outdated(self) -> None:
        if not (self.finished and self.swapped):
            return
        engine = self._engine
        engine.prepare_reading()
        for bucket in engine.buckets:
            bucket.edits.check(values=True)
        changed = torch.tensor([list(map(int, self._digests())) != list(map(int, self._left))], dtype=torch.uint8)
        engine.world.host_max(changed, "weights after training").wait()
        if changed.item():
            self.close()

    @override
    def end(self) -> None:
        if self.swapped and not self.finished:
            self.swap()
        self.close()

    def close(self) -> None:
        """Drop the averages, or, while they are in use, the weights."""
        for bucket in self._engine.buckets:
            bucket.states.drop_beside(_EMA)
            bucket.states.drop_beside(_TRAINED)
            bucket.weights.call_when_unfrozen(None)
        self._buffers.clear()
        if self in self._engine.handles:
            self._engine.handles.remove(self)

    remove = close  # an engine that is detached removes its handles

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def rows(self, bucket: Bucket, averaged: bool) -> Callable[[], Tensor] | None:
        if (averages := self.averages(bucket)) is None:
            return None
        if (trained := bucket.states.beside.get(_TRAINED)) is not None:
            return averages.read if averaged else trained.read
        return averages.read if averaged != self.swapped else None

    @override
    def buffers(self, averaged: bool) -> dict[str, Tensor]:
        return {} if averaged == self.swapped else dict(self._buffers)

    @override
    @torch.no_grad()
    def load(self, state: Mapping[str, Any], averaged: Collection[str], updates: int) -> None:
        state = {clean_name(name): value for name, value in state.items()}
        averaged = {clean_name(name) for name in averaged}
        for bucket in self._engine.buckets:
            specs = [span.spec for span in bucket.layout.spans]
            if not all(spec.name in state for spec in specs):
                continue
            if not bucket.weights.trains:
                if not any(spec.name in averaged for spec in specs):
                    continue
                # Some were trained when the checkpoint was saved, and all are frozen now. ``state`` has the weights of
                # the others, so that their average is begun as theirs would be.
                bucket.weights.enable_training(bucket.name)
            rows = _add(bucket).overwrite()
            # No parameter has the elements of gaps, and digests of weights cover them after a swap.
            rows.zero_()
            for index, spec in enumerate(specs):
                for piece in bucket.pieces_of(index):
                    row = elements_of(state[spec.name], piece.lo, piece.hi, spec.local_box)
                    rows[piece.offset : piece.offset + piece.numel] = row
            bucket.put_away()
        for name, buffer in self._named_buffers().items():
            if name in state:
                self._buffers[name] = torch.empty_like(buffer).copy_(state[name])
        self.updates = updates


def _add(bucket: Bucket) -> Store:
    """A new store of averages. In 16 bits they would lose small updates, so they are in fp32 at least."""
    return bucket.states.add_beside(_EMA, torch.promote_types(bucket.weights.precision, torch.float32))
