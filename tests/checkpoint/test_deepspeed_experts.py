"""Checkpoints of DeepSpeed's mixtures of experts hold what DeepSpeed says of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.open import open_source
from lt_zero.common.errors import CheckpointError
from tests.support.damage import truncate
from tests.support.paths import DATA

FOLDER = DATA / "deepspeed_parallel"
STAGE0, STAGE2 = FOLDER / "moe_stage0" / "global_step3", FOLDER / "moe_stage2_bf16" / "global_step3"
EXPERTS = "layers.0.deepspeed_moe.experts.deepspeed_experts"


def expected(folder: Path) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = torch.load(folder.parent / "expected.pt")
    return found


def test_experts_of_all_ranks_are_read(tmp_path: Path) -> None:
    source, wanted = open_source(STAGE2), expected(STAGE2)
    assert {f"{EXPERTS}.3.up.weight", f"{EXPERTS.replace('0', '1')}.1.down.weight"} < set(wanted)
    assert set(source.weights) == {*wanted, *(name for name in source.weights if name.endswith(".calls"))}
    (saved,) = source.optimizers
    trained = {name for name, values in wanted.items() if "exp_avg" in values}
    assert set(saved.state) == trained == {name for group in saved.groups for name in group["params"]}
    for name, values in wanted.items():
        assert torch.equal(source.read(name), values["fp32"]), name
        for key in {"exp_avg", "exp_avg_sq"} & set(values):
            assert torch.equal(source.read_state(0, name, key), values[key]), (name, key)
            assert saved.state[name]["step"] == 3
    assert not torch.equal(source.read(f"{EXPERTS}.1.up.weight"), source.read(f"{EXPERTS}.3.up.weight"))
    assert [group["name"] for group in saved.groups] == ["dense", "ep_size_2"]
    (file,) = export(STAGE2, tmp_path / "model.pt", "fp32")
    assert torch.equal(torch.load(file)[f"{EXPERTS}.3.up.bias"], wanted[f"{EXPERTS}.3.up.bias"]["fp32"])


def test_stage_0_has_weights_only() -> None:
    with pytest.warns(UserWarning, match="no optimizer state"):
        source = open_source(STAGE0)
    assert not source.optimizers
    for name, values in expected(STAGE0).items():
        assert torch.equal(source.read(name), values["fp32"]), name


# ---- AutoEP, by hand from the code of DeepSpeed 0.19.8 (engine.py, _save_moe_checkpoint) -----------------------------

WHOLE = {"net.experts.w1": torch.randn(4, 3, 2), "net.router.weight": torch.randn(5, 2)}
ROUTER, PADDED = "net.router.weight", 12


def autoep(folder: Path, data_first: bool = False, **model: Any) -> Path:
    """Stage 1: four ranks, two of expert parallelism."""
    folder.mkdir()
    experts = {f"net.experts.{key}.{n}": WHOLE["net.experts.w1"][n] for n in range(4) for key in ("w1",)}
    for number, (name, tensor) in enumerate(experts.items()):
        torch.save({name: tensor.bfloat16()}, folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    placement = {"num_experts": 4, "ranks": [{"rank": 1, "experts": [2, 3]}, {"rank": 0, "experts": [0, 1]}]}
    states = {
        "module": {ROUTER: WHOLE[ROUTER].bfloat16()},
        "param_shapes": [{ROUTER: torch.Size([5, 2])}, {"net.experts.w1": torch.Size([2, 3, 2])}],
        "buffer_names": [],
        "num_experts": [4],
        "ds_autoep_layers": [{"module_path": "net", "expert_placement": placement}],
        "ds_config": {"use_data_before_expert_parallelism": data_first},
        "global_steps": 5,
    }
    torch.save(states | model, folder / "mp_rank_00_model_states.pt")
    dense = torch.cat([WHOLE[ROUTER].flatten(), torch.zeros(PADDED - 10)]).chunk(4)
    for rank in range(4):
        part, place = (rank // 2, rank % 2) if data_first else (rank % 2, rank // 2)
        rows = [dense[rank], WHOLE["net.experts.w1"].chunk(2)[part].flatten().chunk(2)[place]]
        cut = [row.clone() if rank < 3 or n else row[:1].clone() for n, row in enumerate(rows)]
        inner = {
            "zero_stage": 1,
            "partition_count": [4, 2],
            "group_paddings": [2 if rank == 3 else 0, 0],
            "single_partition_of_fp32_groups": cut,
            "base_optimizer_state": {
                "state": {n: {"step": 5, "exp_avg": 2 * row} for n, row in enumerate(rows)},
                "param_groups": [{"params": [0]}, {"params": [1]}],
            },
        }
        torch.save({"optimizer_state_dict": inner}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


@pytest.mark.parametrize("data_first", [False, True])
def test_autoep_has_experts_in_one_tensor(data_first: bool, tmp_path: Path) -> None:
    source = open_source(autoep(tmp_path / "made", data_first))
    assert set(source.weights) == set(WHOLE)
    for name, whole in WHOLE.items():
        assert torch.equal(source.read(name), whole), name
        assert torch.equal(source.read_state(0, name, "exp_avg"), 2 * whole), name


def test_autoep_without_optimizer_files_has_the_module(tmp_path: Path) -> None:
    folder = autoep(tmp_path / "made", param_shapes=None)
    with pytest.warns(UserWarning, match="stage 0"):
        source = open_source(folder)
    assert torch.equal(source.read("net.experts.w1"), WHOLE["net.experts.w1"].bfloat16())


ELSEWHERE = {"num_experts": 4, "ranks": [{"rank": 0, "experts": [0, 2]}, {"rank": 1, "experts": [1, 3]}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"ds_autoep_layers": [{"module_path": "net", "expert_placement": ELSEWHERE}]},
        r"order of their numbers.*universal",
    ),
    ({"folding": {"tp_size": 2}}, "tensor ranks, which are not read"),
    ({"num_experts": None}, "tells no number of experts"),
    ({"param_shapes": [{ROUTER: torch.Size([5, 2])}, {"net.experts.w1": torch.Size([3, 2, 2])}]}, "shape"),
    ({"param_shapes": [{"net.experts.w1": torch.Size([5, 2])}, {ROUTER: torch.Size([2, 3, 2])}]}, "ranks"),
    ({"module": None}, "or a pipeline"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_read_is_refused(number: int, tmp_path: Path) -> None:
    model, told = REFUSED[number]
    folder = autoep(tmp_path / "made", **model)
    with pytest.raises(CheckpointError, match=told):
        open_source(folder)


# ---- damage ----------------------------------------------------------------------------------------------------------


def named(number: int, layer: int = 0) -> str:
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def twice(copy: Path) -> None:
    shutil.copy(copy / named(0), copy / named(1))


DAMAGES: list[tuple[Path, Callable[[Path], Any], str]] = [
    (STAGE2, lambda copy: (copy / named(3)).unlink(), "no layer_0_expert_3_mp_rank_00"),
    (STAGE2, lambda copy: [file.unlink() for file in copy.glob("layer_*")], "no layer_0_expert_0_mp_rank_00"),
    (STAGE2, lambda copy: truncate(copy / named(1, 1)), "layer_1_expert_1_mp_rank_00_model_states.pt"),
    (STAGE2, twice, r"expert_1_mp_rank_00_model_states.pt has .*experts\.0\..*not of expert 1"),
    (STAGE2, lambda copy: shutil.copy(copy / named(0), copy / named(4)), "expert_4_.*does not know"),
    (STAGE2, lambda copy: shutil.copy(copy / named(0), copy / named(0).replace("_00", "_01")), "with tensor ranks"),
    (STAGE2, lambda copy: shutil.copy(copy / named(0), copy / named(0)[8:]), "do not tell their mixture"),
    (STAGE2, lambda copy: torch.save({}, copy / "expp_rank_0_mp_rank_00_optim_states.pt"), "is of ZeRO stage 0"),
    (STAGE2, lambda copy: torch.save({}, copy / named(0)), "other tensors"),
    (STAGE2, lambda copy: next(copy.glob("*pp_rank_3*")).unlink(), "belongs to a run of"),
    (STAGE2, lambda copy: (copy / "zero").mkdir(), "universal folder"),
    (STAGE0, lambda copy: (copy / "expp_rank_0_mp_rank_00_optim_states.pt").unlink(), "no expp_rank_0"),
    (STAGE0, lambda copy: truncate(copy / "expp_rank_1_mp_rank_00_optim_states.pt"), "expp_rank_1"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_what_is_missing_or_damaged_is_named(number: int, tmp_path: Path) -> None:
    folder, damage, told = DAMAGES[number]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(CheckpointError, match=told):
        open_source(copy)
