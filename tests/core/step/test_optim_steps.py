"""The arithmetic of lt_zero's own optimizers: Lion, and Adam without bias correction; on pieces, under ZeRO."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lt_zero.core.step.fused_step import FusedStep
from lt_zero.core.step.supported_optimizers import check_supported, states_per_element
from lt_zero.optim import Lion, build_optimizer
from lt_zero.optim.adam import UncorrectedAdam
from tests.support.models import Net, next_token_loss
from tests.support.parity import Case, check
from tests.support.pool import Pool


def sign(x: float) -> float:
    return math.copysign(1.0, x) if x else 0.0


def test_lion_is_the_papers_algorithm() -> None:
    generator = random.Random(0)
    start = [generator.gauss(0, 1) for _ in range(6)]
    weights, moments, parameter = list(start), [0.0] * 6, Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = Lion([parameter], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1)
    for _ in range(50):
        grads = [0.0, *(generator.gauss(0, 1) for _ in range(5))]
        parameter.grad = torch.tensor(grads, dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(grads):
            weights[i] -= 3e-3 * (sign(0.9 * moments[i] + (1 - 0.9) * g) + 0.1 * weights[i])
            moments[i] = 0.98 * moments[i] + (1 - 0.98) * g
        assert parameter.tolist() == pytest.approx(weights, abs=1e-12)
    assert optimizer.state[parameter]["exp_avg"].tolist() == pytest.approx(moments, abs=1e-12)


def corrected_not(w: float, m: float, v: float, g: float, decoupled: bool) -> tuple[float, float, float]:
    """One step of Adam (lr 1e-2, betas 0.8 and 0.9, eps 1e-3, weight decay 0.1) with the moments as they are."""
    g, w = (g, w * (1 - 1e-3)) if decoupled else (g + 0.1 * w, w)
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
    return w - 1e-2 * m / (math.sqrt(v) + 1e-3), m, v


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_without_bias_correction(decoupled: bool) -> None:
    generator = random.Random(1)
    params = {"lr": 1e-2, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1, "bias_correction": False}
    parameter = Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = build_optimizer("Adam", {**params, "adam_w_mode": decoupled}, [parameter])
    state = [(1.0, 0.0, 0.0), (-2.0, 0.0, 0.0)]
    for _ in range(50):
        grads = [generator.gauss(0, 1) for _ in state]
        parameter.grad = torch.tensor(grads, dtype=torch.float64)
        optimizer.step()
        state = [corrected_not(*s, g, decoupled) for s, g in zip(state, grads, strict=True)]
        assert parameter.tolist() == pytest.approx([w for w, _, _ in state], abs=1e-12)
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}, "what torch's Adam has"
    assert not FusedStep.operation_of(optimizer), "the kernel corrects"


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("cls", [Lion, UncorrectedAdam])
def test_pieces_step_as_the_whole(cls: Any, maximize: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(5, 7)
    whole = Parameter(start.clone())
    pieces = [Parameter(piece.clone()) for piece in start.flatten().split([3, 20, 12])]
    optimizers = [cls([whole], weight_decay=0.1, maximize=maximize), cls(pieces, weight_decay=0.1, maximize=maximize)]
    for _ in range(5):
        grad = torch.randn(5, 7)
        whole.grad = grad
        for piece, part in zip(pieces, grad.flatten().split([3, 20, 12]), strict=True):
            piece.grad = part.clone()
        for optimizer in optimizers:
            assert optimizer.step(lambda: 3.0) == 3.0
    torch.testing.assert_close(
        torch.cat([piece.detach() for piece in pieces]), whole.detach().flatten(), rtol=0, atol=0
    )
    assert whole.grad is not None
    assert torch.equal(whole.grad, grad), "gradients are only read"


def _under_zero(stage: int) -> None:
    params = {"lr": 1e-2, "betas": [0.8, 0.9], "weight_decay": 0.1, "bias_correction": False}
    check(Case(Net, next_token_loss, stage, lambda m: build_optimizer("Adam", params, m.parameters()), 2, rtol=1e-4))


def test_under_zero(pool: Pool) -> None:
    pool.run(2, _under_zero, 3)


@pytest.mark.filterwarnings("error")
def test_zero_knows_them() -> None:
    for kind, states in (("Lion", 1), ("Adam", 2), ("SGD", 0)):
        params = {"bias_correction": False} if kind == "Adam" else {}
        optimizer = build_optimizer(kind, params, [Parameter(torch.zeros(2))])
        check_supported(optimizer, sharded=True)
        assert states_per_element(optimizer) == states
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\)"):
        Lion([Parameter(torch.zeros(2))], betas=(0.9, 1.0))
