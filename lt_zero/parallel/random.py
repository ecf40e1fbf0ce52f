"""Random numbers where tensor-parallel ranks have slices: dropout between a column-wise and a row-wise matrix.

Note [Two streams]
    Tensor ranks draw the same numbers, as they begin with the same generators and make the same calls. That is right
    for tensors that all of them have: with other masks their copies would drift apart. Slices of one tensor would all
    get the same mask, though. Nothing in a plain tensor tells that it is a slice, so a plan says so: ``LocalRandom``.
    Its stream is made anew for each call, from a number of the common stream and the number of the rank. So it has no
    state: where the generators are restored, by a checkpoint or for recomputation, it repeats the same numbers.

Note [Random operations of DTensor]
    On a GPU a DTensor that is sharded gets other numbers on each rank, at offsets in the common stream, and one that is
    replicated the same. On a CPU torch 2.13 draws from the default generator in both cases, so that shards get equal
    masks. ``LocalRandom`` is right for sharded ones on both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from lt_zero.common import accelerator
from lt_zero.common.module_hooks import Hook
from lt_zero.common.tensor_tree import iter_tensors

_SEEDS = 2**62


class LocalRandom(ParallelStyle):
    """The style of a module whose inputs are slices: each tensor-parallel rank draws other numbers in its forward.

    For ``parallelize_module``, as ``ColwiseParallel``. Not for modules that also draw for tensors that all ranks have.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        stream = _LocalStream(device_mesh)
        module.register_forward_pre_hook(Hook(stream.enter), with_kwargs=True)
        module.register_forward_hook(Hook(stream.leave), always_call=True)
        return module


class _LocalStream:
    """Switches the default generators of one module's calls. See Note [Two streams]."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._before: list[list[Tensor]] = []  # states of the generators, by nested call

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Draw a number from the common stream, and begin that of this rank.

        Raises:
            ValueError: all ranks have an input.
        """
        if not module.training:
            self._before.append([])
            return
        for tensor in iter_tensors((args, kwargs)):
            if isinstance(tensor, DTensor) and all(isinstance(p, Replicate) for p in tensor.placements):
                raise ValueError(
                    f"{type(module).__name__} with the style LocalRandom got a tensor that is replicated: with other "
                    "numbers on each rank its copies would drift apart. Remove the style from the plan."
                )
        seed = seed_of(draw_seed(), self._mesh.get_local_rank())
        self._before.append([generator.get_state() for generator in self._generators()])
        for generator in self._generators():
            generator.manual_seed(seed)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Go on with the common stream."""
        if not self._before:
            return  # ``enter`` has failed
        for generator, state in zip(self._generators(), self._before.pop(), strict=False):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        return accelerator.default_generators(self._mesh.device_type)


def draw_seed() -> int:
    """Draw a seed from the stream of the CPU."""
    return int(torch.randint(_SEEDS, (), device="cpu", dtype=torch.int64))


def seed_of(common: int, *numbers: int) -> int:
    """A seed that depends on all of its arguments."""
    told = " ".join(map(str, (common, *numbers))).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") % _SEEDS


@contextmanager
def seeded(seed: int | None, device_type: str) -> Iterator[None]:
    """Context in which the default generators begin with ``seed``, or, if that is None, with what they have.

    They go on afterwards as if nothing had been drawn.
    """
    generators = accelerator.default_generators(device_type)
    before = [generator.get_state() for generator in generators]
    if seed is not None:
        for generator in generators:
            generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
