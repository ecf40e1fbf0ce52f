"""Metrics of torchmetrics with tensor ranks, which see the same tokens: these count once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lt_zero.common.module_hooks import ProcessLocal


class _OverDataRanks(ProcessLocal):
    """The ``dist_sync_fn`` of metrics in a run; a copy of a metric, which may be pickled, has none."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(result, group if group is not None else self._group)


def count_data_ranks(module: nn.Module, group: Any) -> None:
    """Let metrics in ``module`` that know no group gather from ``group``, until ``count_all_ranks``."""
    for metric in _metrics(module):
        if metric.dist_sync_fn is None:
            metric.dist_sync_fn = _OverDataRanks(group)


def count_all_ranks(module: nn.Module) -> None:
    """Undo ``count_data_ranks``."""
    for metric in _metrics(module):
        if isinstance(metric.dist_sync_fn, _OverDataRanks):
            metric.dist_sync_fn = None


def _metrics(module: nn.Module) -> list[Metric]:
    return [child for child in module.modules() if isinstance(child, Metric)]
