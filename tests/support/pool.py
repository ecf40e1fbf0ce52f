"""A session-wide pool of worker processes: start-up is paid once, a test with several ranks costs milliseconds.

Each task gets a fresh process group, by default of gloo. Workers end with ``os._exit``: a process that ran backward
with gloo may abort in its destructors after everything passed. A task that hangs or fails on one rank has its workers
replaced.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tests.support.paths import ROOT

START_TIMEOUT_S = 600.0  # of a worker: on a machine with other work importing torch takes minutes
TASK_TIMEOUT_S = 240.0
GRACE_S = 5.0  # for the other ranks, once one has failed


class WorkerError(AssertionError):
    """At least one rank failed; the message holds the tracebacks."""


def over_gloo(rank: int, world: int, store: str) -> None:
    """Make the default process group of a task. Collective."""
    import torch.distributed as dist

    timeout = timedelta(seconds=200)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    dist.barrier()  # a rank that leaves a task without collectives must not hang up on one that still connects


class Place(NamedTuple):
    """Where a worker lives; all must be picklable.

    Attributes:
        environment: variables of the process.
        enter: what takes it there.
        join: makes the default process group of a task, from the rank, the number of ranks and a file for their store.
    """

    environment: dict[str, str]
    enter: Callable[[], None] | None = None
    join: Callable[[int, int, str], None] = over_gloo


HERE = Place({"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})


def _serve(connection: Connection, place: Place, preload: Sequence[str], thresholds: tuple[int, int, int]) -> None:
    if place.enter is not None:
        place.enter()
    gc.set_threshold(*thresholds)
    gc.freeze()  # what is imported lives for ever: a collection after each task need not look at it
    os.environ.update(place.environment)
    mp.set_forkserver_preload(["tests.support.preload", *preload])  # of what this worker starts
    import torch

    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            task = connection.recv()
        except EOFError:
            os._exit(0)
        _run(connection, place, *task)


def _run(
    connection: Connection,
    place: Place,
    rank: int,
    world: int,
    store: str,
    fn: Callable[..., Any],
    args: Any,
    env: dict[str, str],
) -> None:
    """Run a task, and answer whether it passed, with its result or its traceback."""
    import torch
    import torch.distributed as dist

    saved, modules = dict(os.environ), len(sys.modules)
    os.environ.update(env)
    os.chdir(ROOT)  # the processes are forked from wherever the first test was
    passed = False
    try:
        place.join(rank, world, store)
        torch.manual_seed(0)
        result = fn(*args)
        passed = True
    except BaseException:
        connection.send((False, traceback.format_exc()))  # here: destroying a group may hang after a failure
    finally:
        os.environ.clear()
        os.environ.update(saved)
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            from lt_zero.common.compat.of_distributed_tensors import forget_meshes

            forget_meshes()  # what is cached for the mesh of one task has groups that are gone in the next
        gc.collect()  # a process group lives, with its threads, as long as cycles through the engine do
        if len(sys.modules) > modules:
            gc.freeze()  # what this task imported lives for ever: later collections need not look at it
    if passed:
        connection.send((True, result))


class Pool:
    """Worker processes that are started when first needed.

    Args:
        place: where the worker of a rank lives; by default all are on the loopback of this machine.
        limit: seconds of a task.
        parents: whether the workers may start processes. Such a pool has to be closed.
        preload: modules that these processes need, as the workers of loaders do; each worker has them imported once,
            before it starts the first one. A module that is not installed is passed by.
    """

    def __init__(
        self,
        place: Callable[[int], Place] = lambda rank: HERE,
        limit: float = TASK_TIMEOUT_S,
        parents: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        self._place, self._limit = place, limit
        self._parents = parents
        self._preload = preload
        # Workers are forked from a process that has imported what takes seconds, and has started no thread.
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.preload"])
        self._workers: list[tuple[Any, Connection]] = []

    def ensure(self, count: int) -> None:
        """Start workers until there are ``count``; the time of a task begins afterwards."""
        started = len(self._workers)
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            # Workers look for garbage as often as this process, which conftest.py may have told to do so rarely.
            given = (theirs, self._place(len(self._workers)), self._preload, gc.get_threshold())
            process = self._context.Process(target=_serve, args=given, daemon=not self._parents)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, connection in self._workers[started:]:
            if not connection.poll(START_TIMEOUT_S):
                raise WorkerError(f"A worker has not started after {START_TIMEOUT_S:.0f} s.")
            connection.recv()

    def run(self, world: int, fn: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> list[Any]:
        """``fn(*args)`` on ``world`` ranks; the results by rank.

        Raises:
            WorkerError: a rank raised or did not answer in time.
        """
        self.ensure(world)
        # A thread of a rank that looks once more makes the file of its store anew, which fails no test.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            store = os.path.join(folder, "store")
            connections = [connection for _, connection in self._workers[:world]]
            for rank, connection in enumerate(connections):
                connection.send((rank, world, store, fn, args, env or {}))
            try:
                results = self._collect(connections)
            except BaseException:  # the test's timeout: its answers must not be taken for those of the next task
                self._replace(world)
                raise
        bad = {r: text for r, (ok, text) in results.items() if not ok}
        if bad or len(results) < world:
            missing = [r for r in range(world) if r not in results]
            self._replace(world)
            lines = [f"--- rank {r} ---\n{text}" for r, text in sorted(bad.items())]
            raise WorkerError("\n".join([*lines, f"no answer from ranks {missing}" if missing else ""]))
        return [results[r][1] for r in range(world)]

    def _collect(self, connections: list[Connection]) -> dict[int, tuple[bool, Any]]:
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self._limit
        open_ranks = dict(enumerate(connections))
        while open_ranks and time.monotonic() < deadline:
            for ready in wait(list(open_ranks.values()), timeout=max(0.0, deadline - time.monotonic())):
                rank = next(r for r, c in open_ranks.items() if c is ready)
                try:
                    results[rank] = open_ranks[rank].recv()
                except EOFError:
                    results[rank] = (False, "the worker died")
                del open_ranks[rank]
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return results

    def _replace(self, count: int) -> None:
        for process, connection in self._workers[:count]:
            connection.close()
            process.kill()
            process.join()
        del self._workers[:count]

    def close(self) -> None:
        self._replace(len(self._workers))
