"""Checkpoints of one file, which go through Lightning's checkpoint plugin, for the Trainer and Fabric."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, TypeVar

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from lt_zero.checkpoint.native.directory import is_url, whole_file
from lt_zero.config import ZeroConfig

Path = TypeVar("Path", bound="str | os.PathLike[str]")


def writes_directories(config: ZeroConfig, plugin: CheckpointIO) -> bool:
    """True if checkpoints are directories, which no plugin writes.

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


def local_file(plugin: CheckpointIO, path: Path) -> Path | None:
    """The path if it is a local file of torch.save; None if only the plugin can tell its kind."""
    return path if type(plugin) is TorchCheckpointIO and not is_url(path) else None


def write_file(plugin: CheckpointIO, content: Any, path: str, options: Any) -> None:
    """Write one file, on rank 0.

    A local file gets its name when it is complete: Lightning's way is a copy from /tmp, which a kill cuts short.
    """
    local = local_file(plugin, path) is not None
    with whole_file(path) if local else nullcontext(path) as file:
        plugin.save_checkpoint(content, file, storage_options=options)
