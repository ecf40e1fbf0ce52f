"""Text for terminals and logs: nothing in it controls the terminal, and what a run prints never ends the run.

Names of tensors, keys and metrics come from files that strangers may have written; an escape sequence in them could
rewrite what the terminal shows. And a run outlives its reader: the disk under its output may be full, a pipe closed
(``| head``), a terminal gone (ssh).
"""

from __future__ import annotations

import io
import os
import sys
from typing import IO

from typing_extensions import override

_ALLOWED = {"\n", "\t"}


def printable(text: str) -> str:
    r"""``text`` with ``\x1b`` and the like in place of characters that control a terminal, or turn the writing.

    >>> printable("loss\x1b[2J")
    'loss\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c.isspace() and c in _ALLOWED or _is_blank(c) else _escaped(c) for c in text)


def _is_blank(character: str) -> bool:
    """True for blanks that are not "printable": those that are wider or narrower, and do not end a line."""
    return character.isspace() and character not in "\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class Lenient(io.TextIOBase):
    """A stream for what only informs: what cannot be written is left out.

    Nothing stays in the buffer of ``stream`` after a failure: Python would try to write it at the exit, and end with
    another status. So it goes past the buffer, where there is a file below.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream  # None: the program was started without one

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    @override
    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    @override
    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, text: str) -> int:
        if self._stream is None:
            return len(text)
        try:
            plain = type(self._stream) is io.TextIOWrapper
            fd = self._stream.fileno() if plain else -1
        except (OSError, ValueError):
            fd = -1
        try:
            self._stream.flush()
            if fd < 0:
                self._stream.write(text)
                self._stream.flush()
            else:
                left = text.encode(self.encoding, "replace")
                while left:
                    left = left[os.write(fd, left) :]
        except (OSError, ValueError):
            pass  # the stream is full or closed, or its reader has ended: output must not end a run
        return len(text)

    @override
    def flush(self) -> None:
        """Nothing: ``write`` leaves nothing behind."""


def say(text: str, stderr: bool = False) -> None:
    """``print(text, flush=True)`` in a run, which goes on if it fails."""
    Lenient(sys.stderr if stderr else sys.stdout).write(f"{text}\n")
