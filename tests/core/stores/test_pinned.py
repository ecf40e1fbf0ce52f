"""Pinned host memory that the system refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lt_zero.common import accelerator
from lt_zero.core.stores import pinned

zeros = torch.zeros


class _Runtime:
    """A CUDA runtime that pins nothing, and keeps the error until a kernel is launched, as CUDA's does."""

    def __init__(self) -> None:
        self.error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.error = 2
        return self.error

    def launch(self, *size: int, device: torch.device | None = None) -> Any:
        if device is not None and device.type == "cuda":
            error, self.error = self.error, 0
            if error:
                raise RuntimeError(f"CUDA error {error}")
        return zeros(*size)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(accelerator, "default_kind", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", runtime.launch)
    monkeypatch.setattr(pinned, "_pin_failed", [])
    with caplog.at_level(logging.WARNING, "lt_zero"):
        buffer = pinned.host_buffer(5000, pin=True)
        pinned.host_buffer(5000, pin=True)
    assert buffer.numel() >= 5000
    assert [record.getMessage()[:22] for record in caplog.records] == ["Cannot pin 5000 bytes "]
    runtime.launch(1, device=torch.device("cuda"))  # the next kernel does not meet the error
