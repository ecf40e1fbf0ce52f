"""States of training leave a GPU between two steps, and come back: training goes on bit for bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lt_zero
from lt_zero.common import accelerator

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 256, 8


def started(stage: int) -> Any:
    """An engine of ``lt_zero.initialize`` on the default device, with master weights beside those of the forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return lt_zero.initialize(model=model, config=config)[0]


def stepped(engine: Any, number: int) -> float:
    """The loss of a step."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = engine(x.to(engine.device, torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_goes_on_bit_for_bit(device: torch.device, stage: int) -> None:
    whole, moving = started(stage), started(stage)
    assert moving.device.type == device.type
    wanted = [stepped(whole, number) for number in range(4)]
    found = [stepped(moving, number) for number in range(2)]
    with mock.patch.object(accelerator, "_apart", device.type == "cpu"):  # else nothing is moved on a CPU
        moving.offload_states()
        moving.reload_states()
    found += [stepped(moving, number) for number in range(2, 4)]
    assert found == wanted
    for engine in (whole, moving):
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_device_has_their_memory_meanwhile(cuda: torch.device, stage: int) -> None:
    engine = started(stage)
    stepped(engine, 0)
    engine.zero_grad()
    before = torch.cuda.memory_allocated(cuda)
    engine.offload_states()
    states = 14 * 4 * WIDTH * WIDTH  # bytes of weights in bf16, and of master weights and moments in fp32
    assert before - torch.cuda.memory_allocated(cuda) >= states
    engine.reload_states()
    assert torch.cuda.memory_allocated(cuda) >= before - 512 * len(list(engine.module.parameters()))
    engine.destroy()
