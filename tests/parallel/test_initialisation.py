"""Modules that are built without values, and parallelized, get those that one process draws."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import lt_zero
from tests.support.llamas import Llama, RMSNorm, rules
from tests.support.matrix import only_rows
from tests.support.parallel_nets import Feed, Net, Ranks, all_weights, frozen, loss_of, start
from tests.support.parity import STAGES
from tests.support.pool import Pool


def by_parents(model: Net) -> Net:
    """``model`` with initialisation as in transformers, by its parent."""

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            assert module.weight.shape == (module.out_features, module.in_features)

    model._init_weights = initialise  # type: ignore[assignment]
    return model


def on_meta(kind: str) -> Net:
    with torch.device("meta"):
        model = frozen() if kind == "frozen" else Net()
    return by_parents(model) if kind == "parents" else model


def one_process(kind: str) -> dict[str, Any]:
    """What ``reset_parameters`` of all modules, in their order, draw."""
    model = by_parents(Net()) if kind == "parents" else Net()
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
            if kind == "parents":
                model._init_weights(module)  # type: ignore[operator]
    return model.state_dict()


def _draws(ranks: Ranks, stage: int, kind: str, sequence: bool) -> Any:
    seen = []

    def prepare(model: Net) -> None:
        torch.manual_seed(5)
        assert all(p.is_meta for p in model.parameters())
        seen.append({name: type(p) for name, p in model.named_parameters()})

    run = start(ranks, stage, model=lambda: on_meta(kind), prepare=prepare, sequence=sequence)
    following, own = torch.rand(3), dict(run.model.named_parameters())
    assert all(isinstance(own[name], DTensor) == issubclass(cls, DTensor) for name, cls in seen[0].items())
    trained = {name for name, p in (frozen() if kind == "frozen" else Net()).named_parameters() if p.requires_grad}
    assert {name for name, p in own.items() if p.requires_grad} == trained
    drawn = all_weights(run.engine)
    before = loss_of(run.model, 0, 0).item()
    run.train(range(1))
    return drawn, before, following


@pytest.mark.parametrize(
    ("ranks", "stage", "kind", "sequence"),
    only_rows(
        [(Ranks(1, 2), 1, "parents", True), (Ranks(2, 2), 3, "frozen", False)],
        itertools.product([Ranks(1, 2), Ranks(2, 2)], STAGES, ["plain", "parents", "frozen"], [False, True]),
    ),
)
def test_values_are_those_of_one_process(pool: Pool, ranks: Ranks, stage: int, kind: str, sequence: bool) -> None:
    """Bit for bit, and so is what is drawn afterwards."""
    results = pool.run(ranks.all, _draws, ranks, stage, kind, sequence)
    want = one_process(kind)
    following, reference = torch.rand(3), Net()
    reference.load_state_dict(want)
    for got, loss, after in results:
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], value) for name, value in want.items())
        assert torch.equal(after, following)
        assert loss == pytest.approx(loss_of(reference, 0, 0).item(), rel=1e-5)


def _tied() -> None:
    """Both modules fill the weight that they share, the second one when it has its values already."""

    def drawn(**keys: Any) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = Llama()
        model._init_weights = lambda m: nn.init.ones_(m.weight) if isinstance(m, RMSNorm) else None  # type: ignore[assignment]
        zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        torch.manual_seed(5)
        engine, _, _, _ = lt_zero.initialize(model=model, config={**SGD, **zero, **keys})
        return all_weights(engine.engine)

    want = drawn()
    got = drawn(tensor_parallel={"autotp_size": 2, "partition_config": rules()})
    for name, value in want.items():
        assert torch.equal(got[name], value), name


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 1}


def test_tied_weights_of_a_plan(pool: Pool) -> None:
    pool.run(2, _tied)


class Lacking(Feed):
    """Has a matrix that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))


def _unfilled() -> None:
    def model() -> Net:
        with torch.device("meta"):
            made = Net()
            made.layers[1] = Lacking()
        return made

    with pytest.raises(RuntimeError, match=r"layers\.1 .*'scale' got no values"):
        start(Ranks(1, 2), 3, model=model)
    assert dist.get_world_size() == 2


def test_what_is_not_filled_is_named(pool: Pool) -> None:
    pool.run(2, _unfilled)
