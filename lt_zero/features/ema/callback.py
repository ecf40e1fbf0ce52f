"""``EMA``: the callback of features/ema/average.py."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lt_zero.common.arguments import expect_number
from lt_zero.features.ema.average import WeightAverage
from lt_zero.planning.check import check_optimizers
from lt_zero.training.build import built_by
from lt_zero.training.lightning.strategy import ZeroStrategy


class EMA(pl.Callback):
    """Keeps an exponential moving average of the weights, sharded as the master weights and kept where they are.

    Validation runs with the average; it is saved as weights, exported, and left in the model after training.
    Checkpoints, also those that are saved after training, have the trained weights, too, and go on with both. In 16
    bits the fp32 master weights are averaged. The average begins as the weights of the first update.

    Args:
        decay: average = decay * average + (1 - decay) * weights.
        every_n_steps: optimizer steps between updates.
        start_step: number of optimizer steps before the first update.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, start_step: int = 0) -> None:
        expect_number(decay, "EMA(decay=...)")
        expect_number(every_n_steps, "EMA(every_n_steps=...)", whole=True)
        expect_number(start_step, "EMA(start_step=...)", whole=True)
        for name, value, good in (
            ("decay", decay, 0 <= decay <= 1),
            ("every_n_steps", every_n_steps, every_n_steps >= 1),
            ("start_step", start_step, start_step >= 0),
        ):
            if not good:
                raise ValueError(
                    f"EMA({name}={value!r}) is out of range: decays are in [0, 1], intervals begin with 1."
                )
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self._average: WeightAverage | None = None
        self._last = 0  # the last step
        self._restored: int | None = None  # that of the checkpoint

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, ZeroStrategy):
            raise TypeError(
                f"lt_zero.EMA averages sharded weights, and the strategy is {type(trainer.strategy).__name__}. Use "
                "ZeroStrategy, or Lightning's EMAWeightAveraging."
            )
        if sum(isinstance(callback, EMA) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Trainer(callbacks=...) has several lt_zero.EMA. Keep one.")
        self._average = None  # an error may have ended the last run

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, ZeroStrategy)
        engine = trainer.strategy.engine
        self._average = WeightAverage(engine)
        saves = bool(trainer.checkpoint_callbacks)
        accumulates = trainer.accumulate_grad_batches > 1
        check_optimizers(engine, built_by(engine), trainer.optimizers, accumulates, saves, averages=1)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = trainer.global_step if self._restored is None else self._restored
        self._restored = None

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if self._due(step) > self._due(self._last):
            assert self._average is not None
            self._average.update(self.decay)
        self._last = step

    def _due(self, step: int) -> int:
        """The number of updates due up to a step. A batch of several optimizers has several steps."""
        return max(0, step - self.start_step - 1 + self.every_n_steps) // self.every_n_steps

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._average is not None:
            self._average.swap()

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._average is not None:
            self._average.swap()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._average is not None:
            self._average.finish()  # and keep the trained weights: checkpoints may be saved from now on, too

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._average is not None and not (self._average.finished and self._average.updates):
            self._average.close()
        self._average = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._last}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Averages are restored with the optimizers' states.
        self._restored = state_dict["last_step"]

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(trainer.strategy, ZeroStrategy)
        trainer.strategy.save_trained_weights(checkpoint)
