"""Training steps on a simulated device with streams, and bugs that are planted in the code that waits."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.checkpoint.native import save
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.native.save import Bundle
from lt_zero.common import accelerator
from lt_zero.config.options import group_options
from lt_zero.config.precision import dtype_policy
from lt_zero.core.ask import configure_group
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.core.step.loss_scale import _SkipFlag
from lt_zero.core.stores.checked_file import Sink, StagingRing
from lt_zero.features import features_of
from lt_zero.kernels import dispatch, library
from lt_zero.parallel.mesh import mesh_of
from lt_zero.training import checkpoints
from lt_zero.training.checkpoints import Saver, Saving
from tests.support.features import there
from tests.support.happens_before import HOST, Clock, Order, places
from tests.support.simulated import LateGroup
from tests.support.simulated_device import machine
from tests.support.simulated_nccl import streams

CPU = torch.device("cpu")
_CUT = [
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
]
TENSOR: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": _CUT}}}  # of Feed


@dataclass(frozen=True)
class Run:
    """A few training steps.

    Attributes:
        stage: of ZeRO.
        zero, keys: of the configuration: in its zero_optimization block, and beside it.
        precision: as of a Trainer.
        peer: there is a second rank, whose collectives end as late as they may (without other processes).
        skips: a validation follows, in which the last block is not used, although it was prefetched.
        averages: after each step come validations with the averages of the weights, and with the weights.
        saves: after the second step a save begins in the background, whose writer reads while the fourth one runs; then
            another, which takes over its buffer.
        groups: the wide half of the parameters is in a group of its own, over all ranks, too.
        nodes: to which the ranks belong, as if they were apart.
        accumulates: the first micro-batch of a step is inside of ``no_sync``.
        steps: optimizer steps of two micro-batches each.
        optimizer: makes it of parameters and ``lr``.
        kernels: there are native kernels; what they read and write is not seen.
    """

    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16-mixed"
    peer: bool = False
    skips: bool = False
    averages: bool = False
    saves: bool = False
    groups: bool = False
    nodes: int = 1
    accumulates: bool = False
    steps: int = 4
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    kernels: bool = False


class Feed(nn.Module):
    """A block with weights of several sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Sequential):
    """Blocks, of which the last is left out if ``skips``."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self)[: -1 if self.skips else None]:
            x = block(x)
        return x


def config_of(run: Run, folder: Path | None) -> ZeroConfig:
    """The configuration of a run, with its files in ``folder``. Raises ConfigError."""
    zero = {"stage": run.stage, "stage3_param_persistence_threshold": 0, **run.zero}
    if folder is not None:
        # Folders of files are not known before the test runs.
        for block in ("offload_optimizer", "offload_param"):
            if zero.get(block, {}).get("device") == "nvme":
                zero[block] = {**zero[block], "nvme_path": str(folder)}
    keys = {**run.keys}
    if folder is not None and keys.get("activation_checkpointing", {}).get("nvme_path") == "":
        keys["activation_checkpointing"] = {**keys["activation_checkpointing"], "nvme_path": str(folder)}
    return ZeroConfig.of({"zero_optimization": zero, **keys})


class _Saves:
    """Saves of a run in the background. The thread that writes has a clock of its own, and reads late.

    Args:
        order: of the machine.
        folder: for the checkpoints.
        save: begins one, as the face of a run does.
    """

    def __init__(self, order: Order, folder: Path, save: Callable[[Saver, str], None]) -> None:
        self._order = order
        self._folder = folder
        self._save = save
        self._saver = Saver()
        self._gates: dict[int, tuple[threading.Event, Clock]] = {}  # by the id of what is written

    def begin(self, name: str) -> None:
        self._save(self._saver, str(self._folder / f"{name}-{os.getpid()}"))

    def write(self) -> None:
        """Let the writers go on."""
        for go, _ in self._gates.values():
            go.set()

    def end(self, world: World) -> None:
        self.write()
        self._saver.wait(world)

    @contextmanager
    def late(self) -> Iterator[None]:
        """Context in which writers wait for ``write``, and the order of what they read is checked."""

        def staged(made: Bundle, buffer: Tensor | None) -> Tensor:
            copied = stage(made, buffer)
            self._gates[id(made)] = threading.Event(), order.snapshot(HOST)
            return copied

        def written(made: Bundle, *given: Any) -> None:
            go, begun = self._gates[id(made)]
            assert go.wait(200)
            with order.apart("writer", begun):
                for value in made.tensors.values():
                    copy = value.local() if isinstance(value, Fragment) else value
                    order.access(copy, False, order.host, order.launch(order.host), "write to a checkpoint")
                # All else that a writer does is work of the host, on memory of its own.
                with _disable_current_modes():
                    write(made, *given)

        def waited(pending: list[Any], *given: Any) -> Any:
            ended = futures.wait(pending, *given)
            order.wait(HOST, order.snapshot("writer"))
            return ended

        order = self._order
        stage = checkpoints.stage
        write = checkpoints.write
        with (
            mock.patch.object(checkpoints, "stage", staged),
            mock.patch.object(checkpoints, "write", written),
            mock.patch.object(checkpoints, "futures", SimpleNamespace(wait=waited)),
            mock.patch.object(accelerator, "in_use", return_value=True),
        ):
            try:
                yield
            finally:
                self.write()
                self._saver.close()


def _average(engine: Any) -> Any:
    from lt_zero.features.ema.average import WeightAverage  # such runs are skipped where it was taken out

    return WeightAverage(engine)


def _train(run: Run, config: ZeroConfig, group: ShardGroup | None, order: Order, folder: Path | None) -> None:
    torch.manual_seed(0)
    model = Model(*(Feed(32) for _ in range(4)))
    engine = lt_zero.shard(model, config, CPU, **_groups(run, config, group, model))
    optimizer = run.optimizer(model.parameters(), lr=1e-3)
    owner = lt_zero.ShardedOptimizer(engine, optimizer)
    average = _average(engine) if run.averages else None

    def save(saver: Saver, path: str) -> None:
        content = {"state_dict": weight_fragments(engine), "optimizer_states": [optimizer_fragments(owner)]}
        made = Saving(content, [parameter_names(optimizer, engine)], config, {}, run.precision)
        saver.save(made, path, engine.world, background=True)

    saves = _Saves(order, folder, save) if run.saves and folder is not None else None
    with saves.late() if saves is not None else nullcontext():
        for step in range(run.steps):
            x = _run_backward(run, model, owner, step)
            if saves is not None and step == 3:
                saves.write()
            if step % 2:
                owner.grads.clip_norm(0.5)
            optimizer.step()
            if saves is not None and step % 2:
                saves.begin(f"step {step}")
            if average is not None:
                average.update(0.5)
                for averaged in (True, False):
                    with average.showing(averaged), torch.no_grad():
                        model(x)
        if saves is not None:
            saves.end(engine.world)
    if run.skips:
        model.skips = True
        with torch.no_grad():
            model(torch.randn(8, 32).bfloat16())
    engine.finish_steps()
    engine.offload_manager.close()


def _groups(run: Run, config: ZeroConfig, group: ShardGroup | None, model: Model) -> dict[str, Any]:
    """Arguments of ``lt_zero.shard``: which ranks share the parameters of ``model``, of which it may get parts."""
    how: dict[str, Any] = {"group": group, "policy": dtype_policy(config, run.precision)}
    mesh = mesh_of(config, group.world) if group is not None else None
    if group is not None and mesh is not None:
        mesh.cut(model, config)
        how |= mesh.arguments(model, group, config)
    elif group is not None and run.groups:
        wide = ShardGroup(group.world, [range(group.size)], divisor=group.size)
        how["group_of"] = lambda name, parameter: wide if ".up." in name else group
    return how


def _run_backward(run: Run, model: Model, owner: lt_zero.ShardedOptimizer, step: int) -> Tensor:
    """The forwards and backwards of a step; returns the last input."""
    owner.optimizer.zero_grad()
    for micro in range(2):
        # Every other step begins while the last backward runs, where steps may overlap with it.
        beside = owner.overlap.beside_backward() if micro and step % 2 == 0 else nullcontext()
        with beside, owner.engine.no_sync() if run.accumulates and not micro else nullcontext():
            x = torch.randn(8, 32, device=CPU).to(torch.bfloat16 if "bf16" in run.precision else torch.float32)
            model(x).float().square().mean().backward()
    return x


@contextmanager
def _references() -> Iterator[None]:
    """Context without native kernels, whose accesses torch does not see, and in which small tensors are stored, too."""
    saved = "activation_checkpointing"
    with (
        mock.patch.dict(dispatch._loaded, clear=True),
        mock.patch.object(library, "cpu", return_value=None),
        mock.patch(f"lt_zero.features.{saved}.stores._MIN_BYTES", 1) if there(saved) else nullcontext(),
    ):
        yield


@contextmanager
def _machine_of(run: Run, folder: Path | None) -> Iterator[tuple[Order, ZeroConfig, ShardGroup | None]]:
    """The order of a machine on which ``run`` may be carried out, its configuration, and its ranks. Collective."""
    config = config_of(run, folder)
    with ExitStack() as stack:
        order = stack.enter_context(machine())
        if "reproducible" in run.keys:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        group: ShardGroup | None = None
        if run.peer:
            group = LateGroup(CPU)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            world = World(stack.enter_context(streams(order)), CPU)
            world.nodes = [part.tolist() for part in torch.arange(world.size).chunk(run.nodes)]
            group = ShardGroup.of_all(world)
            configure_group(group, group_options(config), features_of(config))
        yield order, config, group


def hazards(run: Run, folder: Path | None = None) -> list[str]:
    """The hazards of ``run``, each once. Collective if there are several ranks: their collectives run in streams."""
    with _references(), _machine_of(run, folder) as (order, config, group):
        _train(run, config, group, order, folder)
    assert order.works > 500, "the device has done nothing"
    assert len(order.clocks) > 2 or run.stage == 0, "nothing ran beside the computation"
    return list(dict.fromkeys(order.hazards))


def hazards_of_a_save() -> list[str]:
    """The hazards of a checkpoint that is written in the background, while training changes the weights."""
    with machine() as order, mock.patch.object(accelerator, "in_use", return_value=True):
        weight = torch.randn(100).mul(2.0)
        made = save.Bundle({"weight": weight, "step": torch.ones(()).add(1)})
        save.stage(made, None)
        weight.add_(1.0)
        for copy in made.tensors.values():
            copy.clone()  # as the writer reads it
    return list(dict.fromkeys(order.hazards))


class _LateSink(Sink):
    """A file that reads what it is given as late as it may."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []
        self._late, self._end = list[tuple[int, Tensor]](), 0

    @property
    def position(self) -> int:
        return self._end

    def write(self, data: bytes | Tensor) -> None:
        assert isinstance(data, Tensor)
        self._late.append((self._end, data))
        self._end += data.numel()

    def wait_written(self, until: int | None = None) -> None:
        while self._late and (until is None or self._late[0][0] < until):
            self.read.append(self._late.pop(0)[1].clone())


def hazards_of_a_foreground_save() -> list[str]:
    """The hazards of tensors that go into a file through two buffers; and whether it has other values in the end."""
    with machine() as order:
        tensors = [torch.randn(numel).mul(2.0) for numel in (3, 100, 0, 5, 16)]
        sink = _LateSink()
        ring = StagingRing(64)
        for tensor in tensors:
            for part in ring.parts(tensor, sink):
                sink.write(part.view(torch.uint8))
        sink.wait_written()
    same = torch.equal(torch.cat(sink.read).view(torch.float32), torch.cat(tensors))
    return [*dict.fromkeys(order.hazards), *([] if same else ["the file has other values"])]


def hazards_of_a_skipped_step() -> list[str]:
    """The hazards of a flag, by which the device tells that it has skipped a step."""
    with machine() as order:
        flag = _SkipFlag(torch.zeros(()).add(1), cast(Any, None), cast(Any, None))
        assert flag.wait()
    return list(dict.fromkeys(order.hazards))


@dataclass(frozen=True)
class Bug:
    """An edit of a function that leaves out a wait, or makes it too late.

    Attributes:
        where: the function, as ``module:Class.function``.
        old, new: a part of its text, and what replaces it.
        run: the one in which it shows.
        missed: why the checker cannot see it; "": it does.
    """

    where: str
    old: str
    new: str
    run: str
    missed: str = ""


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Context in which the function of ``bug`` has its edited text."""
    module_name, _, path = bug.where.partition(":")
    module = __import__(module_name, fromlist=["_"])
    *outer, name = path.split(".")
    owner: Any = module
    for part in outer:
        owner = getattr(owner, part)
    function = inspect.getattr_static(owner, name)
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))
    assert text.count(bug.old) == 1, f"{bug.where} has {bug.old!r} {text.count(bug.old)} times"
    text = text.replace(bug.old, bug.new)
    if outer:
        text = text.replace("super()", f"super({outer[-1]}, self)")
    made: dict[str, Any] = {}
    exec(compile(text, module.__file__ or "", "exec"), vars(sys.modules[module_name]), made)
    assert function is not made[name]
    # Other modules have a function by its name, too.
    owners = [owner] if outer else [m for m in [*sys.modules.values()] if vars(m).get(name) is function]
    with ExitStack() as stack:
        for place in owners:
            stack.enter_context(mock.patch.object(place, name, made[name]))
        yield


def waits(run: Run, folder: Path | None = None) -> list[str]:
    """The waits of the host for the device in the last step of ``run``. Collective, as ``hazards``."""
    kernels = nullcontext() if run.kernels else _references()
    with kernels, _machine_of(run, folder) as (order, config, group):
        torch.manual_seed(0)
        model = Model(*(Feed(32) for _ in range(4)))
        engine = lt_zero.shard(model, config, CPU, **_groups(run, config, group, model))
        optimizer = run.optimizer(model.parameters(), lr=1e-3)
        owner = lt_zero.ShardedOptimizer(engine, optimizer)
        # The model, and what is made of it, is on the device.
        with places(order):
            for _ in range(run.steps):
                order.waits.clear()
                _run_backward(run, model, owner, 1)
                owner.grads.clip_norm(0.5)
                optimizer.step()
        found = list(order.waits)
        engine.finish_steps()
        engine.offload_manager.close()
    return found
