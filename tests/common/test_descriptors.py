"""An error of a full table of descriptors says what is full, what fills it, and the remedy."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from lt_zero.common.descriptors import count_run, explain_full_table, is_full_table
from lt_zero.common.errors import CheckpointError
from lt_zero.io.direct_file import trouble, unreadable
from tests.support.lightning_tools import GPT, sharded_trainer
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


def _fit(spare: int) -> str:
    """The error of a fit that gets no more than ``spare`` descriptors."""
    trainer, module = sharded_trainer(1, max_steps=1), GPT(dist.get_world_size())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    taken = list[int]()
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(spare):
            os.close(taken.pop())
        with pytest.raises((RuntimeError, OSError)) as caught:
            trainer.fit(module)
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _told(caught.value)


def test_a_run_that_finds_the_table_full(pool: Pool) -> None:
    for told in pool.run(2, _fit, 1):
        assert "(ulimit -n; the hard limit is " in told
        assert "begun in this process" in told
        assert "GLOO_SOCKET_IFNAME" not in told, "the network is not to blame"
