"""Which checkpoints go through Lightning's checkpoint plugin, in a Trainer and in Fabric."""

from __future__ import annotations

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from lt_zero.config import ZeroConfig


def writes_directories(config: ZeroConfig, plugin: CheckpointIO) -> bool:
    """Whether checkpoints are directories, which no plugin writes.

    Raises:
        ValueError: they have to be, and a plugin writes files.
    """
    stock = type(plugin) is TorchCheckpointIO
    if config.checkpoint.format == "sharded" and not stock:
        raise ValueError(
            f'checkpoint.format="sharded" does not write through {type(plugin).__name__}. Remove that plugin, or set '
            'checkpoint.format="full".'
        )
    return config.sharded_checkpoints and stock
