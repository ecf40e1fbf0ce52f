"""Values of other libraries, a configuration that does not change, and where its warnings point."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

from lt_zero import ZeroStrategy
from lt_zero.config import ZeroConfig
from lt_zero.config.errors import ConfigError
from lt_zero.config.load import ConfigWarning


class _Unreadable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def test_values_of_numpy_and_of_nobody() -> None:
    made = ZeroConfig.of({"train_batch_size": np.int64(4), "fp16_override_modules": np.array(["a", "b"])})
    assert (made.train_batch_size, made.fp16_override_modules) == (4, ("a", "b"))
    for value in (np.array([1, 2]), torch.ones(2), torch.ones(2, device="meta"), _Unreadable()):
        with pytest.raises(ConfigError, match="train_batch_size"):
            ZeroConfig.of({"train_batch_size": value})


def test_params_are_frozen() -> None:
    made = ZeroConfig.of({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": {"type": "WarmupLR"}})
    assert made.optimizer is not None
    assert made.scheduler is not None
    for params in (made.optimizer.params, made.scheduler.params):
        with pytest.raises(TypeError, match="frozen"):
            params["lr"] = 1.0
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), ZeroConfig.of(made, overrides=["bf16={}"])):
        assert copied.optimizer == made.optimizer
    changed = ZeroConfig.of(made, overrides=["optimizer.params.lr=0.25"])
    assert changed.optimizer is not None
    assert (made.optimizer.params, changed.optimizer.params) == ({"lr": 0.5}, {"lr": 0.25})


@pytest.mark.parametrize("rank", ["RANK", "LOCAL_RANK", "NODE_RANK"])
def test_warnings_point_at_the_caller(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank, "0")
    for make in (ZeroConfig.of, lambda config: ZeroStrategy(config=config)):
        with pytest.warns(ConfigWarning, match="cpu_offload") as seen:
            make({"zero_optimization": {"stage": 2, "cpu_offload": True}})
        assert [w.filename for w in seen] == [__file__]
    monkeypatch.setenv(rank, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZeroConfig.of({"zero_optimization": {"stage": 2, "cpu_offload": True}})
