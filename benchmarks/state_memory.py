"""Forecasts of states in fewer bits beside what two ranks take: 400M parameters, four steps of AdamW, bf16 compute.

    python benchmarks/state_memory.py [--width 1024] [--depth 38] [--path /tmp] [--out results.md]

Each case runs in two processes of its own. "memory" is the resident memory of the rank that takes most, above that of
the same process after two steps of a tiny model: its peak over building and all steps, with
``MALLOC_MMAP_THRESHOLD_`` set, so that no gaps of the heap count. "states" are the bytes of tensors and files that the
engine holds after the steps. For "host" the CPU plays two memories, a device's and a host's, so that bytes really move;
both are counted together. Forecasts are those of ``lt-zero estimate``, without checkpoints.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from low_bit import Adapted
from measuring import ROOT, cpu_name, finish, give, markdown, memory, result_of, versions
from torch import Tensor, nn

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.common import accelerator
from lt_zero.core.engine.storage_plan import DEVICE, HOST, NVME
from lt_zero.planning.check import RESTING, measured, setup_of
from lt_zero.planning.forecast import STATES, Forecast, forecast
from lt_zero.planning.state_dtypes import CHOICES, StateDtypes
from lt_zero.training.build import built_by

WORLD, MIB = 2, 2**20
STEPS = 4  # as many as there are send buffers, which take turns: adapters are one bucket
PLACES = ("device", "host", "files")


class Case(NamedTuple):
    """A choice of dtypes, a stage, and where states are."""

    dtypes: StateDtypes
    stage: int
    place: str

    def __str__(self) -> str:
        return f"{self.dtypes.name}, stage {self.stage}, {self.place}"

    def config(self, folder: str) -> ZeroConfig:
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 50_000_000}
        zero |= {"allgather_bucket_size": 50_000_000, "stage3_max_reuse_distance": 0}
        moved = {"host": {"device": "cpu"}, "files": {"device": "nvme", "nvme_path": folder}}.get(self.place)
        if moved is not None:
            zero["offload_optimizer"] = moved
        if moved is not None and self.dtypes.adapted:
            zero["offload_param"] = {**moved, "max_in_cpu": 0} if self.place == "files" else moved
        given = ["bf16.enabled=true", *self.dtypes.overrides, f"zero_optimization.stage={self.stage}"]
        return ZeroConfig.of({"zero_optimization": zero}, overrides=given)


def cases() -> Iterator[Case]:
    """Adapters at stage 3, where frozen weights may rest in few bits; files for the narrowest of each kind."""
    for dtypes in CHOICES:
        narrow = "int8" in dtypes.name or "4 bits" in dtypes.name
        plain = dtypes.name in ("all in bf16", "frozen bf16, adapters")  # they move as others do
        for stage in (3,) if dtypes.adapted else (1, 3):
            yield from (Case(dtypes, stage, place) for place in (PLACES if narrow else PLACES[: 1 if plain else 2]))


class SizedBlock(nn.Module):
    """An MLP of width 4 w, and two square matrices; all frozen beside adapters if it is adapted."""

    def __init__(self, width: int, adapted: bool) -> None:
        super().__init__()

        def matrix(inputs: int, outputs: int) -> nn.Module:
            return Adapted(inputs, outputs) if adapted else nn.Linear(inputs, outputs, bias=False)

        self.norm = nn.LayerNorm(width)
        self.first, self.second = matrix(width, width), matrix(width, width)
        self.up, self.down = matrix(width, 4 * width), matrix(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.tanh(self.first(self.norm(x))))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def build(case: Case, width: int, depth: int) -> nn.Module:
    """The model on the meta device; frozen weights in bf16, as most models are loaded."""
    with torch.device("meta"):
        model = nn.Sequential(*(SizedBlock(width, case.dtypes.adapted) for _ in range(depth)))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.data.bfloat16(), requires_grad=False))
    return model


def measure(case: Case, width: int, depth: int, folder: str) -> dict[str, float]:
    """MB of one rank, as forecast and as measured."""
    config, model = case.config(folder), build(case, width, depth)
    cast = lt_zero.estimate(model, config, WORLD, device="cpu", saves=False)
    bare = memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    engine = lt_zero.shard(model, config, torch.device("cpu"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    if case.place == "host":
        setup = replace(setup_of(engine, [optimizer], saves=False), device="cuda")
        cast = forecast(engine.plan, built_by(engine), engine.policy, setup)
    rows = torch.randn(1, 16, width, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    for _ in range(STEPS):
        model(rows).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.finish_steps()
    have = measured(engine, [sharded])
    found = {
        "parameters": cast.parameters / 1e6,
        "memory": (memory("VmHWM") - bare) * MIB / 1e6,
        "memory cast": in_memory(cast) / 1e6,
        "states": (sum(have.get(kind, 0) for kind in STATES) + have.get(RESTING, 0)) / 1e6,
        "states cast": cast.model_states() / 1e6,
        "files": have.get(RESTING, 0) / 1e6,
        "files cast": cast.rank(NVME) / 1e6,
    }
    engine.offload_manager.close()
    return found


def in_memory(cast: Forecast) -> int:
    """Bytes at most of a device and its host."""
    return max(sum(sum(cast.need_of_rank(phase, at).values()) for at in (DEVICE, HOST)) for phase in cast.phases)


def in_processes(number: int, sizes: list[str], path: str) -> dict[str, float]:
    """What the rank gives that takes most."""
    with tempfile.TemporaryDirectory(dir=path) as folder:
        running = []
        for rank in range(WORLD):
            fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
            fixed |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "PYTHONPATH": str(ROOT)}
            env = {**os.environ, **fixed, "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
            command = [sys.executable, __file__, "--worker", folder, "--case", str(number), *sizes]
            running.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate() for process in running]
    try:
        return dict(max((result_of(out) for out, _ in outputs), key=lambda found: found["memory"]))
    except ValueError:
        raise RuntimeError("\n".join(error[-3000:] for _, error in outputs)) from None


def work(args: argparse.Namespace) -> None:
    """One rank of a case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store, rank = dist.FileStore(f"{args.worker}/store", WORLD), int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    case = list(cases())[args.case]
    accelerator._apart = case.place == "host"
    measure(case, args.width, 1, args.worker)  # so that what libraries take for these sizes does not count
    gc.collect()
    give(measure(case, args.width, args.depth, args.worker))
    dist.barrier()
    dist.destroy_process_group()


def row_of(case: Case, found: dict[str, float]) -> list[str]:
    cells = [case.dtypes.name, str(case.stage), case.place]
    for what in ("states", "memory"):
        cast, have = found[f"{what} cast"], found[what]
        cells += [f"{cast:.0f}", f"{have:.0f}", f"{cast / have:.2f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=38)
    parser.add_argument("--path", default="/tmp", help="a folder on the disk for states")
    parser.add_argument("--only", default="", help="cases whose names contain it")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    sizes = ["--width", str(args.width), "--depth", str(args.depth)]
    rows = []
    numel = 0.0
    for number, case in enumerate(cases()):
        if args.only in str(case):
            found = in_processes(number, sizes, args.path)
            numel = max(numel, found["parameters"])
            rows.append(row_of(case, found))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    header = ["states", "stage", "place", "states, MB: forecast", "measured", "ratio"]
    header += ["memory, MB: forecast", "measured", "ratio"]
    head = f"# States in fewer bits: {numel:.0f}M parameters, {WORLD} ranks, bf16 compute, four steps of AdamW"
    source = f"`python benchmarks/state_memory.py {' '.join(sizes)}`, {versions()}, {cpu_name()}"
    finish([head, "", source, "", *markdown(header, rows)], args.out)


if __name__ == "__main__":
    main()
