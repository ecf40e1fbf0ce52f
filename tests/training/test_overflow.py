"""Who is named when values stop being finite: modules by FiniteWatch, parameters over all ranks, and the message."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_zero
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import is_guarded
from lt_zero.core.engine.layout import Piece
from lt_zero.training.overflow import FiniteWatch, nonfinite_parameters, overflow_report
from tests.support.matrix import only_rows
from tests.support.models import Block, Net, next_token_loss, tokens
from tests.support.parity import RELEASE, STAGES, config_of
from tests.support.pool import Pool

INF, NAN = float("inf"), float("nan")


@contextmanager
def watching(root: nn.Module) -> Iterator[FiniteWatch]:
    watch = FiniteWatch(root)
    watch.open()
    try:
        yield watch
    finally:
        watch.close()


# ---- modules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_each_layer_is_named(mode: Callable[[], Any]) -> None:
    for name in ("blocks.0.up", "blocks.1.norm", "blocks.2.down", "head"):
        net = Net(tied=False)
        with watching(net) as watch, mode():
            net(tokens(0, 0, 0))
            assert watch.first() is None
            with torch.no_grad():
                for p in net.get_submodule(name).parameters():
                    p.fill_(3e38)
            net(tokens(0, 0, 0))
            layer = type(net.get_submodule(name)).__name__
            assert watch.first() == f"'{name}' ({layer})"
            watch.reset()
            assert watch.first() is None


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("where", [0, 7, 14])
def test_each_element_counts(value: float, where: int) -> None:
    class Put(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x.view(-1)[where] = value
            return x

    net = nn.Sequential(nn.Linear(5, 5), Put(), nn.Linear(5, 5))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        with watching(net.to(dtype)) as watch:
            net(torch.ones(3, 5, dtype=dtype))
            assert watch.first() == "'1' (Put)"


class Between(nn.Module):
    """Overflows in its own arithmetic, between two children."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).exp() * INF)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3e38)  # what it was given is bad afterwards


def test_own_arithmetic() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Between(), nn.Linear(4, 4))
    with watching(net) as watch:
        net(torch.ones(2, 4))
        assert watch.first() == "'1' (Between)"
    net = nn.Sequential(nn.Identity(), Twice())
    with watching(net) as watch:
        net(torch.full((2, 4), 3.0))
        assert watch.first() == "'1' (Twice)"


def test_bad_input() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.ones(2, 4)
    batch[1, 2] = NAN
    with watching(net) as watch:
        net(batch)
        assert watch.first() == "the input of the model (Sequential)"
        watch.reset()
        net[1](net[0](batch))  # as a LightningModule does
        assert watch.first() == "the input of '0' (Linear)"


@dataclass
class Output:
    state: Tensor
    scores: dict[str, list[Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, *, batch: dict[str, Tensor]) -> Output:
        x = self.inner(batch["x"])
        return Output(x, {"a": [torch.zeros(3, dtype=torch.long), torch.zeros(0), x * batch["factor"]]})


def test_nested_inputs_and_outputs() -> None:
    net = Nested()
    with watching(net) as watch:
        net(batch={"x": torch.ones(2, 4), "factor": torch.tensor(1.0)})
        assert watch.first() is None
        with torch.no_grad():
            net.inner.weight.fill_(100.0)
        net(batch={"x": torch.ones(2, 4), "factor": torch.tensor(3e38)})
        assert watch.first() == "the model (Nested)"
        watch.reset()
        net(batch={"x": torch.ones(2, 4), "factor": torch.tensor(NAN)})
        assert watch.first() == "the input of the model (Nested)"


def test_attention_masks_are_no_overflow() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with watching(net) as watch:
        net(torch.randn(2, 5, 8), mask=mask)
        assert watch.first() is None
        with torch.no_grad():
            net.layers[1].self_attn.out_proj.bias[3] = INF
        net(torch.randn(2, 5, 8), mask=mask)
        assert watch.first() == "'layers.1.self_attn' (MultiheadAttention)"


def test_recomputation_is_not_watched() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with watching(net) as watch:
        loss = checkpoint(net, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum()
        with torch.no_grad():
            net[0].weight.fill_(INF)
        loss.backward()
        assert watch.first() is None


def test_after_an_exception() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.linear = Fails(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(ValueError):  # noqa: PT011
                self.fails(x)
            return self.linear(x) * INF

    net = Catches()
    with watching(net) as watch:
        net(torch.ones(2, 4))
        assert watch.first() == "the model (Catches)"


def test_costs_nothing_when_closed() -> None:
    net = Net()
    watch = FiniteWatch(net)

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())

    watch.open()
    once = hooks()
    watch.open()
    assert hooks() == once == 2 * len(list(net.modules()))
    with torch.no_grad():
        net.scale.fill_(NAN)
    net(tokens(0, 0, 0))
    assert watch.first() == "the model (Net)"  # not the first block, which was given NaN
    watch.close()
    assert hooks() == 0
    assert watch.first() is None
    watch.open()
    assert watch.first() is None
    watch.close()
    watch.close()


def test_activations_are_not_kept() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Linear(8, 1), nn.Flatten(0))
    made: list[weakref.ref[Tensor]] = []
    for module in net:
        module.register_forward_hook(lambda m, a, out: made.append(weakref.ref(out)))
    with watching(net) as watch:
        net(torch.ones(2, 4)).sum().backward()
        gc.collect()
        assert len(made) == 4
        assert all(ref() is None for ref in made)
        assert watch.first() is None


def test_a_deep_copy_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    with watching(net) as watch:
        other = copy.deepcopy(net)
        other[0].weight.data.fill_(INF)
        other(torch.ones(2, 4))
        assert watch.first() is None


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("way", ["in place", "wrapper"])
def test_compiled(way: str) -> None:
    """The graphs were made before the watch was opened, and know nothing of hooks."""
    gc.collect()  # torch does not compile under a global hook, which an engine of another test may have
    net = nn.Sequential(nn.Identity(), Pair())
    layer = net[1].b
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    if way == "in place":
        net[1].compile(backend=backend)
    else:
        net[1] = torch.compile(net[1], backend=backend)
    net(torch.ones(2, 4))
    assert graphs
    compiled = len(graphs)
    with torch.no_grad():
        layer.weight.fill_(3e38)
    with watching(net) as watch:
        net(torch.full((2, 4), 1e3))
        assert watch.first() == "'1.b' (Linear)"
    net(torch.ones(2, 4))
    assert len(graphs) == compiled  # the graphs of before are used again
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert len(graphs) > compiled  # and new ones are made


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_graphs_run_again_once_no_watch_is_open() -> None:
    """Watches are closed in any order, or are dropped with their models."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(3, 2), backend=backend)
    first, second, dropped = FiniteWatch(nn.Linear(1, 1)), FiniteWatch(nn.Linear(1, 1)), FiniteWatch(nn.Linear(1, 1))
    for watch in (first, second, dropped):
        watch.open()
    first.close()
    second.close()
    compiled(torch.ones(1, 3))
    assert not graphs
    del dropped, watch
    gc.collect()
    compiled(torch.ones(1, 3))
    assert len(graphs) == 1


def test_scripted_modules_are_passed_over() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    with watching(net) as watch:
        with torch.no_grad():
            net[1].bias[0] = NAN
        net(torch.ones(2, 4))
        assert watch.first() == "'1' (Linear)"


# ---- with an engine ------------------------------------------------------------------------------------------------


def _one_rank_overflows(stage: int, zero: dict[str, Any]) -> list[str | None]:
    """Watching changes nothing, reads no released parameter, and finds the layer on the rank that has the batch."""
    rank = dist.get_rank()
    engine = lt_zero.shard(Net(), config_of(stage, zero))
    net = engine.root
    plain = next_token_loss(net, 0, 0, rank)
    plain.backward()
    with watching(net) as watch:
        loss = next_token_loss(net, 0, 0, rank)
        loss.backward()
        assert torch.equal(loss, plain)
        assert watch.first() is None
        watch.reset()
        handle = net.get_submodule("blocks.1.norm").register_forward_hook(
            lambda m, args, out: out * 3e38 if rank == 1 else out, prepend=True
        )
        next_token_loss(net, 0, 0, rank).backward()
        handle.remove()
        return engine.world.host_gather(watch.first(), "test")


@pytest.mark.parametrize(
    ("stage", "zero"), only_rows([(2, {}), (3, RELEASE)], itertools.product([2, 3], [{}, RELEASE]))
)
def test_sharded_model(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    for found in pool.run(2, _one_rank_overflows, stage, zero):
        assert found == [None, "'blocks.1.norm' (LayerNorm)"]


class Shapes(nn.Module):
    """Is given a weight, and asks it for its shape only."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        self.was_released = is_guarded(weight)
        return x / weight.shape[0], weight


class Hands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.shapes = nn.ModuleList([Block(), Block()]), Shapes()

    def forward(self, x: Tensor) -> Tensor:
        return self.shapes(self.blocks[1](self.blocks[0](x)), self.blocks[0].up.weight)[0]


def _released() -> None:
    engine = lt_zero.shard(Hands(), config_of(3, RELEASE))
    with watching(engine.root) as watch:
        engine.root(torch.ones(2, 10)).sum().backward()
        assert watch.first() is None
    assert engine.root.get_submodule("shapes").was_released
    assert is_guarded(engine.root.get_parameter("blocks.0.up.weight"))


def test_released_parameters_are_not_read(pool: Pool) -> None:
    pool.run(2, _released)


def _nonfinite(stage: int) -> None:
    """Each rank in turn poisons elements of what it holds; all ranks get the same names."""
    world, rank = dist.get_world_size(), dist.get_rank()
    net = nn.ModuleDict({"z": Block(5), "rest": nn.ModuleList([Block(5), Block(5)]), "a": nn.Linear(3, 7)})
    net["a"].bias.requires_grad_(False)
    registered = [name for name, _ in net.named_parameters()]
    engine = lt_zero.shard(net, config_of(stage))
    assert nonfinite_parameters(engine) == []
    x = net["a"](torch.ones(2, 3) + rank)[:, :5]
    for block in (net["z"], *net["rest"]):
        x = block(x)
    x.sum().backward()
    engine.finish_reductions()
    assert nonfinite_parameters(engine) == []
    held = [(b, p, b.layout.spans[p.index].name) for b in engine.buckets for p in b.pieces if p.index in b.grads.valid]
    assert all(b.grads.accumulated for b, _, _ in held)
    for turn in range(world):
        mine = held if turn == rank else []
        _check_elements([(b, p) for b, p, n in mine if n == "rest.1.norm.bias"], engine)
        for bucket, piece, _ in mine:
            bucket.grads.write()[piece.offset + piece.numel - 1] = INF
        names = {name for some in engine.world.host_gather([n for _, _, n in mine], "test") for name in some}
        assert nonfinite_parameters(engine) == [name for name in registered if name in names]
        for bucket, _, _ in mine:
            bucket.grads.valid.clear()
        assert nonfinite_parameters(engine) == []  # what was forgotten is not looked at
        for bucket, piece, _ in mine:
            bucket.grads.write().zero_()
            bucket.grads.valid.add(piece.index)
    assert nonfinite_parameters(engine) == []


def _check_elements(pieces: list[tuple[Bucket, Piece]], engine: Engine) -> None:
    """``pieces`` are this rank's, if it is its turn."""
    places = [(b, p.offset + k) for b, p in pieces for k in range(p.numel)]
    for number in range(max(engine.world.host_gather(len(places), "test"))):
        for bucket, place in places[number : number + 1]:
            bucket.grads.write()[place] = (INF, -INF, NAN)[number % 3]
        assert nonfinite_parameters(engine) == ["rest.1.norm.bias"]
        for bucket, place in places[number : number + 1]:
            bucket.grads.write()[place] = 0.0


@pytest.mark.parametrize(("stage", "world"), only_rows([(1, 2), (3, 3)], itertools.product(STAGES, [2, 3])))
def test_nonfinite_parameters(pool: Pool, stage: int, world: int) -> None:
    pool.run(world, _nonfinite, stage)


# ---- the message ---------------------------------------------------------------------------------------------------


def test_report_names_parameters_and_modules() -> None:
    text = overflow_report([f"p{i}" for i in range(7)], ["'blocks.3.mlp' (Linear)"] * 4, 12, 1.0)
    assert "'p0', 'p1', 'p2', 'p3', 'p4' and 2 more." in text
    assert "12 optimizer steps were skipped" in text
    assert "that of 'blocks.3.mlp' (Linear)." in text
    assert "rank" not in text
    assert "keep 'blocks.3.mlp' in fp32 with `fp16_override_modules`" in text
    assert "bf16" in text
    assert "learning rate" in text


def test_report_of_ranks_that_differ() -> None:
    text = overflow_report(["p"], ["'a' (Linear)", None, "the input of 'b' (Embedding)", None], 1, 0.5)
    assert "1 optimizer step was skipped" in text
    assert "on rank 0: the first output that was not finite is that of 'a' (Linear)" in text
    assert "on rank 1, 3: every module's output was finite: the gradients overflowed in backward" in text
    assert "on rank 2: the input of 'b' (Embedding) was not finite" in text
    assert "Check the data of that batch" in text
    assert "keep 'a' in fp32" in text


def test_report_of_backward() -> None:
    text = overflow_report([], [None, None], 3, 128.0)
    assert "Parameters" not in text
    assert "every module's output was finite: the gradients overflowed in backward" in text
    assert "smaller `min_loss_scale`" in text
    assert "smaller `min_loss_scale`" not in overflow_report([], [None], 3, 1.0)
    assert "fp16_override_modules" not in overflow_report([], ["the model (Net)"], 3, 1.0)
