"""Models of transformers whose sequences are cut over ranks, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.common.transformers_models import warn_of_caches
from lt_zero.parallel.sequence.huggingface import switch
from tests.support.features import skip_without, there
from tests.support.lightning_tools import sharded_trainer, single_trainer
from tests.support.matrix import only_rows
from tests.support.parity import OPTIMIZERS
from tests.support.pool import Pool
from tests.support.sequences import as_rank, keys_of

pytest.importorskip("transformers", minversion="5.0")

VOCABULARY, LENGTH = 18, 12
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build(model_type: str, kind: str = "AutoModelForCausalLM", **keys: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(model_type, **{**SIZES, **keys})
    model = getattr(transformers, kind).from_config(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def plain(number: int, length: int = LENGTH) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    labels = tokens.clone()
    labels[1, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def odd(number: int) -> dict[str, Any]:
    return plain(number, 13)


def padded(number: int, left: bool = False) -> dict[str, Any]:
    batch = plain(number)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, LENGTH - 5 :] = 0
    mask = mask.flip(1) if left else mask
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


def padded_left(number: int) -> dict[str, Any]:
    return padded(number, left=True)


def packed(number: int) -> dict[str, Any]:
    places = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1)
    return {**plain(number), "position_ids": places, "use_cache": False}


def counted(number: int) -> dict[str, Any]:
    """With the number of tokens of several micro-batches, by which sums are divided."""
    return {**plain(number), "num_items_in_batch": torch.tensor(29)}


Case = tuple[str, dict[str, Any], Callable[[int], dict[str, Any]], dict[str, Any]]
GATHER: dict[str, Any] = {"sequence_parallel": {"method": "gather"}}
ZIGZAG: dict[str, Any] = {"sequence_parallel": {"method": "gather", "zigzag": True}}
TILES: dict[str, Any] = {"long_sequences": {"tiled_mlp": True, "mlp_tokens_per_tile": 3, "tiled_loss": True}}
TILES = TILES if there("tiles") else {}  # nothing is computed in tiles where these were taken out
STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
STILL |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES: list[Case] = [
    ("llama", {}, plain, {}),
    ("llama", {}, padded, {}),
    ("llama", {}, padded_left, {}),
    ("llama", {}, packed, {}),
    ("llama", {}, counted, {}),
    ("llama", {"attn_implementation": "eager"}, odd, {}),
    ("llama", {}, plain, GATHER),
    ("llama", {}, padded, ZIGZAG),
    ("llama", {}, packed, ZIGZAG),
    ("qwen3", {}, odd, {}),
    ("qwen3", {"tie_word_embeddings": True}, padded, {}),
    ("mistral", {"sliding_window": 4}, plain, {}),
    ("mistral", {"sliding_window": 4}, packed, GATHER),
    ("gemma3_text", {"sliding_window": 4}, padded, {}),
    ("qwen3_moe", {}, padded, {}),
    ("phi3", {}, plain, {}),
    ("gpt2", STILL, padded, {}),
    ("gpt_neox", STILL, padded, {}),
    ("llama", {"tie_word_embeddings": True}, padded, TILES),
    ("qwen3", {}, counted, {**TILES, **ZIGZAG}),
]
BERT = {"kind": "AutoModelForMaskedLM", **STILL}
MASKED: dict[str, Any] = {**BERT, "embedding_dropout": 0.0, "mlp_dropout": 0.0, "classifier_dropout": 0.0}
MASKED |= {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
CASES += [("modernbert", MASKED, batch, {}) for batch in (plain, padded_left, odd)]


def run(case: Case, stage: int, sequence: int, optimizer: str = "sgd", tensor: int = 1) -> list[tuple[float, float]]:
    """Of two steps how far the loss, and the gradients, are from those of one process."""
    model_type, keys, batch, config = case
    data, mine = dist.get_world_size() // (sequence * tensor), dist.get_rank() // (sequence * tensor)
    reference, model = build(model_type, **keys), build(model_type, **keys)
    expected, made = (OPTIMIZERS[optimizer](each.parameters()) for each in (reference, model))
    given = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **config}
    given |= {"sequence_parallel_size": sequence, "train_micro_batch_size_per_gpu": 2}
    given |= {"tensor_parallel": {"autotp_size": tensor}}
    engine, *_ = lt_zero.initialize(model=model, optimizer=made, config=given)
    found = []
    for step in range(2):
        expected.zero_grad()
        losses = [reference(**batch(step * data + rank)).loss for rank in range(data)]
        torch.stack(losses).mean().backward()
        loss = engine(**batch(step * data + mine)).loss
        engine.backward(loss)
        far = 0.0
        for parameter, same in zip(model.parameters(), reference.parameters(), strict=True):
            grad = lt_zero.full_grad(parameter)
            assert grad is not None
            assert same.grad is not None
            far = max(far, float((grad - same.grad).abs().max()))
        found.append((abs(loss.item() - losses[mine].item()), far))
        engine.step()
        expected.step()
    engine.destroy()
    return found


def _all(cases: list[Case], *how: Any) -> None:
    for case in cases:
        for loss, gradient in run(case, *how):
            assert loss < 2e-6, case
            assert gradient < 1e-6, case


@pytest.mark.parametrize("stage", [1])
def test_losses_and_gradients_are_those_of_one_process(pool: Pool, stage: int) -> None:
    pool.run(2, _all, CASES, stage, 2)


MESHES = [(stage, sequence, tensor) for stage in range(4) for sequence, tensor in [(2, 1), (4, 1), (2, 2)]]


@pytest.mark.parametrize(("stage", "sequence", "tensor"), only_rows([(3, 2, 1), (2, 2, 2)], MESHES))
def test_meshes(pool: Pool, stage: int, sequence: int, tensor: int) -> None:
    cases = [("llama", {}, padded, {}), ("qwen3", {}, odd, {})]
    pool.run(4, _all, cases, stage, sequence, "adamw" if stage % 2 else "sgd", tensor)


def _unused_after(case: Case) -> None:
    """A model that was trained computes what it did before, in the same process."""
    model_type, keys, batch, _ = case
    model = build(model_type, **keys).eval()
    given = {**batch(0), "use_cache": False}
    before = model(**given)
    config = {"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
    made = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = lt_zero.initialize(model=model, optimizer=made, config=config)
    part = engine(**batch(0))
    assert part.logits.shape[1] == LENGTH // 2
    engine.destroy()
    after = model(**given)
    torch.testing.assert_close(after.logits, before.logits)
    torch.testing.assert_close(after.loss, before.loss)


def test_after_the_run_a_model_is_as_before(pool: Pool) -> None:
    pool.run(2, _unused_after, ("llama", {}, packed, {}))


class Around(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama")
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["adamw"](self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([padded(0), padded_left(1)], batch_size=None)  # type: ignore[arg-type]


def _module() -> list[float]:
    """Trained by two Trainers, one after the other."""
    module = Around()
    for _ in range(2):
        sharded_trainer(3, config=keys_of(2), max_steps=2, use_distributed_sampler=False).fit(module)
    return module.losses


def test_a_module_around_a_model(pool: Pool) -> None:
    alone = Around()
    for _ in range(2):
        single_trainer(max_steps=2).fit(alone)
    for losses in pool.run(2, _module):
        assert losses == pytest.approx(alone.losses, rel=1e-5)


def _sums() -> None:
    """Of losses that exist as a sum only, the loss is the same, and so are gradients."""
    engine, *_ = lt_zero.initialize(
        model=build("llama"), config={"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2}
    )
    logits = torch.randn(2, 6, VOCABULARY, requires_grad=True)
    labels = torch.full((2, 6), -100) if dist.get_rank() else torch.arange(12).view(2, 6)
    loss = engine.module.loss_function
    for items in (None, torch.tensor(9)):
        (want,) = torch.autograd.grad(
            value := loss(logits, labels, VOCABULARY, shift_labels=labels, num_items_in_batch=items), logits
        )
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        other = loss.of_sum(total, (labels != -100).sum(), items, True)
        torch.testing.assert_close(other, value)
        torch.testing.assert_close(torch.autograd.grad(other, logits)[0], want)
    with pytest.raises(ValueError, match="the loss of the model got no shift_labels"):
        loss.of_sum(total, total, None, False)
    engine.destroy()


def test_losses_that_exist_as_sums(pool: Pool) -> None:
    pool.run(2, _sums)


def _flex() -> None:
    """Without a backward, which torch has not on CPUs."""
    model = build("llama", attn_implementation="flex_attention").eval()
    with torch.no_grad():
        want = model(**padded(0)).logits
        config = {"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
        engine, *_ = lt_zero.initialize(model=model, config=config)
        found = engine(**padded(0)).logits
    part = found.shape[1]
    first = dist.get_rank() * part
    torch.testing.assert_close(found, want[:, first : first + part], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_flex_attention(pool: Pool) -> None:
    pool.run(2, _flex)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("t5", {"kind": "AutoModelForSeq2SeqLM"}, "cross-attention"),
    ("bloom", {}, "takes no position_ids"),
    ("mamba", {}, r"mixes tokens in other ways than by attention \(linear_attention\)"),
    ("gemma2", {}, "caps scores of attention"),
    ("llama", {"kind": "AutoModelForSequenceClassification"}, r"a loss of whole sequences \(ForSequenceClassification"),
    ("mixtral", {"output_router_logits": True}, "output_router_logits=True"),
    ("opt", {"layerdrop": 0.1}, r"skips layers at random \(layerdrop=0\.1\)"),
    (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        "3 heads that cannot be shared by 2 seq",
    ),
    ("llama", {"attn_implementation": "lt_zero_sparse"}, "attn_implementation='lt_zero_sparse'"),
]


@pytest.mark.parametrize(("model_type", "keys", "text"), REFUSED, ids=[text[:20] for *_, text in REFUSED])
def test_models_that_mix_tokens_otherwise_are_refused(model_type: str, keys: dict[str, Any], text: str) -> None:
    if keys.get("attn_implementation") == "lt_zero_sparse":
        skip_without("sparse_attention")
        lt_zero.attention.register()
    with as_rank(0, 2) as ranks, pytest.raises(ConfigError, match=f"(?s){text}.*Choose another model"):
        switch(build(model_type, **keys), ranks)


def _mistakes() -> list[str]:
    found = []
    config = {"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}

    def error(call: Callable[[Any], object], model_type: str = "llama", **keys: Any) -> None:
        model = build(model_type, **keys)
        engine, *_ = lt_zero.initialize(model=model, optimizer=OPTIMIZERS["sgd"](model.parameters()), config=config)
        with pytest.raises((ConfigError, ValueError)) as caught:
            call(engine)
        found.append(str(caught.value))
        engine.destroy()

    batch = plain(0)

    def generates(engine: Any) -> None:
        """Of a prompt that is as long as a part, so that its first call has no other sign."""
        with torch.no_grad():
            engine.eval()
            engine(**batch)
            prompt = batch["input_ids"][:, : LENGTH // 2]
            engine.module.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1)

    error(generates)
    error(lambda engine: engine.module(**batch))
    error(lambda engine: engine.backward(engine(**batch).loss), "bert", **BERT)
    error(lambda engine: engine(**batch, past_scores=torch.zeros(2, LENGTH)))
    return found


def test_whole_batches_are_an_error(pool: Pool) -> None:
    generated, whole, own, unknown = pool.run(2, _mistakes)[0]
    assert "generate() was called inside of a run whose sequences are cut" in generated
    assert "the model got 12 tokens, but no batch was cut" in whole
    assert "BertForMaskedLM has computed a loss, but as a mean over the tokens of each rank" in own
    assert "'past_scores' of shape [2, 12] may have a value for each token" in unknown


# ---- packed rows, and a cache ----------------------------------------------------------------------------------------


def with_cache(number: int) -> dict[str, Any]:
    """Packed rows with what is on by default."""
    return {key: value for key, value in packed(number).items() if key != "use_cache"}


def _told(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if "use_cache" in str(each.message)]


def test_a_cache_that_mixes_up_the_sequences_of_a_row_is_told_of() -> None:
    """With it transformers makes no mask that keeps them apart."""
    models = {batch: build("llama").train() for batch in (with_cache, packed, plain)}
    for model in models.values():
        warn_of_caches(model)
    told = {batch: _told(lambda batch=batch, model=model: model(**batch(0))) for batch, model in models.items()}  # type: ignore[misc]
    assert told[packed] == told[plain] == []
    assert "lets the sequences of a row see each other. Set model.config.use_cache=False" in told[with_cache][0]
    model = models[with_cache]
    assert not _told(lambda: model(**with_cache(0))), "once"
    batch, places = with_cache(0), packed(0)["position_ids"][0]
    last = {"input_ids": batch["input_ids"][:, places[:5].numel() :]}
    with torch.no_grad():
        alone = model(**last, use_cache=False).logits
        torch.testing.assert_close(model(**packed(0)).logits[:, 5:], alone, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model(**batch).logits[:, 5:], alone, atol=1e-3), "what the warning says"


def _cached_parts() -> list[str]:
    model = build("llama")
    config = {"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    engine, *_ = lt_zero.initialize(model=model, optimizer=OPTIMIZERS["sgd"](model.parameters()), config=config)
    return _told(lambda: engine(**with_cache(0)))


def test_sequence_ranks_tell_of_the_cache_once(pool: Pool) -> None:
    first, other = pool.run(2, _cached_parts)
    assert len(first) == 1
    assert "without sequence_parallel_size, which keeps them apart" in first[0]
    assert not other
