"""Bytes as text."""

from __future__ import annotations

import pytest

from lt_zero.common.errors import ConfigError
from lt_zero.common.units import exact_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        (" 500 MB ", 500 * 10**6),
        ("1.5k", 1500),
        ("1.1 gb", 1_100_000_000),  # 1.1 as a float is more
        ("2GiB", 2**31),
        ("4ti", 4 << 40),
        ("17", 17),
        (17, 17),
    ],
)
def test_sizes_are_decimal_unless_they_have_an_i(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text, "--memory") == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "0", 0, -5, "5 parsec", "4XB", "1e3", True, "0.2", "1.2.3", "nan", "9" * 25, "٣"]
)
def test_anything_else_is_an_error_that_names_the_option(text: str | int) -> None:
    with pytest.raises(ConfigError, match="^--memory=.* is no size"):
        parse_bytes(text, "--memory")


def test_output_is_decimal() -> None:
    assert [format_bytes(n) for n in (0, 1, 999, 1_234_567, 2**30)] == [
        "0 bytes",
        "1 byte",
        "999 bytes",
        "1.23 MB",
        "1.07 GB",
    ]
    assert format_bytes(2.6e9, 0) == "3 GB"
    assert exact_bytes(2**30) == "1073741824 bytes (1.07 GB)"
    assert exact_bytes(4096) == "4096 bytes"
