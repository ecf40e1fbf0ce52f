"""Names of strategies, names that are close to them, and strategies of the wrong class."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import lightning as L
import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import DeepSpeedStrategy

import lt_zero
from lt_zero.training.lightning import names
from tests.support.features import skip_without
from tests.support.lightning_tools import GPT, single_trainer

CPU = {"accelerator": "cpu", "devices": 1}


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "param"),
    [
        ("zero_0", 0, "none", "none"),
        ("zero_1", 1, "none", "none"),
        ("zero_2", 2, "none", "none"),
        ("zero_3", 3, "none", "none"),
        ("zero_1_offload", 1, "cpu", "none"),
        ("zero_2_offload", 2, "cpu", "none"),
        ("zero_3_offload", 3, "cpu", "cpu"),
    ],
)
def test_names_are_registered(name: str, stage: int, optimizer: str, param: str) -> None:
    if optimizer != "none":
        skip_without("offload")
    trainer = single_trainer(strategy=name, max_epochs=1, limit_train_batches=1)
    for strategy in (trainer.strategy, L.Fabric(strategy=name, **CPU).strategy):  # type: ignore[arg-type]
        zero = strategy.config.zero_optimization  # type: ignore[attr-defined]
        assert (zero.stage, zero.offload_optimizer.device, zero.offload_param.device) == (stage, optimizer, param)
    if name.endswith("0") or optimizer != "none":
        trainer.fit(GPT(1))
        assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("zero3", '"zero_3"'),
        ("ZeRO-2", '"zero_2"'),
        ("zero_stage_3", '"zero_3"'),
        ("zero3_offload", '"zero_3_offload"'),
        ("lt_zero", '"zero_3"'),
        ("deepspeed", '"zero_2"'),
        ("deepspeed_stage_3", '"zero_3"'),
        ("deepspeed_stage_2_offload", '"zero_2_offload"'),
        ("deepspeed_stage_3_offload_nvme", r"ZeroStrategy\(stage=3, overrides=\[.*nvme_path: /local_nvme"),
    ],
)
def test_names_that_are_close_say_what_to_write(name: str, meant: str) -> None:
    for make in (L.Trainer, L.Fabric):
        with pytest.raises(lt_zero.ConfigError, match=rf'strategy="{name.lower()}" .*Write strategy={meant}'):
            make(strategy=name, **CPU)  # type: ignore[arg-type]


def test_the_advice_for_files_is_a_configuration() -> None:
    zero = eval(names._DEEPSPEED["deepspeed_stage_3_offload_nvme"], {"ZeroStrategy": lt_zero.ZeroStrategy}).config
    assert zero["zero_optimization"]["offload_param"]["device"] == "nvme"


@pytest.mark.parametrize("installed", [False, True])
def test_names_of_deepspeed_stay_lightnings_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = _StrategyRegistry()
    DeepSpeedStrategy.register_strategies(theirs)
    before = dict(theirs)
    monkeypatch.setattr("lightning.pytorch.strategies.StrategyRegistry", theirs)
    if installed:
        monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    else:  # an earlier test of this process may have made it importable
        monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names.register_strategies()
    assert {name: theirs[name] is entry for name, entry in before.items()} == dict.fromkeys(before, installed)


@pytest.mark.parametrize(
    ("make", "given", "other"),
    [
        (L.Trainer, lt_zero.FabricZeroStrategy, r"a Trainer takes lt_zero\.ZeroStrategy\(stage=2\)"),
        (L.Fabric, lt_zero.ZeroStrategy, r"Fabric takes lt_zero\.FabricZeroStrategy\(stage=2\)"),
    ],
)
def test_a_strategy_of_the_wrong_class_names_the_other(make: Any, given: Any, other: str) -> None:
    with pytest.raises(ValueError, match=other):
        make(strategy=given(stage=2), **CPU)
