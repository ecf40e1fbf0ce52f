"""The optimizer and the schedule of a configuration, as the ``configure_optimizers`` of a LightningModule."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lt_zero.common.errors import ConfigError, Mark, Problem
from lt_zero.common.names import OfRanks
from lt_zero.common.tables import show, show_values
from lt_zero.config import ZeroConfig
from lt_zero.core.feature import Undo
from lt_zero.optim.from_config import configured_optimizer, configured_scheduler
from lt_zero.optim.grouping import table
from lt_zero.optim.registry import optimizer_factory

_HOOK = "configure_optimizers"


def lend(module: pl.LightningModule, config: Callable[[], ZeroConfig], mark: Mark | None, of_ranks: OfRanks) -> Undo:
    """Replace ``configure_optimizers`` of a module, if the configuration has an optimizer, or a schedule for its own.

    Args:
        module: of the user.
        config: returns the configuration; what is "auto" in it may be resolved until Lightning asks for optimizers.
        mark: the place of the key ``optimizer`` in its file.
        of_ranks: as for ``configured_optimizer``.

    Returns:
        What restores the method.

    Raises:
        ConfigError: the module and the configuration have an optimizer.
    """
    undo = Undo()
    configured = config().optimizer
    in_instance = vars(module).get(_HOOK)  # LightningCLI sets the instance's
    overridden = type(module).configure_optimizers is not pl.LightningModule.configure_optimizers
    own = overridden or in_instance is not None
    if configured is not None and own:
        text = (
            f"optimizer.type={configured.type!r} is configured, and {type(module).__name__}.configure_optimizers "
            "returns optimizers, too. Remove one of them (override the key with optimizer=null to keep the "
            "module's)."
        )
        raise ConfigError([Problem("optimizer", text, mark)])
    if configured is not None or own:
        original = getattr(module, _HOOK)
        lent = _Lent(module, original, config, of_ranks)
        setattr(module, _HOOK, _ConfigureOptimizers(original, lent.optimizers))

        def restore() -> None:
            vars(module).pop(_HOOK, None)
            if in_instance is not None:
                setattr(module, _HOOK, in_instance)

        undo.also(restore)
    return undo


class _ConfigureOptimizers:
    """A temporary ``configure_optimizers`` of a module; copies of the module get the original."""

    def __init__(self, original: Any, configured: Callable[[], Any]) -> None:
        self._original = original
        self.__wrapped__ = configured  # Lightning inspects the code of overridden methods

    def __call__(self) -> Any:
        return self.__wrapped__()

    def __reduce__(self) -> Any:
        return operator.getitem, ((self._original,), 0)


@dataclass(frozen=True)
class _Lent:
    """The optimizers that are lent; arguments as for ``lend``. ``original``: the method of the module."""

    module: pl.LightningModule
    original: Callable[[], Any]
    config: Callable[[], ZeroConfig]
    of_ranks: OfRanks

    def optimizers(self) -> Any:
        """The result of ``configure_optimizers``: the configured optimizer or the module's, and the scheduler."""
        block = self.config().optimizer
        if block is None:
            return self._scheduled(self.original())
        optimizer = configured_optimizer(block, self.module, of_ranks=self.of_ranks)
        if self.module.trainer.is_global_zero and block.param_groups:
            show(table(optimizer))
        elif self.module.trainer.is_global_zero:
            show_values(list(optimizer_factory(block.type).shares(optimizer)))
        return self._scheduled(optimizer)

    def _scheduled(self, optimizers: Any) -> Any:
        """Add the configured scheduler to the result of ``configure_optimizers``."""
        block = self.config().scheduler
        if block is None:
            return optimizers
        optimizer = optimizers.get("optimizer") if isinstance(optimizers, dict) else optimizers
        if isinstance(optimizer, (list, tuple)) and len(optimizer) == 1:
            optimizer = optimizer[0]
        if not isinstance(optimizer, Optimizer) or (isinstance(optimizers, dict) and "lr_scheduler" in optimizers):
            raise ConfigError(
                f"scheduler.type={block.type!r} is configured, but configure_optimizers returns several optimizers or "
                "a scheduler. Remove the scheduler block, or return one optimizer only."
            )
        schedule: dict[str, Any] = {"scheduler": configured_scheduler(block, optimizer), "interval": "step"}
        if block.follows_metric:
            schedule |= {"interval": "epoch", "monitor": block.params["monitor"]}
        return {"optimizer": optimizer, "lr_scheduler": schedule}
