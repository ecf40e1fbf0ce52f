"""Ranks that have ended, and why, for the error messages of the ranks that fail because of it.

When a rank ends, the others fail one after the other, each with gloo's message about a neighbour. So each rank that
ends with an error posts it to the store: its own error, or the first cause that it follows from. A rank that finds a
closed connection reads these, and adds the first cause to its error. A rank that was killed posts nothing, and the
store ends with the process that serves it; then only the closed connections are known.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

from lt_zero.comm import work

_PACKAGES = {"lt_zero", "lightning", "pytorch_lightning", "lightning_fabric", "torch", "torchmetrics", "contextlib"}
_PROBE_TAG = 0x5AB0  # of a message that nobody receives
_PATIENCE = 1.0  # seconds to wait for a closed connection
_MANY = 64  # most ended ranks whose messages are read
_WHERE = ", here or in a log of its own (torchrun: --log-dir, SLURM: --output)"


class _Message(NamedTuple):
    own: bool  # the rank ended by itself; otherwise because of another
    text: str


class EndedRanks:
    """Finds ranks that have ended, and their errors.

    Args:
        ranks: global ranks of the group.
        rank: this rank's number in the group.
        host: a gloo group over them.
        store: for messages.
    """

    def __init__(self, ranks: Sequence[int], rank: int, host: dist.ProcessGroup, store: Store) -> None:
        self._ranks, self._rank, self._host, self._store = ranks, rank, host, store
        self._posted = False
        self._found: str | None = None

    def has_ended(self, rank: int) -> bool:
        """Whether the connection to a rank is closed."""
        try:
            dist.isend(torch.zeros(1), self._ranks[rank], self._host, tag=_PROBE_TAG)
        except RuntimeError:
            return True
        return False

    def find(self) -> list[int]:
        """The ranks that have ended."""
        return [rank for rank in range(len(self._ranks)) if rank != self._rank and self.has_ended(rank)]

    def post_error(self, error: BaseException) -> None:
        """Post the error that ends this rank, for the ranks that fail because of it."""
        place = user_line(innermost(error.__traceback__))
        text = str(error).strip().split("\n", 1)[0][:300]
        self._post(_Message(True, f"{type(error).__name__}{f': {text}' if text else ''} ({place})"))

    def clear(self) -> None:
        """Delete what this rank has posted: the error of the last run has not ended it."""
        if self._posted:
            self._store.delete_key(str(self._rank))
        self._posted, self._found = False, None

    def explain(self) -> str | None:
        """Which rank has ended, and where to look; None if none has."""
        if self._found is None:
            until = time.monotonic() + _PATIENCE
            while not (ended := self.find()) and time.monotonic() < until:
                time.sleep(0.05)
            if ended:
                cause = self._cause(ended)
                self._post(_Message(False, cause))
                self._found = f"{cause} The error of rank {self._rank}, above, follows from that."
        return self._found

    def _cause(self, ended: list[int]) -> str:
        messages = {rank: self._message(rank) for rank in ended[:_MANY]}
        for rank, message in messages.items():
            if message is not None and message.own:
                return f"Rank {rank} ended with {message.text}: see what it printed{_WHERE}."
        silent = [rank for rank, message in messages.items() if message is None]
        cause = next((message.text for message in messages.values() if message is not None), "")
        if cause:
            return cause
        one = f"Rank {silent[0]}" if len(silent) == 1 else f"Ranks {', '.join(map(str, silent))}"
        return (
            f"{one} ended without a word: killed (for want of memory, by the scheduler), or by an error outside of the"
            f" Trainer. See the last that {'it' if len(silent) == 1 else 'they'} printed{_WHERE}, and dmesg."
        )

    def _message(self, rank: int) -> _Message | None:
        try:
            if self._store.check([str(rank)]):
                return _Message(*json.loads(self._store.get(str(rank))))
        except RuntimeError:  # the process that serves the store has ended
            pass
        return None

    def _post(self, message: _Message) -> None:
        try:
            self._store.set(str(self._rank), json.dumps(message))
            self._posted = True
        except RuntimeError:  # nobody can read it
            pass


def in_collective(error: BaseException) -> bool:
    """Whether an error came out of torch.distributed, or of a wait for it."""
    frame = innermost(error.__traceback__)
    return frame is not None and frame.f_code.co_filename in (distributed_c10d.__file__, work.__file__)


def innermost(trace: TracebackType | None) -> FrameType | None:
    """The frame in which an exception was raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame if trace is not None else None


def user_line(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame that is neither ours, nor Lightning's, nor torch's."""
    first = frame
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    shown = frame or first
    if shown is None:
        return "an unknown place"
    return f"{shown.f_code.co_filename.removeprefix(os.path.join(os.getcwd(), ''))}:{shown.f_lineno}"
