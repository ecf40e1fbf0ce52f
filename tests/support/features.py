"""Features that can be taken out: tests that use one are skipped where its folder is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

import pytest

import lt_zero

_ROOT = Path(lt_zero.__file__).parent
# Those that have a folder of their own beside lt_zero/features. Other folders there may have the name of a feature, as
# that of the stores which the feature ``offload`` uses.
_APART = ("parallel",)


def there(name: str) -> bool:
    """Whether a feature or tool has its folder: in ``lt_zero/features`` or ``lt_zero/tools``, or beside these."""
    places = ("",) if name in _APART else ("features", "tools")
    # A folder that was taken out may leave __pycache__ behind.
    return any((_ROOT / part / name / "__init__.py").is_file() for part in places)


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark that skips a test if one of these features or tools is missing.

    It marks a function, a class, a file (``pytestmark = needs("ema")``), or a row (``marks=needs("ema")``).
    """
    missing = [name for name in names if not there(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def needs_all_blocks() -> pytest.MarkDecorator:
    """A mark that skips a test of all keys if a feature is missing that brings some of them."""
    return needs("compression", "sparse_attention", "tiles", "virtual_ranks")


# Keys of a configuration, and types of optimizers, that ask for a feature.
KEYS = {
    "activation_checkpointing": "activation_checkpointing",
    "ema": "ema",
    "gradient_noise_scale": "gradient_noise",
    "long_sequences": "tiles",
    "sparse_attention": "sparse_attention",
    "gradient_compression": "compression",
    "slow_node_tolerance": "late_nodes",
    "quantize": "quantize",
    "reproducible": "virtual_ranks",
    **dict.fromkeys(("offload", "offload_optimizer", "offload_param"), "offload"),
    **dict.fromkeys(("int8", "stochastic_rounding"), "low_bit_states"),
    **dict.fromkeys(("OneBitAdam", "OneBitLamb", "ZeroOneAdam"), "one_bit"),
    "zero_hpz_partition_size": "zero_plus_plus",
    **{f"zero_quantized_{what}": "zero_plus_plus" for what in ("gradients", "weights", "nontrainable_weights")},
}


def missing_features(*asked: object) -> list[str]:
    """The names of features that are missing: of these, or of those that a part of a configuration asks for."""
    text = repr(asked)
    names = {feature for key, feature in KEYS.items() if f"'{key}'" in text or f"'{feature}'" in text}
    return sorted(name for name in names if not there(name))


def skip_without(*asked: object) -> None:
    """Skip the running test if one of these is missing: a feature, or one that a part of a configuration asks for."""
    if missing := missing_features(*asked):
        pytest.skip(f"not installed: {', '.join(missing)}")


def needs_all() -> pytest.MarkDecorator:
    """A mark that skips a test of what the whole package has if any feature or tool is missing."""
    return needs("compare", *KEYS.values())


class OfParallel(pytest.Module):
    """A file of tests that is skipped, as ``lt_zero.parallel`` is missing, if it is of it, or imports it."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        names = self.path.relative_to(_ROOT.parent).with_suffix("").parts
        if "parallel" in names:
            pytest.skip("not installed: parallel", allow_module_level=True)
        try:
            importlib.import_module(".".join(names))
        except ModuleNotFoundError as error:
            if f"{error.name}.".startswith("lt_zero.parallel."):
                pytest.skip("not installed: parallel", allow_module_level=True)
            raise
        return super().collect()
