"""Saving and loading sharded checkpoints: time until the bytes are on the disk, and what stops training meanwhile.

    python benchmarks/checkpoint.py [--gb 1.0] [--rounds 5] [--path /tmp] [--out results.md]

One process, tensors of 16 MiB in fp32; all ways in each round, in turn. "durable" includes an fsync of every file.
Then two processes, and a model of 5,000 parameters of 4 x 4 and 4 elements with its AdamW: what a save costs beside the
bytes. lt_zero's time is that of all of ``save_checkpoint``; FSDP2's is that of DCP's ``save`` of a collected state.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from measuring import Rounds, finish, interleaved, markdown, ratio, remove, scratch, sync, timed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import PendingDirectory
from lt_zero.checkpoint.native.pieces import Fragment
from lt_zero.checkpoint.native.save import Bundle, stage, write
from lt_zero.core.comm.world import World

MIB = 1 << 20
State = dict[str, Tensor]


def make_state(gigabytes: float) -> State:
    count = max(1, round(gigabytes * 1e9 / (16 * MIB)))
    return {f"model.{i}": torch.randn(4 * MIB) for i in range(count)}


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
    write(bundle_of(state), PendingDirectory.make(str(path)), World(None, torch.device("cpu")), None)


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


# ---- many small tensors ----------------------------------------------------------------------------------------------


def measure_small_saves(parameters: int, rounds: int, folder: Path, stage: int = 3) -> Rounds:
    """Seconds to save a model of small parameters and its AdamW from 2 ranks on the CPU, until durable."""
    mp.spawn(_save_small, (parameters, rounds, folder, stage), nprocs=2)
    found: Rounds = json.loads((folder / "small.json").read_text())
    return found


def _save_small(rank: int, parameters: int, rounds: int, folder: Path, stage: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def small(wrap: Callable[[nn.Module], object]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(parameters // 2)))
        wrap(model)
        return model, torch.optim.AdamW(model.parameters())

    model, adam = small(fully_shard)
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    moments = {str(number): state for number, state in adam.state_dict()["state"].items()}
    state = {"model": model.state_dict(), "optimizer": moments}
    model, adam = small(lambda _: None)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine = lt_zero.initialize(model=model, optimizer=adam, config=config, dist_init_required=False)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()

    def seconds(save: Callable[[], object]) -> float:
        dist.barrier()
        return timed(save, dist.barrier)()

    cases = {
        "lt_zero": partial(engine.save_checkpoint, folder, tag="small"),
        "DCP, FSDP2": partial(dcp.save, state, checkpoint_id=folder / "small_dcp"),
    }
    found = interleaved({name: partial(seconds, save) for name, save in cases.items()}, rounds)
    if rank == 0:
        (folder / "small.json").write_text(json.dumps(found))
    dist.destroy_process_group()


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
        small = measure_small_saves(5000, args.rounds, folder)
        lines += table("save of 5,000 small parameters", small, 5000 * 10 * 12e-9, "lt_zero")
    stalls = measure_stalls(state, args.rounds)
    copy, stall = statistics.median(stalls["copy"]), statistics.median(stalls["stall"])
    lines.append(
        f"An asynchronous save stops training for {stall:.3f} s; a plain copy takes {copy:.3f} s: {stall / copy:.2f}."
    )
    finish(lines, args.out)


if __name__ == "__main__":
    main()
