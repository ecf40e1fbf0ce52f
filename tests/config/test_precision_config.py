"""Trainer(precision=...) and the fp16, bf16 and data_types blocks: what they mean together, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from torch.amp import GradScaler

from lt_zero import ConfigError, FabricZeroStrategy, ZeroConfig, ZeroPrecision, ZeroStrategy
from lt_zero.config.precision import MODES, dtype_policy, on_min_scale, resolve_mode
from lt_zero.core.engine.dtypes import ScalerRules
from tests.support.lightning_tools import QUIET


def config_with(**keys: Any) -> ZeroConfig:
    return ZeroConfig.of(keys)


ON, OFF = {"enabled": True}, {"enabled": False}
AUTO: dict[str, Any] = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
AUTOCAST = [{"torch_autocast": {"enabled": True, "dtype": dtype}} for dtype in ("fp16", "bf16")]
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "auto": AUTO,
    "fp16": {"fp16": ON},
    "bf16": {"bf16": ON},
    "no fp16": {"fp16": OFF},
    "no bf16": {"bf16": OFF},
    "autocast fp16": AUTOCAST[0],
    "autocast bf16": AUTOCAST[1],
}
ASKED = [None, "32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
PLAIN = ["32-true", *ASKED[1:]]
NO: None = None
# What a run does, by configuration and the precision that was asked for, in the order of ASKED; NO: an error.
PAIRS: dict[str, list[str | None]] = {
    "nothing": [*PLAIN],
    "auto": [*PLAIN],
    "fp16": ["16-true", "16-true", NO, "16-true", NO, "16-mixed", NO],
    "bf16": ["bf16-true", "bf16-true", NO, NO, "bf16-true", NO, "bf16-mixed"],
    "no fp16": ["32-true", "32-true", "64-true", NO, "bf16-true", NO, "bf16-mixed"],
    "no bf16": ["32-true", "32-true", "64-true", "16-true", NO, "16-mixed", NO],
    "autocast fp16": ["16-mixed", "16-mixed", NO, NO, NO, "16-mixed", NO],
    "autocast bf16": ["bf16-mixed", "bf16-mixed", NO, NO, NO, NO, "bf16-mixed"],
}
MADE: dict[str, Callable[..., Any]] = {
    "Trainer": lambda config, **asked: trainer_with(config, **asked).precision_plugin,
    "Fabric": lambda config, **asked: (
        Fabric(accelerator="cpu", devices=1, strategy=FabricZeroStrategy(config=config), **asked).strategy.precision
    ),
}


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@pytest.mark.parametrize("face", list(MADE))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_pair_agrees_or_is_an_error_that_shows_both(name: str, face: str) -> None:
    """On a CPU, where Lightning replaces 16-mixed by bf16-mixed."""
    keys = CONFIGS[name]
    for asked, want in zip(ASKED, PAIRS[name], strict=True):
        given = {} if asked is None else {"precision": asked}
        if want is None:
            block = next(iter(keys))
            with pytest.raises(ConfigError, match=rf"precision='{asked}'\) contradicts {block}\."):
                MADE[face](keys, **given)
            continue
        if want == "16-mixed" and not {"fp16", "torch_autocast"} & {k for k, v in keys.items() if v["enabled"] is True}:
            want = "bf16-mixed"  # with Lightning's warning
        assert MADE[face](keys, **given).precision == want, (asked, keys)


@pytest.mark.parametrize(
    ("keys", "precision", "asked", "want"),
    [
        ({"fp16": ON}, "32-true", None, "16-true"),  # without a Trainer
        ({"fp16": OFF, "bf16": ON}, "bf16-true", None, "bf16-true"),
        ({"bfloat16": ON}, "bf16-mixed", "bf16-mixed", "bf16-mixed"),
        ({"fp16": ON}, "16-mixed", "16-mixed", "16-mixed"),  # a GPU
        ({"fp16": ON}, "bf16-mixed", "16-mixed", "16-mixed"),  # a CPU
        ({}, "bf16-mixed", "16-mixed", "bf16-mixed"),
    ],
)
def test_modes_agree(keys: dict[str, Any], precision: str, asked: str | None, want: str) -> None:
    assert resolve_mode(config_with(**keys), precision, asked) == want


@pytest.mark.parametrize(
    ("keys", "precision", "asked", "shown"),
    [
        ({"bf16": ON}, "16-mixed", "16-mixed", "bf16.enabled=true"),  # a GPU
        ({"fp16": OFF}, "bf16-mixed", "16-mixed", "fp16.enabled=false"),  # a CPU
        ({"fp16": ON}, "bf16-mixed", None, "fp16.enabled=true"),  # a plugin
    ],
)
def test_contradictions_show_both(keys: dict[str, Any], precision: str, asked: str | None, shown: str) -> None:
    with pytest.raises(ValueError, match=shown) as error:
        resolve_mode(config_with(**keys), precision, asked)
    assert repr(asked or precision) in str(error.value)


def test_keys_that_contradict_the_mode() -> None:
    with pytest.raises(ValueError, match="param_dtype"):
        dtype_policy(config_with(data_types={"param_dtype": "fp16"}), "bf16-true")
    assert dtype_policy(config_with(data_types={"param_dtype": "bf16"}), "bf16-true").compute == torch.bfloat16
    with pytest.raises(ValueError, match="bf16_master_weights_and_grads"):
        dtype_policy(config_with(bf16={"bf16_master_weights_and_grads": True}), "32-true")


def test_scaling_keys() -> None:
    keys = {"initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 4, "min_loss_scale": 2}
    policy = dtype_policy(config_with(fp16=keys), "16-mixed")
    assert policy.scaling == ScalerRules(initial=4096.0, window=50, hysteresis=4, minimum=2.0)
    static = dtype_policy(config_with(fp16={"loss_scale": 128}), "16-true").scaling
    assert static is not None
    assert (static.initial, static.dynamic) == (128.0, False)
    assert dtype_policy(config_with(fp16=keys), "bf16-true").scaling is None
    assert not dtype_policy(config_with(bf16={"check_grad_overflow": False}), "bf16-true").check_overflow
    assert on_min_scale(config_with(fp16={"raise_error_at_min_scale": False})) == "hold"
    assert on_min_scale(config_with()) == "raise"


def test_inputs_are_cast_in_the_true_modes_or_if_asked() -> None:
    asked = {mode: dtype_policy(config_with(), mode).cast_inputs for mode in MODES}
    assert asked == {mode: mode in ("16-true", "bf16-true", "64-true") for mode in MODES}
    for wanted in (True, False):
        for mode in ("16-true", "16-mixed"):
            plugin = ZeroPrecision(mode)
            plugin.configure(config_with(fp16={"auto_cast": wanted}))
            batch = plugin.convert_input({"x": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)})
            assert batch["x"].dtype == (torch.float16 if wanted else torch.float32)
            assert batch["n"].dtype == torch.int64


# ---- through the Trainer -------------------------------------------------------------------------------------------


def trainer_with(config: dict[str, Any] | None = None, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(**{**QUIET, "strategy": ZeroStrategy(config=config), "devices": 1, **kwargs})


@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "bf16-mixed"])
def test_stock_plugins_are_translated(precision: Any) -> None:
    trainer = trainer_with(precision=precision)
    assert isinstance(trainer.precision_plugin, ZeroPrecision)
    assert trainer.precision == precision
    dtype = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}[precision.split("-")[0]]
    assert _plugin_to_compute_dtype(trainer.precision_plugin) == dtype, "ThroughputMonitor computes utilisation with it"


def test_config_decides_on_cpu_where_lightning_has_no_fp16() -> None:
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        trainer = trainer_with({"fp16": ON}, precision="16-mixed")
    assert trainer.precision == "16-mixed"


def test_contradiction_in_the_trainer() -> None:
    with pytest.raises(ValueError, match=r"bf16-true.*fp16\.enabled=true"):
        trainer_with({"fp16": ON}, precision="bf16-true")


def test_scaler_of_the_user_is_kept() -> None:
    scaler = GradScaler("cpu", init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    trainer = trainer_with(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    plugin: Any = trainer.precision_plugin
    rules = plugin.policy.scaling
    assert (rules.initial, rules.growth, rules.backoff, rules.window, rules.hysteresis) == (512.0, 4.0, 0.25, 7, 1)
    off: Any = trainer_with(plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu", enabled=False))])
    assert off.precision_plugin.loss_scale == 1.0
    with pytest.raises(ValueError, match=r"fp16\.loss_scale"):
        trainer_with({"fp16": {"loss_scale": 8}}, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    plain: Any = trainer_with(
        {"fp16": {"loss_scale": 8}}, plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))]
    )
    assert plain.precision_plugin.loss_scale == 8.0


def test_unsupported_plugins_are_named() -> None:
    class Own(Precision):
        pass

    with pytest.raises(TypeError, match="Own"):
        trainer_with(plugins=[Own()])
    with pytest.raises(ValueError, match="transformer-engine"):
        ZeroPrecision("transformer-engine")
    assert trainer_with(plugins=[DoublePrecision()]).precision == "64-true"
