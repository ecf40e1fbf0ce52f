from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lt_zero.ops import library


@pytest.fixture(params=["avx512", "avx2", "neon", "portable"])
def isa(request: Any) -> Iterator[str]:
    """Each instruction set of this CPU."""
    lib = library.cpu()
    assert lib is not None, library.status("cpu").why
    before = lib.lt_cpu_isa()
    if lib.lt_cpu_use_isa(request.param.encode()) != 0:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    lib.lt_cpu_use_isa(before)
