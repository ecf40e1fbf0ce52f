"""Buffers that change: rank 0's are sent before training forwards, as by DistributedDataParallel."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.engine import buffers
from lt_zero.core.engine.buffers import _PROBATION
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool


def _inplace(net: Codebook, mean: Tensor, rank: int) -> None:
    net.code.mul_(0.9).add_(mean, alpha=0.1)


def _data(net: Codebook, mean: Tensor, rank: int) -> None:
    net.code.data.mul_(0.9).add_(mean, alpha=0.1)  # no version counter tells


def _assigned(net: Codebook, mean: Tensor, rank: int) -> None:
    net.code = net.code * 0.9 + mean * 0.1


def _on_one_rank(net: Codebook, mean: Tensor, rank: int) -> None:
    if rank == 1:
        _inplace(net, mean, rank)


def _later(net: Codebook, mean: Tensor, rank: int) -> None:
    if net.calls > 2 * (_PROBATION + 3):
        _inplace(net, mean, rank)


def _later_on_one_rank(net: Codebook, mean: Tensor, rank: int) -> None:
    if rank == dist.get_world_size() - 1:
        _later(net, mean, rank)


def _nothing(net: Codebook, mean: Tensor, rank: int) -> None:
    pass


CHANGES = [_inplace, _data, _assigned, _on_one_rank, _later, _later_on_one_rank, _nothing]


class Codebook(nn.Module):
    """Buffers of several kinds that forward changes, beside batch norm's and one that is constant."""

    code: Tensor
    seen: Tensor
    flags: Tensor
    mask: Tensor

    def __init__(
        self, change: Callable[..., None] = _inplace, compiled: bool = False, persistent: bool = False
    ) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.register_buffer("code", torch.zeros(7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=persistent)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("mask", torch.ones(7, 7).tril())
        self.change, self.calls = change, 0
        self.block: Any = torch.compile(Averaged(), backend="aot_eager") if compiled else None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.norm(self.first(x)) * self.mask[-1]
        if self.block is not None:
            hidden = self.block(hidden)
        with torch.no_grad():
            self.change(self, hidden.mean(0), dist.get_rank())
            self.seen += (x.sum() * 10).long() % 3
            self.flags = self.flags ^ (x[0, :3] > 0)
        out: Tensor = self.last(hidden * (1 + self.code) + self.seen * 0.01 + self.flags.sum() * 0.1)
        return out


class Averaged(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(7, 7)
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        out: Tensor = self.scale(x) + self.mean
        return out


def _batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * number + rank))


def _made(change: Callable[..., None], stage: int, gas: int = 1, compiled: bool = False, **keys: Any) -> Any:
    torch.manual_seed(0)
    net = Codebook(change, compiled, persistent=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "gradient_accumulation_steps": gas, **keys}
    return lt_zero.initialize(model=net, optimizer=optimizer, config=config)[0]


def _step(engine: Any, step: int, gas: int = 1) -> None:
    for micro in range(gas):
        engine.backward(engine(_batch(step * gas + micro, dist.get_rank())).square().mean())
        engine.step()


def _as_ddp(change: Callable[..., None], stage: int, gas: int, steps: int = 12, compiled: bool = False) -> None:
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(Codebook(change, compiled))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    engine = _made(change, stage, gas, compiled)
    for step in range(steps):
        for micro in range(gas):
            with ddp.no_sync() if micro < gas - 1 else nullcontext():
                ddp(_batch(step * gas + micro, dist.get_rank())).square().mean().div(gas).backward()
        optimizer.step()
        optimizer.zero_grad()
        _step(engine, step, gas)
        wanted = dict(ddp.module.named_buffers())
        for name, buffer in engine.module.named_buffers():
            torch.testing.assert_close(buffer, wanted[name], rtol=1e-5, atol=1e-6, msg=f"{name}, step {step}")
    with lt_zero.gathered(engine.module):
        for found, parameter in zip(engine.module.parameters(), ddp.module.parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "stage", "gas"),
    only_rows(
        [(_data, 1, 2), (_assigned, 3, 1), (_later_on_one_rank, 2, 2)],
        itertools.product(CHANGES[:-1], [0, 1, 2, 3], [1, 2]),
    ),
    ids=lambda v: getattr(v, "__name__", None),
)
def test_training_is_ddps(pool: Pool, change: Callable[..., None], stage: int, gas: int) -> None:
    pool.run(2, _as_ddp, change, stage, gas)


@pytest.mark.slow
def test_training_is_ddps_on_three_ranks_and_in_compiled_blocks(pool: Pool) -> None:
    pool.run(3, _as_ddp, _later_on_one_rank, 3, 1)
    pool.run(2, _as_ddp, _inplace, 3, 1, 6, True)


@contextmanager
def _sent() -> Iterator[list[int]]:
    """The bytes of broadcasts of buffers."""
    found: list[int] = []
    before = Ranks.broadcast

    def broadcast(self: Ranks, tensor: Tensor, name: str, src: int = 0) -> None:
        found.extend([tensor.numel()] if name.startswith("buffers") else [])
        before(self, tensor, name, src)

    Ranks.broadcast = broadcast  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Ranks.broadcast = before  # type: ignore[method-assign]


def _only_what_changes() -> tuple[list[int], list[int]]:
    engine = _made(_later, 1)
    engine.module.norm.eval()
    counts = []
    for step in range(2 * (_PROBATION + 3) + 4):
        with _sent() as sent:
            _step(engine, step)
        counts.append(sum(sent))
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    torch.manual_seed(0)
    frozen[1].train = lambda mode=True: frozen[1]  # type: ignore[assignment, return-value]
    resting = lt_zero.initialize(model=frozen, optimizer=torch.optim.SGD(frozen.parameters(), 0.1), config={})[0]
    with _sent() as sent:
        for _ in range(_PROBATION + 2):
            resting.backward(resting(torch.ones(2, 3)).sum())
            resting.step()
    return counts, sent


def test_constant_buffers_are_not_sent(pool: Pool) -> None:
    counts, sent = pool.run(2, _only_what_changes)[0]
    every, changing, code = 7 * 4 + 8 + 3 + 7 * 7 * 4 + 2 * 7 * 4 + 8, 8 + 3, 7 * 4
    rest = 2 * (_PROBATION + 3) + 1 - _PROBATION
    assert counts == [every] * _PROBATION + [changing] * rest + [changing + code] * 3
    assert len(sent) == _PROBATION


def _digests_in_a_step() -> tuple[int, int]:
    """How many resting buffers are read in a step with other forwards, and how many of those without versions."""
    engine = _made(_nothing, 1)
    with torch.inference_mode():
        engine.module.code = torch.zeros(7)
    for step in range(_PROBATION + 2):
        _step(engine, step)
    read: list[Any] = []
    before = buffers.digests
    buffers.digests = lambda tensors: read.extend(tensors) or before(tensors)  # type: ignore[func-returns-value]
    try:
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                engine.eval()(_batch(0, 0))
        engine.train()
        _step(engine, 0)
    finally:
        buffers.digests = before
    return len(read), sum(tensor.is_inference() for tensor in read)


def test_forwards_without_gradients_cost_nothing(pool: Pool) -> None:
    """A teacher or a reference model runs in each step."""
    assert pool.run(2, _digests_in_a_step) == [(2, 2), (0, 0)]  # rank 1 has got a buffer with a version


def _late(change: Callable[[Codebook, int], None]) -> tuple[list[str], bool, bool]:
    """What is told, whether ranks have the same values at last, and whether the buffer is still sent."""
    engine, rank = _made(_nothing, 2), dist.get_rank()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2 * _PROBATION + 8):
            if step == _PROBATION + 2:
                change(engine.module, rank)
            _step(engine, step)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, engine.module.code.tolist())
    (code,) = (buffer for buffer in engine.engine.buffers._buffers if buffer.name == "code")
    return [str(w.message) for w in told if "Buffer" in str(w.message)], rows[0] == rows[-1], code.is_sent


def _differently(net: Codebook, rank: int) -> None:
    net.code += rank


def _equally(net: Codebook, rank: int) -> None:
    net.code += 1


def test_changes_between_steps_that_begin_late_are_told_if_ranks_differ(pool: Pool) -> None:
    (told, same, sent), (elsewhere, *_) = pool.run(2, _late, _differently)
    assert ["'code'" in text for text in told] == [True]
    assert (elsewhere, same, sent) == ([], True, True)
    assert pool.run(2, _late, _equally)[0] == ([], True, False)


def _other_shapes() -> str:
    engine = _made(_grown, 1)
    try:
        for step in range(4):
            _step(engine, step)
    except RuntimeError as error:
        return str(error)
    return ""


def _grown(net: Codebook, mean: Tensor, rank: int) -> None:
    net.mask = torch.ones(7 + rank, 7)


def test_other_shapes_are_named(pool: Pool) -> None:
    for text in pool.run(2, _other_shapes):
        assert "'mask' is float32 (7, 7) on rank 0 and float32 (8, 7) on rank 1" in text
        assert "broadcast_buffers: false" in text


def _two_forwards(stage: int) -> None:
    """DDP raises here: it writes to what the first forward has saved."""
    engine, other = _made(_inplace, stage), _made(_inplace, 0, broadcast_buffers=False)
    for step in range(3):
        for one in (engine, other):
            loss = sum(
                one(_batch(2 * step + part, 0)).square().mean() for part in range(2)
            )  # equal data: equal buffers
            one.backward(loss)
            one.step()
    for found, wanted in zip(engine.module.buffers(), other.module.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)
    with lt_zero.gathered(engine.module):
        for parameter, wanted in zip(engine.module.parameters(), other.module.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted)


def test_two_forwards_before_a_backward(pool: Pool) -> None:
    pool.run(2, _two_forwards, 3)


def _resumes(folder: str, keys: dict[str, Any], resumes: bool) -> dict[str, Any]:
    """Buffers and weights after six steps, of which the last three may have been run from a checkpoint."""
    engine = _made(_inplace, 1, 2, **keys)
    if resumes:
        engine.load_checkpoint(folder)
    for step in range(3 if resumes else 0, 6):
        _step(engine, step, 2)
        if step == 2 and not resumes:
            engine.save_checkpoint(folder)
    with lt_zero.gathered(engine.module):
        return {name: value.tolist() for name, value in engine.module.state_dict().items()}


EACH: dict[str, Any] = {"broadcast_buffers": False}


@pytest.mark.parametrize("keys", only([EACH], [{}, EACH]), ids=["rank 0's", "each rank's"])
def test_resume_is_exact(pool: Pool, tmp_path: Path, keys: dict[str, Any]) -> None:
    wanted = pool.run(2, _resumes, str(tmp_path), keys, False)
    found = pool.run(2, _resumes, str(tmp_path), keys, True)
    assert (wanted[0]["code"] != wanted[1]["code"]) or not keys
    for before, after in zip(wanted, found, strict=True):
        assert after == before


def _told(folder: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lt_zero").addHandler(handler)
    try:
        engine = _made(_inplace, 1, 2, broadcast_buffers=False)
        engine.load_checkpoint(folder)
    finally:
        logging.getLogger("lt_zero").removeHandler(handler)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, engine.module.code.tolist())
    assert rows[0] == rows[-1]
    return [text for text in told if "buffers" in text]


def test_other_numbers_of_ranks_take_rank_0s(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _resumes, str(tmp_path), {"broadcast_buffers": False}, False)
    first, *others = pool.run(3, _told, str(tmp_path))
    assert len(first) == 1
    assert "2 ranks" in first[0]
    assert "rank 0" in first[0]
    assert others == [[], []]
