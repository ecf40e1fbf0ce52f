"""The native kernels against their torch references (to the last bit), torch.optim and fp64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels import dispatch, library
from tests.support.kernel_inputs import LOW, STATES, STEPS, options_of, rows


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = library.cpu()
    assert kernels is not None
    before = kernels.lt_cpu_isa()
    try:
        monkeypatch.setenv("LT_ZERO_ISA", "Portable")
        assert library.Loader().status("cpu").isa == "portable"
    finally:
        kernels.lt_cpu_use_isa(before)  # both loaders have the same library
    monkeypatch.setenv("LT_ZERO_ISA", "mmx")
    with pytest.warns(
        UserWarning, match="LT_ZERO_ISA=mmx is no instruction set of this CPU's(.|\\n)*unset LT_ZERO_ISA"
    ):
        assert library.Loader().get("cpu") is None


def copies(lists: list[Any]) -> list[Any]:
    return [t.clone() if isinstance(t, Tensor) else [tensor.clone() for tensor in t] for t in lists]


def torch_fuses() -> bool:
    """Whether torch rounds once where it multiplies and adds, as the kernels do; without AVX2 it rounds twice."""
    x = torch.full((64,), 1 + 2.0**-12)
    return bool(torch.addcmul(-(x * x), x, x).all())


def assert_same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    """Equal to the last bit; where torch rounds more often, to a few roundings in fp32 and the last bit of 16."""
    fuses = torch_fuses()
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            step = torch.finfo(x.dtype).eps
            some = {"rtol": step, "atol": step**2} if x.dtype.itemsize == 2 else {"rtol": 8 * step, "atol": 8 * step}
            torch.testing.assert_close(x, y, **{"rtol": 0, "atol": 0} if fuses else some, equal_nan=True)


@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_their_references_to_the_last_bit(isa: str, name: str) -> None:
    rng = random.Random(f"{isa} {name}")
    torch.manual_seed(rng.randrange(10**6))
    for _ in range(12):
        sizes = [rng.choice([0, 1, 2, 7, 15, 16, 17, 33, 1000, 32769]) for _ in range(rng.randint(1, 4))]
        offset, state = rng.randint(0, 3), rng.choice([torch.float32, torch.bfloat16])
        lists = [rows(sizes, torch.float32, offset), rows(sizes, rng.choice(LOW), offset)]
        lists += [rows(sizes, state, offset, torch.rand) for _ in range(STATES.get(name, 1))]
        lists += [rows(sizes, rng.choice(LOW), offset)] if name != "lamb_update" else []
        options = options_of(name, rng) | {"maximize": rng.random() < 0.3}
        options |= {"scale": rng.choice([None, torch.tensor(0.37)]), "clip": rng.choice([None, torch.tensor([0.9])])}
        ours, theirs = copies(lists), copies(lists)
        norms = getattr(ops, name)(*ours, **options)
        expected = getattr(ops, f"{name}_reference")(*theirs, **options)
        assert_same(ours, theirs)
        if name == "lamb_update":
            torch.testing.assert_close(norms, expected, rtol=1e-12 if torch_fuses() else 1e-6, atol=0)


@pytest.mark.parametrize("name", ["lamb_apply", "accumulate", "cast_scale"])
def test_other_passes_equal_their_references_to_the_last_bit(isa: str, name: str) -> None:
    rng = random.Random(f"{isa} {name}")
    for _ in range(12):
        sizes, offset = [rng.choice([0, 1, 5, 16, 31, 4097, 40000]) for _ in range(3)], rng.randint(0, 3)
        options: dict[str, Any] = {"factor": rng.choice([1.0, 0.3]), "scale": rng.choice([None, torch.tensor(0.7)])}
        if name == "lamb_apply":
            state = rng.choice([torch.float32, torch.bfloat16])
            lists = [rows(sizes, torch.float32, offset), *(rows(sizes, state, offset, torch.rand) for _ in range(2))]
            lists += [torch.rand(3), rows(sizes, rng.choice(LOW), offset)]  # type: ignore[list-item]
            options = {"eps": 1e-6, "weight_decay": rng.choice([0.0, 0.1])}
        else:
            target = rng.choice(LOW) if name == "cast_scale" else torch.float32
            lists = [rows(sizes, target, offset), rows(sizes, rng.choice(LOW), offset)]
        ours, theirs = copies(lists), copies(lists)
        getattr(ops, name)(*ours, **options)
        getattr(ops, f"{name}_reference")(*theirs, **options)
        assert_same(ours, theirs)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_a_hundred_steps_are_as_exact_as_torch(isa: str, optimizer: str) -> None:
    torch.manual_seed(1)
    start, grads = torch.randn(1003), torch.randn(100, 1003) * torch.logspace(-6, 3, 1003)
    keywords: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    keywords |= {"momentum": 0.9, "nesterov": True} if optimizer == "SGD" else {}

    def torch_steps(dtype: torch.dtype) -> Tensor:
        parameter = torch.nn.Parameter(start.to(dtype))
        stepper = getattr(torch.optim, optimizer)([parameter], **keywords)
        for grad in grads:
            parameter.grad = grad.to(dtype)
            stepper.step()
        return parameter.data

    p, s, t = start.clone(), torch.zeros(1003), torch.zeros(1003)
    for number, grad in enumerate(grads, 1):
        if optimizer.startswith("Adam"):
            numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "step": number}
            ops.adam_step([p], [grad], [s], [t], lr=1e-2, weight_decay=0.1, decoupled=optimizer == "AdamW", **numbers)
        elif optimizer == "Adagrad":
            ops.adagrad_step([p], [grad], [s], lr=1e-2, eps=1e-10, weight_decay=0.1)
        else:
            flags = {"dampening": 0.0, "nesterov": True, "first": number == 1}
            ops.sgd_step([p], [grad], [s], lr=1e-2, momentum=0.9, weight_decay=0.1, **flags)
    exact, theirs = torch_steps(torch.float64), torch_steps(torch.float32)
    worst = (theirs - exact).abs().max()
    assert worst > 0
    assert (p - exact).abs().max() <= 2 * worst


def test_lion_follows_the_paper(isa: str) -> None:
    torch.manual_seed(2)
    p, m, grads = torch.randn(77), torch.zeros(77), torch.randn(20, 77)
    exact, moment = p.double(), torch.zeros(77, dtype=torch.float64)
    for grad in grads:
        ops.lion_step([p], [grad], [m], lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1)
        g = grad.double()
        exact = exact - 1e-2 * ((0.9 * moment + 0.1 * g).sign() + 0.1 * exact)
        moment = 0.99 * moment + 0.01 * g
    torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=1e-6)


def test_lamb_over_fragments_is_lamb_over_the_whole(isa: str) -> None:
    torch.manual_seed(3)
    whole = [torch.randn(1001) for _ in range(2)] + [torch.zeros(1001) for _ in range(2)]
    cuts = [[t[:400].clone(), t[400:].clone()] for t in whole]
    numbers = {"eps": 1e-6, "weight_decay": 0.01}
    norms = ops.lamb_update(*[[t] for t in whole], beta1=0.9, beta2=0.999, **numbers)
    parts = ops.lamb_update(*cuts, beta1=0.9, beta2=0.999, **numbers).sum(0, keepdim=True)
    torch.testing.assert_close(norms, parts, rtol=1e-14, atol=0)
    assert norms[0, 0] == pytest.approx(whole[0].double().square().sum().item())
    rates = 0.1 * (norms[:, 0] / norms[:, 1]).sqrt().float()
    ops.lamb_apply([whole[0]], [whole[2]], [whole[3]], rates, **numbers)
    ops.lamb_apply(cuts[0], cuts[2], cuts[3], rates.expand(2).contiguous(), **numbers)
    assert torch.equal(whole[0], torch.cat(cuts[0]))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_in_every_lane(isa: str, dtype: torch.dtype, bad: float) -> None:
    for position in range(67):
        grad = torch.ones(67, dtype=dtype)
        assert ops.norm_squared([grad]).item() == 67
        grad[position] = bad
        assert not ops.norm_squared([torch.ones(5), grad]).isfinite()
        p, m, v = torch.zeros(67), torch.zeros(67), torch.zeros(67)
        ops.adam_step([p], [grad], [m], [v], lr=1.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
        others = torch.arange(67) != position
        assert p[others].isfinite().all()
        assert not (p[position].isfinite() and m[position].isfinite())


def test_norms_need_no_room_to_square(isa: str) -> None:
    largest = torch.full((100,), torch.finfo(torch.float32).max)
    tiny = torch.full((100,), 1e-45)
    assert ops.norm_squared([largest]).item() == pytest.approx(100 * float(largest[0]) ** 2, rel=1e-12)
    assert ops.norm_squared([tiny]).item() == pytest.approx(100 * float(tiny[0]) ** 2, rel=1e-12)


def test_every_16_bit_pattern_is_converted_as_torch_does(isa: str) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for low in (torch.bfloat16, torch.float16):
        values, out = patterns.view(low), torch.empty(2**16)
        ops.cast_scale([out], [values])
        torch.testing.assert_close(out, values.float(), rtol=0, atol=0, equal_nan=True)
        back = torch.empty(2**16, dtype=low)
        neighbours = torch.cat([out, out.nextafter(torch.tensor(9e9)), out.nextafter(torch.tensor(-9e9))])
        halves = (out[:-1] + out[1:]) / 2  # ties
        for wide in (neighbours, halves, torch.randn(1000) * 1e-40, torch.tensor([65519.9, 65520.0, -65520.0])):
            back = torch.empty(wide.numel(), dtype=low)
            ops.cast_scale([back], [wide])
            torch.testing.assert_close(back, wide.to(low), rtol=0, atol=0, equal_nan=True)


def test_no_result_depends_on_the_number_of_threads() -> None:
    torch.manual_seed(4)
    lists = [rows([200_003, 5, 70_001], torch.float32, 1, torch.rand) for _ in range(4)]
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            mine = copies(lists)
            numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
            ops.adam_step(*mine, **numbers)
            seen.append([*mine, [ops.norm_squared(mine[0])]])
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert_same(seen[0], other)


@pytest.mark.parametrize("name", STEPS)
def test_found_inf_writes_nothing(isa: str, name: str) -> None:
    lists = [rows([33], torch.float32, 0, torch.rand) for _ in range(lists_of(name))]
    mine = copies(lists)
    getattr(ops, name)(*mine, **options_of(name, random.Random(0)), found_inf=torch.tensor(1.0))
    assert_same(mine, lists)
    getattr(ops, name)(*mine, **options_of(name, random.Random(0)), found_inf=torch.tensor(0.0))
    assert not torch.equal(mine[2][0], lists[2][0])


def lists_of(name: str) -> int:
    """Weights, gradients, states and copies; LAMB's first pass writes no copies."""
    return 2 + STATES.get(name, 1) + (name != "lamb_update")


def arguments_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    one = lambda: [torch.rand(5), torch.rand(3)]  # noqa: E731
    if name == "norm_squared":
        return (one(),), {}
    if name in ("accumulate", "cast_scale"):
        return (one(), one()), {"factor": 0.5, "scale": torch.tensor(2.0)}
    if name == "take_edits":
        return (one(), [value.bfloat16() * 2 for value in one()]), {}
    if name == "lamb_apply":
        return (one(), one(), one(), torch.rand(2), one()), {"eps": 1e-6, "weight_decay": 0.1}
    lists = [one() for _ in range(lists_of(name))]
    return tuple(lists), options_of(name, random.Random(0))


@pytest.mark.parametrize("name", [*STEPS, "lamb_apply", "norm_squared", "accumulate", "cast_scale", "take_edits"])
def test_operators_pass_opcheck(name: str) -> None:
    args, kwargs = arguments_of(name)
    torch.library.opcheck(getattr(torch.ops.lt_zero, name).default, args, kwargs)
    for device in ("XPU", "PrivateUse1"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"lt_zero::{name}", device), "references"


def test_operators_work_under_compile() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        norm = ops.norm_squared([g]).sqrt()
        ops.adam_step(
            [p],
            [g * 2],
            [m],
            [v],
            lr=0.1,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            step=1,
            scale=1 / norm.float(),
        )
        return p + 1

    lists = [torch.rand(9) for _ in range(4)]
    mine, theirs = [t.clone() for t in lists], [t.clone() for t in lists]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*mine), step(*theirs))
    assert_same([mine], [theirs])


def test_errors_name_the_list_and_what_is_needed() -> None:
    p = [torch.rand(4)]
    with pytest.raises(ValueError, match=r"params\[0\] has dtype torch.float64"):
        ops.adagrad_step([p[0].double()], p, p, lr=1.0, eps=0.0, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"grads has 2 tensors, but 1 are needed"):
        ops.adagrad_step(p, p * 2, p, lr=1.0, eps=0.0, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"state\[0\] has shape \(3,\).*4 contiguous elements"):
        ops.adagrad_step(p, p, [torch.rand(3)], lr=1.0, eps=0.0, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"outs\[0\].*contiguous: False"):
        ops.adagrad_step(p, p, [torch.rand(4)], [torch.rand(4, 2)[:, 0]], lr=1.0, eps=0.0, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"scale has shape \(2,\)"):
        ops.accumulate(p, p, scale=torch.rand(2))


def test_references_run_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = [copies([[torch.ones(9)], [torch.full((9,), 0.5)], [torch.zeros(9)]]) for _ in range(2)]
    ops.lion_step(*mine, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0)
    monkeypatch.setattr(library, "cpu", lambda: None)
    monkeypatch.setattr(dispatch, "_loaded", {})
    assert not ops.available(torch.device("cpu"))
    ops.lion_step(*theirs, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0)
    assert_same(mine, theirs)
    assert ops.norm_squared([torch.ones(7)]).item() == 7
