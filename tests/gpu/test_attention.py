"""Sparse attention on a GPU (compiled FlexAttention) beside full matrices in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.features import needs

pytestmark = [pytest.mark.gpu, needs("sparse_attention")]

PATTERNS: list[tuple[str, dict[str, Any]]] = [
    ("Fixed", {"num_local_blocks": 8, "different_layout_per_head": True, "num_different_global_patterns": 4}),
    ("BigBird", {"block": 64}),
    ("LocalSlidingWindow", {}),
]


@pytest.mark.timeout(180)  # compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("made", "length"), [*zip(PATTERNS, (256, 300, 1000), strict=True)])
def test_outputs_and_gradients(
    device: torch.device, made: tuple[str, dict[str, Any]], length: int, dtype: torch.dtype
) -> None:
    from lt_zero import attention
    from lt_zero.features.sparse_attention.sparse import allowed_elements, dense

    kind, settings = made
    pattern = getattr(attention, kind)(**settings)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, length, 64, device=device, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]
    mask = torch.zeros(2, length, dtype=torch.bool, device=device)
    mask[1, length - 20 :] = True
    weights = torch.randn(2, 4, length, 64, device=device, dtype=dtype)
    out = attention.sparse_attention(*inputs, pattern, mask)
    found = [out, *torch.autograd.grad((out * weights).sum(), inputs)]
    allowed = allowed_elements(pattern, 4, length, length, device)[None] & ~mask[:, None, None]
    errors = []
    for wide in (torch.float64, dtype):
        again = [x.detach().to(wide).requires_grad_() for x in inputs]
        plain = dense(*again, allowed, None, 0.0, 0.125)
        errors.append([plain, *torch.autograd.grad((plain * weights.to(wide)).sum(), again)])
    for ours, exact, theirs in zip(found, *errors, strict=True):
        error, allowance = (x.double().sub(exact).abs().max() for x in (ours, theirs))
        assert error <= 2 * allowance + 1e-6 * exact.abs().max()
