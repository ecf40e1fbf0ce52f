"""Rounds in a loop of one's own and in Fabric: one backward for each batch of the loader."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import ConfigError, FabricZeroStrategy
from lt_zero.core.followers import states_of
from tests.features.virtual_ranks.fits import RANKS, Module, Rows, Run, check, told
from tests.support.lightning_tools import torchrun_env
from tests.support.pool import Pool

CONFIG = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": 24,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "reproducible": {"virtual_ranks": 6},
}


class _Net(Module):
    """A module that remembers what it sees when it is called."""

    def forward(self, number: int, batch: Any) -> Tensor:
        return self.training_step(batch, number)


def _loop(early: bool = False, twice: bool = False) -> Run:
    torch.manual_seed(5 + dist.get_rank())
    model = _Net(lr=0.05)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine, _, loader, _ = lt_zero.initialize(model=model, optimizer=sgd, training_data=Rows(), config=CONFIG)
    engine.train()
    shared: list[Any] = []
    for _ in range(2):
        for batch in loader:  # type: ignore[union-attr]
            shown = batch[0] + torch.randn(5) * 0.1, *batch[1:]
            loss = engine(engine.micro_steps, shown) * (1 + torch.rand(()))
            # As a save does here, which leaves the numbers of the micro-batch for a moment.
            saved = states_of(engine.engine)["random_states_of_loop"].state_dict()
            engine.backward(loss)
            if twice:
                engine.backward(engine(engine.micro_steps, shown))
            if early:
                engine.set_gradient_accumulation_boundary(True)
            engine.step()
            if engine.is_gradient_accumulation_boundary():
                shared.append(torch.rand(()).item())
                shared.append(saved["shared"])
    counted = engine.global_steps, engine.micro_steps, engine.global_samples, engine.train_batch_size()
    return told(model, (counted, shared, engine.module_state_dict()))


def _fabric(early: bool = False, twice: bool = False) -> Run:
    os.environ.update(torchrun_env())
    torch.manual_seed(5 + dist.get_rank())
    strategy = FabricZeroStrategy(stage=3, virtual_ranks=6)
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    net = _Net(lr=0.05)
    model, sgd = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=2, shuffle=True))
    turns = 6 // dist.get_world_size()
    for _ in range(2):
        for number, batch in enumerate(loader):
            shown = batch[0] + torch.randn(5) * 0.1, *batch[1:]
            with torch.no_grad():
                model(number // turns, shown)  # changes running averages
            net.seen.pop()
            fabric.backward(model(number // turns, shown) * (1 + torch.rand(())))
            if twice:
                fabric.backward(model(number // turns, shown))
            if early or (number + 1) % turns == 0:
                fabric.clip_gradients(model, sgd, max_norm=0.1)
                sgd.step()
                sgd.zero_grad()
    return told(net, strategy.get_module_state_dict(model._forward_module))


@pytest.mark.parametrize("face", [_loop, _fabric])
def test_a_backward_is_a_micro_batch_of_a_round(pool: Pool, face: Callable[[], Run]) -> None:
    runs = {ranks: pool.run(ranks, face) for ranks in RANKS}
    check(runs)
    if face is _loop:
        assert runs[1][0].more[0] == (4, 8, 96, 24)


def _refusal(face: Callable[..., Run], how: dict[str, bool]) -> str:
    with pytest.raises(ConfigError) as caught:
        face(**how)
    return str(caught.value)


@pytest.mark.parametrize("face", [_loop, _fabric])
def test_a_step_inside_of_a_round_is_an_error(pool: Pool, face: Callable[..., Run]) -> None:
    (text,) = pool.run(1, _refusal, face, {"early": True})
    assert "reproducible.virtual_ranks=6" in text
    assert "was called after 1 of the 6 backwards" in text


@pytest.mark.parametrize("face", [_loop, _fabric])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_backward_for_a_batch_is_an_error(pool: Pool, face: Callable[..., Run], ranks: int) -> None:
    for text in pool.run(ranks, _refusal, face, {"twice": True}):
        assert "reproducible.virtual_ranks=6: a second backward was called" in text
