"""Saving and loading sharded checkpoints: time until the bytes are on the disk, and what stops training meanwhile.

    python benchmarks/checkpoint.py [--gb 1.0] [--rounds 5] [--path /tmp] [--out results.md]

One process, tensors of 16 MiB in fp32; all ways in each round, in turn. "durable" includes an fsync of every file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import Place
from lt_zero.checkpoint.native.pieces import Fragment
from lt_zero.checkpoint.native.save import Bundle, stage, write
from lt_zero.comm.communicator import Comm

MIB = 1 << 20
State = dict[str, Tensor]


def make_state(gigabytes: float) -> State:
    count = max(1, round(gigabytes * 1e9 / (16 * MIB)))
    return {f"model.{i}": torch.randn(4 * MIB) for i in range(count)}


def sync(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def torch_save(state: State, path: Path) -> None:
    torch.save(state, path)
    sync(path)


def safe_save(state: State, path: Path) -> None:
    safetensors.torch.save_file(state, path)
    sync(path)


def dcp_save(state: State, path: Path) -> None:
    dcp.save(dict(state), checkpoint_id=path, no_dist=True)  # its default writer syncs by itself


def bundle_of(state: State) -> Bundle:
    def fragment(tensor: Tensor) -> Fragment:
        return Fragment(lambda: tensor, tuple(tensor.shape), 0, tensor.numel(), tensor.dtype)

    order = tuple(name.removeprefix("model.") for name in state)
    return Bundle({name: fragment(tensor) for name, tensor in state.items()}, {}, {"order": order})


def zero_save(state: State, path: Path) -> None:
    write(bundle_of(state), Place.make(str(path)), Comm(None, None, torch.device("cpu")), None)


def raw_write(state: State, path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            file.write(tensor.numpy().data)
        os.fsync(file.fileno())


SAVES: dict[str, Callable[[State, Path], None]] = {
    "plain write, fsync": raw_write,
    "torch.save": torch_save,
    "safetensors": safe_save,
    "DCP, default writer": dcp_save,
    "lt_zero": zero_save,
}


def dcp_load(state: State, path: Path) -> None:
    dcp.load({name: torch.empty_like(t) for name, t in state.items()}, checkpoint_id=path, no_dist=True)


def zero_load(state: State, path: Path) -> None:
    archive = Archive(str(path))
    for name in state:
        archive.read(name.removeprefix("model."))
    archive.close()


LOADS: dict[str, tuple[str, Callable[[State, Path], object]]] = {
    "torch.load": ("torch.save", lambda state, path: torch.load(path, weights_only=True)),
    "safetensors": ("safetensors", lambda state, path: safetensors.torch.load_file(path)),
    "DCP": ("DCP, default writer", dcp_load),
    "lt_zero (checked)": ("lt_zero", zero_load),
}


def measure(
    gigabytes: float, rounds: int, folder: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float], list[float]]:
    state = make_state(gigabytes)
    saves: dict[str, list[float]] = {name: [] for name in SAVES}
    loads: dict[str, list[float]] = {name: [] for name in LOADS}
    copies, stalls = [], []
    target = [torch.empty_like(tensor) for tensor in state.values()]
    buffer = stage(bundle_of(state), None)
    for _ in range(rounds):
        paths = {}
        for number, (name, save) in enumerate(SAVES.items()):
            paths[name] = folder / f"case{number}"
            start = time.perf_counter()
            save(state, paths[name])
            saves[name].append(time.perf_counter() - start)
        for name, (source, load) in LOADS.items():
            start = time.perf_counter()
            load(state, paths[source])
            loads[name].append(time.perf_counter() - start)
        for path in paths.values():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        start = time.perf_counter()
        for into, tensor in zip(target, state.values(), strict=True):
            into.copy_(tensor)
        copies.append(time.perf_counter() - start)
        start = time.perf_counter()
        buffer = stage(bundle_of(state), buffer)
        stalls.append(time.perf_counter() - start)
    return saves, loads, copies, stalls


def table(title: str, times: dict[str, list[float]], gigabytes: float, ours: str) -> list[str]:
    lines = [f"| {title} | seconds, median (range) | GB/s | time / lt_zero's |", "|---|---|---|---|"]
    own = statistics.median(times[ours])
    for name, values in times.items():
        middle = statistics.median(values)
        paired = statistics.median(v / o for v, o in zip(values, times[ours], strict=True))
        spread = f"{middle:.2f} ({min(values):.2f}-{max(values):.2f})"
        lines.append(f"| {name} | {spread} | {gigabytes / middle:.2f} | {middle / own:.2f} (paired {paired:.2f}) |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = args.path / f"lt_zero-bench-{os.getpid()}"
    folder.mkdir()
    try:
        saves, loads, copies, stalls = measure(args.gb, args.rounds, folder)
    finally:
        shutil.rmtree(folder)
    lines = table("save until durable", saves, args.gb, "lt_zero")
    lines += table("load", loads, args.gb, "lt_zero (checked)")
    copy, stall = statistics.median(copies), statistics.median(stalls)
    lines.append(
        f"An asynchronous save stops training for {stall:.3f} s; a plain copy takes {copy:.3f} s: {stall / copy:.2f}."
    )
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
