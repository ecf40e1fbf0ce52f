"""What a module's forward changes beside its output, so that a recomputation starts from what forward started from.

Note [State]
    Buffers (running statistics, the vectors of spectral_norm, a codebook's averages) and generators of random numbers
    that the module holds as attributes. Those that forward changes are copied before it, put in place around its
    recomputation, and are afterwards as they were before that. Which ones change is seen by their versions: all are
    copied before the first forward in training, later only those that have changed. torch's default generators are
    restored by ``torch.utils.checkpoint`` itself; attributes of the module in Python are not restored.

Note [Objects]
    An object among the arguments (a cache of keys and values, a collector of losses) that forward writes to would be
    written to twice, and a cache that has grown gives tensors of other shapes. A recomputation finds the attributes,
    and the lists and dicts in them, as forward found them, and leaves them as it found them. Tensors that were written
    in place are not restored.

Note [Caches]
    A cache that was made for this forward (transformers make one in training, too, while ``use_cache`` is on) would
    keep all keys and values until backward, which recomputation is there to save. As under transformers' own
    gradient checkpointing a block runs without it. A cache that came with something in it (a learned prefix) is used.
    Known by what it can do: there are caches of many classes, and no import of transformers here.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lt_zero.common.compat import version_of
from lt_zero.common.tensor_tree import iter_containers, iter_tensors
from lt_zero.engine.fp32_modules import BATCH_NORMS

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


class Objects:
    """What objects among the arguments hold before one forward. See Note [Objects]."""

    def __init__(self, arguments: Any) -> None:
        self._before = [(held, held.copy()) for held in iter_containers(tuple(_objects(arguments)))]

    def after_forward(self) -> None:
        """See what has changed. Nothing else is kept, or a recomputation would keep what all layers have left there."""
        self._before = [(held, old) for held, was in self._before if (old := _replaced(held, was))]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation."""
        now = [(held, {key: _at(held, key) for key in old}) for held, old in self._before]
        self._put(self._before)
        try:
            yield
        finally:
            self._put(now)

    @staticmethod
    def _put(places: list[tuple[Any, dict[Any, Any]]]) -> None:
        for held, values in places:
            for key, value in values.items():
                if key is _ALL:
                    held[:] = value
                elif value is _MISSING:
                    held.pop(key, None)
                else:
                    held[key] = value


_ALL, _MISSING = object(), object()


def _objects(value: Any) -> Iterator[Any]:
    """What is in tuples, lists and dicts, which each recomputation gets anew."""
    if type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _objects(item)
    elif not isinstance(value, Tensor):
        yield value


def _at(held: Any, key: Any) -> Any:
    return list(held) if key is _ALL else held.get(key, _MISSING)


def _replaced(held: Any, before: Any) -> dict[Any, Any]:
    """By key, what stood where something else stands now; of a list, all."""
    if isinstance(held, list):
        same = len(held) == len(before) and all(a is b for a, b in zip(held, before, strict=True))
        return {} if same else {_ALL: before}
    return {key: _at(before, key) for key in {**before, **held} if _at(before, key) is not _at(held, key)}


class Caches:
    """Keeps caches that were made for a forward from modules that are recomputed. See Note [Caches].

    Args:
        tells: warn about the first one.
    """

    def __init__(self, tells: bool = True) -> None:
        self._tells = tells
        self._taken = WeakIdKeyDictionary()  # those that were empty: blocks that are not recomputed may fill them

    def without(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of ``forward``, with None for caches where it may be None."""
        if not any(_is_cache(value) for value in (*args, *kwargs.values())):
            return args, kwargs
        known = inspect.signature(forward).parameters
        optional = {name for name, parameter in known.items() if parameter.default is None}
        named = zip([*known, *[""] * len(args)], args, strict=False)
        some = tuple(self._or_none(value) if name in optional else value for name, value in named)
        return some, {name: self._or_none(v) if name in optional else v for name, v in kwargs.items()}

    def _or_none(self, value: Any) -> Any:
        if not _is_cache(value):
            return value
        if value not in self._taken:
            if any(tensor.numel() for tensor in iter_tensors(value)):
                return value
            self._taken[value] = None
        if self._tells:
            self._tells = False
            warnings.warn(
                f"Recomputed modules run without the {type(value).__name__} of `use_cache=True` in training: "
                "`past_key_values` in the model's output stays empty there. Set `model.config.use_cache = False` for "
                "training; generation is as before.",
                stacklevel=2,
            )
        return None


def _is_cache(value: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module, type)) or not hasattr(value, "__dict__"):
        return False
    return callable(getattr(value, "update", None)) and callable(getattr(value, "get_seq_length", None))
