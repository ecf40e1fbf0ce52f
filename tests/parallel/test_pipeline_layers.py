"""What layers of a pipeline may return and share, and the order of calls in a step: as in one process, or an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import PipelineParallel
from lt_zero.parallel import LayerSpec, Pipeline
from lt_zero.parallel.pipeline import runner
from lt_zero.parallel.pipeline.position import Position, at
from lt_zero.planning.check import check_optimizers
from lt_zero.training.build import built_by
from tests.support.lightning_tools import quick
from tests.support.matrix import only, only_rows
from tests.support.parity import OPTIMIZERS
from tests.support.pipelines import LENGTH, VOCABULARY, WIDTH, Block, Model, Ranks, all_weights, batch, specs, start
from tests.support.pool import Pool

STEPS = 2


class Pair(nn.Module):
    """Returns a tensor, and something beside it."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.linear, self.beside = nn.Linear(WIDTH, WIDTH), beside

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.beside == "positions":  # integers
            return y, torch.arange(x.shape[1]).repeat(x.shape[0], 1)
        if self.beside == "mask":
            return y, (x > 0).any(-1)
        if self.beside == "constant":
            return y, torch.full((1,), 0.5)
        if self.beside == "itself":
            return y, y
        if self.beside == "input":
            return [y, x]
        return y, y.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous


class Joined(nn.Module):
    def __init__(self, uses: bool = True) -> None:
        super().__init__()
        self.linear, self.uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result * (beside if beside.dim() != 2 else beside[..., None]) if self.uses else result


class Returns(nn.Module):
    """Returns what cannot be sent."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(WIDTH, WIDTH), what

    def forward(self, x: Tensor) -> Any:
        return {"None": None, "dict": {"x": self.linear(x)}, "None in a tuple": (self.linear(x), None)}[self.what]


class Skewed(nn.Module):
    """Its input's gradient is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.transpose(0, 1)).transpose(0, 1)
        return result


class Counting(nn.Module):
    """Counts its forwards, in the same buffer or in a new one each time."""

    number: Tensor

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.number = self.number + 1
        else:
            self.number += 1
        return x * self.number


class Normed(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(kind(WIDTH))


def _around(*layers: Any) -> list[Any]:
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *layers, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


LAYERS: dict[str, Callable[[], list[Any]]] = {
    **{
        name: lambda name=name: _around(LayerSpec(Pair, name), LayerSpec(Joined))  # type: ignore[misc]
        for name in ("positions", "mask", "constant", "itself", "input", "strided")
    },
    "unused": lambda: _around(LayerSpec(Pair, "input"), LayerSpec(Joined, False)),
    "skewed": lambda: _around(LayerSpec(Skewed), LayerSpec(Skewed)),
    "in place": lambda: _around(LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.ReLU, True)),
    "no parameters": lambda: [*_around(), torch.tanh, lambda x: 2 * x],
}


# ---- the order of calls, in a step -----------------------------------------------------------------------------------


def _usual(loss: Callable[[int], Tensor], optimizer: Optimizer) -> None:
    value = loss(0)
    optimizer.zero_grad()
    value.backward()


def _sum(loss: Callable[[int], Tensor], optimizer: Optimizer) -> None:
    value = loss(0) + 2.0 * optimizer.param_groups[0]["params"][0].square().sum() + loss(1)
    optimizer.zero_grad()
    value.backward()


def _two(loss: Callable[[int], Tensor], optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss(0).backward()
    loss(1).backward()


def _zeros(loss: Callable[[int], Tensor], optimizer: Optimizer) -> None:
    value = loss(0)
    optimizer.zero_grad(set_to_none=False)
    value.backward()


def _zeros_first(loss: Callable[[int], Tensor], optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss(0).backward()


ORDERS = {"usual": _usual, "sum": _sum, "two": _two, "zeros": _zeros, "zeros first": _zeros_first}


def _frozen(names: tuple[str, ...]) -> Callable[[Model], None]:
    def prepare(model: Model, mesh: Any = None) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))

    return prepare


FROZEN = {
    "first stage": ("tied.", "layers.1.", "layers.2."),
    "all but one": ("tied.", *(f"layers.{n}." for n in (1, 2, 3, 5, 6))),
    "last stage": ("tied.", *(f"layers.{n}." for n in (4, 5, 6))),
    "nothing": (),
}


def _equal(
    stage: int, layers: Callable[[], list[Any]], order: str, frozen: str, length: int, pipeline: dict[str, Any]
) -> None:
    """Train in stages and in one process; ``length`` is that of the last batch."""
    prepare = _frozen(FROZEN[frozen])
    run, reference = start(Ranks(), stage, "sgd", layers, pipeline, prepare), Model(layers)
    prepare(reference)
    expected = OPTIMIZERS["sgd"](p for p in reference.parameters() if p.requires_grad)
    for step in range(STEPS):
        cut = LENGTH if step < STEPS - 1 else length
        data = [[tensor[:, :cut] for tensor in batch(2 * step + n, 0)] for n in range(2)]

        def loss(number: int, data: list[Any] = data) -> Tensor:
            with run.engine.forward_scope():
                return run.model.loss(*data[number])

        ORDERS[order](loss, run.optimizer)
        ORDERS[order](lambda number, data=data: reference.loss(*data[number]), expected)  # type: ignore[misc]
        run.optimizer.step()
        expected.step()
    weights = all_weights(run.engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(
            weights[name], value.detach(), rtol=1e-5, atol=1e-6, msg=f"{order}, {frozen}: {name}"
        )


def _layers(stage: int, pipeline: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        # torch 2.11 and 2.12 want contiguous outputs, and gradients of all that a stage receives (docs/pipelines.md).
        if name in ("positions", "mask", "strided") and Version(torch.__version__) < Version("2.13"):
            continue
        _equal(stage, LAYERS[name], "usual", "nothing", LENGTH, {"partition_method": "uniform", **pipeline})


SOME = ("positions", "itself", "strided", "unused", "no parameters")


@pytest.mark.parametrize(
    ("stage", "pipeline", "names"),
    only_rows(
        [(1, {}, SOME)],
        [
            (1, {}, SOME),
            (1, {}, tuple(name for name in LAYERS if name not in SOME)),
            (3, {}, tuple(LAYERS)),
            (2, {"schedule": "LoopedBFS", "stages_per_rank": 2}, tuple(LAYERS)),
        ],
    ),
)
def test_layers_send_tensors_of_any_kind(
    pool: Pool, stage: int, pipeline: dict[str, Any], names: tuple[str, ...]
) -> None:
    pool.run(2, _layers, stage, pipeline, names)


@pytest.mark.parametrize(
    ("stage", "order"), only_rows([(2, "sum"), (1, "zeros")], itertools.product([0, 1, 2, 3], ORDERS))
)
def test_gradients_count_whenever_they_are_cleared_before(pool: Pool, stage: int, order: str) -> None:
    pool.run(2, _equal, stage, specs, order, "nothing", LENGTH - 2, {})


@pytest.mark.parametrize(
    ("stage", "frozen"), only_rows([(1, "first stage"), (3, "last stage")], itertools.product([0, 1, 2, 3], FROZEN))
)
def test_stages_may_be_frozen(pool: Pool, stage: int, frozen: str) -> None:
    pool.run(2, _equal, stage, specs, "usual", frozen, LENGTH, {})


def _dropped() -> tuple[str, str]:
    """The errors of a second backward, and of a step with the gradients of a loss that had none."""
    run = start(Ranks(), 1, "sgd")
    with run.engine.forward_scope():
        loss = run.model.loss(*batch(0, 0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as again:
        loss.backward()
    run.optimizer.zero_grad()
    with run.engine.forward_scope():
        run.model.loss(*batch(1, 0))
    with torch.no_grad(), run.engine.forward_scope():
        run.model.loss(*batch(1, 0))
    run.step(2)
    with pytest.raises(RuntimeError) as dropped:
        run.step(3)
    run.step(4)
    return str(again.value), str(dropped.value)


def test_a_loss_has_one_backward(pool: Pool) -> None:
    for again, dropped in pool.run(2, _dropped):
        assert "one backward" in again
        assert "the gradients of 1 loss of the pipeline whose backward was never called" in dropped


# ---- errors ----------------------------------------------------------------------------------------------------------


def _returns(what: str) -> str:
    with quick():
        run = start(Ranks(), 1, "sgd", lambda: _around(LayerSpec(Returns, what), LayerSpec(Joined)))
        with pytest.raises((TypeError, RuntimeError)) as caught:
            run.step(0)
    return f"{caught.typename}: {caught.value}"


@pytest.mark.parametrize("what", only(["dict"], ["None", "dict", "None in a tuple"]))
def test_a_layer_that_returns_no_tensors_is_named(pool: Pool, what: str) -> None:
    own, other = pool.run(2, _returns, what)
    assert own.startswith("TypeError: Layer 1 (Returns), the last of stage 0, returned ")
    assert "Rank 0 ended with TypeError: Layer 1 (Returns)" in other


def _counted() -> list[float]:
    """What buffers have after a step of four micro-batches, the shapes of whose outputs were not known."""
    counting = [LayerSpec(Counting, assigns) for assigns in (False, True)]
    run = start(Ranks(), 1, "sgd", lambda: _around(*counting, *counting))
    run.step(0)
    return [float(buffer) for buffer in run.model.buffers()]


def test_forwards_that_find_shapes_leave_buffers_alone(pool: Pool) -> None:
    counted = pool.run(2, _counted)
    assert sum(counted, []) == [4.0] * 4


def _forms(kept: int) -> tuple[int, dict[str, Tensor]]:
    """How many forms of batches are remembered after some of four sizes, and the weights."""
    run = start(Ranks(), 1, "sgd", lambda: specs(dropout=0.3))
    torch.manual_seed(3)
    with mock.patch.object(runner, "_FORMS", kept):
        for step, rows in enumerate((8, 6, 4, 8)):
            run.step(step, rows)
    made: Any = run.model.pipe.runner
    return len(made._forms), all_weights(run.engine)


def _few_and_all_forms() -> Any:
    return _forms(2), _forms(256)


def test_forms_of_batches_are_found_again(pool: Pool) -> None:
    """Whether they are remembered or not changes no bit."""
    (few, weights), (every, others) = pool.run(2, _few_and_all_forms)[0]
    assert (few, every) == (2, 3)
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def _same() -> Iterator[Any]:
    block = Block()
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    yield [embedding, block, block, head]
    yield [embedding, LayerSpec(lambda: block), LayerSpec(lambda: block), head]
    head.weight = embedding.weight
    yield [embedding, Block(), Block(), head]


@pytest.fixture
def stages() -> Iterator[None]:
    """Pipelines are made for the first of two ranks."""
    with at(Position(0, 2, PipelineParallel(partition_method="uniform"))):
        yield


@pytest.mark.usefixtures("stages")
def test_parameters_of_two_stages_have_to_be_tied() -> None:
    for layers in _same():
        with pytest.raises(ConfigError, match="TiedLayerSpec") as caught:
            Pipeline(layers)
        assert caught.value.problems[0].key == "pipeline.stages"
    block = Block()
    Pipeline([block, block, Block(), Block()])  # of one stage


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.LazyBatchNorm2d, nn.SyncBatchNorm])
def test_norms_over_batches_are_refused(kind: type[nn.Module]) -> None:
    make = (lambda width: kind()) if kind is nn.LazyBatchNorm2d else kind
    for layer in (Normed(make), LayerSpec(Normed, make)):
        with pytest.raises(ConfigError, match=rf"'inner.0' of layer 3 \(Normed\) is a {kind.__name__}"):
            Pipeline([Block(), Block(), Block(), layer])


def test_norms_over_batches_are_allowed_without_stages() -> None:
    assert len(Pipeline([Block(), nn.BatchNorm1d(LENGTH)]).layers) == 2


def _uneven(stage: int) -> str:
    run = start(Ranks(2, 1, 2), stage)
    rows = 8 - run.data_rank
    try:
        run.step(0, rows)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", only([2], [1, 2]))
def test_data_ranks_with_other_numbers_of_samples(pool: Pool, stage: int) -> None:
    for text in pool.run(4, _uneven, stage):
        assert (not text) if stage == 1 else "into 4 to 7 micro-batches" in text


def _checked() -> None:
    run = start(Ranks(1, 1, 3), 3, prepare=_frozen(("scale",)))
    check_optimizers(run.engine, built_by(run.engine), [run.optimizer])


@pytest.mark.slow
def test_memory_is_checked_where_some_stages_have_no_tied_layer(pool: Pool) -> None:
    """Only the first and the last of three keep whole gradients until the step."""
    pool.run(3, _checked)


def _masks() -> tuple[int, list[Tensor]]:
    """The stage of this rank, and the outputs of its dropout in the first block."""
    run, found = start(Ranks(2, 1, 2), 1, layers=partial(specs, True, 5, 0.5)), list[Tensor]()
    for layer in run.model.pipe.layers.values():
        if isinstance(layer, Block):
            layer.drop.register_forward_hook(lambda module, args, output: found.append(output.detach() == 0))
    run.step(0)
    return run.model.pipe.position.rank, found


def test_data_ranks_have_masks_of_their_own(pool: Pool) -> None:
    """All ranks have the same seed."""
    first, other, *rest = pool.run(4, _masks)
    for (stage, masks), (same, others) in ((first, other), rest):
        assert stage == same
        assert not any(torch.equal(a, b) for a, b in zip(masks[-4:], others[-4:], strict=True))
