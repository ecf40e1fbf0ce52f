"""States that rest in files: the same weights to the last bit, at every stage, with every optimizer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero.common import accelerator
from tests.support.matrix import only, only_rows
from tests.support.offload_runs import OPTIMIZERS, in_memory, same, train
from tests.support.parity import STAGES, full_values
from tests.support.pool import Pool

SIXTEEN = [torch.bfloat16, torch.float16]


def _equal(path: str, stage: int, optimizer: str, dtype: torch.dtype | None) -> None:
    want = in_memory(stage, optimizer, dtype)
    for params in (True, False) if stage == 3 else (False,):
        got, engine, sharded = train(stage, path, optimizer, dtype=dtype, params=params)
        same(got, want, (stage, params))
        assert all(b.streamed for b in engine.buckets)
        assert not any(s.nbytes for b in engine.buckets for s in b.stores() if s.streamed), "away after a step"
        if optimizer == "AdamW":
            assert {key for b in engine.buckets for key in b.states.by_key} == {"exp_avg", "exp_avg_sq"}
        engine.offload_manager.close()
    dist.barrier()
    assert not list(Path(path).glob("lt_zero-*")), "files go with the run"


@pytest.mark.parametrize(("stage", "world"), only_rows([(3, 3)], itertools.product(STAGES, [3, 2, 1])))
def test_same_bits_as_in_memory(pool: Pool, tmp_path: Path, stage: int, world: int) -> None:
    pool.run(world, _equal, str(tmp_path), stage, "AdamW", None)


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    only_rows([(1, "RAdam"), (3, "SGD")], itertools.product(STAGES, sorted(set(OPTIMIZERS) - {"AdamW"}))),
)
def test_any_optimizer(pool: Pool, tmp_path: Path, stage: int, optimizer: str) -> None:
    pool.run(2, _equal, str(tmp_path), stage, optimizer, None)


@pytest.mark.parametrize(("stage", "dtype"), only_rows([(3, torch.float16)], itertools.product(STAGES, SIXTEEN)))
def test_sixteen_bits(pool: Pool, tmp_path: Path, stage: int, dtype: torch.dtype) -> None:
    pool.run(2, _equal, str(tmp_path), stage, "AdamW", dtype)


@dataclass(frozen=True)
class Options:
    """Keys of ``offload_optimizer``, and settings of the block ``aio``."""

    keys: tuple[dict[str, Any], ...]
    aio: tuple[dict[str, Any], ...]


OPTIONS = {
    "some": Options(({"buffer_count": 1}, {"ratio": 0.5}), ({"single_submit": True, "checksum": True},)),
    "others": Options(
        ({"buffer_count": 2}, {"pipeline_read": False}, {"pipeline_write": False}, {"ratio": 0.0}),
        ({"block_size": 8192, "thread_count": 1}, {"single_submit": True}, {"checksum": True}),
    ),
}


def _options(path: str, options: Options) -> None:
    want = in_memory(3)
    for more in options.keys:
        got, engine, _ = train(3, path, params=False, **more)
        same(got, want, more)
        resting = sum(b.layout.numel for b in engine.buckets if b.streamed)
        whole = sum(b.layout.numel for b in engine.buckets)
        assert resting <= more.get("ratio", 1.0) * whole
        assert (resting > 0) == (more.get("ratio", 1.0) > 0)
        engine.offload_manager.close()
    for aio in options.aio:
        got, engine, _ = train(3, path, keys={"aio": aio})
        same(got, want, aio)
        engine.offload_manager.close()


@pytest.mark.parametrize("which", only(["some"], OPTIONS))
def test_options(pool: Pool, tmp_path: Path, which: str) -> None:
    pool.run(2, _options, str(tmp_path), OPTIONS[which])


# ---- host memory ---------------------------------------------------------------------------------------------------


def _host(stage: int, optimizer: str, dtype: torch.dtype | None) -> None:
    """As with a GPU: host memory apart from the device's, although both are the same here."""
    want = in_memory(stage, optimizer, dtype)
    for params in ("cpu", "none") if stage == 3 else ("none",):
        zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": params}}
        with mock.patch.object(accelerator, "_apart", True):
            got, engine, _ = train(stage, None, optimizer, dtype=dtype, zero=zero)
        same(got, want, (stage, params))
        assert all(b.offloaded and not b.streamed for b in engine.buckets)
        assert all(b.places.gather.offloads == (params == "cpu") for b in engine.buckets if b.sharding.params)
        for bucket in engine.buckets:
            assert bucket.weights.master is not None
            rows = bucket.weights.master_rows
            assert rows.untyped_storage().data_ptr() != bucket.compute.flat.untyped_storage().data_ptr()
        with lt_zero.gathered(engine.root, write=True), torch.no_grad():
            for p in engine.root.parameters():
                p.mul_(0.5)
        before = full_values(engine)
        for name, value in want.items():
            written = value.to(dtype or value.dtype) * 0.5
            assert torch.equal(before[name], written.to(before[name].dtype)), (stage, params, name)


@pytest.mark.parametrize(
    ("stage", "optimizer", "world"),
    only_rows([(1, "AdamW", 3), (3, "SGD", 2)], itertools.product(STAGES, ["AdamW", "SGD"], [2, 1, 3])),
)
def test_host_memory_apart_from_the_device(pool: Pool, stage: int, optimizer: str, world: int) -> None:
    pool.run(world, _host, stage, optimizer, None)


@pytest.mark.parametrize(
    ("stage", "dtype"), only_rows([(1, SIXTEEN[1]), (3, SIXTEEN[0])], itertools.product(STAGES, SIXTEEN))
)
def test_host_memory_with_sixteen_bits(pool: Pool, stage: int, dtype: torch.dtype) -> None:
    pool.run(2, _host, stage, "AdamW", dtype)


def _files_apart(path: str, stage: int, optimizer: str, dtype: torch.dtype | None) -> None:
    """As with a GPU and NVMe: what comes from files has to go to the device."""
    want = in_memory(stage, optimizer, dtype)
    for params in (True, False) if stage == 3 else (False,):
        with mock.patch.object(accelerator, "_apart", True):
            got, engine, _ = train(stage, path, optimizer, dtype=dtype, params=params)
        same(got, want, (stage, params))
        engine.offload_manager.close()


@pytest.mark.parametrize(
    ("stage", "optimizer", "dtype"),
    only_rows(
        [(1, "SGD", None), (3, "AdamW", torch.bfloat16)],
        itertools.product(STAGES, ["AdamW", "SGD"], [torch.bfloat16, None]),
    ),
)
def test_files_apart_from_the_device(
    pool: Pool, tmp_path: Path, stage: int, optimizer: str, dtype: torch.dtype | None
) -> None:
    pool.run(2, _files_apart, str(tmp_path), stage, optimizer, dtype)
