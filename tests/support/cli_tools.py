"""A strategy as LightningCLI makes it."""

from __future__ import annotations

import lt_zero
from tests.support.lightning_tools import GPT, QUIET

CLASS = "lt_zero.ZeroStrategy"


def strategy_of(*arguments: str) -> lt_zero.ZeroStrategy:
    from lightning.pytorch.cli import LightningCLI

    cli = LightningCLI(
        GPT,
        args=list(arguments),
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={**QUIET, "devices": 1},
    )
    assert isinstance(cli.trainer.strategy, lt_zero.ZeroStrategy)
    return cli.trainer.strategy
