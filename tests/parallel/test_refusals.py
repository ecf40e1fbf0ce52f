"""What would be wrong with tensor parallelism: without an error of torch's, or with one that does not help."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from tests.support.lightning_tools import sharded_trainer
from tests.support.matrix import only
from tests.support.parallel_module import Module
from tests.support.parallel_nets import Net, Ranks, batch, start
from tests.support.pool import Pool


def _penalty(model: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(model.head(x).square().mean(), x, create_graph=True)
    return grad.square().sum()


def _second_derivatives(stage: int) -> None:
    run, x = start(Ranks(1, 2), stage, sequence=False), batch(0, 0)
    inputs = x.clone().requires_grad_(True)
    loss = run.model(inputs).square().mean()
    with pytest.raises(RuntimeError, match=r"'layers\.2' .*create_graph=True.*other tensor ranks"):
        torch.autograd.grad(loss, inputs, create_graph=True)
    run.engine.abort_backward()
    torch.testing.assert_close(_penalty(run.model, x), _penalty(Net(), x))  # the head is not cut


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_a_backward_through_parts_is_not_differentiated(pool: Pool, stage: int) -> None:
    """torch's collectives have no derivative: gradients of a penalty would lack what goes through other ranks."""
    pool.run(2, _second_derivatives, stage)


def _averages() -> None:
    averages = StochasticWeightAveraging(swa_lrs=0.1)
    config = {"tensor_parallel": {"autotp_size": 2}}
    trainer = sharded_trainer(1, config=config, max_steps=1, callbacks=[averages])
    with pytest.raises(TypeError, match=r"StochasticWeightAveraging .*lt_zero\.EMA.* parts\. Remove the callback"):
        trainer.fit(Module())


def test_callbacks_that_copy_whole_parameters_are_refused(pool: Pool) -> None:
    """They copy the model before it is cut, and torch fails at their first average."""
    pool.run(2, _averages)
