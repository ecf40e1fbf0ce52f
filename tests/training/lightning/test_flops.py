"""FLOPs of a micro-batch: against formulas by hand, per module, and without a trace in what is trained."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lt_zero import ZeroStrategy
from lt_zero.training.lightning.monitor import flops
from lt_zero.training.lightning.monitor.flops import Counted, FlopCount, Flops
from tests.support.lightning_tools import GPT, QUIET, sharded_trainer
from tests.support.pool import Pool

B = 3  # rows


def count(model: nn.Module, run: Callable[[], Tensor], batches: int = 2) -> FlopCount:
    found = FlopCount()
    found.request()
    for _ in range(batches):
        with found.forward(model, B):
            loss = run()
        with found.backward(loss):
            loss.backward()
    return found


def counted(model: nn.Module, *inputs: Tensor, **kwargs: Any) -> Counted:
    found = count(model, lambda: model(*inputs, **kwargs).sum()).counted
    assert found is not None
    return found


# ---- against formulas ----------------------------------------------------------------------------------------------


def test_linear() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
    found = counted(model, torch.randn(B, 4))
    first, second = 2 * B * 4 * 5, 2 * B * 5 * 6
    assert found.own == {"0": Flops(first, first), "2": Flops(second, 2 * second)}, "the input needs no gradient"
    assert found.total == Flops(first + second, first + 2 * second)


def test_frozen_layers_have_no_gradient_of_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    a, b, c = 2 * B * 20, 2 * B * 30, 2 * B * 42
    assert counted(model, torch.randn(B, 4)).own == {"0": Flops(a, 0), "1": Flops(b, b), "2": Flops(c, c)}


def test_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 2, stride=2))
    found = counted(model, torch.randn(B, 2, 8, 8))
    first, second = 2 * B * (6 * 6) * 3 * 2 * 9, 2 * B * (3 * 3) * 4 * 3 * 4
    assert found.own["0"].forward == first
    assert found.own["1"].forward == second
    assert found.own["0"].backward == first
    assert found.own["1"].backward > second  # torch's formula for gradients of inputs counts with padding and stride


class Attention(nn.Module):
    def __init__(self, heads: int = 2, width: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, -1, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_of_the_cpu() -> None:
    rows, heads, width = 5, 2, 4
    product = 2 * B * heads * rows * rows * width  # of queries and keys, or of scores and values
    found = counted(Attention(), torch.randn(B, rows, 8))
    assert found.own[""] == Flops(2 * product, 5 * product), "backward computes the scores again"


def test_products_with_vectors() -> None:
    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.vector = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))

        def forward(self) -> Tensor:
            return (self.matrix @ self.vector).sum() + self.vector @ self.vector

    assert counted(Vectors()).total.forward == 2 * 4 * 5 + 2 * 5


class Branches(nn.Module):
    """Two modules on an input without gradient, arguments by name, a product of its own, one that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention, self.again = Attention(), Attention()

    def forward(self, x: Tensor, recompute: bool = True) -> Tensor:
        y = (self.left(x) + self.right(input=x)) @ self.right.weight
        y = self.attention(x=y)
        y = checkpoint(self.again, y, use_reentrant=False) if recompute else self.again(y)
        return y @ self.left.weight


def test_each_module_has_what_it_did() -> None:
    model, x = Branches(), torch.randn(B, 5, 8)
    product = 2 * B * 5 * 8 * 8
    found = counted(model, x)
    assert found.own["left"] == found.own["right"] == Flops(product, product)
    assert found.own["attention.qkv"] == Flops(3 * product, 6 * product)
    assert found.own[""] == Flops(2 * product, 4 * product)
    apart = [Flops(f.forward, f.backward) for f in (found.by_module()["again"], found.by_module()["attention"])]
    assert apart[0] == apart[1]
    # checkpoint stops when it has the last input that backward needs: before the last product
    assert found.by_module()["again"].recomputed == found.by_module()["again"].forward - product
    assert found.by_module()["attention"].recomputed == 0
    plain = counted(model, x, recompute=False).total
    assert plain == Flops(found.total.forward, found.total.backward)
    assert not found.unseen


def test_gradient_penalty_is_no_recomputation() -> None:
    model = nn.Linear(4, 4, bias=False)

    def run() -> Tensor:
        x = torch.randn(B, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    found = count(model, run).counted
    assert found is not None
    assert found.total.recomputed == 0
    assert found.total.backward >= 4 * 2 * B * 16


# ---- what cannot be counted ----------------------------------------------------------------------------------------


def test_the_first_micro_batch_is_not_counted_and_the_rest_costs_nothing() -> None:
    model, entered = nn.Linear(4, 4), []
    found = FlopCount()
    found.request()
    for _ in range(4):
        with found.forward(model, B):
            entered.append(bool(model._forward_hooks))
            loss = model(torch.randn(B, 4)).sum()
        with found.backward(loss):
            loss.backward()
    assert entered == [False, True, False, False]
    assert found.flops_per_micro_batch == 2 * 2 * B * 16
    assert found.flops_of(1) == 2 * 2 * 16
    assert found.flops_of(2 * B) == 2 * found.flops_per_micro_batch


def test_operations_without_formula_are_named() -> None:
    found = count(model := nn.LSTM(4, 4), lambda: model(torch.randn(B, 4))[0].sum())
    assert found.flops_per_micro_batch is None
    assert found.problem is not None
    assert "aten.mkldnn_rnn_layer" in found.problem


def test_custom_operations_are_named() -> None:
    @torch.library.custom_op("lt_zero_test::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x + x

    double.register_autograd(lambda ctx, grad: 2 * grad)
    model = nn.Linear(4, 4)
    found = count(model, lambda: double(model(torch.randn(B, 4))).sum())
    assert found.flops_per_micro_batch is None
    assert found.counted is not None
    assert dict(found.counted.unseen) == {"lt_zero_test.double": 1}


def test_a_formula_that_fails_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("a shape that the formula does not know")

    monkeypatch.setitem(flops.FORMULAS, torch.ops.aten.addmm, broken)
    found = count(model := nn.Linear(4, 4), lambda: model(torch.randn(B, 4)).sum())
    assert found.flops_per_micro_batch is None
    assert found.problem is not None
    assert "addmm" in found.problem


class Layer(nn.Module):
    """Not one of torch's own, which Module.compile leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("how", ["module", "wrapped", "function", "fullgraph"])
def test_compiled_models_are_left_alone(how: str) -> None:
    runs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *args: runs.append("compiled") or graph.forward(*args)

    model = nn.Sequential(Layer())

    def square(x: Tensor) -> Tensor:
        return x @ x.T if how in ("function", "fullgraph") else x

    called: Callable[[Tensor], Tensor] = square
    if how in ("function", "fullgraph"):
        called = torch.compile(square, backend=backend, fullgraph=how == "fullgraph")
    if how == "module":
        model[0].compile(backend=backend)
    elif how == "wrapped":
        model[0] = torch.compile(model[0], backend=backend)  # type: ignore[assignment]
    found = count(model, lambda: called(model(torch.randn(B, 4))).sum(), 3)
    assert (found.flops_per_micro_batch, found.counted) == (None, None)
    assert found.problem is not None
    assert "torch.compile" in found.problem
    assert runs == ["compiled"] * 3, "counting would have run it uncompiled, for good"


def test_what_was_compiled_before_is_found_and_what_others_compiled_is_nothing() -> None:
    model = nn.Linear(4, 4)
    before = torch.compile(lambda x: torch.relu(model(x)), backend="aot_eager")
    before(torch.randn(B, 4)).sum().backward()
    plain = count(model, lambda: model(torch.randn(B, 4)).sum(), 3)
    assert plain.flops_per_micro_batch == 2 * 2 * B * 16
    found = count(model, lambda: before(torch.randn(B, 4)).sum(), 3)
    assert found.flops_per_micro_batch is None
    assert "torch.compile" in str(found.problem)
    assert before(torch.randn(B, 4)).grad_fn.name().startswith("CompiledFunction"), "it still runs compiled"


# ---- in training ---------------------------------------------------------------------------------------------------

PROFILE: dict[str, Any] = {"enabled": True, "top_modules": 2}


class Noisy(GPT):
    """Frozen layer and dropout; notes parameters after each step."""

    def __init__(self, world: int = 1) -> None:
        super().__init__(world)
        self.net.head.requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + F.dropout(self.temperature, 0.5).square().mean()

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs["loss"].item())


def _trained(stage: int, config: dict[str, Any]) -> Any:
    text = io.StringIO()
    with redirect_stdout(text):
        trainer = sharded_trainer(stage, config=config, max_epochs=2)
        model = Noisy(trainer.world_size)
        torch.manual_seed(5)
        trainer.fit(model)
    state = {name: value.tolist() for name, value in trainer.strategy.full_state_dict().items()}
    count = getattr(trainer.strategy.monitor, "flops", None)
    return state, model.seen, text.getvalue(), count.counted.total if count is not None else None


def test_stage_3_on_two_ranks_is_unchanged_and_counts_what_one_process_does(pool: Pool) -> None:
    plain, seen, text, none = pool.run(2, _trained, 3, {})[0]
    assert none is None
    assert "FLOP" not in text
    (got, losses, text, total), (*_, quiet, other) = pool.run(2, _trained, 3, {"flops_profiler": PROFILE})
    assert (got, losses) == (plain, seen), "bitwise"
    assert len(losses) == 4
    model = Noisy()
    batch = model.loader().dataset[:6]
    single = count(model, lambda: model.loss(batch)).counted
    assert single is not None
    assert total == other == single.total
    assert "FLOP" not in quiet, "rank 0 shows it"
    assert f"parameters: {sum(p.numel() for p in model.parameters()):,}" in text
    assert f"forward and backward: {total.model:,} FLOP" in text
    assert re.search(r"next micro-batch: forward [\d.]+ ms, backward [\d.]+ ms\n.* TFLOP/s", text)
    table = {cells[1]: cells for line in text.splitlines() if len(cells := re.split(r" *│ *", line)) > 7}
    for name, module in model.named_modules():
        if name:
            assert table[name][2:4] == [type(module).__name__, f"{sum(p.numel() for p in module.parameters()):,}"]
    (block,) = [single.by_module()["net.blocks.1"]]
    assert table["net.blocks.1"][4:6] == [f"{block.forward / 1e3:.4g} k", f"{block.backward / 1e3:.4g} k"]
    assert table["net.blocks.1"][6] == f"{block.model / total.model:.1%}"


class Adversaries(pl.LightningModule):
    """Two optimizers, stepped by hand, with products of matrices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.one, self.two), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(layer(batch).sum())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        class Products(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                torch.eye(8) @ torch.eye(8)
                return super().step(closure)

        return [Products(layer.parameters(), lr=0.1) for layer in (self.one, self.two)]

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(4 * B, 4), batch_size=B)  # type: ignore[arg-type]


def fitted(config: dict[str, Any], model: pl.LightningModule, **options: Any) -> tuple[ZeroStrategy, str]:
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, **config})
    with redirect_stdout(io.StringIO()) as text, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?!flops_profiler)")
        pl.Trainer(**{**QUIET, "devices": 1, "max_epochs": 1, "strategy": strategy, **options}).fit(model)
    return strategy, text.getvalue()


def test_manual_optimization_counts_all_of_a_training_step_but_optimizers() -> None:
    strategy, text = fitted({"flops_profiler": PROFILE}, Adversaries())
    assert strategy.monitor.flops is not None
    assert strategy.monitor.flops.flops_per_micro_batch == 2 * 2 * (2 * B * 16)
    assert "training step of the next micro-batch" in text
    assert "after 2 optimizer steps" in text


def test_a_step_that_never_comes_is_told() -> None:
    with pytest.warns(UserWarning, match="profile_step=9, and the last micro-batch came after 2 optimizer steps"):
        fitted({"flops_profiler": {**PROFILE, "profile_step": 9}}, Adversaries(), max_steps=4)


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "flops.txt"
    _, text = fitted({"flops_profiler": {**PROFILE, "output_file": str(file)}}, Adversaries())
    assert "flops_profiler" not in text
    written = file.read_text()
    assert "forward and backward" in written
    assert "\x1b" not in written


def test_a_file_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = Adversaries()
    model.training_step = lambda *_: pytest.fail("trains")  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"flops_profiler\.output_file=.*cannot be written \(File exists"):
        fitted({"flops_profiler": {**PROFILE, "output_file": f"{tmp_path}/file/flops.txt"}}, model)
    assert os.listdir(tmp_path) == ["file"]
