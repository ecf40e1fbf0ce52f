"""The measurements behind the claims of gpu_claims.py: each gives rows, on a GPU, or with the CPU in its place.

    python benchmarks/gpu_measures.py steps --device cuda

A row is a line of JSON, so that those before a limit or a failure remain. Cases take turns, and ratios are taken within
a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_largest
import host_cost
import ops as kernels
import peers
import torch
import torch.distributed as dist
from gpu_claims import KERNELS, Row
from measuring import ROOT, Rounds, give, interleaved, ratio, remove, scratch, sync, timed
from torch import Tensor, nn

import lt_zero
from lt_zero import kernels as ops
from lt_zero.common import accelerator
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.storage_plan import DEVICE, HOST
from lt_zero.kernels.moments import coded_nbytes
from lt_zero.planning.check import measured


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        numel: elements of the tensors that kernels work on.
        depth, width, sequences: of the GPT that takes steps; of its batch, sequences of 128 tokens.
        gigabytes: bytes of a checkpoint, of 1e9.
        length: tokens of the sequence whose attention is timed.
        attention_mib: memory that attention may take, where the longest sequence is looked for.
        traces: of loss scales.
        largest: see gpu_largest.py.
    """

    device: str
    rounds: int
    numel: int
    depth: int
    width: int
    sequences: int
    gigabytes: float
    heads: int
    length: int
    attention_mib: int
    traces: int
    largest: gpu_largest.Search

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def place(self) -> torch.device:
        return torch.device("cuda", 0) if self.gpu else torch.device("cpu")

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def batch(self, sequences: int) -> tuple[Tensor, Tensor]:
        ids, targets = next(peers.batches(0, sequences))
        return ids.to(self.place), targets.to(self.place)


ON_GPU = Sizes(
    device="cuda",
    rounds=7,
    numel=250_000_000,
    depth=12,
    width=1536,
    sequences=128,
    gigabytes=2.0,
    heads=8,
    length=16384,
    attention_mib=16 << 10,
    traces=6,
    largest=gpu_largest.Search("cuda", limit_mib=4 << 10, width=1024, seconds=150),
)
ON_CPU = Sizes(
    device="cpu",
    rounds=3,
    numel=5_000_000,
    depth=2,
    width=128,
    sequences=2,
    gigabytes=0.1,
    heads=4,
    length=2048,
    attention_mib=64,
    traces=3,
    largest=gpu_largest.Search("cpu", limit_mib=144, width=256, seconds=150, most=3.0, trials=2),
)
Rows = Iterator[Row]


def medians(found: Mapping[str, list[float]]) -> str:
    """Milliseconds, for a note."""
    return ", ".join(f"{name} {1000 * statistics.median(values):.3g} ms" for name, values in found.items())


def beside(key: str, found: Rounds, ours: str, theirs: str, worth: float = 1.0) -> Row:
    """The time of one case in another's, times ``worth``."""
    note = medians({name: found[name] for name in (ours, theirs)})
    return Row(key, worth * ratio(found[ours], found[theirs]).median, note)


# ---- kernels -------------------------------------------------------------------------------------------------------


def bandwidth(sizes: Sizes) -> Rows:
    """Bytes that a kernel has to move in a second, relative to those of a copy between buffers of the same device."""
    torch.manual_seed(0)
    state = kernels.State(sizes.numel, sizes.device)
    cases, into = kernels.traffic_cases(state), torch.empty_like(state.p)
    cases = {"copy": (lambda: into.copy_(state.p), 8 * sizes.numel), **{name: cases[name] for name in KERNELS}}
    found = kernels.measure(cases, sizes.rounds, sizes.device)
    for name in KERNELS:
        rates = {case: cases[case][1] / statistics.median(found[case]) / 1e9 for case in (name, "copy")}
        note = f"{rates[name]:.0f} of {rates['copy']:.0f} GB/s"
        worth = cases[name][1] / cases["copy"][1]
        yield Row(f"bandwidth, of a copy's: {name}", worth * ratio(found["copy"], found[name]).median, note)


# ---- the engine ----------------------------------------------------------------------------------------------------


def config_of(stage: int, **zero: Any) -> lt_zero.ZeroConfig:
    """Of a model so small that some of its parameters would not be sharded."""
    return lt_zero.ZeroConfig.of(
        {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}}
    )


def memory(sizes: Sizes) -> Rows:
    """The most that a run in 16 bits allocates beside activations, of what ``lt_zero.estimate`` says: from 1, farthest.

    Two micro-batches make a step, or at stage 3 weights would be released while gradients arrive. On a CPU the tensors
    of the engine are counted instead.
    """
    shares = {stage: _peak(sizes, stage) for stage in range(4)}
    note = ", ".join(f"stage {stage} {share:.2f}" for stage, share in shares.items())
    yield Row("memory, of the forecast: farthest from 1", max(abs(share - 1) for share in shares.values()), note)


def _peak(sizes: Sizes, stage: int) -> float:
    """Bytes at the peak of a run, of its forecast."""
    with torch.device("meta"):
        net = nn.Sequential(*(_block(sizes.width) for _ in range(12)))
    config = config_of(stage)
    options = {"precision": "bf16-true", "accumulate_grad_batches": 2, "saves": False}
    expected = lt_zero.estimate(net, config, 1, device=sizes.device, **options)
    gc.collect()  # engines before, whose memory would be freed in the middle
    if sizes.gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if sizes.gpu else 0
    engine = lt_zero.shard(net, config, sizes.place, policy=dtype_policy(config, "bf16-true"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sharded, seen = lt_zero.ShardedOptimizer(engine, optimizer), [0]
    x = torch.ones(1, sizes.width, dtype=torch.bfloat16, device=sizes.place)
    for _ in range(3):
        for last in (False, True):
            engine.reducer.sync = last
            net(x).float().square().mean().backward()
            seen.append(0 if sizes.gpu else sum(measured(engine, [sharded]).values()))
        optimizer.step()
        seen.append(0 if sizes.gpu else sum(measured(engine, [sharded]).values()))
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before if sizes.gpu else max(seen)
    return peak / expected.rank(DEVICE if sizes.gpu else HOST)


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@contextmanager
def group_of_one(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _steps(sizes: Sizes, names: Iterable[str]) -> Rounds:
    """Seconds of a step of each of these peers, of the same GPT on one rank."""
    with group_of_one(sizes.device):
        cases: dict[str, Callable[[], float]] = {}
        for name in names:
            job = peers.Job(name, 0, 1, sizes.gpu, sizes.depth, sizes.width, "", device=str(sizes.place))
            step = partial(peers.setup(job), *sizes.batch(sizes.sequences))
            cases[name] = timed(partial(_several, step, 3), sizes.wait)
        found = interleaved(cases, sizes.rounds, warm_up=2)
    return {name: [seconds / 3 for seconds in values] for name, values in found.items()}


def steps(sizes: Sizes) -> Rows:
    """The time of a step beside DDP's and FSDP2's of the same GPT: one rank, AdamW (fused), bf16 on a GPU.

    DDP computes under autocast. FSDP2 casts weights and inputs, so that norms are in bf16, too; so it is compared with
    weights in bf16 (``bf16-true``), whose masters are fp32 on both sides.
    """
    found = _steps(sizes, ("ddp", "fsdp2", "lt_zero-1", "lt_zero-2", "lt_zero-3", "lt_zero-3-true"))
    for stage in (1, 2, 3):
        yield beside(f"step time, stage {stage} / DDP", found, f"lt_zero-{stage}", "ddp")
    yield beside("step time, stage 3 / FSDP2", found, "lt_zero-3-true", "fsdp2")


def deepspeed_is_installed() -> bool:
    """Whether files of it are, however ``lt_zero.deepspeed`` answers to its name in this process."""
    return PathFinder.find_spec("deepspeed") is not None


def deepspeed(sizes: Sizes) -> Rows:
    """The time of a step beside DeepSpeed's of the same GPT, where it is installed: one rank, AdamW (torch's fused).

    On a GPU weights are in bf16 and masters in fp32, as DeepSpeed has them.
    """
    pairs = {stage: (f"lt_zero-{stage}-true", f"deepspeed-{stage}") for stage in (1, 2, 3)}
    there = deepspeed_is_installed()
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):  # by which DeepSpeed chooses its device
        found = _steps(sizes, [name for pair in pairs.values() for name in pair]) if there else {}
    for stage, pair in pairs.items():
        key = f"step time, stage {stage} / DeepSpeed"
        yield beside(key, found, *pair) if there else Row(key, None, "deepspeed is not installed")


def _several(action: Callable[[], object], count: int) -> None:
    for _ in range(count):
        action()


def host(sizes: Sizes) -> Rows:
    """Host time of a step per unit: see host_cost.py."""
    try:
        found = host_cost.measure(8, sizes.place, 3 * sizes.rounds if sizes.gpu else sizes.rounds)
    finally:
        dist.destroy_process_group()
    pairs = {"stage 2 / FSDP2 with weights kept": "FSDP2, weights kept", "stage 3 / FSDP2": "FSDP2"}
    for key, theirs in pairs.items():
        row = beside(f"host time per unit, {key}", found, f"lt_zero, {key[:7]}", theirs)
        note = ", ".join(f"{name} {statistics.median(found[name]):.0f} us" for name in (f"lt_zero, {key[:7]}", theirs))
        yield Row(row.key, row.value, note)


# ---- states in fewer bits ------------------------------------------------------------------------------------------


def few_bits(sizes: Sizes) -> Rows:
    """Kernels of states in fewer bits, beside a copy of fp32 on the same device, and beside their wider likes."""
    torch.manual_seed(0)
    state = kernels.State(sizes.numel, sizes.device)
    into = torch.empty_like(state.p)
    copy = {"copy": (lambda: into.copy_(state.p), 8.0 * sizes.numel)}
    adam = {"fp32": _adam(state, state.m, state.v), "8 bits": _adam_in_8_bits(state)}
    cases = copy | adam | _nf4(state)
    found = kernels.measure(cases, sizes.rounds, sizes.device)
    names = {"8 bits": "AdamW, moments in 8 bits", "encode": "encode to NF4", "decode": "decode NF4"}

    def rate(case: str) -> Row:
        worth = cases[case][1] / cases["copy"][1]
        return beside(f"bandwidth, of a copy's: {names[case]}", found, "copy", case, worth)

    yield rate("8 bits")
    yield beside("time of AdamW, moments in 8 bits / in fp32", found, "8 bits", "fp32")
    yield rate("encode")
    yield rate("decode")
    steps = {name: _step_of_masters(sizes, name == "at random") for name in ("at random", "nearest")}
    found = interleaved(steps, sizes.rounds, warm_up=2)
    key = "time of AdamW with bf16 masters, rounded at random / to the nearest"
    yield beside(key, found, "at random", "nearest")


def _adam(state: kernels.State, *moments: Tensor) -> tuple[Callable[[], Any], float]:
    """A step from bf16 gradients to bf16 weights, and the bytes that one pass moves."""
    lists = [[state.p], [state.low], *([moment] for moment in moments), [state.out]]
    nbytes = 12 * state.numel + 2 * sum(moment.nbytes for moment in moments)
    return lambda: ops.adam_step(*lists, **kernels.OPTIONS), nbytes


def _adam_in_8_bits(state: kernels.State) -> tuple[Callable[[], Any], float]:
    rows = [torch.zeros(coded_nbytes(state.numel), dtype=torch.uint8, device=state.p.device) for _ in range(2)]
    return _adam(state, *rows)


def _nf4(state: kernels.State) -> kernels.Cases:
    """Weights in bf16 to codes, and back."""
    from lt_zero.features.quantize.nf4 import NF4  # other measures run where the feature was taken out

    codes = NF4.encode(state.low)
    nbytes = state.low.nbytes + codes.nbytes
    encode = partial(NF4.encode, state.low, None, codes)
    return {"encode": (encode, nbytes), "decode": (partial(NF4.decode_sum, [codes], state.out), nbytes)}


def _step_of_masters(sizes: Sizes, at_random: bool) -> Callable[[], float]:
    """Seconds of a step of AdamW whose masters are in bf16; the gradients are there before."""
    config = {
        "log_level": "error",
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "stochastic_rounding": at_random},
    }
    model = nn.Sequential(*(nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(8)))
    engine = lt_zero.shard(model, lt_zero.ZeroConfig.of(config), sizes.place)
    optimizer = torch.optim.AdamW(engine.root.parameters(), lr=1e-4)
    lt_zero.ShardedOptimizer(engine, optimizer)
    x = torch.ones(2, sizes.width, dtype=torch.bfloat16, device=sizes.place)

    def step() -> float:
        optimizer.zero_grad()
        engine.root(x).float().sum().backward()
        sizes.wait()
        return timed(optimizer.step, sizes.wait)()

    return step


# ---- offload -------------------------------------------------------------------------------------------------------


def overlap(sizes: Sizes) -> Rows:
    """A step whose optimizer is in host memory, beside the longest of what it consists of.

    These are forward and backward alone, the copies of gradients to the host and of weights back, and the CPU's AdamW.
    The optimizer's step runs beside backward, in the second row beside the next forward, too (``overlap_step: true``).
    Both are means of three steps, until all is done.
    """
    (ids, targets), cases = sizes.batch(2 * sizes.sequences), dict[str, Callable[[], float]]()
    names = {"step": "auto", "step, next forward": True}
    # On a CPU host memory counts as apart from the device's, so that copies are made.
    with mock.patch.object(accelerator, "_apart", not sizes.gpu):
        engines = [_offloaded(sizes, overlap, ids, targets) for overlap in names.values()]
        plain = peers.GPT(sizes.depth, sizes.width).to(sizes.place)
        numel = sum(p.numel() for p in plain.parameters())
        for name, (engine, step) in zip(names, engines, strict=True):
            cases[name] = timed(partial(_several, step, 3), partial(_finish, sizes, engine))

        def alone() -> None:
            plain.zero_grad(set_to_none=True)
            _loss(sizes, plain, ids, targets).backward()

        grads = engines[0][0].buckets[0].grads.dtype
        cases["compute"] = timed(alone, sizes.wait)
        cases["copies"] = _copies(sizes, numel, grads, torch.bfloat16 if sizes.gpu else torch.float32)
        cases["CPU's step"] = _cpu_step(numel)
        found = interleaved(cases, sizes.rounds, warm_up=2)
        for engine, _ in engines:
            engine.offload_manager.close()
    steps = {name: [seconds / 3 for seconds in found.pop(name)] for name in names}
    longest = [max(values) for values in zip(*found.values(), strict=True)]
    keys = {
        "step": "step with offload / longest of compute, copies, CPU's step",
        "step, next forward": "step with offload beside the next forward / longest of these",
    }
    for name, key in keys.items():
        note = f"{numel / 1e6:.0f}M parameters: {medians({'step': steps[name], **found})}"
        yield Row(key, ratio(steps[name], longest).median, note)


def _loss(sizes: Sizes, module: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(sizes.device, torch.bfloat16, cache_enabled=False) if sizes.gpu else nullcontext():
        loss: Tensor = module(ids, targets)
    return loss


def _offloaded(sizes: Sizes, overlap: Any, ids: Tensor, targets: Tensor) -> tuple[Any, Callable[[], None]]:
    """An engine whose optimizer is in host memory, and its step."""
    config = config_of(2, offload_optimizer={"device": "cpu", "overlap_step": overlap})
    policy = dtype_policy(config, "bf16-mixed" if sizes.gpu else "32-true")
    engine = lt_zero.shard(peers.GPT(sizes.depth, sizes.width), config, sizes.place, policy=policy)
    optimizer = torch.optim.AdamW(engine.root.parameters(), lr=1e-4)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss = _loss(sizes, engine.root, ids, targets)
        with sharded.overlap.beside_backward():
            loss.backward()
        optimizer.step()

    return engine, step


def _finish(sizes: Sizes, engine: Any) -> None:
    engine.finish_steps()
    sizes.wait()


def _copies(sizes: Sizes, numel: int, grads: torch.dtype, weights: torch.dtype) -> Callable[[], float]:
    """Gradients to the host and weights back at the same time, as a GPU's two copy engines can."""
    down = torch.empty(numel, dtype=grads, device=sizes.place), torch.empty(numel, dtype=grads, pin_memory=sizes.gpu)
    up = torch.empty(numel, dtype=weights, pin_memory=sizes.gpu), torch.empty(numel, dtype=weights, device=sizes.place)
    side = torch.cuda.Stream() if sizes.gpu else None

    def both() -> None:
        with torch.cuda.stream(side) if side is not None else nullcontext():
            down[1].copy_(down[0], non_blocking=True)
        up[1].copy_(up[0], non_blocking=True)

    return timed(both, sizes.wait)


def _cpu_step(numel: int) -> Callable[[], float]:
    state = kernels.State(numel, "cpu")
    return timed(lambda: ops.adam_step([state.p], [state.g], [state.m], [state.v], [state.out], **kernels.OPTIONS))


def largest(sizes: Sizes) -> Rows:
    yield sizes.largest.row()


# ---- training ------------------------------------------------------------------------------------------------------


def fp16(sizes: Sizes) -> Rows:
    """The loss scale after each step of real training, in which overflows come where a trace of DeepSpeed has them."""
    traces = json.loads((ROOT / "tests" / "data" / "loss_scale_traces.json").read_text())["traces"]
    # Those at the minimum end in an error, and gradients overflow by themselves at very large scales.
    moderate = (t for t in traces if t["min_loss_scale"] < min(t["scale_after"], default=0))
    traces = [t for t in moderate if any(t["overflow"]) and max(t["scale_after"]) <= 2**20][: sizes.traces]
    differing = total = 0
    for trace in traces:
        scales = _scales(trace)
        total += len(scales)
        differing += sum(ours != theirs for ours, theirs in zip(scales, trace["scale_after"], strict=True))
    yield Row("fp16: loss scales that differ from DeepSpeed's", differing, f"{total} steps, {len(traces)} traces")


def _scales(trace: dict[str, Any]) -> list[float]:
    keys = {key: trace[key] for key in ("loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")}
    power = int(trace["initial_scale"]).bit_length() - 1
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "initial_scale_power": power, **keys},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = lt_zero.initialize(model=model, optimizer=optimizer, config=config)
    found = []
    for overflow in trace["overflow"]:
        x = torch.ones(2, 16, device=engine.device, dtype=torch.float16)
        loss = engine(x).float().square().mean() * 1e-6  # small enough for every scale of the trace
        engine.backward(loss * float("inf") if overflow else loss)
        engine.step()
        engine.was_step_applied()  # reads what the device decided
        found.append(engine.loss_scale())
    engine.destroy()
    return found


def saves(sizes: Sizes) -> Rows:
    """Saving weights and AdamW's states until they are on the disk, and loading them, beside torch.save.

    Files are dropped from the page cache before each load, since those of lt_zero never are in it.
    """
    torch.manual_seed(0)
    width = 1024 if sizes.gigabytes >= 1 else 128
    count = max(1, round(sizes.gigabytes * 1e9 / 12 / width**2))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(sizes.place)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    (model, adam), (sharded, optimizer) = made(), made()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    engine, *_ = lt_zero.initialize(model=sharded, optimizer=optimizer, config=config)
    x = torch.ones(1, width, device=sizes.place)
    model(x).sum().backward()
    adam.step()
    adam.zero_grad()
    engine.backward(engine(x).sum())
    engine.step()
    with scratch(Path(os.environ.get("TMPDIR", "/tmp"))) as folder:

        def torch_save() -> None:
            torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, folder / "torch.pt")
            sync(folder / "torch.pt")

        def torch_load() -> None:
            state = torch.load(folder / "torch.pt", weights_only=True, map_location=sizes.place)
            model.load_state_dict(state["model"])
            adam.load_state_dict(state["optimizer"])

        def zero_save() -> None:
            engine.save_checkpoint(folder, tag="zero")

        def zero_load() -> None:
            engine.load_checkpoint(folder, tag="zero")

        files = {"torch": folder / "torch.pt", "lt_zero": folder / "zero"}
        saving = {"torch": torch_save, "lt_zero": zero_save}
        loading = {"torch": torch_load, "lt_zero": zero_load}
        rounds = min(sizes.rounds, 3)  # disks are slow, and the files large
        saved = interleaved({n: partial(_anew, files[n], timed(s, sizes.wait)) for n, s in saving.items()}, rounds)
        loaded = interleaved({n: partial(_cold, files[n], timed(d, sizes.wait)) for n, d in loading.items()}, rounds)
    engine.destroy()
    nbytes = 12 * count * width**2
    for key, found in (("save, GB/s of torch.save's", saved), ("load, GB/s of torch.load's", loaded)):
        rates = {name: nbytes / statistics.median(seconds) / 1e9 for name, seconds in found.items()}
        note = f"{rates['lt_zero']:.2f} of {rates['torch']:.2f} GB/s, {nbytes / 1e9:.1f} GB"
        yield Row(key, ratio(found["torch"], found["lt_zero"]).median, note)


def _anew(path: Path, save: Callable[[], float]) -> float:
    if path.exists():
        remove(path)
    return save()


def _cold(path: Path, load: Callable[[], float]) -> float:
    for file in [path] if path.is_file() else path.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return load()


# ---- attention -----------------------------------------------------------------------------------------------------

SPARSE = "BSLongformer"


def sparse(sizes: Sizes) -> Rows:
    """Sparse attention beside dense attention as matrices of scores, and beside torch's fused one.

    Longest sequences are those whose forward and backward take at most ``attention_mib``; for sparse attention 16 times
    the dense one's is the longest that is tried.
    """
    import attention  # the other measurements run without sparse attention

    shape = {"device": sizes.device, "dtype": "bfloat16" if sizes.gpu else "float32", "heads": sizes.heads, "dim": 64}
    args = argparse.Namespace(rounds=sizes.rounds, threads=torch.get_num_threads(), **shape)

    def fits(name: str, length: int) -> bool:
        try:
            return attention.peak(args, name, length) <= sizes.attention_mib << 20
        except torch.OutOfMemoryError:
            return False

    dense = longest(partial(fits, attention.IN_FULL), 256, 1 << 20)
    ours = longest(partial(fits, SPARSE), dense, 16 * dense) if dense else 0
    note = f"{ours} and {dense} tokens, {sizes.attention_mib} MiB; none longer than 16 times was tried"
    yield Row("sparse attention: longest sequence / dense attention's", ours / dense if dense else None, note)
    names = (attention.IN_FULL, attention.DENSE, SPARSE)
    found = attention.times(args, sizes.length, names)
    for name, what in ((attention.IN_FULL, "dense attention"), (attention.DENSE, "torch's SDPA")):
        row = beside(f"sparse attention: time of {what} / its", found, name, SPARSE)
        yield Row(row.key, row.value, f"{sizes.length} tokens, {row.note}")


def longest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The longest of ``start``, twice that and so on, refined to an eighth; 0 if ``start`` does not fit.

    It is at most ``most``, and longer ones are taken not to fit where a shorter one does not.
    """
    if not fits(start):
        return 0
    low = start
    while 2 * low <= most and fits(2 * low):
        low *= 2
    if 2 * low > most:
        return low
    base = low
    for eighth in (4, 2, 1):
        more = low + base * eighth // 8
        if more <= most and fits(more):
            low = more
    return low


MEASURES: dict[str, Callable[[Sizes], Rows]] = {
    "bandwidth": bandwidth,
    "memory": memory,
    "steps": steps,
    "deepspeed": deepspeed,
    "host": host,
    "few_bits": few_bits,
    "overlap": overlap,
    "largest": largest,
    "fp16": fp16,
    "saves": saves,
    "attention": sparse,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(MEASURES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.monotonic()
    for row in MEASURES[args.name](ON_GPU if args.device == "cuda" else ON_CPU):
        give(asdict(row))
    print(f"{args.name}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
