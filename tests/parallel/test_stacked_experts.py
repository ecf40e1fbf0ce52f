"""Mixtures of transformers whose experts are on several ranks, against the same model on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_zero import ActivationCheckpointing
from lt_zero.common.errors import ConfigError
from lt_zero.parallel.experts import SIZE
from lt_zero.parallel.stacked_experts import StackedExperts, take_over
from tests.support.docs_tools import BLOCKS, run_text
from tests.support.features import needs
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.matrix import only_rows
from tests.support.mixtures import go_on, start, train_as_one_process
from tests.support.model_mixtures import batch, build, causal_loss, choose, drawn_loss
from tests.support.pool import Pool

pytest.importorskip("transformers", minversion="5.0")

# ---- training --------------------------------------------------------------------------------------------------------

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
GROUPED, BATCHED = {"how": "grouped_mm"}, {"how": "batched_mm"}
BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def _made(model_type: str, keys: dict[str, Any], to: int | None, recomputed: bool) -> Any:
    model = build(model_type, **keys)
    if recomputed:
        model.gradient_checkpointing_enable()
    if to is not None:
        choose(model, to)
    return model


def _train(cases: list[tuple[Any, ...]]) -> None:
    for model_type, stage, size, optimizer, keys, to, recomputed in cases:
        run = start(stage, size, optimizer, partial(_made, model_type, keys, to, recomputed))
        # Norms and routers of a model in fp64 compute in fp32.
        far = (1e-8, 1e-6) if "dtype" in keys else (2e-5, 3e-5)
        reference = _made(model_type, keys, to, False)
        train_as_one_process(run, reference, optimizer, causal_loss, *far)
        assert any(isinstance(module, StackedExperts) for module in run.model.modules())
        run.engine.detach()


ROWS: dict[int, list[tuple[Any, ...]]] = {
    2: [
        ("mixtral", 3, 2, "adamw", DOUBLE, None, False),
        ("qwen3_moe", 2, 2, "sgd", DOUBLE, None, False),
        ("deepseek_v3", 1, 2, "adamw", DOUBLE, None, False),
        ("gpt_oss", 3, 2, "sgd", DOUBLE, None, False),
        # All tokens go to the second rank, and the first runs no expert.
        ("mixtral", 3, 2, "sgd", {**DOUBLE, "num_experts_per_tok": 1}, 3, True),
        ("gpt_oss", 0, 2, "adamw", GROUPED, 2, False),
        ("mixtral", 2, 2, "adamw", {**BATCHED, **BALANCED}, None, True),
    ],
    4: [
        ("mixtral", 2, 2, "sgd", GROUPED, None, False),
        ("qwen3_moe", 3, 4, "adamw", {**GROUPED, **BALANCED}, None, True),
        ("deepseek_v3", 3, 2, "sgd", DOUBLE, 1, True),
        ("gpt_oss", 1, 4, "adamw", DOUBLE, None, False),
        ("mixtral", 0, 4, "adamw", DOUBLE, 0, False),
    ],
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_models_train_as_in_one_process(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _train, ROWS[ranks])


def _only_experts() -> Any:
    """Only experts of the second rank are trained, and tokens that reach the first of them have no gradients."""
    model = build("mixtral", **DOUBLE)
    choose(model, 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)
    return model


def _nothing_before_experts() -> None:
    run = start(2, 2, "sgd", _only_experts)
    train_as_one_process(run, _only_experts(), "sgd", causal_loss, 1e-8, 1e-6)
    run.engine.detach()


def test_a_rank_without_tokens_takes_part_in_backward(pool: Pool) -> None:
    pool.run(2, _nothing_before_experts)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["olmoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "nemotron_h"])
def test_other_models_with_stacked_experts(pool: Pool, model_type: str) -> None:
    pool.run(2, _train, [(model_type, 3, 2, "sgd", {}, None, False)])


def _draws() -> None:
    for stage, optimizer in ((3, "sgd"), (2, "adamw")):
        run = start(stage, 2, optimizer, partial(build, "phimoe", **DOUBLE))
        train_as_one_process(run, build("phimoe", **DOUBLE), optimizer, drawn_loss, 1e-8, 1e-6)
        run.engine.detach()


@pytest.mark.slow
def test_routers_that_draw_experts(pool: Pool) -> None:
    """Phi-3.5-MoE samples its experts in training, so that both runs have to draw the same."""
    pool.run(2, _draws)


def _adapted(model_type: str, keys: dict[str, Any]) -> Any:
    import peft

    how = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = peft.get_peft_model(build(model_type, **keys), how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # half of them are zero else
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def _adapters(cases: list[tuple[Any, ...]]) -> None:
    for model_type, stage, size, optimizer, keys in cases:
        run = start(stage, size, optimizer, partial(_adapted, model_type, keys))
        far = (1e-8, 1e-6) if "dtype" in keys else (2e-5, 3e-5)
        train_as_one_process(run, _adapted(model_type, keys), optimizer, causal_loss, *far)
        run.engine.detach()


def test_adapters_of_experts(pool: Pool) -> None:
    pytest.importorskip("peft", minversion="0.17")
    pool.run(2, _adapters, [("mixtral", 0, 2, "adamw", DOUBLE), ("gpt_oss", 3, 2, "sgd", DOUBLE)])


@needs("activation_checkpointing")
@pytest.mark.parametrize("spread", [False, True], ids=["of peft", "over ranks"])
def test_adapted_experts_are_recomputed_with_their_adapters(spread: bool) -> None:
    """peft adds to parameters around the forward of the class that is named, so its wrapper is recomputed."""
    pytest.importorskip("peft", minversion="0.17")
    from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing

    found, adapted = [], _adapted("mixtral", DOUBLE)
    for block in None, ActivationCheckpointing(mode="full", modules=["MixtralExperts"]):
        model = copy.deepcopy(adapted)
        if spread:
            take_over(model)
        recomputed = Checkpointing(model, block) if block is not None else None
        causal_loss(model, 0, 0).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert recomputed is not None
    assert len(recomputed.found.chosen) == 2
    assert any("lora_A" in name and "experts" in name for name in found[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


PATHS = [("mixtral", 2, [(3, 2), (1, 1), (2, 2)]), ("gpt_oss", 4, [(1, 2), (3, 4), (0, 1), (3, 2), (0, 4)])]


@pytest.mark.parametrize(("model_type", "ranks", "runs"), only_rows(PATHS[:1], PATHS))
def test_checkpoints_go_on_at_another_number_of_expert_ranks(
    pool: Pool, tmp_path: Path, model_type: str, ranks: int, runs: list[tuple[int, int]]
) -> None:
    pool.run(ranks, go_on, str(tmp_path), runs, partial(build, model_type), causal_loss, 1e-5)


def _page() -> list[float]:
    (code,) = (block.text for block in BLOCKS if block.marks.get("run by") == "test_stacked_experts")
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in torchrun_env().items():
            patch.setenv(name, value)
        patch.setattr(L, "Trainer", lambda strategy, **_: strategy)
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda name: build("mixtral"))
        run_text(code.replace("parallel_size=4", "parallel_size=2"), "docs/experts.md", found)
        module = found["Model"]()
        rows: Any = [batch(step, 0) for step in range(4)]
        trainer = pl.Trainer(**{**QUIET, "strategy": found["trainer"], "devices": 2, "max_steps": 2})
        trainer.fit(module, DataLoader(rows, batch_size=None))
        weights: dict[str, Tensor] = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    assert [type(m).__name__ for m in module.modules() if isinstance(m, StackedExperts)] == ["MixtralExperts"] * 2
    return [value.mean().item() for value in weights.values()]


def test_the_page_trains(pool: Pool) -> None:
    found = pool.run(2, _page)[0]
    before = [p.mean().item() for p in build("mixtral").parameters()]
    assert len(found) == len(before)
    assert found != before


# ---- what is taken over ----------------------------------------------------------------------------------------------


def _layers(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, StackedExperts)]


class FourRanks:
    size = 4

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be copied")


def test_experts_on_one_rank_compute_as_before() -> None:
    model = build("mixtral")
    names = dict(model.named_parameters()).keys()
    before = causal_loss(model, 0, 0)
    take_over(model)
    take_over(model)
    assert dict(model.named_parameters()).keys() == names
    for made in (model, copy.deepcopy(model)):
        layers: list[Any] = _layers(made)
        assert [(type(e).__name__, e.number, e.num_experts) for e in layers] == [("MixtralExperts", 4, 4)] * 2
        torch.testing.assert_close(causal_loss(made, 0, 0), before)
    layers[0].spread(FourRanks())
    with pytest.raises(RuntimeError, match="a copy of experts that are on several ranks"):
        causal_loss(copy.deepcopy(made), 0, 0)


def _keywords(experts: Any) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out: Tensor = type(experts).forward(
            experts, top_k_weights=top_k_weights, hidden_states=hidden_states, top_k_index=top_k_index
        )
        return out

    return forward


def test_a_layer_alone_whose_arguments_have_names() -> None:
    experts = build("mixtral").model.layers[0].mlp.experts
    given = torch.randn(3, 16), torch.tensor([[0, 1], [3, 2], [1, 0]]), torch.rand(3, 2)
    want = experts(*given)
    layer: Any = build("mixtral").model.layers[0]
    take_over(layer)
    found = layer.mlp.experts
    assert isinstance(found, StackedExperts)
    torch.testing.assert_close(_keywords(found)(*given), want)


@pytest.mark.parametrize(
    ("model_type", "keys", "text"),
    [
        ("switch_transformers", {"num_experts": 4, "d_model": 16}, "is a SwitchTransformersExperts of transformers"),
        ("llama4_text", {"num_hidden_layers": 2}, "is a Llama4TextExperts of transformers, which is not stacked"),
    ],
)
def test_other_kinds_of_experts_are_refused(model_type: str, keys: dict[str, Any], text: str) -> None:
    import transformers

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(model_type, **keys)
        model = transformers.AutoModel.from_config(config)
    with pytest.raises(ConfigError, match=text) as caught:
        take_over(model)
    assert caught.value.problems[0].key == SIZE
    assert not _layers(model)


def test_an_assigned_forward_is_refused() -> None:
    model = build("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.forward = _keywords(experts)
    with pytest.raises(ConfigError, match="has a forward that was assigned to it.*layers.1.mlp.experts"):
        take_over(model)
    assert not _layers(model)
