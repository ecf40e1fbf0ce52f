"""Offload on a machine with a GPU: states in page-locked memory and in files, steps beside backward and forward."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.config.precision import dtype_policy
from tests.support.parity import config_of, full_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Deep(nn.Sequential):
    """Blocks that are units."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__(*(Feed(width) for _ in range(depth)))


class Feed(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def train(
    stage: int, zero: dict[str, Any], mode: str, clip: float | None = None, steps: int = 4
) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    device, model = torch.device("cuda"), Deep()
    config = config_of(stage, zero=zero)
    engine = lt_zero.shard(model, config, device, policy=dtype_policy(config, mode))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(64, 512, generator=generator, device=device)
            beside = sharded.overlap.beside_backward() if micro and clip is None else nullcontext()
            with beside, torch.autocast("cuda", torch.bfloat16, enabled=mode != "32-true", cache_enabled=False):
                model(x).float().square().mean().backward()
        if clip is not None:
            sharded.grads.clip_norm(clip)
        optimizer.step()
    return full_values(engine), engine


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_same_weights(tmp_path: Path, stage: int, files: bool, mode: str) -> None:
    where = {"device": "nvme", "nvme_path": str(tmp_path)} if files else {"device": "cpu"}
    for clip in (None, 0.5):
        on_device, _ = train(stage, {}, mode, clip)
        runs = []
        for overlap in (False, "auto", True):
            zero: dict[str, Any] = {"offload_optimizer": {**where, "overlap_step": overlap}}
            zero |= {"offload_param": {**where, "max_in_cpu": 0}} if stage == 3 else {}
            values, engine = train(stage, zero, mode, clip)
            runs.append(values)
            if not files:
                assert engine.buckets[0].grads.stored()[0].is_pinned()
            engine.offload_manager.close()
        for name, value in runs[0].items():
            assert torch.equal(runs[1][name], value), (name, "beside backward")
            assert torch.equal(runs[2][name], value), (name, "beside forward")
            torch.testing.assert_close(value, on_device[name].to(value.device), rtol=1e-4, atol=1e-5)
