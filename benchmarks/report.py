"""Runs one part of `make gpu`, at most 6 minutes, and writes what it printed with the versions and the machine.

    python benchmarks/report.py --device cuda engine -- -m pytest -m gpu tests/gpu/test_engine.py

The file is benchmarks/results/gpu_PART.md; with ``--device cpu`` (the CPU in the GPU's place) build/gpu/PART.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import date

from measuring import ROOT, versions

LIMIT_S, LINES = 360, 60


def run(command: list[str], device: str) -> tuple[str, str]:
    """How it ended, and what it printed; it is shown meanwhile."""
    environment = {**os.environ, "ZERO_TEST_DEVICE": device, "PYTHONUNBUFFERED": "1"}
    started, printed = time.monotonic(), list[str]()
    process = subprocess.Popen(
        ["timeout", "-k", "10", str(LIMIT_S), sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        printed.append(line.rstrip("\n"))
    code, seconds = process.wait(), time.monotonic() - started
    ended = {0: "passed", 124: f"ended after the limit of {LIMIT_S} s", 137: "killed"}.get(code, f"failed ({code})")
    return f"{ended}, {seconds:.0f} s", "\n".join(printed[-LINES:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("part")
    parser.add_argument("command", nargs="+", help="arguments of Python")
    args = parser.parse_args()
    ended, printed = run(args.command, args.device)
    folder = ROOT / "benchmarks" / "results" if args.device == "cuda" else ROOT / "build" / "gpu"
    file = folder / (f"gpu_{args.part}.md" if args.device == "cuda" else f"{args.part}.md")
    head = f"# {args.part}: {ended}\n\n{date.today()}, {versions(args.device)}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{head}\n`python {' '.join(args.command)}`\n\n```\n{printed}\n```\n")
    print(f"{ended}; {file.relative_to(ROOT)}")
    sys.exit(0 if ended.startswith("passed") else 1)


if __name__ == "__main__":
    main()
