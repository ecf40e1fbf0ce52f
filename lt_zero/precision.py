"""The precision plugin: between closure and step it deals with gradients that are sharded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.core.optimizer import ShardedOptimizer, clip_grad_norm, clip_grad_value

if TYPE_CHECKING:
    from lt_zero.core.engine import Engine


def sharded_of(optimizer: Any) -> ShardedOptimizer | None:
    """The engine's side of an optimizer (Lightning's wrapper is looked through), or None if it has none."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    return getattr(optimizer, "_lt_zero", None)


class ZeroPrecision(Precision):
    """``32-true``: parameters, gradients and states in the dtype that the module has."""

    precision = "32-true"

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.grad_norm: Tensor | None = None  # 0D, before clipping, of the last step that was clipped by norm
        self._norms: dict[str, Tensor] = {}

    @classmethod
    def of(cls, plugin: Precision) -> ZeroPrecision:
        """The plugin that means the same as a stock Lightning plugin.

        Raises:
            TypeError: this precision is not supported.
        """
        if isinstance(plugin, ZeroPrecision):
            return plugin
        if type(plugin) is Precision:
            return cls()
        raise TypeError(
            f"ZeroStrategy does not support {type(plugin).__name__} (precision={plugin.precision!r}). "
            "Use precision='32-true'."
        )

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self.engine.backward_pass() if self.engine is not None else nullcontext():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        # The closure runs before step, not inside: step works on fragments, forward and backward on parameters.
        result = closure()
        self._after_closure(model, optimizer)
        sharded = sharded_of(optimizer)
        try:
            optimizer.step(**kwargs)
        finally:
            if sharded is not None:
                sharded.widen()
        return result

    @override
    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        self._norms = {}
        show = self.engine is not None and _looks_at_gradients(model)
        with self.engine.ledger.looked_at() if show and self.engine is not None else nullcontext():
            super()._after_closure(model, optimizer)
        if self._norms:
            _log(model.trainer, self._norms)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        sharded = sharded_of(optimizer)
        if sharded is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            clip_grad_value(sharded, float(clip_val))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        sharded = sharded_of(optimizer)
        if sharded is None:
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        self.grad_norm = clip_grad_norm(sharded, float(clip_val))
        self._norms = {"grad_norm": self.grad_norm, "grad_norm_clipped": self.grad_norm.clamp(max=float(clip_val))}


def _looks_at_gradients(model: LightningModule) -> bool:
    """Whether user code runs between backward and step."""
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
    if any(is_overridden(hook, model) for hook in hooks):
        return True
    return any(is_overridden(hooks[0], callback, parent=Callback) for callback in model.trainer.callbacks)  # type: ignore[attr-defined]


def _log(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    """To the loggers; ``self.log`` is not allowed at this point of Lightning's loop."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not trainer.loggers or trainer.global_step % every:
        return
    values = {name: value.item() for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step)
