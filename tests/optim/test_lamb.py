"""LAMB in one process: DeepSpeed's arithmetic, its kernels, and which classes of this name are allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero import kernels as ops
from lt_zero.core.step.supported_optimizers import check_supported, states_per_element
from lt_zero.optim import Lamb
from tests.support.lamb_tools import RULE, Transcript


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("bounds", [(10.0, 0.01), (0.5, 0.08), (0.3, 0.3)])
def test_is_deepspeeds(bounds: tuple[float, float], correct: bool, inside: bool) -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=torch.float64) for shape in [(7, 3), (5,), ()]] + [torch.zeros(4).double()]
    mine, theirs = ([Parameter(x.clone()) for x in start] for _ in range(2))
    rule = {**RULE, "max_coeff": bounds[0], "min_coeff": bounds[1], "bias_correction": correct}
    rule["eps_inside_sqrt"] = inside
    optimizer, reference = Lamb(mine, **rule), Transcript([{**rule, "params": theirs}])
    seen = set()
    for step in range(50):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn_like(one) * 10 ** (step % 5 - 3)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
        seen.update(reference.coefficients)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert 1.0 in seen, "the zeros, at first"
    assert bounds == (10.0, 0.01) or set(bounds) <= seen
    assert set(optimizer.state[mine[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.is_tensor(p.grad) and p.grad.ne(0).all() for p in mine), "gradients are only read"


def test_where_norms_are_nothing() -> None:
    """An update of 0 has the ratio 1, and so moves nothing; what has no gradient has no state."""
    still, moved, none = (Parameter(torch.ones(3)) for _ in range(3))
    optimizer = Lamb([still, moved, none], lr=0.1)
    still.grad, moved.grad = torch.zeros(3), torch.ones(3)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert still.tolist() == none.tolist() == [1, 1, 1]
    # The norm of the step is that of the weights times the rate, which is what the correction of the bias makes of 0.1.
    assert moved.tolist() == pytest.approx([1 - 0.1 * 0.001**0.5 / 0.1] * 3)
    assert none not in optimizer.state
    moved.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_kernels_agree() -> None:
    """They know eps outside of the root only; the correction of the bias is in the learning rate. fp32: 2 ** -22."""
    torch.manual_seed(0)
    rule = {**RULE, "weight_decay": 0.1}
    mine = [Parameter(torch.randn(n)) for n in (1, 33, 1000)]
    weights = [p.detach().clone() for p in mine]
    moments, optimizer = [[torch.zeros_like(w) for w in weights] for _ in range(2)], Lamb(mine, **rule)
    (b1, b2), numbers = rule["betas"], {"eps": 1e-6, "weight_decay": 0.1}
    for step in range(1, 11):
        grads = [torch.randn_like(w) for w in weights]
        for p, grad in zip(mine, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        norms = ops.lamb_update(weights, grads, *moments, beta1=b1, beta2=b2, **numbers).sqrt()
        rate = 1e-2 * (1 - b2**step) ** 0.5 / (1 - b1**step)
        rates = (rate * (norms[:, 0] / norms[:, 1]).clamp(0.01, 10.0)).float()
        ops.lamb_apply(weights, *moments, rates, **numbers)
        torch.testing.assert_close([p.detach() for p in mine], weights, rtol=step * 2**-22, atol=step * 1e-8)


def test_sixteen_bits_are_computed_in_fp32() -> None:
    torch.manual_seed(0)
    low, wide = Parameter(torch.randn(50).bfloat16()), Parameter(torch.zeros(50))
    wide.data.copy_(low.data)
    optimizers = Lamb([low], lr=1e-2), Lamb([wide], lr=1e-2)
    low.grad = torch.randn(50).bfloat16()
    wide.grad = low.grad.float()
    for p, optimizer in zip((low, wide), optimizers, strict=True):
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype == p.dtype
    # bf16 moments have 8 bits; the step is 1% of the weights, so an error of 2 ** -8 of it does not show.
    torch.testing.assert_close(low.float(), wide.detach(), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr": -1}, "lr=-1: write"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"max_coeff": 0.001}, "max_coeff=0.001: write a number of at least min_coeff=0.01"),
        ({"min_coeff": -1.0}, "min_coeff=-1.0: write"),
    ],
)
def test_wrong_numbers(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Lamb([Parameter(torch.zeros(2))], **wrong)


def test_deepspeeds_state_is_loaded() -> None:
    p = Parameter(torch.ones(2))
    optimizer = Lamb([p], eps_inside_sqrt=True)
    saved = optimizer.state_dict()
    moments = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    del saved["param_groups"][0]["eps_inside_sqrt"]
    saved["param_groups"][0]["max_grad_norm"] = 0.0
    optimizer.load_state_dict({**saved, "state": {0: {"step": 5, **moments}}})
    p.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[0]["eps_inside_sqrt"]
    assert optimizer.state[p]["step"] == 6


@pytest.mark.filterwarnings("error")
def test_ours_is_allowed_others_are_not() -> None:
    ours: Optimizer = Lamb([Parameter(torch.zeros(2))])
    check_supported(ours, sharded=True)
    assert states_per_element(ours) == 2

    class LAMB(torch.optim.SGD):
        pass

    theirs = LAMB([Parameter(torch.zeros(2))])
    check_supported(theirs, sharded=False)
    with pytest.raises(TypeError, match="LAMB computes its update .* Use lt_zero.optim.Lamb"):
        check_supported(theirs, sharded=True)
