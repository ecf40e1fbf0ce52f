"""Models of transformers with sparse attention, and the guide (docs/attention.md). They need transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero import ConfigError
from lt_zero.attention import SparseSelfAttention, register
from tests.support.docs_tools import BLOCKS, run_text
from tests.support.pool import Pool

BLOCK = {"mode": "fixed", "block": 16, "num_local_blocks": 2, "attention": "unidirectional"}


def _model(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def _tokens(length: int = 80) -> Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))


def _config(block: dict[str, Any], **keys: Any) -> dict[str, Any]:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return {"sparse_attention": block, "optimizer": optimizer, "train_micro_batch_size_per_gpu": 2, **keys}


def test_a_model_is_switched_and_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = _model()
    tokens = _tokens()
    plain = model(tokens).logits.detach()
    with caplog.at_level(logging.INFO, "lt_zero"):
        engine, *_ = lt_zero.initialize(model=model, config=_config(BLOCK))
    assert "sparse_attention: LlamaForCausalLM computes Fixed(block=16" in caplog.text
    found = engine(tokens).logits
    torch.testing.assert_close(found[:, :32], plain[:, :32])  # the first window sees all before
    assert (found[:, 33:] - plain[:, 33:]).abs().amax(-1).min() > 1e-6
    padded = torch.ones(2, 80, dtype=torch.long)
    padded[:, 64:] = 0
    torch.testing.assert_close(engine(tokens, attention_mask=padded).logits[:, :64], found[:, :64])
    left = padded.flip(1)
    other = engine(tokens, attention_mask=left).logits
    assert other.isfinite().all()
    changed = engine(tokens.where(left == 1, 63 - tokens), attention_mask=left).logits
    torch.testing.assert_close(changed[:, 16:], other[:, 16:])
    engine.destroy()


def test_the_pattern_is_saved_with_the_model(tmp_path: Path) -> None:
    model = _model(attn_implementation="lt_zero_sparse")
    with pytest.raises(ValueError, match="has no pattern. Write the block"):
        model(_tokens())
    model.config.sparse_attention = BLOCK
    wanted = model(_tokens()).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="lt_zero_sparse")
    assert torch.equal(again(_tokens()).logits, wanted)


def test_the_guide() -> None:
    pytest.importorskip("transformers")
    (block,) = (b for b in BLOCKS if b.page.endswith("attention.md") and "run by" in b.marks)
    made: dict[str, Any] = {}
    run_text(block.text, str(block), made)
    assert made["model"](_tokens()).logits.shape == (2, 80, 32000)


def test_text_is_generated_as_without_a_cache() -> None:
    model = _model(attn_implementation="lt_zero_sparse").eval()
    model.config.sparse_attention = BLOCK
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    prompt = _tokens(40)
    assert torch.equal(
        model.generate(prompt, use_cache=True, **options), model.generate(prompt, use_cache=False, **options)
    )


def test_training_without_a_mask_and_a_cache() -> None:
    model = _model(attn_implementation="lt_zero_sparse")
    model.config.sparse_attention = BLOCK
    tokens = _tokens()
    wanted = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert torch.equal(model(tokens, use_cache=False).logits, wanted)


def test_a_cache_with_empty_places_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    model = _model(attn_implementation="lt_zero_sparse").eval()
    model.config.sparse_attention = BLOCK
    for length in (80, 100):
        cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        if length == 80:  # full
            torch.testing.assert_close(model(_tokens(), past_key_values=cache).logits, model(_tokens()).logits)
        else:
            with pytest.raises(ValueError, match="places for 100 tokens, of which 80 are there"):
                model(_tokens(), past_key_values=cache)


def test_a_causal_model_with_a_pattern_of_its_own_in_both_directions_is_refused() -> None:
    model = _model(attn_implementation="lt_zero_sparse")
    model.config.sparse_attention = {**BLOCK, "attention": "bidirectional"}
    with pytest.raises(ValueError, match='"bidirectional", but the model is causal'):
        model(_tokens())


def test_a_model_that_is_causal_in_parts_is_refused_and_one_part_can_be_switched() -> None:
    transformers = pytest.importorskip("transformers")
    register()
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**small, image_size=32, patch_size=8),
        text_config=transformers.LlamaConfig(**small, vocab_size=64),
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    images, tokens = torch.randn(1, 3, 32, 32), _tokens()
    before = model.model.vision_tower(images).last_hidden_state, model.model.language_model(tokens).last_hidden_state
    with pytest.raises(ConfigError, match="LlamaAttention of LlavaFor.* is causal, but CLIPAttention is not"):
        lt_zero.initialize(model=model, config=_config(BLOCK))
    part = model.model.language_model
    part.config.sparse_attention = BLOCK
    part.set_attn_implementation("lt_zero_sparse")
    assert torch.equal(model.model.vision_tower(images).last_hidden_state, before[0])
    assert not torch.allclose(part(tokens).last_hidden_state, before[1])


def test_cross_attention_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32000, "n_positions": 80}
    config = transformers.GPT2Config(**small, add_cross_attention=True)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="lt_zero_sparse")
    model.config.sparse_attention = BLOCK
    with pytest.raises(ValueError, match="cross-attention, which sparse attention has not"):
        model(_tokens(), encoder_hidden_states=torch.zeros(2, 80, 16))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has cross-attention"):
        lt_zero.initialize(model=model, config=_config(BLOCK))


@pytest.mark.parametrize("option", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_a_scale_of_the_models_own_is_not_left_out(option: dict[str, bool]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32000, n_positions=80, initializer_range=0.5, **option
    )
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    wanted = model(_tokens()).logits
    lt_zero.initialize(model=model, config=_config({**BLOCK, "mode": "dense", "num_local_blocks": None}))
    if int(transformers.__version__.split(".")[0]) < 5:  # does not tell the scale
        with pytest.raises(ValueError, match=next(iter(option))):
            model(_tokens())
    else:
        torch.testing.assert_close(model(_tokens()).logits, wanted, rtol=1e-3, atol=1e-3)


def test_what_a_model_cannot_have() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match='"bidirectional", but LlamaForCausalLM is causal. Write "unidirectional"'):
        lt_zero.initialize(model=_model(), config=_config({**BLOCK, "attention": "bidirectional"}))
    whole = transformers.BartConfig(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1)
    with pytest.raises(ConfigError, match="BartModel has cross-attention"):
        lt_zero.initialize(model=transformers.BartModel(whole), config=_config(BLOCK))
    model = _model(attn_implementation="lt_zero_sparse")
    model.config.sparse_attention = BLOCK
    packed = torch.cat([torch.arange(40), torch.arange(40)])[None].expand(2, -1)
    with pytest.raises(ValueError, match="several sequences in one row"):
        model(_tokens(), position_ids=packed, use_cache=False)


def test_an_error_after_it_leaves_the_model_as_it_was() -> None:
    model = _model()
    before = dict(vars(model.config))
    with pytest.raises(ConfigError, match="quantize"):  # nothing is frozen
        lt_zero.initialize(model=model, config=_config(BLOCK, quantize=4))
    assert vars(model.config) == before
    assert "sparse_attention" not in before


def test_a_model_without_attention_of_either_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no lt_zero.attention.SparseSelfAttention and no"):
        lt_zero.initialize(model=nn.Linear(2, 2), config=_config(BLOCK))


def test_modules_without_a_pattern_take_that_of_the_configuration() -> None:
    model = nn.Sequential(SparseSelfAttention(), nn.Linear(2, 2))
    lt_zero.initialize(model=model, config=_config(BLOCK))
    assert model[0].pattern.num_local_blocks == 2
    own = SparseSelfAttention(model[0].pattern)
    again = nn.Sequential(model[0], own, nn.Linear(2, 2))  # of a later run, with another configuration
    lt_zero.initialize(model=again, config=_config({**BLOCK, "num_local_blocks": 4}))
    assert (model[0].pattern.num_local_blocks, own.pattern.num_local_blocks) == (4, 2)


def _trains(stage: int) -> list[float]:
    rank, losses = torch.distributed.get_rank(), []
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine, *_ = lt_zero.initialize(model=_model(), config=_config(BLOCK, zero_optimization=zero))
    for _ in range(2):
        tokens = _tokens()[rank : rank + 1]
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_stages_train_alike(pool: Pool, stage: int) -> None:
    model = _model(attn_implementation="lt_zero_sparse")
    model.config.sparse_attention = BLOCK
    optimizer, wanted = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(2):
        losses = [model(t[None], labels=t[None]).loss for t in _tokens()]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        optimizer.step()
        wanted.append([loss.item() for loss in losses])
    found = pool.run(2, _trains, stage)
    assert [list(row) for row in zip(*found, strict=True)] == [pytest.approx(row, rel=1e-5) for row in wanted]
