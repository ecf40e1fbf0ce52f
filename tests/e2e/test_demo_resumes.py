"""The demo with 8-bit moments in files is stopped, and goes on at another number of ranks and another stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import Spec
from lt_zero.kernels.moments import SMALLEST, decode, encode
from tests.support.launchers import environment
from tests.support.paths import ROOT

SMALL = ("model=tiny", "data.validation_windows=8", "trainer.max_steps=12", "save_every=4", "threads=1")
INT8 = "+optimizer_states.dtype=int8"
# All but the smallest parameters are sharded; by default a model of this size stays whole.
STAGE_3 = "zero_optimization=stage3", "zero_optimization.stage3_param_persistence_threshold=1000"


def _overrides(out: Path, ranks: int, *others: str) -> list[str]:
    return [*SMALL, INT8, f"out={out}", f"trainer.devices={ranks}", "trainer.accelerator=cpu", *others]


def _files(folder: Path) -> tuple[str, ...]:
    """Overrides for states in files."""
    block = "+zero_optimization.offload_optimizer"
    return f"{block}.device=nvme", f"{block}.nvme_path={folder}"


def _checkpoint(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step={step}.ckpt"


def _resume(path: Path) -> str:
    return f"resume='{path}'"


def _run(arguments: list[str], stop_after: Path | None = None) -> None:
    """Run the demo to its end, or kill all its ranks once a checkpoint is complete."""
    command = [sys.executable, "examples/train_gpt.py", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **pipes)
    if stop_after is None:
        output, _ = run.communicate(timeout=500)
        assert run.returncode == 0, output
        return
    deadline = time.monotonic() + 500
    while not stop_after.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    output, _ = run.communicate(timeout=60)
    assert stop_after.exists(), output


def _states(path: Path) -> dict[str, torch.Tensor]:
    """Weights, and moments as the values of their codes."""
    source = open_source(path)
    found = {name: source.read(name) for name in source.weights}
    (optimizer,) = source.optimizers
    for name, entries in optimizer.state.items():
        for key, spec in entries.items():
            if isinstance(spec, Spec):
                found[f"{name} {key}"] = source.read_state(0, name, key)
    return found


def _codes(value: torch.Tensor, key: str) -> torch.Tensor:
    """The records that a run keeps of a moment in 8 bits."""
    rows = torch.empty(-(-value.numel() // 256) * 260, dtype=torch.uint8)
    encode(value, not key.endswith("_sq"), rows)
    return rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first, whole, parts = (tmp_path / name for name in ("first", "whole", "parts"))
    stage2 = "zero_optimization=stage2"
    _run(_overrides(first, 2, *STAGE_3, *_files(tmp_path)), stop_after=_checkpoint(first, 4))
    begin = _resume(_checkpoint(first, 4))
    _run(_overrides(whole, 3, *STAGE_3, begin))  # in memory, unbroken
    _run(_overrides(parts, 3, *STAGE_3, begin, *_files(tmp_path)), stop_after=_checkpoint(parts, 8))
    _run(_overrides(parts, 3, stage2, _resume(_checkpoint(parts, 8)), *_files(tmp_path)))
    for step in (8, 12):
        want, got = _states(_checkpoint(whole, step)), _states(_checkpoint(parts, step))
        assert want.keys() == got.keys()
        coded = 0
        for name, value in want.items():
            assert torch.equal(got[name], value), (step, name)
            if " exp_avg" in name and value.numel() >= SMALLEST and ".embed." not in name:
                codes, again = _codes(value, name), _codes(got[name], name)
                assert torch.equal(codes, again), (step, name)
                assert torch.equal(decode(codes, value.numel(), not name.endswith("_sq")).view(value.shape), value), (
                    name
                )
                coded += 1
        assert coded >= 16, sorted(want)
    assert not torch.equal(_states(_checkpoint(whole, 8))[name], value), "training goes on"
