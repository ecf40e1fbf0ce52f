"""Bytes as text: sizes that users write, and sizes in output, where 1 GB is 1e9 bytes everywhere."""

from __future__ import annotations

import re
from fractions import Fraction

from rich.filesize import decimal

from lt_zero.common.errors import ConfigError

GB = 10**9  # bytes
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(i?)b?", re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(size: int | str, name: str) -> int:
    """Parse a size such as 500MB (1e6 bytes each), 4GiB (2**30 each), 1.5k or a number of bytes.

    Args:
        name: the option or key, for the error.

    Raises:
        ConfigError: it is none, or less than a byte.
    """
    found = None if isinstance(size, bool) else _SIZE.fullmatch(str(size).strip().lower())
    nbytes = int(Fraction(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]]) if found else 0
    if nbytes < 1:
        raise ConfigError.about(
            name, f"{name}={size!r} is no size. Write one such as 500MB or 4GiB, or a number of bytes."
        )
    return nbytes


def format_bytes(nbytes: float, digits: int = 2) -> str:
    """Bytes as text, in units of 1000.

    >>> format_bytes(1_234_567), format_bytes(999), format_bytes(3e9, digits=0)
    ('1.23 MB', '999 bytes', '3 GB')
    """
    return decimal(int(nbytes), precision=digits)


def exact_bytes(nbytes: int) -> str:
    """All digits of a number of bytes, with ``format_bytes`` beside them if there are many.

    >>> exact_bytes(512), exact_bytes(134_217_728)
    ('512 bytes', '134217728 bytes (134.22 MB)')
    """
    return f"{nbytes} bytes" + (f" ({format_bytes(nbytes)})" if nbytes >= 10**8 else "")
