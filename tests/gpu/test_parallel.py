"""What ranks exchange inside of layers, on a GPU: two processes on one device, each beside one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lt_zero
from tests.support.features import needs
from tests.support.gpu_layers import (
    RANKS,
    by_flash,
    by_flex,
    check_attention,
    check_experts,
    check_tensor_ranks,
    errors,
)
from tests.support.pool import Pool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["ulysses", "gather"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_by_a_flash_kernel(device: torch.device, pool: Pool, dtype: torch.dtype, method: str) -> None:
    # Causal with gathered keys asks for other kernels than the function allows.
    function = by_flash if method == "ulysses" else F.scaled_dot_product_attention
    pool.run(RANKS, check_attention, device.type, function, dtype, {"is_causal": True, "method": method})


@pytest.mark.timeout(180)  # compiles
def test_attention_by_flex_attention(cuda: torch.device, pool: Pool) -> None:
    pool.run(RANKS, check_attention, cuda.type, by_flex, torch.bfloat16, {})


@needs("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 1000])
def test_a_loss_in_tiles(device: torch.device, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in ((2, 150, 64), (700, 64))]
    labels = torch.randint(700, (2, 150), device=device)
    labels[0, :9] = -100
    scale = 1024.0 if dtype is torch.float16 else 1.0  # as the loss scale of fp16 does

    def of(loss: Callable[..., Tensor], to: torch.dtype) -> list[Tensor]:
        values = [value.to(to).requires_grad_() for value in given]
        made = loss(*values, labels)
        return [made.detach(), *(grad / scale for grad in torch.autograd.grad(made * scale, values))]

    def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).flatten(0, 1)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels.flatten())

    exact = of(whole, torch.float64)
    theirs, ours = (
        errors(of(loss, dtype), exact) for loss in (whole, partial(lt_zero.tiled_cross_entropy, tokens_per_tile=size))
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine <= 2 * other + torch.finfo(torch.float32).eps


def test_tokens_go_to_experts_and_back(device: torch.device, pool: Pool) -> None:
    pool.run(RANKS, check_experts, device.type)


@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_ranks(device: torch.device, pool: Pool, stage: int) -> None:
    pool.run(RANKS, check_tensor_ranks, device.type, stage)
