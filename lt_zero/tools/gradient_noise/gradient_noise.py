"""``gradient_noise_scale``: about how many samples a step should have (McCandlish et al., arXiv:1812.06162, A.1).

Note [How it is estimated]
    Each micro-batch of each rank gives a gradient of few samples, the step that of all. If n micro-batches of b samples
    make a step of B, the expected squared norms are
        small = |G|^2 + S / b,    big = |G|^2 + S / B,
    with the true gradient G and the sum S of variances of one sample's gradient. Both unknowns are solved for, averaged
    over steps, and divided: S / |G|^2 is the simple noise scale. The norm of a micro-batch is added up by hooks
    of the parameters, before any reduction, so it is the same at every stage.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import PlaceInRun
from lt_zero.core.followers import Figure

KEY = "gradient_noise_scale"
_KEPT = 0.9  # of the averages, from step to step


class GradientNoise(Figure):
    """Measures the noise of one engine's gradients, in each training anew.

    Args:
        engine: has one optimizer when a training begins.
        run: that trains it.
    """

    name = KEY
    label = "noise_scale"

    def __init__(self, engine: Engine, run: PlaceInRun) -> None:
        self._engine, self._in_parts = weakref.ref(engine), run.in_parts
        self._training: _Training | None = None

    @override
    def begin(self, micro_batches: int, weight: Callable[[], float]) -> None:
        """Measure from here on. For the arguments see ``Figure``; steps with another number are left out.

        Raises:
            ConfigError: gradients have no such noise here, or are not the mean of ranks.
        """
        engine = self._engine()
        if engine is not None:
            self.end()
            self._check(engine, micro_batches)
            engine.exchange.check_mean()
            self._training = _Training(engine, micro_batches, weight)

    def _check(self, engine: Engine, micro_batches: int) -> None:
        if self._in_parts:
            text = "needs ranks that all see other data, and here some have parts of the model or of sequences"
        elif len(engine.optimizers) != 1:
            text = f"needs one optimizer, and there are {len(engine.optimizers)}"
        elif engine.peers.sums_gradients:
            text = "needs the mean of ranks, and gradient_allreduce_op is another"
        elif engine.world.size * micro_batches == 1:
            text = "compares micro-batches, and a step has one: accumulate gradients, or use several ranks"
        else:
            return
        raise ConfigError.about(KEY, f"{KEY}=true {text}. Remove the key otherwise.")

    @override
    def end(self) -> None:
        if self._training is not None:
            self._training.stop()
        self._training = None

    @override
    def see_batch(self, rows: int) -> None:
        if self._training is not None:
            self._training.see_batch(rows)

    @override
    def read(self) -> float | None:
        """The noise scale in samples; None while it is unknown, or if noise hides the gradient. Collective."""
        return self._training.read() if self._training is not None else None


class _Training:
    """The noise of one training. Arguments are those of ``Figure.begin``."""

    def __init__(self, engine: Engine, micro_batches: int, weight: Callable[[], float]) -> None:
        self._world = engine.world
        self._weight = weight
        self._micro_batches = micro_batches
        self._parts = engine.world.size * micro_batches
        (self._sharded,) = engine.optimizers
        self._squares = torch.zeros((), dtype=torch.float64, device=engine.device)  # of this rank's micro-batches
        self._backwards = 0  # since the last step
        self._rows = 0
        self._new: list[tuple[Tensor, Tensor, int]] = []  # of steps: squares, norm of the step, samples of this rank
        self._averages: tuple[float, float] | None = None  # S and |G|^2
        see = partial(_see, weakref.ref(self))
        self._handles: list[Any] = [p.register_hook(see) for p in engine.root.parameters() if p.requires_grad]
        lists: list[tuple[list[Callable[[], None]], Callable[[], None]]] = [
            (engine.after_backward, self._end_backward),
            (engine.before_step, self._before_step),
        ]
        for listeners, listener in lists:
            listeners.append(listener)
        self._forget = [partial(listeners.remove, listener) for listeners, listener in lists]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for forget in self._forget:
            forget()
        self._handles, self._forget = [], []

    def see_batch(self, rows: int) -> None:
        """Note the samples of a micro-batch."""
        self._rows += rows

    def see(self, grad: Tensor) -> None:
        """Add the squares of a parameter's gradient."""
        self._squares += torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).double() ** 2

    def _end_backward(self) -> None:
        self._backwards += 1

    def _before_step(self) -> None:
        """Take the norms of the step. Collective."""
        if self._backwards == self._micro_batches:
            grads = self._sharded.grads
            self._sharded.engine.finish_reductions()
            norm = grads.unscaled_norm()
            self._new.append((self._squares / self._weight() ** 2, norm.double(), self._rows))
        self._squares = torch.zeros_like(self._squares)
        self._backwards = self._rows = 0

    def read(self) -> float | None:
        """The noise scale in samples; None while it is unknown, or if noise hides the gradient. Collective.

        The host waits for the device once if there were steps since the last call.
        """
        new, self._new = self._new, []
        if new:
            device, parts = self._squares.device, self._parts
            rows = accelerator.send(torch.tensor([samples for _, _, samples in new], dtype=torch.float64), device)
            sums = self._world.sum_all(torch.stack([torch.stack([each[0] for each in new]), rows]), "gradient noise")
            # The only copy to the host, which waits for the device.
            norms = torch.stack([norm for _, norm, _ in new]).to(sums)
            for total, samples, norm in zip(*torch.cat([sums, norms[None]]).tolist(), strict=True):
                small, big = total / parts, norm**2
                found = (small - big) * samples / (parts - 1), (parts * big - small) / (parts - 1)
                if all(map(math.isfinite, found)):  # otherwise the step was skipped
                    before = self._averages or found
                    self._averages = (
                        _KEPT * before[0] + (1 - _KEPT) * found[0],
                        _KEPT * before[1] + (1 - _KEPT) * found[1],
                    )
        if self._averages is None or self._averages[1] <= 0:
            return None
        return max(0.0, self._averages[0] / self._averages[1])


def _see(training: weakref.ref[_Training], grad: Tensor) -> None:
    """Pass a gradient on. Graphs refer to parameters, and must not hold the engine: graph_tie.py."""
    if (known := training()) is not None:
        known.see(grad)
