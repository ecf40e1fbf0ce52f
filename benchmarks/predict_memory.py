"""Memory of ``Trainer.predict`` on each of 2 ranks: DDP, and ZeRO stage 3 with weights in memory or in files.

    python benchmarks/predict_memory.py [--width 1024] [--depth 8] [--out benchmarks/results/predict_memory_cpu.md]

Each rank is a fresh process. What is counted is resident memory above that of the same process when everything is
imported and no model exists: its peak from there to the last batch, and its value between two batches. Ranks map their
own shared windows only, so no page counts twice. The model is built in ``configure_model`` (``inside``), or before the
Trainer sees it (``before``), which takes a whole copy for any strategy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from measuring import cpu_name, finish, give, markdown, memory, result_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_zero import ZeroStrategy

WORLD, MB = 2, 1e6
MIB_IN_MB = 2**20 / MB
RELEASING = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
WAYS = ("ddp", "stage 3", "stage 3, reuse keys 0", "nvme", "nvme, max_in_cpu 1e9")


def strategy_of(way: str, folder: str) -> Any:
    if way == "ddp":
        return "ddp"
    zero: dict[str, Any] = {"stage": 3}
    if "reuse" in way:
        zero |= RELEASING
    if "nvme" in way:
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder}
    if "max_in_cpu" in way:
        zero["offload_param"]["max_in_cpu"] = 1e9
    return ZeroStrategy(config={"zero_optimization": zero})


class Row(pl.LightningModule):
    """Blocks in a row."""

    def __init__(self, width: int, depth: int, before: bool) -> None:
        super().__init__()
        self.width, self.depth, self.blocks = width, depth, nn.ModuleList()
        self.between: list[float] = []
        if before:
            self._build()

    def _build(self) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(self.width, 4 * self.width), nn.GELU(), nn.Linear(4 * self.width, self.width))
            for _ in range(self.depth)
        )

    def configure_model(self) -> None:
        if not len(self.blocks):
            self._build()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        self.between.append(memory())
        return batch


def rank(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    strategy = strategy_of(args.way, args.folder)
    trainer = pl.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, **quiet)
    start = memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    model = Row(args.width, args.depth, args.before)
    rows = torch.randn(64, args.width, generator=torch.Generator().manual_seed(1))
    found = trainer.predict(model, DataLoader(rows, 8))
    numel = 2 * 4 * args.width**2 * args.depth + 5 * args.width * args.depth
    total = float(sum(row.double().sum() for row in found or []))
    peak, between = memory("VmHWM") - start, max(model.between[1:]) - start
    give([numel * 4 / MB, peak * MIB_IN_MB, between * MIB_IN_MB, total])


class Predicted(NamedTuple):
    """MB of the model, at the peak and between batches on the rank that has most; the sum of rank 0's predictions."""

    model: float
    peak: float
    between: float
    total: float


def measure(way: str, before: bool, width: int, depth: int, nvme: str | None = None) -> Predicted:
    with tempfile.TemporaryDirectory(dir=nvme) as folder:
        command = [sys.executable, __file__, "--way", way, "--folder", folder]
        command += ["--width", str(width), "--depth", str(depth)] + ["--before"] * before
        port = str(29600 + os.getpid() % 1000)
        env = {**os.environ, "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "GROUP_RANK": "0"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "here", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs = [
            subprocess.Popen(command, env={**env, "RANK": r, "LOCAL_RANK": r}, **pipes) for r in map(str, range(WORLD))
        ]
        outputs = [run.communicate(timeout=600)[0] for run in runs]
    try:
        found = [Predicted(*result_of(output)) for output in outputs]
    except ValueError:
        raise RuntimeError(f"{way}: a rank failed:\n{outputs}") from None
    return found[0]._replace(peak=max(f.peak for f in found), between=max(f.between for f in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--nvme", help="a folder on the disk for states")
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--before", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        rank(args)
        return
    rows, ddp = [], None
    for before, way in itertools.product((False, True), args.ways):
        found = measure(way, before, args.width, args.depth, args.nvme)
        ddp = found if ddp is None or way == args.ways[0] else ddp
        assert found.total == ddp.total, f"{way}: the predictions differ from DDP's"
        peak = f"{found.peak:.0f}", f"{found.peak / ddp.peak:.2f}"
        between = f"{found.between:.0f}", f"{found.between / ddp.between:.2f}"
        rows.append(["before" if before else "inside", way, *peak, *between])
        print(" | ".join(rows[-1]), flush=True)
    head = f"model of {found.model:.0f} MB in fp32, {WORLD} ranks, resident memory of a rank above the bare process."
    lines = ["# Memory of predict", "", f"`python benchmarks/predict_memory.py`: {head}", f"{cpu_name()}.", ""]
    lines += markdown(["built", "strategy", "peak, MB", "of DDP's", "between batches, MB", "of DDP's"], rows)
    finish(lines, args.out)


if __name__ == "__main__":
    main()
