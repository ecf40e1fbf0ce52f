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
from lt_zero.engine.full_params import full_parameters
from lt_zero.engine.guard import owner_of
from lt_zero.io.pinned import rounded
from lt_zero.memory.check import RESTING, measured
from lt_zero.memory.forecast import GATHERED, OFFLOAD, WEIGHTS
from lt_zero.ops.codecs import INT8
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


def _quantized(file: str, folder: str | None, dtype: torch.dtype) -> tuple[list[float], dict[str, int], int]:
    """How far weights and outputs are from the exact ones, bytes of what is kept, elements."""
    low = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    with torch.no_grad(), lt_zero.empty_weights():
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    lt_zero.inference(model, _config(folder, quantize=8, **low), weights=file)
    exact: dict[str, Any] = torch.load(file)
    engine: Any = owner_of(next(model.parameters()))
    seen, x = list[float](), torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        want = x
        for value in exact.values():
            want = want @ value.to(dtype).T
        for _ in range(3):  # the second time units are prefetched
            got = model(x)
        seen.append(float((got - want).norm() / want.norm()))
        kept = measured(engine)
        full = {name: value.clone() for name, _, value in full_parameters(engine)}
        for name, parameter in model.named_parameters():
            with lt_zero.gathered(parameter):
                assert torch.equal(parameter, full[name]), "what is gathered is what is exported"
        steps = [(full[name].float() - exact[name]).abs().max() / exact[name].abs().max() * 127 for name in exact]
        seen.append(float(max(steps)))
        with lt_zero.gathered(model, write=True):
            for parameter in model.parameters():
                parameter.fill_(0.5)
        assert torch.equal(model(torch.ones(1, 64, dtype=dtype)), torch.full((1, 64), 32.0**4, dtype=dtype))
        assert measured(engine) == kept
    return seen, kept, sum(bucket.layout.numel for bucket in engine.buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "files"), [(1, False), (2, False), (2, True)])
def test_weights_rest_in_8_bits(pool: Pool, tmp_path: Path, world: int, files: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    torch.save(model.state_dict(), tmp_path / "net.pt")
    folder = str(tmp_path / "rest") if files else None
    for (outputs, steps), kept, numel in pool.run(world, _quantized, str(tmp_path / "net.pt"), folder, dtype):
        assert 1e-4 < outputs < 0.03
        assert 0.1 < steps < (0.51 if dtype == torch.float32 else 1.01), (
            "half a step, and half of one by two roundings to bf16"
        )
        if not files:
            assert kept == {WEIGHTS: INT8.nbytes(numel // world // 4) * 4}, "a byte and a 64th of an element"
        else:
            assert kept[RESTING] == rounded(INT8.nbytes(numel // world // 4)) * 4


def test_weights_that_rest_in_8_bits_are_not_trained() -> None:
    config = _config(quantize=8)
    with pytest.raises(lt_zero.ConfigError, match="quantize=8 keeps nothing of the weights but 8-bit codes"):
        lt_zero.shard(_net(), config)
    model = _net()
    lt_zero.inference(model, config)
    with pytest.raises(lt_zero.ConfigError, match="quantize=8"):
        lt_zero.ShardedOptimizer(owner_of(model.scale), torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]
