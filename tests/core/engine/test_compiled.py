"""Compiled models: graphs and breaks beside DDP's, and values elementwise beside those of one process."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lt_zero
from lt_zero.common import accelerator
from lt_zero.common.compat.of_compile import is_compiled
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.compiled_blocks import compile_blocks
from lt_zero.core.engine.gather import Gatherer
from lt_zero.core.engine.outside_steps import AutocastOutsideOfSteps, within_step
from tests.support.features import skip_without
from tests.support.matrix import only, only_rows
from tests.support.models import Block, Net, next_token_loss, tokens
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

DEPTH = 3
BACKEND: dict[str, Any] = {"backend": "eager"}
Run = Callable[[Tensor], Tensor]


def _blocks(net: Net, fullgraph: bool) -> Net:
    """Compile the blocks in place."""
    for block in net.blocks:
        block.compile(fullgraph=fullgraph, **BACKEND)
    return net


def _wrapped(net: Net, fullgraph: bool) -> Net:
    """Replace the blocks by compiled ones."""
    net.blocks = nn.ModuleList(torch.compile(block, fullgraph=fullgraph, **BACKEND) for block in net.blocks)
    return net


def _whole(net: Net, fullgraph: bool) -> Net:
    """Compile the model in place."""
    net.compile(fullgraph=fullgraph, **BACKEND)
    return net


def _configured(net: Net, fullgraph: bool) -> Net:
    """Let the engine compile the blocks, as its configuration says."""
    return net


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:1]:
            x = block(x)
        return x


class Warnings(logging.Handler):
    """What Dynamo warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _train(net: Net, build: Callable[[Net, bool], Net], fullgraph: bool, stage: int | None) -> tuple[int, int]:
    """Graphs, breaks and largest error of a training on two ranks; ``stage``: None: by DDP."""
    torch._dynamo.reset()
    counters.clear()
    plain, seen = copy.deepcopy(net), Warnings()
    model: nn.Module = build(net, fullgraph)
    visits = 0
    if stage is None:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        keys = {"compile": {**BACKEND, "kwargs": {"fullgraph": fullgraph}}} if build is _configured else {}
        engine = lt_zero.shard(model, config_of(stage, RELEASE, **keys))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        lt_zero.ShardedOptimizer(engine, optimizer)
    wanted = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    logger, visit = logging.getLogger("torch._dynamo"), Gatherer.visit

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal visits
        visits += not kwargs
        visit(*args, **kwargs)

    logger.addHandler(seen)
    Gatherer.visit = counted  # type: ignore[method-assign]
    try:
        for step in range(3):
            optimizer.zero_grad()
            wanted.zero_grad()
            next_token_loss(model, step, 0, dist.get_rank()).backward()
            _mean_loss(plain, step).backward()
            optimizer.step()
            wanted.step()
    finally:
        Gatherer.visit = visit  # type: ignore[method-assign]
        logger.removeHandler(seen)
    assert not [text for text in seen.texts if "recompile" in text], seen.texts
    if stage is not None:
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), msg=name)
    # Units that are whole on every rank need no hook in a graph of several; all others ran in each forward.
    hooked = stage is not None and (stage == 3 or build is not _whole)
    assert visits == (3 * DEPTH if hooked else 0), f"{visits} visits of units"
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _mean_loss(model: nn.Module, step: int) -> Tensor:
    return torch.stack([next_token_loss(model, step, 0, rank) for rank in range(dist.get_world_size())]).mean()


def _table(beside_ddp: bool) -> dict[str, tuple[int, int]]:
    """Graphs and breaks while the process has the model of another run, whose hook is on all modules."""
    other = nn.Linear(1, 1)
    hook = AutocastOutsideOfSteps([other], torch.bfloat16, "cpu")
    try:
        return _rows(beside_ddp)
    finally:
        hook.remove()
        _collected()


def _collected() -> None:
    """The last model of another run is collected while a graph is made, in which its hook is looked at."""
    torch._dynamo.reset()
    others = [nn.Linear(1, 1)]
    AutocastOutsideOfSteps(others, torch.bfloat16, "cpu")

    def collecting(graph: Any, inputs: Any) -> Any:
        others.clear()
        gc.collect()
        return graph.forward

    net = Block()
    net.compile(fullgraph=True, backend=collecting)
    net(torch.ones(2, 3, 10))
    assert not others


def _rows(beside_ddp: bool) -> dict[str, tuple[int, int]]:
    found = {}
    rows: list[tuple[str, Callable[[Net, bool], Net], bool]] = [
        ("block.compile()", _blocks, True),
        ("torch.compile(block)", _wrapped, True),
        ("model.compile()", _whole, False),
        ("compile: {disable: false}", _configured, True),
    ]
    for name, build, fullgraph in rows:
        for stage in (None, 2, 3) if beside_ddp and build is not _configured else (2, 3):
            torch.manual_seed(0)
            net = Net(depth=DEPTH)
            row = f"{name}, {'DDP' if stage is None else f'stage {stage}'}"
            found[row] = _train(net, build, fullgraph, stage)
    found["engine.compile(), stage 2"] = _of_engine()
    found["steps inside of a forward, stage 2"] = _by_hand(False)
    found["the same with bare backwards"] = _by_hand(True)
    found["beside steps of another run"] = _beside_steps()
    _of_functions()
    return found


def _beside_steps() -> tuple[int, int]:
    """A compiled model that is called in steps of another run and between them: the hook goes and comes.

    Its forward makes a list of modules, as those of transformers do. Engines count what is registered in modules.
    """
    torch._dynamo.reset()
    counters.clear()
    net = Sliced()
    net.compile(fullgraph=True, **BACKEND)
    rows = torch.ones(2, 3, 10)
    for _ in range(10):  # more than torch compiles again before it gives up
        net(rows)
        with within_step():
            net(rows)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _by_hand(bare: bool) -> tuple[int, int]:
    """Two optimizers whose steps code takes inside of one forward, as for a GAN: graphs are whole after a step, too.

    ``bare``: nothing is around the backwards, so the gradients that a graph returns have to begin them. The graphs are
    those of an ordinary model, from before it is set up.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    nets = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
    plain = copy.deepcopy(nets)
    rows = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(1))
    critic = torch.compile(nets[1], fullgraph=True, **BACKEND)
    for differentiates in (True, False) if bare else ():
        critic(rows[0].clone().requires_grad_(differentiates))
    engine = lt_zero.shard(nets, config_of(2))
    optimizers, wanted = (
        [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in both] for both in (nets, plain)
    )
    for optimizer in optimizers:
        lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(3):
        with engine.forward_scope():
            _by_turns(nets[0], critic, optimizers, rows[dist.get_rank()], nullcontext if bare else engine.backward_pass)
        _by_turns(plain[0], plain[1], wanted, rows, nullcontext)
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), msg=name)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _by_turns(maker: nn.Module, critic: Run, optimizers: list[Any], rows: Tensor, around: Callable[[], Any]) -> None:
    made = maker(rows)
    for number, optimizer in enumerate(optimizers):
        loss = critic(made).square().mean() if number == 0 else -critic(made.detach()).sin().mean()
        optimizer.zero_grad()
        with around():
            loss.backward()
        optimizer.step()


def _of_engine() -> tuple[int, int]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = Net(depth=DEPTH)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, *_ = lt_zero.initialize(model=net, optimizer=optimizer, config={"zero_optimization": {"stage": 2}})
    assert not engine.is_compiled
    with pytest.raises(ValueError, match="DeepCompile"):
        engine.compile("eager", schedule=[(0, [])])
    engine.compile("eager", {"fullgraph": True})
    assert engine.is_compiled
    engine.backward(next_token_loss(engine, 0, 0, dist.get_rank()))
    engine.step()
    _mean_loss(plain, 0).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_torch_compiles_none_of_its_own_classes_in_place() -> None:
    torch._dynamo.reset()
    counters.clear()
    net = nn.Sequential(nn.Linear(2, 2))
    net.compile(**BACKEND)
    net(torch.ones(1, 2))
    assert not counters["stats"]["unique_graphs"]
    torch.compile(net, **BACKEND)(torch.ones(1, 2))
    assert counters["stats"]["unique_graphs"] == 1


def test_what_cannot_be_compiled() -> None:
    layer = nn.Linear(2, 2)
    for _ in range(2):  # it is found before anything is changed
        with pytest.raises(ConfigError, match="Linear has none"):
            lt_zero.shard(layer, config_of(1, compile={"disable": False}))
    net = Net(depth=DEPTH)
    with pytest.raises(ConfigError, match=r"compile\.kwargs"):
        lt_zero.shard(net, config_of(1, compile={"kwargs": {"no_such": 1}}))
    with pytest.raises(ConfigError, match="no_such_backend"):
        lt_zero.shard(Net(depth=DEPTH), config_of(1, compile={"backend": "no_such_backend"}))
    assert not any(is_compiled(module) for module in net.modules())


def test_blocks_run_as_they_were_once_they_are_compiled_no_more() -> None:
    """An engine that cannot be built leaves the model as it got it."""
    torch._dynamo.reset()
    counters.clear()
    net = Net(depth=DEPTH)
    wanted = net(tokens(0, 0, 0))
    compiled = compile_blocks(net, "eager", {}, ShardGroup.of_all(World.join(torch.device("cpu"))))
    assert all(is_compiled(block) for block in net.blocks)
    compiled.remove()
    assert not any(is_compiled(module) for module in net.modules())
    assert torch.equal(net(tokens(0, 0, 0)), wanted)
    assert not counters["frames"]


def _of_functions() -> None:
    """A compiled function that calls units outside of a forward of the model, at which hooks have to run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(depth=DEPTH)
    plain = copy.deepcopy(net)
    engine = lt_zero.shard(net, config_of(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    rows = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(1))

    def part(blocks: Any, x: Tensor) -> Tensor:
        made: Tensor = blocks[1](blocks[0](x))
        return made

    compiled = torch.compile(part, **BACKEND)
    for _ in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        compiled(net.blocks, rows[dist.get_rank()]).square().mean().backward()
        part(plain.blocks, rows).square().mean().backward()
        optimizer.step()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), msg=name)


# With DDP the model inside is compiled, which gives the fewest breaks. At stage 3 the loop over units runs outside of
# graphs: embedding and head, which are no modules of one's own, run eagerly.
TABLE = {
    "block.compile(), DDP": (1, 0),
    "block.compile(), stage 2": (1, 0),
    "block.compile(), stage 3": (1, 0),
    "torch.compile(block), DDP": (1, 0),
    "torch.compile(block), stage 2": (1, 0),
    "torch.compile(block), stage 3": (1, 0),
    "model.compile(), DDP": (1, 0),
    "model.compile(), stage 2": (1, 0),
    "model.compile(), stage 3": (1, 0),
    "compile: {disable: false}, stage 2": (1, 0),
    "compile: {disable: false}, stage 3": (1, 0),
    "engine.compile(), stage 2": (1, 0),
    "steps inside of a forward, stage 2": (2, 0),  # the second one computes no gradient of its input
    "the same with bare backwards": (2, 0),
    "beside steps of another run": (2, 0),
}


@pytest.mark.parametrize("beside_ddp", only([False], [False, True]))
def test_graphs_and_breaks(beside_ddp: bool) -> None:
    """The rows of DDP show what torch makes of these models without lt_zero: they are slow."""
    pool = Pool()  # fresh processes: graphs depend on what a process has compiled and hooked before
    try:
        tables = pool.run(2, _table, beside_ddp)
    finally:
        pool.close()
    for found in tables:
        assert found == {row: counts for row, counts in TABLE.items() if beside_ddp or not row.endswith("DDP")}


def _late() -> list[int]:
    """Compile after steps whose gathers go on beside the next forward; returns the numbers of graphs."""
    torch._dynamo.reset()
    graphs = []
    for _ in range(2):  # the process has graphs that leave out hooks before the second model is traced
        torch.manual_seed(0)
        net = Net(depth=DEPTH)
        plain = copy.deepcopy(net)
        engine = lt_zero.shard(net, config_of(1, {"overlap_comm": True}))
        optimizer, wanted = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, plain))
        lt_zero.ShardedOptimizer(engine, optimizer)
        run: Any = net
        for step in range(4):
            if step == 2:
                counters.clear()
                run = torch.compile(net, **BACKEND)
            optimizer.zero_grad()
            wanted.zero_grad()
            next_token_loss(run, step, 0, dist.get_rank()).backward()
            _mean_loss(plain, step).backward()
            optimizer.step()
            wanted.step()
            assert any(bucket.wait_background_step() for bucket in engine.buckets) or step < 3
        graphs.append(counters["stats"]["unique_graphs"])
        with torch.no_grad():
            torch.testing.assert_close(run(tokens(0, 0, 0)), plain(tokens(0, 0, 0)))
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), msg=name)
    return graphs


def test_graphs_read_the_weights_of_the_step_before(pool: Pool) -> None:
    assert pool.run(2, _late, env={"LT_ZERO_SHARED_MEMORY": "0"})[0] == [1, 1]


# ---- options of a run: the same bits as without a compiler -----------------------------------------------------------

OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
OVERLAPPING: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "overlap_step": True}}
Options = tuple[torch.dtype | None, dict[str, Any], dict[str, Any]]  # dtype, zero_optimization, keys
OPTIONS: dict[str, Options] = {
    "fp32": (None, {}, {}),
    "bf16": (torch.bfloat16, {}, {}),
    "fp16": (torch.float16, {}, {}),
    "optimizer in host memory": (None, OFFLOAD, {}),
    "steps beside backward": (None, OVERLAPPING, {}),
    "parameters in host memory": (None, {**OFFLOAD, "offload_param": {"device": "cpu"}}, {}),
    "full recomputation": (None, {}, {"activation_checkpointing": {"mode": "full"}}),
    "selective recomputation": (None, {}, {"activation_checkpointing": {"mode": "selective"}}),
}
CASES = [
    (stage, name)
    for stage, name in itertools.product([2, 3], OPTIONS)
    if stage == 3 or name != "parameters in host memory"
]


def _with_options(stage: int, name: str) -> None:
    """Three steps with and without a compiler, of the whole model at stage 2, and of blocks at stage 3."""
    dtype, zero, keys = OPTIONS[name]
    accelerator._apart = bool(zero)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = Net(depth=DEPTH)
        for module in ([net] if stage == 2 else net.blocks) if compiled else []:
            module.compile(backend="aot_eager")
        engine = lt_zero.shard(net, config_of(stage, {**RELEASE, **zero} if stage == 3 else zero, dtype, **keys))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            next_token_loss(net, step, 0, dist.get_rank()).backward()
            optimizer.step()
        found.append(full_values(engine))
    accelerator._apart = False
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
    for parameter, value in found[0].items():
        assert torch.equal(found[1][parameter], value), parameter


@pytest.mark.parametrize(("stage", "name"), only_rows([(3, "steps beside backward")], CASES))
def test_options_give_the_bits_of_an_uncompiled_run(pool: Pool, stage: int, name: str) -> None:
    skip_without(OPTIONS[name])
    pool.run(2, _with_options, stage, name)
