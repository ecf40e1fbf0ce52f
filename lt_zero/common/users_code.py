"""The user's code: which frames are of it, and warnings that point at its lines."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

PACKAGES = {
    "contextlib",
    "threading",
    "concurrent",
    "lt_zero",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torch",
    "torchmetrics",
}


def is_users(frame: FrameType) -> bool:
    """True if a frame is outside of this package, Lightning and torch."""
    return frame.f_globals.get("__name__", "").split(".")[0] not in PACKAGES


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's innermost line: a line of this package, which Python would print, tells users nothing."""
    level, frame = 2, sys._getframe(1)
    while not is_users(frame):
        if frame.f_back is None:  # a thread of a package
            level = 2
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
