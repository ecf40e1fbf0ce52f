"""Train the GPT of train_gpt.py on 1, 2 and 4 processes, and show that the weights are the same to the bit.

    python examples/same_bits.py                               # ZeRO stage 2
    python examples/same_bits.py zero_optimization=stage3      # further overrides of train_gpt.py

All runs have four virtual ranks: in a round each of the processes trains on 4, 2 or 1 micro-batches, and their
gradients are added in one order. After each step a digest of the weights is written, which this script compares.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

VIRTUAL_RANKS = 4
STEPS = 30
FOLDER = Path("out/same-bits")


def train(processes: int, overrides: list[str]) -> list[str]:
    """Train on so many processes; returns the digest of the weights after each step."""
    folder = FOLDER / f"{processes}-processes"
    digests = folder / "digests0.jsonl"
    digests.unlink(missing_ok=True)
    given = {
        "zero_optimization": "stage2",
        "+reproducible.virtual_ranks": VIRTUAL_RANKS,
        "threads": 1,
        "out": folder,
        "trainer.devices": processes,
        "trainer.max_steps": STEPS,
        "data.batch_size": 2,
        "data.validations": 2,
    }
    # Hydra refuses a key that is given twice.
    own = {override.partition("=")[0] for override in overrides}
    script = Path(__file__).with_name("train_gpt.py")
    command = [sys.executable, str(script), *(f"{key}={value}" for key, value in given.items() if key not in own)]
    command += overrides
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LT_ZERO_DIGESTS": str(folder)})
    if done.returncode:
        sys.exit(done.stderr)
    lines = map(json.loads, digests.read_text().splitlines())
    return [line["digest"] for line in lines if line["kind"] == "step"]


def main(overrides: list[str]) -> int:
    """Print a line for each number of processes; 1 if the weights differ."""
    found = []
    for processes in (1, 2, 4):
        started = time.perf_counter()
        found.append(train(processes, overrides))
        seconds = time.perf_counter() - started
        print(f"{processes} processes, {len(found[-1])} steps, {seconds:.0f} s: {found[-1][-1]}", flush=True)
    same = all(digests == found[0] for digests in found)
    print("The weights are the same, to the bit, after each step." if same else "The weights differ.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
