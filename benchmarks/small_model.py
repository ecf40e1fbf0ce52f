"""Step of a model so small that the host's work decides: a ConvNet of 57,000 parameters, SGD, 2 ranks on gloo.

All peers live in the same two processes and take turns, a few steps each, so that a slower second is slower for all.
On a GPU each model whose kernels are shorter than their launches meets the same. "cpu us" is the time of the rank's
main thread alone, without waits for the other rank.

    python benchmarks/small_model.py
    python benchmarks/small_model.py --profile 2  # where the time of a step at stage 2 goes

The profile attributes the main thread's time to parts by the file of the function. The profiler slows each call down,
so shares are exact to about a fifth; "step us" is the time without it.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import ROOT, finish, give, interleaved, markdown, ratio, result_of, timed
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, PER_TURN = 8, 10
FABRIC = "Fabric, DDPStrategy"
PARTS = {  # the beginning of a file's path in the package -> part
    "step/loss_scale": "flags",
    "step/param_groups": "flags",
    "engine/same_on_ranks": "flags",
    "engine/visible_grads": "flags",
    "engine/buffers": "flags",
    "engine/": "hooks and buckets",
    "offload/": "hooks and buckets",
    "comm/": "launches and waits",
    "step/": "step",
    "optim/": "step",
    "ops/": "kernels",
    "lightning/": "strategy",
    "session/": "strategy",
    "common/": "hooks and buckets",
}


class ConvNet(nn.Module):
    """Two convolutions and two linear layers for images [batch, 1, 28, 28]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.fc1, self.fc2 = nn.Linear(32 * 5 * 5, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


# ---- the peers (these run in workers) ------------------------------------------------------------------------------


def stepping(
    model: Any, optimizer: Any, backward: Callable[[Tensor], object] = Tensor.backward
) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(BATCH, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (BATCH,), generator=generator)

    def step() -> None:
        backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def raw_ddp() -> Callable[[], object]:
    model = nn.parallel.DistributedDataParallel(ConvNet())
    return stepping(model, sgd(model))


def raw_fsdp2() -> Callable[[], object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = ConvNet()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return stepping(model, sgd(model))


def in_fabric(strategy: Any) -> Callable[[], object]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model: Any = ConvNet()
    model, optimizer = fabric.setup(model, sgd(model))
    return stepping(model, optimizer, fabric.backward)


def peers() -> dict[str, Callable[[], object]]:
    """A step of each peer."""
    from lightning.fabric.strategies import DDPStrategy

    from lt_zero import FabricZeroStrategy

    found = {"DDP": raw_ddp(), FABRIC: in_fabric(DDPStrategy()), "FSDP2": raw_fsdp2()}
    return found | {f"lt_zero stage {stage}": in_fabric(FabricZeroStrategy(stage=stage)) for stage in range(4)}


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds per step in each round, of the clock and of this thread, by peer."""

    def turn(step: Callable[[], object]) -> tuple[float, float]:
        own = time.thread_time()
        elapsed = timed(lambda: [step() for _ in range(PER_TURN)])()
        return elapsed / PER_TURN, (time.thread_time() - own) / PER_TURN

    return interleaved({name: partial(turn, step) for name, step in peers().items()}, rounds, warm_up=5)


def profile(stage: int, steps: int) -> dict[str, float]:
    """Microseconds per step by part; "step us" has those without the profiler."""
    from lt_zero import FabricZeroStrategy

    step = in_fabric(FabricZeroStrategy(stage=stage))
    for _ in range(50):
        step()
    start = time.thread_time()
    for _ in range(steps):
        step()
    plain = (time.thread_time() - start) / steps * 1e6
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    parts: dict[str, float] = defaultdict(float)
    package = str(ROOT / "lt_zero") + "/"
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        name = "model, autograd, torch"
        if file.startswith(package):
            inside = file.removeprefix(package)
            name = next((part for start, part in PARTS.items() if inside.startswith(start)), "strategy")
        elif "/lightning/" in file:
            name = "Fabric"
        parts[name] += own / steps * 1e6
    if out := os.environ.get("SMALL_MODEL_STATS"):
        profiler.dump_stats(f"{out}.{dist.get_rank()}")
    return {"step us": plain, **parts}


# ---- the parent ----------------------------------------------------------------------------------------------------


def in_processes(*arguments: str, ranks: int = 2) -> Any:
    """What rank 0 gives."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(ranks):
            launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "TORCHELASTIC_RUN_ID": "small"}
            fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
            fixed |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": str(ranks)}
            paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
            env = os.environ | fixed | {key: str(value) for key, value in launcher.items()}
            command = [sys.executable, __file__, "--worker", f"{folder}/store", *arguments]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            running.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate() for process in running]
    try:
        return result_of(outputs[0][0])
    except ValueError:
        raise RuntimeError("\n".join(error[-3000:] for _, error in outputs)) from None


def work(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(args.worker, int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    give(measure(args.rounds) if args.profile is None else profile(args.profile, 10 * args.rounds))
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--profile", type=int, metavar="STAGE", help="print where the time of a step goes")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if args.profile is not None:
        parts = in_processes("--rounds", str(args.rounds), "--profile", str(args.profile))
        finish(markdown(["part", "us"], [[name, f"{value:.0f}"] for name, value in parts.items()]), args.out)
        return
    found = in_processes("--rounds", str(args.rounds))
    rows = []
    elapsed, own = ({name: [pair[which] for pair in pairs] for name, pairs in found.items()} for which in (0, 1))
    for name, seconds in elapsed.items():
        middle, low, high = ratio(seconds, elapsed[FABRIC])
        raw, cpu = ratio(seconds, elapsed["DDP"]).median, ratio(own[name], own[FABRIC]).median
        times = f"{median(seconds) * 1e6:.0f}", f"{median(own[name]) * 1e6:.0f}"
        rows.append([name, *times, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{raw:.2f}", f"{cpu:.2f}"])
    header = ["peer", "us per step", "cpu us", f"x {FABRIC}", "quartiles", "x DDP", "cpu x"]
    head = f"ConvNet of 57,000 parameters, SGD, 2 ranks, torch {torch.__version__}"
    finish([head, "", *markdown(header, rows)], args.out)


if __name__ == "__main__":
    main()
