"""What rounds cannot do with the same results at another number of ranks is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero import ConfigError
from tests.features.virtual_ranks.fits import Batch, Module, fit
from tests.features.virtual_ranks.logged import Logging
from tests.support.pool import Pool


class _Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Reads(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return torch.zeros(())


class _Gathers(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.all_gather(torch.ones(1))
        return self.loss(batch)


class _Computes(Logging):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        self.mean.update(1.0)
        self.mean.compute()
        return self.loss(batch)


class _Skips(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        return None


class _Reshapes(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.net.register_buffer("seen", torch.zeros(batch_idx + 1))
        return self.loss(batch)


def _message(module: Callable[[], Module], kwargs: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, RuntimeError)) as caught:
        fit(module(), **kwargs)
    return str(caught.value)


CASES: dict[str, tuple[Callable[[], Module], dict[str, Any], str]] = {
    "manual optimization": (_Manual, {}, "_Manual optimizes manually"),
    "dataloader_iter": (_Reads, {}, "_Reads.training_step reads dataloader_iter"),
    "all_gather": (_Gathers, {}, "all_gather inside of a step"),
    "compute": (_Computes, {}, "MeanMetric would be computed over all virtual ranks inside of a step"),
    "None": (_Skips, {}, "training_step returned None"),
    "a buffer of another shape": (_Reshapes, {}, "Buffer 'net.seen' got another shape"),
    "own buffers": (Module, {"config": {"broadcast_buffers": False}}, "broadcast_buffers=false"),
}


def _messages() -> list[str]:
    return [_message(module, kwargs) for module, kwargs, _ in CASES.values()]


def test_what_rounds_cannot_do_is_refused(pool: Pool) -> None:
    (found,) = pool.run(1, _messages)
    for (_, _, want), text in zip(CASES.values(), found, strict=True):
        assert want in text
        assert "virtual_ranks" in text
