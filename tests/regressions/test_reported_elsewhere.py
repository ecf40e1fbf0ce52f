"""Silently wrong results that users of other packages reported most, each in the setting of its report.

Every test names the report. Where the report is about one stage, the others are tested with it; the reference is one
process with plain torch. SGD with momentum, as Adam hides gradients of a wrong scale.
"""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero
from tests.support.lightning_tools import GPT, sharded_trainer, single_trainer
from tests.support.matrix import only, only_rows
from tests.support.models import VOCAB, WIDTH, Block, Net, tokens
from tests.support.parity import Case, check, config_of, full_grads
from tests.support.pool import Pool

STAGES = [0, 1, 2, 3]
SMALL = {"reduce_bucket_size": 400, "overlap_comm": True}  # a backward fills several buckets, and flushes the last


# ---- DeepSpeed #8224: a submodule that is used twice -----------------------------------------------------------------


class TwoPasses(nn.Module):
    """An encoder in the main path, and again for the second input of an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, batch: Tensor, second: bool = True) -> tuple[Tensor, Tensor]:
        main = self.encoder(self.embedding(batch))
        other = self.encoder(self.embedding(batch.flip(1)))
        return self.head(main), (main - (other if second else other.detach())).square().mean()


def _two_losses(model: nn.Module, step: int, micro: int, rank: int, second: bool = True) -> Tensor:
    batch = tokens(step, micro, rank)
    logits, auxiliary = model(batch, second)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.roll(-1, 1).flatten()) + auxiliary.float()


def _used_twice(stage: int) -> None:
    check(Case(TwoPasses, _two_losses, stage, "sgd", micro=2, zero=SMALL))


def _errors_in_bf16(stage: int) -> tuple[dict[str, float], dict[str, float]]:
    """The relative errors of the encoder's gradients, and those that a lost pass would make."""
    torch.manual_seed(0)
    model, exact, lost = TwoPasses(), TwoPasses(), TwoPasses()
    for other in (exact, lost):
        other.load_state_dict(model.state_dict())
    engine = lt_zero.shard(model, config_of(stage, SMALL, torch.bfloat16))
    for micro in range(2):
        engine.reducer.sync = micro == 1
        (_two_losses(model, 0, micro, dist.get_rank()) / 2).backward()
        for rank, (other, second) in itertools.product(range(2), [(exact, True), (lost, False)]):
            (_two_losses(other, 0, micro, rank, second) / 4).backward()
    got, without = full_grads(engine), dict(lost.named_parameters())
    ours, theirs = {}, {}
    for name, parameter in exact.encoder.named_parameters(prefix="encoder"):
        want = parameter.grad
        assert want is not None
        size = float(want.norm())
        ours[name] = float((got[name].float() - want).norm()) / size
        theirs[name] = float((without[name].grad - want).norm()) / size
    return ours, theirs


@pytest.mark.parametrize("stage", only([2], STAGES))
def test_deepspeed_8224_a_submodule_that_is_used_twice(pool: Pool, stage: int) -> None:
    """From 0.18.3 to 0.19.3 stage 2 with bf16 lost the gradients of one of the two subgraphs."""
    pool.run(2, _used_twice, stage)
    ours, theirs = pool.run(2, _errors_in_bf16, stage)[0]
    assert max(ours.values()) < 0.1 < 0.2 < max(theirs.values())
    assert sum(ours.values()) < 0.1 * sum(theirs.values())


# ---- DeepSpeed #7718, #7749: norms of gradients ----------------------------------------------------------------------

ROWS = 4  # of each rank in a step, split over its micro-batches


def _batch(step: int, rank: int) -> Tensor:
    return tokens(step, 0, rank, rows=ROWS)


def _loss(model: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(-1, 1).flatten())


def _loop(stage: int, micros: int, dtype: str | None, lr: float, model: nn.Module, clip: float) -> Any:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **SMALL},
        "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}},
        "gradient_accumulation_steps": micros,
        "train_micro_batch_size_per_gpu": ROWS // micros,
        "gradient_clipping": clip,
    }
    if dtype is not None:
        config[dtype] = {"enabled": True}
    return lt_zero.initialize(model=model, config=config)[0]


def _norms(stage: int, micros: int, dtype: str | None, lr: float) -> tuple[list[float], list[float]]:
    """The norms that the engine tells in three steps, and those of one process."""
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    engine, optimizer = _loop(stage, micros, dtype, lr, model, 1.0), torch.optim.SGD(plain.parameters(), lr, 0.9)
    told, wanted = [], []
    for step in range(3):
        for part in _batch(step, dist.get_rank()).split(ROWS // micros):
            engine.backward(_loss(engine, part))
            engine.step()
        told.append(engine.get_global_grad_norm())
        optimizer.zero_grad()
        sum(_loss(plain, _batch(step, rank)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        wanted.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
        optimizer.step()
    engine.destroy()
    return told, wanted


@pytest.mark.parametrize("stage", only([2], STAGES))
def test_deepspeed_7718_norms_at_stage_2(pool: Pool, stage: int) -> None:
    """From 0.17.6 gradients of stage 2 were too small: 1.6 instead of 4.7, while the first losses agreed."""
    told, wanted = pool.run(2, _norms, stage, 4, None, 0.5)[0]
    assert told == pytest.approx(wanted, rel=1e-4)
    assert wanted[0] != pytest.approx(wanted[-1], rel=1e-2), "the steps change the weights"


@pytest.mark.parametrize(("stage", "dtype"), only_rows([(3, "bf16")], itertools.product(STAGES, [None, "bf16"])))
def test_deepspeed_7749_a_norm_depends_on_nothing_but_the_batch(pool: Pool, stage: int, dtype: str | None) -> None:
    """Between 0.16.4 and 0.18.3 it fell from 11 to 0.2: neither micro-batches nor stage nor dtype may move it."""
    for micros in (1, 2, 4):
        told, wanted = pool.run(2, _norms, stage, micros, dtype, 0.0)[0]
        assert told == pytest.approx(wanted, rel=1e-5 if dtype is None else 0.03), micros


# ---- DeepSpeed #7629: a backward that leaves buckets empty -----------------------------------------------------------


class Tasks(nn.Module):
    """A trunk with a head per task, one of which is kept in fp64, as a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.trunk = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleList([nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, VOCAB).double()])

    def forward(self, batch: Tensor, task: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.trunk:
            x = block(x)
        return self.heads[task](x.double() if task else x).float()


def _task_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    batch = tokens(step, micro, rank)
    return F.cross_entropy(model(batch, micro % 2).flatten(0, 1), batch.roll(-1, 1).flatten())


def _tasks(stage: int, every: bool) -> None:
    check(Case(Tasks, _task_loss, stage, "sgd", micro=2, zero=SMALL, sync_every=every))


@pytest.mark.parametrize(("stage", "every"), only_rows([(2, True)], itertools.product(STAGES, [True, False])))
def test_deepspeed_7629_a_backward_that_leaves_buckets_of_a_dtype_empty(pool: Pool, stage: int, every: bool) -> None:
    """What ran with 0.17.5 failed at the end of a backward of stage 2 from 0.17.6, which has buckets by dtype."""
    pool.run(2, _tasks, stage, every)


# ---- trl #4540: stages 1 and 2 train differently ---------------------------------------------------------------------


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *rest: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def _fine_tunes(stage: int | None) -> list[float]:
    losses = Losses()
    options: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    options |= {"callbacks": [losses], "use_distributed_sampler": False, "limit_val_batches": 0}
    trainer = sharded_trainer(stage, **options) if stage is not None else single_trainer(**options)
    trainer.fit(GPT(dist.get_world_size() if stage is not None else 1, optimizer="adamw", rows=48))
    return losses.seen


@pytest.mark.slow  # in the fast suite: the claims of test_exactness.py
def test_trl_4540_stages_1_and_2_train_alike(pool: Pool) -> None:
    """Fine-tuning at stage 2 reached other losses than at stage 1, in training and evaluation."""
    runs = {stage: pool.run(2, _fine_tunes, stage) for stage in STAGES}
    losses = {stage: [sum(both) / 2 for both in zip(*ranks, strict=True)] for stage, ranks in runs.items()}
    wanted = _fine_tunes(None)
    assert len(wanted) == 12
    assert wanted[0] > wanted[-1] + 0.1, "it learns"
    for stage in STAGES:
        assert losses[stage] == pytest.approx(wanted, rel=1e-5), stage


# ---- torchtitan #2972: gradients are scaled once ---------------------------------------------------------------------


def _summed(model: Any, batch: Tensor, masked: Tensor) -> Tensor:
    """The sum over the tokens that count, whose number differs by row."""
    losses = F.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten(), reduction="none")
    return losses[masked.flatten()].sum()


def _valid(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 * step + rank)
    return torch.rand(ROWS, 5, generator=generator) < 0.2 + 0.6 * rank


def _scaled_once(stage: int, micros: int) -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    engine, optimizer = _loop(stage, micros, None, 0.5, model, 0.0), torch.optim.SGD(plain.parameters(), 0.5, 0.9)
    size, world = ROWS // micros, dist.get_world_size()
    for step in range(3):
        count = sum(int(_valid(step, rank).sum()) for rank in range(world))
        mine = dist.get_rank()
        for batch, valid in zip(_batch(step, mine).split(size), _valid(step, mine).split(size), strict=True):
            # Ranks are averaged, so the sum over all is divided by the number of tokens once, and by nothing else.
            engine.backward(_summed(engine, batch, valid) / count * world, scale_wrt_gas=False)
            engine.step()
        optimizer.zero_grad()
        for rank in range(world):
            (_summed(plain, _batch(step, rank), _valid(step, rank)) / count).backward()
        optimizer.step()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(lt_zero.full_master(p), q[1].detach(), rtol=1e-5, atol=1e-6, msg=name)
    engine.destroy()


@pytest.mark.parametrize(("stage", "micros"), only_rows([(2, 4)], itertools.product(STAGES, [1, 2, 4])))
def test_torchtitan_2972_sums_are_divided_by_the_global_count_once(pool: Pool, stage: int, micros: int) -> None:
    """With a pipeline gradients were larger by the number of valid tokens, which divided the loss after backward."""
    pool.run(2, _scaled_once, stage, micros)
