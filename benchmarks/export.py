"""Exporting fp32 weights from a training state: lt_zero against DeepSpeed's zero_to_fp32, whole processes.

    python benchmarks/export.py --deepspeed-python /path/to/venv/bin/python [--millions 400] [--rounds 3] [--out file]

DeepSpeed trains one step of a stack of linear layers on two CPU ranks at stage 3 and saves. Both tools read that
checkpoint; lt_zero also reads its own directory of the same state. Each run is a process of its own, in turn; time
includes start-up and imports, memory is the process's peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from measuring import finish, interleaved, markdown, ratio, remove, scratch

WIDTH, THEIRS, COPY = 2048, "DeepSpeed's zero_to_fp32", "copying the fp32 file"
TRAIN = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch, torch.multiprocessing as mp

def train(rank, folder, layers, width):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29655", RANK=str(rank), WORLD_SIZE="2")
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    import deepspeed
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    engine.backward(engine(torch.randn(1, width)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    os._exit(0)

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), 2)
"""


class Run(NamedTuple):
    """Of a process: seconds, and peak MB."""

    seconds: float
    peak: float


def run(command: list[str]) -> Run:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        assert process.stderr is not None
        raise RuntimeError(f"{command} failed: {process.stderr.read().decode()[-2000:]}")
    return Run(seconds, usage.ru_maxrss / 1024)


def make(python: str, folder: Path, millions: int) -> tuple[Path, Path]:
    """DeepSpeed's checkpoint, and lt_zero's of the same state."""
    script, theirs, ours = folder / "train.py", folder / "deepspeed", folder / "ours.ckpt"
    script.write_text(TRAIN, encoding="utf-8")
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    subprocess.run(
        [python, "-W", "ignore", str(script), str(theirs), str(layers), str(WIDTH)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run([sys.executable, "-m", "lt_zero.cli", "import", str(theirs), str(ours)], check=True)
    return theirs, ours


def measure(python: str, millions: int, rounds: int, folder: Path) -> dict[str, list[Run]]:
    """Seconds and peak MB of each tool, for each round; ``python`` has deepspeed."""
    theirs, ours = make(python, folder, millions)
    out, whole = folder / "out", folder / "whole.pt"
    script = "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as c; import sys; "
    call = "c(sys.argv[1], sys.argv[2], max_shard_size=None)"
    export = [sys.executable, "-m", "lt_zero.cli", "export", "--dtype", "fp32"]
    commands = {
        THEIRS: [python, "-c", script + call, str(theirs), str(out)],
        "lt_zero, the same checkpoint": [*export, str(theirs), str(out) + ".pt"],
        "lt_zero, its own checkpoint": [*export, str(ours), str(out) + ".pt"],
        "lt_zero, its own, fp16 safetensors": [*export[:-1], "fp16", str(ours), str(out) + ".safetensors"],
        COPY: [sys.executable, "-c", "import shutil, sys; shutil.copyfile(*sys.argv[1:])", str(whole), str(out)],
    }
    run([*export, str(ours), str(whole)])

    def case(command: list[str]) -> Run:
        found = run(command)
        for path in folder.glob("out*"):
            remove(path)
        return found

    return interleaved({name: partial(case, command) for name, command in commands.items()}, rounds, warm_up=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-python", required=True, help="an interpreter that has deepspeed")
    parser.add_argument("--millions", type=int, default=400, help="of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with scratch(args.path) as folder:
        found = measure(args.deepspeed_python, args.millions, args.rounds, folder)
    bare = run([sys.executable, "-c", "import torch"]).peak
    size = f"{args.millions}M parameters, {args.millions * 4 / 1000:.1f} GB in fp32"
    rows, base = [], found[THEIRS]
    for name, runs in found.items():
        seconds = [run.seconds for run in runs]
        peak, theirs = (statistics.median(run.peak for run in each) for each in (runs, base))
        spread = f"{statistics.median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"
        share = ratio(seconds, [run.seconds for run in base]).median
        rows.append([name, spread, f"{peak:.0f}", f"{share:.2f}", f"{peak / theirs:.2f}"])
    head = ["tool", "seconds, median (range)", "peak MB", "time / DeepSpeed's", "peak / DeepSpeed's"]
    lines = [f"{size}; a process that imports torch: {bare:.0f} MB.", "", *markdown(head, rows)]
    finish(lines, args.out)


if __name__ == "__main__":
    main()
