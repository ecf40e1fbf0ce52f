"""Compilation of the repeated blocks of a model, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lt_zero.common.compat.of_compile import is_compiled, undo_compile
from lt_zero.common.errors import ConfigError
from lt_zero.common.fields import thawed
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.find_units import class_name, find_repeated, repeated_classes

_KEY = "compile"


@dataclass(frozen=True)
class CompiledBlocks:
    """Blocks that are compiled until ``remove``."""

    blocks: tuple[nn.Module, ...]

    def remove(self) -> None:
        """Let the blocks run as they were."""
        for block in self.blocks:
            undo_compile(block)


def compile_blocks(root: nn.Module, backend: str, kwargs: Mapping[str, Any], peers: ShardGroup) -> CompiledBlocks:
    """Compile the repeated blocks of ``root`` that are not compiled yet. torch compiles them when they are called.

    ``backend``, ``kwargs``: of torch.compile. ``peers``: the ranks that have the same module. Collective, if others
    have other parts of the model.

    Raises:
        ConfigError: on all ranks, there are no repeated blocks on any, or torch does not know the backend or an
            argument.
    """
    found = [module for _, module in find_repeated(root)]
    if peers.size < peers.world.size:
        names = repeated_classes(root, peers.world)
        found = _outermost(root, names)
        some = bool(names)
    else:
        some = bool(found)
    if not some:
        raise ConfigError.about(
            _KEY,
            f"{_KEY}.disable=False compiles repeated blocks, and {type(root).__name__} has none. Remove the block "
            f"{_KEY}, and call torch.compile on modules of your choice.",
        )
    compiled = CompiledBlocks(tuple(module for module in found if not is_compiled(module)))
    # A rank that has no block finds the same error as the others.
    for module in compiled.blocks or (nn.Identity(),):
        try:
            module.compile(backend=backend, **thawed(kwargs))
        except Exception as error:
            compiled.remove()
            raise ConfigError.about(
                _KEY,
                f"torch.compile(backend={backend!r}, **{dict(kwargs)}) is an error of torch: {error}. "
                f"Change {_KEY}.backend or {_KEY}.kwargs.",
            ) from error
    return compiled


def _outermost(root: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The modules inside of ``root`` whose class has one of these names, none inside another."""
    found, inside = list[nn.Module](), set[nn.Module]()
    for module in root.modules():  # parents come before their children
        if module is not root and module not in inside and class_name(module) in names:
            found.append(module)
            inside.update(module.modules())
    return found
