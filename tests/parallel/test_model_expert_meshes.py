"""Mixtures of transformers with experts over ranks beside tensor, sequence and pipeline ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.config.precision import dtype_policy
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.parallel import Pipeline
from lt_zero.parallel.experts import SIZE
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.parallel.pipeline import position
from lt_zero.parallel.sequence.run import SequenceRun
from lt_zero.parallel.stacked_experts import StackedExperts, take_over
from tests.support.joined import use
from tests.support.matrix import only_rows
from tests.support.model_mixtures import VOCABULARY, build
from tests.support.parallel_nets import CPU
from tests.support.parity import OPTIMIZERS, RELEASE, config_of
from tests.support.pipelines import all_weights
from tests.support.pool import Pool

pytest.importorskip("transformers", minversion="5.0")

ROWS, LENGTH = 4, 8
EVEN: dict[str, Any] = {"num_key_value_heads": 2, "vocab_size": VOCABULARY + 1}  # which tensor ranks share


class Model(nn.Module):
    """A mixture, as it is or as a pipeline, whose names are those of the mixture."""

    def __init__(self, model_type: str, piped: bool = False, **keys: Any) -> None:
        super().__init__()
        made = build(model_type, **{**EVEN, **keys})
        self.net = Pipeline.of(made) if piped else made


def batch(step: int, data: int) -> Tensor:
    """Tokens of a data rank."""
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + data))


class Run:
    """A mixture on this rank of a mesh, and its engine. End it with ``over``."""

    def __init__(self, model_type: str, sizes: ParallelSizes, stage: int, optimizer: str, keys: dict[str, Any]) -> None:
        block = {"stages": sizes.pipeline, "num_microbatches": 2}
        parallel = {"tensor_parallel": {"autotp_size": sizes.tensor}, "pipeline": block}
        config = config_of(stage, RELEASE if stage == 3 else {}, **parallel)
        world = World.join(CPU)
        everyone, self.mesh = ShardGroup.of_all(world), ParallelMesh(sizes, world)
        with position.at(position.Position(self.mesh.pipeline_rank, sizes.pipeline, config.pipeline)):
            self.model = Model(model_type, sizes.pipeline > 1, **keys)
        use(self.mesh.sequence)
        self.sequences = None
        if self.mesh.sequence is not None:
            self.sequences = SequenceRun(self.mesh.sequence, sizes.tensor, sizes.pipeline)
            self.sequences.switch(self.model)
        self.mesh.cut(self.model, config)
        given = {"group": everyone, **self.mesh.arguments(self.model, everyone, config)}
        policy = dtype_policy(config, "64-true" if "dtype" in keys else "32-true")
        self.engine: Engine = lt_zero.shard(self.model, config, CPU, policy, **given)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.sharded = lt_zero.ShardedOptimizer(self.engine, self.optimizer)
        self._gate = LossScaleController(self.engine.policy)
        self.mesh.watch(self.engine)
        self.mesh.connect(self.engine, config, self._begin, lambda: 1.0)

    def _begin(self) -> float:
        self._gate.before_backward([self.sharded])
        return self._gate.scale

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        ids = batch(step, self.mesh.data_rank)
        with self.engine.forward_scope():
            if isinstance(self.model.net, Pipeline):
                loss: Tensor = self.model.net(ids, ids)
            else:
                inputs = {"input_ids": ids, "labels": ids}
                if self.sequences is not None:
                    inputs = self.sequences.cut(inputs, self.model.net)
                loss = self.model.net(**inputs).loss
        loss.backward()

    def over(self) -> None:
        use(None)
        self.engine.detach()


def _train(model_type: str, sizes: ParallelSizes, stage: int, optimizer: str, keys: dict[str, Any]) -> None:
    """Compare gradients, their norm, and weights after each of three steps."""
    run, one = Run(model_type, sizes, stage, optimizer, keys), Model(model_type, **keys)
    spread = any(isinstance(module, StackedExperts) for module in run.model.modules())
    assert any(run.engine.world.host_gather(spread, "spread experts"))
    expected = OPTIMIZERS[optimizer](one.parameters())
    # Norms and routers of a model in fp64 compute in fp32.
    gradients, weights = (1e-8, 1e-6) if "dtype" in keys else (2e-5, 3e-5)
    for step in range(3):
        run.backward(step)
        use(None)
        expected.zero_grad()
        for data in range(sizes.data):
            ids = batch(step, data)
            (one.net(input_ids=ids, labels=ids).loss / sizes.data).backward()
        use(run.mesh.sequence)
        for name, parameter in run.model.named_parameters():
            wanted = one.get_parameter(name)
            want = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
            found_grad = lt_zero.full_grad(parameter)
            torch.testing.assert_close(found_grad, want, rtol=1e-5, atol=gradients, msg=f"{name}, step {step}")
        norm = float(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05))
        assert norm > 0.05
        assert float(run.sharded.grads.clip_norm(0.05)) == pytest.approx(norm, rel=1e-5)
        run.optimizer.step()
        expected.step()
        found = all_weights(run.engine)
        assert found.keys() == {name for name, _ in one.named_parameters()}
        for name, value in found.items():
            want = one.get_parameter(name).detach()
            torch.testing.assert_close(value, want, rtol=1e-5, atol=weights, msg=f"{name}, step {step}")
    run.over()


DOUBLE: dict[str, Any] = {"dtype": torch.float64}
TENSOR, SEQUENCE, PIPELINE = (
    ParallelSizes(2, tensor=2, expert=2),
    ParallelSizes(2, sequence=2, expert=2),
    ParallelSizes(2, pipeline=2, expert=2),
)
CASES = [
    # In fp32 AdamW divides the rounding of gradients near 0 by itself.
    (name, sizes, stage, optimizer, {} if optimizer == "sgd" and stage in (0, 2) else DOUBLE)
    for name in ("mixtral", "qwen3_moe")
    for sizes in (TENSOR, SEQUENCE, PIPELINE)
    for stage in range(4)
    for optimizer in ("sgd", "adamw")
]
CASES += [
    (name, sizes, 3, "sgd", {**DOUBLE, "num_attention_heads": 4})
    for name in ("mixtral", "qwen3_moe")
    for sizes in (
        ParallelSizes(2, sequence=2, expert=4),
        ParallelSizes(1, sequence=2, tensor=2, expert=2),
    )
]


@pytest.mark.parametrize(
    ("model_type", "sizes", "stage", "optimizer", "keys"), only_rows([("mixtral", TENSOR, 3, "sgd", DOUBLE)], CASES)
)
def test_mixtures_train_on_meshes_as_in_one_process(
    pool: Pool, model_type: str, sizes: ParallelSizes, stage: int, optimizer: str, keys: dict[str, Any]
) -> None:
    pool.run(4, _train, model_type, sizes, stage, optimizer, keys)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refused() -> tuple[str, str, list[str]]:
    """Only the second stage has experts that cannot be taken over."""
    world = World.join(CPU)
    sizes = ParallelSizes(1, pipeline=2)
    mesh = ParallelMesh(sizes, world)
    with position.at(position.Position(mesh.pipeline_rank, 2)):
        model = Model("mixtral", piped=True)
    for name, module in model.named_modules():
        if name.endswith("layers.1.mlp.experts"):
            module.forward = module.forward
    with pytest.raises(ConfigError) as caught:
        take_over(model, mesh._of_stages)
    taken = [name for name, module in model.named_modules() if isinstance(module, StackedExperts)]
    return caught.value.problems[0].key, str(caught.value), taken


def test_all_stages_refuse_experts_of_one(pool: Pool) -> None:
    for key, text, taken in pool.run(2, _refused):
        assert key == SIZE
        assert "has a forward that was assigned to it" in text
        assert "layers.1.mlp.experts" in text
        assert not taken
