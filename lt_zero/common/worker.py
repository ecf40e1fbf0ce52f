"""Service threads: started on demand, ended with their owner or the process, absent in forked children.

Note [Fork and exit]
    A forked child has the objects but not the threads, so what is put there would wait forever: it is an error.
    Finalizers, which run in children too, do nothing in another process than the threads'. At exit finalizers run
    newest first: files drop what is queued, then threads end, then folders are removed. Threads are daemons, because
    the interpreter joins other threads before it runs the finalizers that would end them.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Items = queue.SimpleQueue[tuple[T] | None]  # None ends one thread


class Worker(Generic[T]):
    """Threads that call ``serve`` with every item, in the order of ``put``. They start with the first item.

    Args:
        name: the threads are ``lt_zero-{name}``, numbered if there are several.
        serve: processes one item, and raises nothing. A thread keeps it alive, so it must not reference the owner of
            this object.
        count: number of threads.
        prepare: called in each thread first; ``start`` returns when all threads are prepared.
        patience: seconds for which ``stop`` waits for the threads; 0: it does not wait.

    Attributes:
        threads: that run now, [] if none do.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[T], object],
        count: int = 1,
        prepare: Callable[[], object] = lambda: None,
        patience: float = 0.0,
    ) -> None:
        self._names = [f"lt_zero-{name}-{index}" for index in range(count)] if count > 1 else [f"lt_zero-{name}"]
        self._serve, self._prepare, self._patience = serve, prepare, patience
        self._pid = os.getpid()
        self._items: Items[T] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self._stop: Callable[[], object] = lambda: None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the threads, if they do not run.

        Raises:
            RuntimeError: the system allows no more threads, or this is a forked child.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Process {os.getpid()} was forked from process {self._pid}, to which {self._names[0]} belongs. Create "
                "the object that uses this thread in the child, or start the child with spawn."
            )
        with self._starting:
            if not self.threads:
                self._start()

    def _start(self) -> None:
        self._items, ready = queue.SimpleQueue(), threading.Barrier(len(self._names) + 1)
        started: list[threading.Thread] = []
        try:
            for name in self._names:
                given = self._items, self._serve, self._prepare, ready
                started.append(threading.Thread(target=_run, args=given, name=name, daemon=True))
                started[-1].start()
        except RuntimeError:
            ready.abort()
            raise
        ready.wait()
        self.threads = started
        self._stop = weakref.finalize(self, _end, self._items, started, self._pid, self._patience)

    def put(self, item: T) -> None:
        """Let a thread process ``item``; ``start`` says what it raises."""
        self.start()
        self._items.put((item,))

    def stop(self) -> None:
        """End the threads after all items that were put. No-op in a forked child; ``put`` starts new threads."""
        if os.getpid() == self._pid:
            self._stop()
            self.threads = []


def _run(
    items: Items[T], serve: Callable[[T], object], prepare: Callable[[], object], ready: threading.Barrier
) -> None:
    # Holds no reference to the Worker, whose finalizer ends the threads.
    prepare()
    ready.wait()
    while (item := items.get()) is not None:
        serve(*item)
        # An idle thread waits in ``get`` and would keep the last item alive until the next one comes.
        del item


def _end(items: Items[T], threads: list[threading.Thread], pid: int, patience: float) -> None:
    if os.getpid() != pid:
        return
    for _ in threads:
        items.put(None)
    for thread in threads if patience else ():
        # The owner's last reference may die in one of its threads, and a thread cannot join itself.
        if thread is not threading.current_thread():
            thread.join(patience)
