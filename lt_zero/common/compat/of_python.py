"""Private APIs of Python. Checked on Python 3.10 to 3.14."""

from __future__ import annotations

import re
from typing import Any


def parsed_pattern(pattern: str) -> Any:
    """The parts of a regular expression, as Python's own compiler gets them.

    Raises:
        re.error: it is none. ValueError: it has flags.
    """
    # The parser was a module of its own before Python 3.11.
    parser = getattr(re, "_parser", None) or __import__("sre_parse")
    parsed = parser.parse(pattern)
    if parsed.state.flags & ~re.UNICODE:
        raise ValueError("it has flags")
    return parsed
