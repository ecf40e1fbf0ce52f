"""Saving and loading sharded checkpoints: time until the bytes are on the disk, and what stops training meanwhile.

    python benchmarks/checkpoint.py [--gb 1.0] [--rounds 5] [--path /tmp] [--out results.md]

One process, tensors of 16 MiB in fp32; all ways in each round, in turn. "durable" includes an fsync of every file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from measuring import Rounds, finish, interleaved, markdown, ratio, remove, scratch, timed
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


def raw_read(state: State, path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        for tensor in state.values():
            file.readinto(torch.empty_like(tensor).numpy().data)


LOADS: dict[str, tuple[str, Callable[[State, Path], object]]] = {
    "plain read": ("plain write, fsync", raw_read),
    "torch.load": ("torch.save", lambda state, path: torch.load(path, weights_only=True)),
    "safetensors": ("safetensors", lambda state, path: safetensors.torch.load_file(path)),
    "DCP": ("DCP, default writer", dcp_load),
    "lt_zero (checked)": ("lt_zero", zero_load),
}


def measure_saves(state: State, rounds: int, folder: Path) -> Rounds:
    """Seconds until the bytes are on the disk."""

    def case(save: Callable[[State, Path], None]) -> float:
        path = folder / "saved"
        seconds = timed(partial(save, state, path))()
        remove(path)
        return seconds

    return interleaved({name: partial(case, save) for name, save in SAVES.items()}, rounds)


def measure_loads(state: State, rounds: int, folder: Path) -> Rounds:
    """Seconds until the tensors are in memory; the files are in the page cache."""
    paths = {name: folder / f"case{number}" for number, name in enumerate(SAVES)}
    for name, save in SAVES.items():
        save(state, paths[name])
    cases = {name: timed(partial(load, state, paths[source])) for name, (source, load) in LOADS.items()}
    found = interleaved(cases, rounds)
    for path in paths.values():
        remove(path)
    return found


def measure_stalls(state: State, rounds: int) -> Rounds:
    """Seconds for which an asynchronous save stops training, and of a copy."""
    target, kept = [torch.empty_like(tensor) for tensor in state.values()], stage(bundle_of(state), None)

    def copy() -> None:
        for into, tensor in zip(target, state.values(), strict=True):
            into.copy_(tensor)

    return interleaved({"copy": timed(copy), "stall": timed(lambda: stage(bundle_of(state), kept))}, rounds)


def table(title: str, times: Rounds, gigabytes: float, ours: str) -> list[str]:
    rows, own = [], statistics.median(times[ours])
    for name, values in times.items():
        middle = statistics.median(values)
        spread = f"{middle:.2f} ({min(values):.2f}-{max(values):.2f})"
        share = f"{middle / own:.2f} (paired {ratio(values, times[ours]).median:.2f})"
        rows.append([name, spread, f"{gigabytes / middle:.2f}", share])
    return [*markdown([title, "seconds, median (range)", "GB/s", "time / lt_zero's"], rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    state = make_state(args.gb)
    with scratch(args.path) as folder:
        lines = table("save until durable", measure_saves(state, args.rounds, folder), args.gb, "lt_zero")
        lines += table("load", measure_loads(state, args.rounds, folder), args.gb, "lt_zero (checked)")
    stalls = measure_stalls(state, args.rounds)
    copy, stall = statistics.median(stalls["copy"]), statistics.median(stalls["stall"])
    lines.append(
        f"An asynchronous save stops training for {stall:.3f} s; a plain copy takes {copy:.3f} s: {stall / copy:.2f}."
    )
    finish(lines, args.out)


if __name__ == "__main__":
    main()
