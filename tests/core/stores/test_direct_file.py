"""Files of NVMe offload: bytes come back in any order of requests, trouble has a name, nothing is left over."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lt_zero.core.stores import direct_file
from lt_zero.core.stores.direct_file import filesystem_of
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.pinned import BLOCK, aligned_buffer, checksum, rounded
from lt_zero.core.stores.thread_pool import IoPool
from lt_zero.offload import swap_file
from lt_zero.offload.swap_file import SwapFile
from tests.support.offload_tools import change, fail_with, in_child, noise, read, write

SIZES = [1, 511, 4096, 4097, (3 << 20) + 3, 0, 65536, 12345]
STEP = 64 << 10  # block size of most tests: records of several blocks stay small


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(threads=4, block_size=STEP)
    yield pool
    pool.close()


@pytest.fixture
def file(tmp_path: Path, pool: IoPool) -> Iterator[SwapFile]:
    """Two records of four blocks."""
    file = SwapFile(tmp_path / "records", [4 * STEP, 4 * STEP], pool)
    yield file
    file.close()


# --- memory


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 5 << 20])
def test_buffers_are_full_blocks_at_block_addresses(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (rounded(nbytes),)
    assert buffer.data_ptr() % BLOCK == 0
    assert not buffer.any()


def _mapped(start: int) -> bool:
    return any(
        int(first, 16) <= start < int(end, 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        for first, end in [line.split()[0].split("-")]
    )


def test_a_buffer_goes_back_with_its_last_tensor_and_stays_out_of_children() -> None:
    buffer = aligned_buffer(64 << 20)
    start, part = buffer.data_ptr(), buffer[4096:8192].view(torch.float32)
    del buffer
    assert _mapped(start)
    assert part.sum() == 0

    def work() -> None:
        nonlocal part
        assert not _mapped(start)
        mine = mmap.mmap(-1, 64 << 20)  # the kernel may well put it where the buffer was
        mine[:] = bytes(64 << 20)
        del part
        assert not mine[-1]

    assert in_child(work) == 0
    del part
    assert not _mapped(start)


def test_checksums_see_flips_moved_pages_and_zeros() -> None:
    block = noise(STEP)
    sums = {checksum(block)}
    for bit in range(8):
        flipped = block.clone()
        flipped[random.Random(bit).randrange(STEP)] ^= 1 << bit
        sums.add(checksum(flipped))
    sums.add(checksum(block.view(-1, BLOCK).roll(1, 0).reshape(-1)))
    sums.add(checksum(torch.cat([block[:-BLOCK], torch.zeros(BLOCK, dtype=torch.uint8)])))
    assert len(sums) == 11
    assert checksum(block[:BLOCK]) == checksum(block[:BLOCK].clone())


def test_checksums_see_moved_pages_of_round_numbers() -> None:
    sums = set[int]()
    for page in range(STEP // BLOCK):
        values = torch.zeros(STEP // 8, dtype=torch.float64)
        values[page * BLOCK // 8 : (page + 1) * BLOCK // 8] = 1.0
        sums.add(checksum(values.view(torch.uint8)))
    assert len(sums) == STEP // BLOCK


# --- records


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("block_size", [4096, STEP, 8 << 20])
@pytest.mark.parametrize("direct", [True, False])
def test_records_of_odd_sizes_come_back(
    tmp_path: Path, threads: int, block_size: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(direct_file, "go_direct", lambda *args: False)
    pool = IoPool(threads=threads, block_size=block_size, queue_depth=3)
    file = SwapFile(tmp_path / "records", SIZES, pool)
    assert [file.size_of(i) for i in range(len(SIZES))] == [rounded(size) for size in SIZES]
    assert (tmp_path / "records").stat().st_size == file.nbytes == sum(map(rounded, SIZES))
    sources = [noise(size, seed) for seed, size in enumerate(SIZES)]
    order = list(range(len(SIZES)))
    random.Random(threads).shuffle(order)
    for transfer in [file.write(i, sources[i]) for i in order]:
        transfer.wait()
        transfer.wait()
        assert transfer.done
    for i in reversed(order):
        assert torch.equal(read(file, i), sources[i])
    file.close()
    pool.close()
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_keep_the_order_of_each_record(tmp_path: Path, pool: IoPool, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 4096, 3 * STEP, 5 * STEP + 17]) for _ in range(12)]
    file = SwapFile(tmp_path / "records", sizes, pool)
    content: dict[int, Tensor] = {}
    flying = []
    for step in range(120):
        i = rng.randrange(len(sizes))
        if i not in content or rng.random() < 0.5:
            content[i] = noise(sizes[i], step)
            flying.append((file.write(i, content[i]), content[i], content[i]))
        else:
            target = aligned_buffer(sizes[i])
            flying.append((file.read(i, target), target, content[i]))
        if rng.random() < 0.1:
            flying.pop(rng.randrange(len(flying)))[0].wait()
    for transfer, got, expected in flying:
        transfer.wait()
        assert torch.equal(got, expected)
    file.close()


def test_many_threads_may_ask(tmp_path: Path, pool: IoPool) -> None:
    file = SwapFile(tmp_path / "records", [3 * STEP] * 8, pool)
    failed = []

    def work(i: int) -> None:
        for seed in range(10):
            if not torch.equal(write(file, i, seed), read(file, i)):
                failed.append((i, seed))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert not failed


def test_a_read_waits_for_its_write_and_not_for_another(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, 0, seed=1)
    other = write(file, 1, seed=2)
    gate, real = threading.Event(), direct_file.write_some

    def slow(fd: int, view: memoryview, offset: int) -> int:
        gate.wait()
        return real(fd, view, offset)

    monkeypatch.setattr(direct_file, "write_some", slow)
    monkeypatch.setattr(file._pool, "queue_depth", 2)  # leaves two of the four threads free
    source, target = noise(4 * STEP, 3), aligned_buffer(4 * STEP)
    writing, reading = file.write(0, source), file.read(0, target)
    assert torch.equal(read(file, 1), other)
    assert not writing.done
    assert not reading.done
    gate.set()
    reading.wait()
    assert writing.done
    assert torch.equal(target, source)


def test_a_small_transfer_passes_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = IoPool(threads=1, block_size=4096, queue_depth=2)
    file = SwapFile(tmp_path / "records", [64 * 4096, 4096], pool)
    gate, order, real = threading.Event(), list[int](), direct_file.write_some

    def note(fd: int, view: memoryview, offset: int) -> int:
        gate.wait()
        order.append(offset)
        return real(fd, view, offset)

    monkeypatch.setattr(direct_file, "write_some", note)
    transfers = [file.write(0, noise(64 * 4096)), file.write(1, noise(4096))]
    gate.set()
    for transfer in transfers:
        transfer.wait()
    assert order.index(64 * 4096) == 2
    file.close()
    pool.close()


def test_threads_keep_no_tensors_and_leave_torch_its_threads(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        pool = IoPool(threads=2)
        ask = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        ask.start()
        ask.join()
        pool.submit(1, lambda i: seen.append(torch.get_num_threads()), lambda error: None, None).wait()
        pool.close()
        assert [torch.get_num_threads(), *seen] == [3, 3, 1]
    finally:
        torch.set_num_threads(before)
    source = noise(4 * STEP)
    kept = [file.write(0, source)]
    kept[0].wait()
    monkeypatch.setattr(direct_file, "write_some", fail_with(errno.EIO))
    kept.append(file.write(1, source))
    with pytest.raises(SwapError):
        kept[1].wait()
    alive = weakref.ref(source)
    del source
    deadline = time.monotonic() + 30
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None


# --- misuse


def test_unusable_tensors_are_refused(file: SwapFile) -> None:
    good = aligned_buffer(4 * STEP + BLOCK)
    for bad, words in [
        (good, "has 266240 bytes, the record 262144"),
        (good[1 : 4 * STEP + 1], "is not a multiple of 4096"),
        (good[: 4 * STEP].view(torch.int32), "torch.int32"),
        (good[: 4 * STEP].view(2, -1), "2D"),
        (aligned_buffer(8 * STEP)[::2], "not contiguous"),
        (torch.empty(4 * STEP, dtype=torch.uint8, device="meta"), "on meta"),
    ]:
        with pytest.raises(ValueError, match=words):
            file.write(0, bad)
        with pytest.raises(ValueError, match="aligned_buffer"):
            file.read(0, bad)
    with pytest.raises(IndexError, match="records 0 to 1, not 2"):
        file.size_of(2)


def test_what_was_never_written_cannot_be_read(file: SwapFile) -> None:
    with pytest.raises(
        SwapError, match=r"Cannot read record 1 of .*records \(offset 262144, 262144 bytes\): it was never written"
    ):
        file.read(1, aligned_buffer(4 * STEP))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"threads": 0}, "threads=0"), ({"block_size": 5000}, "multiple of 4096"), ({"queue_depth": 0}, "queue_depth")],
)
def test_impossible_pools_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        IoPool(**options)  # type: ignore[arg-type]


def test_closed_files_and_pools_refuse(tmp_path: Path) -> None:
    pool = IoPool(threads=1)
    file, other = (SwapFile(tmp_path / name, [1], pool) for name in "ab")
    with pytest.raises(SwapError, match=r"/a: File exists \(EEXIST\)"):
        SwapFile(tmp_path / "a", [1], pool)
    file.close()
    file.close()
    with pytest.raises(SwapError, match="the file is closed"):
        file.write(0, aligned_buffer(1))
    pool.close()
    pool.close()
    with pytest.raises(SwapError, match="IoPool is closed"):
        other.write(0, aligned_buffer(1))
    other.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(SwapError, match=r"No such file.*Create the folder"):
        SwapFile(tmp_path / "none" / "a", [1], pool)


def test_closing_waits_for_what_is_under_way(tmp_path: Path, pool: IoPool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = direct_file.write_some
    monkeypatch.setattr(direct_file, "write_some", lambda *args: (time.sleep(0.005), real(*args))[1])
    file = SwapFile(tmp_path / "records", [8 * STEP] * 4, pool)
    source = noise(8 * STEP)
    transfers = [file.write(i % 2, source) for i in range(8)]  # half of them wait for others
    file.close()
    for transfer in transfers:
        transfer.wait()
    assert not (tmp_path / "records").exists()


# --- a disk that lies


def test_a_flipped_bit_is_seen(file: SwapFile) -> None:
    source = write(file, 1)
    byte = int(source[2 * STEP + 77]) ^ 16
    change(file.path, 6 * STEP + 77, bytes([byte]))
    with pytest.raises(SwapError, match=rf"checksum of {STEP} bytes at offset {6 * STEP} of .*records \(record 1\)"):
        read(file, 1)


def test_swapped_blocks_are_seen(file: SwapFile) -> None:
    source = write(file, 0)
    change(file.path, 0, bytes(source[STEP : 2 * STEP].tolist()) + bytes(source[:STEP].tolist()))
    with pytest.raises(SwapError, match="Wrong checksum of"):
        read(file, 0)


@pytest.mark.parametrize("size", [5 * STEP, 6 * STEP + 100])
def test_a_file_cut_short_is_seen(file: SwapFile, size: int) -> None:
    write(file, 1)
    os.truncate(file.path, size)
    with pytest.raises(SwapError, match=f"ends at byte {size}, and [0-9]+ bytes were written"):
        read(file, 1)


def test_a_lost_write_is_seen_and_a_new_one_heals(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, 0, seed=1)
    with monkeypatch.context() as lies:
        lies.setattr(direct_file, "write_some", lambda fd, view, offset: len(view))
        write(file, 0, seed=2)
    with pytest.raises(SwapError, match="lost a write"):
        read(file, 0)
    assert torch.equal(write(file, 0, seed=3), read(file, 0))


def test_without_checksums_nothing_is_compared(tmp_path: Path) -> None:
    pool = IoPool(threads=1, checksum=False)
    file = SwapFile(tmp_path / "records", [STEP], pool)
    write(file, 0)
    change(file.path, 7, b"x")
    assert read(file, 0)[7] == ord("x")
    file.close()
    pool.close()


# --- requests that fail


@pytest.mark.parametrize("direct", [True, False])
def test_short_and_interrupted_requests_are_continued(
    tmp_path: Path, pool: IoPool, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(direct_file, "go_direct", lambda *args: False)
    monkeypatch.setattr(direct_file, "_PAUSE", 0.0)
    rng, reals, seen = random.Random(0), (direct_file.write_some, direct_file.read_some), set()

    def shorten(real: Callable[[int, memoryview, int], int]) -> Callable[[int, memoryview, int], int]:
        def call(fd: int, view: memoryview, offset: int) -> int:
            kind = rng.choice(["all", "short", "short", "sector", "interrupted", "again"])
            seen.add(kind)
            if kind == "interrupted":
                raise InterruptedError(errno.EINTR, "interrupted")
            if kind == "again":
                raise BlockingIOError(errno.EAGAIN, "again")
            if len(view) > BLOCK and kind != "all":
                count = real(fd, view[: rng.randint(1, len(view) // BLOCK) * BLOCK], offset)
                return count if kind == "sector" else count - 100
            return real(fd, view, offset)

        return call

    file = SwapFile(tmp_path / "records", [4 * STEP] * 8, IoPool(2, STEP, retries=50))
    monkeypatch.setattr(direct_file, "write_some", shorten(reals[0]))
    monkeypatch.setattr(direct_file, "read_some", shorten(reals[1]))
    for i in range(8):
        assert torch.equal(write(file, i, i), read(file, i))
    assert len(seen) == 5
    file.close()


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EIO, "smartctl"), (errno.ENOSPC, "bytes .*are free"), (errno.EROFS, "read-only")]
)
def test_failed_writes_tell_what_where_and_why(
    file: SwapFile, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    write(file, 1)
    with monkeypatch.context() as fails:
        fails.setattr(direct_file, "write_some", fail_with(code))
        transfer = file.write(1, noise(4 * STEP))
        for _ in range(2):
            with pytest.raises(
                SwapError, match=rf"Cannot write {STEP} bytes at offset [0-9]+ of .*records: "
            ) as caught:
                transfer.wait()
        assert transfer.done
    assert os.strerror(code) in str(caught.value)
    caught.match(errno.errorcode[code])
    caught.match(remedy)
    # The old content is damaged: it must not be taken for the new one.
    with pytest.raises(SwapError, match="Cannot read record 1 of .*: its last write failed. Cannot write"):
        read(file, 1)
    assert torch.equal(write(file, 1), read(file, 1))


def test_failed_reads_tell_and_can_be_repeated(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(file, 0)
    with monkeypatch.context() as fails:
        fails.setattr(direct_file, "read_some", fail_with(errno.EIO))
        with pytest.raises(SwapError, match=rf"Cannot read {STEP} bytes at offset [0-9]+ .*EIO"):
            read(file, 0)
    assert torch.equal(read(file, 0), source)


def test_retries_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "_PAUSE", 0.0)
    pool, calls = IoPool(threads=1, retries=3), list[int]()
    file = SwapFile(tmp_path / "records", [1], pool)
    for result, words in [(0, "4 requests moved nothing"), (errno.EAGAIN, "EAGAIN")]:

        def call(fd: int, view: memoryview, offset: int, result: int = result) -> int:
            calls.append(result)
            return 0 if result == 0 else fail_with(result)(fd, view, offset)

        monkeypatch.setattr(direct_file, "write_some", call)
        with pytest.raises(SwapError, match=words):
            write(file, 0)
        assert len(calls) == 4
        calls.clear()
    file.close()
    pool.close()


def test_an_unexpected_error_ends_the_transfer(pool: IoPool) -> None:
    def broken(index: int) -> None:
        raise KeyError("bug")

    with pytest.raises(SwapError, match=r"unexpectedly: KeyError\('bug'\)") as caught:
        pool.submit(3, broken, lambda error: None, None).wait()
    assert isinstance(caught.value.__cause__, KeyError)


# --- the file


def test_a_full_disk_is_told_with_needed_and_free_bytes(
    tmp_path: Path, pool: IoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = rf"records with {1 << 60} bytes .*No space left.*ENOSPC.*bytes \([0-9.]+ [GTP]B\) are free"
    with pytest.raises(SwapError, match=words):
        SwapFile(tmp_path / "records", [1 << 60], pool)
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: fail_with(errno.EDQUOT)(0, memoryview(b""), 0))
    with pytest.raises(SwapError, match="EDQUOT.*quota"):
        SwapFile(tmp_path / "records", [1], pool)
    assert not list(tmp_path.iterdir())


def test_a_limit_of_file_sizes_is_told(tmp_path: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(SwapError, match=r"with 2097152 bytes: File too large \(EFBIG\)\. .*ulimit -f"):
            SwapFile(tmp_path / "records", [2 << 20], IoPool(threads=1))

    assert in_child(work) == 0
    assert not list(tmp_path.iterdir())


def test_space_is_reserved_where_that_is_possible(
    tmp_path: Path, pool: IoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SwapFile(tmp_path / "records", [1 << 20], pool)
    assert file.path.stat().st_blocks * 512 >= 1 << 20
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.close()
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: fail_with(errno.EOPNOTSUPP)(0, memoryview(b""), 0))
    file = SwapFile(tmp_path / "records", [1 << 20], pool)
    assert torch.equal(write(file, 0), read(file, 0))
    file.close()


def test_the_way_through_the_page_cache_is_told_once(
    tmp_path: Path, pool: IoPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", fail_with(errno.EINVAL))
    monkeypatch.setattr(swap_file, "_told", set())
    made = [SwapFile(tmp_path / name, [4 * STEP], pool) for name in "ab"]
    monkeypatch.setattr(os, "pwritev", real)
    assert [file.direct for file in made] == [False, False]
    assert [record.message for record in caplog.records].count(
        f"{tmp_path} does not support O_DIRECT: NVMe offload is slower there."
    ) == 1
    dropped = list[tuple[int, int]]()
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: dropped.append((offset, length)))
    assert torch.equal(write(made[0], 0), read(made[0], 0))
    assert dropped == [(0, 4 * STEP)] * 2
    monkeypatch.setattr(os, "fdatasync", lambda fd: fail_with(errno.EIO)(fd, memoryview(b""), 0))
    with pytest.raises(SwapError, match="Cannot write back record 0 of .*EIO"):
        write(made[0], 0)
    with pytest.raises(SwapError, match="its last write failed"):
        read(made[0], 0)
    for file in made:
        file.close()


def test_direct_where_the_file_system_can(tmp_path: Path, file: SwapFile) -> None:
    if filesystem_of(tmp_path) not in ("ext4", "xfs", "btrfs"):
        pytest.skip("an unknown file system")
    assert file.direct
    assert direct_file.logical_block(tmp_path) in (512, 4096)
    assert direct_file.logical_block(tmp_path / "none") == BLOCK


def test_larger_blocks_of_the_disk_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "logical_block", lambda path: 16384)
    pool = IoPool(threads=1, block_size=4096)
    file = SwapFile(tmp_path / "records", [1, 20000], pool)
    assert [file.size_of(0), file.size_of(1)] == [16384, 32768]
    assert torch.equal(write(file, 1), read(file, 1))
    file.close()
    pool.close()


# --- processes


def test_a_forked_child_is_refused(file: SwapFile) -> None:
    target = aligned_buffer(4 * STEP)
    write(file, 0)

    def work() -> None:
        with pytest.raises(SwapError, match=r"the I/O threads belong to process [0-9]+, from which it was forked"):
            file.read(0, target)
        file.close()
        file._pool.close()

    assert in_child(work) == 0
    assert file.path.exists()
    assert torch.equal(read(file, 0)[:9], noise(4 * STEP)[:9])


def test_closing_at_exit_gives_up_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = IoPool(threads=1, block_size=STEP)
    file = SwapFile(tmp_path / "records", [4 * STEP], pool)
    started, gate = threading.Event(), threading.Event()

    def slow(fd: int, view: memoryview, offset: int) -> int:
        started.set()
        gate.wait()
        return len(view)

    monkeypatch.setattr(direct_file, "write_some", slow)
    transfers = [file.write(0, noise(4 * STEP)) for _ in range(2)]
    started.wait()
    handle = file._handle

    def open_gate() -> None:
        limit = time.monotonic() + 20
        while not handle.given_up and time.monotonic() < limit:
            time.sleep(0.001)
        gate.set()

    threading.Thread(target=open_gate, daemon=True).start()
    file._finalizer()
    for transfer in transfers:
        with pytest.raises(SwapError, match="was closed at exit before record 0 was transferred"):
            transfer.wait()
    assert not file.path.exists()
    pool.close()


@pytest.mark.slow
def test_a_process_that_set_its_threads_first_keeps_them(tmp_path: Path) -> None:
    """In a process of its own: torch takes a number of threads over when it is first used."""
    script = (
        "import torch; torch.set_num_threads(3)\n"
        "from lt_zero.core.stores.thread_pool import IoPool\n"
        "pool = IoPool(2)\n"
        "print(torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"
