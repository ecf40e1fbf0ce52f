"""Wrong arguments of public functions: the error names the argument and its value, and says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lt_zero

CONFIG = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
MODEL = nn.Linear(2, 2)


def _entered(target: Any) -> None:
    with lt_zero.gathered(target):
        pass


def _synced(target: Any) -> None:
    with lt_zero.synced(target):
        pass


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: _entered("x"), r"gathered is 'x' \(str\): pass a module, a parameter"),
    (lambda: _entered(None), "gathered is None"),
    (lambda: _entered(["weight"]), "gathered is 'weight'"),
    (lambda: _entered({"a": MODEL.weight}), "gathered is .* pass a module"),
    (lambda: _synced("x"), "synced.* is 'x'"),
    (lambda: lt_zero.shard([MODEL], CONFIG), "shard is .*: pass an nn.Module"),
    (lambda: lt_zero.inference("gpt2"), "inference is 'gpt2' .*: pass an nn.Module"),
    (lambda: lt_zero.initialize(model="gpt2", config=CONFIG), r"initialize\(model=\.\.\.\) is 'gpt2'"),
    (lambda: lt_zero.ShardedOptimizer(MODEL, None), r"ShardedOptimizer\(engine=\.\.\.\) is .* pass what lt_zero.shard"),
    (lambda: lt_zero.full_master("weight"), r"The parameter is 'weight' \(str\): pass one of model.parameters"),
    (lambda: lt_zero.last_checkpoint(None), "last_checkpoint is None"),
    (
        lambda: lt_zero.load_from_checkpoint("x.ckpt", nn.Linear),
        r"cls=\.\.\.\) is 'x.ckpt' .*the class of the module first",
    ),
    (lambda: lt_zero.export(MODEL, "x.pt"), "export.*Linear.*strategy.export"),
    (lambda: lt_zero.export("x.ckpt", None), r"export\(out=\.\.\.\) is None"),
    (lambda: lt_zero.estimate(10, world="8"), r"world=\.\.\.\) is '8' \(str\): pass a whole number"),
    (lambda: lt_zero.estimate(10, optimizer=torch.optim.Adam), "optimizer is the class Adam"),
    (lambda: lt_zero.estimate("7X"), "model='7X' is no count"),
    (lambda: lt_zero.ZeroStrategy(overrides={"a": 1}), "overrides is a list of texts, not dict"),
    (lambda: lt_zero.add_config_arguments(None), "parser.* is None"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_wrong_arguments_of_an_engine() -> None:
    model = nn.Linear(2, 2)
    engine, *_ = lt_zero.initialize(model=model, config=CONFIG)
    for call, message in (
        (lambda: engine.backward(0.5), r"loss of engine.backward is 0.5 \(float\)"),
        (lambda: engine.save_checkpoint(None), r"save_dir=\.\.\.\) is None"),
        (lambda: engine.load_checkpoint(3), r"load_dir=\.\.\.\) is 3"),
        (lambda: lt_zero.set_full_master(model.weight, [1.0]), r"value for 'weight' is \[1.0\] \(list\)"),
        (lambda: lt_zero.safe_set_local_fp32_param(model.weight, "x"), "value for 'weight' is 'x'"),
        (lambda: lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG, model_parameters="all"), "model_parameters"),
        (lambda: lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG, lr_scheduler="cosine"), "lr_scheduler"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    engine.destroy()
