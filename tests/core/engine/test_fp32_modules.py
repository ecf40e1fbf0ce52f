"""fp32 islands: what the patterns find, what the boundary does, which standard modules need one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.checkpoint import checkpoint

from lt_zero.core.engine.fp32_hooks import install_fp32_modules
from lt_zero.core.engine.fp32_modules import (
    BATCH_NORMS,
    DEFAULT_ISLANDS_MIXED,
    DEFAULT_ISLANDS_TRUE,
    Fp32Modules,
    find_fp32_modules,
)
from tests.support.matrix import only

WIDTH = 8
LOW = (torch.bfloat16, torch.float16)
both = pytest.mark.parametrize("dtype", LOW)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x))) * self.gain


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Spy(nn.Module):
    """Notes the state that its forward runs in."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.zeros(1).dtype))
        return self.fn(*args, **kwargs)


def names(fp32_modules: Fp32Modules) -> list[str]:
    return [name for name, _ in fp32_modules.modules]


def kept(root: nn.Module, fp32_modules: Fp32Modules) -> list[str]:
    return [n for n, p in root.named_parameters() if p in fp32_modules.parameters]


def lower(root: nn.Module, fp32_modules: Fp32Modules, dtype: torch.dtype) -> nn.Module:
    """What the engine does: weights outside of islands in ``dtype``, buffers as they are."""
    for p in root.parameters():
        if p not in fp32_modules.parameters:
            p.data = p.data.to(dtype)
    return root


def install(root: nn.Module, fp32_modules: Fp32Modules, dtype: torch.dtype, true: bool) -> list[Any]:
    return install_fp32_modules(lower(root, fp32_modules, dtype) and fp32_modules, dtype, "cpu", true)


@contextmanager
def mode(dtype: torch.dtype, true: bool) -> Iterator[None]:
    """Forward as Lightning runs it; nothing may have leaked afterwards."""
    before = torch.get_default_dtype()
    try:
        if true:
            torch.set_default_dtype(dtype)
        with nullcontext() if true else torch.autocast("cpu", dtype, cache_enabled=False):
            yield
            assert torch.get_default_dtype() == (dtype if true else torch.float32)
            assert torch.is_autocast_enabled("cpu") == (not true)
    finally:
        torch.set_default_dtype(before)
    assert not torch.is_autocast_enabled("cpu")


def island_of(module: nn.Module) -> Fp32Modules:
    return Fp32Modules((("it", module),), frozenset(module.parameters()))


# What the patterns find


@pytest.mark.parametrize(
    "pattern", ["LayerNorm", "torch.nn.modules.normalization.LayerNorm", "*.norm.weight", "blocks.*.norm", "*.norm.*"]
)
def test_patterns_for_the_norms(pattern: str) -> None:
    root = Model()
    fp32_modules = find_fp32_modules(root, [pattern])
    assert names(fp32_modules) == ["blocks.0.norm", "blocks.1.norm"]
    assert kept(root, fp32_modules) == [f"blocks.{i}.norm.{n}" for i in (0, 1) for n in ("weight", "bias")]


def test_module_islands_take_their_subtree() -> None:
    root = Model()
    fp32_modules = find_fp32_modules(root, ["blocks.1", "Block", "blocks.1.norm"])
    assert names(fp32_modules) == ["blocks.0", "blocks.1"]
    assert kept(root, fp32_modules) == [n for n, _ in root.named_parameters() if n.startswith("blocks.")]


def test_children_by_pattern_and_bare_parameter() -> None:
    root = Model()
    fp32_modules = find_fp32_modules(root, ["blocks.0.*"])
    assert names(fp32_modules) == ["blocks.0.norm", "blocks.0.up"]
    assert kept(root, fp32_modules) == [n for n, _ in root.named_parameters() if n.startswith("blocks.0.")]


@pytest.mark.parametrize("pattern", ["scale", "blocks.0.gain"])
def test_parameter_of_a_composite_module_has_no_boundary(pattern: str) -> None:
    root = Model()
    fp32_modules = find_fp32_modules(root, [pattern])
    assert not fp32_modules.modules
    assert kept(root, fp32_modules) == [pattern]


def test_containers_are_entered() -> None:
    root = Model()
    assert (
        names(find_fp32_modules(root, ["blocks"]))
        == names(find_fp32_modules(root, ["ModuleList"]))
        == ["blocks.0", "blocks.1"]
    )
    root.bank = nn.ParameterList([torch.ones(2), torch.ones(2)])
    fp32_modules = find_fp32_modules(root, ["bank.0"])
    assert not fp32_modules.modules
    assert kept(root, fp32_modules) == ["bank.0", "bank.1"]


@pytest.mark.parametrize("pattern", ["embedding", "head.weight", "Embedding", "embedding.*"])
def test_ties_spread(pattern: str) -> None:
    root = Model(tied=True)
    fp32_modules = find_fp32_modules(root, [pattern])
    assert names(fp32_modules) == ["embedding", "head"]
    assert kept(root, fp32_modules) == ["embedding.weight", "head.bias"]


def test_ties_spread_over_several_steps() -> None:
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight, c.bias = a.weight, b.bias
    root = nn.Sequential(a, b, c, nn.Linear(2, 2))
    fp32_modules = find_fp32_modules(root, ["0.bias"])
    assert names(fp32_modules) == ["0", "1", "2"]
    assert len(fp32_modules.parameters) == len({*a.parameters(), *b.parameters(), *c.parameters()})


def test_module_that_is_also_registered_outside_is_an_island_of_its_own() -> None:
    root = Model()
    root.norm = root.blocks[0].norm
    fp32_modules = find_fp32_modules(root, ["Block"])
    assert names(fp32_modules) == ["blocks.0", "blocks.0.norm", "blocks.1"]
    only_inside = Model()
    only_inside.blocks[0].again = only_inside.blocks[0].norm
    assert names(find_fp32_modules(only_inside, ["Block", "LayerNorm"])) == ["blocks.0", "blocks.1"]


def test_wrappers_do_not_show() -> None:
    root = Model()
    root.blocks[0] = torch.compile(root.blocks[0], backend="eager")
    fp32_modules = find_fp32_modules(root, ["blocks.0.norm.weight", "blocks.0.up"])
    assert names(fp32_modules) == ["blocks.0.norm", "blocks.0.up"]
    assert names(find_fp32_modules(root, ["blocks.0"])) == ["blocks.0"]


def test_modules_whose_weights_a_parent_reads() -> None:
    root = nn.ModuleDict({"attention": nn.MultiheadAttention(WIDTH, 2), "head": spectral_norm(nn.Linear(2, 2))})
    for pattern in ("*.out_proj.weight", "attention.in_proj_bias", "NonDynamicallyQuantizableLinear"):
        assert names(find_fp32_modules(root, [pattern])) == ["attention"]
    assert names(find_fp32_modules(root, ["head.bias"])) == ["head"]
    assert names(find_fp32_modules(root, ["*.original"])) == ["head.parametrizations.weight"]


def test_classes_and_keep() -> None:
    root = Model()
    fp32_modules = find_fp32_modules(
        root, [], classes=(nn.LayerNorm, nn.BatchNorm1d, Model), keep=(nn.Embedding, nn.GroupNorm)
    )
    assert names(fp32_modules) == ["blocks.0.norm", "blocks.1.norm"]
    assert kept(root, fp32_modules)[0] == "embedding.weight"
    assert len(fp32_modules.parameters) == 5
    assert find_fp32_modules(root, []) == Fp32Modules((), frozenset())


@pytest.mark.parametrize("pattern", ["Model", "Module", "*"])
def test_the_root_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"fp16_override_modules: '[\w*]+' matches the whole model.*32-true"):
        find_fp32_modules(Model(), [pattern])
    with pytest.raises(ValueError, match="'weight' matches the whole model"):
        find_fp32_modules(nn.Linear(2, 2), ["weight"])


@pytest.mark.parametrize(
    ("pattern", "near"), [("LayerNrom", "LayerNorm"), ("*.nrom.weight", "norm.weight"), ("haed", "head"), ("%%", None)]
)
def test_no_match_is_an_error(pattern: str, near: str | None) -> None:
    with pytest.raises(ValueError, match="fp16_override_modules") as error:
        find_fp32_modules(Model(), ["Linear", pattern])
    assert repr(pattern) in str(error.value)
    assert ("Close names" in str(error.value)) == (near is not None)
    assert near is None or near in str(error.value)


# What the boundary does


@both
@pytest.mark.parametrize("true", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_same_as_by_hand(dtype: torch.dtype, true: bool, times: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    hand = copy.deepcopy(layer)
    install(layer, island_of(layer), dtype, true)
    x = torch.randn(3, WIDTH, dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    with mode(dtype, true):
        out = x
        for _ in range(times):
            out = layer(out)
    expected = y
    for _ in range(times):
        expected = F.linear(expected.float(), hand.weight, hand.bias)
        expected = expected.to(dtype) if true else expected
    assert out.dtype == (dtype if true else torch.float32)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, y.grad)
    for p, q in zip(layer.parameters(), hand.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, q.grad)


@both
@pytest.mark.parametrize("true", [True, False])
def test_which_tensors_are_cast(dtype: torch.dtype, true: bool) -> None:
    spy = Spy(lambda *args, **kwargs: {"args": list(args), **kwargs})
    install(spy, island_of(spy), dtype, true)
    low, double = torch.ones(2, dtype=dtype), torch.ones(2, dtype=torch.float64)
    with mode(dtype, true):
        got = spy(low, (double, torch.arange(2)), mask=torch.ones(2, dtype=torch.bool), deep={"a": [low, None, "s"]})
    outside = dtype if true else torch.float32
    assert spy.seen == [(False, torch.float32, torch.float32)]
    assert got["args"][0].dtype == got["deep"]["a"][0].dtype == outside
    assert got["args"][1][0] is double
    assert got["args"][1][1].dtype == torch.int64
    assert got["mask"].dtype == torch.bool
    assert got["deep"]["a"][1:] == [None, "s"]


def test_one_tensor_passed_twice_stays_one() -> None:
    spy = Spy(lambda q, k, v: q is k and k is v)
    install(spy, island_of(spy), torch.bfloat16, True)
    x = torch.ones(2, dtype=torch.bfloat16)
    assert spy(x, x, v=x)


@pytest.mark.parametrize("true", [True, False])
def test_recursion_is_cast_once(true: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            assert torch.get_default_dtype() == torch.float32
            y = self.layer(x)
            assert y.dtype == torch.float32
            return self(y, depth - 1) + torch.ones(1) if depth else y

    torch.manual_seed(0)
    module = Twice()
    hand = copy.deepcopy(module)
    # The layer is an island of its own too, as if it were registered outside as well.
    install(
        module, Fp32Modules((("a", module), ("b", module.layer)), frozenset(module.parameters())), torch.bfloat16, true
    )
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    with mode(torch.bfloat16, true):
        out = module(x)
    expected = hand(x.float())
    assert torch.equal(out, expected.to(torch.bfloat16) if true else expected)


@pytest.mark.parametrize("true", [True, False])
def test_nothing_leaks_when_forward_raises(true: bool) -> None:
    def fail(x: Tensor) -> None:
        raise KeyError("here")

    spy, layer = Spy(fail), nn.Linear(WIDTH, WIDTH)
    outer = nn.Sequential(layer, spy)
    fp32_modules = Fp32Modules((("o", outer), ("s", spy)), frozenset(outer.parameters()))
    install(outer, fp32_modules, torch.bfloat16, true)
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    with mode(torch.bfloat16, true):
        for module in (spy, outer):
            with pytest.raises(KeyError, match="here"):
                module(x)
            assert torch.is_autocast_enabled("cpu") == (not true)
        outer[1] = nn.Identity()
        assert outer(x).dtype == (torch.bfloat16 if true else torch.float32)


@pytest.mark.filterwarnings("error")
def test_a_pre_hook_that_raises_first() -> None:
    """The island was not entered then, and must not be left."""
    inner = Spy(lambda x: x)

    def attempt(x: Tensor) -> Tensor:
        with pytest.raises(KeyError, match="hook"):
            inner(x)
        assert torch.get_default_dtype() == torch.float32
        return x

    outer = Spy(attempt)
    fp32_modules = Fp32Modules((("o", outer), ("i", inner)), frozenset())
    install(nn.Sequential(outer, inner), fp32_modules, torch.bfloat16, True)

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyError("hook")

    handle = inner.register_forward_pre_hook(fail, prepend=True)
    x = torch.ones(1, dtype=torch.bfloat16)
    with mode(torch.bfloat16, True):
        with pytest.raises(KeyError, match="hook"):
            inner(x)
        assert outer(x).dtype == torch.bfloat16
        handle.remove()
        assert inner(x).dtype == torch.bfloat16


def test_other_hooks_run_inside() -> None:
    layer, seen = nn.Linear(WIDTH, WIDTH), []
    layer.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, torch.get_default_dtype())))
    layer.register_forward_hook(lambda module, args, out: seen.append((out.dtype, torch.get_default_dtype())))
    install(layer, island_of(layer), torch.bfloat16, True)
    with mode(torch.bfloat16, True):
        layer(torch.ones(1, WIDTH))
    assert seen == [(torch.float32, torch.float32)] * 2


def test_recovery_from_an_interrupt() -> None:
    def fail(x: Tensor) -> None:
        raise KeyboardInterrupt

    spy = Spy(fail)
    install(spy, island_of(spy), torch.bfloat16, True)
    x = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(KeyboardInterrupt), mode(torch.bfloat16, True):
        spy(x)
    spy.fn = torch.neg
    with mode(torch.bfloat16, True):
        assert spy(x).dtype == torch.bfloat16


@both
@pytest.mark.parametrize("true", [True, False])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_checkpointing(dtype: torch.dtype, true: bool, where: str) -> None:
    """Recomputation stops early, by an exception that passes through the islands."""
    states: list[Any] = []

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def run(self, x: Tensor) -> Tensor:
            states.append((torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
            return self.b(torch.tanh(self.a(x)))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=False) if where == "inside" else self.run(x)

    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mlp(), nn.Linear(WIDTH, WIDTH), Mlp())
    grads = []
    for checkpointed in (False, True):
        model = copy.deepcopy(root)
        install(model, find_fp32_modules(model, ["Mlp"]), dtype, true)
        x = torch.ones(2, WIDTH, dtype=dtype, requires_grad=True)
        with mode(dtype, true):
            outside = checkpointed and where == "outside"
            y = checkpoint(model, x, use_reentrant=False) if outside else model(x)
        y.float().pow(2).sum().backward()
        assert torch.get_default_dtype() == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    assert len(states) == (6 if where == "outside" else 8)
    assert set(states) == {(False, torch.float32)}
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_a_copy_is_left_alone() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    handles = install(layer, island_of(layer), torch.bfloat16, True)
    x = torch.ones(1, WIDTH)
    low = copy.deepcopy(layer).bfloat16()
    assert copy.deepcopy(layer)(x).dtype == torch.float32
    assert low(x.bfloat16()).dtype == torch.bfloat16
    assert layer(x).dtype == torch.bfloat16
    for handle in handles:
        handle.remove()
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("true", only([True], [True, False]))
def test_compiled_block(true: bool) -> None:
    dtype = torch.bfloat16
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Tanh())
    results = []
    for compiled in (False, True):
        copied = copy.deepcopy(model)
        install(copied, find_fp32_modules(copied, ["LayerNorm"]), dtype, true)
        run = torch.compile(copied, backend="aot_eager") if compiled else copied
        got = []
        for _ in range(2):
            x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).to(dtype).requires_grad_()
            with mode(dtype, true):
                y = run(x)
            y.float().pow(2).sum().backward()
            got += [y.detach(), x.grad]
        results.append([*got, *(p.grad for p in copied.parameters())])
    for eager, other in zip(*results, strict=True):
        assert eager.dtype == other.dtype
        torch.testing.assert_close(eager, other)


def test_compiled_island_that_raises() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(3, 3)

    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Bad())
    install(model, find_fp32_modules(model, ["Bad"]), torch.bfloat16, False)
    run = torch.compile(model, backend="aot_eager")
    with mode(torch.bfloat16, False), pytest.raises(Exception, match=r"shapes|multiplied|size"):
        run(torch.ones(2, WIDTH))


# Which standard modules need it

STANDARD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), (4, WIDTH)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(WIDTH), (4, WIDTH, 3, 3)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(WIDTH), (4, WIDTH, 3)),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), (4, WIDTH)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True), (4, WIDTH, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), (4, WIDTH)),
    "GroupNorm": (lambda: nn.GroupNorm(2, WIDTH), (4, WIDTH, 3)),
    "Bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), (4, WIDTH)),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), (4, WIDTH)),
    "PReLU": (lambda: nn.PReLU(WIDTH), (4, WIDTH)),
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH), (5, 4, WIDTH)),
    "GRUCell": (lambda: nn.GRUCell(WIDTH, WIDTH), (4, WIDTH)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), (2, 4, WIDTH)),
}
FAIL_TRUE = {"BatchNorm1d", "BatchNorm2d", "SyncBatchNorm", "spectral_norm"}
if torch.__version__ < (2, 13):  # type: ignore[operator]
    FAIL_TRUE.add("InstanceNorm1d")
FAIL_MIXED = {*FAIL_TRUE, "InstanceNorm1d", "LayerNorm", "GroupNorm", "Bilinear"}


def run_standard(name: str, fp32_modules: Callable[[nn.Module], Fp32Modules], dtype: torch.dtype, true: bool) -> Tensor:
    """One forward and backward of a standard module inside of a root, as the engine would run it."""
    make, shape = STANDARD[name]
    torch.manual_seed(0)
    module = make()
    root = nn.Sequential(module)
    found = fp32_modules(root)
    install(root, found, dtype, true)
    x = torch.randn(shape, dtype=dtype if true else torch.float32, requires_grad=True)
    with mode(dtype, true):
        out = module(*[x] * {"Bilinear": 2, "MultiheadAttention": 3}.get(name, 1))
    out = out[0] if isinstance(out, tuple) else out
    out.float().pow(2).sum().backward()
    for p in root.parameters():
        assert p.grad is None or p.grad.dtype == (torch.float32 if p in found.parameters else dtype)
    return out


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm, once per process
@both
@pytest.mark.parametrize("true", [True, False])
@pytest.mark.parametrize("name", STANDARD)
def test_standard_modules(name: str, true: bool, dtype: torch.dtype) -> None:
    """The defaults are what fails without: a torch that learns one of these makes its entry superfluous."""
    defaults = DEFAULT_ISLANDS_TRUE if true else DEFAULT_ISLANDS_MIXED
    out = run_standard(name, lambda root: find_fp32_modules(root, [], classes=defaults), dtype, true)
    assert not true or out.dtype == dtype
    if name in (FAIL_TRUE if true else FAIL_MIXED):
        with pytest.raises(RuntimeError, match="dtype|scalar type"):
            run_standard(name, lambda root: find_fp32_modules(root, []), dtype, true)


@both
@pytest.mark.parametrize("name", STANDARD)
def test_kept_parameters_are_plain_autocast(name: str, dtype: torch.dtype) -> None:
    """Under autocast, fp32 weights without a boundary compute what plain autocast does, bit for bit."""
    everything = frozenset[nn.Parameter]
    plain = run_standard(name, lambda root: Fp32Modules((), everything(root.parameters())), dtype, False)
    out = run_standard(name, lambda root: find_fp32_modules(root, [], keep=DEFAULT_ISLANDS_MIXED), dtype, False)
    assert out.dtype == plain.dtype
    if name in FAIL_MIXED:
        assert torch.equal(out, plain)
    else:
        torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)


@both
@pytest.mark.parametrize("name", sorted(FAIL_TRUE - {"InstanceNorm1d"}))
def test_kept_parameters_are_enough_for_batch_norms(name: str, dtype: torch.dtype) -> None:
    def find(root: nn.Module) -> Fp32Modules:
        return find_fp32_modules(root, [], classes=(ParametrizationList,), keep=BATCH_NORMS)

    assert run_standard(name, find, dtype, True).dtype == dtype
