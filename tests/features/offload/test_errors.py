"""Offload when something is wrong: configurations that do not fit, disks that fail, and what is left behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero.config import ZeroConfig
from lt_zero.core.step.supported_optimizers import states_per_element
from lt_zero.core.stores import direct_file as io
from lt_zero.core.stores.io_options import SwapError
from tests.support.matrix import only
from tests.support.models import Net, next_token_loss
from tests.support.offload_runs import blocks, train
from tests.support.offload_tools import change
from tests.support.parity import config_of
from tests.support.pool import Pool

# ---- configuration -------------------------------------------------------------------------------------------------


def of(zero: dict[str, Any], stage: int | None = None, **keys: Any) -> Any:
    return ZeroConfig.of({"zero_optimization": zero, **keys}, stage).zero_optimization


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_not_offloaded_below_stage_3(stage: int, tmp_path: Path) -> None:
    """As in DeepSpeed, but not silently: no file, no folder, whatever the block says."""
    for block in (
        {"device": "cpu", "pin_memory": False},
        {"device": "nvme", "nvme_path": str(tmp_path)},
        {"device": "nvme"},
    ):
        with pytest.warns(UserWarning, match="offload_param.device.*parameters are not sharded below stage 3"):
            config = ZeroConfig.of({"zero_optimization": {"stage": stage, "offload_param": block}})
        assert config.zero_optimization.param_offload.device == "none"
        engine = lt_zero.shard(Net(), config)
        assert not engine.offload_manager.has_files
        assert not list(tmp_path.iterdir())
        engine.detach()
    assert of({"offload_param": {"device": "cpu"}}, 3).param_offload.device == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of({"stage": stage, "offload_param": {"device": "none"}}).stage == stage


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_files_need_a_folder(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.device='nvme' needs zero_optimization.{name}.nvme_path"):
        of({"stage": 3, name: {"device": "nvme"}})


OLD: list[tuple[dict[str, Any], str, str, Any]] = [
    ({"cpu_offload": True}, "offload_optimizer", "device", "cpu"),
    ({"cpu_offload": False}, "offload_optimizer", "device", "none"),
    ({"cpu_offload": 1}, "offload_optimizer", "device", "cpu"),
    ({"cpu_offload_param": True}, "offload_param", "device", "cpu"),
    ({"offload_params": {"device": "cpu"}}, "offload_param", "device", "cpu"),
    ({"offload_param": True}, "offload_param", "device", "cpu"),
    ({"offload_optimizer": True}, "offload_optimizer", "device", "cpu"),
    ({"offload_optimizer": {"device": "cpu"}, "pin_memory": False}, "offload_optimizer", "pin_memory", False),
    ({"fast_init": True}, "offload_optimizer", "fast_init", True),
]


@pytest.mark.parametrize("case", range(len(OLD)))
def test_old_spellings_work_and_are_told(case: int) -> None:
    zero, block, key, value = OLD[case]
    with pytest.warns(UserWarning, match=rf"is read as zero_optimization\.{block}.*Write the latter"):
        parsed = of({"stage": 3, **zero})
    assert getattr(getattr(parsed, block), key) == value


def test_contradictions_and_what_is_not_supported() -> None:
    with (
        pytest.raises(
            ValueError, match=r"cpu_offload says 'cpu', zero_optimization.offload_optimizer.device says 'none'"
        ),
    ):
        of({"cpu_offload": True, "offload_optimizer": {"device": "none"}})
    with pytest.raises(ValueError, match=r"(?s)block_size.*multiple of 4096"):
        of({}, aio={"block_size": 5000})
    with pytest.raises(ValueError, match=r"(?s)nvme_path.*empty"):
        of({"offload_optimizer": {"device": "nvme", "nvme_path": " "}})
    home = of({"offload_optimizer": {"device": "nvme", "nvme_path": "~/x"}}).offload_optimizer.nvme_path
    assert home == Path.home() / "x"
    with pytest.raises(ValueError, match="GPUDirect"):
        of({}, aio={"use_gds": True})
    assert ZeroConfig.of({"aio": {"thread_count": 2}}).aio.intra_op_parallelism == 2
    assert ZeroConfig.of({"aio": {"single_submit": True}}).aio.in_flight == 1
    assert of({"offload_optimizer": None, "offload_param": None}).offload_optimizer.device == "none"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}, "sub_group_size": "1e9"})
    for bad in ({"ratio": 1.5}, {"buffer_count": 0}, {"device": "disk"}, {"nvm_path": "/x"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            of({"offload_optimizer": bad})


def test_states_are_counted() -> None:
    p = [nn.Parameter(torch.zeros(2))]
    assert states_per_element(torch.optim.AdamW(p, lr=1.0)) == 2
    assert states_per_element(torch.optim.AdamW(p, amsgrad=True)) == 3
    assert states_per_element(torch.optim.SGD(p, lr=1.0)) == 0
    assert states_per_element(torch.optim.SGD([{"params": p, "momentum": 0.9}], lr=1.0)) == 1


# ---- disks ---------------------------------------------------------------------------------------------------------


class Failing:
    """Reads or writes of one rank fail from the ``number``-th on."""

    def __init__(self, what: str, number: int, rank: int) -> None:
        self.what = what
        self.left = number
        self.mine = dist.get_rank() == rank
        self.before = getattr(io, what)

    def __enter__(self) -> None:
        setattr(io, self.what, self)

    def __exit__(self, *_: Any) -> None:
        setattr(io, self.what, self.before)

    def __call__(self, fd: int, view: memoryview, offset: int) -> int:
        self.left -= 1
        if self.mine and self.left < 0:
            raise OSError(errno.ENOSPC if "write" in self.what else errno.EIO, os.strerror(errno.EIO))
        return int(self.before(fd, view, offset))


def _fails(path: str, what: str, number: int, world: int) -> str:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3, zero=blocks(path)))
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(model.parameters(), lr=1e-2))
    message = ""
    with Failing(what, number, world - 1):
        try:
            for step in range(3):
                sharded.optimizer.zero_grad()
                next_token_loss(model, step, 0, dist.get_rank()).backward()
                sharded.grads.clip_norm(0.5)
                sharded.optimizer.step()
        except SwapError as error:
            message = str(error)
    return message


@pytest.mark.parametrize("what", only(["write_some"], ["read_some", "write_some"]))
def test_a_failing_disk_is_an_error_on_all_ranks(pool: Pool, tmp_path: Path, what: str) -> None:
    whole = 60 if what == "read_some" else 40
    for number in range(0, whole, 7):  # in gathers, in backward, in the norm, in the step
        for rank, message in enumerate(pool.run(2, _fails, str(tmp_path), what, number, 2)):
            assert rank == 1 or "rank 1: " in message, (number, message)
            assert str(tmp_path) in message
            assert "offset" in message


def _corrupted(path: str) -> str:
    """Some other program writes to the files of rank 1."""
    _, engine, sharded = train(3, path, keys={"aio": {"checksum": True}})
    if dist.get_rank() == 1:
        tier = engine.offload_manager.optim
        for file in tier.folder.path.iterdir():
            change(file, 100, b"\xff")
    dist.barrier()
    try:
        next_token_loss(engine.root, 9, 0, dist.get_rank()).backward()
        sharded.optimizer.step()
    except SwapError as error:
        return str(error)
    finally:
        engine.offload_manager.close()
    return ""


def test_what_a_disk_made_up_is_an_error_of_all(pool: Pool, tmp_path: Path) -> None:
    for rank, message in enumerate(pool.run(2, _corrupted, str(tmp_path))):
        assert rank == 1 or "rank 1: " in message
        assert "Wrong checksum of" in message


def _no_room(path: str) -> str:
    import lt_zero.offload.private_folder as folder

    before = folder.free_bytes
    folder.free_bytes = lambda _: 1000 if dist.get_rank() == 1 else before(Path(path))  # type: ignore[assignment]
    try:
        lt_zero.shard(Net(), config_of(1, zero=blocks(path, False)))
    except SwapError as error:
        return str(error)
    finally:
        folder.free_bytes = before
    return ""


def test_a_disk_that_is_too_small_is_refused(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(2, _no_room, str(tmp_path)):
        assert "rank 1" in message
        assert "too little space" in message
        assert "1000 B" in message or "1,000" in message or "1.0 kB" in message or "1000" in message


# ---- what is left --------------------------------------------------------------------------------------------------


def _away(path: str) -> None:
    _, engine, sharded = train(2, path)
    for p, state in sharded.optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].shape == p.shape or state[key].dim() == 1
            assert state[key].isnan().all(), "never zeros that look like values"
    engine.offload_manager.close()


def test_states_that_are_away_read_nan(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _away, str(tmp_path))


def _announced(path: str) -> tuple[str, str]:
    _, engine, _ = train(3, path)
    line = engine.offload_manager.announce(engine.buckets, 2)
    engine.offload_manager.close()
    return line, lt_zero.shard(Net(), config_of(3)).offload_manager.announce([], 2)


def test_the_forecast(pool: Pool, tmp_path: Path) -> None:
    for line, nothing in pool.run(2, _announced, str(tmp_path)):
        assert "B/s read" in line
        assert "per rank: about" in line
        assert nothing == ""


def _rounds(path: str, steps: int, rounds: int) -> tuple[list[int], list[int], int, int]:
    memory, files = [], []
    me = psutil.Process()
    threads = threading.active_count()
    for _ in range(rounds):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
        engine = lt_zero.shard(model, config_of(3, zero=blocks(path)))
        sharded = lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(steps):
            sharded.optimizer.zero_grad()
            model(torch.ones(4, 256)).square().mean().backward()
            sharded.grads.clip_norm(1.0)
            sharded.optimizer.step()
            memory.append(me.memory_info().rss)
        del model, engine, sharded
        gc.collect()
        files.append(me.num_fds())
    gc.collect()
    return memory, files, threading.active_count() - threads, len(list(Path(path).glob("lt_zero-*")))


@pytest.mark.slow
def test_nothing_grows(pool: Pool, tmp_path: Path) -> None:
    ((memory, _, _, left),) = pool.run(1, _rounds, str(tmp_path), 80, 1)
    assert memory[-1] - memory[40] < 4 << 20, "a bucket has 257 kB: one that each step kept would be 10 MB"
    assert left == 0, "the files of a run that was dropped"
    ((memory, files, threads, left),) = pool.run(1, _rounds, str(tmp_path), 3, 5)
    assert memory[-1] - memory[3] < 8 << 20
    assert files[-1] <= files[0]
    assert threads <= 0
    assert left == 0
