"""``lt_zero.inference``: weights only, sharded, in memory or in files, read from a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lt_zero
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.guard import owner_of
from lt_zero.memory.check import RESTING, measured
from lt_zero.memory.forecast import GATHERED, OFFLOAD, WEIGHTS
from tests.support.models import Net, tokens
from tests.support.pool import Pool

TRAINS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 1.0, "fused_step": True}


def _config(folder: str | None = None, **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if folder is not None:
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder}
    return {"zero_optimization": zero, **keys}


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _exact(file: str, folder: str | None, dtype: torch.dtype) -> dict[str, int]:
    with torch.no_grad():
        want = _net().to(dtype)(tokens(0, 0, 0))
        with lt_zero.empty_weights():
            model = _net()
        assert all(parameter.is_meta for parameter in model.parameters())
        low = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
        assert lt_zero.inference(model, _config(folder, **TRAINS, **low), weights=file) is model
        engine: Any = owner_of(next(model.parameters()))
        for _ in range(3):
            assert torch.equal(model(tokens(0, 0, 0)), want)
    assert not model.training
    assert not any(bucket.wants_grad or bucket.weights.trains for bucket in engine.buckets)
    found = measured(engine)
    found["model"] = sum(bucket.layout.numel * dtype.itemsize for bucket in engine.buckets)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", [False, True])
def test_weights_rest_in_their_dtype_and_nothing_else_does(
    pool: Pool, tmp_path: Path, files: bool, dtype: torch.dtype
) -> None:
    torch.save(_net().state_dict(), tmp_path / "net.pt")
    for found in pool.run(2, _exact, str(tmp_path / "net.pt"), str(tmp_path / "rest") if files else None, dtype):
        shard = found.pop("model") // 2
        if files:
            assert set(found) == {OFFLOAD, RESTING}, "buffers, and files of blocks"
            assert found[RESTING] >= shard
        else:
            assert found == {WEIGHTS: shard}
        assert GATHERED not in found


def _as_predict() -> list[str]:
    """One process, without a process group; keys of training are named once."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lt_zero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        lt_zero.inference(_net(), _config(**TRAINS))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in lines if "ignored" in line]


def test_keys_of_training_are_ignored_with_one_line() -> None:
    assert _as_predict() == ["Inference has no use for optimizer, gradient_clipping, fused_step: ignored."]


def test_weights_of_another_model(tmp_path: Path) -> None:
    state = _net().state_dict()
    state["blocks.0.up.weight"] = torch.zeros(3, 3)
    del state["scale"]
    torch.save(state, tmp_path / "net.pt")
    model = _net()
    with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight has the shape \[3, 3\].*; scale is missing"):
        lt_zero.inference(model, _config(), weights=tmp_path / "net.pt")
    assert owner_of(model.scale) is None, "the module is unchanged"


def test_a_model_larger_than_the_allowed_memory_rests_in_files(tmp_path: Path) -> None:
    wide = [nn.Linear(256, 256, bias=False) for _ in range(16)]
    x = torch.randn(2, 256)
    with torch.no_grad():
        want = nn.Sequential(*wide)(x)
        torch.save(nn.Sequential(*wide).state_dict(), tmp_path / "net.pt")
        allowed = {"max_cpu_gb": 16 * 256 * 256 * 4 / 2 / 1e9}  # half of the weights
        with lt_zero.empty_weights():
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        with pytest.raises(lt_zero.NotEnoughMemory, match="max_cpu_gb"):
            lt_zero.inference(model, _config(**allowed), weights=tmp_path / "net.pt")
        lt_zero.inference(model, _config(str(tmp_path / "rest"), **allowed), weights=tmp_path / "net.pt")
        assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)
