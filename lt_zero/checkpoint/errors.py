"""The error that everything about checkpoints raises."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, read or trusted; names the file and the remedy."""
