"""``tiled_cross_entropy`` beside torch's, on one rank and with parts of the vocabulary on two."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from lt_zero import loss_head, tiled_cross_entropy
from tests.support.pool import Pool

FEATURES, VOCABULARY = 5, 11
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True, "reduction": "sum", "label_smoothing": 0.1},
    {"softcap": 2.0, "z_loss": 0.3, "bias": True, "ignore_index": 3},
    {"reduction": "none", "softcap": 1.5, "label_smoothing": 0.2, "z_loss": 0.1, "bias": True},
)


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """The same by torch, with all logits."""
    softcap, z_loss = options.pop("softcap", None), options.pop("z_loss", 0.0)
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = softcap * torch.tanh(logits / softcap) if softcap is not None else logits
    logits, flat = logits.flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(logits, flat, **options)
    extra = z_loss * torch.where(flat == options.get("ignore_index", -100), 0, logits.logsumexp(-1).square())
    kind = options.get("reduction", "mean")
    if kind == "none":
        return (loss + extra).view(labels.shape)
    return loss + extra.sum() / ((flat != options.get("ignore_index", -100)).sum() if kind == "mean" else 1)


def inputs(dtype: torch.dtype = torch.float64, tokens: int = 7, features: int = 5, rows: int = 11) -> Any:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(2, tokens, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    bias = torch.randn(rows, generator=generator, dtype=torch.float64)
    labels = torch.randint(rows, (2, tokens), generator=generator)
    labels[0, :2] = -100
    return *(t.to(dtype).requires_grad_() for t in (hidden, weight, bias)), labels


def derived(loss: Tensor, *by: Tensor | None) -> list[Tensor]:
    factors = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * factors).sum(), [t for t in by if t is not None])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [4, 128])
def test_losses_and_gradients_are_those_of_torch(case: dict[str, Any], size: int) -> None:
    options = dict(case)
    hidden, weight, bias, labels = inputs()
    bias = bias if options.pop("bias", False) else None
    if "ignore_index" in options:
        labels = labels.where(labels != -100, options["ignore_index"])
    wanted = derived(whole(hidden, weight, labels, bias, **options), hidden, weight, bias)
    found = derived(
        tiled_cross_entropy(hidden, weight, labels, bias, tokens_per_tile=size, **options), hidden, weight, bias
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest error of each tensor, of its largest element."""
    pairs = zip(found, exact, strict=True)
    return [float((a.double() - b).abs().amax() / b.abs().amax()) for a, b in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES[::2])
def test_errors_of_16_bits_are_at_most_twice_those_of_torch(dtype: torch.dtype, case: dict[str, Any]) -> None:
    options = {key: value for key, value in case.items() if key not in ("bias", "ignore_index")}
    # Values that the dtype has, so that the errors are those of the computation alone.
    *given, labels = (t.detach() for t in inputs(dtype, 150, 16, 700))
    scale = 1024.0 if dtype is torch.float16 else 1.0  # as the loss scale of fp16 does

    def of(loss: Any, to: torch.dtype, **size: int) -> list[Tensor]:
        values = [value.to(to).requires_grad_() for value in given]
        hidden, weight, bias = values
        made = loss(hidden, weight, labels, bias, **size, **options)
        return [made.detach(), *(grad / scale for grad in torch.autograd.grad(made * scale, values))]

    exact = of(whole, torch.float64)
    theirs, ours = _errors(of(whole, dtype), exact), _errors(of(tiled_cross_entropy, dtype, tokens_per_tile=32), exact)
    for mine, their in zip(ours, theirs, strict=True):
        assert mine <= 2 * their + torch.finfo(torch.float32).eps, (ours, theirs)


def test_small_probabilities_of_fp16_are_not_lost() -> None:
    hidden = torch.ones(4, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[0.0], [-18.0]], dtype=torch.float16, requires_grad=True)
    loss = tiled_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.long), reduction="sum")
    (grad,) = torch.autograd.grad(loss * 65536, weight)
    assert float(grad[1]) == pytest.approx(4 * 65536 * math.exp(-18), rel=2e-2)


def test_losses_of_single_tokens_take_the_scale_of_fp16() -> None:
    hidden, weight, _, labels = (t.detach() for t in inputs(torch.float16, 20, 16, 50))
    found = []
    for reduction in ("mean", "none"):
        values = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = tiled_cross_entropy(*values, labels, reduction=reduction)  # type: ignore[arg-type]
        mean = loss.sum() / (labels != -100).sum() if reduction == "none" else loss
        found.append(torch.autograd.grad(mean * 65536, values))
    torch.testing.assert_close(found[1], found[0], rtol=4e-3, atol=1.0)


def test_autocast_multiplies_in_its_dtype() -> None:
    hidden, weight, bias, labels = inputs(torch.float32, 40, 16, 50)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = derived(whole(hidden, weight, labels, bias), hidden, weight, bias)
        found = derived(tiled_cross_entropy(hidden, weight, labels, bias, tokens_per_tile=16), hidden, weight, bias)
    assert [t.dtype for t in found] == [torch.float32] * 4
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)


def test_gradients_are_computed_where_they_are_needed_and_once() -> None:
    hidden, weight, bias, labels = inputs()
    wanted = derived(whole(hidden, weight, labels, bias), hidden)
    weight, bias = weight.detach(), bias.detach()
    loss = tiled_cross_entropy(hidden, weight, labels, bias, tokens_per_tile=3)
    torch.testing.assert_close(derived(loss, hidden), wanted, rtol=1e-12, atol=1e-12)
    again = tiled_cross_entropy(hidden, weight, labels, bias)
    torch.autograd.grad(again, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="computes once. Compute the loss again"):
        torch.autograd.grad(again, hidden)
    each = tiled_cross_entropy(hidden, weight, labels, bias, reduction="none").sum()
    first, second = (torch.autograd.grad(each, hidden, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    with torch.no_grad():
        assert torch.equal(tiled_cross_entropy(hidden, weight, labels, bias), again)


def test_no_token_and_none_that_counts() -> None:
    hidden, weight, _, labels = inputs()
    loss = tiled_cross_entropy(hidden, weight, torch.full_like(labels, -100), reduction="sum")
    assert [float(t.abs().sum()) for t in derived(loss, hidden, weight)] == [0, 0, 0]
    mean = tiled_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    assert mean.isnan()  # as torch's mean of none, whose gradients are 0
    assert [float(t.abs().sum()) for t in torch.autograd.grad(mean, (hidden, weight))] == [0, 0]
    empty = tiled_cross_entropy(hidden[:, :0], weight, labels[:, :0], reduction="none")
    assert empty.shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": torch.full((2, 7), 11)}, IndexError, "label 11 is none of the 11 rows"),
        ({"labels": torch.full((2, 7), -1)}, IndexError, "label -1"),
        ({"labels": torch.zeros(2, 6, dtype=torch.long)}, ValueError, "Shift labels"),
        ({"labels": torch.zeros(2, 7)}, TypeError, "labels of torch.float32"),
        ({"weight": torch.zeros(11, 4)}, ValueError, "do not fit"),
        ({"weight": torch.zeros(11, 5)}, TypeError, "hidden is torch.float64 and weight torch.float32"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias \(3,\)"),
        ({"reduction": "max"}, ValueError, "reduction='max'"),
        ({"softcap": 0.0}, ValueError, "softcap=0.0"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5"),
        ({"tokens_per_tile": 0}, ValueError, "tokens_per_tile=0"),
        ({"tokens_per_tile": 1.0}, TypeError, "tokens_per_tile"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    hidden, weight, _, labels = inputs()
    with pytest.raises(error, match=text):
        tiled_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **change})


def _parts_of_a_vocabulary() -> None:
    hidden, weight, bias, labels = inputs()
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for case in CASES:
        options = dict(case)
        if "ignore_index" in options:
            labels = labels.where(labels != -100, options["ignore_index"])
        with_bias = bias if options.pop("bias", False) else None
        wanted = derived(whole(hidden, weight, labels, with_bias, **options), hidden, weight, with_bias)
        # Uneven parts: 8 of 11 rows on rank 0.
        mine = [t.detach().split([8, 3])[rank].requires_grad_() if t is not None else None for t in (weight, with_bias)]
        loss = tiled_cross_entropy(
            hidden, mine[0], labels, mine[1], group=dist.group.WORLD, tokens_per_tile=4, **options
        )
        found = derived(loss, hidden, *mine)
        cut = [*wanted[:2], *(t.split([8, 3])[rank] for t in wanted[2:])]
        torch.testing.assert_close(found, cut, rtol=1e-12, atol=1e-12)
        both = [distribute_tensor(t.detach(), mesh, [Shard(0)]) if t is not None else None for t in (weight, with_bias)]
        for tensor in both:
            _ = tensor.requires_grad_() if tensor is not None else None
        found = derived(tiled_cross_entropy(hidden, both[0], labels, both[1], **options), hidden, *both)
        found = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        labels = inputs()[3]
    part = weight.detach().split([8, 3])[rank]
    with pytest.raises(IndexError, match="label 11"):
        tiled_cross_entropy(hidden, part, torch.full_like(labels, 11), group=dist.group.WORLD)


def _head_that_is_cut() -> None:
    hidden, weight, bias, labels = inputs(rows=12)
    head = nn.Linear(5, 12).double()
    head.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    wanted = derived(whole(hidden, weight, labels, bias), hidden, weight, bias)
    mesh = init_device_mesh("cpu", (2,))
    loss_head(parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate())), tokens_per_tile=4)
    found = derived(head(hidden, labels=labels), hidden, head.weight, head.bias)
    found = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head(hidden), F.linear(hidden, weight, bias))


def test_a_loss_head() -> None:
    hidden, weight, bias, labels = inputs()
    head = nn.Linear(5, 11).double()
    head.weight, head.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    assert loss_head(head, softcap=2.0, reduction="sum") is head
    for each in (head, copy.deepcopy(head)):
        found = derived(each(hidden, labels=labels), hidden, each.weight, each.bias)
        wanted = derived(whole(hidden, weight, labels, bias, softcap=2.0, reduction="sum"), hidden, weight, bias)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(each(hidden), F.linear(hidden, weight, bias))
    assert list(head.state_dict()) == ["weight", "bias"]
    with pytest.raises(TypeError, match="takes labels by name"):
        head(hidden, labels)
    with pytest.raises(TypeError, match=r"loss_head\(softcaps=...\): there are tokens_per_tile, softcap"):
        loss_head(head, softcaps=1.0)
    with pytest.raises(TypeError, match="pass the nn.Linear that makes logits"):
        loss_head(nn.Embedding(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Own has a forward of its own"):
        loss_head(type("Own", (nn.Linear,), {"forward": lambda self, x: x})(2, 2))


def test_parts_of_a_vocabulary(pool: Pool) -> None:
    pool.run(2, _head_that_is_cut)
    pool.run(2, _parts_of_a_vocabulary)
