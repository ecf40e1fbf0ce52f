"""Where things lie in a checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
SUPPORT = ROOT / "tests" / "support"
_spec = importlib.util.find_spec("lt_zero")
assert _spec is not None
assert _spec.origin is not None
PACKAGE = Path(_spec.origin).parent  # in the checkout, or where the wheel was installed
