"""Private APIs of Lightning by which a resumed run goes on with logged values. Checked on lightning 2.6."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

from lt_zero.common.compat.of_lightning_loops import ARGUMENTS


def restore_logged_values(
    trainer: Any, saved: list[dict[str, Any]], device: torch.device, reduce: Callable[..., Any]
) -> None:
    """Let training go on with values of ``packed``.

    Args:
        reduce: what Lightning reduces values over the ranks with.
    """

    class Results(_ResultCollection):
        """Values that a changed program logs with other arguments than before the resume begin anew."""

        def log(self, fx: str, name: str, *args: Any, **kwargs: Any) -> None:
            try:
                super().log(fx, name, *args, **kwargs)
            except MisconfigurationException:
                if (key := f"{fx}.{name}") not in restored:
                    raise
                del self[key]
                super().log(fx, name, *args, **kwargs)
            finally:
                restored.discard(f"{fx}.{name}")

    results, restored = Results(training=True), set[str]()
    for state in saved:
        arguments: Mapping[str, Any] = {name: state[name] for name in ARGUMENTS}
        reduction = getattr(builtins if state["builtin"] else torch, state["reduce"])
        meta = _Metadata(**arguments, reduce_fx=reduction, metric_attribute=state["attribute"])
        meta.sync = _Sync(reduce, state["sync"], state["rank_zero"], state["op"])
        entry = _ResultMetric(meta, is_tensor=bool(state["states"]))
        for name, value in state["states"].items():
            setattr(entry, name, value.to(device))
        if not state["states"]:
            try:
                entry.value = trainer.lightning_module.get_submodule(state["attribute"])
            except AttributeError:  # the program has changed
                continue
        cache = state["cache"]
        entry._forward_cache = cache.to(device) if cache is not None else None
        entry._update_count = 1  # else computing it would warn that nothing was logged
        key = f"{state['fx']}.{state['name']}"
        results[key] = entry
        restored.add(key)
    trainer.fit_loop.epoch_loop._results = results
