"""The ``compile`` block of the configuration: the repeated blocks of a model are compiled in place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lt_zero.common.compat import is_compiled, undo_compile
from lt_zero.common.errors import ConfigError
from lt_zero.common.fields import thawed
from lt_zero.config.blocks import Compile
from lt_zero.engine.find_units import find_repeated

_KEY = "compile"


@dataclass(frozen=True)
class CompiledBlocks:
    """Blocks that are compiled until ``remove``."""

    blocks: tuple[nn.Module, ...]

    def remove(self) -> None:
        """Let the blocks run as they were."""
        for block in self.blocks:
            undo_compile(block)


def compile_blocks(root: nn.Module, config: Compile, may_have_none: bool = False) -> CompiledBlocks:
    """Compile the repeated blocks of ``root`` that are not compiled yet. torch compiles them when they are called.

    ``may_have_none``: a stage of a pipeline may have no repeated blocks.

    Raises:
        ConfigError: there are no repeated blocks, or torch does not know the backend or an argument.
    """
    found = find_repeated(root)
    if not found and not may_have_none:
        raise ConfigError.about(
            _KEY,
            f"{_KEY}.disable=False compiles repeated blocks, and {type(root).__name__} has none. Remove the block "
            f"{_KEY}, and call torch.compile on modules of your choice.",
        )
    compiled = CompiledBlocks(tuple(module for _, module in found if not is_compiled(module)))
    for module in compiled.blocks:
        try:
            module.compile(backend=config.backend, **thawed(config.kwargs))
        except Exception as error:
            compiled.remove()
            raise ConfigError.about(
                _KEY,
                f"torch.compile(backend={config.backend!r}, **{dict(config.kwargs)}) is an error of torch: {error}. "
                f"Change {_KEY}.backend or {_KEY}.kwargs.",
            ) from error
    return compiled
