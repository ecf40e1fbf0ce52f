"""Engines whose parameters are parts of the model's tensors, or that lack layers: saved together, read in other ways.

The ranks of a run form groups by hand here, each with an engine of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.native.load import as_lightning
from lt_zero.checkpoint.native.pieces import (
    Fragment,
    optimizer_fragments,
    parameter_names,
    weight_fragments,
)
from lt_zero.checkpoint.native.save import bundle, make_directory, write
from lt_zero.cli import app
from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_parameters
from lt_zero.core.engine.whole_model import full_state_dict
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.training.loop.access import full_state
from lt_zero.training.restore import Contents, ModuleContents, restore
from tests.support.checkpoint_tools import error_of
from tests.support.pool import Pool

CPU = torch.device("cpu")
STATES = ("exp_avg", "exp_avg_sq")


def _group_of(groups: list[list[int]]) -> ShardGroup:
    """This rank's group, whose ranks are a world of their own."""
    made = [dist.new_group(ranks) for ranks in groups]
    mine = next(number for number, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return ShardGroup.of_all(World(made[mine], CPU))


class Net(nn.Module):
    """A matrix, or some of its columns or rows, and a vector that all have."""

    def __init__(self, box: Box | None = None, bias: int = 7) -> None:
        super().__init__()
        weight = torch.randn(7, 8, generator=torch.Generator().manual_seed(3))
        self.box = box or Box.whole((7, 8))
        self.weight = nn.Parameter(self.box.of(weight).clone())
        self.bias = nn.Parameter(torch.linspace(-1, 1, bias))

    def forward(self, x: Tensor) -> Tensor:  # linear: the gradients of a part are those of the whole
        (low, left), (rows, columns) = self.box
        found: Tensor = x[:, left : left + columns] @ self.weight.t()
        return found.sum() + x.sum() * self.bias.sum()


def _engine(model: nn.Module, group: ShardGroup, stage: int, specs: list[ParamSpec]) -> tuple[Engine, ShardedOptimizer]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine = lt_zero.shard(model, config, CPU, group=group, specs=specs)
    return engine, ShardedOptimizer(engine, torch.optim.AdamW(_groups(model), lr=0.1))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": d / 10} for d in (2, 1)]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in (1, 2):
        model(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(engine: Engine, sharded: ShardedOptimizer, path: str, **more: Any) -> None:
    world, names = World.join(CPU), [parameter_names(sharded.optimizer, engine)]
    state = {"state_dict": weight_fragments(engine), "optimizer_states": [optimizer_fragments(sharded)], **more}
    made = bundle(state, names, world, {}, {})
    write(made, make_directory(world, path), world, world.saving_group(background=False))


def _values(engine: Engine) -> dict[str, Tensor]:
    """All of the group's parameters and their moments by the names that a directory gives them."""
    found = {f"model.{name}": value.clone() for name, _, value in full_parameters(engine)}
    for name, parameter in engine.root.named_parameters():
        found |= {f"optimizer_0.state.{name}.{key}": full_state(parameter, key) for key in STATES}
    return found


def _is_cut(name: str) -> bool:
    return "bias" not in name


# ---- columns of a matrix ---------------------------------------------------------------------------------------------

COLUMNS = [Box((0, 0), (7, 3)), Box((0, 3), (7, 5))]
ROWS = [Box((0, 0), (2, 8)), Box((2, 0), (4, 8)), Box((6, 0), (1, 8))]


def _save_columns(folder: str, stage: int, bias: int = 7) -> dict[str, Tensor]:
    """Ranks 0 and 1 have the first columns, 2 and 3 the others; each pair shards them. Returns the whole tensors."""
    group, box = _group_of([[0, 1], [2, 3]]), COLUMNS[dist.get_rank() // 2]
    model = Net(box, bias)
    engine, sharded = _engine(model, group, stage, [ParamSpec("weight", (7, 8), box)])
    _train(model, sharded.optimizer)
    _save(engine, sharded, f"{folder}/saved")
    for refused in (full_state_dict, lambda engine: full_optimizer_state(sharded)):
        assert "lt-zero export" in error_of(refused, engine)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, _values(engine))
    whole = {n: torch.cat([every[0][n], every[2][n]], 1) if _is_cut(n) else v for n, v in every[0].items()}
    alone = Net(bias=bias)
    _train(alone, torch.optim.AdamW(_groups(alone), lr=0.1))
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole[f"model.{name}"], parameter.detach())
    return whole


def _load_whole(path: str, want: dict[str, Tensor]) -> None:
    model = Net()
    engine, sharded = _engine(model, ShardGroup.of_all(World.join(CPU)), 2, [])
    _restore(engine, sharded, path)
    _equal(_values(engine), want)


def _load_rows(path: str, want: dict[str, Tensor]) -> None:
    """Each rank has other rows, and shards with nobody. Weights are given in full, and by rows, too."""
    box = ROWS[dist.get_rank()]
    model = Net(box)
    engine, sharded = _engine(model, _group_of([[0], [1], [2]]), 1, [ParamSpec("weight", (7, 8), box)])
    _restore(engine, sharded, path)
    rows = {name: box.of(value) if _is_cut(name) else value for name, value in want.items()}
    _equal(_values(engine), rows)
    for given in (torch.ones(7, 8), torch.ones(box.sizes)):
        engine.root.load_state_dict({"weight": given * 2, "bias": torch.ones(7)})
        assert torch.equal(dict(_values(engine))["model.weight"], torch.full(box.sizes, 2.0))


def _restore(engine: Engine, sharded: ShardedOptimizer, path: str) -> None:
    saved = as_lightning(Archive(path))
    optimizers = {0: (sharded.optimizer, saved["optimizer_states"][0])}
    part = ModuleContents(engine.root, engine, saved["state_dict"], optimizers=optimizers)
    restore(Contents((part,)), engine.world, LossScaleController(engine.policy))
    decays = [group["weight_decay"] for group in sharded.optimizer.param_groups]
    assert decays == [0.2, 0.1]


def _equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name


def _read_by_others(folder: Path, want: dict[str, Tensor]) -> None:
    """By torch, by the export to one file, and by us in parts."""
    found = {name: torch.zeros_like(value) for name, value in want.items()}
    dcp.load(found, storage_reader=FileSystemReader(folder / "saved"), no_dist=True)
    _equal(found, want)
    command = ["export", str(folder / "saved"), str(folder / "one.safetensors"), "--dtype", "fp32"]
    assert CliRunner().invoke(app, command).exit_code == 0
    weights = {name.removeprefix("model."): value for name, value in want.items() if name.startswith("model.")}
    _equal(load_file(folder / "one.safetensors"), weights)
    assert CliRunner().invoke(app, ["verify", str(folder / "saved")]).exit_code == 0


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_columns_of_a_matrix(pool: Pool, tmp_path: Path, stage: int) -> None:
    want = pool.run(4, _save_columns, str(tmp_path), stage)[0]
    entry = Archive(str(tmp_path / "saved")).manifest.tensors["model.weight"]
    assert sum(chunk.box.numel for chunk in entry.chunks) == 56, "each element once"
    assert sum(chunk.box.sizes[1] in (3, 5) for chunk in entry.chunks) >= 4
    assert sum(chunk.box.numel for chunk in Archive(str(tmp_path / "saved")).manifest.tensors["model.bias"].chunks) == 7
    _read_by_others(tmp_path, want)
    pool.run(2, _load_whole, str(tmp_path / "saved"), want)
    pool.run(3, _load_rows, str(tmp_path / "saved"), want)


def test_a_vector_that_two_groups_cut_in_other_places(pool: Pool, tmp_path: Path) -> None:
    """Their buckets differ in length, as they have other columns of the matrix."""
    want = pool.run(4, _save_columns, str(tmp_path), 1, 101)[0]
    _read_by_others(tmp_path, want)


def _refusals() -> None:
    for spec, text in [
        (
            ParamSpec("weight", (7, 9), Box((0, 0), (7, 5))),
            r"'weight' has the shape \(7, 8\), and its box \[0:7, 0:5\]",
        ),
        (ParamSpec("wieght", (7, 9), Box((0, 0), (7, 8))), "no parameter 'wieght'. Did you mean 'weight'"),
    ]:
        with pytest.raises(ValueError, match=text):
            lt_zero.shard(Net(), {"train_micro_batch_size_per_gpu": 1}, CPU, specs=[spec])
    with pytest.raises(ValueError, match=r"ParamSpec 'weight' of shape \(7, 8\) has a part of \(7, 5\) at \(0, 4\)"):
        ParamSpec("weight", (7, 8), Box((0, 4), (7, 5)))


def test_specs_that_do_not_fit(pool: Pool) -> None:
    pool.run(1, _refusals)


# ---- ranks without some layers ---------------------------------------------------------------------------------------


class Stage(nn.Module):
    """One of the two layers of a model, with a buffer, an extra state and a tied name."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(8, 8 - len(name) % 2))
            self.register_parameter(f"{name}_tied", getattr(self, name).bias)
            self.register_buffer(f"{name}_seen", torch.full((3,), float(len(name))))
        self.layers = names

    def get_extra_state(self) -> Any:
        return {"layers": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"layers": 2}

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in self.layers]).sum()


def _save_stages(folder: str) -> dict[str, Tensor]:
    """Ranks 0 and 1 have the first layer, rank 2 the second, with more entries that hold its tensors."""
    group, last = _group_of([[0, 1], [2]]), dist.get_rank() == 2
    model = Stage("second" if last else "first")
    engine, sharded = _engine(model, group, 1, [])
    _train(model, sharded.optimizer)
    average = {n: v for n, v in weight_fragments(engine).items() if isinstance(v, Fragment)}
    _save(engine, sharded, f"{folder}/saved", mine={"average": average, "count": {model.layers[0]: 5}, "epochs": 3})
    sharded.optimizer.param_groups[0]["weight_decay"] += 0.1 * last
    text = error_of(_save, engine, sharded, f"{folder}/refused")
    assert "rank 2" in text
    assert "weight_decay" in text
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, _values(engine))
    return {**every[0], **every[2]}


def _load_stages(path: str, want: dict[str, Tensor]) -> None:
    model = Stage("first", "second")
    engine, sharded = _engine(model, ShardGroup.of_all(World.join(CPU)), 3, [])
    for buffer in model.buffers():
        buffer.zero_()
    _restore(engine, sharded, path)
    _equal(_values(engine), want)
    assert [float(buffer[0]) for buffer in model.buffers()] == [5, 6]


def test_ranks_without_some_layers(pool: Pool, tmp_path: Path) -> None:
    want = pool.run(3, _save_stages, str(tmp_path))[0]
    assert not (tmp_path / "refused").exists()
    archive = Archive(str(tmp_path / "saved"))
    kinds = ("_tied", "_seen", ".weight", ".bias")
    assert sorted(archive.weights) == sorted(f"{layer}{kind}" for layer in ("first", "second") for kind in kinds)
    assert archive.aliases == {"first.bias": "first_tied", "second.bias": "second_tied"}
    mine = as_lightning(archive)["mine"]
    assert mine["epochs"] == 3
    assert mine["count"] == {"first": 5, "second": 5}
    for name, value in mine["average"].items():
        assert torch.equal(value.whole(), want[f"model.{archive.aliases.get(name, name)}"])
    assert mine["average"].keys() == archive.weights.keys() - {"first_seen", "second_seen"}
    pool.run(2, _load_stages, str(tmp_path / "saved"), want)
