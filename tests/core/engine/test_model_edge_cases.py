"""What users do to gradients, weights and modules beside the usual loop, each as they would write it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, single_trainer, weights
from tests.support.matrix import only
from tests.support.models import Block, Net, next_token_loss, tokens
from tests.support.parity import STAGES, config_of, full_values
from tests.support.pool import Pool

some = only([3], STAGES)


def _both(stage: int, module: Any, **options: Any) -> tuple[Any, ...]:
    trainer = sharded_trainer(stage, {"stage3_max_reuse_distance": 0}, **options)
    model = module(dist.get_world_size())
    trainer.fit(model)
    return trainer, model


def _weights(stage: int, module: Any, options: dict[str, Any]) -> Any:
    return weights(_both(stage, module, **options)[0])


@functools.cache
def _alone(module: Any, epochs: int) -> dict[str, Any]:
    """The weights of one process."""
    trainer = single_trainer(max_epochs=epochs)
    trainer.fit(module(1))
    return weights(trainer)


def _compare(pool: Pool, module: Any, stage: int) -> None:
    got = pool.run(2, _weights, stage, module, {"max_epochs": 2})[0]
    assert_same(got, _alone(module, 2), rtol=1e-4, atol=1e-5)


class Manual(GPT):
    """Manual optimization with ``module.zero_grad()`` and a gradient that is dropped by hand."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx % 2:
            self.zero_grad()
        else:
            for parameter in self.parameters():
                parameter.grad = None
        self.manual_backward(self.loss(batch))
        self.net.blocks[0].up.weight.grad = None
        self.net.blocks[1].up.weight.grad.mul_(0.5)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()


@pytest.mark.parametrize("stage", some)
def test_gradients_handled_by_hand(pool: Pool, stage: int) -> None:
    _compare(pool, Manual, stage)


class Cancels(GPT):
    def on_after_backward(self) -> None:
        self.temperature.grad = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net.scale.grad = None


@pytest.mark.parametrize("stage", some)
def test_gradients_cancelled_in_hooks(pool: Pool, stage: int) -> None:
    _compare(pool, Cancels, stage)


class ClipsItself(GPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.parametrize("stage", some)
def test_torch_clipping_sees_the_global_norm(pool: Pool, stage: int) -> None:
    _compare(pool, ClipsItself, stage)


class ZeroesInPlace(GPT):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("stage", some)
def test_zero_grad_without_none(pool: Pool, stage: int) -> None:
    _compare(pool, ZeroesInPlace, stage)


class EditsData(GPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.net.blocks[0].up.weight.data.clamp_(-0.01, 0.01)
        return loss


def _edits() -> None:
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight.*write=True"):
        _both(3, EditsData, max_epochs=1)


def test_edits_of_data_in_a_training_step_are_reported(pool: Pool) -> None:
    pool.run(2, _edits)


class Scalars(GPT):
    def __init__(self, world: int) -> None:
        super().__init__(world, "adamw")
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.scale


def _save(stage: int, path: str) -> None:
    trainer, _ = _both(stage, Scalars, max_epochs=1)
    trainer.save_checkpoint(path)


def _resume(stage: int, path: str) -> Any:
    trainer = sharded_trainer(stage, max_epochs=2)
    trainer.fit(Scalars(dist.get_world_size()), ckpt_path=path)
    return weights(trainer)


@pytest.mark.parametrize("stage", some)
def test_scalar_and_empty_parameters_resume(pool: Pool, tmp_path: Any, stage: int) -> None:
    path = str(tmp_path / "s.ckpt")
    pool.run(3, _save, stage, path)
    assert_same(pool.run(2, _resume, stage, path)[0], _alone(Scalars, 2), rtol=1e-4, atol=1e-5)


def _low_precision_resume(stage: int) -> None:
    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        engine = lt_zero.shard(Net().bfloat16(), config_of(stage))
        return engine, lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(engine.root.parameters(), lr=1e-2))

    from lt_zero.checkpoint.native.full_states import full_optimizer_state
    from lt_zero.checkpoint.native.load_states import load_full_optimizer_state

    engine, sharded = build()
    next_token_loss(engine.root, 0, 0, dist.get_rank()).backward()
    sharded.optimizer.step()
    box = [full_optimizer_state(sharded)]
    dist.broadcast_object_list(box)
    other_engine, other = build()
    load_full_optimizer_state(other, box[0])
    for p, q in zip(sharded.parameters(), other.parameters(), strict=True):
        for key, value in sharded.optimizer.state.get(p, {}).items():
            assert torch.equal(torch.as_tensor(other.optimizer.state[q][key]), torch.as_tensor(value)), key
            assert key == "step" or other.optimizer.state[q][key].dtype == torch.float32
    next_token_loss(other_engine.root, 0, 0, dist.get_rank()).backward()
    other.optimizer.step()


@pytest.mark.parametrize("stage", some)
def test_low_precision_parameters_resume(pool: Pool, stage: int) -> None:
    pool.run(2, _low_precision_resume, stage)


def _gather_states() -> None:
    from lt_zero.checkpoint.native import full_states

    gathered: list[weakref.ref[Tensor]] = []

    def gather(bucket: Any, own: Tensor) -> Tensor:
        assert [flat() for flat in gathered] == [None] * len(gathered), "an earlier one is still in memory"
        gathered.append(weakref.ref(flat := gather_own(bucket, own)))
        return flat

    gather_own = full_states.gather_own
    engine = lt_zero.shard(Net(), config_of(2))
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(engine.root.parameters(), lr=1e-2))
    next_token_loss(engine.root, 0, 0, dist.get_rank()).backward()
    sharded.optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_states, "gather_own", gather)
        full_states.full_optimizer_state(sharded)
    assert len(gathered) == 2 * len(engine.buckets)


def test_one_gathered_state_is_in_memory_at_a_time(pool: Pool) -> None:
    pool.run(1, _gather_states)  # of more ranks, gloo's threads hold a tensor for a moment


class Reused(GPT):
    def __init__(self, world: int, net: nn.Module) -> None:
        super().__init__(world)
        self.net = net


def _reused(stage: int) -> Any:
    first, model = _both(stage, GPT, max_epochs=1)
    trainer = sharded_trainer(3 - stage, max_epochs=1)
    second = Reused(dist.get_world_size(), model.net)
    trainer.fit(second)
    second.net.head = nn.Linear(10, 11, bias=False)
    torch.manual_seed(0)
    nn.init.normal_(second.net.head.weight)
    trainer = sharded_trainer(stage, max_epochs=1)
    trainer.fit(second)
    return weights(trainer)


@functools.cache
def _reused_alone() -> dict[str, Any]:
    model = GPT(1)
    single_trainer(max_epochs=1).fit(model)
    second = Reused(1, model.net)
    single_trainer(max_epochs=1).fit(second)
    second.net.head = nn.Linear(10, 11, bias=False)
    torch.manual_seed(0)
    nn.init.normal_(second.net.head.weight)
    reference = single_trainer(max_epochs=1)
    reference.fit(second)
    return weights(reference)


@pytest.mark.parametrize("stage", some)
def test_a_module_moves_between_trainers(pool: Pool, stage: int) -> None:
    assert_same(pool.run(2, _reused, stage)[0], _reused_alone(), rtol=1e-4, atol=1e-5)


def _shared_memory_parameters() -> None:
    first, second = Block(), Block()
    second.up.weight.data = first.up.weight.data
    with pytest.raises(ValueError, match=r"'0\.up\.weight' and '1\.up\.weight' share memory"):
        lt_zero.shard(nn.Sequential(first, second), config_of(1))


def test_parameters_that_share_memory_are_refused(pool: Pool) -> None:
    pool.run(2, _shared_memory_parameters)


class Copies(Net):
    def forward(self, batch: Tensor) -> Tensor:
        if not hasattr(self, "teacher"):
            object.__setattr__(self, "teacher", copy.deepcopy(self.blocks[0]))
        return super().forward(batch) + 0 * self.teacher(torch.ones(1, 10)).sum()


def _copies(stage: int) -> None:
    engine = lt_zero.shard(Copies(), config_of(stage, {"stage3_max_reuse_distance": 0}))
    value = full_values(engine)["blocks.0.up.weight"]
    next_token_loss(engine.root, 0, 0, 0).backward()
    teacher: Any = engine.root.teacher
    assert torch.equal(teacher.up.weight.detach(), value)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_deep_copy_inside_forward_is_ordinary(pool: Pool, stage: int) -> None:
    pool.run(2, _copies, stage)


class Normed(GPT):
    """Batch norm and a buffer of a dtype that gloo does not know."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.norm = nn.BatchNorm1d(11)
        self.register_buffer("count", torch.tensor(3, dtype=torch.int16))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.norm(self.net(batch).flatten(0, 1)).square().mean()


class Watched(Normed):
    """Notes its kind of batch norm and skips the batch: SyncBatchNorm runs forward on a GPU only."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.kinds: list[type] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int:
        self.kinds.append(type(self.norm))
        return -1


def _local_batch_norm(stage: int) -> Any:
    trainer, model = _both(stage, Normed, max_epochs=1, sync_batchnorm=False)
    return weights(trainer)


def _sync_twice(stage: int) -> None:
    trainer = sharded_trainer(stage, max_epochs=1, sync_batchnorm=True, num_sanity_val_steps=0)
    model = Watched(dist.get_world_size())
    trainer.validate(model)
    assert not isinstance(model.norm, nn.SyncBatchNorm), "only a fit synchronises"
    for fits in (1, 2):
        trainer.fit_loop.max_epochs = fits
        trainer.fit(model)
        assert model.kinds == [nn.SyncBatchNorm] * fits, "synchronised in every fit"
        assert not isinstance(model.norm, nn.SyncBatchNorm), "taken back after each fit"


@pytest.mark.parametrize("stage", only([3], [1, 2, 3]))
def test_batch_norm_is_the_same_at_every_stage(pool: Pool, stage: int) -> None:
    got, want = (pool.run(2, _local_batch_norm, number)[0] for number in (stage, 0))
    assert_same(got, want)


def test_batch_norm_is_synchronised_in_every_fit(pool: Pool) -> None:
    pool.run(2, _sync_twice, 2)


def test_tokens_differ_between_ranks() -> None:
    assert not torch.equal(tokens(0, 0, 0), tokens(0, 0, 1))


class RawBackward(GPT):
    """``loss.backward()`` instead of ``manual_backward``; ``temperature`` is used outside of every module."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx % 2:
            optimizer.zero_grad()
        first, second = self.loss(batch), self.loss(batch.flip(0))
        first.backward()
        second.backward()
        optimizer.step()


@pytest.mark.parametrize("stage", some)
def test_raw_backward(pool: Pool, stage: int) -> None:
    _compare(pool, RawBackward, stage)


def _dropped(stage: int) -> None:
    net = Net()
    engine = lt_zero.shard(net, config_of(stage))
    next_token_loss(net, 0, 0, 0).backward()
    left = [weakref.ref(thing) for thing in (engine, engine.world, *engine.groups, *engine.buckets)]
    del net, engine
    gc.collect()
    assert not any(ref() for ref in left), "gradients and graphs keep weights and process groups alive"


@pytest.mark.parametrize("stage", some)
def test_a_dropped_model_is_freed(pool: Pool, stage: int) -> None:
    pool.run(2, _dropped, stage)
