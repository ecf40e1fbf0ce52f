from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lt_zero.kernels import library


def _use(name: str) -> Iterator[str]:
    lib = library.cpu()
    assert lib is not None, library.status("cpu").why
    before = lib.lt_cpu_isa()
    if lib.lt_cpu_use_isa(name.encode()) != 0:
        pytest.skip(f"this CPU has no {name}")
    yield name
    lib.lt_cpu_use_isa(before)


@pytest.fixture(params=["avx512", "avx2", "neon", "portable"])
def isa(request: Any) -> Iterator[str]:
    """Each instruction set of this CPU."""
    yield from _use(request.param)


@pytest.fixture(params=["amx", "avx512", "avx2", "neon", "portable"])
def matrix_isa(request: Any) -> Iterator[str]:
    """Likewise, and the one that differs in matrix products only."""
    yield from _use(request.param)
