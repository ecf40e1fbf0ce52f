"""Hazards of steps in the background: stale copies, what comes between backward and step, late copies, threads.

Each is shown with the smallest run.
"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine.whole_model import full_state_dict
from lt_zero.core.step.fused_step import FusedStep
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.store import Store
from lt_zero.offload import copy_streams
from lt_zero.offload.background import Background, Job
from tests.support.matrix import cover, only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.offload_runs import same
from tests.support.offload_tools import in_child
from tests.support.overlap_runs import Fails, offload, slowed, train
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool
from tests.support.simulated_device import machine


class Run:
    """A model that is stepped by hand."""

    def __init__(
        self, stage: int, zero: dict[str, Any], dtype: torch.dtype | None = None, model: Any = Net, leave_out: str = "-"
    ) -> None:
        torch.manual_seed(0)
        self.net = model()
        self.engine = lt_zero.shard(self.net, config_of(stage, zero=zero, dtype=dtype))
        parameters = [p for name, p in self.net.named_parameters() if leave_out not in name]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
        self.sharded = lt_zero.ShardedOptimizer(self.engine, self.optimizer)

    def backward(self, step: int, beside: bool = True) -> None:
        self.optimizer.zero_grad()
        loss = next_token_loss(self.net, step, 0, dist.get_rank()).float()
        with self.sharded.overlap.beside_backward() if beside else nullcontext():
            loss.backward()

    def steps(self, first: int, end: int, beside: bool = True) -> None:
        for step in range(first, end):
            self.backward(step, beside)
            self.optimizer.step()

    def copies(self) -> dict[str, Tensor]:
        """What forward computes with."""
        with lt_zero.gathered(self.net):
            return {name: p.detach().clone() for name, p in self.net.named_parameters()}


# ---- compute copies -------------------------------------------------------------------------------------------------


class Short(Net):
    """Leaves blocks out, on all ranks, and has a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.short = False
        self.blocks[2].extra = nn.Parameter(torch.ones(33))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks[:1] if self.short else self.blocks:
            x = block(x)
        return self.head(x)


def _copies(kind: str, stage: int) -> None:
    runs = []
    for overlap in (False, "auto", True):
        with slowed(apart=True):
            leave_out = "up.weight" if kind == "absent" else "-"
            run = Run(stage, offload(None, overlap, False), torch.bfloat16, Short, leave_out)
            run.steps(0, 2)
            if kind == "frozen":
                for block in run.net.blocks:
                    block.up.weight.requires_grad_(False)
            run.net.short = kind == "unused"
            run.steps(2, 4)
            master = full_values(run.engine)
            for name, value in run.copies().items():
                assert torch.equal(value, master[name].to(value.dtype)), (overlap, name)
            runs.append(master)
    same(runs[1], runs[0], "auto")
    same(runs[2], runs[0], True)


@pytest.mark.parametrize(
    ("kind", "stage"),
    only_rows([("frozen", 3), ("absent", 2)], itertools.product(["frozen", "absent", "unused"], [3, 2])),
)
def test_compute_copies_follow_the_master_weights(pool: Pool, kind: str, stage: int) -> None:
    """16 bits go through a buffer that other buckets have used before."""
    pool.run(2, _copies, kind, stage)


class Outside(Net):
    """A weight of the last block is used before the first: its gradient comes when the block's backward is over."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale + self.blocks[2].up.weight.square().mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Detached(Net):
    """The same, without a gradient: somebody could write to what was handed out."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.blocks[2].up.weight.detach().square().mean()


def _outside(kind: str, stage: int) -> None:
    runs = []
    for overlap in (False, "auto", True):
        with slowed(apart=True):
            model = {"outside": Outside, "detached": Detached}[kind]
            run = Run(stage, offload(None, overlap, stage == 3), model=model)
            run.steps(0, 3)
            runs.append(full_values(run.engine))
    same(runs[1], runs[0], "auto")
    same(runs[2], runs[0], True)


@pytest.mark.parametrize(("kind", "stage"), cover(["outside", "detached"], [3, 2]))
def test_weights_that_are_used_outside_of_their_unit(pool: Pool, kind: str, stage: int) -> None:
    pool.run(2, _outside, kind, stage)


# ---- between backward and step --------------------------------------------------------------------------------------


def _between(kind: str, stage: int) -> None:
    with slowed(apart=True):
        run = Run(stage, offload(None, "auto", stage == 3))
        run.steps(0, 2)
        run.backward(2)
        if kind == "backward":
            next_token_loss(run.net, 3, 0, dist.get_rank()).backward()
        elif kind == "zero_grad":
            run.optimizer.zero_grad()
        elif kind == "clip":
            run.sharded.grads.clip_norm(0.1)
        elif kind == "lr":
            run.optimizer.param_groups[0]["lr"] = 0.5
        elif kind == "no step":
            run.backward(3, beside=False)
        for act in (run.optimizer.step, lambda: full_state_dict(run.engine)):
            with pytest.raises(SwapError, match=r"weights are from two different steps\. Load a checkpoint"):
                act()


@pytest.mark.parametrize(("kind", "stage"), cover(["backward", "zero_grad", "clip", "lr", "no step"], [3, 2]))
def test_what_comes_between_is_refused(pool: Pool, kind: str, stage: int) -> None:
    pool.run(2, _between, kind, stage)


def _unrelated_key() -> None:
    with slowed(apart=True):
        run = Run(3, offload(None, "auto", True))
        run.steps(0, 2)
        run.backward(2)
        assert run.engine.offload_manager.partially_stepped
        run.optimizer.param_groups[0]["initial_lr"] = 0.5  # a schedule's
        run.optimizer.step()
        full_state_dict(run.engine)


def test_keys_that_are_not_the_optimizers_may_change(pool: Pool) -> None:
    pool.run(2, _unrelated_key)


def _unfinished() -> None:
    with slowed(apart=True):
        run = Run(3, offload(None, "auto", True))
        run.steps(0, 2)
        run.backward(2)
        with pytest.raises(SwapError, match="from two different steps"):
            full_state_dict(run.engine)  # half of the weights are a step ahead
        run.optimizer.step()
        full_state_dict(run.engine)


def test_nothing_is_saved_between_backward_and_step(pool: Pool) -> None:
    pool.run(2, _unfinished)


class Uneven(Net):
    """Each block has a parameter that the second rank does not use, and only the first rank can step early."""

    def __init__(self) -> None:
        super().__init__(depth=8)
        self.extras = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(8))
        for block, extra in zip(self.blocks, self.extras, strict=True):
            block.extra = extra
            block.register_forward_hook(lambda m, args, out: out + m.extra.sum() if dist.get_rank() == 0 else out)
        del self.extras


def _one_rank_only() -> None:
    with slowed(apart=True):
        run = Run(3, offload(None, "auto", True), model=Uneven)
        run.steps(0, 2)
        hook = run.net.blocks[0].register_forward_pre_hook(lambda module, args: (Fails.apply(*args),))
        with pytest.raises(ValueError, match="no gradient"):
            run.backward(2)
        hook.remove()
        assert bool(run.engine.offload_manager.partially_stepped) == (dist.get_rank() == 0)
        run.backward(3, beside=False)
        with pytest.raises(
            SwapError, match=("" if dist.get_rank() == 0 else "rank 0: ") + ".* from two different steps"
        ):
            run.optimizer.step()


def test_half_a_step_of_one_rank_is_an_error_of_all(pool: Pool) -> None:
    pool.run(2, _one_rank_only)


# ---- steps of its own between overlapped ones -----------------------------------------------------------------------


def _alone(kind: str, path: str | None) -> None:
    runs = []
    for overlap in (False, True):
        with slowed(apart=path is None):
            run = Run(3, offload(path, overlap, True))
            run.steps(0, 2, beside=False)
            saved = copy.deepcopy(run.optimizer.state_dict())
            run.steps(2, 4, beside=False)
            if kind == "load":
                run.optimizer.load_state_dict(saved)
            elif kind == "clear":
                run.optimizer.state.clear()
            elif kind == "hook":
                run.optimizer.register_step_pre_hook(lambda *args: None)
            run.optimizer.step()
            run.steps(4, 6, beside=False)
            runs.append(full_values(run.engine))
            run.engine.offload_manager.close()
    same(runs[1], runs[0], kind)


@pytest.mark.parametrize(("kind", "files"), cover(["load", "clear", "hook"], [False, True]))
def test_steps_that_the_thread_does_not_take_wait_for_it(pool: Pool, tmp_path: Path, kind: str, files: bool) -> None:
    pool.run(2, _alone, kind, str(tmp_path) if files else None)


def _replaced() -> None:
    """Several buckets that are stepped here hold buffers that the thread needs for those before them."""
    runs = []
    for overlap in (False, True):
        with slowed(apart=True):
            run = Run(2, offload(None, overlap, False), torch.bfloat16, lambda: Net(depth=9))
            run.steps(0, 3, beside=False)
            run.optimizer.state_dict()
            for block in list(run.net.blocks)[5:]:
                for p in block.parameters():
                    state = run.optimizer.state
                    if p in state:
                        state[p] = {key: value.clone() for key, value in state[p].items()}
            run.steps(3, 5, beside=False)
            runs.append(full_values(run.engine))
    same(runs[1], runs[0], "replaced states")


def test_states_that_were_replaced(pool: Pool) -> None:
    pool.run(2, _replaced)


# ---- who waits for a copy -------------------------------------------------------------------------------------------


class Sometimes(Net):
    """A parameter of the last bucket that lands may be left out."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.extra, self.extra_used = nn.Parameter(torch.ones(33)), True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in list(self.blocks)[::-1]:  # the last one lands last, and stands last in line
            x = block(x)
        return self.head(x + self.extra.square().mean() if self.extra_used else x)


@contextmanager
def slow_copies() -> Iterator[None]:
    """A gradient that is waited for in backward's thread arrives when the background has nothing more to do."""
    jobs, wait, hand_over, launch = list[Job](), copy_streams._Late.wait, Background.hand_over, FusedStep.launch

    def hand_over_noted(self: Background, job: Job, limit: int | None = None) -> None:
        hand_over(self, job, limit)
        jobs.append(job)

    def wait_long(self: Any) -> None:
        to_host = self._copy_stream._limit is not None
        if to_host and threading.current_thread().name != "lt_zero-step":
            for job in jobs:
                job.wait()
        wait(self)

    def launch_late(self: FusedStep, buckets: list[Any], *args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "lt_zero-step" and buckets[0].name == "blocks.5":
            time.sleep(0.1)
        launch(self, buckets, *args, **kwargs)

    patch = pytest.MonkeyPatch()
    patch.setattr(Background, "hand_over", hand_over_noted)
    patch.setattr(copy_streams._Late, "wait", wait_long)
    patch.setattr(copy_streams._Late, "synchronize", wait_long)
    patch.setattr(FusedStep, "launch", launch_late)
    patch.setattr(
        copy_streams.CopyStream, "copy", lambda lane, to, source, after=None: lane._begin(to, source, after)
    )  # no limit
    try:
        yield
    finally:
        patch.undo()


def _arriving() -> None:
    runs = []
    for overlap in (False, "auto"):
        with slowed(apart=True), slow_copies():
            run = Run(2, offload(None, overlap, False), torch.bfloat16, Sometimes)
            for step in range(5):
                run.net.extra_used = step < 2
                run.optimizer.zero_grad()
                for micro in range(2):
                    with run.sharded.overlap.beside_backward() if micro else nullcontext():
                        next_token_loss(run.net, step, micro, dist.get_rank()).float().backward()
                run.optimizer.step()
            runs.append(full_values(run.engine))
    same(runs[1], runs[0], "a parameter that is not used any more")


@pytest.mark.parametrize("world", only([2], [1, 2]))
def test_gradients_have_arrived_when_they_are_stepped(pool: Pool, world: int) -> None:
    """Buckets that are stepped beside backward and one that is not take turns in landing, in a window of two."""
    pool.run(world, _arriving)


def _edited() -> None:
    """An edit through ``p.data``, which changes no version, on a device for whose digests the host does not wait."""
    found = []
    for beside in (False, True):
        with slowed(apart=True) as watch, machine():
            run = Run(2, offload(None, "auto", False), torch.bfloat16)
            for step in range(4):
                if step == 2:
                    run.net.blocks[1].up.weight.data.mul_(1.5)
                run.backward(step, beside)
                run.optimizer.step()
            found.append(full_values(run.engine))
        assert (watch.beside > 0) == beside
    same(found[1], found[0], "an edit before backward")
    with slowed(apart=True), machine():
        run = Run(2, offload(None, "auto", False), torch.bfloat16)
        run.steps(0, 2)
        weight = run.net.blocks[0].up.weight
        weight.register_hook(lambda grad: weight.data.mul_(1.5))
        run.backward(2)
        with pytest.raises(SwapError, match=r"'blocks.0.*changed through `p.data` during a backward"):
            run.optimizer.step()


def test_edits_through_data_are_kept_or_an_error(pool: Pool) -> None:
    pool.run(1, _edited)


# ---- life of the thread ---------------------------------------------------------------------------------------------


def _dropped(path: str | None) -> None:
    before = set(threading.enumerate())  # other tests of this process may have left some
    counts = []
    for _ in range(3):
        with slowed(apart=path is None):
            run = Run(3, offload(path, "auto", True))
            run.steps(0, 3)
            del run
        gc.collect()
        alive = [t for t in threading.enumerate() if t not in before and t.name.startswith("lt_zero-")]
        folders = list(Path(path).glob("lt_zero-*")) if path else []
        counts.append((len(alive), len(folders)))
    assert counts[-1] == (0, 0), counts


@pytest.mark.parametrize("files", [False, True])
def test_an_engine_that_is_dropped_leaves_nothing(pool: Pool, tmp_path: Path, files: bool) -> None:
    pool.run(1, _dropped, str(tmp_path) if files else None)


class _Target:
    """What a job refers to, as a bucket."""

    def stores(self) -> list[Store]:
        return []


def test_the_thread_keeps_nothing_of_a_job_that_failed() -> None:
    @contextmanager
    def streaming() -> Iterator[None]:
        raise MemoryError("no buffers")
        yield

    errors: list[Exception] = []
    background, target = Background(streaming=streaming), _Target()
    kept = weakref.ref(target)
    job = Job(lambda: None, target.stores, None, errors.append)
    background.hand_over(job)
    job.wait()
    assert [type(error) for error in errors] == [MemoryError]
    del job, target
    until = time.monotonic() + 5  # the thread ends its pass after the job
    while kept() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert kept() is None
    background.close()


def _forked() -> None:
    with slowed(apart=True):
        _, engine, _ = train(2, offload(None, True, False), steps=3)
        run = Run(2, offload(None, True, False))
        run.steps(0, 3, beside=False)
        weight = run.net.blocks[1].up.weight

        def read() -> None:
            with pytest.raises(SwapError, match="was forked from process"):
                weight.norm()

        assert in_child(read) == 0
        assert weight.norm() > 0
        engine.finish_steps()


def test_a_forked_process_does_not_wait_for_ever(pool: Pool) -> None:
    pool.run(1, _forked)


def _zeroed(stage: int, path: str | None) -> None:
    runs = []
    for overlap in (False, True):
        with slowed(apart=False):
            run = Run(stage, offload(path, overlap, False))
            for step in range(3):
                run.optimizer.zero_grad(set_to_none=False)
                next_token_loss(run.net, step, 0, dist.get_rank()).backward()
                run.optimizer.step()
            runs.append(full_values(run.engine))
            run.engine.offload_manager.close()
    same(runs[1], runs[0], "zeroed")


@pytest.mark.parametrize(("stage", "files"), only_rows([(0, True)], itertools.product([0, 1, 3], [True, False])))
def test_gradients_are_zeroed_when_they_are_stepped(pool: Pool, tmp_path: Path, stage: int, files: bool) -> None:
    """``zero_grad(set_to_none=False)`` comes while the thread reads the gradients of the step before."""
    pool.run(2, _zeroed, stage, str(tmp_path) if files else None)
