"""What one of thousands of ranks does beside training: set-up, and the plans of saves and loads.

    python benchmarks/rank_of_many.py [--ranks 4096] [--rank 1234] [--mesh] [--divide 1]

The rank is alone, over torch's fake backend: collectives return its own values at once. The model has the 723 tensors
of Llama 2 70B, with --divide 1 in their sizes: other widths change neither the number of tensors nor of ranks. It is on
the meta device, and initializing sets its weights to zero: how fast random numbers are drawn is not measured.
--mesh: 8 tensor ranks, 4 stages, and data ranks at stage 1; else all are data ranks at stage 3.

Of a save the rank plans what it writes, and rank 0, with the plans of all ranks, which of them writes what. Of a load
the rank reads a manifest of all ranks, looks at its share of the files, which are here, but empty, and finds its own
elements. How long one rank would take for all files is shown, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import give, memory
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp
from torch.testing._internal.distributed.fake_pg import FakeStore

import lt_zero
from lt_zero.checkpoint.native import pieces, save
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.chunks import meeting
from lt_zero.checkpoint.native.directory import MANIFEST, Manifest
from lt_zero.checkpoint.native.plan import BoxesByName, divide, part_of
from lt_zero.common.boxes import Box, cut_range
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.stores.checked_file import STEP, FileRecord
from lt_zero.parallel import LayerSpec
from lt_zero.parallel.pipeline.module import PipelineModule

TENSOR = 8
STAGES = 4
LAYERS = 80
WIDTH = 8192
HIDDEN = 28672
SHARED = 1024
VOCABULARY = 32000
RULES = [
    {"patterns": [r".*\.(q|k|v|gate|up)\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.(o|down)\.weight"], "partition_type": "row"},
]
STATES = ("exp_avg", "exp_avg_sq")  # of Adam
Row = dict[str, dict[str, float]]


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Block(nn.Module):
    """The parameters of a block of Llama."""

    def __init__(self, width: int, hidden: int, shared: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = 64, 8
        self.norm1, self.norm2 = Scale(width), Scale(width)
        self.q, self.k, self.v, self.o = (Linear(width, n) for n in (width, shared, shared, width))
        self.gate = Linear(width, hidden)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("only its parameters count here")


def layers(by: int) -> list[LayerSpec]:
    """The layers of a model whose widths are divided ``by`` this."""
    width = WIDTH // by
    hidden = HIDDEN // by
    shared = SHARED // by
    words = VOCABULARY // by
    blocks = [LayerSpec(Block, width, hidden, shared) for _ in range(LAYERS)]
    return [LayerSpec(Embedding, words, width), *blocks, LayerSpec(Scale, width), LayerSpec(Linear, width, words)]


def started(by: int, mesh: bool) -> tuple[Engine, Any]:
    """The engine of this rank, and its sharded optimizer."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1 if mesh else 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW"},
    }
    if mesh:
        config["tensor_parallel"] = {"autotp_size": TENSOR, "partition_config": {"layer_specs": RULES}}
    with torch.device("meta"):
        specs = layers(by)
        if mesh:
            model: nn.Module = PipelineModule(specs, num_stages=STAGES, seed_layers=True)
        else:
            model = nn.Sequential(*(spec.build() for spec in specs))
    made, *_ = lt_zero.initialize(model=model, config=config)
    sharded = lt_zero.ShardedOptimizer.of(made.optimizer)
    return sharded.engine, sharded


def fill_states(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the states that steps would have made."""
    for bucket in engine.buckets:
        for index, parameter in enumerate(bucket.params):
            numel = sum(piece.numel for piece in bucket.pieces_of(index))
            if numel:
                states = {key: torch.zeros(numel) for key in STATES}
                optimizer.state[parameter] = {"step": torch.tensor(1.0), **states}


def plans_of_all(engine: Engine, mesh: bool) -> list[BoxesByName]:
    """What each rank has, as it would tell rank 0. Stages of a pipeline have as many tensors as this rank's."""
    tensor, stages = (TENSOR, STAGES) if mesh else (1, 1)
    of_stage = engine.world.size // stages
    plans: list[dict[str, Any]] = [{} for _ in range(engine.world.size)]
    for rank, plan in enumerate(plans):
        stage, member = divmod(rank, of_stage)
        part = member % tensor
        for bucket in engine.buckets:
            # Buckets of whole tensors are sharded over all ranks of a stage, others over those with the same part.
            whole = bucket.group.size == of_stage
            lo, hi = bucket.layout.shard(member if whole else member // tensor)
            first = stage * of_stage + (0 if whole else part)
            for piece in bucket.layout.pieces(lo, hi):
                spec = bucket.layout.spans[piece.index].spec
                box = _part(spec.local_box, spec.global_shape, part)
                for name in _names(f"{stage}.{spec.name}" if mesh else spec.name):
                    plan[name] = part_of(spec.global_shape, torch.float32, box, piece.lo, piece.hi, first)
    return plans


def _part(box: Box, shape: tuple[int, ...], part: int) -> Box:
    """The box of another tensor rank."""
    cut = [size != length for size, length in zip(box.sizes, shape, strict=True)]
    offsets = tuple(part * size if at else 0 for size, at in zip(box.sizes, cut, strict=True))
    return Box(offsets, box.sizes)


def _names(name: str) -> list[str]:
    return [f"model.{name}", *(f"optimizer_0.state.{name}.{key}" for key in STATES)]


def written(divided: list[dict[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, FileRecord]]:
    """The places of all tensors, as ranks tell them when they have written, and their files."""
    places: dict[str, list[Any]] = {}
    files: dict[str, FileRecord] = {}
    for rank, own in enumerate(divided):
        ends = {f"{kind}-{rank:05d}.pt": 0 for kind in ("weights", "moments")}
        weights, moments = ends
        for name, part in own.items():
            file, starts = moments if name.startswith("optimizer_") else weights, []
            for box in part.boxes:
                starts.append((ends[file] + 600, ends[file], box.numel * 4 + 1500))
                ends[file] += box.numel * 4 + 1500
            places.setdefault(name, []).append((file, part, starts))
        files |= {file: FileRecord(end, (0,) * -(-end // STEP)) for file, end in ends.items()}
    return places, files


def write_checkpoint(folder: Path, text: bytes, files: dict[str, FileRecord]) -> None:
    """Write a manifest, and files of its lengths, which take no space on the disk."""
    (folder / MANIFEST).write_bytes(text)
    for name, record in files.items():
        with (folder / name).open("wb") as file:
            file.truncate(record.nbytes)


class Phases:
    """Seconds of this process's CPU, and the growth of its peak of memory in MiB, of each phase."""

    def __init__(self) -> None:
        self.rows: Row = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak begins anew
        before, start = memory(), time.process_time()
        yield
        seconds = time.process_time() - start
        self.rows[name] = {"seconds": seconds, "MiB": max(0.0, memory("VmHWM") - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=1234)
    parser.add_argument("--mesh", action="store_true")
    parser.add_argument("--divide", type=int, default=1, help="widths of the model by this, which divides them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    __import__("torch._dynamo")  # optimizers import it when first used
    os.environ["LT_ZERO_MEMORY_CHECK"] = "0"  # this machine has room for one rank, not for all that are simulated
    # The fake backend broadcasts nothing: what rank 0 would send is what this rank has.
    Ranks.host_broadcast = lambda self, value, name: value  # type: ignore[method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.ranks)
    phase, rank = Phases(), args.rank
    with phase("set-up"):
        engine, sharded = started(args.divide, args.mesh)
    fill_states(engine, sharded.optimizer)
    with phase("save: content"):
        states = {"state_dict": pieces.weight_fragments(engine)}
        packed = pieces.optimizer_fragments(sharded)
        names = [pieces.parameter_names(sharded.optimizer, engine)]
        made = save.bundle({**states, "optimizer_states": [packed]}, names, engine.world, {}, {})
    with phase("save: plan of the rank"):
        own = save.DirectoryWriter(None, made, rank).own_parts()  # type: ignore[arg-type]
    plans = plans_of_all(engine, args.mesh)
    with phase("save: rank 0 divides"):
        divided = divide(plans)
    places, files = written(divided)
    with phase("save: rank 0 describes"):
        metadata = dcp.Metadata({})
        tensors = save._describe(metadata, places, {})
        text = Manifest(tensors, files).dump().encode()
    boxes = sum(len(part.boxes) for plan in divided for part in plan.values())
    del plans, divided, places, tensors, metadata
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), text, files)
        with phase("load: manifest"):
            archive = Archive(folder, checks_files=False)
        with phase("load: the rank's share of the files"):
            archive.check_files(rank, args.ranks)
        with phase("load: all files, by one rank"):
            archive.check_files()
    manifest = archive.manifest
    with phase("load: plan of the rank"):
        found = sum(len(_found(manifest, bucket, args, name)) for bucket in engine.buckets for name in (0, 1, 2))
    give(
        {
            "phases": phase.rows,
            "entries": len(own),
            "boxes": sum(len(part.boxes) for part in own.values()),
            "of all": boxes,
            "found": found,
            "files": len(files),
            "looked at": len(range(rank, len(files), args.ranks)),
            "manifest": len(text),
            "parameters": sum(bucket.layout.elements for bucket in engine.buckets),
        }
    )
    os._exit(0)  # tearing down groups one rank at a time may hang


def _found(manifest: Manifest, bucket: Bucket, args: argparse.Namespace, number: int) -> list[Any]:
    """The chunks of this rank's elements of a bucket, of weights (number 0) or of a state."""
    stage, found = args.rank // (args.ranks // STAGES), list[Any]()
    for piece in bucket.pieces:
        spec = bucket.layout.spans[piece.index].spec
        name = _names(f"{stage}.{spec.name}" if args.mesh else spec.name)[number]
        boxes = [part.shifted(spec.local_box.offsets) for part in cut_range(spec.shape, piece.lo, piece.hi)]
        found += meeting(manifest.tensors[name].chunks, boxes)
    return found


if __name__ == "__main__":
    main()
