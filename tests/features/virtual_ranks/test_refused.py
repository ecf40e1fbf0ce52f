"""What rounds cannot do with the same results at another number of ranks is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics import MeanMetric

from lt_zero import ConfigError
from tests.features.virtual_ranks.fits import Batch, Module, Rows, fit
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


class _Draws(Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = {"own": torch.Generator().manual_seed(1)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch) * torch.rand((), generator=self.noise["own"])


class _Drawing(Rows):
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Batch:
        rows, drawn, number = super().__getitem__(index)
        return rows + float(self.random.random()), drawn, number


class _DrawsData(Module):
    def train_dataloader(self) -> Any:
        return DataLoader(_Drawing(), batch_size=2)


class _Lists(Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = [MeanMetric()]


class _Late(Module):
    def on_train_start(self) -> None:
        self.late = MeanMetric()


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
    "a generator of the module": (_Draws, {}, "a step has drawn from _Draws.noise['own']"),
    "a generator of the data": (_DrawsData, {}, "drawn with _Drawing (dataset).random"),
    "metrics in a list": (_Lists, {}, "_Lists.several[0] is a MeanMetric"),
    "a metric that is made late": (_Late, {}, "_Late.late is a MeanMetric"),
    "own buffers": (Module, {"config": {"broadcast_buffers": False}}, "broadcast_buffers=false"),
}


def _messages() -> list[str]:
    return [_message(module, kwargs) for module, kwargs, _ in CASES.values()]


def test_what_rounds_cannot_do_is_refused(pool: Pool) -> None:
    (found,) = pool.run(1, _messages)
    for (_, _, want), text in zip(CASES.values(), found, strict=True):
        assert want in text
        assert "virtual_ranks" in text


class _Shuffles(Module):
    """Keeps the generator of its loader, which makes copies of it."""

    def train_dataloader(self) -> Any:
        self.order = torch.Generator().manual_seed(1)
        return DataLoader(
            Rows(),
            batch_size=2,
            drop_last=True,
            generator=self.order,
            sampler=RandomSampler(Rows(), generator=self.order),
        )


def _fits() -> None:
    fit(_Shuffles(), max_epochs=1, use_distributed_sampler=False)


def test_a_generator_of_which_steps_draw_nothing_is_accepted(pool: Pool) -> None:
    pool.run(1, _fits)
