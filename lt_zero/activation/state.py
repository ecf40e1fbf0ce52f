"""What a module's forward changes beside its output, so that a recomputation starts from what forward started from.

Note [State]
    Buffers (running statistics, the vectors of spectral_norm, a codebook's averages) and generators of random numbers
    that the module holds as attributes. Those that forward changes are copied before it, put in place around its
    recomputation, and are afterwards as they were before that. Which ones change is seen by their versions: all are
    copied before the first forward in training, later only those that have changed. torch's default generators are
    restored by ``torch.utils.checkpoint`` itself; attributes in Python are not restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lt_zero.compat import version_of
from lt_zero.core.islands import BATCH_NORMS

_Place = tuple[nn.Module, str]


class State:
    """The state of one module and those in it. See Note [State]."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        norms = [m for m in self._modules if isinstance(m, BATCH_NORMS)]  # they are not frozen for ever, if they are
        self.changing: set[_Place] = {(norm, name) for norm in norms for name, _ in norm.named_buffers(recurse=False)}
        self._seen = False  # a forward in training has ended

    def before_forward(self) -> Saved:
        """Copies of what forward may change."""
        return Saved(self, self.changing if self._seen else set(self.versions()))

    def note(self, changed: set[_Place]) -> None:
        """A forward in training has changed these buffers."""
        self.changing |= changed
        self._seen = True

    def generators(self) -> list[torch.Generator]:
        return [value for m in self._modules for value in vars(m).values() if isinstance(value, torch.Generator)]

    def versions(self) -> dict[_Place, tuple[Tensor, int]]:
        """Of all buffers, while their modules train."""
        places = [(m, name) for m in self._modules if m.training for name in m._buffers]
        return {place: (buffer, version_of(buffer)) for place in places if (buffer := _get(place)) is not None}


class Saved:
    """The state before one forward."""

    def __init__(self, state: State, places: set[_Place]) -> None:
        self._state, self._versions = state, state.versions()
        found = {place: _get(place) for place in places if place[0].training}
        self._buffers = {place: buffer.clone() for place, buffer in found.items() if buffer is not None}
        self._generators = [(g, g.get_state()) for g in state.generators()]

    def after_forward(self) -> None:
        """See which buffers have changed; the others are not kept."""
        changed = {p for p, (b, v) in self._versions.items() if _get(p) is not b or version_of(b) != v}
        self._versions = {}
        if self._buffers or changed:
            self._state.note(changed)
        kept = self._state.changing
        self._buffers = {place: buffer for place, buffer in self._buffers.items() if place in kept}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation."""
        now = {place: _get(place) for place in self._buffers}
        drawn = [(generator, generator.get_state()) for generator, _ in self._generators]
        for (module, name), buffer in self._buffers.items():
            setattr(module, name, buffer.clone())  # a graph may be walked again
        for generator, value in self._generators:
            generator.set_state(value)
        try:
            yield
        finally:
            for (module, name), current in now.items():
                setattr(module, name, current)
            for generator, value in drawn:
                generator.set_state(value)


def _get(place: _Place) -> Tensor | None:
    buffer = place[0]._buffers.get(place[1])
    return buffer if buffer is not None and not buffer.is_inference() else None
