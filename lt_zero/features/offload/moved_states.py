"""Weights and states that rest in host memory between two steps: ``engine.offload_states`` and ``reload_states``.

Note [Moving storages]
    Many tensors lie in one storage: parameters, fragments of an optimizer, rows of its kernel. All of them are found
    among Python's objects, and get a ``data`` that lies in a copy in host memory; so what a script reads meanwhile are
    the values, on the CPU. The memory of the device is free once nothing refers to the storage any more. If something
    else does (a graph, an array of numpy, memory that ranks share), it would keep the old values: such a storage stays
    where it is.
    Weights that stay gathered have storages of their own inside of the memory of their bucket (flat_storage.py). So
    tensors are found by the memory that they lie in, and keep a storage of their own wherever they are moved.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lt_zero.common import accelerator
from lt_zero.common.compat import storage_key, storage_references, without_torch_function
from lt_zero.common.flat_storage import with_own_storage
from lt_zero.common.moment_form import stored_part
from lt_zero.common.users_code import warn
from lt_zero.core.engine.engine import Engine
from lt_zero.core.stores.pinned import host_buffer
from lt_zero.core.stores.store import Store
from lt_zero.offload.host_store import FedStore

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
_ON_DEVICE = (Store, FedStore)  # what their subclasses keep is elsewhere already


class Lying(NamedTuple):
    """A tensor, and where it begins in the memory that it lies in, in elements.

    ``alone``: its storage is not the one of the whole memory.
    """

    tensor: Tensor
    begin: int
    alone: bool


@dataclass
class MovedStorage:
    """A storage that is in host memory, and the tensors that lie in its memory."""

    tensors: list[Lying]
    host: Tensor  # uint8, 1D
    device: torch.device


class MovedStates:
    """The states of an engine that are away from its device.

    Attributes:
        kinds: those of KINDS that are away.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._moved: list[MovedStorage] = []
        self._hook: RemovableHandle | None = None
        self.kinds: set[str] = set()

    def refuse(self, call: str) -> None:
        """Raise RuntimeError if states are away; ``call`` needs them."""
        if self.kinds:
            raise RuntimeError(
                f"{call} was called while {', '.join(sorted(self.kinds))} are in host memory (engine.offload_states). "
                "Call engine.reload_states() before."
            )

    def offload(self, kinds: set[str], optimizer: torch.optim.Optimizer, pin: bool) -> None:
        """Move states of ``kinds``, between steps. No-op on a device without memory of its own, but for ``refuse``.

        Raises:
            RuntimeError: some of them are away already.
        """
        if again := kinds & self.kinds:
            raise RuntimeError(
                f"engine.offload_states(include={sorted(kinds)}): {', '.join(sorted(again))} are in host memory "
                "already. Call engine.reload_states() between two calls."
            )
        engine = self._engine
        engine.finish_steps()
        engine.gatherer.release_all()
        engine.reducer.free_buffers()
        if accelerator.is_apart(engine.device):
            self._moved += move_to_host(_tensors_of(engine, optimizer, kinds), pin)
        if self._hook is None:  # the module may be called without the engine
            self._hook = engine.root.register_forward_pre_hook(lambda *_: self.refuse("A forward"), prepend=True)
        self.kinds |= kinds

    def reload(self) -> None:
        """Move all states back. No-op if none is away."""
        move_back(self._moved)
        if self._hook is not None:
            self._hook.remove()
        self._hook, self.kinds = None, set()


def kinds_of(include: Container[Any] | None, call: str) -> set[str]:
    """The names in ``include``, of strings or members of an enumeration; None: all.

    Raises:
        ValueError: one is unknown.
    """
    if include is None:
        return set(KINDS)
    given = [include] if isinstance(include, str) else include
    if not isinstance(given, Iterable):
        return {kind for kind in KINDS if kind in given}
    names = {str(getattr(kind, "value", kind)) for kind in given}
    if unknown := names - set(KINDS):
        raise ValueError(f"{call}(include=...) has {', '.join(sorted(unknown))}. Choose from {', '.join(KINDS)}.")
    return names


def _tensors_of(engine: Engine, optimizer: torch.optim.Optimizer, kinds: set[str]) -> Iterator[Tensor]:
    """A tensor in each storage of ``kinds``; what is offloaded is elsewhere already."""

    def held(stores: Iterable[Store]) -> Iterator[Tensor]:  # on the device
        for store in stores:
            if type(store) in _ON_DEVICE and store.nbytes:
                store.wait_copied()
                yield store.tensor

    if "optim_states" in kinds:
        values = [value for state in optimizer.state.values() for value in state.values()]
        parts = [stored_part(value) for value in values if isinstance(value, Tensor) and value.dim()]
        # Offloaded ones lie in host memory, pinned or aligned for files, and must stay there.
        yield from (part for part in parts if part.device.type == engine.device.type)
    for bucket in engine.buckets:
        weights = bucket.weights
        if "optim_states" in kinds:
            yield from held([*bucket.states.by_key.values(), *bucket.states.beside.values()])
        if "hp_params" in kinds and weights.master is not None and weights.has_master:
            yield from held([weights.master])
        if "lp_params" in kinds:
            yield from [bucket.compute.flat] if not bucket.sharding.params else held([weights.gather_source])
        if "lp_grads" in kinds:
            yield from held(bucket.grads.stores())


def move_to_host(tensors: Iterable[Tensor], pin: bool) -> list[MovedStorage]:
    """Move the storages of ``tensors`` to host memory, with all tensors that lie in them. See Note [Moving storages].

    ``pin``: as far as the system allows it, where the device can make use of it.
    """
    with without_torch_function(), torch.no_grad():
        storages = _outermost(t.untyped_storage() for t in tensors if t.numel())
        moved, stays = [], 0
        for storage, lying in zip(storages, _lying_in(storages), strict=True):
            device = storage.device
            if _is_held_elsewhere(storage, lying):
                stays += storage.nbytes()
                continue
            host = host_buffer(storage.nbytes(), pin and accelerator.is_accelerator(device))[: storage.nbytes()]
            host.copy_(_bytes(storage))
            moved.append(MovedStorage(lying, host, device))
        # Only now: the host may not have had memory for all of them, and then none is away.
        for each in moved:
            _lay(each.tensors, each.host)
        storages.clear()
    for each in moved:
        accelerator.synchronize(each.device)
    if stays:
        warn(f"engine.offload_states leaves {stays:,} bytes on the device: something else refers to them.")
    return moved


def move_back(moved: list[MovedStorage]) -> None:
    """Move storages back to their devices, and forget them."""
    with without_torch_function(), torch.no_grad():
        for each in moved:
            values = torch.empty(each.host.numel(), dtype=torch.uint8, device=each.device)
            values.copy_(each.host)
            _lay(each.tensors, values)
    moved.clear()


def _outermost(storages: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Those whose memory is not a part of another one's, by address."""
    found: list[torch.UntypedStorage] = []
    end = 0
    for storage in sorted(storages, key=lambda storage: (storage.data_ptr(), -storage.nbytes())):
        if storage.data_ptr() >= end:
            found.append(storage)
            end = storage.data_ptr() + storage.nbytes()
    return found


def _lying_in(storages: list[torch.UntypedStorage]) -> list[list[Lying]]:
    """The tensors among Python's objects that lie in the memory of each of ``storages``, which are in order."""
    addresses = [storage.data_ptr() for storage in storages]
    keys = [storage_key(_bytes(storage)) for storage in storages]
    found: list[list[Lying]] = [[] for _ in storages]
    for value in gc.get_objects():
        address = _address(value)
        if address is None:
            continue
        number = bisect_right(addresses, address) - 1
        if number < 0:
            continue
        offset = address - addresses[number]
        if offset < storages[number].nbytes():
            begin = offset // value.element_size() + value.storage_offset()
            found[number].append(Lying(value, begin, storage_key(value) != keys[number]))
    return found


def _is_held_elsewhere(storage: torch.UntypedStorage, lying: list[Lying]) -> bool:
    """True if something beside the tensors ``lying`` in its memory refers to it, through whichever storage."""
    known = Counter(storage_key(each.tensor) for each in lying)
    inside = {storage_key(each.tensor): each.tensor.untyped_storage() for each in lying}
    inside[storage_key(_bytes(storage))] = storage
    # ``inside`` refers to each of them, and the caller to the outermost.
    return any(storage_references(each) > known[key] + 1 for key, each in inside.items())


def _address(value: Any) -> int | None:
    """The address of the storage that a tensor lies in; None for what is none, or has no storage of its own."""
    if not issubclass(type(value), Tensor) or value.layout is not torch.strided or value.is_meta:
        return None
    try:
        return int(Tensor.untyped_storage(value).data_ptr())
    except RuntimeError:  # of wrappers and fakes
        return None


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _lay(tensors: list[Lying], values: Tensor) -> None:
    """Let tensors lie in ``values`` (uint8, 1D), each where it is in its memory."""
    for tensor, begin, alone in tensors:
        place = torch.empty(0, dtype=tensor.dtype, device=values.device)
        place.set_(values.untyped_storage(), begin, tensor.size(), tensor.stride())
        tensor.data = with_own_storage(place) if alone and place.is_contiguous() else place
