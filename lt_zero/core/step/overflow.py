"""Reports of gradients that are not finite: the plain one, which subclasses that know where they began replace."""

from __future__ import annotations

from torch import nn

from lt_zero.core.engine.engine import Engine


class OverflowReport:
    """Tells of gradients that are not finite. This one names no module and no parameter; subclasses may."""

    def watch(self, root: nn.Module) -> None:
        """Watch the modules below ``root`` from the next forward on, so that ``skipped`` can name an overflow there."""

    def end(self) -> None:
        """Look at modules no more."""

    def unchecked(self, engine: Engine) -> str:
        """The warning where steps are not checked. Collective."""
        return trained_into_the_weights()

    def skipped(self, engine: Engine, steps: int, scale: float | None, watched: bool) -> str:
        """The error or warning about steps that were skipped. Collective.

        Args:
            engine: whose gradients are not finite.
            steps: so many were skipped.
            scale: the loss scale; None: weights are fp32.
            watched: ``watch`` was called before the step's first forward.
        """
        return f"{not_finite(steps, scale)} Check the data of that batch, or lower the learning rate or clip gradients."


def trained_into_the_weights(which: str = "") -> str:
    """The warning about a step that was not checked. ``which``: a sentence on its parameters, or nothing."""
    return (
        f"The loss or its gradients are not finite, and are trained into the weights.{which} Check the data of that "
        "batch, lower the learning rate or clip gradients. on_nonfinite=raise stops at the first such step, before the "
        "weights have changed, and names the module where it began; on_nonfinite=skip leaves such steps out; "
        "Trainer(detect_anomaly=True) finds the operation. This is not said again."
    )


def not_finite(steps: int, scale: float | None) -> str:
    """A sentence on skipped steps; arguments as for ``OverflowReport.skipped``."""
    skipped = f"{steps} optimizer step{'s were' if steps != 1 else ' was'} skipped"
    return f"Gradients are not finite{f' at loss scale {scale:g}' if scale is not None else ''}, {skipped}."
