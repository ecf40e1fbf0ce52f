"""Restores the side effects of a module's forward, so that a recomputation starts from the same state as forward."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lt_zero.common.compat import version_of
from lt_zero.common.module_hooks import buffer_of
from lt_zero.common.tensor_tree import iter_containers, iter_tensors
from lt_zero.core.engine.fp32_modules import BATCH_NORMS

_BufferName = tuple[nn.Module, str]


class ForwardState:
    """Buffers and random generators of a module and its submodules.

    Buffers (running statistics, the vectors of spectral_norm, a codebook's averages) that forward changes are copied
    before it, put back for its recomputation, and set to their current values afterwards; so are random generators
    that modules hold as attributes. Versions tell which buffers change: the first forward in training copies all, later
    ones only those that have changed. torch's default generators are restored by ``torch.utils.checkpoint``; Python
    attributes of modules are not restored.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        # Copy also frozen ones, which may be unfrozen later.
        norms = [m for m in self.modules if isinstance(m, BATCH_NORMS)]
        self.changing: set[_BufferName] = {(n, name) for n in norms for name, _ in n.named_buffers(recurse=False)}
        self.known = False  # a forward in training has ended


class SavedState:
    """The values that one forward may change, as they were before it.

    Beside the buffers and generators of a ``ForwardState`` these are objects among the arguments. Without them, an
    object that forward writes to (a key-value cache, a collector of losses) would be written to twice, and a cache that
    has grown would give tensors of other shapes. A recomputation sees attributes, and the lists and dicts in them, as
    forward saw them. In-place changes of tensors are not restored.
    """

    def __init__(self, state: ForwardState, arguments: Any) -> None:
        self._state = state
        trained = [m for m in state.modules if getattr(m, "training", False)]  # frozen scripts have no such attribute
        names = [(m, name) for m in trained for name, _ in m.named_buffers(recurse=False)]
        found = {name: buffer for name in names if (buffer := _get(name)) is not None}
        self._versions = {name: (buffer, version_of(buffer)) for name, buffer in found.items()}
        copied = found.keys() & state.changing if state.known else found.keys()
        self._buffers = {name: found[name].clone() for name in copied}
        # torch restores its default generators only, not those that a module draws from by itself.
        values = [value for m in state.modules for value in vars(m).values()]
        self._generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
        self._objects = [(held, held.copy()) for held in iter_containers(tuple(_objects(arguments)))]
        # Precision plugins and fp32 modules set the default dtype around forward only.
        self._dtype = torch.get_default_dtype()

    def after_forward(self) -> None:
        """Keep only changed values: the others would hold the entries of all layers until the recomputation."""
        changed = {p for p, (b, v) in self._versions.items() if _get(p) is not b or version_of(b) != v}
        self._versions = {}
        if self._buffers or changed:
            self._state.changing |= changed
            self._state.known = True
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in self._state.changing}
        self._objects = [(held, old) for held, was in self._objects if (old := _replaced(held, was))]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context for a recomputation; everything gets its current value back afterwards."""
        # The tensors themselves, not copies: the engine and the user refer to them.
        buffers = {name: _get(name) for name in self._buffers}
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        objects = [(held, {key: _at(held, key) for key in old}) for held, old in self._objects]
        dtype = torch.get_default_dtype()
        # Copies: with retain_graph there may be another recomputation.
        copies = {name: buffer.clone() for name, buffer in self._buffers.items()}
        try:
            _put(copies, self._generators, self._objects, self._dtype)
            yield
        finally:
            _put(buffers, generators, objects, dtype)


def _put(
    buffers: Mapping[_BufferName, Tensor | None],
    generators: list[tuple[torch.Generator, Tensor]],
    objects: list[tuple[Any, dict[Any, Any]]],
    dtype: torch.dtype,
) -> None:
    for (module, name), buffer in buffers.items():
        setattr(module, name, buffer)
    for generator, state in generators:
        generator.set_state(state)
    for held, values in objects:
        for key, value in values.items():
            if key is _ALL:
                held[:] = value
            elif value is _MISSING:
                held.pop(key, None)
            else:
                held[key] = value
    torch.set_default_dtype(dtype)


def _get(name: _BufferName) -> Tensor | None:
    buffer = buffer_of(*name)
    return buffer if buffer is not None and not buffer.is_inference() else None


_ALL, _MISSING = object(), object()


def _objects(value: Any) -> Iterator[Any]:
    """The objects in tuples, lists and dicts; these containers are rebuilt for each recomputation."""
    if type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _objects(item)
    elif not isinstance(value, Tensor):
        yield value


def _at(held: Any, key: Any) -> Any:
    return list(held) if key is _ALL else held.get(key, _MISSING)


def _replaced(held: Any, before: Any) -> dict[Any, Any]:
    """The old values of changed keys; of a changed list all items, under ``_ALL``."""
    if isinstance(held, list):
        same = len(held) == len(before) and all(a is b for a, b in zip(held, before, strict=True))
        return {} if same else {_ALL: before}
    return {key: _at(before, key) for key in {**before, **held} if _at(before, key) is not _at(held, key)}


class Caches:
    """Removes empty key-value caches from the arguments of recomputed modules; ``warns`` about the first.

    transformers create such a cache in training, too, if ``use_cache`` is on. It would hold all keys and values until
    backward, which recomputation is meant to avoid. Their own gradient checkpointing also runs blocks without it. A
    cache with content (a learned prefix) is passed on. Caches are recognized by their methods, since there are many
    classes of them and transformers are not imported here.
    """

    def __init__(self, warns: bool) -> None:
        self._warns = warns
        self._taken = WeakIdKeyDictionary()  # caches that were empty; blocks without recomputation may fill them later

    def without(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of ``forward``, with None for caches of optional parameters."""
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
        if self._warns:
            self._warns = False
            warnings.warn(
                f"Recomputed modules run without the {type(value).__name__} of `use_cache=True` in training: "
                "`past_key_values` in the model's output stays empty. Set `model.config.use_cache = False` for "
                "training; generation is not affected.",
                stacklevel=2,
            )
        return None


def _is_cache(value: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module, type)) or not hasattr(value, "__dict__"):
        return False
    return callable(getattr(value, "update", None)) and callable(getattr(value, "get_seq_length", None))
