"""What ``lt-zero ops report`` prints."""

from __future__ import annotations

import re
from pathlib import Path

from lt_zero import kernels as ops
from lt_zero.kernels import library


def test_operations_have_the_names_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    documented = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in page.splitlines() if line[:3] == "| `"))
    )
    for kind in ("cpu", "cuda"):
        assert set(library.names(kind)) - documented <= {"attention"}
    assert set(library.names("cpu")) - {"attention"} <= set(ops.__all__)
    assert {"attention", "huffman_encode"}.isdisjoint(library.names("cuda"))
