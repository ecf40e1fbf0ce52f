"""Models of transformers whose MLPs and loss are computed in tiles of tokens. They need transformers."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero import ConfigError
from lt_zero.features.tiles.huggingface import DeferredLogits, install
from lt_zero.features.tiles.keys import LongSequences
from lt_zero.parallel.plan import parallelize
from tests.support.features import needs, there
from tests.support.plans import config, train
from tests.support.pool import Pool

transformers: Any = pytest.importorskip("transformers", minversion="4.53")
BLOCK = LongSequences(tiled_mlp=True, mlp_tokens_per_tile=3, tiled_loss=True, loss_tokens_per_tile=4)
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 4},
    "gemma": {"head_dim": 4},
    "gemma2": {"head_dim": 4, "final_logit_softcapping": 0.1},
    "phi": {},
    "phi3": {},
    "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {},
}  # fmt: skip


def made(kind: str = "llama", **keys: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **keys})
    return transformers.AutoModelForCausalLM.from_config(config)


def batch(length: int = 10) -> dict[str, Tensor]:
    tokens = torch.randint(1, 32, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.where(tokens > 4, -100)}


def outcome(model: Any, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**batch(), **options).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_model(kind: str) -> None:
    model = made(kind)
    wanted, state = outcome(model), list(model.state_dict())
    wanted_sum = outcome(model, num_items_in_batch=torch.tensor(7))["loss"]
    logits = model(batch()["input_ids"]).logits
    installed = install(model, BLOCK, 0)
    assert list(model.state_dict()) == state
    found = outcome(model)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outcome(model, num_items_in_batch=torch.tensor(7))["loss"], wanted_sum)
    shifted = torch.nn.functional.pad(batch()["labels"], (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(outcome(model, shift_labels=shifted), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(batch()["input_ids"]).logits, logits)
    installed.remove()
    assert type(model.get_output_embeddings()) is nn.Linear
    assert torch.equal(outcome(model)["loss"], wanted["loss"])


def test_logits_are_an_error_and_not_wrong() -> None:
    model = made()
    install(model, BLOCK, 0)
    out = model(**batch())
    assert isinstance(out.logits, DeferredLogits)
    for use in (lambda t: t.argmax(-1), lambda t: t[:, -1], lambda t: torch.softmax(t, -1), lambda t: t + t, repr):
        with pytest.raises(RuntimeError, match="Call the model without labels for logits"):
            use(out.logits)
    model.lm_head.loss_options["softcap"] = None
    capped = made("gemma2", final_logit_softcapping=None)
    install(capped, BLOCK, 0)
    capped.config.final_logit_softcapping = 2.0
    with pytest.raises(RuntimeError, match=r"applies \[div 2.0, tanh, mul 2.0\] to its logits, and \[\] is known"):
        capped(**batch())


def test_a_copy_generation_and_arguments_are_as_before() -> None:
    model = made()
    signature, prompt = inspect.signature(model.forward), batch()["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(prompt, **options)
    loss = outcome(model)["loss"]
    install(model, BLOCK, 0)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(prompt, **options), wanted)
    assert model.forward(**batch()).loss.item() == pytest.approx(loss.item(), rel=1e-6)
    copied = copy.deepcopy(model)
    model.lm_head.weight.data.zero_()
    assert outcome(copied)["loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    with torch.no_grad():
        assert copied.eval()(**batch()).loss.item() == pytest.approx(loss.item(), rel=1e-6)
    with pytest.raises(ValueError, match="Shift labels"):
        model(**batch(), logits_to_keep=3)
    assert model(prompt).logits.shape == (2, 10, 32)  # the labels of the failed call are forgotten


@pytest.mark.slow
def test_the_whole_model_can_be_compiled() -> None:
    model = made()
    wanted = outcome(model)
    install(model, BLOCK, 0)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    compiled(**batch()).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "key", "text"),
    [
        (lambda: nn.Linear(2, 2), "long_sequences.tiled_mlp", "Linear has no model of transformers"),
        (lambda: made().model, "long_sequences.tiled_loss", "LlamaModel has no output layer"),
        (
            lambda: transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**SIZES, num_local_experts=2, head_dim=4)
            ),
            "long_sequences.tiled_mlp",
            "MixtralForCausalLM is not known",
        ),
        (
            lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=2, head_dim=4)),
            "long_sequences.tiled_mlp",
            "GptOssMLP is no MLP of single tokens",
        ),
    ],
)
def test_models_that_are_not_known(make: Any, key: str, text: str) -> None:
    model = make()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ConfigError, match=text) as error:
        install(model, BLOCK, 0)
    assert error.value.problems[0].key == key
    assert [type(m) for m in model.modules()] == kinds
    model = made()
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ConfigError, match="loss function of LlamaForCausalLM is cross_entropy"):
        install(model, LongSequences(tiled_loss=True), 0)


def _trains(stage: int, tied: bool) -> list[float]:
    rank, losses = torch.distributed.get_rank(), []
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config = {
        "zero_optimization": zero,
        "long_sequences": BLOCK.model_dump(),
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "activation_checkpointing": {"mode": "full" if there("activation_checkpointing") else "none"},
    }
    model = made(tie_word_embeddings=tied)
    engine, *_ = lt_zero.initialize(model=model, config=config)
    for _ in range(3):
        loss = engine(**{key: value[rank : rank + 1] for key, value in batch().items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.engine.detach()
    assert type(model.lm_head) is nn.Linear
    return losses


@needs("activation_checkpointing")
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_train_alike(pool: Pool, stage: int, tied: bool) -> None:
    model = made(tie_word_embeddings=tied)
    optimizer, wanted = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for _ in range(3):
        rows = [{key: value[row : row + 1] for key, value in batch().items()} for row in range(2)]
        losses = [model(**row).loss for row in rows]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        optimizer.step()
        wanted.append([loss.item() for loss in losses])
    found = pool.run(2, _trains, stage, tied)
    assert [list(row) for row in zip(*found, strict=True)] == [pytest.approx(row, rel=1e-5) for row in wanted]


def _cut(name: str) -> float:
    def cut(model: nn.Module, *args: Any) -> None:
        parallelize(model, *args)
        install(model, BLOCK, 1)

    kind = {"tied": "qwen3"}.get(name, name)
    sizes = {"vocab_size": 18, "hidden_size": 24, "intermediate_size": 36, "head_dim": 6, "use_cache": False}
    model = made(kind, **sizes, tie_word_embeddings=name == "tied")
    return train(model, config(2, stage=3), cut=cut, loss=lambda model, batch: model(batch, labels=batch).loss)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "gemma2"))]
)
def test_models_that_are_cut_over_tensor_ranks(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _cut, name)) < 2e-6


def test_what_is_switched_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lt_zero"):
        lt_zero.shard(made(), {"long_sequences": {"tiled_mlp": True, "tiled_loss": True}})
    assert "long_sequences: LlamaForCausalLM computes 2 MLPs and its loss in tiles of tokens." in caplog.text
