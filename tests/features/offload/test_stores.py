"""A further place where bytes are kept needs a store and what makes its places: nothing else knows what there is."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lt_zero.common import accelerator
from lt_zero.common.codec import Codec
from lt_zero.config.blocks import Aio
from lt_zero.config.options import io_options
from lt_zero.core.stores.pinned import aligned_buffer
from lt_zero.core.stores.store import CODES, Place, Speed, Store
from lt_zero.features.offload import manager as offload_manager
from lt_zero.kernels.codecs import INT8, TWO_BITS
from lt_zero.kernels.moments import CodedMoments, PlainMoments, decode
from lt_zero.offload import nvme_store
from lt_zero.offload.host_store import FedStore, HostLink, HostStore, StreamedStore
from tests.support.matrix import only_rows
from tests.support.offload_runs import in_memory, same, train
from tests.support.overlap_runs import offload
from tests.support.overlap_runs import train as train_beside
from tests.support.pool import Pool


class Compressed(StreamedStore):
    """Keeps a tensor as compressed bytes."""

    def __init__(self, numel: int, dtype: torch.dtype, link: HostLink | None) -> None:
        super().__init__(numel, dtype, link)
        self._tensor = torch.zeros(numel, dtype=dtype)
        self._packed = b""

    def read(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = torch.frombuffer(bytearray(zlib.decompress(self._packed)), dtype=self.dtype)
            self._show()
        self.wait_arrived()
        return self._tensor

    def begin_step(self) -> None:
        if self._tensor is None:
            self.read()

    def overwrite(self) -> torch.Tensor:
        self.wait_arrived()
        if self._tensor is None:
            self._tensor = torch.full((self.numel,), torch.nan).to(self.dtype)
            self._show()
        return self._tensor

    def end_use(self) -> None:
        self.wait_arrived()
        if self._tensor is not None:
            self._packed = zlib.compress(self._tensor.view(torch.uint8).numpy().tobytes(), 1)

    def wait_written(self) -> None:
        self._tensor = None
        self._show()

    discard = wait_written


class Archive:
    """Compressed bytes of all buckets."""

    def __init__(
        self,
        where: Any,
        rank: int,
        aio: Any,
        numels: Sequence[int],
        moments: Any,
        trains: Sequence[bool],
        codec: Codec | None,
        room: int = 3,
        pin: bool = False,
    ) -> None:
        self.room = room
        self.where = "memory"
        self.problem = None
        self.spare_nbytes = self.bytes_on_disk = 0

    def place(self, record: int, link: HostLink | None) -> Place:
        def store(kind: str, numel: int, dtype: torch.dtype) -> Store:
            return Compressed(numel, dtype, link)

        return Place(store, offloads=True, streamed=True, feed=partial(FedStore, link=link) if link else None)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        yield

    def speed(self, nbytes: int) -> Speed:
        return Speed(1e9, 1e9)

    def require(self, states: int) -> None:
        return None

    def rest(self) -> None:
        return None

    close = rest


def _compressed(path: str, apart: bool, stage: int, dtype: torch.dtype | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(offload_manager._TIERS, "nvme", Archive)
        patch.setattr(accelerator, "_apart", apart)
        got, engine, _ = train(stage, path, dtype=dtype)
        assert all(type(b.weights.master) is Compressed for b in engine.buckets)
        assert not any(s.nbytes for b in engine.buckets for s in b.stores() if s.streamed), "away after a step"
        beside, _, _ = train_beside(stage, offload(path, True, params=stage == 3), beside=True, dtype=dtype)
    same(got, in_memory(stage, "AdamW", dtype), "in the plain order")
    same(beside, train_beside(stage, {}, dtype=dtype)[0], "beside backward")


@pytest.mark.parametrize(
    ("apart", "stage", "dtype"),
    only_rows(
        [(True, 3, torch.bfloat16)],
        [
            (apart, stage, dtype)
            for apart in (False, True)
            for stage, dtype in ((1, None), (2, torch.bfloat16), (3, None), (3, torch.bfloat16))
        ],
    ),
)
def test_a_fourth_place_trains_the_same_bits(
    pool: Pool, tmp_path: Path, apart: bool, stage: int, dtype: torch.dtype | None
) -> None:
    pool.run(2, _compressed, str(tmp_path), apart, stage, dtype)


def _host_store() -> HostStore:
    """Three elements in host memory, apart from the device, with copies that are as late as they may be."""
    return HostStore(torch.float32, lambda: torch.full((3,), torch.nan), HostLink(torch.device("cpu"), False, 64))


def test_reduced_gradients_are_added_in_host_memory_once_they_arrived() -> None:
    store = _host_store()
    for number, add in ((1.0, False), (2.0, True), (4.0, True)):
        out, adds = store.target(add)
        assert not adds
        out.fill_(number)
        store.arrived()
    assert store.read().tolist() == [7.0] * 3


def test_a_reduction_into_a_store_that_was_discarded_changes_nothing() -> None:
    store = _host_store()
    store.target(add=False)[0].fill_(5.0)
    store.discard()
    store.overwrite().fill_(1.0)
    store.arrived()
    assert store.read().tolist() == [1.0] * 3


def test_a_gather_is_launched_after_the_copy_that_it_reads() -> None:
    store, shard = _host_store(), torch.zeros(3)
    store.overwrite().fill_(2.0)
    with store.source(shard) as own:
        assert own is None
        assert shard.tolist() == [2.0] * 3
    store.sent()
    store.wait_sent()


def test_one_file_has_a_state_of_all_buckets_in_their_forms(tmp_path: Path) -> None:
    forms, numels = [CodedMoments(), PlainMoments(torch.float32)], [102_400, 20_480]
    files = nvme_store.NvmeFiles(tmp_path, 0, io_options(Aio()), numels, forms)
    coded, wide = (
        files.place(i, None).state("exp_avg", n, form) for i, (n, form) in enumerate(zip(numels, forms, strict=True))
    )
    assert coded is not None
    assert wide is not None
    assert coded.write().numel() == 104_000
    assert wide.write().numel() == 20_480
    assert files.bytes_on_disk == 26 * 4096 + 20 * 4096  # whole blocks of a disk
    with mock.patch.object(files.folder, "require") as required:
        files.require(2)
    required.assert_called_once_with(2 * (104_000 + 4 * 20_480))
    coded.end_use()
    coded.wait_written()
    assert decode(coded.tensor.contiguous(), 1, True).isnan().all(), "values that are away"
    files.close()


def test_files_have_no_room_for_what_a_frozen_bucket_does_not_keep(tmp_path: Path) -> None:
    forms = [PlainMoments(torch.float32)] * 2
    files = nvme_store.NvmeFiles(tmp_path, 0, io_options(Aio()), [20_480, 10_240], forms, trains=[False, True])
    frozen, trained = (files.place(i, None) for i in range(2))
    frozen.store("weights", 20_480, torch.float32)
    assert files.bytes_on_disk == 30 * 4096
    trained.store("master", 10_240, torch.float32)
    trained.state("exp_avg", 10_240, forms[1])
    assert files.bytes_on_disk == (30 + 2 * 10) * 4096
    with mock.patch.object(files.folder, "require") as required:
        files.require(2)
    required.assert_called_once_with(2 * 4 * 10_240)
    late = frozen.store("master", 20_480, torch.float32)  # it was unfrozen
    late.overwrite().fill_(3.0)
    late.end_use()
    late.wait_written()
    late.prefetch()
    assert late.tensor.tolist() == [3.0] * 20_480
    assert files.bytes_on_disk == (30 + 2 * 10 + 20) * 4096
    files.close()


@pytest.mark.parametrize("codec", [INT8, TWO_BITS], ids=str)
def test_files_have_room_for_codes_and_no_more(tmp_path: Path, codec: Codec) -> None:
    numel = 1_024_000
    form = PlainMoments(torch.float32)
    files = nvme_store.NvmeFiles(tmp_path, 0, io_options(Aio()), [numel], [form], trains=[False], codec=codec)
    store = files.place(0, None).store(CODES, codec.nbytes(numel), torch.uint8)
    assert files.bytes_on_disk == -(-codec.nbytes(numel) // 4096) * 4096
    store.overwrite().fill_(3)
    store.end_use()
    store.wait_written()
    store.prefetch()
    assert (store.tensor == 3).all()
    files.close()


@pytest.mark.parametrize("pin", [True, False])
def test_buffers_of_files_are_pinned_if_they_are_copied_to_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: bool
) -> None:
    made: list[bool] = []

    def buffer(nbytes: int, pin: bool) -> torch.Tensor:
        made.append(pin)
        return aligned_buffer(nbytes)

    monkeypatch.setattr(nvme_store, "host_buffer", buffer)
    files = nvme_store.NvmeFiles(tmp_path, 0, io_options(Aio()), [5000], [PlainMoments(torch.float32)], pin=pin)
    store = files.place(0, None).store("master", 5000, torch.float32)
    store.overwrite().fill_(1.0)
    store.end_use()
    store.wait_written()
    assert made == ([True] if pin else [])
    files.close()
