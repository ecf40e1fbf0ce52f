"""Weights and states that rest in host memory between two steps: ``engine.offload_states`` and ``reload_states``.

Note [Moving storages]
    Many tensors lie in one storage: parameters, fragments of an optimizer, rows of its kernel. All of them are found
    among Python's objects, and get a ``data`` that lies in a copy in host memory; so what a script reads meanwhile are
    the values, on the CPU. The memory of the device is free once nothing refers to the storage any more. If something
    else does (a graph, an array of numpy, memory that ranks share), it would keep the old values: such a storage stays
    where it is.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lt_zero.common import accelerator
from lt_zero.common.compat import storage_references, without_torch_function
from lt_zero.common.users_code import warn
from lt_zero.engine.engine import Engine
from lt_zero.io.pinned import host_buffer
from lt_zero.offload.host_store import FedStore, is_apart
from lt_zero.offload.store import Store
from lt_zero.ops.moments import stored_part

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
_ON_DEVICE = (Store, FedStore)  # what their subclasses keep is elsewhere already


@dataclass
class MovedStorage:
    """A storage that is in host memory, and the tensors that lie in it."""

    tensors: list[Tensor]
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
        if is_apart(engine.device):
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
            yield from held([*bucket.states.values(), *bucket.beside.values()])
        if "hp_params" in kinds and weights.master is not None and weights.has_master:
            yield from held([weights.master])
        if "lp_params" in kinds:
            yield from [bucket.flat] if not bucket.sharding.params else held([weights.gather_source])
        if "lp_grads" in kinds:
            yield from held(bucket.grads.stores())


def move_to_host(tensors: Iterable[Tensor], pin: bool) -> list[MovedStorage]:
    """Move the storages of ``tensors`` to host memory, with all tensors that lie in them. See Note [Moving storages].

    ``pin``: as far as the system allows it, where the device can make use of it.
    """
    with without_torch_function(), torch.no_grad():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        found: dict[int, list[Tensor]] = {address: [] for address in storages}
        for value in gc.get_objects():
            if (address := _address(value)) in found:
                found[address].append(value)
        moved, stays = [], 0
        for address, storage in storages.items():
            lying, device = found[address], storage.device
            if storage_references(storage) > len(lying) + 1:  # ``storages`` has one
                stays += storage.nbytes()
                continue
            host = host_buffer(storage.nbytes(), pin and accelerator.is_accelerator(device))[: storage.nbytes()]
            host.copy_(_bytes(storage))
            moved.append(MovedStorage(lying, host, device))
        # Only now: the host may not have had memory for all of them, and then none is away.
        for each in moved:
            _lay(each.tensors, each.host)
        found.clear()
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


def _lay(tensors: list[Tensor], values: Tensor) -> None:
    """Let tensors lie in ``values`` (uint8, 1D), each where it is in its storage."""
    for tensor in tensors:
        place = torch.empty(0, dtype=tensor.dtype, device=values.device)
        place.set_(values.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = place
