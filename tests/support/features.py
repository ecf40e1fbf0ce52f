"""Features that can be taken out: tests that use one are skipped where its folder is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

import lt_zero

_ROOT = Path(lt_zero.__file__).parent


def there(name: str) -> bool:
    """Whether the feature or tool has its folder, ``lt_zero/features/NAME`` or ``lt_zero/tools/NAME``."""
    # A folder that was taken out may leave __pycache__ behind.
    return any((_ROOT / part / name / "__init__.py").is_file() for part in ("features", "tools"))


def skip_without(*names: str) -> None:
    """Skip the running test if one of these features or tools is missing."""
    if missing := [name for name in names if not there(name)]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark that skips a test if one of these features or tools is missing.

    It marks a function, a class, a file (``pytestmark = needs("ema")``), or a row (``marks=needs("ema")``).
    """
    missing = [name for name in names if not there(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
