"""Models of transformers by the plans that they bring with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_zero.common.errors import ConfigError
from lt_zero.parallel.plan import PlanRow
from tests.support.llamas import VOCABULARY, Llama
from tests.support.plans import config, cut_over_all, plans_as_it_cuts, rule, train
from tests.support.pool import Pool

pytest.importorskip("transformers", minversion="5.0")

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build(model_type: str, **keys: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(model_type, **{**SIZES, "use_cache": False, **keys})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def _train(
    model_type: str, keys: dict[str, Any], stage: int, optimizer: str, partition: dict[str, Any] | None = None
) -> float:
    return train(build(model_type, **keys), config(2, partition, stage), optimizer, loss=loss_of)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "gpt_neox": ("gpt_neox", {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "phi3": ("phi3", {}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [1, 3])
def test_their_own_plans_train_as_one_process(pool: Pool, stage: int, name: str) -> None:
    model_type, keys = MODELS[name]
    assert max(pool.run(2, _train, model_type, keys, stage, "sgd")) < 2e-6
    assert max(pool.run(2, _train, model_type, keys, stage, "adamw")) < 1e-5


def _plan(name: str) -> None:
    model_type, keys = MODELS[name]
    plans_as_it_cuts(build(model_type, **keys), config(2))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_planned_is_what_is_cut(pool: Pool, name: str) -> None:
    pool.run(2, _plan, name)


OF_DEEPSPEED = [  # its rules for Llama
    {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.mlp\.down_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.mlp\.(up|gate)_proj\.weight$"], "partition_type": "column"},
]
OF_OPT = [rule(r".*\.([qkv]_proj|fc1)\."), rule(r".*\.(out_proj|fc2)\.", "row")]
OF_BLOCKS = [rule(r".*\.query_key_value\.", shape=[1, -1]), rule(r".*\.dense\.", "row")]
OF_BLOCKS += [rule(r".*\.dense_h_to_4h\."), rule(r".*\.dense_4h_to_h\.", "row")]
OF_BLOCKS += [rule("gpt_neox.embed_in"), rule(".*", "skip")]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("model_type", "keys", "specs"),
    [
        ("llama", {}, OF_DEEPSPEED),
        ("opt", {"ffn_dim": 36, "word_embed_proj_dim": 24, "dropout": 0.0}, OF_OPT),  # its attention has num_heads
        ("gpt_neox", {"attention_dropout": 0.0, "hidden_dropout": 0.0}, OF_BLOCKS),
    ],
)
def test_rules_for_their_models_train_as_one_process(
    pool: Pool, model_type: str, keys: dict[str, Any], specs: list[dict[str, Any]], stage: int
) -> None:
    assert max(pool.run(2, _train, model_type, keys, stage, "sgd", {"layer_specs": specs})) < 2e-6


def _preset(name: str) -> float | str:
    try:
        return train(Llama(head_norms=True, tied=False), config(2, preset_model=name, stage=2))
    except ConfigError as error:
        return str(error)


def test_a_plan_of_a_model_type_for_a_model_written_by_hand(pool: Pool) -> None:
    assert max(pool.run(2, _preset, "qwen3")) < 1e-6
    for name, part in (("lama", "Did you mean"), ("gpt2", "no plan for it")):
        for text in pool.run(2, _preset, name):
            assert isinstance(text, str)
            assert f"preset_model='{name}'" in text
            assert part in text


def _preset_with_rules() -> list[PlanRow]:
    specs = [rule("lm_head|embed_tokens"), rule(r"layers\.0\.mlp", "skip")]
    partition = {"layer_specs": specs, "embedding_partition_dim": 0}
    return cut_over_all(Llama(head_norms=True), config(2, partition, preset_model="qwen3"))


def test_rules_precede_a_preset(pool: Pool) -> None:
    for rows in pool.run(2, _preset_with_rules):
        numbers = {row.pattern: (row.style, row.modules) for row in rows}
        assert numbers[r"layers\.0\.mlp"] == ("whole", 3)
        assert numbers["layers.*.mlp.down_proj"] == ("row", 1)
        assert numbers["layers.*.self_attn.q_norm"] == ("whole, partial gradient", 2)


def _refused(model_type: str, keys: dict[str, Any], partition: dict[str, Any] | None) -> str:
    model = build(model_type, **keys)
    with pytest.raises(ConfigError) as error:
        cut_over_all(nn.ModuleDict({"net": model}), config(2, partition))
    return str(error.value)


CONV = {"layer_specs": [rule(r".*c_attn\.")]}
WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, list[str]]] = {
    "no plan": ("gpt2", {"n_embd": 24, "n_head": 4}, None, ["no plan for ModuleDict", "layer_specs"]),
    "another kind of layer": ("gpt2", {"n_embd": 24, "n_head": 4}, CONV, ["net.transformer.h.0.attn.c_attn", "Conv1D"]),
    "experts": ("mixtral", {"num_local_experts": 2}, None, ["'packed_colwise'", "experts.gate_up_proj", "Supported"]),
    "one head of keys": ("gemma", {"num_key_value_heads": 1}, None, ["num_key_value_heads=1", "skip"]),
    "heads": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        None,
        ["k_proj=3", "num_attention_heads=3"],
    ),
    "vocabulary": ("llama", {"vocab_size": 17}, None, ["num_embeddings=17", "out_features=17", "resize_token"]),
    "hidden": ("qwen3", {"intermediate_size": 7}, None, ["in_features=7", "mlp.down_proj"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(pool: Pool, name: str) -> None:
    model_type, keys, partition, parts = WRONG[name]
    for text in pool.run(2, _refused, model_type, keys, partition):
        for part in parts:
            assert part in text


def _rows() -> list[PlanRow]:
    return cut_over_all(nn.ModuleDict({"net": build("qwen3", tie_word_embeddings=True)}), config(2))


def test_patterns_have_the_place_of_the_model(pool: Pool) -> None:
    for rows in pool.run(2, _rows):
        numbers = {row.pattern: (row.style, row.modules, row.elements) for row in rows}
        assert numbers["net.model.layers.*.self_attn.o_proj"] == ("row", 2, 24 * 24)
        assert numbers["net.lm_head"][:2] == ("column, gathered", 1)
        assert numbers["net.lm_head"][2] + numbers["net.model.embed_tokens"][2] == VOCABULARY * 24 // 2
