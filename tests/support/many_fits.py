"""Many fits in one process, and what each of them leaves: descriptors, threads, groups, files and objects.

As a script it runs on two ranks, with the store of a real run (the tests' pool has one in a file), and prints a table:

    python -m tests.support.many_fits tensor trainer 100 256    # mesh, face, fits, ulimit -n
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import lightning as L
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.common.compat import process_groups
from lt_zero.common.descriptors import raise_limit
from lt_zero.common.ports import free_port
from lt_zero.parallel import Pipeline, PipelineModule
from tests.support import sequences
from tests.support.launchers import environment
from tests.support.lightning_tools import sharded_trainer, torchrun_env
from tests.support.mixtures import Mixture, square
from tests.support.models import WIDTH, Net, next_token_loss
from tests.support.pipelines import batch as texts
from tests.support.pipelines import mean_loss, specs

STEPS = 2
FACES = ["trainer", "fabric", "loop"]
_RULES = [
    {"patterns": [".*up.weight"], "partition_type": "column"},
    {"patterns": [".*down.weight"], "partition_type": "row"},
]


class Kind(NamedTuple):
    """What is trained.

    ``build``: the model. ``loss``: of it, for the number of a step (or a batch of sequences) and a data rank.
    ``zero``: keys of the zero_optimization block; ``keys``: of the top level.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Any, int, int], Tensor]
    zero: dict[str, Any]
    keys: dict[str, Any]


def _cuttable() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        block.up, block.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
    return net


class _Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pipe = Pipeline(specs(), loss_fn=mean_loss)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.pipe(x, y)


def _next_token(net: Any, step: int, rank: int) -> Tensor:
    return next_token_loss(net, step, 0, rank)


def _staged(net: Any, step: int, rank: int) -> Tensor:
    loss: Tensor = net(*texts(step, 0))
    return loss


_PLAIN = partial(Kind, _cuttable, _next_token)
KINDS: dict[str, Kind] = {
    "none": _PLAIN({}, {}),
    "mics": _PLAIN({"mics_shard_size": 1}, {}),
    "hpz": _PLAIN({"zero_hpz_partition_size": 1, "zero_quantized_weights": True, "zero_quantized_gradients": True}, {}),
    "nvme": _PLAIN({"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}, {}),
    "tensor": _PLAIN({}, {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": _RULES}}}),
    "sequence": Kind(sequences.Decoder, lambda net, step, rank: net(**step), {}, {"sequence_parallel_size": 2}),
    "expert": Kind(Mixture, square, {}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    "pipeline": Kind(_Staged, _staged, {}, {"pipeline": {"stages": 2, "num_microbatches": 2}}),
}


class Module(pl.LightningModule):
    """Makes its own batches, except those that are cut."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.net: Any = None

    def configure_model(self) -> None:
        self.net = self.kind.build() if self.net is None else self.net

    def training_step(self, batch: Any, index: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        loss = self.kind.loss(
            self.net, batch if isinstance(batch, dict) else index, strategy.session.division.data_rank
        )
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        if "sequence_parallel_size" in self.kind.keys:
            return DataLoader(sequences.Rows(STEPS), batch_size=1, collate_fn=sequences.first)
        return DataLoader(torch.arange(STEPS), batch_size=1)  # type: ignore[arg-type]


def _trainer(kind: Kind, zero: dict[str, Any], folder: str) -> None:
    how = {"max_steps": STEPS, "use_distributed_sampler": False}
    trainer = sharded_trainer(3, zero, {"checkpoint": {"async": True, "format": "sharded"}, **kind.keys}, **how)
    trainer.fit(Module(kind))
    trainer.save_checkpoint(f"{folder}/saved")


def _fabric(kind: Kind, zero: dict[str, Any], folder: str) -> None:
    os.environ.update(torchrun_env())
    config = {"zero_optimization": zero, "checkpoint": {"async": True, "format": "sharded"}, **kind.keys}
    strategy = FabricZeroStrategy(config=config)
    fabric: Any = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    net = kind.build()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    source = Module(kind).train_dataloader()
    for index, batch in enumerate(fabric.setup_dataloaders(source, use_distributed_sampler=False)):
        fabric.backward(
            kind.loss(model, batch if isinstance(batch, dict) else index, strategy.session.division.data_rank)
        )
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer})
    strategy.wait_for_save()


def _loop(kind: Kind, zero: dict[str, Any], folder: str) -> None:
    config = {"zero_optimization": zero, "checkpoint": {"async": True}, **kind.keys}
    config["train_micro_batch_size_per_gpu"] = 2
    if "pipeline" in kind.keys:
        torch.manual_seed(0)
        net: nn.Module = PipelineModule(specs(), num_stages=2, loss_fn=mean_loss)
        config["gradient_accumulation_steps"] = 2
    else:
        net = kind.build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine: Any = lt_zero.initialize(model=net, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        if "pipeline" in kind.keys:
            engine.train_batch(texts(step, 0, 2) for _ in range(2))
            continue
        batch = sequences.whole(sequences.batch_of(step)) if "sequence_parallel_size" in kind.keys else step
        engine.backward(kind.loss(engine, batch, engine.session.division.data_rank))  # type: ignore[arg-type]
        engine.step()
    engine.save_checkpoint(folder, "saved")
    engine.destroy()


class Held(NamedTuple):
    """What a process has.

    ``shared``: mappings of shared memory. ``files``: of its own in /dev/shm, and of all ranks in the temporary folder.
    """

    descriptors: int
    threads: int
    groups: int
    shared: int
    files: int

    @classmethod
    def now(cls) -> Held:
        with open("/proc/self/maps", encoding="utf-8") as file:
            shared = sum("memfd:lt_zero" in line for line in file)
        files = sum(f"_{os.getpid()}_" in name for name in os.listdir("/dev/shm"))
        files += len(os.listdir(tempfile.gettempdir()))
        counts = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
        return cls(*counts, len(process_groups()), shared, files)


class Left(NamedTuple):
    """What fits have left.

    ``held``: after each fit, without a collection of garbage. ``grown``: objects of Python, by their type, of which
    there are more after the last fit than after the third, both after a collection. ``memory``: kilobytes, at these
    two.
    """

    held: list[Held]
    grown: Counter[str]
    memory: list[int]


def fits(name: str, face: str, count: int, folder: str, limit: int = 0) -> Left:
    """What ``count`` fits leave; ``limit``: of descriptors, while this runs."""
    raise_limit()  # now, as a run would raise the one that is set here
    kind, limits = KINDS[name], resource.getrlimit(resource.RLIMIT_NOFILE)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **kind.zero}
    for key in ("offload_optimizer", "offload_param"):
        if key in zero:
            zero[key] = {**zero[key], "nvme_path": f"{folder}/nvme"}
    temporary, tempfile.tempdir = tempfile.tempdir, f"{folder}/temporary"
    os.makedirs(tempfile.tempdir, exist_ok=True)
    if limit:
        others = max(map(int, os.listdir("/proc/self/fd")))  # of what this process did before
        resource.setrlimit(resource.RLIMIT_NOFILE, (others + limit, limits[1]))
    held, objects, memory = list[Held](), list[Counter[str]](), list[int]()
    try:
        for number in range(count):
            {"trainer": _trainer, "fabric": _fabric, "loop": _loop}[face](kind, dict(zero), folder)
            held.append(Held.now())
            if number in (2, count - 1):
                gc.collect()
                memory.append(_resident())
                objects.append(Counter(type(found).__qualname__ for found in gc.get_objects()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        tempfile.tempdir = temporary
    return Left(held, objects[-1] - objects[0], memory)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * (resource.getpagesize() // 1024)


def main() -> None:
    if "RANK" not in os.environ:
        named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        named |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        command = [sys.executable, "-m", "tests.support.many_fits", *sys.argv[1:]]
        with tempfile.TemporaryDirectory() as folder:
            numbers = ({"RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": folder} for rank in range(2))
            ranks = [subprocess.Popen(command, env=environment(**named, **number)) for number in numbers]
            sys.exit(max(abs(rank.wait()) for rank in ranks))
    meshes, faces, count, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    lt_zero.init_distributed()
    for mesh, face in product(meshes.split(","), faces.split(",")):
        began = time.monotonic()
        left = fits(mesh, face, count, tempfile.gettempdir(), limit)
        kept = [f"{name} {sorted({getattr(held, name) for held in left.held[2:]})}" for name in Held._fields]
        print(
            f"rank {dist.get_rank()} {mesh} {face}, {count} fits in {time.monotonic() - began:.0f} s, after the third:"
            f" {'; '.join(kept)}; objects {left.grown.most_common(12)}; KiB {left.memory}",
            flush=True,
        )


if __name__ == "__main__":
    main()
