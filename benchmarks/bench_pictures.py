"""The three pictures of docs/: step time beside peers, memory by stage and offload, memory over one step.

    python benchmarks/bench_pictures.py

Step time and the memory of a step are those of the first results file in benchmarks/results (``make bench-all``);
memory by stage is what ``lt_zero.estimate`` forecasts. They are written as SVG into docs/pictures, without a library,
so that every machine writes the same files and a test can compare them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from bench_report import Found, rows_of, stored
from measuring import ROOT

import lt_zero

FOLDER = ROOT / "docs" / "pictures"
WIDTH, LEFT, LINE = 400, 166, 21  # of a picture, of the names of its bars, of a bar and the gap below it
TEXT = "#7d8590"  # readable on white and on the dark page, as are the colours
OURS, PEER, SECOND = "#4c7bd9", "#9aa3ad", "#d99a3d"
CURVES = {
    "DDP": "#9aa3ad",
    "FSDP2": "#d99a3d",
    "lt_zero stage 0": "#8e6fd1",
    "lt_zero stage 1": "#3fa7a0",
    "lt_zero stage 3": "#4c7bd9",
    "lt_zero stage 3 releasing": "#d0557b",
}


class Bar(NamedTuple):
    """One line of a picture: pieces (length, colour) after each other, and the text at their end."""

    name: str
    pieces: Sequence[tuple[float, str]]
    label: str


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def picture(title: str, below: str, height: float, content: Iterable[str]) -> str:
    """A whole file; ``below`` is small text."""
    notes = below.splitlines()
    whole = 34 + height + 15 * len(notes) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole:g}" width="{WIDTH}" height="{whole:g}" '
        f'role="img" font-family="system-ui, sans-serif" fill="{TEXT}">',
        f"<title>{escape(title)}</title>",
        text(0, 16, title, size=14, weight="bold"),
        '<g transform="translate(0 34)">',
        *content,
        "</g>",
        *(text(0, 34 + height + 15 * number + 13, note, size=11) for number, note in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def bars(title: str, below: str, lines: Sequence[Bar], reference: float | None = None) -> str:
    """Bars from the left; ``reference`` is a length that a thin line marks."""
    most = max(sum(length for length, _ in bar.pieces) for bar in lines)
    scale = (WIDTH - LEFT - 64) / most
    content = []
    for number, bar in enumerate(lines):
        x, y = float(LEFT), number * LINE
        content.append(text(LEFT - 8, y + 12, bar.name, anchor="end"))
        for length, colour in bar.pieces:
            content.append(f'<rect x="{x:.1f}" y="{y}" width="{length * scale:.1f}" height="15" fill="{colour}"/>')
            x += length * scale
        content.append(text(round(x + 5, 1), y + 12, bar.label))
    if reference is not None:
        x = LEFT + reference * scale
        content.append(f'<path d="M{x:.1f} -4V{len(lines) * LINE}" stroke="{TEXT}" stroke-dasharray="3 3"/>')
    return picture(title, below, len(lines) * LINE, content)


def machine(found: Found) -> str:
    return f"{found['cpu'].partition(',')[0]}, {found['date']}"


def step_time(found: Found) -> str:
    """The time of a step, relative to DDP's."""
    groups = {group["name"]: group for group in found["groups"]}
    measured = [next(rows_of({"groups": [groups[name]]})) for name in ("step-deepspeed", "step") if name in groups]
    ratios = {case.name: case.ratio.median for row in measured for case in row.cases}
    order = sorted(ratios, key=lambda name: (name.startswith("lt_zero"), name))  # peers first
    lines = [
        Bar(name, [(ratios[name], OURS if name.startswith("lt_zero") else PEER)], f"{ratios[name]:.2f}")
        for name in order
    ]
    lines = [bar._replace(name=bar.name.replace("ZeroRedundancyOptimizer", "ZeroRedundancyOpt.")) for bar in lines]
    below = f"A GPT of 29.5M parameters in fp32 on 2 ranks,\n{machine(found)}. Lower is better."
    return bars("Time of a step, relative to DDP", below, lines, reference=1)


def stage_memory() -> str:
    """What a GPU and its share of host memory hold at each stage, forecast for 7B parameters on 8 GPUs."""
    cpu = {"device": "cpu"}
    settings: list[tuple[str, dict[str, Any]]] = [
        *((f"stage {stage}", {"stage": stage}) for stage in range(3)),
        ("stage 3", {"stage": 3, "stage3_max_reuse_distance": 0}),
        ("2, offload", {"stage": 2, "offload_optimizer": cpu}),
        ("3, offload", {"stage": 3, "stage3_max_reuse_distance": 0, "offload_optimizer": cpu, "offload_param": cpu}),
    ]
    lines = []
    for name, zero in settings:
        cast = lt_zero.estimate(7e9, {"zero_optimization": zero}, world=8, precision="bf16-mixed", saves=False)
        device, host = cast.rank("device") / 1e9, cast.rank("host") / 1e9
        label = f"{device:.0f}" + (f" + {host:.0f} host" if host >= 1 else "")
        lines.append(Bar(name, [(device, OURS), (host, SECOND)], label))
    below = "7B parameters with Adam in bf16-mixed on 8 GPUs, without\n"
    below += "activations; forecast. Stage 3 releases weights after use."
    return bars("Memory by stage and offload, GB per GPU", below, lines)


def step_memory(traces: Mapping[str, Sequence[tuple[float, float]]], where: str) -> str:
    """The resident memory of rank 0 from the beginning to the end of a step."""
    height, left, right = 190, 34, WIDTH - 6
    shown = {name: traces[name] for name in CURVES if name in traces}
    top = max(mb for trace in shown.values() for _, mb in trace) * 1.05
    content = []
    for mb in range(0, int(top), 200):
        y = height * (1 - mb / top)
        content.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{TEXT}" stroke-opacity="0.3"/>')
        content.append(text(left - 5, round(y + 4, 1), str(mb), size=11, anchor="end"))
    for name, trace in shown.items():
        points = [trace[round(number * (len(trace) - 1) / 80)] for number in range(81)]
        path = " ".join(
            f"{left + (right - left) * at / trace[-1][0]:.0f},{height * (1 - mb / top):.0f}" for at, mb in points
        )
        dashes = "" if name.startswith("lt_zero") else ' stroke-dasharray="5 3"'
        content.append(f'<polyline points="{path}" fill="none" stroke="{CURVES[name]}" stroke-width="1.8"{dashes}/>')
    for number, name in enumerate(shown):
        x, y = left + 12 + 180 * (number % 2), height - 50 + 17 * (number // 2)
        content.append(f'<path d="M{x} {y - 4}h14" stroke="{CURVES[name]}" stroke-width="3"/>')
        content.append(text(x + 19, y, name, size=11))
    below = f"From left to right: forward, backward, update. A GPT of\n29.5M, 2 ranks, {where}. Stage 2 is as stage 1."
    return picture("One training step, MB of a rank", below, height + 8, content)


def pictures(found: Found) -> dict[str, str]:
    """All files, by name."""
    return {
        "step_time.svg": step_time(found),
        "stage_memory.svg": stage_memory(),
        "step_memory.svg": step_memory(found["memory"], machine(found)),
    }


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in pictures(next(iter(stored().values()))).items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
