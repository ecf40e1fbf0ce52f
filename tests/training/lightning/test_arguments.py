"""Arguments of other strategies are errors that say where the setting is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

import lt_zero
from lt_zero.common.fields import dotted_keys
from lt_zero.training.lightning.arguments import _ELSEWHERE, _KEYS

MAKERS: list[Any] = [lt_zero.ZeroStrategy, lt_zero.FabricZeroStrategy]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"offload_optimizer": True}, r"zero_optimization.offload_optimizer.device of .*device=cpu"),
        ({"remote_device": None}, r"offload_param.device=none\"\]"),
        ({"nvme_path": None}, r"nvme_path=null\"\]"),
        ({"stage": 2, "sub_group_size": 10}, r'overrides=\["zero_optimization.sub_group_size=10"\]'),
        ({"loss_scale": 0.0}, r"the key fp16.loss_scale of the configuration"),
        ({"gradient_clipping": 1.0}, r"the key gradient_clipping of the configuration"),
        ({"stage3_max_live_parameters": 5}, r"the key zero_optimization.stage3_max_live_parameters"),
        ({"offload_param": {"device": "cpu"}}, r"the block zero_optimization.offload_param of the configuration"),
        ({"mixed_precision": None}, r"Trainer\(precision="),
        ({"stages": 3}, "Did you mean 'stage'"),
        ({"qqq": 3}, "There are stage, config, overrides"),
    ],
)
def test_the_place_of_the_setting_is_told(make: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=rf"{make.__name__} has no argument '{list(given)[-1]}'. .*{told}"):
        make(**given)


def test_each_argument_of_lightnings_strategies_is_known() -> None:
    for other in (DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy):
        theirs = set(inspect.signature(other.__init__).parameters) - {"self", "kwargs"}
        ours = {*inspect.signature(lt_zero.ZeroStrategy).parameters, *_KEYS, *_ELSEWHERE}
        assert not theirs - ours, other
    assert set(_KEYS.values()) <= set(dotted_keys(lt_zero.ZeroConfig))
