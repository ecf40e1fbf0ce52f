"""Resident memory of rank 0 over one training step: stages 0 to 3, DDP and FSDP2, two ranks on this machine's CPUs.

    python benchmarks/step_memory.py [--depth 8] [--width 512] [--out benchmarks/results/step_memory.png]

Each peer runs alone, in processes of its own, and a thread of rank 0 reads its resident memory each millisecond of the
fourth step. glibc returns freed tensors to the system at once here (MALLOC_MMAP_THRESHOLD_), so that memory is what the
peer uses. It is counted above the process after its imports; Linux only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

import step_time
from measuring import ROOT

PEERS = {"ddp": "DDP", "fsdp2": "FSDP2", **{f"lt_zero-{stage}": f"lt_zero stage {stage}" for stage in range(4)}}
PEERS["lt_zero-3-release"] = "lt_zero stage 3 releasing"  # as FSDP2: no weights are kept from forward to backward
Trace = list[tuple[float, float]]  # seconds since the step began, MB


def traces(depth: int, width: int, names: Iterable[str] = PEERS) -> dict[str, Trace]:
    """Of each peer that ran; of one that failed, the reason is printed."""
    found: dict[str, Trace] = {}
    before = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)  # workers inherit it
    try:
        for name in names:
            words = ["--peers", name, "--depth", str(depth), "--width", str(width)]
            with step_time.started(step_time.parse(words)) as (peer,):
                if peer.attempt(lambda: found.update({PEERS[name]: peer.ask("trace", 1)[0]["trace"]})):  # noqa: B023 - called at once
                    found[PEERS[name]] = [(round(at, 4), round(mb, 1)) for at, mb in found[PEERS[name]]]
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        if before is not None:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = before
    return found


def draw(found: dict[str, Trace], path: Path) -> None:
    """Each step is as wide as the picture: what takes longer is in the table of step times.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for number, (title, trace) in enumerate(found.items()):
        last = trace[-1][0]
        style = "-" if title.startswith("lt_zero") else "--"
        axes.plot([at / last for at, _ in trace], [mb for _, mb in trace], style, color=f"C{number}", label=title)
    axes.set(xlabel="share of the step: forward, backward, update", ylabel="MB of a rank above the bare process")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2, fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "step_memory.png")
    args = parser.parse_args()
    found = traces(args.depth, args.width)
    for title, trace in found.items():
        values = [mb for _, mb in trace]
        print(f"{title}: {min(values):.0f} to {max(values):.0f} MB")
    draw(found, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
