"""The mark of tests that use a feature which may be taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import features
from tests.support.features import needs, skip_without, there


def _skips(mark: pytest.MarkDecorator) -> bool:
    """Whether a test with this mark is skipped."""
    return bool(mark.args[0])


def test_a_test_is_skipped_if_one_of_its_features_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (root := tmp_path / "features" / "ema").mkdir(parents=True)
    (root / "__init__.py").touch()
    (tmp_path / "tools" / "doctor").mkdir(parents=True)
    monkeypatch.setattr(features, "_ROOT", tmp_path)
    assert there("ema")
    assert not _skips(needs("ema"))
    (stores := tmp_path / "tiles").mkdir()
    (stores / "__init__.py").touch()  # a folder of the package that only has the name of the feature
    mark = needs("ema", "doctor", "tiles")  # a folder without files of Python is what was left of one
    assert _skips(mark)
    assert mark.kwargs["reason"] == "not installed: doctor, tiles"


def test_a_test_is_skipped_if_its_configuration_asks_for_a_missing_feature(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(features, "_ROOT", tmp_path)
    skip_without({"zero_optimization": {"stage": 3}})
    (root := tmp_path / "features" / "compression").mkdir(parents=True)
    (root / "__init__.py").touch()
    skip_without({"gradient_compression": {"algorithm": "1bit"}})
    for asked in ({"zero_quantized_weights": True}, {"optimizer": {"type": "OneBitLamb"}}, "quantize"):
        with pytest.raises(pytest.skip.Exception, match="not installed: (zero_plus_plus|one_bit|quantize)"):
            skip_without({"gradient_compression": {}}, asked)
