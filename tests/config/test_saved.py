"""The resolved configuration is in every checkpoint, in plain containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lt_zero import ZeroConfig
from tests.support.plain_module import AUTO, Plain, run


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_the_resolved_configuration_is_saved(tmp_path: Path, form: str) -> None:
    config: dict[str, Any] = {**AUTO, "checkpoint": {"format": form}, "comet": {"api_key": "a-secret"}}
    trainer = run(Plain(lr=0.125), config)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    file = tmp_path / "x.ckpt" / "meta.pt" if form == "sharded" else tmp_path / "x.ckpt"
    saved = torch.load(file, weights_only=True)["lt_zero"]["config"]
    assert "auto" not in {str(value) for value in saved["optimizer"]["params"].values()}
    assert (saved["train_batch_size"], saved["zero_optimization"]["reduce_bucket_size"]) == (4, 36)
    assert saved["optimizer"]["params"]["lr"] == 0.125
    assert "a-secret" not in str(saved)
    again = ZeroConfig.of(saved)  # it can be used as it is
    assert again.zero_optimization == trainer.strategy.config.zero_optimization.model_validate(
        saved["zero_optimization"]
    )
    assert again.optimizer == trainer.strategy.config.optimizer
