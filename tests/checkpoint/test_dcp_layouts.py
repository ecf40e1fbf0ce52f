"""Folders that torch.distributed.checkpoint wrote for programs of one's own: each layout, FSDP2 with TP, and HSDP."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lt_zero.checkpoint.native.load import in_order, settings_here
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError
from tests.support.pool import Pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.frozen(self.norm(self.down(torch.tanh(self.up(x)))))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    wide = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    thin = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": wide}, {"params": thin, "weight_decay": 0.0}], lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 6)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAYOUTS = ["model", "app", "flat", "bare"]


def layout(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    return {
        "model": {"model": weights, "optim": states, "step": 2},
        "app": {"app": {"model": weights, "optim": states}},  # torch's recipe
        "flat": {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)},
        "bare": weights,
    }[kind]


def check(folder: Path, kind: str, full: dict[str, Any]) -> None:
    """The folder has the values of ``full``: state dicts of the whole model."""
    source = open_source(folder, tell=False)
    assert {name: source.weights[name].shape for name in source.weights} == {n: v.shape for n, v in full["w"].items()}
    assert all(torch.equal(source.read(name), value) for name, value in full["w"].items())
    if kind == "bare":
        assert source.optimizers == ()
        return
    (saved,) = source.optimizers
    states = full["o"]["state"]
    assert set(saved.state) == set(states)
    for name, entries in states.items():
        assert saved.state[name]["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert saved.state[name][key] == Spec(tuple(entries[key].shape), torch.float32)
            assert torch.equal(source.read_state(0, name, key), entries[key]), (name, key)
    wide, thin = sorted(saved.groups, key=lambda group: -group["weight_decay"])
    assert set(wide["params"]) == {"up.weight", "down.weight"}
    assert set(thin["params"]) == {"up.bias", "down.bias", "norm.weight", "norm.bias"}
    assert [wide["weight_decay"], thin["weight_decay"], thin["lr"]] == [0.01, 0.0, 0.1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts_of_one_process(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = trained(model)
    dcp.save(layout(kind, model, optimizer), checkpoint_id=tmp_path / "saved", no_dist=True)
    weights, states = get_state_dict(model, optimizer)
    check(tmp_path / "saved", kind, {"w": weights, "o": states})
    notes = open_source(tmp_path / "saved", tell=False).notes  # type: ignore[attr-defined]
    assert notes == ([f"step of {tmp_path / 'saved'} was left out."] if kind == "model" else [])


def save_sharded(how: str, folder: str) -> None:
    """All layouts, on a mesh of two by half of the ranks, and the whole state for comparison."""
    torch.manual_seed(0)
    model, half = Net(), dist.get_world_size() // 2
    if how == "tp":
        mesh = init_device_mesh("cpu", (half, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, half), mesh_dim_names=("replicas", "shards")))
    optimizer = trained(model)
    for kind in LAYOUTS:
        dcp.save(layout(kind, model, optimizer), checkpoint_id=f"{folder}/{kind}")
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"w": weights, "o": states}, f"{folder}/full.pt")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tp", "hsdp"])
def test_layouts_of_four_ranks(how: str, tmp_path: Path, pool: Pool) -> None:
    pool.run(4, save_sharded, how, str(tmp_path))
    for kind in LAYOUTS:
        check(tmp_path / kind, kind, torch.load(tmp_path / "full.pt"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("paths", [[("a.b", "c"), ("a", "b.c")], [("a", "b"), ("a", "b")]], ids=["joined", "equal"])
def test_entries_that_would_have_one_name(paths: list[tuple[str, str]], tmp_path: Path) -> None:
    """torch joins the keys of a path, too, and refuses to save these; other programs may not."""
    dcp.save({"one": torch.ones(2), "two": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = dict(zip(("one", "two"), paths, strict=True))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata") as caught:
        open_source(tmp_path, tell=False)
    assert all(repr(path) in str(caught.value) for path in paths)


def test_groups_in_another_order() -> None:
    """A flattened optimizer does not tell the order of its groups; see ``fitting_state``."""
    groups = [{"params": ["b", "a"], "lr": 1}, {"params": ["c"], "lr": 2}]
    assert [group["lr"] for group in in_order(groups, [["c"], ["a", "b"]])] == [2, 1]
    assert in_order(groups, [["c"], ["a", "d"]]) is groups  # a mismatch, which is told
    assert settings_here(in_order(groups, [["c"], ["a", "b"]]), [{"lr": 0}, {"lr": 0}])[0][0]["lr"] == 2
