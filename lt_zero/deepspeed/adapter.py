"""The adapter of loaders whose batches the ranks of a sequence exchange (sequence.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lt_zero.deepspeed.engines import current_engine
from lt_zero.deepspeed.ranks import gather_objects
from lt_zero.parallel.sequence.batches import cut_for, leave_to_user
from lt_zero.parallel.sequence.ranks import current


class UlyssesSPDataLoaderAdapter:
    """A loader whose batches the ranks of a sequence exchange, and cut.

    See sequence.py, Note [Sequences that a script cuts]. A batch is cut as by ``lt_zero.parallel.cut_batch``; it has
    ``shift_labels`` in place of ``labels``. Ranks are those of the engine, and rows that they cannot share equally are
    padded at their end.

    Args:
        dl: gives each rank batches of its own, equally many on the ranks of a sequence.
    """

    def __init__(
        self,
        dl: Any,
        sp_rank: int | None = None,
        sp_group: Any = None,
        sp_world_size: int | None = None,
        device: Any = None,
        pad_to_sp_multiple: bool = True,
        pad_token_id: int = 0,
    ) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.device = device
        self._size = sp_world_size
        self._rest: Iterator[Mapping[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        """An attribute of the loader (``dataset``, ``set_epoch``)."""
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    @property
    def sp_world_size(self) -> int:
        """The ranks of a sequence."""
        ranks = current()
        return ranks.size if ranks is not None else self._size or 1

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        """The next part; after the last one of an epoch StopIteration, and then the next epoch. Collective."""
        self._rest = self._rest or self._parts()
        try:
            return next(self._rest)
        except StopIteration:
            self._rest = None
            raise

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        ranks, engine = current(), current_engine()
        if ranks is None or engine is None:
            raise RuntimeError(
                "UlyssesSPDataLoaderAdapter was asked for a batch, and no engine cuts sequences. Iterate after "
                "deepspeed.initialize(mpu=UlyssesSPAttentionHF.register_with_transformers(...), ...)."
            )
        leave_to_user(ranks)
        batches = iter(self.dl)
        while True:
            every = gather_objects(next(batches, None), ranks.group.process_group)
            ended = [number for number, batch in enumerate(every) if batch is None]
            if len(ended) == ranks.size:
                return
            if ended:
                raise RuntimeError(
                    f"UlyssesSPDataLoaderAdapter: rank {ended[0]} of a sequence has no batch any more, and others "
                    "have. Give the ranks loaders of the same length (DistributedSampler with drop_last, even_batches)."
                )
            for batch in every:
                cut = dict(cut_for(batch, ranks, engine.module))
                if "shift_labels" in cut:
                    cut.pop("labels", None)
                yield cut
