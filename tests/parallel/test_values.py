"""What parameters that are DTensors show, and the functions that read and set all of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lt_zero
from lt_zero.checkpoint.live_weights import export_engine
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.core.engine.full_params import restore_whole
from lt_zero.core.engine.whole_model import full_state_dict
from tests.support.matrix import only, only_rows
from tests.support.parallel_nets import Net, Ranks, Run, all_states, all_weights, loss_of, reference_step, start
from tests.support.parity import OPTIMIZERS, STAGES, full_grads
from tests.support.pool import Pool

CUT = "layers.1.down.weight"  # along its columns
NAMES = [CUT, "layers.0.up.weight", "layers.0.up.bias", "layers.2.norm.weight", "head.weight"]
FAST = [3]
MESH = Ranks(2, 2)


def close(got: Tensor, want: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def trained(stage: int, ranks: Ranks = MESH, **options: Any) -> tuple[Run, Net, torch.optim.Optimizer]:
    """A run after one step, between the second backward and its step, and the same in one process."""
    run, reference = start(ranks, stage, **options), Net()
    expected = OPTIMIZERS["adamw"](reference.parameters())
    run.train(range(1))
    reference_step(reference, expected, 0, ranks.data)
    run.optimizer.zero_grad()
    run.backward(1)
    expected.zero_grad()
    for data in range(ranks.data):
        (loss_of(reference, 1, data) / ranks.data).backward()
    return run, reference, expected


def _read(run: Run, reference: Net, expected: torch.optim.Optimizer) -> None:
    mine, whole = dict(run.model.named_parameters()), dict(reference.named_parameters())
    for name in NAMES:
        parameter, want = mine[name], whole[name]
        assert parameter.shape == want.shape
        assert want.grad is not None
        close(lt_zero.full_master(parameter), want, name)
        grad = lt_zero.full_grad(parameter)
        assert grad is not None
        close(grad, want.grad, f"gradient of {name}")
        for key in ("exp_avg", "exp_avg_sq"):
            close(lt_zero.full_state(parameter, key), expected.state[want][key], f"{key} of {name}")
        assert lt_zero.full_state(parameter, "step") == 1
    names = {id(p): name for name, p in mine.items()}
    state = full_optimizer_state(run.sharded)
    if dist.get_rank() == 0:
        order = [names[id(p)] for p in run.sharded.parameters()]
        for number, name in enumerate(order):
            close(state["state"][number]["exp_avg"], expected.state[whole[name]]["exp_avg"], name)
    else:
        assert state == {}


def _norms(run: Run, reference: Net) -> None:
    run.engine.finish_reductions()
    for (name, parameter), want in zip(run.model.named_parameters(), reference.parameters(), strict=True):
        grad = parameter.grad
        assert grad is not None
        assert grad.shape == parameter.shape == want.shape, name
        for order in (2, float("inf")):
            norm: Any = grad.norm(order)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            close(norm, torch.linalg.vector_norm(want.grad, order), f"{order}-norm of {name}")
    run.model.get_parameter(CUT).grad.mul_(2)  # type: ignore[union-attr]
    grads = full_grads(run.engine)
    full, expected = lt_zero.full_grad(run.model.get_parameter(CUT)), reference.get_parameter(CUT).grad
    assert full is not None
    assert expected is not None
    close(full, 2 * expected)
    assert CUT in grads


def _uses(stage: int, run: Run, reference: Net) -> None:
    """Of values outside of forward: an error at stage 3, inside of ``gathered`` those of torch."""
    parameter, want = run.model.get_parameter(CUT), reference.get_parameter(CUT)
    assert isinstance(parameter, DTensor)
    uses: tuple[Callable[[], Any], ...] = (
        lambda: parameter.to_local(),
        lambda: parameter.full_tensor(),
        lambda: parameter.redistribute(placements=parameter.placements),
        lambda: parameter * 2,
        lambda: parameter.sum(),
    )
    if stage == 3:
        for use in uses:
            with pytest.raises(RuntimeError, match=f"{CUT}.*sharded over .*lt_zero.gathered"):
                use()
    with lt_zero.gathered(parameter):
        close(parameter.full_tensor(), want)
        close((parameter * 2).full_tensor(), want * 2)  # type: ignore[attr-defined]
        close(parameter.sum().full_tensor(), want.sum())  # type: ignore[attr-defined]
        mesh = parameter.device_mesh
        close(parameter.to_local(), want.chunk(mesh.size(), 1)[mesh.get_local_rank()])
        assert parameter.redistribute(placements=parameter.placements).shape == want.shape


def _looks(stage: int, ranks: Ranks) -> None:
    run, reference, expected = trained(stage, ranks)
    _uses(stage, run, reference)
    _read(run, reference, expected)
    _norms(run, reference)


@pytest.mark.parametrize("ranks", only([MESH], [Ranks(1, 2), MESH]))
@pytest.mark.parametrize("stage", only(FAST, STAGES))
def test_values_functions_and_norms_of_gradients_are_those_of_whole_tensors(
    pool: Pool, stage: int, ranks: Ranks
) -> None:
    pool.run(ranks.all, _looks, stage, ranks)


def _write(stage: int) -> None:
    run, reference, expected = trained(stage)
    mine, whole = dict(run.model.named_parameters()), dict(reference.named_parameters())
    drawn = torch.Generator().manual_seed(7)
    for name in NAMES:
        parameter, want = mine[name], whole[name]
        values = [torch.randn(want.shape, generator=drawn) for _ in range(3)]
        lt_zero.set_full_grad(parameter, values[0])
        lt_zero.set_full_state(parameter, values[1].abs(), "exp_avg_sq")
        lt_zero.set_full_master(parameter, values[2])
        want.grad, expected.state[want]["exp_avg_sq"] = values[0], values[1].abs()
        with torch.no_grad():
            want.copy_(values[2])
        with pytest.raises(ValueError, match=r"has shape \("):
            lt_zero.set_full_master(parameter, values[0].flatten()[:-1])
    run.optimizer.step()
    expected.step()
    for name, value in all_weights(run.engine).items():
        close(value, whole[name], name)


@pytest.mark.parametrize("stage", only(FAST, STAGES))
def test_setters_take_all_of_a_tensor(pool: Pool, stage: int) -> None:
    pool.run(4, _write, stage)


def _assigned() -> None:
    """At stage 0 ``p.grad`` can be replaced, by a DTensor or by all of a tensor; before backward it is added to."""
    run, reference, expected = trained(0)
    for name in NAMES:
        parameter, want = run.model.get_parameter(name), reference.get_parameter(name)
        value = torch.full_like(want, 0.25)
        parameter.grad = torch.full_like(parameter, 0.25) if name != "head.weight" else value
        want.grad = value
    run.optimizer.step()
    expected.step()
    for name, value in all_weights(run.engine).items():
        close(value, reference.get_parameter(name), name)


@pytest.mark.slow
def test_gradients_are_assigned(pool: Pool) -> None:
    pool.run(4, _assigned)


def _edits(stage: int, keys: dict[str, Any]) -> None:
    """In place, as DTensors, and through ``data``; then only on rank 0, which has not all of the tensor."""
    run, reference, expected = trained(stage, **keys)
    optimizer = run.optimizer
    names = [CUT, "layers.0.norm.bias"]
    for name in names:
        parameter, want = run.model.get_parameter(name), reference.get_parameter(name)
        with torch.no_grad():
            with lt_zero.gathered(parameter, write=True):
                parameter.mul_(0.5)
                parameter.data.add_(0.25)
            want.mul_(0.5).add_(0.25)
    atol = 1e-6 if not keys else 2e-2
    for name, value in all_weights(run.engine).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-5, atol=atol, msg=name)
    optimizer.step()
    expected.step()
    for name, value in all_weights(run.engine).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-5, atol=atol, msg=name)
    parameter = run.model.get_parameter(CUT)
    with pytest.raises(RuntimeError, match=f"{CUT}.*Make the same changes on all ranks"):
        _zero_on_one_rank(parameter)


@torch.no_grad()
def _zero_on_one_rank(parameter: nn.Parameter) -> None:
    with lt_zero.gathered(parameter, write=True):
        if dist.get_rank() == 0:
            parameter.zero_()


@pytest.mark.parametrize("stage", only(FAST, STAGES))
@pytest.mark.parametrize("keys", only([{}], [{}, {"bf16": {"enabled": True}}]))
def test_edits_in_place(pool: Pool, stage: int, keys: dict[str, Any]) -> None:
    pool.run(4, _edits, stage, keys)


def _plain_edits(stage: int) -> None:
    """Below stage 3, as with one process, without a context."""
    run, reference, expected = trained(stage)
    with torch.no_grad():
        for model in (run.model, reference):
            model.get_parameter(CUT).mul_(0.5)
            model.get_parameter("layers.0.up.bias").fill_(0.125)
        parameter, want = run.model.get_parameter("layers.1.up.weight"), reference.get_parameter("layers.1.up.weight")
        parameter.data = torch.full(parameter.shape, 0.5)
        want.fill_(0.5)
    run.optimizer.step()
    expected.step()
    for name, value in all_weights(run.engine).items():
        close(value, reference.get_parameter(name), name)


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_edits_without_a_context(pool: Pool, stage: int) -> None:
    pool.run(4, _plain_edits, stage)


def _whole(stage: int, keys: dict[str, Any], path: str) -> tuple[Any, Any]:
    run, _, _ = trained(stage, **keys)
    state = full_state_dict(run.engine)
    export_engine(run.engine, path, torch.float32)
    return all_weights(run.engine), state


@pytest.mark.parametrize("stage", only(FAST, STAGES))
@pytest.mark.parametrize("keys", only([{}], [{}, {"bf16": {"enabled": True}}]))
def test_state_dict_and_export_have_whole_tensors(pool: Pool, tmp_path: Path, stage: int, keys: dict[str, Any]) -> None:
    path = tmp_path / "weights.safetensors"
    (want, state), *others = pool.run(4, _whole, stage, keys, str(path))
    assert all(state == {} for _, state in others)
    assert list(state) == list(Net().state_dict())
    exported = load_file(path)
    for name, value in want.items():
        assert torch.equal(state[name], value), name
        assert torch.equal(exported[name], value), name


def _load(stage: int, keys: dict[str, Any], sharded: bool) -> Any:
    """``sharded``: a state dict of DTensors, as another tensor-parallel model has."""
    run = start(Ranks(2, 2), stage, **keys)
    other = Net()
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            parameter.add_(number)
    want = {name: value.clone() for name, value in other.state_dict().items()}
    state: Any = other.state_dict()
    if sharded:
        for name, parameter in run.model.named_parameters():
            if isinstance(parameter, DTensor):
                state[name] = torch.distributed.tensor.distribute_tensor(
                    state[name], parameter.device_mesh, parameter.placements
                )
    run.model.load_state_dict(state)
    assert state.keys() == want.keys()
    got = all_weights(run.engine)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    run.train(range(1))
    return all_weights(run.engine)


@pytest.mark.parametrize("stage", only(FAST, STAGES))
@pytest.mark.parametrize("sharded", only([True], [False, True]))
@pytest.mark.parametrize("keys", only([{}], [{}, {"bf16": {"enabled": True}}]))
def test_state_dicts_are_loaded(pool: Pool, stage: int, sharded: bool, keys: dict[str, Any]) -> None:
    got = pool.run(4, _load, stage, keys, sharded)[0]
    reference = Net()
    with torch.no_grad():
        for number, parameter in enumerate(reference.parameters()):
            parameter.add_(number)
    reference_step(reference, OPTIMIZERS["adamw"](reference.parameters()), 0, 2)
    for name, value in got.items():
        torch.testing.assert_close(
            value, reference.get_parameter(name).detach(), rtol=1e-5, atol=3e-2 if keys else 2e-6, msg=name
        )


def _dtypes(stage: int) -> None:
    """Parameters have the dtype of their values; without the engine, the values and the dtype that they had."""
    run, _, _ = trained(stage, bf16={"enabled": True})
    masters, parameters = all_weights(run.engine), dict(run.model.named_parameters())
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
    with lt_zero.gathered(run.model):
        assert {p.to_local().dtype for p in parameters.values() if isinstance(p, DTensor)} == {torch.bfloat16}
    restore_whole(run.engine)
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.float32
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(value.detach(), masters[name]), name
    x = torch.ones(2, 4, 6)
    reference = Net()
    reference.load_state_dict(masters)
    close(run.model(x), reference(x))


@pytest.mark.parametrize("stage", only(FAST, STAGES))
def test_dtypes_are_those_of_the_values(pool: Pool, stage: int) -> None:
    pool.run(4, _dtypes, stage)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return lt_zero.optim.Lamb(model.parameters(), lr=0.05, weight_decay=0.1)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


def muon_for_whole_matrices(model: nn.Module) -> torch.optim.Optimizer:
    matrix = [model.get_parameter("head.weight")]
    rest = [p for p in model.parameters() if p is not matrix[0]]
    groups = [{"params": matrix, "use_muon": True}, {"params": rest, "use_muon": False}]
    return lt_zero.optim.Muon(groups, adam_lr=0.01)


def _optimizes(stage: int, make: Any, ranks: Ranks, keys: dict[str, Any]) -> None:
    run, reference = start(ranks, stage, make, **keys), Net()
    expected = make(reference)
    for step in range(3):
        run.train(range(step, step + 1))
        reference_step(reference, expected, step, ranks.data)
        for name, value in all_weights(run.engine).items():
            close(value, reference.get_parameter(name), f"{name} after step {step}")
    for states in all_states(run).values():
        assert states[CUT].shape == reference.get_parameter(CUT).shape


@pytest.mark.parametrize("ranks", only([Ranks(2, 2)], [Ranks(1, 2), Ranks(2, 2)]))
@pytest.mark.parametrize("stage", only(FAST, STAGES))
@pytest.mark.parametrize("make", only([lamb], [lamb, adagrad]))
@pytest.mark.parametrize("keys", only([{}], [{}, {"fused_step": False}]))
def test_optimizers_that_are_right(pool: Pool, stage: int, make: Any, ranks: Ranks, keys: dict[str, Any]) -> None:
    pool.run(ranks.all, _optimizes, stage, make, ranks, keys)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_muon_for_matrices_that_are_whole(pool: Pool, stage: int) -> None:
    keys = {"zero": {"shard_along": "parameter"}, "sequence": False}
    pool.run(4, _optimizes, stage, muon_for_whole_matrices, Ranks(2, 2), keys)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return lt_zero.optim.Muon(lt_zero.optim.muon_groups(model))


def torch_muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


class Trusted(torch.optim.Optimizer):
    """An optimizer that is not known, and takes norms of parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * p.norm() / p.grad.norm(), alpha=-group["lr"])


def trusted(model: nn.Module) -> torch.optim.Optimizer:
    return Trusted(model.parameters())


def _refused(make: Any, stage: int) -> None:
    with pytest.raises(TypeError, match=r"groups of ranks have a part of 'layers\.0\.(up|down)\.weight' each"):
        start(Ranks(1, 2), stage, make, zero={"shard_along": "parameter"})


@pytest.mark.parametrize(
    ("make", "stage"),
    only_rows([(muon, 0), (trusted, 3)], [(muon, 0), (torch_muon, 1), (adafactor, 2), (trusted, 3), (trusted, 0)]),
)
def test_optimizers_that_need_whole_tensors_are_refused(pool: Pool, make: Any, stage: int) -> None:
    pool.run(2, _refused, make, stage)
