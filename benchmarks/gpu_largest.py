"""The largest model that one GPU trains, with its states in host memory and without: the forecast says which to try.

    python benchmarks/gpu_largest.py --device cuda --limit-mib 4096

The GPU is made small, so that host memory does not limit both: torch may allocate ``--limit-mib`` of it. A model is a
GPT of some depth, and trains if two steps on 16 tokens end with a finite loss; each trial is a process of its own. The
deepest one whose forecast fits is tried first, then a deeper one if it trains, and shallower ones if not. Nothing above
11 times the size without offload is tried. On a CPU states rest in files, and the limit is one of resident memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import peers
import torch
from gpu_claims import Row
from measuring import child, give, memory

import lt_zero
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.storage_plan import DEVICE, HOST

KEY = "largest model, with offload / without"
SPARE_MIB = {"cuda": 256, "cpu": 64}  # what no forecast has: activations, workspaces, threads
FURTHER = 1.06  # from a trial to a deeper one


@dataclass(frozen=True)
class Trial:
    """A model, and how it is trained."""

    device: str
    limit_mib: int
    width: int
    depth: int
    offload: bool

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    def config(self, folder: str) -> lt_zero.ZeroConfig:
        zero: dict[str, Any] = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
        if self.offload:
            where = {"device": "cpu"} if self.gpu else {"device": "nvme", "nvme_path": folder}
            zero["offload_optimizer"] = {**where, "overlap_step": False}
            zero["offload_param"] = {**where, "max_in_cpu": 0, "buffer_count": 1}
        return lt_zero.ZeroConfig.of({"zero_optimization": zero})

    @property
    def precision(self) -> str:
        return "bf16-mixed" if self.gpu else "32-true"

    def model(self) -> peers.GPT:
        with torch.device("meta"):
            return peers.GPT(self.depth, self.width)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model().parameters())

    def forecast(self, place: str) -> int:
        """Bytes that ``lt_zero.estimate`` says this takes there."""
        options = {"device": self.device, "precision": self.precision, "saves": False}
        return lt_zero.estimate(self.model(), self.config("/tmp"), 1, **options).rank(place)

    @property
    def should_fit(self) -> bool:
        needed = self.forecast(DEVICE if self.gpu else HOST)
        return needed <= (self.limit_mib - SPARE_MIB[self.device]) << 20

    def run(self) -> dict[str, Any]:
        """Two steps in this process: whether they went well, the peak of memory in MiB, and why not."""
        place = torch.device("cuda", 0) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_per_process_memory_fraction((self.limit_mib << 20) / torch.cuda.mem_get_info()[1])
        importlib.import_module("torch._dynamo")  # optimizers import it when first used
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
        before, problem, loss = memory(), "", math.nan
        with tempfile.TemporaryDirectory() as folder:
            try:
                loss = self._train(place, folder)
            except (RuntimeError, MemoryError, lt_zero.NotEnoughMemory) as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.gpu else memory("VmHWM") - before
        if not problem and not math.isfinite(loss):
            problem = f"the loss is {loss}"
        if not problem and peak > self.limit_mib:
            problem = f"it took {peak:.0f} MiB"
        return {"trains": not problem, "problem": problem, "peak": peak, "loss": loss}

    def _train(self, place: torch.device, folder: str) -> float:
        config = self.config(folder)
        engine = lt_zero.shard(self.model(), config, place, policy=dtype_policy(config, self.precision))
        optimizer = torch.optim.AdamW(engine.root.parameters(), lr=1e-4)
        lt_zero.ShardedOptimizer(engine, optimizer)
        step = peers.plain_step(engine.root, optimizer, autocast=self.precision == "bf16-mixed")
        # Few tokens: activations are not what limits.
        ids, targets = (tensor.to(place) for tensor in next(peers.batches(0, 1, 16)))
        try:
            step(ids, targets)
            return step(ids, targets).item()
        finally:
            engine.offload_manager.close()

    def run_apart(self, seconds: float) -> dict[str, Any]:
        """``run`` in a process of its own."""
        try:
            found: dict[str, Any] = child("gpu_largest.py", "--trial", json.dumps(asdict(self)), limit=seconds)
        except subprocess.TimeoutExpired:
            return {"trains": False, "problem": f"a trial took more than {seconds:.0f} s", "peak": 0.0}
        except RuntimeError as error:  # killed, when the host has no memory left
            return {"trains": False, "problem": str(error).strip().splitlines()[-1], "peak": 0.0}
        return found


@dataclass(frozen=True)
class Search:
    """For the largest model within a limit, with offload and without.

    Attributes:
        limit_mib: memory of the device.
        seconds: after which no further trial is begun.
        most: times the size without offload, above which nothing is tried.
        trials: with offload, and without, at most.
    """

    device: str
    limit_mib: int
    width: int
    seconds: float
    most: float = 11.0
    trials: int = 4

    def row(self) -> Row:
        """The ratio of both sizes, in parameters."""
        until = time.monotonic() + self.seconds
        without, why = self.find(Trial(self.device, self.limit_mib, self.width, 1, False), None, until)
        if without is None:
            return Row(KEY, None, f"none trained without offload: {why}")
        most = self.most * without.parameters
        with_it, why = self.find(replace(without, offload=True), most, until)
        if with_it is None:
            return Row(KEY, None, f"none trained with offload: {why}")
        sizes = f"{with_it.parameters / 1e6:.0f}M and {without.parameters / 1e6:.0f}M parameters, {self.limit_mib} MiB"
        limit = f"{why}; the forecast has {with_it.forecast(HOST) / 1e9:.1f} GB of the host"
        return Row(KEY, with_it.parameters / without.parameters, f"{sizes}; limited by {limit}")

    def find(self, start: Trial, most: float | None, until: float) -> tuple[Trial | None, str]:
        """The deepest that trains, and what keeps it from being deeper."""
        trial, best, why = self.deepest(start, most), None, ""
        capped = most is not None and replace(trial, depth=_more(trial.depth)).parameters > most
        for _ in range(self.trials):
            left = until - time.monotonic()
            if left <= 0 and (best is not None or why):
                return best, why or "the time for trials"
            found = trial.run_apart(max(left, 30.0))
            print(trial, found, flush=True)
            if found["trains"]:
                best = trial
                if why or capped:
                    return best, why or f"the search, which ends at {self.most:g} times"
                trial = replace(trial, depth=_more(trial.depth))
            else:
                why = str(found["problem"])
                if best is not None:
                    return best, why
                # By what it took, where that was measured.
                share = min(1.0, self.limit_mib / found["peak"]) if found["peak"] else 1.0
                trial = replace(trial, depth=max(1, int(trial.depth * share / FURTHER)))
        return best, why or "the number of trials"

    @staticmethod
    def deepest(start: Trial, most: float | None) -> Trial:
        """By the forecast, of at most ``most`` parameters."""

        def fits(depth: int) -> bool:
            trial = replace(start, depth=depth)
            return (most is None or trial.parameters <= most) and trial.should_fit

        low, high = 1, 2
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return replace(start, depth=low)


def _more(depth: int) -> int:
    return max(depth + 1, int(depth * FURTHER))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit-mib", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=300, help="after which no further trial is begun")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trial:
        give(Trial(**json.loads(args.trial)).run())
        return
    row = Search(args.device, args.limit_mib, args.width, args.seconds).row()
    print(f"{row.key}: {row.value}; {row.note}")


if __name__ == "__main__":
    main()
