"""Models of transformers in pipelines, by the plans that they bring with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import PipelineParallel
from lt_zero.parallel import Pipeline
from lt_zero.parallel.pipeline import position
from tests.support import pipelines
from tests.support.matrix import only
from tests.support.parity import OPTIMIZERS
from tests.support.pipeline_saves import load, save
from tests.support.pipelines import Ranks, all_weights, start
from tests.support.plans import config
from tests.support.pool import Pool

pytest.importorskip("transformers", minversion="5.0")

SIZES = {"vocab_size": pipelines.VOCABULARY, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
WINDOWS = {"sliding_window": 2, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 2}),
    "qwen3, tied, two kinds of layers": ("qwen3", {"tie_word_embeddings": True, "use_sliding_window": True, **WINDOWS}),
    "gemma2, capped logits": ("gemma2", {"final_logit_softcapping": 0.3, **WINDOWS}),
    "granite, factors": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "gpt_neox": ("gpt_neox", {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
}


def build(name: str, device: str = "cpu") -> Any:
    import transformers

    model_type, keys = MODELS[name]
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(model_type, **{**SIZES, **keys})
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(made)
    if device == "cpu":
        with torch.no_grad():
            for own, parameter in model.named_parameters():
                if "norm" in own:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def batch_of(tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs with padding on the left of one row, and labels, of which micro-batches have different numbers."""
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[0, :2], labels[0, :2], labels[1, 2:], labels[-1] = 0, -100, -100, -100
    return {"input_ids": tokens, "attention_mask": mask}, labels


class Whole(nn.Module):
    """The model as it is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.pipe = build(name)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        inputs, labels = batch_of(x)
        loss: Tensor = self.pipe(**inputs, labels=labels).loss
        return loss


class Model(pipelines.Model):
    """In stages. ``meta``: weights come from a state dict."""

    def __init__(self, name: str, meta: bool = False) -> None:
        nn.Module.__init__(self)
        weights = build(name).state_dict() if meta else None
        self.pipe = Pipeline.of(build(name, "meta" if meta else "cpu"), weights=weights)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.pipe(*batch_of(x))
        return loss


@pytest.mark.parametrize("name", MODELS)
def test_in_one_process_it_is_the_model(name: str) -> None:
    whole, model = Whole(name), Model(name)
    expected, found = whole.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in whole.named_parameters()]
    for each in (whole, model):
        each.loss(*pipelines.batch(0, 0)).backward()
    theirs = dict(whole.named_parameters())
    assert all(torch.equal(p.grad, theirs[n].grad) for n, p in model.named_parameters())
    inputs, labels = batch_of(pipelines.batch(0, 0)[0])
    assert torch.equal(model.pipe(inputs), whole.pipe(**inputs).logits)
    assert torch.equal(model.pipe({**inputs, "labels": labels}), whole.pipe(**inputs).logits)


def _train(
    name: str, stage: int, optimizer: str, ranks: Ranks, pipeline: dict[str, Any] | None = None, meta: bool = False
) -> dict[str, float]:
    prepare = (lambda model, mesh: mesh.cut(model, config(ranks.tensor))) if ranks.tensor > 1 else lambda *_: None
    run = start(ranks, stage, optimizer, make=lambda: Model(name, meta), pipeline=pipeline, prepare=prepare)
    mine = len(list(run.model.parameters()))
    whole = Whole(name)
    assert 0 < mine < len(list(whole.parameters()))
    plain, worst = OPTIMIZERS[optimizer](whole.parameters()), {"loss": 0.0, "logits": 0.0, "weights": 0.0}
    for number in range(3):
        loss, _ = run.step(number)
        expected, _ = pipelines.reference_step(whole, plain, number, ranks.data)  # type: ignore[arg-type]
        seen = run.engine.world.host_gather(float(loss), "losses")
        worst["loss"] = max(worst["loss"], abs(sum(seen) / len(seen) - float(expected)))
    inputs, _ = batch_of(pipelines.batch(9, 0)[0])
    with run.engine.forward_scope(), torch.no_grad():
        logits = run.model.pipe(inputs)
    worst["logits"] = float((logits - whole.pipe(**inputs).logits.detach()).abs().max())
    found = all_weights(run.engine)
    expected_weights = {n: p.detach() for n, p in whole.named_parameters()}
    assert found.keys() == expected_weights.keys()
    worst["weights"] = max(float((found[n] - p).abs().max()) for n, p in expected_weights.items())
    return worst


def _all_below(found: list[dict[str, float]]) -> None:
    bounds = {"loss": 1e-6, "logits": 5e-5, "weights": 1e-6}  # logits are up to 20
    assert all(value < bounds[key] for each in found for key, value in each.items()), found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", only([1], [0, 1, 2, 3]))
def test_two_stages_train_as_one_process(pool: Pool, stage: int, name: str) -> None:
    _all_below(pool.run(2, _train, name, stage, "sgd", Ranks(pipeline=2)))


@pytest.mark.parametrize("name", ["llama, tied", "llama"])
def test_sharded_parameters_train_as_one_process(pool: Pool, name: str) -> None:
    _all_below(pool.run(2, _train, name, 3, "adamw", Ranks(pipeline=2)))


EACH_ALONE = {"stages_per_rank": 3, "schedule": "Interleaved1F1B"}  # embedding, 3 layers, norm and head


@pytest.mark.parametrize("name", ["llama, tied", "gpt_neox", "granite, factors"])
def test_stages_of_one_module(pool: Pool, name: str) -> None:
    _all_below(pool.run(2, _train, name, 1, "sgd", Ranks(pipeline=2), EACH_ALONE))


def test_three_stages_of_a_model_on_the_meta_device_with_weights(pool: Pool) -> None:
    _all_below(pool.run(3, _train, "llama, tied", 1, "sgd", Ranks(pipeline=3), None, True))


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
@pytest.mark.parametrize("ranks", [Ranks(data=2, pipeline=2), Ranks(tensor=2, pipeline=2)])
@pytest.mark.parametrize("stage", only([3], [0, 1, 2, 3]))
def test_stages_on_a_mesh_train_as_one_process(pool: Pool, stage: int, ranks: Ranks, name: str) -> None:
    _all_below(pool.run(4, _train, name, stage, "sgd", ranks))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _save(name: str, path: str) -> dict[str, Tensor]:
    run = start(Ranks(pipeline=2), 1, "sgd", make=lambda: Model(name))
    run.step(0)
    save(run, path)
    return all_weights(run.engine)


def _load(name: str, path: str, ranks: Ranks) -> dict[str, Tensor]:
    run = start(ranks, 3, "sgd", make=lambda: Model(name))
    load(run, path)
    return all_weights(run.engine)


@pytest.mark.parametrize("name", ["llama, tied", "gpt_neox"])
def test_an_export_is_a_model_of_transformers(pool: Pool, tmp_path: Path, name: str) -> None:
    import transformers

    saved, hub, whole = str(tmp_path / "0.ckpt"), tmp_path / "hub", build(name)
    weights = pool.run(2, _save, name, saved)[0]
    lt_zero.export(saved, hub, "fp32", strip_prefix="pipe.")
    whole.config.save_pretrained(hub)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(hub, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.state_dict().keys() == whole.state_dict().keys()
    assert {f"pipe.{key}" for key, _ in loaded.named_parameters()} == weights.keys()
    assert all(torch.equal(weights[f"pipe.{key}"], p) for key, p in loaded.named_parameters())
    for ranks in (Ranks(pipeline=3), Ranks(data=2, pipeline=1)):
        for found in pool.run(ranks.all, _load, name, saved, ranks):
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_a_state_dict_of_the_whole_model_is_loaded_into_a_stage() -> None:
    model = build("llama, tied")
    state = {key: value + 1 for key, value in model.state_dict().items()}
    with position.at(position.Position(1, 2)):
        pipe = Pipeline.of(model)
    pipe.load_state_dict(dict(state))
    assert all(torch.equal(value, state[key]) for key, value in pipe.state_dict().items())
    assert "model.layers.0.mlp.up_proj.weight" not in pipe.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected"):
        pipe.load_state_dict({**state, "other": state["lm_head.weight"]})


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_the_code_of_a_model_in_parts_knows_its_dtype_and_device(rank: int) -> None:
    with position.at(position.Position(rank, 2, PipelineParallel(stages=2))):
        pipe: Any = Pipeline.of(build("llama"))
    model = pipe._parts.model
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    pipe.double()
    assert model.dtype == torch.float64


def test_models_without_a_plan_are_refused() -> None:
    import transformers

    gpt2 = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_embd=24, n_head=4, n_layer=2))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no plan") as error:
        Pipeline.of(gpt2)
    assert "Pipeline([...]" in str(error.value)
    with pytest.raises(ConfigError, match="LlamaModel has no output layer"):
        Pipeline.of(build("llama").model)


def test_parameters_outside_of_the_plan_are_refused() -> None:
    model = build("llama")
    model.model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"model\.scale of LlamaForCausalLM are not in its plan"):
        Pipeline.of(model)


def test_another_loss_than_the_models_own_is_to_be_given() -> None:
    model = build("llama")
    model.loss_function = lambda **keys: keys["logits"].mean()
    with pytest.raises(ConfigError, match="Give loss_fn"):
        Pipeline.of(model)
    pipe = Pipeline.of(model, loss_fn=lambda logits, labels: logits.mean())
    tokens = pipelines.batch(0, 0)[0]
    assert torch.equal(pipe(tokens, tokens), pipe(tokens).mean())


class OfValues(nn.Module):
    """Position embeddings that depend on the values of the embedding, which later stages have not."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.own(x, position_ids)
        return cos + x.mean(), sin


def _run_alone(model: Any) -> Tensor:
    """The last stage of two, of zeros."""
    with position.at(position.Position(1, 2)):
        pipe = Pipeline.of(model)
    tokens = pipelines.batch(0, 0)[0]
    logits: Tensor = pipe.run_stage(1, torch.zeros(*tokens.shape, 24), batch={"input_ids": tokens})
    return logits


def test_a_model_that_uses_what_other_stages_have_is_refused() -> None:
    assert _run_alone(build("llama")).isfinite().all()
    model = build("llama")
    model.model.rotary_emb = OfValues(model.model.rotary_emb)
    with pytest.raises(ConfigError, match="from more than the output of the module before"):
        _run_alone(model)


def test_inputs_without_the_embedding_are_refused() -> None:
    pipe = Pipeline.of(build("llama"))
    with pytest.raises(ConfigError, match=r"calls model\.layers\.0 after 0 others"):
        pipe({"inputs_embeds": torch.randn(2, 5, 24)})


def test_weights_have_all_names_of_this_rank() -> None:
    weights = build("llama").state_dict()
    wrong = {**weights, "lm_head.weight": weights["lm_head.weight"][1:]}
    with pytest.raises(ValueError, match=r"lm_head\.weight has the shape \(13, 24\)"):
        Pipeline.of(build("llama", "meta"), weights=wrong)
    del weights["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        Pipeline.of(build("llama", "meta"), weights=weights)
    with position.at(position.Position(0, 2)):  # another rank has it
        pipe = Pipeline.of(build("llama", "meta"), weights=weights)
    assert not any(parameter.is_meta for parameter in pipe.parameters())
