"""The user's code: which frames are of it, and texts and warnings that point at its lines."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType, TracebackType

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


def innermost(trace: TracebackType | None) -> FrameType | None:
    """The frame in which an exception was raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame if trace is not None else None


def user_line(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame outside of this package, Lightning and torch."""
    first = frame
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    shown = frame or first
    if shown is None:
        return "an unknown place"
    return f"{shown.f_code.co_filename.removeprefix(os.path.join(os.getcwd(), ''))}:{shown.f_lineno}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's innermost line: a line of this package, which Python would print, tells users nothing."""
    level, frame = 2, sys._getframe(1)
    while not is_users(frame):
        if frame.f_back is None:  # a thread of a package
            level = 2
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
