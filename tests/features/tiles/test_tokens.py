"""Modules over tiles of tokens, beside the same modules as a whole."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_zero import tiled


class Gated(nn.Module):
    """An MLP with a branch, dropout, a weight that is used twice and one that is not used."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, 10), nn.Linear(width, 10, bias=False), nn.Linear(10, width)
        self.again, self.unused = self.gate, nn.Linear(2, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        hidden = torch.nn.functional.silu(self.gate(x)) * self.up(x) + self.again(x)
        return self.down(self.dropout(hidden)) * factor


def made(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[Gated, Tensor]:
    torch.manual_seed(0)
    return Gated(dropout=dropout).to(dtype), torch.randn(2, 7, 6, dtype=dtype, requires_grad=True)


def gradients(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor | None]:
    """The output and all gradients."""
    module.zero_grad()
    out = module(x, *args, **kwargs)
    (grad,) = torch.autograd.grad((out.float() ** 2).sum(), x, retain_graph=True) if x.requires_grad else (None,)
    (out.float() ** 2).sum().backward()
    return {"out": out.detach(), "x": grad, **{name: p.grad for name, p in module.named_parameters()}}


def agree(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], bound: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], value, rtol=bound, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("sizes", [{"tiles": 3}, {"tokens_per_tile": 1}, {}, {"tiles": 100}])
def test_outputs_and_gradients_are_those_of_the_whole(sizes: dict[str, int]) -> None:
    whole, x = made()
    module = tiled(copy.deepcopy(whole), **sizes)
    assert module.state_dict().keys() == whole.state_dict().keys()
    agree(gradients(module, x, 0.5), gradients(whole, x, 0.5))
    agree(gradients(module, x.detach(), factor=2.0), gradients(whole, x.detach(), factor=2.0))
    module.gate.requires_grad_(False), whole.gate.requires_grad_(False)
    agree(gradients(module, x[0]), gradients(whole, x[0]))
    with torch.no_grad():
        torch.testing.assert_close(module(x), whole(x))
    for each in (module, whole):
        each.requires_grad_(False)
    agree(gradients(module.eval(), x=x.detach().requires_grad_()), gradients(whole.eval(), x.detach().requires_grad_()))


def test_backward_repeats_the_masks_of_forward_and_leaves_the_random_state() -> None:
    module, x = made(dropout=0.5)
    tiled(module, 3)
    torch.manual_seed(1)
    out = module(x)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    tiles = [module.down(_hidden(module, tile)) for tile in _cut(x, 3)]  # draws as forward does
    torch.testing.assert_close(out, torch.cat(tiles, -2))
    torch.manual_seed(1)
    found = torch.autograd.grad(module(x).square().sum(), x)
    assert torch.equal(torch.rand(3), wanted)
    torch.testing.assert_close(found, torch.autograd.grad(torch.cat(tiles, -2).square().sum(), x))


def _cut(x: Tensor, tiles: int) -> list[Tensor]:
    ends = [x.shape[-2] * number // tiles for number in range(tiles + 1)]
    return [x[..., low:high, :] for low, high in zip(ends, ends[1:], strict=False)]


def _hidden(module: Gated, x: Tensor) -> Tensor:
    return module.dropout(torch.nn.functional.silu(module.gate(x)) * module.up(x) + module.again(x))


@pytest.mark.parametrize("kind", ["recomputed", "autocast", "compiled"])
def test_works_inside_of(kind: str) -> None:
    module, x = made(dropout=0.3, dtype=torch.float32)
    whole = copy.deepcopy(module)
    whole.dropout.p = module.dropout.p = 0.3 if kind == "recomputed" else 0.0
    tiled(module, 2)

    def run(block: nn.Module) -> dict[str, Tensor | None]:
        torch.manual_seed(3)
        if kind == "recomputed":
            return gradients(_Recomputed(block), x)
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return gradients(block, x)
        return gradients(torch.compile(block, backend="aot_eager"), x)

    if kind == "recomputed":  # a whole module draws its masks in another order
        whole = copy.deepcopy(module)
        torch.manual_seed(3)
        wanted = {"out": None, **gradients(whole, x)}
        found = {name.removeprefix("inner."): value for name, value in run(module).items()}
        agree(found, wanted, 1e-6)
    else:
        found = {name.removeprefix("_orig_mod."): value for name, value in run(module).items()}
        wanted = {name.removeprefix("_orig_mod."): value for name, value in run(whole).items()}
        agree(found, wanted, 1e-6 if kind == "compiled" else 3e-2)


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_weights_used_after_autocast_has_cast_them_get_gradients() -> None:
    module, x = made(dtype=torch.float32)
    tiled(module, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x) + module.gate(x).sum()
    out.sum().backward()
    whole, y = made(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = whole(y) + whole.gate(y).sum()
    out.sum().backward()
    torch.testing.assert_close(module.gate.weight.grad, whole.gate.weight.grad, rtol=3e-2, atol=3e-2)


def test_hooks_on_parameters_see_one_gradient() -> None:
    module, x = made()
    tiled(module, 3)
    seen: list[Tensor] = []
    module.up.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)  # type: ignore[func-returns-value]
    module(x).sum().backward()
    assert len(seen) == 1
    assert torch.equal(module.up.weight.grad, 2 * seen[0])  # type: ignore[arg-type]


def test_errors_of_bf16_are_at_most_twice_those_of_the_whole() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(torch.bfloat16)
    x = torch.randn(4, 256, 16, dtype=torch.bfloat16)
    exact = gradients(copy.deepcopy(whole).double(), x.double())
    theirs, ours = gradients(whole, x), gradients(tiled(whole, 32), x)
    for name, value in exact.items():
        if value is not None:
            errors = [float((each[name].double() - value).norm()) for each in (ours, theirs)]  # type: ignore[union-attr]
            assert errors[0] <= 2 * errors[1], (name, errors)


def test_copies_are_tiled_and_sizes_can_be_changed() -> None:
    module, x = made()
    wanted = gradients(tiled(module, 2), x)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        agree(gradients(copied, x), wanted)
        assert copied.tile_sizes == (2, None)
        assert type(copied) is type(module)
        copied.down.weight.data.zero_()
    agree(gradients(tiled(module, tokens_per_tile=2), x), wanted)
    assert isinstance(module, Gated)


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-2)


class Writes(nn.Module):
    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = to
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        (x if self.to == "input" else self.calls).add_(1)
        return x * 2


class Returns(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (Mixes(), ValueError, "Mixes does not work on each token by itself: the last of 7"),
        (Writes("input"), RuntimeError, "Writes writes to its input"),
        (Writes("buffers"), RuntimeError, "Writes writes to buffers"),
        (Returns(), TypeError, "Returns returned tuple"),
        (nn.Flatten(-2), ValueError, r"Flatten made \(2, \d+\) of \(2, \d, 6\)"),
    ],
)
def test_modules_that_do_not_fit_are_refused_at_the_first_call(
    module: nn.Module, error: type[Exception], text: str
) -> None:
    x = torch.randn(2, 7, 6)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(error, match=text):
            tiled(copy.deepcopy(module), 2)(
                x.clone().requires_grad_() if grad and not isinstance(module, Writes) else x.clone()
            ).sum().backward()


def test_what_cannot_be_tiled() -> None:
    module, x = made()
    with pytest.raises(ValueError, match="pass one of them"):
        tiled(module, 2, tokens_per_tile=3)
    with pytest.raises(ValueError, match="tiles=0"):
        tiled(module, 0)
    with pytest.raises(TypeError, match="tiles of lt_zero.tiled"):
        tiled(module, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="BatchNorm1d '1' takes means"):
        tiled(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2)
    with pytest.raises(ValueError, match=r"result of torch\.compile"):
        tiled(torch.compile(module, backend="eager"), 2)
    assigned = copy.deepcopy(module)
    assigned.forward = assigned.forward  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="forward that was assigned"):
        tiled(assigned, 2)
    tiled(module, 2)
    with pytest.raises(TypeError, match="several tensors"):
        module(x, torch.ones(2, 7, 6))
    with pytest.raises(TypeError, match=r"got \(6,\) first"):
        module(x[0, 0])
