"""The peers of step_time.py: one GPT, how each library trains it, and the worker process that runs one of them.

Nothing is imported here but torch and the library under measurement, so that workers can run in another virtual
environment and so that nobody's memory includes somebody else's imports.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from measuring import Sampler, memory
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, HEADS, MICRO_BATCH = 4096, 128, 8, 4
PEERS = ["ddp", "zero_redundancy", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
PEERS += ["lt_zero-0", "lt_zero-1", "lt_zero-2", "lt_zero-3", "lt_zero-3-release"]
OFFLOADED = ["deepspeed-2-cpu", "lt_zero-2-cpu", "deepspeed-3-cpu", "lt_zero-3-cpu"]  # the optimizer, to the CPU
ORDERED = [f"lt_zero-{stage}-bits" for stage in range(4)]  # with as many virtual ranks as ranks
LIBRARY = {"fsdp2": "torch.distributed.fsdp", "deepspeed": "deepspeed", "lt_zero": "lt_zero"}
LIBRARY["zero_redundancy"] = "torch.distributed.optim"

Step = Callable[[Tensor, Tensor], Tensor]


# ---- the model -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mlp


class GPT(nn.Module):
    """A plain GPT with an untied head; returns the loss."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        # .float(): autocast computes the loss in fp32, so peers without it must too.
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batches(rank: int, sequences: int = MICRO_BATCH, length: int = CONTEXT) -> Iterator[tuple[Tensor, Tensor]]:
    """Four batches over and over: they can be learned by heart, so a peer that trains wrongly shows in its loss."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(0, VOCABULARY, (4, sequences, length), generator=generator)
    return itertools.cycle([(x, x.roll(-1, 1)) for x in ids])


# ---- the peers (these run in workers) ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What one worker has to set up."""

    peer: str
    rank: int
    ranks: int
    bf16: bool
    depth: int
    width: int
    store: str
    sequences: int = MICRO_BATCH  # of a micro-batch
    length: int = CONTEXT  # tokens of a sequence
    tensor: int = 1  # ranks that share the layers of a model, and see the same data
    pipeline: int = 1  # ranks that have its layers one after the other, and see the same data
    micro_batches: int = 4  # of a pipeline, with ``sequences`` each
    device: str = "cpu"  # "cuda" without tensor and pipeline ranks only
    compiled: bool = False  # whether torch.compile compiles the blocks

    @property
    def data(self) -> int:
        """Ranks that see different data."""
        return self.ranks // self.tensor // self.pipeline

    @property
    def data_rank(self) -> int:
        return self.rank % (self.ranks // self.pipeline) // self.tensor

    @property
    def batch(self) -> int:
        """Sequences of a data rank in a step."""
        return self.sequences * (self.micro_batches if self.pipeline > 1 else 1)


def cut(model: GPT, mesh: Any) -> GPT:
    """Share the feed-forward layers, two thirds of a block, over the ranks of ``mesh``."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def data_and_tensor(job: Job) -> Any:
    """The ranks as a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (job.ranks // job.tensor, job.tensor), mesh_dim_names=("data", "tensor"))


class First(nn.Module):
    """The embeddings of a GPT."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return found


def layers_of(model: GPT) -> list[nn.Module]:
    """A GPT as a list of layers."""
    return [First(model), *model.blocks, nn.Sequential(model.norm, model.head)]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Busy:
    """The seconds in which a rank runs schedules, and computes in them, with torch's pipelining and lt_zero's alike."""

    def __init__(self) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.running = self.computing = 0.0
        for owner, name, kind in (
            (PipelineStage, "forward_one_chunk", "computing"),
            (PipelineStage, "backward_one_chunk", "computing"),
            (Schedule1F1B, "step", "running"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), kind))

    def idle(self) -> float:
        """The share of time in which the rank waits in schedules, since the last call."""
        share = 1 - self.computing / self.running if self.running else float("nan")
        self.running = self.computing = 0.0
        return share

    def _timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self, kind, getattr(self, kind) + time.perf_counter() - start)

        return run


def setup_torch_pipeline(job: Job, model: GPT, kind: str) -> Step:
    """torch's pipelining, whose stages are wrapped by DDP or sharded by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (job.pipeline, job.data, job.tensor), mesh_dim_names=("pipeline", "data", "tensor"))
    number, layers = job.rank // (job.ranks // job.pipeline), layers_of(model)
    if job.tensor > 1:
        cut(model, mesh["tensor"])
    each = len(layers) // job.pipeline
    own = nn.Sequential(*layers[number * each : (number + 1) * each])
    stage_module: nn.Module = own
    if kind == "ddp":
        stage_module = nn.parallel.DistributedDataParallel(own, device_mesh=mesh["data"])
    else:
        for module in [*own, own]:
            fully_shard(module, mesh=mesh["data"])
    between = torch.zeros(job.sequences, job.length, job.width, device="meta", requires_grad=True)
    ids = torch.zeros(job.sequences, job.length, dtype=torch.long, device="meta")
    logits = torch.zeros(job.sequences, job.length, VOCABULARY, device="meta", requires_grad=True)
    first, last = number == 0, number == job.pipeline - 1
    shapes = {"input_args": (ids if first else between,), "output_args": (logits if last else between,)}
    group = mesh["pipeline"].get_group()
    stage = PipelineStage(stage_module, number, job.pipeline, torch.device("cpu"), group=group, **shapes)
    schedule = Schedule1F1B(stage, job.micro_batches, loss_fn=mean_loss)
    # torch's optimizer takes no parameters of different meshes in one group.
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in own.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": g} for g in groups.values()], 1e-3, weight_decay=0.01, fused=True)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        schedule.step(*([ids] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if last else torch.tensor(float("nan"))

    return step


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool = False) -> Step:
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16) if autocast else nullcontext():
            loss: Tensor = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def setup_zero_redundancy(job: Job, model: GPT) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options = {"lr": 1e-3, "weight_decay": 0.01, "fused": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return plain_step(nn.parallel.DistributedDataParallel(model), optimizer, autocast=job.bf16)


def setup_fsdp2(job: Job, model: GPT) -> Step:
    if job.tensor == 1:
        return fsdp2_step(model, (job.ranks,), job.bf16, job.device)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, half = data_and_tensor(job), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*cut(model, mesh["tensor"]).blocks, model]:
        fully_shard(module, mesh=mesh["data"], mp_policy=half if job.bf16 else MixedPrecisionPolicy())
    # torch's optimizer takes no parameters of different meshes in one group.
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(len(parameter.placements), []).append(parameter)  # type: ignore[attr-defined]
    return plain_step(model, torch.optim.AdamW([{"params": g} for g in groups.values()], 1e-3, fused=True))


def fsdp2_step(model: GPT, mesh: tuple[int, ...], bf16: bool = False, device: str = "cpu") -> Step:
    """FSDP2 per block; on a mesh of two dimensions the first replicates and the second shards (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    device_mesh = init_device_mesh(torch.device(device).type, mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=device_mesh, mp_policy=half if bf16 else MixedPrecisionPolicy())
    return plain_step(model, adamw(model))


def setup_deepspeed(job: Job, model: GPT) -> Step:
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": int(job.peer.split("-")[1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    config |= {"bf16": {"enabled": True}} if job.bf16 else {}
    optimizer: torch.optim.Optimizer
    if job.peer.endswith("-cpu"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, weight_decay=0.01, adamw_mode=True)
    else:
        optimizer = adamw(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def setup_lt_zero(job: Job, model: GPT) -> Step:
    import lt_zero
    from lt_zero.config.precision import dtype_policy

    _, stage, *variant = job.peer.split("-")
    block: dict[str, Any] = {"stage": int(stage)}
    block |= {"stage3_max_reuse_distance": 0} if variant == ["release"] else {}
    block |= {"offload_optimizer": {"device": "cpu"}} if variant == ["cpu"] else {}
    virtual = {"reproducible": {"virtual_ranks": dist.get_world_size()}} if variant == ["bits"] else {}
    stages = {"stages": job.pipeline, "num_microbatches": job.micro_batches, "partition_method": "uniform"}
    blocks = {"pipeline": stages} if job.pipeline > 1 else {}
    config = lt_zero.ZeroConfig.of({"zero_optimization": block, "bf16": {"enabled": job.bf16}, **blocks, **virtual})
    autocast = job.bf16 and variant != ["true"]
    policy = dtype_policy(config, "bf16-mixed" if autocast else "bf16-true") if job.bf16 else None
    trained: nn.Module = model
    if job.tensor == job.pipeline == 1:
        engine = lt_zero.shard(model, config, torch.device(job.device), policy=policy)
    else:
        trained, engine = sharded_on_mesh(job, model, config, policy)
    optimizer = adamw(trained)
    lt_zero.ShardedOptimizer(engine, optimizer)
    return plain_step(trained, optimizer, autocast)


class Staged(nn.Module):
    """A GPT in stages; returns the loss."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        from lt_zero.parallel import Pipeline

        self.pipe = Pipeline(layers, loss_fn=mean_loss)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.pipe(ids, targets)
        return loss


def sharded_on_mesh(job: Job, model: GPT, config: Any, policy: Any) -> tuple[nn.Module, Any]:
    """The model of this rank on a mesh of pipeline, data and tensor ranks, and its engine."""
    import lt_zero
    from lt_zero.core.comm.shard_group import ShardGroup
    from lt_zero.core.comm.world import World
    from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
    from lt_zero.parallel.pipeline.position import Position, at

    world = World.join(torch.device("cpu"))
    mesh = ParallelMesh(ParallelSizes(job.data, job.tensor, job.pipeline), world)
    group, trained = ShardGroup.of_all(world), cut(model, mesh.tensor) if job.tensor > 1 else model
    module: nn.Module = trained
    if job.pipeline > 1:
        with at(Position(mesh.pipeline_rank, job.pipeline, config.pipeline)):
            module = Staged(layers_of(trained))
    given = {"group": group, **mesh.arguments(module, group, config)}
    engine = lt_zero.shard(module, config, policy=policy, **given)
    mesh.connect(engine, config, lambda: 1.0, lambda: 1.0)
    return module, engine


def setup(job: Job) -> Step:
    torch.manual_seed(0)
    model = GPT(job.depth, job.width).to(job.device)
    for block in model.blocks if job.compiled else ():
        block.compile()
    kind = job.peer.split("-")[0]
    if job.pipeline > 1 and kind in ("ddp", "fsdp2"):
        return setup_torch_pipeline(job, model, kind)
    if kind == "alone":  # all ranks at once without communication: the limit of DDP
        return plain_step(model, adamw(model), autocast=job.bf16)
    if kind == "ddp":
        mesh = data_and_tensor(job) if job.tensor > 1 else None
        if mesh is not None:
            cut(model, mesh["tensor"])
        wrapped = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["data"] if mesh is not None else None)
        return plain_step(wrapped, adamw(model), autocast=job.bf16)
    setups = {"zero_redundancy": setup_zero_redundancy, "fsdp2": setup_fsdp2}
    return (setups | {"deepspeed": setup_deepspeed, "lt_zero": setup_lt_zero})[kind](job, model)


# ---- a worker ------------------------------------------------------------------------------------------------------


def run_steps(
    step: Step, data: Iterator[tuple[Tensor, Tensor]], count: int, busy: Busy | None = None
) -> dict[str, Any]:
    """Ranks start together and then run freely, as in training; each step is timed."""
    times: list[float] = []
    loss = torch.tensor(float("nan"))
    dist.barrier()
    for _ in range(count):
        ids, targets = next(data)
        start = time.perf_counter()
        loss = step(ids, targets)
        times.append(time.perf_counter() - start)
    return {"times": times, "loss": loss.item(), "idle": busy.idle() if busy is not None else float("nan")}


def profile_steps(step: Step, data: Iterator[tuple[Tensor, Tensor]], count: int, record: bool) -> dict[str, Any]:
    if not record:
        return run_steps(step, data, count)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        answer = run_steps(step, data, count)
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    return answer | {"table": table}


def trace_steps(step: Step, data: Iterator[tuple[Tensor, Tensor]], count: int, bare: float) -> dict[str, Any]:
    """Resident memory in the last of the steps: seconds since it began, MB above ``bare``."""
    answer = run_steps(step, data, count - 1)
    with Sampler() as sampler:
        last = run_steps(step, data, 1)
    points = [(at, now - bare) for at, now in sampler.points]
    return answer | last | {"trace": points}


def serve(connection: Connection) -> None:
    """Set up the peer, then do what the coordinator asks until it hangs up."""
    job = Job(**connection.recv())
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # optimizers import it when first used: that is not the peer's memory
    importlib.import_module(LIBRARY.get(job.peer.split("-")[0], "torch"))
    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.ranks)
    bare = memory("VmRSS")
    busy = Busy() if job.pipeline > 1 else None
    step, data = setup(job), batches(job.data_rank, job.batch, job.length)
    connection.send({})
    while True:
        command, count = connection.recv()
        if command == "profile":
            answer = profile_steps(step, data, count, record=job.rank == 0)
        elif command == "trace":
            answer = trace_steps(step, data, count, bare)
        else:
            answer = run_steps(step, data, count, busy)
        connection.send(answer | {"memory": memory("VmHWM") - bare})


def worker(descriptor: int) -> None:
    """Leaves by ``os._exit``, because tearing down process groups one rank at a time can hang or complain."""
    connection = Connection(descriptor)
    try:
        serve(connection)
    except EOFError:
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        connection.send({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)


if __name__ == "__main__":
    worker(int(sys.argv[1]))
