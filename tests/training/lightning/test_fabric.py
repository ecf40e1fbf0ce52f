"""Fabric over the engine: weights of plain torch, several modules, clipping, accumulation, checkpoints, errors."""

from __future__ import annotations

import copy
import itertools
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import ConfigError, FabricZeroStrategy
from lt_zero.checkpoint.native import load_rank_state
from lt_zero.common.compat.of_compile import is_compiled
from lt_zero.common.errors import CheckpointError
from lt_zero.common.random_states import RandomStates
from lt_zero.common.saved_random_states import read_states
from lt_zero.training.lightning.data_position.loop import PLACE, LoopLoader
from lt_zero.training.lightning.fabric_items import FabricItems
from tests.support.features import needs
from tests.support.lightning_tools import GPT, sharded_trainer, torchrun_env
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.pool import Pool
from tests.support.resumes import Drawing, Placed, Reopening, Stateful, StatefulStream, rows, sampled, stream

OPTIMIZERS: dict[str, Any] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
}
GAS = 2


def _fabric(stage: int, precision: Any = None, **config: Any) -> Any:
    os.environ.update(torchrun_env())
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    strategy = FabricZeroStrategy(config={"zero_optimization": block, **config})
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size(), precision=precision)
    fabric.launch()
    return fabric


def _ddp() -> Any:
    os.environ.update(torchrun_env())
    fabric = L.Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    return fabric


def _optimizer(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(module.parameters(), **OPTIMIZERS[kind])
    return made


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _step(fabric: Any, model: Any, optimizer: Any, step: int, clip: dict[str, float] | None = None) -> Any:
    for micro in range(GAS):
        with fabric.no_backward_sync(model, enabled=micro < GAS - 1):
            fabric.backward(next_token_loss(model, step, micro, fabric.global_rank) / GAS)
    norm = fabric.clip_gradients(model, optimizer, **clip) if clip else None
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _plain_step(model: nn.Module, optimizer: Any, step: int, clip: dict[str, float] | None = None) -> Any:
    world, norm = dist.get_world_size(), None
    for micro in range(GAS):
        for rank in range(world):
            (next_token_loss(model, step, micro, rank) / (GAS * world)).backward()
    if clip and "clip_val" in clip:
        nn.utils.clip_grad_value_(model.parameters(), clip["clip_val"])
    elif clip:
        norm = nn.utils.clip_grad_norm_(model.parameters(), **clip)  # type: ignore[arg-type]
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _same(module: nn.Module, wanted: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(lt_zero.full_master(p), q.detach(), rtol=1e-5, atol=1e-6, msg=name)


CLIPS: list[dict[str, float] | None] = [
    None,
    {"max_norm": 0.5},
    {"clip_val": 0.01},
    {"max_norm": 0.5, "norm_type": float("inf")},
]
COMPILED: dict[str, Any] = {"compile": {"backend": "aot_eager"}}


def _trains(stage: int, kind: str, clip: dict[str, float] | None, joint: bool, keys: dict[str, Any]) -> None:
    fabric = _fabric(stage, **keys)
    plain = _net()
    reference = _optimizer(kind, plain)
    net = copy.deepcopy(plain)
    if joint:
        model, optimizer = fabric.setup(net, _optimizer(kind, net))
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(_optimizer(kind, net))
    assert all(is_compiled(block) == ("compile" in keys) for block in net.blocks)
    for step in range(3):
        norm = _step(fabric, model, optimizer, step, clip)
        wanted = _plain_step(plain, reference, step, clip)
        assert (norm is None) == (wanted is None)
        if norm is not None:
            torch.testing.assert_close(norm.float(), wanted, rtol=1e-5, atol=0)
        _same(net, plain)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.arange(5)[None]), plain(torch.arange(5)[None]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "kind", "clip", "joint", "keys"),
    only_rows(
        [(1, "AdamW", CLIPS[1], True, {}), (3, "AdamW", CLIPS[3], False, {})],
        [
            (0, "SGD", CLIPS[0], False, {}),
            (1, "AdamW", CLIPS[1], True, {}),
            (2, "SGD", CLIPS[2], True, {}),
            (3, "AdamW", CLIPS[3], False, {}),
            (2, "AdamW", CLIPS[1], True, COMPILED),
            (3, "SGD", CLIPS[1], False, COMPILED),
        ],
    ),
)
def test_calls_return_what_fabrics_own_do(
    pool: Pool, stage: int, kind: str, clip: dict[str, float] | None, joint: bool, keys: dict[str, Any]
) -> None:
    pool.run(2, _trains, stage, kind, clip, joint, keys)


def _clips_twice(clip: dict[str, float]) -> None:
    """By the script, and then to the norm of the configuration: that of what the first has left."""
    fabric = _fabric(2, gradient_clipping=0.2, on_nonfinite="skip")
    plain = _net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net := copy.deepcopy(plain), torch.optim.SGD(net.parameters(), lr=0.1))
    _step(fabric, model, optimizer, 0, clip)
    call = reference.step
    reference.step = lambda *_: (nn.utils.clip_grad_norm_(plain.parameters(), 0.2), call())[1]  # type: ignore
    _plain_step(plain, reference, 0, clip)
    _same(net, plain)


@pytest.mark.parametrize("clip", [{"clip_val": 0.02}, {"max_norm": 0.05, "norm_type": float("inf")}])
def test_a_norm_is_that_of_gradients_that_were_clipped_before(pool: Pool, clip: dict[str, float]) -> None:
    pool.run(2, _clips_twice, clip)


# ---- several modules -------------------------------------------------------------------------------------------------


def _gan_losses(generator: Any, critic: Any, step: int, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 * step + rank)
    real, fake = torch.randn(4, 5), generator(torch.randn(4, 3))
    return critic(fake.detach()).mean() - critic(real).mean(), -critic(fake).mean()


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 5))
    return generator, nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 1))


def _several(stage: int, folder: str) -> None:
    fabric = _fabric(stage)
    modules, plain = _pair(), _pair()
    pairs = [fabric.setup(module, _optimizer("SGD", module)) for module in modules]
    references = [_optimizer("SGD", module) for module in plain]
    (generator, step_g), (critic, step_c) = pairs
    state = {"g": generator, "c": critic, "og": step_g, "oc": step_c, "epoch": 0}
    for step in range(3):
        if step == 2:
            state["epoch"] = 7
            fabric.save(f"{folder}/both", state)
        step_c.zero_grad()
        loss_c, loss_g = _gan_losses(generator, critic, step, fabric.global_rank)
        fabric.backward(loss_c, model=critic)
        step_c.step()
        step_g.zero_grad()
        _, loss_g = _gan_losses(generator, critic, step, fabric.global_rank)
        fabric.backward(loss_g)
        step_g.step()
        references[1].zero_grad()
        world = fabric.world_size
        for rank in range(world):
            (_gan_losses(*plain, step, rank)[0] / world).backward()
        references[1].step()
        references[0].zero_grad()
        for rank in range(world):
            (_gan_losses(*plain, step, rank)[1] / world).backward()
        references[0].step()
        for module, wanted in zip(modules, plain, strict=True):
            _same(module, wanted)
    after = [lt_zero.full_master(p) for module in modules for p in module.parameters()]
    state["epoch"] = 0
    assert fabric.load(f"{folder}/both", state) == {}
    assert state["epoch"] == 7
    before = [lt_zero.full_master(p) for module in modules for p in module.parameters()]
    assert not any(map(torch.equal, before, after))


@pytest.mark.parametrize("stage", only([3], [0, 2, 3]))
def test_two_modules_with_an_optimizer_each(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _several, stage, str(tmp_path))


def _joint() -> None:
    fabric = _fabric(2)
    generator, critic = _pair()
    fabric.setup_module(generator)
    alone = torch.optim.SGD(critic.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD has no parameters of a module that is set up"):
        fabric.setup_optimizers(alone)
    both = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="SGD steps parameters of several modules"):
        fabric.setup_optimizers(both)


def test_optimizers_that_cannot_be_set_up(pool: Pool) -> None:
    pool.run(2, _joint)


def _compresses() -> None:
    fabric = _fabric(1, gradient_compression={"algorithm": "1bit"})
    generator, critic = _pair()
    fabric.setup_module(generator)
    with pytest.raises(ConfigError, match=r"gradient_compression, .* of one module, and this is another"):
        fabric.setup_module(critic)


@needs("compression")
def test_gradients_of_one_module_are_compressed(pool: Pool) -> None:
    pool.run(2, _compresses)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _saves(path: str, stage: int, form: str) -> dict[str, Tensor]:
    fabric = _fabric(stage, checkpoint={"format": form}) if form != "ddp" else _ddp()
    net = _net()
    optimizer = _optimizer("AdamW", net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = fabric.setup(net, optimizer)
    for step in range(2):
        _step(fabric, model, optimizer, step)
        schedule.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "schedule": schedule, "note": [1, "a"], "steps": 2})
    head = {"model": lambda name, value: name.startswith("blocks.0") and value.ndim == 1}
    fabric.save(f"{path}-part", {"model": model}, filter=head)
    _step(fabric, model, optimizer, 2)
    return {n: p.detach() if form == "ddp" else lt_zero.full_master(p) for n, p in net.named_parameters()}


class Fillable(Net):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def _loads(path: str, stage: int, ddp: bool = False) -> dict[str, Tensor]:
    fabric = _fabric(stage)
    with fabric.init_module(empty_init=stage == 2):
        net = Fillable()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(_optimizer("AdamW", net))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "steps": 0}
    assert fabric.load(path, state) == {"note": [1, "a"]}
    assert state["steps"] == 2
    assert schedule.get_last_lr() == [OPTIMIZERS["AdamW"]["lr"] / 4]
    part = fabric.load(f"{path}-part")["model"]
    assert sorted(part) == ["blocks.0.down.bias", "blocks.0.norm.bias", "blocks.0.norm.weight", "blocks.0.up.bias"]
    with pytest.raises(KeyError, match="'more'"):
        fabric.load(path, {"model": model, "more": 1})
    assert "note" in fabric.load(path, {"model": model, "more": 1}, strict=False)
    fabric.load(path, {"optimizer": optimizer}, strict=False)
    for micro in range(GAS):  # with as many samples as those who saved had
        loss = sum(next_token_loss(model, 2, micro, rank) for rank in range(2)) / (2 * GAS)
        fabric.backward(loss)
    optimizer.step()
    return {name: lt_zero.full_master(p) for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("stages", "form"),
    only_rows(
        [((3, 2), "sharded"), ((2, 3), "full")],
        [((3, 2), "sharded"), ((2, 3), "full"), ((1, 0), "sharded"), ((0, 2), "ddp")],
    ),
)
def test_goes_on_at_other_stages_and_ranks(pool: Pool, tmp_path: Path, stages: tuple[int, int], form: str) -> None:
    path = str(tmp_path / "saved")
    wanted = pool.run(2, _saves, path, stages[0], form)[0]
    found = pool.run(3, _loads, path, stages[1])[0]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def _reads(loader: Any, count: int) -> list[Any]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def _loader() -> Stateful:
    """A loader that resumes by itself, in an order of each rank's own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return Stateful(torch.arange(24.0).view(-1, 2), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]


def _saves_values(path: str, form: str) -> tuple[list[Any], Any]:
    fabric, loader = _fabric(1, checkpoint={"format": form}), _loader()
    model = fabric.setup_module(_net())
    batches = iter(loader)
    _reads(batches, 2)
    torch.manual_seed(dist.get_rank())
    only = {"on rank 0": 1} if fabric.is_global_zero else {}
    items = {"model": model, "loader": loader, "random": torch.get_rng_state(), "all": [1], **only}
    fabric.save(path, items)
    return _reads(batches, 3), torch.rand(1).item()


def _loads_values(path: str, warns: bool) -> tuple[list[Any], Any]:
    fabric, loader = _fabric(1), _loader()
    state: dict[str, Any] = {"model": fabric.setup_module(_net()), "loader": loader, "random": None, "all": None}
    with mock.patch.object(load_rank_state.log, "warning") as told:
        assert fabric.load(path, state) == {"on rank 0": 1}
    texts = [call.args[0] for call in told.call_args_list]
    text = "another value of 'loader', 'random', and 3 ranks go on where 2"
    assert [text in found for found in texts] == ([True] if warns and fabric.is_global_zero else [])
    assert state["all"] == [1]
    assert isinstance(state["random"], Tensor)
    torch.set_rng_state(state["random"])
    return _reads(loader, 3), torch.rand(1).item()


@pytest.mark.parametrize("form", only(["sharded"], ["sharded", "full"]))
def test_items_that_differ_between_ranks_are_those_of_the_rank(pool: Pool, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "saved")
    wanted = pool.run(2, _saves_values, path, form)
    assert wanted[0] != wanted[1]
    assert pool.run(2, _loads_values, path, False) == wanted
    assert pool.run(3, _loads_values, path, True)[2] == wanted[0]


LOADERS: dict[str, Any] = {
    "by epoch": lambda: rows(4, kind=Stateful),
    "drawn": lambda: sampled(4, Drawing, kind=Reopening),
    "stream": lambda: stream(4, Placed, StatefulStream),
}
POINTS = [3, 6, 8]  # in the first pass, in the second, and after its last batch
ENDS = [0, 12]  # before the first pass, and between two


def _reads_on(loader: Any, count: int, save: Any = None) -> list[Any]:
    """What a loop sees in batches of several passes, and random numbers that it draws beside."""
    seen: list[Any] = []
    while len(seen) < count:
        if save is not None and len(seen) in ENDS:
            save(len(seen))
        for batch in loader:
            seen.append((batch.tolist(), torch.rand(1).item(), random.random(), np.random.rand()))
            if save is not None and len(seen) in POINTS:
                save(len(seen))
            if len(seen) == count:
                break
    return seen


def _saves_places(folder: Path, kind: str) -> list[list[Any]]:
    """What a loop sees after each of the points."""
    fabric = _fabric(1)
    loader = fabric.setup_dataloaders(LOADERS[kind]())

    def save(point: int) -> None:
        fabric.save(folder / f"{point}", {"loader": loader, "random": RandomStates.now().state_dict()})

    torch.manual_seed(7 + dist.get_rank())
    seen = _reads_on(loader, 14, save)
    return [seen[point:] for point in POINTS + ENDS]


def _loads_places(folder: Path, kind: str) -> list[list[Any]]:
    """What loops see that go on at the points, with loaders of their own."""
    found = []
    for point in POINTS + ENDS:
        fabric = _fabric(1)
        state: dict[str, Any] = {"loader": fabric.setup_dataloaders(LOADERS[kind]()), "random": None}
        fabric.load(folder / f"{point}", state)
        fabric.save(folder / "again", state)  # before a batch was read
        fabric.load(folder / "again", state)
        read_states(state["random"], "random").apply()
        found.append(_reads_on(state["loader"], 14 - point))
    return found


@pytest.mark.parametrize("kind", only(["by epoch"], LOADERS))
def test_a_loader_goes_on_where_a_loop_has_saved_it(pool: Pool, tmp_path: Path, kind: str) -> None:
    """With the epoch that Fabric counts, and without a random number that the run in one piece does not draw."""
    want = pool.run(2, _saves_places, tmp_path, kind)
    assert pool.run(2, _loads_places, tmp_path, kind) == want


def test_a_place_of_a_loader_that_is_damaged_is_named() -> None:
    made = LoopLoader(rows(4, kind=Stateful), 1, False, lambda make: make()).loader
    assert isinstance(made, Stateful)
    state = made.state_dict()
    for change in ({"passes": None}, {"place": {**state[PLACE]["place"], "fetched": -1}}, {"place": 3}):
        with pytest.raises(CheckpointError, match="lt_zero_place: .* of a loader cannot be read"):
            made.load_state_dict({**state, PLACE: {**state[PLACE], **change}})
    made.load_state_dict({key: value for key, value in state.items() if key != PLACE})  # as other strategies save it


def _raw(path: str) -> None:
    fabric = _fabric(3)
    net = _net()
    if fabric.is_global_zero:
        torch.save(net.state_dict(), path)
    fabric.barrier()
    torch.manual_seed(9)
    other = Net()
    model = fabric.setup_module(other)
    fabric.load_raw(path, model)
    _same(other, net)
    full = fabric.strategy.full_state_dict(model)
    assert list(full) == (list(net.state_dict()) if fabric.is_global_zero else [])
    fabric.strategy.export(model, f"{path}.out.pt")
    assert torch.equal(torch.load(f"{path}.out.pt")["scale"], net.scale.half())


def test_a_raw_file_and_an_export(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _raw, str(tmp_path / "raw.pt"))


def _nested_names(folder: str) -> None:
    fabric = _fabric(3, checkpoint={"save_frozen": False})
    modules = _pair()
    modules[0][0].requires_grad_(False)
    (net, step_net), (head, step_head) = [fabric.setup(m, _optimizer("AdamW", m)) for m in modules]
    _, loss = _gan_losses(net, head, 0, fabric.global_rank)
    fabric.backward(loss)
    step_net.step()
    step_head.step()
    state = {"notes": {"a": 1}, "net": net, "net.0": head, "of_net": step_net, "of_head": step_head}
    fabric.save(f"{folder}/both", state)
    fabric.save(f"{folder}/one", {"notes": {"a": 1}, "net": net, "of_net": step_net, "of_head": step_head})
    wanted = [lt_zero.full_master(p) for m in modules for p in m.parameters()]
    step_net.step()
    step_head.step()
    assert fabric.load(f"{folder}/both", state) == {}
    assert all(map(torch.equal, wanted, [lt_zero.full_master(p) for m in modules for p in m.parameters()]))
    fabric.load(f"{folder}/one", {"of_head": step_head}, strict=False)
    fabric.load_raw(f"{folder}/one", net)
    with pytest.raises(CheckpointError, match=r"has 2 optimizers \(of_net, of_head\)"):
        fabric.load_raw(f"{folder}/one", step_net)
    other = nn.Linear(2, 2)
    _, step_other = fabric.setup(other, _optimizer("AdamW", other))
    with pytest.raises(CheckpointError, match="leave the optimizer out of what fabric.load gets"):
        fabric.load(f"{folder}/one", {"of_head": step_other}, strict=False)
    with pytest.raises(CheckpointError, match="no state of one: check the keys"):
        fabric.load(f"{folder}/one", {"net": step_net}, strict=False)


def test_names_of_modules_may_begin_with_those_of_others(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _nested_names, str(tmp_path))


def _trainers(folder: str) -> None:
    module = GPT(dist.get_world_size(), "adamw")
    trainer = sharded_trainer(2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/trained")
    fabric, again = _fabric(3), GPT()
    model, optimizer = fabric.setup(again, _optimizer("AdamW", again))
    assert fabric.load(f"{folder}/trained", {"model": model, "optimizer": optimizer}) == {}
    for p, q in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(lt_zero.full_master(p), lt_zero.full_master(q))
    assert float(optimizer.optimizer.state[again.temperature].get("step", 2)) == 2
    fabric.load_raw(f"{folder}/trained", optimizer)


def test_a_checkpoint_of_a_trainer(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _trainers, str(tmp_path))


def _scales(folder: str) -> None:
    fabric = _fabric(2, "16-true", fp16={"initial_scale_power": 4, "loss_scale_window": 1})
    net = _net()
    model, optimizer = fabric.setup(net, _optimizer("SGD", net))
    fabric.save(f"{folder}/early", {"model": model, "optimizer": optimizer})
    full = {"optimizer": fabric.strategy.get_optimizer_state(optimizer.optimizer)}
    if fabric.is_global_zero:
        torch.save(full, f"{folder}/file")
    for step in range(4):
        _step(fabric, model, optimizer, step)
    controller = fabric.strategy.precision.loss_scale_controller
    reached = controller.scale
    fabric.load(f"{folder}/early")  # to look at it
    fabric.load(f"{folder}/file", {"optimizer": optimizer})
    assert controller.scale == reached > 16


def test_a_loss_scale_is_that_of_the_loaded_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _scales, str(tmp_path))


class Fails:
    """Has no state on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        if dist.get_rank() == self.rank:
            raise OSError("no state here")
        return {"a": 1}

    def kept(self, name: str, value: Any) -> bool:
        return bool(self.state_dict())


def _failing_saves(form: str, folder: str, rank: int) -> None:
    fabric = _fabric(1, checkpoint={"format": form})
    net, fails = _net(), Fails(rank)
    model, optimizer = fabric.setup(net, _optimizer("AdamW", net))
    state, mine = {"model": model, "optimizer": optimizer}, dist.get_rank() == rank
    for more, kept in (({"fails": fails}, {}), ({"note": {"b": 1}}, {"note": fails.kept})):
        error = pytest.raises(OSError, match="no state here") if mine else pytest.raises(CheckpointError)
        with error as caught:
            fabric.save(f"{folder}/saved", {**more, **state}, filter=kept)
        assert mine or f"rank {rank}: no state here" in str(caught.value)
    if form == "full":
        with pytest.raises(IsADirectoryError if fabric.is_global_zero else CheckpointError, match="Name a file"):
            fabric.save(folder, state)
    assert os.listdir(folder) == []
    fabric.save(f"{folder}/saved", state)


@pytest.mark.parametrize(
    ("form", "rank"), only_rows([("sharded", 1), ("full", 0)], itertools.product(["sharded", "full"], [0, 1]))
)
def test_a_save_that_fails_on_a_rank_fails_on_all(pool: Pool, tmp_path: Path, form: str, rank: int) -> None:
    pool.run(2, _failing_saves, form, str(tmp_path), rank)


def _failing_load(path: str) -> str:
    """The error of a load in which rank 1 cannot put weights together."""
    fabric = _fabric(1)
    net = _net()
    state = dict(zip(("model", "optimizer"), fabric.setup(net, _optimizer("AdamW", net)), strict=True))
    fabric.save(path, state)
    mine = dist.get_rank() == 1
    fails = mock.patch.object(FabricItems, "_going_on", side_effect=MemoryError("no memory on this host"))
    with fails if mine else nullcontext(), pytest.raises(MemoryError if mine else CheckpointError) as caught:
        fabric.load(path, dict(state))
    fabric.load(path, state)
    return str(caught.value)


def test_a_load_that_fails_on_a_rank_fails_on_all(pool: Pool, tmp_path: Path) -> None:
    other, own = pool.run(2, _failing_load, str(tmp_path / "saved"))
    assert own == "no memory on this host"
    assert other == "Putting together what is loaded failed on another rank: rank 1: no memory on this host"


# ---- precision, launchers, what else Fabric does ---------------------------------------------------------------------


def _backward_of_ones_own() -> None:
    fabric = _fabric(2, "16-true", fp16={"initial_scale_power": 8})
    net = _net()
    model, _ = fabric.setup(net, _optimizer("SGD", net))
    with pytest.raises(RuntimeError, match=r"fabric.backward"):
        next_token_loss(model, 0, 0, fabric.global_rank).backward()


def test_losses_are_scaled_by_fabric_backward(pool: Pool) -> None:
    pool.run(2, _backward_of_ones_own)


class Steps(L.LightningModule):
    """With a parameter of its own, used in a step that is no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.own = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.net(batch) * self.own).square().mean()

    def measure(self, batch: Tensor) -> Tensor:
        return self.training_step(batch)


def _methods(compiled: bool) -> None:
    fabric = _fabric(3)
    module = Steps()
    module.net.eval()  # as for frozen statistics: a set-up leaves modes alone
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given: Any = torch.compile(module, backend="eager") if compiled else module
    model, optimizer = fabric.setup(given, optimizer)
    assert module.training
    assert not module.net.training
    model.mark_forward_method("measure")
    batch = torch.ones(2, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model.training_step(batch)
        fabric.backward(loss)
        return loss

    first = optimizer.step(closure)
    assert model.measure(batch) < first
    assert float(fabric.all_reduce(torch.tensor(float(fabric.global_rank)))) == 0.5


@pytest.mark.parametrize("compiled", only([False], [False, True]))
def test_methods_closures_and_compiled_modules(pool: Pool, compiled: bool) -> None:
    pool.run(2, _methods, compiled)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"optimizer": {"type": "AdamW"}}, "optimizer is configured, which Fabric leaves to the script"),
        ({"checkpoint": {"load_module_only": True}}, "what the script passes to fabric.load"),
        ({"gradient_accumulation_steps": 2}, "Use fabric.no_backward_sync"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}, "gradient_clipping": "auto"}, "has no Trainer here"),
    ],
)
def test_configurations_that_cannot_be(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FabricZeroStrategy(config=config)


def _frozen(path: str) -> None:
    fabric = _fabric(2, checkpoint={"save_frozen": False})
    net = _net()
    net.blocks[0].requires_grad_(False)
    model = fabric.setup_module(net)
    fabric.save(path, {"model": model})
    assert not any(name.startswith("blocks.0") for name in fabric.load(path)["model"])
    fabric.load(path, {"model": model})  # strict: these may be missing


def test_frozen_weights_are_left_out(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _frozen, str(tmp_path / "saved"))


def test_before_the_launch(tmp_path: Path) -> None:
    net = _net()
    wanted = Net()
    strategy = FabricZeroStrategy(stage=2)
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=2)
    with pytest.raises(RuntimeError, match=r"not launched yet: call fabric.launch\(\)"):
        fabric.save(tmp_path / "saved", {"model": net})
    assert not (tmp_path / "saved").exists()
    torch.save(wanted.state_dict(), tmp_path / "raw")
    fabric.load_raw(tmp_path / "raw", net)  # each process reads the file, as with DDP
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in wanted.state_dict().items())
    assert fabric.strategy.load_checkpoint(tmp_path / "raw").keys() == wanted.state_dict().keys()
    forked = L.Fabric(accelerator="cpu", strategy=FabricZeroStrategy(stage=2, start_method="fork"), devices=2)
    with pytest.raises(RuntimeError, match=r"is no rank.*fabric.launch\(function\)"):
        forked.save(tmp_path / "saved", {"model": net})


def test_strings() -> None:
    for stage in (1, 2, 3):
        fabric = L.Fabric(accelerator="cpu", strategy=f"zero_{stage}_spawn", devices=2)
        assert isinstance(fabric.strategy, FabricZeroStrategy)
        assert fabric.strategy.config.zero_optimization.stage == stage


class _OwnArguments(FabricZeroStrategy):
    """A user's strategy that keeps what it was made of by a name that the base class has, too."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        self.config = config
        super().__init__(config=config, **kwargs)


def test_a_subclass_may_set_the_configuration() -> None:
    strategy = _OwnArguments({"zero_optimization": {"stage": 1}}, parallel_devices=[torch.device("cpu")])
    assert strategy.stage == 1
    strategy.config = lt_zero.ZeroConfig(stage=2)
    assert strategy.stage == 2
