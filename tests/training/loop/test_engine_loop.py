"""A loop of one's own (``lt_zero.initialize``): weights of plain torch, checkpoints, single values, errors."""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lt_zero
from lt_zero import CheckpointError, ConfigError
from lt_zero.checkpoint.native import load_rank_state
from lt_zero.checkpoint.open import open_source
from lt_zero.config.load import ConfigWarning
from tests.support.features import skip_without
from tests.support.lightning_tools import quick
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.pool import Pool

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
}
STATE = {"SGD": "momentum_buffer", "AdamW": "exp_avg"}
GAS = 3


def _config(stage: int, kind: str = "SGD", **keys: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": kind, "params": OPTIMIZERS[kind]},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.5,
        **keys,
    }


class Plain:
    """The same steps in one process."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), **OPTIMIZERS[kind])

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        world = dist.get_world_size()
        for micro, rank in itertools.product(range(GAS), range(world)):
            (next_token_loss(self.model, step, micro, rank) / (GAS * world)).backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()


def _backwards(engine: Any, step: int, plain: bool) -> None:
    """The micro-batches of a step, without the last ``engine.step()``."""
    for micro in range(GAS):
        assert engine.is_gradient_accumulation_boundary() == (micro == GAS - 1)
        loss = next_token_loss(engine, step, micro, dist.get_rank())
        loss.backward() if plain else engine.backward(loss)
        if micro < GAS - 1:
            engine.step()


def _same(found: Tensor | None, wanted: Tensor | None, name: str) -> None:
    assert found is not None
    assert wanted is not None
    torch.testing.assert_close(found.cpu(), wanted.detach(), rtol=1e-5, atol=1e-6, msg=name)


def _trains(stage: int, kind: str, plain: bool) -> None:
    reference = Plain(kind)
    model = copy.deepcopy(reference.model)
    engine, optimizer, loader, schedule = lt_zero.initialize(model=model, config=_config(stage, kind))
    assert loader is schedule is None
    assert engine.module is model
    assert optimizer is engine.optimizer
    for step in range(3):
        reference.backward(step)
        _backwards(engine, step, plain)
        for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
            _same(lt_zero.full_grad(p), q.grad, name)
        norm = nn.utils.get_total_norm([q.grad for q in reference.model.parameters() if q.grad is not None])
        engine.step()
        reference.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
            _same(lt_zero.full_master(p), q, name)
            _same(lt_zero.full_state(p, STATE[kind]), reference.optimizer.state[q][STATE[kind]], name)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (3, 3 * GAS, 0)
    assert engine.global_samples == engine.train_batch_size() * 3
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize(("stage", "kind", "plain"), [(3, "AdamW", False), (1, "SGD", True)])
def test_counters_norms_and_values_are_those_of_plain_torch(pool: Pool, stage: int, kind: str, plain: bool) -> None:
    pool.run(2, _trains, stage, kind, plain)


def _unscaled() -> list[Tensor]:
    """Two micro-batches without division, and one step that the caller decides."""
    torch.manual_seed(0)
    model = Net()
    engine, *_ = lt_zero.initialize(model=model, config=_config(2))
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(next_token_loss(engine, 0, 0, 0), scale_wrt_gas=False)
    engine.step()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(next_token_loss(engine, 0, 1, 0), scale_wrt_gas=False)
    return [lt_zero.full_grad(p) for p in model.parameters()]


def test_losses_need_not_be_divided(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Net()
    for micro in range(2):
        next_token_loss(model, 0, micro, 0).backward()
    for found, p in zip(pool.run(2, _unscaled)[0], model.parameters(), strict=True):
        _same(found, p.grad, "")


def _two_losses(stage: int) -> None:
    """Each micro-batch has two backwards, also the last one, after which gradients are those of the step."""
    reference = Plain("SGD")
    model = copy.deepcopy(reference.model)
    engine, *_ = lt_zero.initialize(model=model, config=_config(stage))
    reference.backward(0)
    for micro in range(GAS):
        loss = next_token_loss(engine, 0, micro, dist.get_rank())
        engine.backward(0.3 * loss, retain_graph=True)
        (0.7 * loss).backward()
        if micro < GAS - 1:
            engine.step()
    for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        assert q.grad is not None
        _same(lt_zero.full_grad(p), q.grad, name)
        assert p.grad is not None
        _same(p.grad.norm(), q.grad.norm(), name)
    engine.step()
    reference.step()
    for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        _same(lt_zero.full_master(p), q, name)


@pytest.mark.parametrize("stage", only([3], [0, 1, 3]))
def test_a_micro_batch_may_have_several_backwards(pool: Pool, stage: int) -> None:
    pool.run(2, _two_losses, stage)


def _unreduced() -> None:
    engine, *_ = lt_zero.initialize(model=Net(), config=_config(1))
    p = engine.module.head.weight
    engine.backward(next_token_loss(engine, 0, 0, dist.get_rank()))
    for call in (lt_zero.safe_get_local_grad, lambda p: lt_zero.safe_set_local_grad(p, torch.zeros(p.numel()))):
        with pytest.raises(RuntimeError, match="'embedding.weight' is not reduced yet: ask after the last micro-batch"):
            call(p)
    assert lt_zero.full_grad(p) is not None  # it reduces
    lt_zero.safe_get_local_grad(p)
    engine.zero_grad()
    if (mine := lt_zero.safe_get_local_fp32_param(p)) is not None:
        with pytest.raises(ValueError, match="'embedding.weight' has no gradient to be replaced"):
            lt_zero.safe_set_local_grad(p, torch.zeros_like(mine))


def test_gradients_that_are_not_reduced(pool: Pool) -> None:
    pool.run(2, _unreduced)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _values(engine: Any, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    named = engine.module.named_parameters()
    return {n: (lt_zero.full_master(p), lt_zero.full_state(p, STATE[kind])) for n, p in named}


def _engine(stage: int, kind: str, **keys: Any) -> Any:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
    return lt_zero.initialize(model=Net(), config=_config(stage, kind, scheduler=schedule, **keys))[0]


def _saves(folder: str, stage: int, kind: str) -> Any:
    engine = _engine(stage, kind)
    assert engine.load_checkpoint(folder) == (None, {})
    for step in range(2):
        _backwards(engine, step, False)
        engine.step()
        engine.save_checkpoint(folder, client_state={"epoch": step})
    engine.save_16bit_model(folder, "weights.bin")
    return _values(engine, kind), engine.get_lr()


def _loads(folder: str, stage: int, kind: str) -> Any:
    engine = _engine(stage, kind)
    path, client = engine.load_checkpoint(folder)
    counts = (engine.global_steps, engine.micro_steps, client, Path(path).name)
    values, rates = _values(engine, kind), engine.get_lr()
    _backwards(engine, 2, False)
    engine.step()
    assert engine.load_checkpoint(folder, "global_step1", load_module_only=True)[1] == {"epoch": 0}
    assert engine.global_steps == 3
    other = _engine(stage, kind, checkpoint={"load_module_only": True})
    assert other.load_checkpoint(folder)[1] == {"epoch": 1}
    assert other.global_steps == 0
    return counts, values, rates


@pytest.mark.parametrize(("stages", "kind"), only_rows([((3, 1), "AdamW")], [((3, 1), "AdamW"), ((1, 3), "SGD")]))
def test_checkpoints_load_at_other_stages_and_ranks(
    pool: Pool, tmp_path: Path, stages: tuple[int, int], kind: str
) -> None:
    wanted, rates = pool.run(2, _saves, str(tmp_path), stages[0], kind)[0]
    counts, values, found = pool.run(3, _loads, str(tmp_path), stages[1], kind)[0]
    assert counts == (2, 2 * GAS, {"epoch": 1}, "global_step2")
    assert found == rates
    for name, pair in wanted.items():
        assert all(map(torch.equal, values[name], pair)), name
    weights = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert all(torch.equal(weights[name], pair[0].half()) for name, pair in wanted.items())
    lt_zero.export(tmp_path, tmp_path / "last.bin", dtype=torch.float32)  # what ``latest`` names
    weights = torch.load(tmp_path / "last.bin", weights_only=True)
    assert all(torch.equal(weights[name], pair[0]) for name, pair in wanted.items())
    assert open_source(tmp_path, "global_step1").meta["global_step"] == 1
    with pytest.raises(CheckpointError, match="has no checkpoint 'global_step7': it is a directory with global_step1"):
        open_source(tmp_path, "global_step7")


def _keeps(folder: str, load: bool) -> Any:
    """The client state that a rank gets back; rank 1 saves nothing of its own under one key."""
    engine = _engine(3, "SGD")
    if load:
        return engine.load_checkpoint(folder)[1]
    rank = dist.get_rank()
    state = {"epoch": 1, "random": torch.tensor([rank]), "place": {"batch": 3 + rank}}
    engine.save_checkpoint(folder, client_state=state | ({} if rank == 1 else {"seed": 5}))
    return None


def test_a_client_state_that_differs_between_ranks_is_that_of_the_rank(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _keeps, str(tmp_path), False)
    for ranks in (2, 3):
        for rank, found in enumerate(pool.run(ranks, _keeps, str(tmp_path), True)):
            own = rank if ranks == 2 else 0
            assert found == {"epoch": 1, "random": torch.tensor([own]), "place": {"batch": 3 + own}, "seed": 5}


class _Unreadable(Exception):
    """Can be pickled, and not unpickled, as exceptions with several arguments."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def _keeps_what_can_be_kept(folder: str) -> tuple[Any, list[str]]:
    """The client state that a rank gets back, and what it was warned of."""
    engine = _engine(3, "SGD")
    rank = dist.get_rank()
    unpicklable = {"on 0": 1 if rank else (lambda: 1), "on 1": (lambda: 1) if rank else 1}
    state: dict[str, Any] = {**unpicklable, "error": _Unreadable(str(rank), 1), "empty": b"", "rank": b"x" * rank}
    state["conjugate"] = torch.tensor([complex(1, rank)]).conj()
    if rank == 1:
        state["only on 1"] = 5
    with mock.patch.object(load_rank_state.log, "warning") as told:
        engine.save_checkpoint(folder, client_state=state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are not read
        found = engine.load_checkpoint(folder)[1]
    return {key: found.get(key) for key in ("on 1", "empty", "rank", "conjugate")}, [
        call.args[0] for call in told.call_args_list if "only on 1" in call.args[0]
    ]


def test_values_that_a_rank_cannot_send_do_not_fail_a_save(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, _keeps_what_can_be_kept, str(tmp_path))
    for rank, (found, _) in enumerate((first, second)):
        conjugate = torch.tensor([complex(1, -rank)])
        assert found == {"on 1": 1, "empty": b"", "rank": b"x" * rank, "conjugate": conjugate}
    assert len(first[1]) == 1
    assert not second[1]


def _with(folder: str, ranks: int, step: int, load: bool) -> Any:
    """A step of 12 micro-batches of 3 samples, in a loop that knows the ranks only by their number."""
    keys = {"train_batch_size": 36, "gradient_accumulation_steps": 12 // ranks, "gradient_clipping": 0.0}
    torch.manual_seed(0)
    engine = lt_zero.initialize(model=Net(), config=_config(2, **keys))[0]
    if load:
        engine.backward(next_token_loss(engine, 7, 0, 0))  # in vain: load_checkpoint clears it
        engine.step()
        engine.load_checkpoint(folder)
    for micro in range(12 // ranks):
        engine.backward(next_token_loss(engine, step, 0, micro * ranks + dist.get_rank()))
        engine.step()
    if not load:
        engine.save_checkpoint(folder)
    assert (engine.global_steps, engine.global_samples) == (step + 1, 36 * (step + 1))
    return [lt_zero.full_master(p) for p in engine.module.parameters()]


def test_micro_batches_per_step_may_change(pool: Pool, tmp_path: Path) -> None:
    """6 of 2 ranks, then 4 of 3: steps end after 4, though 6 were counted before."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZERS["SGD"])
    for step in range(2):
        optimizer.zero_grad()
        for number in range(12):
            (next_token_loss(model, step, 0, number) / 12).backward()
        optimizer.step()
    pool.run(2, _with, str(tmp_path), 2, 0, False)
    for found, p in zip(pool.run(3, _with, str(tmp_path), 3, 1, True)[0], model.parameters(), strict=True):
        _same(found, p, "")


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    def engine(**keys: Any) -> Any:
        config = {**_config(0, gradient_accumulation_steps=1), **keys}
        return lt_zero.initialize(model=Net(depth=1), config=config)[0]

    saved = engine()
    saved.backward(next_token_loss(saved, 0, 0, 0))
    saved.step()
    saved.save_checkpoint(tmp_path)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
    with pytest.warns(UserWarning, match="has no schedule, and the engine's begins anew"):
        engine(scheduler=schedule).load_checkpoint(tmp_path)
    other = engine()
    before = [lt_zero.full_master(p) for p in other.module.parameters()]
    other.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(CheckpointError):
        other.load_checkpoint(tmp_path)
    assert all(map(torch.equal, before, [lt_zero.full_master(p) for p in other.module.parameters()]))
    (tmp_path / "latest").write_text("")
    with pytest.raises(CheckpointError, match="latest is empty. Pass the checkpoint's name"):
        saved.load_checkpoint(tmp_path)


# ---- setters, and this rank's elements -------------------------------------------------------------------------------


def _sets(stage: int, device: str) -> None:
    offload = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": device}}
    torch.manual_seed(0)
    model = Net()
    engine, *_ = lt_zero.initialize(
        model=model, config=_config(stage, zero_optimization=offload, gradient_clipping=0.0)
    )
    p = model.blocks[1].up.weight  # type: ignore[union-attr, union-attr]
    assert isinstance(p, nn.Parameter)
    with pytest.raises(KeyError, match=r"blocks.1.up.weight' has no state 'momentum_buffer'; it has none yet"):
        lt_zero.full_state(p, "momentum_buffer")
    _backwards(engine, 0, False)
    engine.step()
    value = torch.arange(p.numel()).view(p.shape) / 64.0
    lt_zero.set_full_master(p, value)
    assert torch.equal(lt_zero.full_master(p), value)
    with lt_zero.GatheredParameters(p):
        assert torch.equal(p.detach(), value)
    lt_zero.set_full_state(p, value, "momentum_buffer")
    assert torch.equal(lt_zero.full_state(p, "momentum_buffer"), value)
    local = lt_zero.safe_get_local_fp32_param(p)
    if local is not None:
        lt_zero.safe_set_local_optimizer_state(p, 2 * local, "momentum_buffer")
        assert torch.equal(lt_zero.safe_get_local_optimizer_state(p, "momentum_buffer"), 2 * local)  # type: ignore
    assert torch.equal(lt_zero.full_state(p, "momentum_buffer"), 2 * value)
    lt_zero.safe_set_local_fp32_param(p, None if local is None else 4 * local)
    assert torch.equal(lt_zero.safe_get_full_fp32_param(p), 4 * value)
    _backwards(engine, 1, False)
    lt_zero.set_full_grad(p, 8 * value)
    half = lt_zero.safe_get_local_grad(p)
    lt_zero.safe_set_local_grad(p, None if half is None else half / 2)
    grad = lt_zero.safe_get_full_grad(p)
    torch.testing.assert_close(grad, 4 * value)
    engine.step()
    expected = 4 * value - 0.1 * (0.9 * 2 * value + 4 * value + 0.01 * 4 * value)
    torch.testing.assert_close(lt_zero.full_master(p), expected)
    with pytest.raises(ValueError, match=r"has shape \(31, 10\), and the value \(3,\)"):
        lt_zero.set_full_master(p, torch.zeros(3))
    with pytest.raises(ValueError, match="no parameter of a model that lt_zero has sharded"):
        lt_zero.full_grad(nn.Parameter(torch.zeros(3)))
    engine.destroy()


@pytest.mark.parametrize(("stage", "device"), only_rows([(3, "cpu")], [(0, "none"), (2, "none"), (3, "cpu")]))
def test_values_can_be_set(pool: Pool, stage: int, device: str) -> None:
    if device != "none":
        skip_without("offload")
    pool.run(2, _sets, stage, device)


# ---- what scripts do besides -----------------------------------------------------------------------------------------


def _half(enabled: str) -> None:
    torch.manual_seed(0)
    model = Net(depth=1)
    scale = {"initial_scale_power": 8} if enabled == "fp16" else {}
    keys = {enabled: {"enabled": True, **scale}, "gradient_accumulation_steps": 1}
    engine, *_ = lt_zero.initialize(model=model, config=_config(2, "AdamW", **keys))
    loss = next_token_loss(engine, 0, 0, dist.get_rank())
    if enabled == "fp16":
        assert engine.loss_scale() == 2.0**8
        loss.backward()
        with pytest.raises(RuntimeError, match=r"engine.scale\(loss\).backward\(\)"):
            engine.step()
        engine.zero_grad()
        loss = next_token_loss(engine, 0, 0, dist.get_rank())
    engine.scale(loss).backward()
    grads = [lt_zero.full_grad(p) for p in model.parameters()]
    engine.zero_grad()
    engine.backward(next_token_loss(engine, 0, 0, dist.get_rank()))
    for p, wanted in zip(model.parameters(), grads, strict=True):
        found = lt_zero.full_grad(p)
        assert found is not None
        assert found.abs().max() < 10
        torch.testing.assert_close(found, wanted)
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("enabled", only(["fp16"], ["fp16", "bf16"]))
def test_losses_are_scaled(pool: Pool, enabled: str) -> None:
    pool.run(2, _half, enabled)


def _two_models() -> None:
    """Each is built in its own ``Init``, in its own dtype; the second trains on after the first has ended."""
    config = _config(3, gradient_accumulation_steps=1)
    torch.manual_seed(0)
    init = lt_zero.Init(config=config, dtype=torch.bfloat16)
    other = lt_zero.Init(config=config)
    with init:
        with other:
            second = Net(depth=1)
        first = Net(depth=1)
    assert {p.dtype for p in [*first.parameters(), *second.parameters()]} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    engines = [lt_zero.initialize(model=model.float(), config=config)[0] for model in (first, second)]
    for engine in engines:
        engine.backward(next_token_loss(engine, 0, 0, dist.get_rank()))
        engine.step()
        engine.destroy()


def test_models_are_built_and_ended_independently(pool: Pool) -> None:
    pool.run(2, _two_models)


def _moments() -> dict[str, Tensor]:
    """Factored: they have another shape than the parameter, and one rank has them."""
    torch.manual_seed(0)
    model = Net(depth=1)
    zero = {"stage": 2, "shard_along": "parameter"}
    config = _config(2, zero_optimization=zero, gradient_accumulation_steps=1, gradient_clipping=0.0)
    del config["optimizer"]
    optimizer = torch.optim.Adafactor(model.parameters())
    engine, *_ = lt_zero.initialize(model=model, config=config, optimizer=optimizer)
    engine.backward(next_token_loss(engine, 0, 0, 0))
    engine.step()
    p = engine.module.blocks[0].up.weight
    with pytest.raises(KeyError, match="no element-wise state 'step'"):
        lt_zero.set_full_state(p, torch.zeros_like(p), "step")
    found = {key: lt_zero.full_state(p, key) for key in ("row_var", "col_var")}
    with pytest.raises(KeyError, match="no element-wise state 'row_var'"):
        lt_zero.set_full_state(p, torch.zeros_like(p), "row_var")
    return found


def test_states_of_other_shapes_are_found(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Net(depth=1)
    optimizer = torch.optim.Adafactor(model.parameters())
    next_token_loss(model, 0, 0, 0).backward()
    optimizer.step()
    wanted = optimizer.state[model.blocks[0].up.weight]
    for found in pool.run(2, _moments):
        for key, value in found.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-9)


def _sharded_from_the_start() -> list[Tensor]:
    config = _config(3, gradient_accumulation_steps=1)
    torch.manual_seed(0)
    with lt_zero.Init(config=config):
        model = Net()
    with lt_zero.GatheredParameters(model.scale, modifier_rank=0):
        if dist.get_rank() == 0:
            model.scale.detach().fill_(2.0)
    data = TensorDataset(torch.arange(40).view(20, 2) % 11)
    engine, _, loader, _ = lt_zero.initialize(model=model, config=config, training_data=data)
    assert loader is not None
    seen = torch.zeros(11)
    for (batch,) in loader:
        assert batch.shape[0] <= 3
        seen.index_add_(0, batch.flatten(), torch.ones(batch.numel()))
        engine.backward(engine(batch).square().mean())
        engine.step()
    dist.all_reduce(seen)
    assert seen.sum() == 40
    return [lt_zero.full_master(p) for p in model.parameters()]


def test_a_model_is_built_sharded_and_fed_by_a_loader(pool: Pool) -> None:
    first, second = pool.run(2, _sharded_from_the_start)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train_batch_size": 7}, "train_batch_size=7 is not a multiple"),
        ({"train_batch_size": 18}, r"train_batch_size=18, but 3 \* 3 \* 1 ranks = 9"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, 'optimizer.params.lr="auto" has no Trainer'),
    ],
)
def test_configurations_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lt_zero.initialize(model=Net(), config={**_config(0), **keys})


def test_keys_of_a_trainer_are_told() -> None:
    config = _config(1, steps_per_print=5, checkpoint={"format": "full"}, wall_clock_breakdown=False)
    with pytest.warns(ConfigWarning, match=r"without a Trainer: steps_per_print, checkpoint.format\."):
        lt_zero.initialize(model=Net(), config=config)


def test_the_format_that_a_loop_writes_is_not_told() -> None:
    """At stage 0 ``checkpoint.async`` demands it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        lt_zero.initialize(model=Net(), config=_config(0, checkpoint={"async": True, "format": "sharded"}))


@pytest.mark.parametrize("call", [lt_zero.initialize, lt_zero.shard])
def test_notices_point_at_the_line_of_the_user(call: Any) -> None:
    config = {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}, "train_micro_batch_size_per_gpu": 1}
    with pytest.warns(ConfigWarning, match="stage3_max_live_parameters") as seen:
        call(Net(), config) if call is lt_zero.shard else call(model=Net(), config=config)
    assert [warning.filename for warning in seen] == [__file__]


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ValueError, match=r"lt_zero.initialize needs config=\.\.\."):
        lt_zero.initialize(model=Net())
    config = {key: value for key, value in _config(0).items() if key != "optimizer"}
    engine, optimizer, *_ = lt_zero.initialize(model=Net(), config=config)
    assert optimizer is None
    for call in (engine.step, lambda: engine.backward(torch.zeros(()))):
        with pytest.raises(RuntimeError, match="needs an optimizer"):
            call()
    engine.destroy()


def test_checkpoints_do_not_hold_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", "hunter2-secret")
    config = {**_config(0), "wandb": {"team": "${oc.env:LT_ZERO_TEST_SECRET}", "project": "shown-project"}}
    engine = lt_zero.initialize(model=Net(depth=1), config=config)[0]
    assert engine.config["wandb"]["team"] == "hunter2-secret"
    engine.save_checkpoint(tmp_path, "tag")
    engine.destroy()
    content = b"".join(file.read_bytes() for file in (tmp_path / "tag").iterdir())
    assert b"shown-project" in content
    assert b"hunter2" not in content


# ---- single values -------------------------------------------------------------------------------------------------


def _alone(call: str) -> str:
    """The error of a rank, of which the first calls what all have to."""
    with quick():
        engine = _engine(2, "AdamW")
        _backwards(engine, 0, False)
        p = next(iter(engine.module.parameters()))
        act = partial(getattr(lt_zero, call), p) if dist.get_rank() == 0 else engine.step
        with pytest.raises(RuntimeError) as caught:
            act()
    return str(caught.value)


@pytest.mark.parametrize("call", ["full_grad", "full_master"])
def test_what_some_ranks_do_not_call_is_an_error_on_all(pool: Pool, call: str) -> None:
    for text in pool.run(2, _alone, call):
        assert f"lt_zero.{call}" in text
