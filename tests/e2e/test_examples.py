"""Examples run as their readers run them, with small models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.pool import Pool


def _main(name: str, *arguments: str) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name).main(list(arguments))
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("quantize", [False, True])
def test_inference_beyond_memory(pool: Pool, tmp_path: Path, quantize: bool) -> None:
    """Ranks write texts of different lengths with weights that do not fit into the memory that they may have."""
    small = ("--depth", "32", "--width", "192", "--context", "16", "--length", "6", "--nvme", str(tmp_path))
    first, second = pool.run(2, _main, "inference_beyond_memory", *small, *(["--quantize"] if quantize else []))
    assert first.startswith("def ")
    assert (len(first), len(second)) == (len("def ") + 6, len("def ") + 3)
