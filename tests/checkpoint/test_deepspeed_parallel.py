"""Checkpoints of DeepSpeed's tensor-parallel runs, and its universal folders, hold what DeepSpeed's converter says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.formats.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.formats.foreign import Saved
from lt_zero.checkpoint.formats.tensor_ranks import TensorRanks
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import CheckpointSource
from lt_zero.common.errors import CheckpointError
from tests.support.damage import truncate
from tests.support.import_tools import expected_of, imported, makers
from tests.support.paths import DATA

FOLDER = DATA / "deepspeed_parallel"
AUTOTP, UNIVERSAL = FOLDER / "autotp_stage1_bf16" / "global_step3", FOLDER / "autotp_stage1_bf16" / "universal"


def values(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of a universal folder, by parameter and file."""
    found: dict[str, dict[str, Tensor]] = makers("deepspeed_parallel").values_of(folder)
    return found


def compare(source: CheckpointSource, wanted: dict[str, dict[str, Tensor]]) -> None:
    """Weights and states are those of a universal folder, whose frozen parameters are those of the first rank."""
    (saved,) = source.optimizers
    trained = {name: states for name, states in wanted.items() if "exp_avg" in states}
    assert set(saved.state) == set(trained) == {name for group in saved.groups for name in group["params"]}
    assert {"qkv.weight", "out.weight", "up.bias", "norm.weight", "head.weight"} < set(trained)
    for name, states in trained.items():
        assert torch.equal(source.read(name), states["fp32"]), name
        assert torch.equal(torch.as_tensor(saved.state[name]["step"]), torch.tensor(3.0))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(source.read_state(0, name, key), states[key]), (name, key)
    assert [group["weight_decay"] for group in saved.groups] == [0.1, 0.0]
    torch.manual_seed(1)
    model = makers("deepspeed_parallel").Block()
    assert set(source.weights) == set(model.state_dict())
    assert all(tuple(p.shape) == source.weights[name].shape for name, p in model.state_dict().items())
    whole = source.read("frozen.weight").float()
    assert torch.equal(whole, model.frozen.weight.to(source.weights["frozen.weight"].dtype).float())
    assert source.read("calls") == 3


@pytest.mark.parametrize("folder", [AUTOTP, UNIVERSAL])
def test_tensor_ranks_are_joined(folder: Path) -> None:
    source = open_source(folder)
    compare(source, values(UNIVERSAL))
    assert source.meta["note"] == "client state"
    assert source.weights["up.weight"].shape == (7, 6)  # 4 and 3 rows


def test_tensor_ranks_of_stage_3_are_joined() -> None:
    compare(open_source(FOLDER / "autotp_stage3"), torch.load(FOLDER / "autotp_stage3" / "expected.pt"))


def test_a_universal_folder_of_stage_3_has_flat_tensors(tmp_path: Path) -> None:
    assert isinstance(open_source(FOLDER / "stage3_bf16"), DeepSpeedSource)  # by `latest_universal`
    expected = expected_of("deepspeed/stage3_bf16")
    archive = Archive(str(imported("deepspeed_parallel/stage3_bf16", tmp_path)))
    for name, wanted in expected["weights"].items():
        assert torch.equal(archive.read(name).double(), wanted.double()), name
    (saved,) = archive.optimizers
    for name, entries in expected["state"].items():
        assert saved.state[name]["step"] == 4
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(archive.read_state(0, name, key), entries[key])
    assert saved.groups == open_source(DATA / "deepspeed" / "stage3_bf16").optimizers[0].groups
    (file,) = export(FOLDER / "stage3_bf16", tmp_path / "model.pt", "fp32")
    assert torch.equal(torch.load(file)["gain"], expected["weights"]["gain"])


def test_experts_of_autoep_are_whole_in_a_universal_folder(tmp_path: Path) -> None:
    """Made by hand from the code of ds_to_universal.py: rank 0's model file has the shape of its own two experts."""
    folder = tmp_path / "saved"
    whole, local = torch.randn(4, 3, 2), torch.Size([2, 3, 2])
    states = {"module": {}, "param_shapes": [{"moe.experts.w1": local}], "buffer_names": [], "global_steps": 7}
    (folder / "zero" / "moe.experts.w1").mkdir(parents=True)
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    torch.save({"param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "zero" / "optimizer_state.pt")
    for number, key in enumerate(("fp32", "exp_avg")):
        content = {"param": whole + number, "cat_dim": 0, "is_expert_param": True, "ep_num_experts": 4}
        torch.save(content, folder / "zero" / "moe.experts.w1" / f"{key}.pt")
    source = open_source(folder)
    assert torch.equal(source.read("moe.experts.w1"), whole)
    assert torch.equal(source.read_state(0, "moe.experts.w1", "exp_avg"), whole + 1)
    (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mixture of experts.*ds_to_universal\.py"):
        open_source(folder)


@pytest.mark.parametrize("shape", [(3, 2), (5,)])
def test_a_tensor_of_another_shape_is_no_parameter(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Only a flat one is given its shape."""
    states = {"module": {}, "param_shapes": [{"w": torch.Size([2, 3])}], "buffer_names": [], "global_steps": 7}
    (tmp_path / "zero" / "w").mkdir(parents=True)
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"param_groups": [{"lr": 0.1, "params": [0]}]}, tmp_path / "zero" / "optimizer_state.pt")
    torch.save({"param": torch.arange(6.0)}, tmp_path / "zero" / "w" / "fp32.pt")
    assert torch.equal(open_source(tmp_path).read("w"), torch.arange(6.0).view(2, 3))
    torch.save({"param": torch.zeros(shape)}, tmp_path / "zero" / "w" / "fp32.pt")
    with pytest.raises(CheckpointError, match=r"fp32\.pt has the shape .*but the parameter \[2, 3\]"):
        open_source(tmp_path)


def change_tensor(folder: Path) -> None:
    file = folder / "zero" / "up.weight" / "exp_avg.pt"
    torch.save({"param": torch.zeros(5)}, file)


def lose_last_rank(folder: Path) -> None:
    """The numbers of the other files have no gap."""
    for file in folder.glob("*mp_rank_01*"):
        file.unlink()


PIPE = FOLDER / "pipe_bf16" / "global_step3"
DAMAGES: list[tuple[Path, Callable[[Path], Any], str]] = [
    (AUTOTP, lambda copy: (copy / "mp_rank_01_model_states.pt").unlink(), "of a run of 2 model ranks.*has files of 1"),
    (AUTOTP, lose_last_rank, "is of a run of 2 model ranks.*has files of 1: some are missing"),
    (PIPE, lose_last_rank, "is of a run of 2 model ranks.*has files of 1: some are missing"),
    (
        PIPE,
        lambda copy: shutil.copy(copy / "layer_01-model_states.pt", copy / "layer_1-model_states.pt"),
        "are of the same layer",
    ),
    (AUTOTP, lambda copy: (copy / "mp_rank_00_model_states.pt").unlink(), r"missing \(mp_rank 0"),
    (
        AUTOTP,
        lambda copy: (copy / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink(),
        r"missing \(mp_rank 1, ZeRO's rank 1\)",
    ),
    (AUTOTP, lambda copy: truncate(copy / "mp_rank_01_model_states.pt"), "mp_rank_01_model_states.pt"),
    (UNIVERSAL, lambda copy: truncate(copy / "zero" / "up.weight" / "fp32.pt"), "up.weight/fp32.pt"),
    (UNIVERSAL, lambda copy: (copy / "zero" / "up.weight" / "fp32.pt").unlink(), "up.weight has no fp32.pt"),
    (UNIVERSAL, lambda copy: shutil.rmtree(copy / "zero" / "up.weight"), "no folder 'up.weight'"),
    (UNIVERSAL, lambda copy: (copy / "zero" / "optimizer_state.pt").unlink(), "optimizer_state.pt"),
    (UNIVERSAL, change_tensor, r"exp_avg.pt has the shape \[5\]"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_what_is_missing_or_damaged_is_named(number: int, tmp_path: Path) -> None:
    folder, damage, told = DAMAGES[number]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(CheckpointError, match=told):
        open_source(copy)


def write_ranks(folder: Path, steps: dict[tuple[int, int], int], saved: tuple[int, ...] = (7, 7)) -> None:
    """Write files of stage 1 whose optimizers have counted ``steps``, by model rank and ZeRO's rank."""
    for (model, rank), count in steps.items():
        states = {"module": {}, "param_shapes": [{"w": torch.Size([2, 2])}], "buffer_names": []}
        states |= {"global_steps": saved[model], "universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
        torch.save(states, folder / f"mp_rank_{model:02d}_model_states.pt")
        inner = {"state": {0: {"step": count, "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        content = {"base_optimizer_state": inner, "single_partition_of_fp32_groups": [torch.ones(2)], "zero_stage": 1}
        content |= {"partition_count": 2, "group_paddings": [0]}
        file = folder / f"zero_pp_rank_{rank}_mp_rank_{model:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": content}, file)


def test_files_of_other_steps_are_not_mixed(tmp_path: Path) -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    write_ranks(tmp_path, dict.fromkeys(places, 7))
    assert open_source(tmp_path).weights["w"].shape == (4, 2)
    write_ranks(tmp_path, dict(zip(places, (7, 6, 7, 7), strict=True)))
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00\S* has counted 6\.0 steps.*00\S* 7\.0"):
        open_source(tmp_path)
    write_ranks(tmp_path, dict(zip(places, (7, 7, 6, 6), strict=True)))
    with pytest.raises(CheckpointError, match=r"beside \S*mp_rank_01\S* have counted 6\.0 steps"):
        open_source(tmp_path)
    write_ranks(tmp_path, dict.fromkeys(places, 7), (7, 8))
    with pytest.raises(CheckpointError, match=r"mp_rank_01\S* was saved after 8 steps"):
        open_source(tmp_path)


def joined(info: Any, name: str, *slices: Tensor, key: str = "fp32", rules: dict[str, int] | None = None) -> Tensor:
    cuts = TensorRanks(info, Path("mp_rank_00_model_states.pt"), len(slices), rules)
    cut = cuts.cut_of(name, [tuple(part.shape) for part in slices])
    return cut.joined(name, [Saved.of(part) for part in slices], key).read()


WHOLE = torch.arange(48.0).view(8, 6)


def sub_params(**entry: Any) -> dict[str, Any]:
    return {"parameter_with_sub_params": [{"patterns": ["w"], "partition_dim": 0, **entry}]}


# Written by hand from the code of ds_to_universal.py: runs of 0.19 have an affine_map for each parameter beside these.
PATTERNS: list[tuple[dict[str, Any], list[Tensor]]] = [
    ({}, [WHOLE[:5], WHOLE[5:]]),
    ({"parameter_with_row_parallelism_patterns": [r"w"]}, [WHOLE[:, :4], WHOLE[:, 4:]]),
    ({"tp_replicated_parameter_patterns": [r"^w$"]}, [WHOLE, WHOLE]),
    ({"parameter_to_average_patterns": [r"w"]}, [WHOLE - 1, WHOLE + 1]),
    (
        {"parameter_with_2_sub_params_cat_dim_0": ["w"]},
        [torch.cat([WHOLE[:2], WHOLE[4:6]]), torch.cat([WHOLE[2:4], WHOLE[6:]])],
    ),
    (sub_params(shape=(2, -1)), [torch.cat([WHOLE[:2], WHOLE[4:6]]), torch.cat([WHOLE[2:4], WHOLE[6:]])]),
    (sub_params(shape=((6, 2), -1)), [torch.cat([WHOLE[:3], WHOLE[6:7]]), torch.cat([WHOLE[3:6], WHOLE[7:]])]),
    (
        sub_params(shape=((6, 2), -1)) | {"sub_param_shard_widths": {"w": [[4, 2], [2, 0]]}},
        [torch.cat([WHOLE[:4], WHOLE[6:]]), WHOLE[4:6]],
    ),
    (  # experts: (2, -1, 6), cut along the second dimension
        sub_params(shape=(2, (4,), 6), partition_dim=1),
        [torch.cat([WHOLE[:2], WHOLE[4:6]]), torch.cat([WHOLE[2:4], WHOLE[6:]])],
    ),
]


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_patterns(number: int) -> None:
    info, slices = PATTERNS[number]
    assert torch.equal(joined(info, "w", *slices), WHOLE)


def test_a_vocabulary_loses_its_padding() -> None:
    info = {"vocabulary_parameter_patterns": ["w"], "original_vocab_size": 7}
    assert torch.equal(joined(info, "w", WHOLE[:4], WHOLE[4:]), WHOLE[:7])
    with pytest.raises(CheckpointError, match="original_vocab_size is 9"):
        joined(info | {"original_vocab_size": 9}, "w", WHOLE[:4], WHOLE[4:])


def scaled(**piece: Any) -> dict[str, Any]:
    """A row-parallel bias, which both ranks have divided by two."""
    entry = {"shape": [6], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1], "scale": 0.5, **piece}
    ranks = {rank: {"shard_shape": [6], "pieces": [entry]} for rank in range(2)}
    return {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [6], "ranks": ranks}}}}


def test_a_bias_that_ranks_have_divided() -> None:
    half = WHOLE[0] / 2
    assert torch.equal(joined(scaled(), "w", half, half), WHOLE[0])
    assert torch.equal(joined(scaled(), "w", 2 * WHOLE[0], 2 * WHOLE[0], key="exp_avg"), WHOLE[0])
    assert torch.equal(joined(scaled(), "w", 4 * WHOLE[0], 4 * WHOLE[0], key="exp_avg_sq"), WHOLE[0])


REFUSED: list[tuple[dict[str, Any] | None, list[Tensor], str]] = [
    ({"tp_replicated_parameter_patterns": ["w", "."]}, [WHOLE, WHOLE], "matches two patterns"),
    (
        {"tp_replicated_parameter_patterns": ["w"], "parameter_with_row_parallelism_patterns": ["w"]},
        [WHOLE, WHOLE],
        r"patterns of two kinds.*--cut w=DIM",
    ),
    ({"tp_replicated_parameter_patterns": ["w"]}, [WHOLE, WHOLE + 1], "same values on all tensor ranks"),
    ({"tp_replicated_parameter_patterns": ["w"]}, [WHOLE, WHOLE[:4]], "whole on all tensor ranks"),
    ({}, [WHOLE[:, :4], WHOLE[:, 4:]], "cut along dimension 0"),
    ({}, [WHOLE[:4], WHOLE[4:].bfloat16()], "bfloat16 in the files of tensor rank 1"),
    (sub_params(shape=((5, 2), -1)), [WHOLE[:4], WHOLE[4:]], "do not fit its sub-parameters"),
    ({"autotp_unsupported_parameter_patterns": {"w": "codebook"}}, [WHOLE, WHOLE], r"cannot join w \(codebook\)"),
    ({"parameter_with_row_parallelism_patterns": [r"(a|aa)+$"]}, [WHOLE, WHOLE], "which is not read"),
    ({"affine_map": {"version": 2}}, [WHOLE, WHOLE], "version 2 of affine_map"),
    (scaled(dest=[3, [1]]), [WHOLE[0], WHOLE[0]], "lies outside"),
    (scaled(source=[0, [-1]]), [WHOLE[0], WHOLE[0]], "lies outside"),
    (scaled(source=[0, [0]]), [WHOLE[0], WHOLE[0]], "lies outside"),
    (
        {"affine_map": {"version": 1, "params": {"w": {"logical_shape": [1 << 60], "ranks": {}}}}},
        [WHOLE, WHOLE],
        "are only a part",
    ),
    ({"parameter_to_average_patterns": ["w"]}, [WHOLE.long(), WHOLE.long()], "has no mean of tensor ranks"),
    (scaled(shape=[5]), [WHOLE[0, :5], WHOLE[0, :5]], "no tensor rank has all"),
    (None, [WHOLE[:4], WHOLE[4:]], "does not tell how tensor ranks cut w.*--cut"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_cuts_that_do_not_fit_are_refused(number: int) -> None:
    info, slices, told = REFUSED[number]
    with pytest.raises(CheckpointError, match=told):
        joined(info, "w", *slices)


def test_cuts_that_files_do_not_tell() -> None:
    """Names of Megatron's layers are known; others are said."""
    assert torch.equal(joined(None, "4.self_attention.dense.weight", WHOLE[:, :3], WHOLE[:, 3:]), WHOLE)
    assert torch.equal(joined(None, "4.mlp.dense_h_to_4h.weight", WHOLE[:3], WHOLE[3:]), WHOLE)
    assert torch.equal(joined(None, "4.input_layernorm.weight", WHOLE[0], WHOLE[0]), WHOLE[0])
    assert torch.equal(joined(None, "w", WHOLE[:, :3], WHOLE[:, 3:], rules={"w*": 1}), WHOLE)
    assert torch.equal(joined({}, "w", WHOLE, WHOLE, rules={"?": -1}), WHOLE)
