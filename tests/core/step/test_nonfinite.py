"""A loss or gradients that are not finite in fp32: told once, an error, or a skipped step; never trained silently."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.core.step.loss_scale import NonFiniteError
from tests.support.features import skip_without
from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, single_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool

RUN: dict[str, Any] = {"max_steps": 4, "max_epochs": 4, "limit_val_batches": 0, "use_distributed_sampler": False}


class Breaks(GPT):
    """On the last rank the gradient, or the output, of a layer in block 1 is not finite in one batch."""

    def __init__(self, kind: str, at: int = 1, optimizer: str = "sgd") -> None:
        super().__init__(dist.get_world_size() if dist.is_initialized() else 1, optimizer)
        self.kind, self.at, self.batches = kind, at, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        bad, self.batches = last and self.batches == self.at, self.batches + 1

        def spoil(module: Any, args: Any, output: Tensor) -> Tensor:
            if self.kind == "backward":
                output.register_hook(lambda grad: grad * torch.inf)
                return output
            return output * torch.nan

        handle = self.net.blocks[1].up.register_forward_hook(spoil) if bad else None
        loss = self.loss(batch)
        if handle is not None:
            handle.remove()
        return loss


def _warned(stage: int, kind: str, zero: dict[str, Any], options: dict[str, Any]) -> list[str]:
    trainer = sharded_trainer(stage, zero, **RUN, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(Breaks(kind))
    values = trainer.strategy.full_state_dict().values()
    assert dist.get_rank() or not all(bool(torch.isfinite(value).all()) for value in values)
    return [str(w.message) for w in seen if "not finite" in str(w.message)]


@dataclass(frozen=True)
class Case:
    """``zero``: keys of its block; ``options``: of the Trainer."""

    stage: int
    kind: str = "forward"
    zero: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "0": Case(0),
    "3": Case(3),
    "2-backward": Case(2, "backward"),
    "clipped": Case(2, "backward", options={"gradient_clip_val": 1.0}),
    "accumulated": Case(2, options={"accumulate_grad_batches": 2}),
    "beside": Case(2, zero={"offload_optimizer": {"device": "cpu", "overlap_step": True}}),
}


@pytest.mark.parametrize("name", only(["3", "clipped", "beside"], CASES))
def test_one_warning(pool: Pool, name: str) -> None:
    skip_without(CASES[name].zero)
    case = CASES[name]
    first, *others = pool.run(2, _warned, case.stage, case.kind, case.zero, case.options)
    assert not any(others)
    assert len(first) == 1, first
    assert "detect_anomaly" in first[0]
    assert "on_nonfinite=raise" in first[0]
    if case.kind == "backward":
        assert "'net.embedding.weight' (of Embedding), 'net.blocks.0.norm" in first[0]
    elif not case.zero:  # what was stepped beside backward may be gone
        assert "'temperature' (of Breaks), 'net." in first[0]


def _raised(stage: int, kind: str) -> str:
    trainer = sharded_trainer(stage, config={"on_nonfinite": "raise"}, **RUN)
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(Breaks(kind))
    return str(caught.value)


@pytest.mark.parametrize("stage", only([3], [0, 2, 3]))
def test_raise_names_the_module_on_all_ranks(pool: Pool, stage: int) -> None:
    for text in pool.run(2, _raised, stage, "forward"):
        assert "on rank 1: the first output that was not finite is that of 'net.blocks.1' (Block)" in text
        assert "Parameters: 'net.blocks.1." in text
        assert "loss scale" not in text
        assert "bf16" not in text


def _skipped(stage: int, optimizer: str, offload: bool) -> Any:
    zero = {"offload_optimizer": {"device": "cpu", "overlap_step": True}} if offload else {}
    trainer = sharded_trainer(stage, zero, {"on_nonfinite": "skip"}, **RUN)
    trainer.fit(Breaks("forward", optimizer=optimizer))
    assert trainer.strategy.precision_plugin.skipped_steps == 1
    return weights(trainer)


@pytest.mark.parametrize(
    ("stage", "offload", "optimizer"),
    only_rows(
        [(2, True, "adamw"), (3, False, "sgd")],
        [(stage, stage == 2, optimizer) for stage in (0, 2, 3) for optimizer in ("sgd", "adamw")],
    ),
)
def test_skip_leaves_the_step_out(pool: Pool, stage: int, offload: bool, optimizer: str) -> None:
    if offload:
        skip_without("offload")

    class Without(GPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            self.seen.append(0.0)
            return None if len(self.seen) == 2 else super().training_step(batch, batch_idx)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if len(self.seen) != 2:
                super().lr_scheduler_step(scheduler, metric)

    got = pool.run(2, _skipped, stage, optimizer, offload)[0]
    trainer = single_trainer(**RUN)
    trainer.fit(Without(1, optimizer))
    assert_same(got, weights(trainer))
