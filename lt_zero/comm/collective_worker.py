"""Collectives of several steps, which a thread runs one after the other while the model computes.

gloo has no streams: what follows the first exchange of such a collective (a sum, an encoding, another exchange) needs
a thread. It uses process groups of its own, in the order of the launches, which is the same on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch

from lt_zero.common.worker import Worker


class Procedure:
    """A launched procedure, with the interface of torch's works."""

    def __init__(self, fn: Callable[[], object]) -> None:
        self._fn: Callable[[], object] | None = fn
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run it, in the thread."""
        try:
            assert self._fn is not None
            with torch.no_grad():
                self._fn()
        except BaseException as error:
            self._error = error
        finally:
            # The function holds buffers, which must not live as long as this object.
            self._fn = None
            self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: it has not ended in time.
            Exception: what it raised.
        """
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("a collective is not complete")
        if self._error is not None:
            raise self._error


class CollectiveWorker:
    """A thread for procedures, which starts with the first and ends with this object."""

    def __init__(self, name: str) -> None:
        self._worker: Worker[Procedure] = Worker(name, Procedure.run)

    def submit(self, fn: Callable[[], object]) -> Procedure:
        """Run ``fn`` after all procedures that were submitted before."""
        procedure = Procedure(fn)
        self._worker.put(procedure)
        return procedure

    def stop(self) -> None:
        """End the thread after what was submitted; the next procedure starts it again."""
        self._worker.stop()
