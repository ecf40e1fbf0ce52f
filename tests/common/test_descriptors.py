"""An error of a full table of descriptors says what is full, what fills it, and the remedy."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lt_zero.common.descriptors import count_run, explain_full_table, is_full_table, raise_limit
from lt_zero.common.errors import CheckpointError
from lt_zero.core.comm.world import World
from lt_zero.core.stores.direct_file import trouble, unreadable
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.paths import PACKAGE
from tests.support.pool import Pool


def _told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_errors_of_a_full_table_are_explained_once() -> None:
    count_run()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    of_gloo = RuntimeError("[enforce fail at socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files")
    follows = ValueError("cannot read")
    follows.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for error in (of_gloo, follows, OSError(errno.EMFILE, "no words")):
        explain_full_table(error)
        told = _told(error)
        assert f"its limit is {soft} (ulimit -n; the hard limit is " in told
        assert "begun in this process. Raise the limit" in told
        explain_full_table(error)
        assert _told(error) == told
    for error in (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), RuntimeError("closed")):
        explain_full_table(error)
        assert not is_full_table(error)
        assert "ulimit" not in _told(error)


def test_files_have_the_same_remedy() -> None:
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for error in (trouble("Cannot write a", Path("/"), full, CheckpointError), unreadable("a", full)):
        assert "(ulimit -n; the hard limit is " in str(error)


RAISES = """
import resource, sys, types
# All of lt_zero takes seconds to import.
sys.modules["lt_zero"] = package = types.ModuleType("lt_zero")
package.__path__ = [sys.argv[1]]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
from lt_zero.common.descriptors import raise_limit
for limit in (64, 100):
    raise_limit()
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
"""


def test_the_limit_is_raised_once() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", RAISES, str(PACKAGE)], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "(300, 300)\n(100, 300)\n"


@contextmanager
def _full_table(spare: int, rank: int) -> Iterator[None]:
    """Context in which ``rank`` gets no more than ``spare`` descriptors."""
    if dist.get_rank() != rank:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    taken = list[int]()
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _runs() -> list[str]:
    """The errors of a fit, whose first group finds the table full, and of a later group; a fit trains after them."""
    raise_limit()  # now, as a run would do it within the table that is filled here
    told, module = list[str](), GPT(dist.get_world_size())
    for rank in (0, 1):
        with _full_table(1, rank), pytest.raises((RuntimeError, OSError)) as caught:
            sharded_trainer(1, max_steps=1).fit(module)
        told.append(_told(caught.value))
    world = World.join(torch.device("cpu"))
    with _full_table(1, 1), pytest.raises(RuntimeError) as caught:
        world.new_group("gloo")
    trainer = sharded_trainer(1, max_steps=1)
    trainer.fit(module)
    assert trainer.global_step == 1
    return [*told, _told(caught.value)]


def test_a_run_that_finds_the_table_of_one_rank_full(pool: Pool) -> None:
    """The other would wait until the timeout of process groups for a rank that fails while it connects."""
    by_rank = pool.run(2, _runs)
    for errors, full in zip(zip(*by_rank, strict=True), (0, 1, 1), strict=True):
        own, other = errors[full], errors[1 - full]
        assert "(ulimit -n; the hard limit is " in own
        assert "begun in this process" in own
        assert "GLOO_SOCKET_IFNAME" not in own, "the network is not to blame"
        assert other.startswith(
            f"Rank {full} cannot connect a process group: the table of its file descriptors is full"
        )
