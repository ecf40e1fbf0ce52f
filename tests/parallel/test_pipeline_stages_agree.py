"""What stages have to agree on although each has other layers: sizes of buckets, groups of optimizers, the patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.common.errors import ConfigError
from lt_zero.core.step.param_groups import compare_options
from lt_zero.parallel import LayerSpec, Pipeline, TiedLayerSpec
from lt_zero.training.build import built_by
from tests.support.lightning_tools import quick, sharded_trainer
from tests.support.matrix import only
from tests.support.pipeline_module import Module
from tests.support.pipelines import VOCABULARY, WIDTH, Block, Ranks, head, mean_loss, start
from tests.support.pool import Pool

SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def wide_end() -> list[Any]:
    """Of the matrices of the first stage most have 6 rows or columns, of the second 20, and of all of them 20."""
    embed = ("embed", nn.Embedding, VOCABULARY, WIDTH)
    sizes = (WIDTH, 20), *[(20, 20)] * 4, (20, WIDTH)
    widths = [LayerSpec(nn.Linear, *each) for each in sizes]
    return [TiedLayerSpec(*embed), LayerSpec(Block, 60), *widths, TiedLayerSpec(*embed, forward_fn=head)]


def _auto() -> list[int]:
    run = start(Ranks(), 1, "sgd", wide_end, zero=dict.fromkeys(SIZES, "auto"))
    run.step(0)
    return [getattr(built_by(run.engine).zero_optimization, name) for name in SIZES]


def test_automatic_sizes_are_those_of_the_whole_model(pool: Pool) -> None:
    """Stages that share a layer have to cut its bucket alike."""
    assert pool.run(2, _auto) == [[400, 360, 200]] * 2


def _other_options() -> list[str]:
    """The errors of a full save, and of a set-up, where the stages have other learning rates."""
    run, errors = start(Ranks(), 1, "sgd"), list[str]()
    run.step(0)
    compare_options(run.engine, [run.optimizer])
    run.optimizer.param_groups[0]["lr"] = 0.5 + run.engine.world.rank
    for call in (lambda: full_optimizer_state(run.sharded), lambda: compare_options(run.engine, [run.optimizer])):
        with pytest.raises(RuntimeError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


def test_options_of_groups_are_the_same_on_all_stages(pool: Pool) -> None:
    """A checkpoint has one of them for each group."""
    for errors in pool.run(2, _other_options):
        for text in errors:
            assert "SGD, group 0, lr is 0.5 on rank 0 and 1.5 on rank 1" in text
            assert "{'params': []}" in text


class Partly(Module):
    """The second stage trains nothing."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.own = own

    def configure_model(self) -> None:
        if self.pipe is None:
            self.register_buffer("beside", torch.tensor([1.0 + dist.get_rank()]))
            torch.manual_seed(0)
            layers = [nn.Embedding(VOCABULARY, WIDTH), Block(9), Block(7), nn.Linear(WIDTH, VOCABULARY)]
            for layer in layers[2:]:
                layer.requires_grad_(False)
            self.pipe = Pipeline(layers, loss_fn=mean_loss, partition_method="uniform")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1) if self.own else None


class Configured(Partly):
    configure_optimizers = Module.__mro__[1].configure_optimizers  # type: ignore[assignment]


GROUPS = [{"match": "*.0.weight", "lr": 0.01}, {"match": "pipe.layers.3.*", "weight_decay": 0.5}]
OPTIMIZER_BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {"type": "AdamW", "params": {"lr": 0.02}},
    "groups": {"type": "AdamW", "params": {"lr": 0.02}, "param_groups": GROUPS},
    "muon": {"type": "Muon", "params": {"lr": 0.02}},
}


def _configured(name: str, stages: int) -> tuple[list[float], list[int]]:
    module, block = Configured(), {"pipeline": {"stages": stages, "num_microbatches": 2}}
    config = {**block, "optimizer": OPTIMIZER_BLOCKS[name]}
    with quick():
        trainer = sharded_trainer(1, {"shard_along": "parameter"}, config, use_distributed_sampler=False, max_epochs=1)
        trainer.fit(module)
    assert float(module.beside) == 1.0, "all stages have the first one's buffers beside the pipeline"  # type: ignore[arg-type]
    return module.losses, [len(group["params"]) for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("name", only(["groups"], OPTIMIZER_BLOCKS))
def test_configured_optimizers_have_the_groups_of_the_whole_model(pool: Pool, name: str) -> None:
    """Also on a stage that trains nothing; a pattern may match parameters of one stage only."""
    ((losses, counts),), found = pool.run(1, _configured, name, 1), pool.run(2, _configured, name, 2)
    for theirs, _ in found:
        assert theirs == pytest.approx(losses, rel=1e-5)
    assert [sum(of_group) for of_group in zip(*(own for _, own in found), strict=True)] == counts


def _own() -> str:
    block = {"pipeline": {"stages": 2, "num_microbatches": 2}}
    with quick(), pytest.raises((ConfigError, RuntimeError)) as caught:
        sharded_trainer(1, config=block, use_distributed_sampler=False, max_epochs=1).fit(Partly(own=True))
    return str(caught.value)


def test_an_optimizer_without_parameters_is_explained(pool: Pool) -> None:
    for text in pool.run(2, _own):
        assert "the stage of rank 1 trains no parameter" in text
        assert "AdamW([{'params': parameters}])" in text
