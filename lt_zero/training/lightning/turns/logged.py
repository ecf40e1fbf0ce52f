"""Values that are logged in rounds: those of the first micro-batch, or of all of them in the order of their numbers.

Note [Logged values]
    ``self.log`` without ``sync_dist`` logs a rank's own value, and what loggers get is rank 0's. In rounds that is the
    value of micro-batch 0, so what later turns log is dropped. With ``sync_dist`` each turn has a collection of its
    own, and nothing is reduced when a value is logged, since later turns have not logged theirs: values of the step are
    reduced at the end of the round, those of the epoch when Lightning asks for them. The ranks tell each other the
    values of all micro-batches then, and each adds them in the order of their numbers.

    Callbacks and schedules decide by values that they name as their monitor, and Lightning asks all ranks for these
    decisions: a rank that had a value of its own could stop a run, or choose another learning rate. So after each round
    all ranks get rank 0's values of what is monitored and not reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric

from lt_zero.common.errors import ConfigError
from lt_zero.core.division import current
from lt_zero.core.rounds import Rounds

_KEY = "reproducible.virtual_ranks"
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class TurnResults(_ResultCollection):
    """A loop's collection of logged values, which knows the turn that logs. Lightning has made it as its own class.

    See Note [Logged values].
    """

    rounds: Rounds
    turn: int | None  # None: no turn is running
    later: list[_ResultCollection]  # of the turns after the first
    synced: set[str]  # keys of values that are reduced over micro-batches
    due: dict[str, None]  # those of the step, in this round

    @classmethod
    def watch(cls, results: Any, rounds: Rounds) -> TurnResults:
        """Let a collection of Lightning's follow the turns."""
        results.__class__ = cls
        results.rounds, results.turn = rounds, None
        results.later = [_ResultCollection(results.training) for _ in range(rounds.turns - 1)]
        results.synced, results.due = set(), {}
        return results  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Be Lightning's own again."""
        self.__class__ = _ResultCollection  # type: ignore[assignment]

    def begin_batch(self, turn: int, batch: Any) -> None:
        """A later turn begins, with this batch."""
        later = self.later[turn - 1]
        later.batch, later.batch_size, later.dataloader_idx = batch, None, self.dataloader_idx

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value of the turn that is running."""
        synced = kwargs.get("sync_dist", False) and not kwargs.get("rank_zero_only", False)
        if self.turn is None or isinstance(value, Metric):
            if not self.turn:
                super().log(fx, name, value, *args, **kwargs)
            return
        if not synced:
            if self.turn == 0:
                super().log(fx, name, value, *args, **kwargs)
            return
        if kwargs.get("sync_dist_group") is not None:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self.rounds.count}: self.log({name!r}, sync_dist_group=...) reduces over some of the ranks, "
                "of which there may be any number. Leave the group out, which reduces over all virtual ranks.",
            )
        run = current()
        reduction = kwargs.get("reduce_fx", "mean")
        if run is not None:
            run.group_of_reduction(getattr(reduction, "__name__", reduction))  # refuses sums over parts of rows
        kwargs["sync_dist"] = False
        if self.turn == 0:
            super().log(fx, name, value, *args, **kwargs)
        else:
            self.later[self.turn - 1].log(fx, name, value, *args, **kwargs)
        index = self.dataloader_idx
        key = f"{fx}.{name}" + (f".{index}" if kwargs.get("add_dataloader_idx", True) and index is not None else "")
        self.synced.add(key)
        if kwargs.get("on_step", False):
            self.due[key] = None

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset the values that the running turn has logged; all, if none is running."""
        if self.turn:
            self.later[self.turn - 1].reset(metrics, fx)
            return
        super().reset(metrics, fx)
        for later in self.later:
            later.reset(metrics, fx)

    def end_round(self, monitored: Set[str] = frozenset()) -> None:
        """Reduce the values of the step. Collective, if there are any, or any are ``monitored``.

        Args:
            monitored: names of values by which something is decided; the same on all ranks.

        Raises:
            RuntimeError: a micro-batch has not logged what others have.
        """
        if monitored:
            self._take_those_of_first(monitored)
        due, self.due = list(self.due), {}
        for later in self.later:
            later.batch = None
        if not due:
            return
        collections = [self, *self.later]
        mine = [{key: found[key]._forward_cache for key in due if key in found} for found in collections]
        values = self.rounds.in_order(mine, "logged values")
        for key in due:
            self._require(key, [key in of_one for of_one in values])
            metric = self[key]
            cache = _reduced([of_one[key] for of_one in values], metric.meta.reduce_fx.__name__)
            metric._forward_cache = cache.to(metric.value.device)
            if not metric.meta.on_epoch:
                metric.value = metric._forward_cache

    def _take_those_of_first(self, monitored: Set[str]) -> None:
        """Take rank 0's values of what is monitored, and not reduced over micro-batches. Collective."""
        mine = {}
        for key, metric in self.items():
            if metric.is_tensor and key not in self.synced and monitored & self._names(metric):
                mine[key] = metric.value, getattr(metric, "cumulated_batch_size", None), metric._forward_cache
        for key, (value, count, cache) in self.rounds.of_first(mine, "monitored values").items():
            if key not in mine:
                continue
            metric = self[key]
            device = metric.value.device
            metric.value = value.to(device)
            if count is not None:
                metric.cumulated_batch_size = count.to(device)
            metric._forward_cache = cache.to(device) if cache is not None else None

    def _names(self, metric: _ResultMetric) -> set[str]:
        """The names under which callbacks find a value."""
        return {name for on_step in (True, False) for name in self._forked_name(metric, on_step)}

    def sums(self) -> dict[str, Any]:
        """The sums of an epoch that are reduced over micro-batches, by their numbers. Lightning makes new ones."""
        found = {}
        for turn, results in enumerate((self, *self.later)):
            of_turn = {key: results[key] for key in sorted(self.synced) if key in results}
            found[self.rounds.place(turn)] = {
                key: (metric.value, getattr(metric, "cumulated_batch_size", None)) for key, metric in of_turn.items()
            }
        return {"synced": sorted(self.synced), "values": found}

    def restore_sums(self, saved: Mapping[str, Any]) -> None:
        """Restore ``sums`` of all micro-batches."""
        self.synced.update(saved["synced"])
        for turn, results in enumerate((self, *self.later)):
            for key, (value, count) in saved["values"].get(self.rounds.place(turn), {}).items():
                if key not in self:
                    continue  # the program has changed
                if turn:
                    results[key] = _ResultMetric(self[key].meta, is_tensor=True)
                    results[key]._update_count = 1
                results[key].value = value.to(self[key].value.device)
                if count is not None:
                    results[key].cumulated_batch_size = count.to(value.device)

    def _require(self, key: str, have: Sequence[bool]) -> None:
        if not all(have):
            missing = ", ".join(str(number) for number, has in enumerate(have) if not has)
            raise RuntimeError(
                f"Virtual ranks {missing} have not logged {key.partition('.')[2]!r}, which others have. With "
                "sync_dist=True all micro-batches of a round have to log it."
            )

    def _get_cache(self, result_metric: _ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        """A value to show. Collective for values of an epoch that are reduced."""
        key = next((key for key, metric in self.items() if metric is result_metric), None)
        ends = not on_step and result_metric.meta.on_epoch and result_metric._computed is None
        if key in self.synced and ends and result_metric.is_tensor:
            computed: Any = self._of_epoch(key, result_metric)
            result_metric._computed = computed
        found: Tensor | None = _ResultCollection._get_cache(result_metric, on_step)
        return found

    def _of_epoch(self, key: Any, metric: _ResultMetric) -> Tensor:
        """The value of an epoch, from the sums of all micro-batches."""
        mine = []
        for found in (self, *self.later):
            own = found.get(key)
            counted = getattr(own, "cumulated_batch_size", None)
            mine.append((own.value, counted) if own is not None else None)
        values = self.rounds.in_order(mine, "logged values of the epoch")
        self._require(key, [value is not None for value in values])
        name = metric.meta.reduce_fx.__name__
        if name != "mean":
            return _reduced([value for value, _ in values], name).to(metric.value.device)
        total = _reduced([value for value, _ in values], "sum")
        count = _reduced([counted for _, counted in values], "sum")
        return (total / count).to(metric.value.device)


def _reduced(values: Sequence[Tensor], name: str) -> Tensor:
    """The reduction of values in their order, from the first to the last."""
    fold = _REDUCTIONS[name]
    found = values[0]
    for value in values[1:]:
        found = fold(found, value)
    return found / len(values) if name == "mean" else found
