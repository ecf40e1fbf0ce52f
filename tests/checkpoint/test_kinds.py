"""Directories of models with parameters, states and optimizers of all kinds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_zero.checkpoint.native.archive import Archive
from tests.support.checkpoint_tools import SHARDED, error_of, everything, resume, same, train
from tests.support.features import skip_without
from tests.support.lightning_tools import GPT, Rows
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

STAGES = [0, 1, 2, 3]
STILL = ("still", "net.blocks.1.up.weight", "net.embedding.weight")  # the last is tied to the head
GONE = {*STILL, "net.head.weight"}

# ---- kinds of parameters ---------------------------------------------------------------------------------------------


class Odd(GPT):
    """Frozen parameters, buffers, no dimensions, no elements, one element, and states that are no tensors."""

    def __init__(self, frozen: tuple[str, ...] = ("still",), seed: float = 1.0, groups: str = "one") -> None:
        super().__init__(dist.get_world_size(), "adamw")
        self.groups = groups
        self.still = nn.Parameter(torch.arange(7.0) * seed)
        self.zero_d = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.tensor([3.0]))
        self.register_buffer("mean", torch.full((3,), 5.0) * seed)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("secret", torch.ones(2), persistent=False)
        self.extra = {"version": (1, 2), "table": torch.arange(3)}
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        extra = self.zero_d * self.one.sum() + self.none.sum() + self.still.sum()
        return self.loss(batch) * (1 + 0.01 * extra)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.groups == "one":
            return torch.optim.AdamW(trained, lr=1e-2)
        rest, blocks = [p for p in trained if p.dim() != 2], [p for p in trained if p.dim() == 2]
        if self.groups == "reversed":
            rest, blocks = rest[::-1], blocks[::-1]
        if self.groups == "moved":
            blocks.append(rest.pop())
        groups = [{"params": rest, "lr": 1e-3, "weight_decay": 0.5}, {"params": blocks, "betas": (0.5, 0.6)}]
        return torch.optim.AdamW(groups[::-1] if self.groups == "swapped" else groups, lr=1e-2)


def _odd(stage: int, folder: str, device: str) -> None:
    where: dict[str, Any] = {"offload_optimizer": {"device": device, "nvme_path": folder}} if device == "nvme" else {}
    trainer = train(stage, Odd(), config=SHARDED, zero=where)
    want = everything(trainer)
    trainer.lightning_module.extra = {"version": (3, 4), "table": torch.arange(4)}  # type: ignore[assignment, union-attr]
    trainer.save_checkpoint(f"{folder}/odd")
    want["weights"]["_extra_state"] = {"version": (3, 4), "table": torch.arange(4)}
    assert want["weights"].keys() == ({"_extra_state"} if dist.get_rank() else Odd().state_dict().keys())
    module = Odd(seed=9.0)
    got, again = resume(f"{folder}/odd", stage, module, config=SHARDED, zero=where)
    if dist.get_rank():
        got["weights"] = want["weights"] = {}
    same(got, want)
    same(module.extra, {"version": (3, 4), "table": torch.arange(4)})
    assert int(module.count) == 3
    if dist.get_rank() == 0:
        states = got["optimizers"][0]["state"]
        assert any(state["exp_avg"].dim() == 0 for state in states.values())


ODD = [(0, "none"), (1, "none"), (1, "nvme"), (2, "none"), (3, "none"), (3, "nvme")]


@pytest.mark.parametrize(("stage", "device"), only_rows([(3, "nvme")], ODD))
def test_odd_parameters_and_states(pool: Pool, tmp_path: Path, stage: int, device: str) -> None:
    if device != "none":
        skip_without("offload")
    pool.run(3 if stage == 3 else 2, _odd, stage, str(tmp_path), device)


def _frozen(stage: int, folder: str, form: str) -> list[str]:
    config: dict[str, Any] = {"checkpoint": {"format": form, "save_frozen": False}}
    trainer = train(stage, Odd(STILL), config=config)
    want = everything(trainer)
    path = f"{folder}/frozen.ckpt"
    trainer.save_checkpoint(path)
    fresh = Odd(STILL, seed=9.0)
    with torch.no_grad():
        fresh.net.embedding.weight.fill_(0.25)
    got, _ = resume(path, stage, fresh, config=config)
    if dist.get_rank() == 0:
        assert torch.equal(got["weights"]["net.head.weight"], torch.full((11, 10), 0.25)), "tied ones, too"
        assert torch.equal(got["weights"]["still"], torch.arange(7.0) * 9), "those of the new module"
        for one in (got, want):
            for name in (*GONE, "_extra_state"):
                del one["weights"][name]
    same(got, want)
    return [
        # Became frozen later: its value was saved, and its moments have no owner any more.
        error_of(resume, path, stage, Odd((*STILL, "one")), config=config),
        # One that was left out is no longer there.
        error_of(resume, path, stage, Shrunk(), config=config),
        # A parameter that was never there.
        error_of(resume, path, stage, Grown(), config=config),
    ]


class Shrunk(Odd):
    def __init__(self) -> None:
        super().__init__(STILL)
        del self.still
        self.still = torch.zeros(1)  # type: ignore[assignment]


class Grown(Odd):
    def __init__(self) -> None:
        super().__init__(STILL)
        self.newcomer = nn.Parameter(torch.zeros(1), requires_grad=False)


@pytest.mark.parametrize(
    ("stage", "form"), only_rows([(3, "sharded")], itertools.product([3, 2, 1], ["sharded", "full"]))
)
def test_frozen_parameters_can_be_left_out(pool: Pool, tmp_path: Path, stage: int, form: str) -> None:
    for became, shrunk, grown in pool.run(2, _frozen, stage, str(tmp_path), form):
        assert "one" in became or "parameters" in became
        assert "still" in shrunk
        assert "newcomer" in grown
    if form == "sharded":
        archive = Archive(str(tmp_path / "frozen.ckpt"))
        assert set(archive.manifest.left_out) == GONE
        assert not GONE & archive.weights.keys()


# ---- groups and several optimizers -----------------------------------------------------------------------------------


def _groups(stage: int, folder: str) -> list[str]:
    trainer = train(stage, Odd(groups="two"), config=SHARDED)
    want = everything(trainer)
    path = f"{folder}/groups"
    trainer.save_checkpoint(path)
    same(resume(path, stage, Odd(groups="two"))[0]["optimizers"], want["optimizers"])
    got, again = resume(path, stage, Odd(groups="reversed"))
    if dist.get_rank() == 0:
        # Numbers follow the new order, and each parameter has its own states.
        one, other = (_by_shape(state["optimizers"][0]) for state in (want, got))
        assert one.keys() == other.keys()
        for key in one:
            assert sorted(one[key]) == sorted(other[key]), key
        groups = got["optimizers"][0]["param_groups"]
        assert [g["weight_decay"] for g in groups] == [0.5, 0.01]
    return [error_of(resume, path, stage, Odd(groups=other)) for other in ("swapped", "moved", "one")]


def _by_shape(state: dict[str, Any]) -> dict[Any, list[float]]:
    found: dict[Any, list[float]] = {}
    for entry in state["state"].values():
        found.setdefault(tuple(entry["exp_avg"].shape), []).append(float(entry["exp_avg"].double().sum()))
    return found


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_groups_are_matched_by_name(pool: Pool, tmp_path: Path, stage: int) -> None:
    for texts in pool.run(2, _groups, stage, str(tmp_path)):
        for text in texts:
            assert "groups" in text
            assert "configure_optimizers" in text


class Renamed(GPT):
    def __init__(self) -> None:
        super().__init__(dist.get_world_size(), "adamw")
        self.warmth = self.temperature
        del self.temperature

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) * self.warmth.mean(0)).square().mean()


def _renamed(folder: str) -> list[str]:
    path = f"{folder}/one"
    train(3, config=SHARDED).save_checkpoint(path)
    texts = [error_of(resume, path, 3, Renamed())]
    loose = Renamed()
    loose.strict_loading = False
    texts.append(error_of(resume, path, 3, loose))  # the optimizer's parameters are not a matter of strictness
    fresh = Renamed()
    fresh.strict_loading = False
    got, _ = resume(path, 3, fresh, config={"checkpoint": {"load_optimizer_states": False}})
    if dist.get_rank() == 0:
        assert torch.equal(got["weights"]["warmth"], torch.ones(3, 11))
        assert not got["optimizers"][0]["state"]
    assert got["step"] == 2
    return texts


def test_renamed_parameter(pool: Pool, tmp_path: Path) -> None:
    for weights, states in pool.run(2, _renamed, str(tmp_path)):
        assert "warmth" in weights
        assert "temperature" in weights
        assert "warmth" in states
        assert "temperature" in states
        assert "load_optimizer_states" in states


class Gan(pl.LightningModule):
    """Two optimizers, stepped by hand; the second has a tensor that belongs to no module."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(6, 7), nn.Linear(7, 3)
        self.swapped = swapped

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.two(self.one(batch.float()).relu()).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()

    def configure_optimizers(self) -> Any:
        one = torch.optim.Adam(self.one.parameters(), lr=1e-2, amsgrad=True)
        two = torch.optim.SGD(self.two.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
        optimizers = [two, one] if self.swapped else [one, two]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=2)


class OnlyOne(Gan):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[0][:1]

    def lr_schedulers(self) -> Any:
        return []

    def optimizers(self, *args: Any, **kwargs: Any) -> Any:
        return [super().optimizers()]


def _gan(stage: int, folder: str) -> list[str]:
    trainer = train(stage, Gan(), config=SHARDED, max_steps=4)
    want = everything(trainer)
    path = f"{folder}/gan"
    trainer.save_checkpoint(path)
    got, again = resume(path, stage, Gan(), steps=6)
    same(got, want)
    assert [o.param_groups[0]["lr"] for o in again.optimizers] == pytest.approx([1e-2 / 8] * 2)
    return [error_of(resume, path, stage, Gan(swapped=True)), error_of(resume, path, stage, OnlyOne())]


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_two_optimizers(pool: Pool, tmp_path: Path, stage: int) -> None:
    for swapped, fewer in pool.run(2, _gan, stage, str(tmp_path)):
        assert "Optimizer 0" in swapped
        assert "one.weight" in swapped
        assert "2 optimizer(s)" in fewer


class WithLoose(Gan):
    """Trains a tensor that belongs to no module."""

    def __init__(self, seed: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = True
        self.loose = [torch.full((5,), seed, requires_grad=True)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        return (self.two(self.one(batch.float()).relu()) * self.loose[0].sum()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.one.parameters(), *self.loose, *self.two.parameters()], lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loose"] = [p.detach() for p in self.loose]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            self.loose[0].copy_(checkpoint["loose"][0])

    def on_train_start(self) -> None:
        self.first = self.loose[0].detach().clone()


def _loose(stage: int, folder: str) -> None:
    trainer = train(stage, WithLoose(), config=SHARDED)
    want = everything(trainer)
    trainer.save_checkpoint(f"{folder}/loose")
    value = trainer.lightning_module.loose[0].detach().clone()  # type: ignore[union-attr, index]
    module = WithLoose(5.0)
    got, _ = resume(f"{folder}/loose", stage, module)
    same(got, want)
    same(module.first, value)
    if dist.get_rank() == 0:
        assert want["optimizers"][0]["state"][2]["exp_avg"].shape == (5,)


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_tensors_that_belong_to_no_module(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(1, _loose, stage, str(tmp_path))  # several ranks refuse it: nobody averages its gradients
