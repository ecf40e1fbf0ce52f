"""One step over data ranks from DeepSpeed's tensor, expert and universal checkpoints, as one process takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import CheckpointSource
from tests.support.import_tools import makers
from tests.support.matrix import only_rows
from tests.support.paths import DATA
from tests.support.pool import Pool

FOLDER, RANKS = DATA / "deepspeed_parallel", 2


class ByName(nn.Module):
    """Parameters under the names of a checkpoint; each element has a gradient of its own on each rank."""

    def __init__(self, source: CheckpointSource) -> None:
        super().__init__()
        (saved,) = source.optimizers
        for name, spec in source.weights.items():
            *parents, own = name.split(".")
            module: nn.Module = self
            for part in parents:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            value = torch.zeros(spec.shape, dtype=torch.float32 if spec.dtype.is_floating_point else spec.dtype)
            if spec.dtype.is_floating_point:
                module.register_parameter(own, nn.Parameter(value, requires_grad=name in saved.state))
            else:
                module.register_buffer(own, value)

    def forward(self, rank: int) -> Tensor:
        drawn = torch.Generator().manual_seed(rank)
        losses = [(p * torch.randn(p.shape, generator=drawn)).sum() for p in self.parameters() if p.requires_grad]
        return torch.stack(losses).sum()


def started(name: str, tag: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model as the run that has saved had it, and its optimizer."""
    torch.manual_seed(1)
    if not name.startswith("moe"):
        model = makers("deepspeed_parallel").Block()
        return model, torch.optim.AdamW(makers("deepspeed_parallel").groups(model), lr=1e-2)
    source = open_source(FOLDER / name / tag)
    model, (saved,) = ByName(source), source.optimizers
    named = dict(model.named_parameters())
    groups = [{**group, "params": [named[key] for key in group["params"]]} for group in saved.groups]
    options = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
    return model, torch.optim.AdamW(options, lr=1e-2)


def loss_of(model: nn.Module, rank: int) -> Tensor:
    drawn = torch.Generator().manual_seed(rank)
    loss: Tensor = model(rank) if isinstance(model, ByName) else model(torch.randint(9, (4,), generator=drawn))
    return loss


def goes_on(name: str, tag: str, stage: int) -> dict[str, Tensor]:
    """The weights after a step over two data ranks."""
    model, optimizer = started(name, tag)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4}
    engine, *_ = lt_zero.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(str(FOLDER / name), tag)
    loss = engine(dist.get_rank()) if isinstance(model, ByName) else loss_of(engine, dist.get_rank())
    engine.backward(loss)
    engine.step()
    weights = engine.module_state_dict()
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    ("name", "tag", "stage"),
    only_rows(
        [("autotp_stage1_bf16", "universal", 3)],
        [
            ("autotp_stage1_bf16", "universal", 3),
            ("autotp_stage1_bf16", "global_step3", 2),
            ("autotp_stage3", "global_step3", 3),
            ("moe_stage2_bf16", "global_step3", 2),
            ("moe_stage2_bf16", "global_step3", 3),
        ],
    ),
)
def test_a_step_is_that_of_one_process(pool: Pool, name: str, tag: str, stage: int) -> None:
    source = open_source(Path(FOLDER, name, tag))
    model, optimizer = started(name, tag)
    model.load_state_dict({key: source.read(key) for key in source.weights})
    (saved,) = source.optimizers
    for key, parameter in model.named_parameters():
        if key in saved.state:
            moments = {state: source.read_state(0, key, state) for state in ("exp_avg", "exp_avg_sq")}
            step = torch.as_tensor(saved.state[key]["step"], dtype=torch.float32).clone()
            optimizer.state[parameter] = {"step": step, **moments}
    assert len(optimizer.state) == len(saved.state) > 8
    for rank in range(RANKS):
        (loss_of(model, rank) / RANKS).backward()
    optimizer.step()
    found = pool.run(RANKS, goes_on, name, tag, stage)[0]
    for key, value in model.named_parameters():
        torch.testing.assert_close(found[key].float(), value.detach(), rtol=1e-5, atol=1e-6, msg=f"{key} differs")
