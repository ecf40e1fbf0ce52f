"""Lines of a run on its standard output, beside Lightning's progress bars."""

from __future__ import annotations

from contextlib import suppress

import lightning.pytorch as pl

from lt_zero.common.output import say


def print_line(module: pl.LightningModule, text: str) -> None:
    """Do what ``module.print`` does, on the first rank; if that fails, the run goes on without the line."""
    bar = module.trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", True):
        with suppress(OSError, ValueError):
            module.print(text)
    elif module.trainer.is_global_zero:
        say(text)
