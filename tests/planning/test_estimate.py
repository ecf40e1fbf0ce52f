"""Forecasts against what an engine really takes, the paper's numbers, limits of machines, and the command."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero
from lt_zero import Sizes, ZeroConfig, estimate
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.common import accelerator
from lt_zero.config.blocks import Checkpoint, OptimizerBlock
from lt_zero.config.precision import dtype_policy
from lt_zero.core.comm.send_sizes import SendSizes
from lt_zero.core.engine import storage_plan
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.gather import Residency
from lt_zero.core.engine.storage_plan import DEVICE, HOST, NVME, StoragePlan
from lt_zero.core.engine.whole_model import full_state_dict
from lt_zero.core.stores import store
from lt_zero.core.stores.pinned import rounded
from lt_zero.exchange.error_feedback import FeedbackPlan
from lt_zero.offload.nvme_store import NvmeStore
from lt_zero.optim import build_optimizer
from lt_zero.planning.check import RESTING, measured
from lt_zero.planning.estimate import _planned, states_of
from lt_zero.planning.forecast import (
    COPY,
    FILE,
    GATHERED,
    GRADS,
    LOCAL,
    MASTER,
    MOMENTS,
    OFFLOAD,
    REDUCE,
    REPLACED,
    RESIDUALS,
    WEIGHTS,
    forecast,
)
from tests.support.features import needs, there
from tests.support.matrix import cover, only_rows
from tests.support.models import VOCAB, Block, tokens
from tests.support.pool import Pool

OFFLOADS = ("none", "optimizer", "both")


class Wide(nn.Module):
    """Large enough that alignment does not matter, with a frozen layer."""

    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.middle = nn.Linear(width, width)
        self.middle.requires_grad_(False)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.middle(x))


def config_for(stage: int, offload: str, path: str, low: bool = False, overlap: Any = False) -> ZeroConfig:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 500}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": path, "overlap_step": overlap}
    if offload == "both":
        zero["offload_param"] = {"device": "nvme", "nvme_path": path, "max_in_cpu": 0}
    if stage == 3:
        zero["stage3_max_reuse_distance"] = 150_000
    return ZeroConfig.of({"zero_optimization": zero, **({"bf16": {"enabled": True}} if low else {})})


class Peaks:
    """Bytes of gathered weights and of homes at most, while the context is open."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.gathered = 0
        self.homes = 0
        self.tiers = getattr(engine.offload_manager, "tiers", ())  # of an engine that offloads

    def __enter__(self) -> Peaks:
        self.patch = pytest.MonkeyPatch()
        for cls, name in (
            (Bucket, "launch_gather"),
            (Bucket, "gather"),
            (NvmeStore, "prefetch"),
            (NvmeStore, "overwrite"),
        ):
            self.patch.setattr(cls, name, self.noting(getattr(cls, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        self.patch.undo()

    def noting(self, method: Any) -> Any:
        def call(this: Any, *args: Any) -> Any:
            result = method(this, *args)
            buckets = self.engine.buckets
            here = [b for b in buckets if b.sharding.params and b.allocated]
            homes = [s for b in buckets for s in b.stores() if s.streamed]
            self.gathered = max(self.gathered, sum(b.compute.flat.nbytes for b in here))
            spare = sum(t.spare_nbytes for t in self.tiers)
            self.homes = max(self.homes, spare + sum(rounded(h.nbytes) for h in homes))
            return result

        return call


def train(
    model: nn.Module, config: ZeroConfig, mode: str, accumulate: int = 1, steps: int = 2, beside: bool = False
) -> tuple[Any, Any, Peaks, int]:
    """Some steps, overlapped if ``beside``; what an accumulation window held is the last result."""
    engine = lt_zero.shard(model, config, policy=dtype_policy(config, mode))
    block = config.optimizer or OptimizerBlock(type="AdamW")
    optimizer = build_optimizer(block.type, block.params, [p for p in model.parameters() if p.requires_grad])
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    window = 0
    with Peaks(engine) as peaks, torch.autocast("cpu", torch.bfloat16, enabled="mixed" in mode):
        for step in range(steps):
            if beside and step == 2:  # from here on nothing is stepped on its own
                engine.finish_steps()
                peaks.homes = 0
            optimizer.zero_grad()
            for micro in range(accumulate):
                engine.reducer.sync = micro == accumulate - 1
                batch = tokens(step, micro, dist.get_rank())
                with sharded.overlap.beside_backward() if beside else nullcontext():
                    F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten()).backward()
                window = max(window, measured(engine).get(LOCAL, 0))
            optimizer.step()
    return engine, sharded, peaks, window


def close(got: int, want: int, what: Any, slack: float = 0.05) -> None:
    assert abs(got - want) <= slack * max(got, want) + 256, (what, "measured", got, "forecast", want)


def _compare(mode: str, stage: int, path: str) -> None:
    for offload in OFFLOADS if stage == 3 else OFFLOADS[:-1]:
        config = config_for(stage, offload, path, low=mode == "bf16-true")
        torch.manual_seed(0)
        model = Wide()
        cast = estimate(model, config, dist.get_world_size(), device="cpu", precision=mode)
        engine, sharded, peaks, _ = train(model, config, mode)
        have, case = measured(engine, [sharded]), (mode, stage, offload)
        want = {place: cast.kinds(place) for place in (HOST, NVME)}
        for kind in (WEIGHTS, MASTER, GRADS, MOMENTS, REDUCE):
            close(have.get(kind, 0), want[HOST].get(kind, 0), (*case, kind))
        close(have.get(RESTING, 0), sum(want[NVME].values()), (*case, "files"), slack=0)
        close(peaks.gathered, want[HOST].get(GATHERED, 0), (*case, "gathered"))
        streamed = [store for bucket in engine.buckets for store in bucket.stores() if store.streamed]
        assert not any(store.nbytes for store in streamed), (*case, "nothing stays in memory after a step")
        assert peaks.homes <= want[HOST].get(OFFLOAD, 0), (*case, peaks.homes, want[HOST].get(OFFLOAD))
        assert have.get(OFFLOAD, 0) <= want[HOST].get(OFFLOAD, 0), case
        if offload == "optimizer":
            assert peaks.homes >= 0.6 * want[HOST][OFFLOAD], (*case, peaks.homes, want[HOST][OFFLOAD])
        if offload == "none":
            trained = {name: value for name, value in Wide().named_parameters() if value.requires_grad}
            model.load_state_dict(trained, strict=False)
            close(measured(engine).get(REPLACED, 0), want[HOST].get(REPLACED, 0), (*case, REPLACED))
        engine.offload_manager.close()


def _residuals() -> None:
    for stage, mode in itertools.product((0, 2, 3), ("32-true", "bf16-true")):
        config = ZeroConfig.of({"zero_optimization": {"stage": stage}, "gradient_compression": {"algorithm": "1bit"}})
        model = Wide()
        cast = estimate(model, config, dist.get_world_size(), device="cpu", precision=mode)
        engine, sharded, _, _ = train(model, config, mode)
        have = measured(engine, [sharded]).get(RESIDUALS, 0)
        assert have > 4 * sum(p.numel() for p in model.parameters()) * (0.5 if mode == "32-true" else 1.0)
        close(have, cast.kinds(HOST).get(RESIDUALS, 0), (mode, stage))


def _one_bit(type_: str, stage: int) -> None:
    for mode in ("32-true", "bf16-true"):
        params = {"var_freeze_step" if type_ == "ZeroOneAdam" else "freeze_step": 1}
        config = ZeroConfig.of({"zero_optimization": {"stage": stage}, "optimizer": {"type": type_, "params": params}})
        model = Wide()
        optimizer = build_optimizer(type_, params, [p for p in model.parameters() if p.requires_grad])
        cast = estimate(model, config, dist.get_world_size(), optimizer=type_.lower(), device="cpu", precision=mode)
        engine = lt_zero.shard(model, config, policy=dtype_policy(config, mode))
        sharded, window = lt_zero.ShardedOptimizer(engine, optimizer), 0
        for step in range(3):
            optimizer.zero_grad()
            batch = tokens(step, 0, dist.get_rank())
            F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten()).backward()
            window = measured(engine).get(LOCAL, 0)
            optimizer.step()
        have, want = measured(engine, [sharded]), cast.kinds(HOST)
        copies = type_ == "ZeroOneAdam" and mode == "bf16-true"  # of residuals, until its steps are local
        close(have[RESIDUALS] * (2 if copies else 1), want[RESIDUALS], (type_, stage, mode))
        close(have[MOMENTS], want[MOMENTS], (type_, stage, mode))
        close(window, want.get(LOCAL, 0), (type_, stage, mode))
        assert have[RESIDUALS] > 4 * sum(p.numel() for p in model.parameters())


ONE_BIT = [("OneBitAdam", 0), ("OneBitAdam", 1), ("OneBitLamb", 1), ("ZeroOneAdam", 0)]


@needs("one_bit")
@pytest.mark.parametrize(("type_", "stage"), only_rows([ONE_BIT[1]], ONE_BIT))
def test_errors_and_momenta_of_1_bit_optimizers(pool: Pool, type_: str, stage: int) -> None:
    pool.run(2, _one_bit, type_, stage)


@needs("compression")
def test_residuals_of_compressed_gradients(pool: Pool) -> None:
    """With their copies in 16 bits, where steps may be skipped."""
    pool.run(2, _residuals)


def _second_copies() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_max_reuse_distance": 0}
    zero["stage3_param_persistence_threshold"] = 0  # else no parameter is sharded
    config, model = ZeroConfig.of({"zero_optimization": zero}), Wide()
    cast = estimate(model, config, dist.get_world_size(), device="cpu", precision="bf16-true")
    engine, sharded, _, _ = train(model, config, "bf16-true")
    copied = [bucket for bucket in engine.buckets if bucket.sharding.params]
    assert 0 < sum(bucket.layout.numel for bucket in copied) == sum(bucket.gathers.nbytes for bucket in engine.buckets)
    close(measured(engine, [sharded])[WEIGHTS], cast.kinds(HOST)[WEIGHTS], "second copies")


def _master_weights_apart() -> None:
    config = ZeroConfig.of({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}})
    for mode in ("32-true", "64-true"):
        model = Wide()
        cast = estimate(model, config, dist.get_world_size(), device="cpu", precision=mode)
        engine, sharded, _, _ = train(model, config, mode, steps=1)
        have, want = measured(engine, [sharded]).get(MASTER, 0), cast.kinds(HOST).get(MASTER, 0)
        close(have, want, mode)
        assert (have > 0) == (mode == "32-true"), "no codec is for 64 bits"


@needs("zero_plus_plus")
def test_zero_plus_plus(pool: Pool) -> None:
    pool.run(2, _second_copies)
    pool.run(2, _master_weights_apart)


@needs("offload")
@pytest.mark.parametrize(
    ("stage", "mode", "world"), cover([3, 2, 1, 0], ["32-true", "bf16-mixed", "bf16-true"], [2, 3, 1])
)
def test_forecast_is_what_an_engine_takes(pool: Pool, tmp_path: Path, stage: int, mode: str, world: int) -> None:
    pool.run(world, _compare, mode, stage, str(tmp_path))


def _bytes_of(config: ZeroConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind in memory, and of files: of a run, and as forecast."""
    model = Wide()
    stepped = "adam" if config.optimizer is None else config.optimizer.type
    cast = estimate(model, config, dist.get_world_size(), device="cpu", optimizer=stepped)
    engine, sharded, peaks, _ = train(model, config, "32-true", steps=1 if config.optimizer is None else 3)
    kinds = (WEIGHTS, MASTER, GRADS, MOMENTS, RESIDUALS, REDUCE, GATHERED)
    have, want = measured(engine, [sharded]), cast.kinds(HOST)
    engine.offload_manager.close()
    have |= {GATHERED: peaks.gathered}
    files = sum(cast.kinds(NVME).values())
    return {k: have.get(k, 0) for k in (*kinds, RESTING)}, {k: want.get(k, 0) for k in kinds} | {RESTING: files}


class Mutation(NamedTuple):
    """``owner.name``, which decides ``kind`` of a run with ``config``, becomes ``other``.

    The code of functions is replaced: callers have imported them by name.
    """

    kind: str
    config: ZeroConfig
    owner: Any
    name: str
    other: Any

    def set(self, patch: pytest.MonkeyPatch) -> None:
        function = getattr(self.owner, self.name)
        if isinstance(function, FunctionType):
            patch.setattr(function, "__code__", self.other.__code__)
        else:
            patch.setattr(self.owner, self.name, self.other)


def _reusable(rows: Any, limit: int) -> Any:
    return {row.group: {row.send_dtype(row.dtype): 150_000} for row in rows}


def _mutations(path: str) -> Iterator[Mutation]:
    everywhere, in_files = config_for(2, "none", ""), config_for(2, "optimizer", path)
    sharded = config_for(3, "none", "")
    units: dict[str, Any] = {"stage": 2, "stage3_param_persistence_threshold": 500}  # several buckets
    yield Mutation(MASTER, everywhere, StoragePlan, "master_is_view", False)
    yield Mutation(WEIGHTS, sharded, StoragePlan, "copies_weights", property(lambda plan: plan.trains))
    yield Mutation(REDUCE, everywhere, StoragePlan, "send_dtype", lambda self, have: torch.bfloat16)
    yield Mutation(REDUCE, everywhere, SendSizes, "scratch_numel", lambda self, numel, reusable: numel)
    yield Mutation(REDUCE, everywhere, storage_plan, "largest_sends", _reusable)
    yield Mutation(GATHERED, sharded, Residency, "keep_after_forward", lambda self, numels: [False] * len(numels))
    yield Mutation(
        RESTING,
        in_files,
        storage_plan,
        "choose_offloaded",
        lambda numels, buckets, zero: [(False, False)] * len(numels),
    )
    yield Mutation(RESTING, in_files, store, "record_nbytes", lambda numel, dtype, codec=None: 9 * numel)
    if there("zero_plus_plus"):
        from lt_zero.features.zero_plus_plus.feature import ZeroPlusPlus

        coded = ZeroConfig.of({"zero_optimization": {**units, "zero_quantized_weights": True}})
        yield Mutation(MASTER, coded, ZeroPlusPlus, "codecs", lambda self, bucket, group, training: None)
    if there("compression"):
        signs = ZeroConfig.of({"zero_optimization": units, "gradient_compression": {"algorithm": "1bit"}})
        yield Mutation(RESIDUALS, signs, FeedbackPlan, "reduction", lambda self, bucket, group: None)
    if there("one_bit"):
        from lt_zero.features.one_bit.compressed_momentum import AveragedMomenta

        one_bit = {"type": "OneBitAdam", "params": {"freeze_step": 1}}
        momenta = ZeroConfig.of({"zero_optimization": {**units, "stage": 0}, "optimizer": one_bit})
        yield Mutation(RESIDUALS, momenta, AveragedMomenta, "copies_momenta", lambda self, row: row.trains)


def _other_decisions(path: str) -> None:
    known: dict[int, dict[str, int]] = {}
    for mutation in _mutations(path):
        kind, config, _, name, _ = mutation
        before = known.get(id(config)) or known.setdefault(id(config), _bytes_of(config)[0])
        with pytest.MonkeyPatch.context() as patch:
            mutation.set(patch)
            after, want = _bytes_of(config)
        assert after[kind] != before[kind], (name, "changes nothing")
        for each, got in after.items():
            close(got, want[each], (name, each))


@needs("offload")
def test_the_engine_and_its_forecast_have_one_plan(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _other_decisions, str(tmp_path))


def _overlapped(path: str) -> None:
    """Steps beside backward and forward take more, and no more than forecast."""
    for overlap in ("auto", True):
        torch.manual_seed(0)
        config, model = config_for(3, "both", path, overlap=overlap), Wide()
        cast = estimate(model, config, dist.get_world_size(), device="cpu")
        engine, _, peaks, _ = train(model, config, "32-true", steps=4, beside=True)
        engine.finish_steps()
        want = cast.need_of_rank("backward", HOST)[OFFLOAD]
        assert 0.3 * want <= peaks.homes <= want, (overlap, peaks.homes, want)
        engine.offload_manager.close()


@needs("offload")
def test_overlapped_steps(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _overlapped, str(tmp_path))


def _host_apart() -> None:
    """Two memories on one CPU: what a forecast says of a GPU and its host together."""
    patch = pytest.MonkeyPatch()
    patch.setattr(accelerator, "_apart", True)
    try:
        for mode, optim, param in itertools.product(("32-true", "bf16-mixed"), ("none", "cpu"), ("none", "cpu")):
            zero = {"stage": 3, "offload_optimizer": {"device": optim}, "offload_param": {"device": param}}
            config = ZeroConfig.of({"zero_optimization": {**zero, "stage3_param_persistence_threshold": 500}})
            model = Wide()
            cast = estimate(model, config, dist.get_world_size(), precision=mode)
            engine, sharded, _, _ = train(model, config, mode)
            have = measured(engine, [sharded])
            for kind in (WEIGHTS, MASTER, GRADS, MOMENTS, OFFLOAD):
                if kind == OFFLOAD:  # of which a part is there between steps
                    assert have.get(kind, 0) <= cast.kinds(HOST).get(kind, 0), (mode, optim, param)
                    assert (have.get(kind, 0) > 0) == (optim == "cpu" and mode != "32-true")
                    continue
                want = sum(cast.kinds(place).get(kind, 0) for place in (DEVICE, HOST))
                close(have.get(kind, 0), want, (mode, optim, param, kind))
    finally:
        patch.undo()


@needs("offload")
def test_offload_to_the_host(pool: Pool) -> None:
    pool.run(2, _host_apart)


def _read_ahead(path: str) -> None:
    """The limit holds for all that was gathered ahead and not used yet."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 500,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 60_000,
        "offload_param": {"device": "nvme", "nvme_path": path, "max_in_cpu": 0},
        "offload_optimizer": {"device": "nvme", "nvme_path": path},
    }
    config = ZeroConfig.of({"zero_optimization": zero})
    model = Wide(depth=9)
    cast = estimate(model, config, dist.get_world_size(), device="cpu")
    engine, _, peaks, _ = train(model, config, "32-true")
    block = max(unit.numel for unit in engine.units) * 4
    close(peaks.gathered, cast.kinds(HOST)[GATHERED], "gathered")
    assert peaks.gathered <= 2 * block, "one in use, one ahead"
    assert peaks.homes <= cast.kinds(HOST)[OFFLOAD]
    engine.offload_manager.close()


@needs("offload")
def test_read_ahead(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _read_ahead, str(tmp_path))


def _windows() -> None:
    for stage, accumulate in ((0, 1), (0, 3), (1, 3), (2, 3)):
        config = config_for(stage, "none", "", low=False)
        torch.manual_seed(0)
        model = Wide()
        cast = estimate(
            model,
            config,
            dist.get_world_size(),
            device="cpu",
            precision="bf16-mixed",
            accumulate_grad_batches=accumulate,
        )
        _, _, _, window = train(model, config, "bf16-mixed", accumulate)
        close(window, cast.kinds(HOST).get(LOCAL, 0), (stage, accumulate))
        assert (window > 0) == (stage < 2 and accumulate > 1)


def test_accumulation_windows(pool: Pool) -> None:
    pool.run(2, _windows)


def _checkpoint() -> None:
    for stage in (0, 3):
        config = config_for(stage, "none", "", low=False)
        config = config.model_copy(update={"checkpoint": Checkpoint(format="full")})
        model = Wide()
        cast = estimate(model, config, dist.get_world_size(), device="cpu", precision="bf16-mixed")
        engine, sharded, _, _ = train(model, config, "bf16-mixed")
        states = [full_state_dict(engine), *full_optimizer_state(sharded).get("state", {}).values()]
        full = sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor) and v.dim() > 0)
        if dist.get_rank() == 0:
            close(full, cast.first["checkpoint"][HOST, COPY], stage)
            close(full, cast.first["checkpoint"][HOST, FILE], stage)


def test_what_rank_0_collects(pool: Pool) -> None:
    pool.run(2, _checkpoint)


def test_a_full_save_gathers_averages_as_they_are_kept() -> None:
    low = {"enabled": True, "bf16_master_weights_and_grads": True}
    given = {"zero_optimization": {"stage": 3}, "bf16": low, "checkpoint": {"format": "full"}}
    run = _planned(nn.Linear(1000, 1000), given, 4, None, "sgd", "bf16-true", "cuda", 1, True)
    gathered = [
        forecast(*run[:3], replace(run[3], averages=averages)).phases["checkpoint"][DEVICE, COPY] for averages in (0, 1)
    ]
    assert gathered[1] == 2 * gathered[0] > 0


def test_sharded_checkpoints_are_not_collected() -> None:
    def of(how: dict[str, Any]) -> Any:
        return estimate(8e9, {"zero_optimization": {"stage": 3}, "bf16": LOW, "checkpoint": how}, 8)

    plain, copied = of({}), of({"async": True})
    for cast in (plain, copied):
        assert not cast.first.get("checkpoint")
    assert plain.rank(HOST) < 1e9
    close(copied.rank(HOST) - plain.rank(HOST), 12 * 10**9, "masters and moments of a rank", slack=0.001)


# ---- sizes alone -----------------------------------------------------------------------------------------------

LOW = {"enabled": True}
PAPER = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}  # GB, arXiv:1910.02054, figure 1: 7.5e9 parameters on 64 ranks


@pytest.mark.parametrize("stage", sorted(PAPER))
def test_the_papers_table(stage: int) -> None:
    """16-bit gradients as in the paper; stage 3 keeps no 16-bit shard beside the master weights but fp32 gradients."""
    accum = {} if stage == 3 else {"data_types": {"grad_accum_dtype": "bf16"}}
    config = {"zero_optimization": {"stage": stage}, "bf16": LOW, **accum}
    cast = estimate(Sizes(7_500_000_000, 200_000_000), config, 64, accumulate_grad_batches=2 if stage == 1 else 1)
    assert cast.model_states() == pytest.approx(PAPER[stage] * 1e9, rel=0.02)


@needs("offload")
def test_a_gpu_sends_what_is_offloaded_to_the_host_or_the_disk() -> None:
    def of(optimizer: str, param: str) -> Any:
        zero = {
            "stage": 3,
            "offload_optimizer": {"device": optimizer, "nvme_path": "x" if optimizer == "nvme" else None},
            "offload_param": {"device": param, "nvme_path": "x" if param == "nvme" else None, "max_in_cpu": 0},
        }
        full = {"format": "full"}
        return estimate(8e9, {"zero_optimization": zero, "bf16": LOW, "checkpoint": full}, 8)

    one = 10**9  # parameters per rank
    plain = of("none", "none")
    states = of("cpu", "none")
    both = of("cpu", "cpu")
    disk = of("nvme", "nvme")
    for cast, place, want in (
        (plain, DEVICE, {MASTER: 4, MOMENTS: 8, GRADS: 4, WEIGHTS: 0}),
        (plain, HOST, {MASTER: 0, MOMENTS: 0, GRADS: 0, WEIGHTS: 0}),
        (states, DEVICE, {MASTER: 0, MOMENTS: 0, GRADS: 0, WEIGHTS: 2}),
        (states, HOST, {MASTER: 4, MOMENTS: 8, GRADS: 4, WEIGHTS: 0}),
        (both, DEVICE, {MASTER: 0, MOMENTS: 0, GRADS: 0, WEIGHTS: 0}),
        (both, HOST, {MASTER: 4, MOMENTS: 8, GRADS: 4, WEIGHTS: 2}),
        (disk, DEVICE, {MASTER: 0, MOMENTS: 0, GRADS: 0, WEIGHTS: 0}),
        (disk, HOST, {MASTER: 0, MOMENTS: 0, GRADS: 0, WEIGHTS: 0}),
        (disk, NVME, {MASTER: 4, MOMENTS: 8, GRADS: 4, WEIGHTS: 2}),
    ):
        for kind, size in want.items():
            close(cast.kinds(place).get(kind, 0), size * one, (place, kind), slack=0.001)
    assert plain.node(HOST) == plain.first["checkpoint"][HOST, COPY] * 2
    assert both.node(HOST) == pytest.approx(8 * both.rank(HOST) + plain.node(HOST), rel=0.001)


@needs("offload")
def test_part_of_the_optimizer_moves() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    cast = estimate(8e9, {"zero_optimization": zero, "bf16": LOW}, 8)
    close(cast.kinds(HOST)[MOMENTS], 4 * 10**9, "half", slack=0.001)
    close(cast.kinds(DEVICE)[MOMENTS], 4 * 10**9, "half", slack=0.001)


def test_meta_model_equals_real_model() -> None:
    with torch.device("meta"):
        planned = Wide()
    config = config_for(3, "none", "", low=True)
    assert estimate(planned, config, 4) == estimate(Wide(), config, 4)


@pytest.mark.parametrize(
    ("optimizer", "states"), [("adam", 2), ("SGD", 0), ("momentum", 1), ("rmsprop", 1), (2, 0.5), ("adagrad", 1)]
)
def test_states_of_optimizers(optimizer: str | float, states: float) -> None:
    assert states_of(optimizer)[0] == states


def test_states_of_an_instance() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    assert states_of(torch.optim.AdamW(parameters)) == (2, "adam_step")
    assert states_of(torch.optim.AdamW(parameters, amsgrad=True))[0] == 3
    assert states_of(torch.optim.SGD(parameters, lr=1, momentum=0.9))[0] == 1
    assert not parameters[0].grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adma"}, "adam, "),
        ({"precision": "bf16"}, "bf16-mixed"),
        ({"device": "tpu"}, "'cuda' or 'cpu'"),
        ({"world": 4, "ranks_per_node": 8}, "ranks_per_node <= world"),
        ({"model": Sizes(10, 10), "optimizer": -1}, "not negative"),
        ({"model": 1e16}, r"1e\+16 parameters are .* buckets .*at most 50,000"),
    ],
)
def test_wrong_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(**{"model": 1e9, **arguments})
    with pytest.raises(ValueError, match="a part of the total"):
        Sizes(10, 11)
