"""Pipelines whose sequences are cut over ranks: stages send each other parts of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import PipelineParallel
from lt_zero.parallel import LayerSpec, Pipeline, PipelineModule, cut_sequence, token_mean
from lt_zero.parallel.pipeline import position
from lt_zero.parallel.sequence.run import SequenceRun
from tests.support.lightning_tools import sharded_trainer, single_trainer
from tests.support.matrix import only_rows
from tests.support.pool import Pool
from tests.support.sequences import LENGTH, VOCABULARY, WIDTH, Block, Module, batch_of, keys_of, whole


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        result: Tensor = self.tokens(input_ids) + self.places(position_ids)
        return result


class Tokenwise(nn.Module):
    """A layer without attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.drop(self.linear(x))
        return result


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return token_mean(losses, labels.flatten() != -100)


def mean_of_part(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Staged(Module):
    """``Module`` with its decoder in two stages, of which only the second has attention."""

    def __init__(self, loss: Any = mean, block: type[nn.Module] = Block, dropout: float = 0.0) -> None:
        super().__init__(3)
        del self.net
        self.how = loss, block, dropout
        self.masks: list[Tensor] = []

    def configure_model(self) -> None:
        loss, block, dropout = self.how
        torch.manual_seed(0)
        middle = [LayerSpec(Tokenwise, dropout), LayerSpec(block, dropout), LayerSpec(block, 0.0)]
        layers = [LayerSpec(Embed), *middle, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
        self.pipe = Pipeline(layers, loss_fn=loss)
        for layer in self.pipe.modules():
            if isinstance(layer, nn.Dropout) and layer.p:
                layer.register_forward_hook(lambda module, args, output: self.masks.append(output.detach() == 0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch = batch if "shift_labels" in batch else whole(batch)
        self.lengths.append(batch["input_ids"].shape[1])
        loss: Tensor = self.pipe((batch["input_ids"], batch["position_ids"]), batch["shift_labels"])
        self.losses.append(float(loss.detach()))
        return loss


def keys(micro: int, **more: Any) -> dict[str, Any]:
    return keys_of(2, pipeline={"stages": 2, "num_microbatches": micro, "partition_method": "uniform"}, **more)


def _fit(stage: int, micro: int, method: str) -> tuple[list[float], list[int], list[Tensor]]:
    module = Staged()
    trainer = sharded_trainer(stage, config=keys(micro, sequence_parallel={"method": method}), max_steps=3)
    trainer.fit(module)
    weights = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return module.losses, module.lengths, [weights[name] for name in sorted(weights)] if weights else []


ROWS = [(stage, micro, method) for stage in range(4) for micro in (1, 2) for method in ("ulysses", "gather")]


@pytest.mark.parametrize(("stage", "micro", "method"), only_rows([(1, 2, "ulysses")], ROWS))
def test_a_pipeline_of_parts_trains_as_one_process(pool: Pool, stage: int, micro: int, method: str) -> None:
    """A micro-batch is a row here, and rows count alike, as with accumulation."""
    one = Staged(mean if micro == 1 else _mean_of_rows)
    single_trainer(max_steps=3).fit(one)
    found = pool.run(4, _fit, stage, micro, method)
    for losses, lengths, _ in found:
        assert losses == pytest.approx(one.losses, rel=1e-5)
        assert lengths == [LENGTH // 2] * 3
    wanted = one.state_dict()
    for value, name in zip(found[0][2], sorted(wanted), strict=True):
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=2e-6, msg=name)


def _mean_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([mean(row[None], own[None]) for row, own in zip(logits, labels, strict=True)]).mean()


# ---- random numbers, and mistakes ------------------------------------------------------------------------------------


def _others() -> Tensor:
    """Dropout masks of the first stage; checks what is refused."""
    dropping = Staged(dropout=0.5)
    sharded_trainer(1, config=keys(1), max_steps=1).fit(dropping)
    for module, text in ((Staged(mean_of_part), "as a mean over the tokens of each rank"), (_blind(), "have not seen")):
        with pytest.raises(ConfigError, match=text):
            sharded_trainer(1, config=keys(1), max_steps=1).fit(module)
    return dropping.masks[-1] if dropping.masks else torch.empty(0)


def _blind() -> Staged:
    return Staged(block=Tokenwise)


@pytest.mark.slow
def test_ranks_draw_other_masks_and_mistakes_of_a_stage_are_found(pool: Pool) -> None:
    masks = pool.run(4, _others)
    assert masks[0].shape == masks[1].shape == (2, LENGTH // 2, WIDTH)
    assert not torch.equal(masks[0], masks[1]), "parts of one sequence"


class _Ranks:
    size = 2


def test_layers_of_a_model_of_transformers_are_refused() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model("llama", **sizes, num_attention_heads=2)
    ranks: Any = _Ranks()
    with position.at(position.Position(0, 2, PipelineParallel(stages=2))):
        made = Pipeline.of(transformers.AutoModelForCausalLM.from_config(config))
    with pytest.raises(ConfigError, match=r"sequence_parallel_size=2: Pipeline\.of runs the layers of a model"):
        SequenceRun(ranks, 1, 2).switch(made)


# ---- a loop ----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.embed(tokens)
        return result


def _specs() -> list[Any]:
    blocks = [LayerSpec(Tokenwise, 0.0), LayerSpec(Block, 0.0), LayerSpec(Block, 0.0)]
    return [LayerSpec(Plain), *blocks, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def _pairs() -> Iterator[tuple[Tensor, Tensor]]:
    batches = (whole(batch_of(number)) for number in itertools.count())
    return ((batch["input_ids"], batch["shift_labels"]) for batch in batches)


def _cut(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, labels = pair
    return cut_sequence(tokens), cut_sequence(labels)


def _loop(stage: int) -> list[float]:
    torch.manual_seed(0)
    module = PipelineModule(_specs(), num_stages=2, loss_fn=mean)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config |= {"sequence_parallel_size": 2, "zero_optimization": {"stage": stage}}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = lt_zero.initialize(model=module, config=config)
    source = _pairs()
    with pytest.raises(ConfigError, match="a PipelineModule has no names of its inputs"):
        engine.train_batch(data_iter=_pairs())
    engine.set_batch_fn(_cut)
    losses = [float(engine.train_batch(data_iter=source)) for _ in range(3)]
    engine.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_cuts_sequences_by_its_batch_function(pool: Pool, stage: int) -> None:
    torch.manual_seed(0)
    one, source, want = Pipeline(_specs(), loss_fn=mean), _pairs(), list[float]()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.stack([one(*next(source)) for _ in range(2)]).mean()
        loss.backward()
        optimizer.step()
        want.append(float(loss.detach()))
    for losses in pool.run(4, _loop, stage):
        assert losses == pytest.approx(want, rel=1e-5)
