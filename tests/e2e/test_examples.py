"""Examples run as their readers run them, with small models."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.support.features import skip_without
from tests.support.lightning_tools import torchrun_env
from tests.support.paths import ROOT
from tests.support.pool import Pool


def _main(name: str, *arguments: str) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name).main(list(arguments))
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("file", ["train_gpt.py", "conf/train_gpt.yaml"])
def test_overrides_in_the_help_of_the_demo_are_hydras(file: str) -> None:
    parser = OverridesParser.create()
    lines = (ROOT / "examples" / file).read_text(encoding="utf-8").splitlines()
    commands = [line.split("train_gpt.py", 1)[1] for line in lines if "    python examples/train_gpt.py" in line]
    assert len(commands) > 5
    for command in commands:
        parser.parse_overrides([word for word in shlex.split(command, comments=True) if "=" in word])


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [False, True])
def test_inference_beyond_memory(pool: Pool, tmp_path: Path, quantize: bool) -> None:
    """Ranks write texts of different lengths with weights that do not fit into the memory that they may have."""
    skip_without("quantize" if quantize else "")
    small = ("--depth", "32", "--width", "192", "--context", "16", "--length", "6", "--nvme", str(tmp_path))
    first, second = pool.run(2, _main, "inference_beyond_memory", *small, *(["--quantize"] if quantize else []))
    assert first.startswith("def ")
    assert (len(first), len(second)) == (len("def ") + 6, len("def ") + 3)


def _fabric_loop(folder: str) -> list[float]:
    os.environ.update(torchrun_env())
    short = ("--devices", str(dist.get_world_size()), "--folder", folder)
    whole = _main("fabric_loop", *short[:2], "--steps", "4")
    _main("fabric_loop", *short, "--steps", "2", "--stage", "2")
    return [whole, _main("fabric_loop", *short, "--steps", "4")]


@pytest.mark.slow
def test_fabric_loop(pool: Pool, tmp_path: Path) -> None:
    """It goes on, at another stage, where it was saved."""
    whole, parts = pool.run(2, _fabric_loop, str(tmp_path))[0]
    assert abs(whole - parts) < 1e-4


def _vision(folder: str) -> tuple[float, float]:
    warnings.filterwarnings("ignore")
    os.environ.update(torchrun_env())
    short = ("--devices", str(dist.get_world_size()), "--epochs", "2", "--images", "512", "--out", folder)
    return _main("vision", *short), _main("vision", *short, "--no-ema")


@pytest.mark.slow
def test_vision(pool: Pool, tmp_path: Path) -> None:
    averaged, plain = pool.run(2, _vision, str(tmp_path))[0]
    assert averaged > 0.5  # of 4 classes
    assert plain > 0.5
    assert (tmp_path / "classifier-fp16.pt").exists()


def _long_context() -> Any:
    warnings.filterwarnings("ignore")
    os.environ.update(torchrun_env())
    short = ("--context", "512", "--depth", "1", "--width", "64", "--steps", "4", "--texts", "2")
    return _main("long_context", "--devices", str(dist.get_world_size()), *short)


@pytest.mark.slow
def test_long_context(pool: Pool) -> None:
    """A window of the pattern is 512 bytes: dense and sparse attention are the same."""
    skip_without("sparse_attention")
    (dense, _), (sparse, _) = pool.run(2, _long_context)[0]
    assert dense == pytest.approx(sparse, rel=1e-4)
    assert dense < 256


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [0, 4])
def test_long_sequences(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer sequence takes as much more memory as is forecast; a run with more than the limit is ended."""
    skip_without("tiles", "activation_checkpointing")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    example = importlib.import_module("long_sequences")
    row, args = example.ROWS[number], Namespace(width=128, depth=4, vocabulary=8000)
    short, long = (1024, 4096) if number == 0 else (4096, 16384)
    (less, _), (more, _) = (example.measure(row, args, length, 4e9) for length in (short, long))
    grows = example.activations(row, args, long) - example.activations(row, args, short)
    assert 0.85 * grows < more - less < 1.15 * grows
    assert example.measure(row, args, short, 1e8) is None
