"""Checkpoints of DeepSpeed's PipelineModule, also with tensor ranks, and where training goes on from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.formats.deepspeed import DeepSpeedSource
from lt_zero.checkpoint.formats.pipeline_layers import pipeline_name
from lt_zero.checkpoint.open import open_source
from lt_zero.common.errors import CheckpointError
from lt_zero.parallel import LayerSpec, PipelineModule, TiedLayerSpec
from tests.support.import_tools import makers
from tests.support.paths import DATA
from tests.support.pool import Pool

FOLDER = DATA / "deepspeed_parallel"
PIPE = FOLDER / "pipe_bf16" / "global_step3"


def expected() -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = torch.load(FOLDER / "pipe_bf16" / "expected.pt")
    return {pipeline_name(name): values for name, values in found.items()}


def test_stages_are_put_together() -> None:
    source, wanted = open_source(FOLDER / "pipe_bf16"), expected()
    assert set(source.weights) == {*wanted, "layers.1.calls"}
    for name, values in wanted.items():
        assert torch.equal(source.read(name), values["fp32"]), name
    assert source.read("layers.1.calls") == 6
    (saved,) = source.optimizers
    assert set(saved.state) == set(wanted) - {"layers.1.frozen.weight"} == set(saved.groups[0]["params"])
    for name, entries in saved.state.items():
        assert entries["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(source.read_state(0, name, key), wanted[name][key]), (name, key)
    assert source.meta == {"note": "client state"}


MISSING: list[tuple[str, str]] = [
    ("mp_rank_01_model_states.pt", "of a run of 2 model ranks.*has files of 1"),
    ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "missing"),
    ("layer_01-model_states.pt", "no file layer_01"),
    ("layer_*", "no layer files"),
]


@pytest.mark.parametrize(("lost", "told"), MISSING)
def test_a_missing_file_is_named(lost: str, told: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PIPE, tmp_path / "copy"))
    for file in list(copy.glob(lost)):
        file.unlink()
    with pytest.raises(CheckpointError, match=told):
        DeepSpeedSource(copy)


WHOLE = {  # of Megatron's names, which tell the cut: by rows, by columns, not at all
    "tied_modules.embed.word_embeddings.weight": (torch.randn(8, 6), 0),
    "tied_modules.other.word_embeddings.weight": (torch.randn(8, 6), 0),
    "2.self_attention.query_key_value.weight": (torch.randn(10, 6), 0),
    "2.self_attention.dense.weight": (torch.randn(6, 4), 1),
    "3.input_layernorm.weight": (torch.randn(6), None),
    "3.mlp.dense_4h_to_h.bias": (torch.randn(6), None),
}
STAGES = [[0, 1, 2], [0, 3, 4, 5]]  # entries of WHOLE; the first is tied


def part(name: str, rank: int) -> Tensor:
    whole, dim = WHOLE[name]
    return whole if dim is None else whole.chunk(2, dim)[rank].contiguous()


def megatron(folder: Path) -> Path:
    """Two stages by two tensor ranks, in the layout that DeepSpeed's code writes; no run has made it."""
    folder.mkdir()
    names = list(WHOLE)
    for model in range(4):
        own = [names[n] for n in STAGES[model // 2]]
        slices = {name: part(name, model % 2) for name in own}
        shapes = [{name: value.shape for name, value in slices.items()}]
        states = {"module": None, "param_shapes": shapes, "buffer_names": ["tied_modules.other.rope"]}
        torch.save(states, folder / f"mp_rank_{model:02d}_model_states.pt")
        row = torch.cat([value.reshape(-1) for value in slices.values()])
        inner = {
            "zero_stage": 1,
            "partition_count": [1],
            "group_paddings": [0],
            "single_partition_of_fp32_groups": [row],
            "base_optimizer_state": {"state": {0: {"step": 5, "exp_avg": 2 * row}}, "param_groups": [{"params": [0]}]},
        }
        torch.save({"optimizer_state_dict": inner}, folder / f"zero_pp_rank_0_mp_rank_{model:02d}_optim_states.pt")
    for number, prefix in enumerate(["tied_modules.embed.", "tied_modules.other.", "2.", "3."]):
        for rank in range(2):
            inside = {n.removeprefix(prefix): part(n, rank).bfloat16() for n in names if n.startswith(prefix)}
            inside |= {"rope": torch.arange(3.0)} if number == 1 else {}
            torch.save(inside, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    return folder


def test_stages_by_tensor_ranks(tmp_path: Path) -> None:
    source = open_source(megatron(tmp_path / "made"))
    assert set(source.weights) == {*map(pipeline_name, WHOLE), "tied.other.rope"}  # tied modules of equal shapes
    for name, (whole, _) in WHOLE.items():
        assert torch.equal(source.read(pipeline_name(name)), whole), name
        assert torch.equal(source.read_state(0, pipeline_name(name), "exp_avg"), 2 * whole), name
    assert len(source.optimizers[0].groups[0]["params"]) == 6


@pytest.mark.parametrize(
    ("lost", "told"), [("layer_02-model_01-*", "layer 2 of tensor rank 1"), ("*mp_rank_03_*", "do not divide")]
)
def test_missing_files_of_tensor_ranks(lost: str, told: str, tmp_path: Path) -> None:
    folder = megatron(tmp_path / "made")
    for file in list(folder.glob(lost)):
        file.unlink()
    with pytest.raises(CheckpointError, match=told):
        open_source(folder)


# ---- going on --------------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


def batches() -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(5)
    return [(tokens, tokens.roll(1)) for tokens in torch.randint(9, (2, 4), generator=chance)]


def go_on_in_a_pipeline(path: str) -> dict[str, Any]:
    """One step of two stages from DeepSpeed's checkpoint; the trained weights of this rank."""
    make = makers("deepspeed_parallel")
    tied = ("embed", nn.Embedding, make.TOKENS, make.WIDTH)
    blocks = [LayerSpec(make.Tanh), torch.tanh, LayerSpec(nn.Linear, make.WIDTH, make.WIDTH)]
    layers = [TiedLayerSpec(*tied), *blocks, TiedLayerSpec(*tied, forward_fn=make.head)]
    stages = dist.get_world_size()
    model = PipelineModule(layers, num_stages=stages, loss_fn=make.loss, partition_method="uniform")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.5)
    config = {**CONFIG, "zero_optimization": {"stage": 1}}
    engine, *_ = lt_zero.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(path)
    assert engine.global_steps == 3
    engine.train_batch(iter(batches()))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def in_one_process() -> dict[str, Tensor]:
    make, values = makers("deepspeed_parallel"), expected()
    embed, tanh, linear = nn.Embedding(make.TOKENS, make.WIDTH), make.Tanh(), nn.Linear(make.WIDTH, make.WIDTH)
    modules = {"tied.embed": embed, "layers.1": tanh, "layers.3": linear}
    named = {f"{key}.{name}": p for key, module in modules.items() for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in named.values() if p.requires_grad], lr=1e-2)
    for name, p in named.items():
        p.data = values[name]["fp32"].float()
        if p.requires_grad:
            states = {key: value.clone() for key, value in values[name].items() if key != "fp32"}
            optimizer.state[p] = {"step": torch.tensor(3.0), **states}
    for tokens, labels in batches():
        out = make.head(embed, linear(torch.tanh(tanh(embed(tokens)))))
        (make.loss(out, labels) / 2).backward()
    optimizer.step()
    return {name: p.detach() for name, p in named.items()}


def test_a_pipeline_goes_on(pool: Pool) -> None:
    wanted = in_one_process()
    seen = set()
    for rank in pool.run(2, go_on_in_a_pipeline, str(FOLDER / "pipe_bf16")):
        for name, value in rank.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
            seen.add(name)
    assert seen == set(wanted)
