"""Private names of OmegaConf, which lie elsewhere in its next version."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from omegaconf import basecontainer

from lt_zero.common.compat.of_hydra import yaml_loader


def test_yaml_is_read_as_omegaconf_2_4_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = ModuleType("omegaconf._yaml")
    moved.get_yaml_loader = basecontainer.get_yaml_loader  # type: ignore[attr-defined]
    monkeypatch.delattr("omegaconf._utils.get_yaml_loader", raising=False)
    monkeypatch.setitem(sys.modules, "omegaconf._yaml", moved)
    assert yaml_loader("rate: 1e-5\nday: 2026-11-30").get_data() == {"rate": 1e-5, "day": "2026-11-30"}
