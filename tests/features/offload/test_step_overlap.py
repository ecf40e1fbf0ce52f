"""Steps beside backward and beside the next forward (overlap.py): the same bits as in the plain order.

The kernel is slowed down in the background, so that whoever forgets to wait reads weights of the step before.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

import lt_zero
from lt_zero import kernels as ops
from lt_zero.core.engine.whole_model import full_state_dict
from lt_zero.core.stores import direct_file as io
from lt_zero.core.stores.io_options import SwapError
from tests.support.lightning_tools import BATCH, FULL, GPT, sharded_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.offload_runs import same
from tests.support.offload_tools import fail_with
from tests.support.overlap_runs import OPTIMIZERS, Fails, offload, slowed, train
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

STAGES = [(3, True), (3, False), (2, False), (1, False), (0, False)]  # and whether parameters are offloaded, too
WHERE = ["host", "files", "files, apart"]


@dataclass(frozen=True)
class Run:
    """What is offloaded, and where to.

    ``where``: host memory apart from the device's, or files, of which the device's memory may be apart, too.
    """

    where: str
    stage: int
    params: bool
    dtype: torch.dtype | None = None

    @property
    def apart(self) -> bool:
        return self.where != "files"

    def zero(self, folder: Path, overlap: Any) -> dict[str, Any]:
        return offload(None if self.where == "host" else str(folder), overlap, self.params)


def _beside_backward(run: Run, folder: Path, plain: bool) -> None:
    """``plain``: states are offloaded in the run that is compared with, too."""
    with slowed(run.apart) as watch:
        want, _, _ = train(run.stage, run.zero(folder, False) if plain else {}, dtype=run.dtype)
        assert watch.beside == 0
        for overlap in ("auto", True):
            watch.beside = watch.here = 0
            got, engine, _ = train(run.stage, run.zero(folder, overlap), beside=True, dtype=run.dtype)
            same(got, want, (run, overlap))
            assert watch.beside >= 2 * (len(engine.buckets) - 1), "all but the first step"
            engine.offload_manager.close()


# Below stage 3 backward waits for what lies in files.
BACKWARD = [Run(where, *stage) for where in WHERE for stage in STAGES if where == "host" or stage[0] == 3]
QUICK = [Run("host", 3, True), Run("host", 1, False), Run("files", 3, True)]


@pytest.mark.parametrize("world", only([2], [1, 2, 3]))
@pytest.mark.parametrize("run", only(QUICK, BACKWARD), ids=str)
def test_beside_backward(pool: Pool, tmp_path: Path, run: Run, world: int) -> None:
    pool.run(world, _beside_backward, run, tmp_path, True)


@pytest.mark.parametrize("run", only([Run("files, apart", 3, True)], BACKWARD), ids=str)
def test_beside_backward_in_bf16(pool: Pool, tmp_path: Path, run: Run) -> None:
    pool.run(2, _beside_backward, replace(run, dtype=torch.bfloat16), tmp_path, False)


def _beside_forward(run: Run, folder: Path) -> None:
    with slowed(run.apart) as watch:
        want, _, _ = train(run.stage, {}, clip=0.5, dtype=run.dtype)
        got, engine, _ = train(run.stage, run.zero(folder, True), clip=0.5, dtype=run.dtype)
        same(got, want, run)
        assert watch.beside >= len(engine.buckets) - 1, "all but the first steps"
        engine.offload_manager.close()


FORWARD = [Run(where, *stage) for where in WHERE for stage in STAGES]


@pytest.mark.parametrize(
    ("run", "world"), only_rows([(Run("host", 2, False), 3)], itertools.product(FORWARD, [3, 2, 1])), ids=str
)
def test_beside_the_next_forward(pool: Pool, tmp_path: Path, run: Run, world: int) -> None:
    pool.run(world, _beside_forward, run, tmp_path)


@pytest.mark.parametrize("run", only([Run("files, apart", 3, True)], FORWARD), ids=str)
def test_beside_the_next_forward_in_bf16(pool: Pool, tmp_path: Path, run: Run) -> None:
    pool.run(2, _beside_forward, replace(run, dtype=torch.bfloat16), tmp_path)


def _other_kernel(kind: str, stage: int, path: str, beside: bool) -> None:
    """Beside backward in host memory, or beside forward in files."""
    want, _, _ = train(stage, {}, kind=kind, steps=3)
    where, overlap = (None, "auto") if beside else (path, True)
    with slowed(apart=beside) as watch:
        got, engine, _ = train(stage, offload(where, overlap, stage == 3), beside, steps=3, kind=kind)
        same(got, want, (kind, where))
        # LAMB needs norms over the ranks, so only a rank that has all of each parameter steps it in the background.
        alone = kind != "Lamb" or stage == 0 or dist.get_world_size() == 1
        assert (watch.beside >= len(engine.buckets) - 1) == alone, watch.beside
        engine.offload_manager.close()


KINDS = [kind for kind in OPTIMIZERS if kind not in ("AdamW", "Lamb")]


@pytest.mark.parametrize(
    ("kind", "stage", "beside"),
    only_rows(
        [("SGD", 3, True), ("Lamb", 0, False)], [*itertools.product(KINDS, [3], [True, False]), ("Lamb", 0, False)]
    ),
)
def test_every_kernel_steps_in_the_background(pool: Pool, tmp_path: Path, kind: str, stage: int, beside: bool) -> None:
    pool.run(2, _other_kernel, kind, stage, str(tmp_path), beside)


@pytest.mark.parametrize("world", only([2], [1, 2]))
def test_lamb_waits_for_the_norms_of_the_ranks(pool: Pool, tmp_path: Path, world: int) -> None:
    pool.run(world, _other_kernel, "Lamb", 3, str(tmp_path), True)


# ---- what must not be stepped early ----------------------------------------------------------------------------------


class Branching(Net):
    """The second rank leaves a block out in some steps."""

    def forward(self, tokens: Tensor) -> Tensor:
        if dist.get_rank() == 1 and tokens.sum() % 2:
            return self.head(self.blocks[0](self.embedding(tokens) * self.scale))
        return super().forward(tokens)


def _unused(stage: int) -> None:
    with slowed(apart=True) as watch:
        want, _, _ = train(stage, {}, steps=4, model=Branching)
        for overlap in ("auto", True):
            got, engine, _ = train(stage, offload(None, overlap, False), beside=True, steps=4, model=Branching)
            same(got, want, (stage, overlap))
            assert watch.beside > 0
            engine.offload_manager.close()


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_a_bucket_that_a_rank_did_not_use_waits_for_the_step(pool: Pool, stage: int) -> None:
    pool.run(2, _unused, stage)


def _partly(beside: bool, path: str | None, stage: int) -> None:
    """Frozen parameters and those of another optimizer lie in buckets that are stepped; bf16 goes through slots."""
    runs = []
    for overlap in (False, "auto", True):
        with slowed(apart=path is None) as watch:
            torch.manual_seed(0)
            model = Net()
            for block in model.blocks:
                block.norm.requires_grad_(False)
            engine = lt_zero.shard(
                model, config_of(stage, zero=offload(path, overlap, path is not None), dtype=torch.bfloat16)
            )
            ups = [block.up.weight for block in model.blocks]
            rest = [p for p in model.parameters() if p.requires_grad and all(p is not up for up in ups)]
            pair = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.AdamW(ups, lr=3e-2)]
            both = [lt_zero.ShardedOptimizer(engine, optimizer) for optimizer in pair]
            for step in range(5):
                for optimizer in pair:
                    optimizer.zero_grad()
                with both[0].overlap.beside_backward() if beside else nullcontext():
                    next_token_loss(model, step, 0, dist.get_rank()).float().backward()
                for optimizer in pair:
                    optimizer.step()
            engine.finish_steps()
            flats = [bucket.compute.flat.clone() for bucket in engine.buckets if not bucket.sharding.params]
            runs.append((full_values(engine), flats, watch.beside))
    for values, flats, _ in runs[1:]:
        same(values, runs[0][0], stage)
        assert all(map(torch.equal, flats, runs[0][1])), "gaps and all"
    assert runs[2][2] > 0


@pytest.mark.parametrize(
    ("where", "beside"),
    only_rows(
        [((3, True), True)],
        itertools.product([(3, True), (2, False), (3, False), (0, False)], [True, False]),
    ),
)
def test_buckets_that_are_stepped_in_part(pool: Pool, tmp_path: Path, where: tuple[int, bool], beside: bool) -> None:
    stage, files = where
    pool.run(2, _partly, beside, str(tmp_path) if files else None, stage)


def _other_optimizers() -> None:
    """Only the kernel steps in the background; with others every setting is the plain order."""
    with slowed(apart=True) as watch:
        runs = []
        for overlap in (False, True):
            torch.manual_seed(0)
            model = Net()
            engine = lt_zero.shard(model, config_of(3, zero=offload(None, overlap, True)))
            optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
            sharded = lt_zero.ShardedOptimizer(engine, optimizer)
            for step in range(3):
                optimizer.zero_grad()
                with sharded.overlap.beside_backward():
                    next_token_loss(model, step, 0, dist.get_rank()).backward()
                optimizer.step()
            runs.append(full_values(engine))
        same(runs[1], runs[0], "NAdam")
        assert watch.beside == 0


def test_other_optimizers_step_as_ever(pool: Pool) -> None:
    pool.run(2, _other_optimizers)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _torn(overlap: Any) -> None:
    with slowed(apart=True):
        torch.manual_seed(0)
        model = Net(depth=6)
        engine = lt_zero.shard(model, config_of(3, zero=offload(None, overlap, True)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sharded = lt_zero.ShardedOptimizer(engine, optimizer)

        def backward(step: int) -> None:
            optimizer.zero_grad()
            loss = next_token_loss(model, step, 0, dist.get_rank())
            with sharded.overlap.beside_backward():
                loss.backward()

        for step in range(2):
            backward(step)
            optimizer.step()
        hook = model.blocks[0].register_forward_pre_hook(lambda module, args: (Fails.apply(*args),))
        with pytest.raises(ValueError, match="no gradient"):
            backward(2)
        hook.remove()
        next_token_loss(model, 3, 0, dist.get_rank()).backward()
        if overlap is False:
            optimizer.step()
            full_values(engine)
            return
        with pytest.raises(
            RuntimeError, match=r"of 7 buckets \(.*\) were stepped during a backward.*overlap_step=false"
        ):
            optimizer.step()
        with pytest.raises(RuntimeError, match="Load a checkpoint"):
            full_state_dict(engine)
        with pytest.warns(UserWarning, match="load a checkpoint"):
            lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(model.parameters()))
        full_state_dict(engine)


@pytest.mark.parametrize("overlap", only(["auto"], ["auto", False]))
def test_a_backward_that_fails_half_way(pool: Pool, overlap: Any) -> None:
    pool.run(2, _torn, overlap)


def _again() -> None:
    with slowed(apart=True):
        _, engine, _ = train(3, offload(None, "auto", True), steps=1)
        engine.gatherer.release_all()
        bucket = next(b for b in engine.buckets if not b.resident)
        bucket.grads.begin_early_step()
        with pytest.raises(RuntimeError, match="needed again after its gradients were complete"):
            bucket.gather()


def test_weights_that_are_needed_again_are_an_error(pool: Pool) -> None:
    pool.run(1, _again)


def _bad_kernel(*args: Any, **kwargs: Any) -> None:
    raise ArithmeticError("no steps today")


def _failing(path: str | None, kind: str) -> None:
    """Rank 1's disk or kernel fails in the background: both ranks raise, and say where it was."""
    with slowed(apart=path is None) as watch:
        torch.manual_seed(0)
        model = Net()
        dtype = torch.bfloat16 if kind == "kernel in bf16" else None
        engine = lt_zero.shard(model, config_of(3, zero=offload(path, True, dtype is None), dtype=dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sharded = lt_zero.ShardedOptimizer(engine, optimizer)

        def step(number: int) -> None:
            optimizer.zero_grad()
            with sharded.overlap.beside_backward():
                next_token_loss(model, number, 0, dist.get_rank()).float().backward()
            optimizer.step()

        for number in range(3):
            step(number)
        engine.finish_steps()
        patch = pytest.MonkeyPatch()
        if dist.get_rank() == 1 and kind.startswith("kernel"):
            patch.setattr(ops, "adam_step", _bad_kernel)
        elif dist.get_rank() == 1:
            patch.setattr(io, f"{kind}_some", fail_with(errno.EIO))
        found = ""
        for number in range(3, 6):
            try:
                step(number)
            except SwapError as error:
                found = str(error)
                break
        patch.undo()
        assert dist.get_rank() == 1 or "rank 1: " in found
        assert ("no steps today" if kind.startswith("kernel") else "EIO") in found
        assert number < 5, "at the next step at the latest"
        assert watch.beside > 0
        engine.offload_manager.close()
        assert not [t for t in threading.enumerate() if t.name == "lt_zero-step"], "it waits for something"


@pytest.mark.parametrize("kind", only(["write", "kernel"], ["write", "read", "kernel", "kernel in bf16"]))
def test_errors_in_the_background_are_errors_of_all(pool: Pool, tmp_path: Path, kind: str) -> None:
    pool.run(2, _failing, str(tmp_path) if kind in ("read", "write") else None, kind)


def test_overlap_needs_something_offloaded() -> None:
    with pytest.raises(ValueError, match=r"overlap_step=true needs offload_optimizer.device='cpu' or 'nvme'"):
        config_of(3, zero={"offload_optimizer": {"overlap_step": True}})
    assert config_of(3, zero={"offload_optimizer": {"overlap_step": "auto"}})


# ---- the Trainer -----------------------------------------------------------------------------------------------------


class Reader(Callback):
    """Reads weights in every way right after a step."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen = folder, list[Any]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        number = len(self.seen)
        weight = pl_module.net.blocks[1].up.weight
        if number % 5 == 0:
            found = weight.norm() if trainer.strategy.stage < 3 else full_state_dict(trainer.strategy.engine)
        elif number % 5 == 1:
            with lt_zero.gathered(weight):
                found = weight.data.clone()
        elif number % 5 == 2:
            found = trainer.strategy.full_state_dict()
        elif number % 5 == 3:
            trainer.save_checkpoint(f"{self.folder}/{number}.ckpt")
            found = torch.load(f"{self.folder}/{number}.ckpt", weights_only=False) if trainer.is_global_zero else None
            config = found["lt_zero"].pop("config") if found is not None else None  # in which the runs differ
            assert config is None or config["zero_optimization"]["stage"] == trainer.strategy.stage
        else:
            found = trainer.optimizers[0].state_dict()["state"]
            found = {p: {key: value.clone() for key, value in state.items()} for p, state in found.items()}
        self.seen.append(found)


class Looks(Callback):
    def on_after_backward(self, *args: Any) -> None:
        """Might look at gradients."""


class EveryOther(GPT):
    """Steps in every second batch only, in the way of Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def _fit(stage: int, zero: dict[str, Any], folder: str, options: dict[str, Any]) -> Any:
    os.makedirs(folder, exist_ok=True)
    cls, look = options.pop("cls", "GPT"), options.pop("look", False)
    with slowed(apart=zero["offload_optimizer"]["device"] == "cpu") as watch:
        reader = Reader(folder)
        module = {"GPT": GPT, "EveryOther": EveryOther}[cls](dist.get_world_size(), "adamw", rows=6 * 3 * BATCH)
        callbacks: list[Callback] = [reader, Looks()] if look else [reader]
        options = {"max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0, **options}
        trainer = sharded_trainer(stage, zero, FULL, callbacks=callbacks, **options)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        return weights(trainer), _plain(reader.seen), watch.beside, _plain(dict(trainer.callback_metrics))


def _plain(value: Any) -> Any:
    """What two runs have to have in common, as numpy arrays."""
    if isinstance(value, Tensor):
        return value.detach().float().numpy().copy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float)) else None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(_equal, a, b)) if isinstance(a, list) else bool(a == b)


CASES: dict[str, tuple[dict[str, Any], bool]] = {  # options, whether backward may be overlapped
    "plain": ({}, True),
    "accumulate": ({"accumulate_grad_batches": 2}, True),
    "clip": ({"gradient_clip_val": 0.1}, False),
    "hook": ({"look": True}, False),
    "every other": ({"cls": "EveryOther"}, True),
}


@pytest.mark.parametrize(
    ("case", "where"),
    only_rows([("accumulate", (2, False))], itertools.product(CASES, [(3, False), (2, False), (3, True)])),
    ids=str,
)
def test_trainer(pool: Pool, tmp_path: Path, case: str, where: tuple[int, bool]) -> None:
    stage, files = where
    options, early = CASES[case]
    path = str(tmp_path) if files else None
    plain, *others = (
        pool.run(2, _fit, stage, offload(path, overlap, stage == 3), f"{tmp_path}/{overlap}", options)
        for overlap in (False, "auto", True)
    )
    assert plain[0][2] == 0
    for results, overlapped in zip(others, (early, True), strict=True):
        for got, want in zip(results, plain, strict=True):
            assert _equal(got[0], want[0])
            assert _equal(got[1], want[1])
            assert _equal(got[3], want[3])
            assert (got[2] > 0) == overlapped


class WrapClip(GPT):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            return loss

        optimizer.step(closure=closure)


class Twice(GPT):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


class Manual(GPT):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            loss = self.loss(batch.flip(1))
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Keeps(GPT):
    """Gradients add up over two steps."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


LOOPS = {"clip": WrapClip, "twice": Twice, "manual": Manual, "keeps": Keeps}


def _loops(name: str, stage: int, path: str | None) -> None:
    runs = []
    for overlap in (False, "auto", True):
        with slowed(apart=path is None):
            module = LOOPS[name](dist.get_world_size(), "adamw", rows=4 * 3 * BATCH)
            options = {"max_epochs": 1, "limit_val_batches": 0}
            trainer = sharded_trainer(stage, offload(path, overlap, stage == 3), **options)
            trainer.fit(module)
            runs.append(weights(trainer))
    for other in runs[1:]:
        for key, value in runs[0].items():
            assert (other[key] == value).all(), key


@pytest.mark.parametrize(
    ("name", "where"),
    only_rows([("manual", (3, True))], itertools.product(LOOPS, [(3, False), (2, False), (3, True)])),
    ids=str,
)
def test_loops_that_do_more_than_lightnings_own(pool: Pool, tmp_path: Path, name: str, where: tuple[int, bool]) -> None:
    stage, files = where
    pool.run(2, _loops, name, stage, str(tmp_path) if files else None)
