"""A key with a rule: ``noise`` adds noise to gradients, and a resumed run goes on with the same noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Block, Entry, Feature, PlaceInRun, Problem, Real, Whole, key


class NoiseBlock(Block):
    """Noise on the gradients of each rank."""

    scale: Real = key(0.0, "standard deviation of the noise; 0: none", ge=0, le=1)
    seed: Whole = key(0, "of the noise, to which each rank adds its number")

    @override
    def problems_in(self, config: Any) -> Iterator[Problem]:
        if self.scale > 0 and (sums := config.gradient_allreduce_op) == "sum":
            text = f"noise.scale={self.scale:g} is that of a mean, and gradient_allreduce_op={sums!r} adds gradients"
            yield Problem("noise.scale", f"{text}. Remove one of them.")


class Noise(Feature):
    """Noise that is drawn for each gradient, in the order of backward."""

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> Noise:
        block: NoiseBlock = self.config.noise
        self._scale = block.scale
        self._generator = torch.Generator(engine.device).manual_seed(block.seed + engine.world.rank)
        self._handles = [p.register_hook(self._add) for p in engine.root.parameters() if p.requires_grad]
        return self

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _add(self, grad: Tensor) -> Tensor:
        noise = torch.empty_like(grad).normal_(generator=self._generator)
        return grad + self._scale * noise

    @override
    def states(self) -> Mapping[str, Noise]:
        return {"noise": self}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._generator.set_state(state["generator"])


ENTRY = Entry("noise", "tests.outside.noise:Noise", "noise", lambda config: config.noise.scale > 0, NoiseBlock)
