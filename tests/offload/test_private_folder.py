"""Folders of NVMe offload: one per process, gone when it is, and nobody else's is touched. How fast the disk is."""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lt_zero
from lt_zero.core.stores import direct_file
from lt_zero.core.stores.direct_file import filesystem_of
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.store import Speed
from lt_zero.core.stores.thread_pool import IoPool
from lt_zero.offload import private_folder
from lt_zero.offload.nvme_store import probe
from lt_zero.offload.private_folder import SwapFolder


def _start_child(work: Callable[[], None]) -> int:
    """A forked process that works, says so, and lives on; its number."""
    ready, done = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            work()
            os.write(done, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


def test_a_folder_is_private_and_vanishes(tmp_path: Path) -> None:
    made = SwapFolder(tmp_path, 3)
    assert made.path.parent == tmp_path
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert f"-{os.getpid()}-" in made.path.name
    assert (made.path / "lock").read_text().startswith(f"rank 3, process {os.getpid()} on {socket.gethostname()}")
    (made.path / "records").write_bytes(b"x")
    made.close()
    made.close()
    assert not list(tmp_path.iterdir())
    forgotten = SwapFolder(tmp_path, 0)
    del forgotten
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_folders_of_the_living_stay_and_of_the_dead_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        _kept.append(SwapFolder(tmp_path, 0))
        (_kept[0].path / "records").write_bytes(bytes(1 << 20))
        # A worker that outlives the process must not keep its folder.
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)

    # Names that are not ours: they stay, whatever is in them.
    host = socket.gethostname()
    others = [f"lt_zero-other.{host}-1-0123abcd", f"lt_zero-{host}-1-0123abc", f"x-lt_zero-{host}-1-0123abcd", "lock"]
    others += [f"lt_zero-{host}-2-0123abcd", f"lt_zero-{host}-3-0123abcd.new"]  # without a lock; not old
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / f"lt_zero-{host}-4-0123abcd").symlink_to(tmp_path / others[0])
    child = _start_child(work)
    with caplog.at_level(logging.WARNING, "lt_zero"):
        mine = SwapFolder(tmp_path, 0)
        assert len(list(tmp_path.glob(f"lt_zero-{host}-{child}-*/records"))) == 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        caplog.clear()
        second = SwapFolder(tmp_path, 0)
    assert not list(tmp_path.glob(f"lt_zero-{host}-{child}-*"))
    assert len(caplog.records) == 1
    assert "of killed runs" in caplog.records[0].message
    assert int(caplog.records[0].message.split(": ")[1].split()[0]) >= 1 << 20
    mine.close()
    second.close()
    assert len(list(tmp_path.iterdir())) == len(others) + 1


_kept: list[SwapFolder] = []


def test_old_unfinished_and_empty_folders_go(tmp_path: Path) -> None:
    host = socket.gethostname()
    empty, unfinished = tmp_path / f"lt_zero-{host}-2-0123abcd", tmp_path / f"lt_zero-{host}-3-0123abcd.new"
    empty.mkdir()
    unfinished.mkdir()
    (unfinished / "lock").touch()
    os.utime(unfinished, (0, 0))
    SwapFolder(tmp_path, 0).close()
    assert not list(tmp_path.iterdir())


def test_a_link_that_takes_a_folders_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = tmp_path / f"lt_zero-{socket.gethostname()}-2-0123abcd"
    for folder in (dead, elsewhere := tmp_path / "elsewhere"):
        folder.mkdir()
        (folder / "lock").touch()
        (folder / "records").touch()

    def swap(fd: int) -> bool:  # what another user can do at any moment, in a folder where anybody may rename
        if dead.is_dir() and not dead.is_symlink():
            dead.rename(tmp_path / "aside")
            dead.symlink_to(elsewhere)
        return lock(fd)

    lock = private_folder._lock
    monkeypatch.setattr(private_folder, "_lock", swap)
    SwapFolder(tmp_path, 0).close()
    assert sorted(os.listdir(elsewhere)) == ["lock", "records"]
    assert not os.listdir(tmp_path / "aside")


@pytest.mark.parametrize(("kind", "left"), [("ext4", 0), ("nfs", 1)])
def test_folders_of_other_names_go_from_local_disks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, left: int
) -> None:
    other = tmp_path / "lt_zero-another-host-2-0123abcd"
    other.mkdir()
    (other / "lock").touch()
    monkeypatch.setattr(private_folder, "filesystem_of", lambda path: kind)
    SwapFolder(tmp_path, 0).close()
    assert len(list(tmp_path.iterdir())) == left


def test_a_folder_with_folders_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = SwapFolder(tmp_path, 0)
    (made.path / "results").mkdir()
    made.close()
    assert (made.path / "results").is_dir()
    assert "Cannot remove" in caplog.text


def test_file_systems_without_locks_keep_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(private_folder.fcntl, "flock", no_locks)
    first, second = SwapFolder(tmp_path, 0), SwapFolder(tmp_path, 1)
    assert first.path.is_dir()
    assert "does not support locks" in caplog.text
    first.close()
    second.close()


def test_places_that_cannot_be_used_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SwapError, match=f"nvme_path='{place}' cannot be used.*[Ss]et .*to a folder"):
            SwapFolder(place, 0)
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(SwapError, match=r"Permission denied \(EACCES\)\. Give the user write permission"):
        SwapFolder(tmp_path, 0)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:8], os.ST_RDONLY, real[9]]))
    with pytest.raises(SwapError, match=r"Read-only file system \(EROFS\)"):
        SwapFolder(tmp_path, 0)


def test_a_missing_place_is_made_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only inside of a folder that exists: else its disk may not be mounted, and that of the system would fill."""
    with pytest.raises(SwapError, match=f"nor a folder {tmp_path / 'a'}.*Mount the disk"):
        SwapFolder(tmp_path / "a" / "b", 0)
    assert not (tmp_path / "a").exists()
    made = SwapFolder(tmp_path / "b", 0)
    assert f"nvme_path {tmp_path / 'b'} did not exist; it was created" in caplog.text
    free = direct_file.free_bytes(made.path)
    made.require(1)
    with pytest.raises(SwapError, match=rf"rank 0 needs {1 << 60} bytes \(1\.15 EB\), and [0-9]+ bytes .*are free"):
        made.require(1 << 60)
    assert free > 0
    made.close()


def test_memory_is_told_from_disks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    place = Path("/dev/shm")
    if not place.is_dir() or filesystem_of(place) != "tmpfs" or not os.access(place, os.W_OK):
        pytest.skip("no tmpfs")
    monkeypatch.setattr(private_folder, "_told", set())
    for _ in range(2):
        SwapFolder(place, 0).close()
    assert caplog.text.count("is on tmpfs, which is memory") == 1


def test_exit_removes_everything_and_the_exit_of_a_child_nothing(tmp_path: Path) -> None:
    script = """
        import os, sys, types
        from pathlib import Path
        # All of lt_zero takes seconds to import.
        sys.modules["lt_zero"] = package = types.ModuleType("lt_zero")
        package.__path__ = [sys.argv[2]]
        from lt_zero.offload.swap_file import SwapFile
        from lt_zero.core.stores.thread_pool import IoPool
        from lt_zero.offload.private_folder import SwapFolder
        from lt_zero.core.stores.pinned import aligned_buffer

        folder = SwapFolder(Path(sys.argv[1]), 0)
        pool = IoPool(threads=2, block_size=4096)
        file = SwapFile(folder.path / "records", [1 << 20] * 64, pool)
        source = aligned_buffer(1 << 20)
        file.write(0, source).wait()
        if os.fork() == 0:
            sys.exit(0)  # with finalizers
        assert os.wait()[1] == 0
        assert file.path.exists()
        target = aligned_buffer(1 << 20)
        file.read(0, target).wait()
        transfers = [file.write(i, source) for i in range(64) for _ in range(4)]  # under way at exit
    """
    command = [
        sys.executable,
        "-Wignore::DeprecationWarning",
        "-c",
        textwrap.dedent(script),
        str(tmp_path),
        str(Path(lt_zero.__file__).parent),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    assert not list(tmp_path.iterdir())


def test_the_probe_measures_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("lt_zero.offload.nvme_store"), "_SECONDS", 0.05)
    made, pool = SwapFolder(tmp_path, 0), IoPool(block_size=64 << 10)
    speed = probe(made, pool, nbytes=1 << 20)
    assert speed.read > 1e6
    assert speed.write > 1e6
    assert [path.name for path in made.path.iterdir()] == ["lock"]
    with pytest.raises(SwapError, match="too little space"):
        probe(made, pool, nbytes=1 << 60)
    real = direct_file.write_some
    written: list[int] = []

    def slowly(*args: Any) -> int:
        time.sleep(0.004)
        written.append(real(*args))
        return written[-1]

    monkeypatch.setattr(direct_file, "write_some", slowly)
    probe(made, pool)
    assert 0 < sum(written) < 128 << 20, "all of it would be 256 MiB, and take longer than a probe may"
    pool.close()
    made.close()


def test_forecasts_add_reads_and_writes() -> None:
    assert Speed(read=3 << 30, write=1 << 30).seconds(6 << 30, 2 << 30) == pytest.approx(4.0)
