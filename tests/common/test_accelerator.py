"""A device is asked about in one module: here on a CPU, and with an accelerator that torch is made to have."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from lt_zero.common import accelerator
from lt_zero.planning.limits import device_memory
from lt_zero.planning.setup import kind_of

CPU, GPU = torch.device("cpu"), torch.device("xpu", 1)


def test_a_host_has_no_streams_and_is_always_current() -> None:
    assert not accelerator.is_accelerator(CPU)
    assert not accelerator.has_streams(CPU)
    assert not accelerator.holds(torch.ones(2))
    assert accelerator.with_index(CPU) == CPU
    assert accelerator.is_current(CPU)
    accelerator.make_current(CPU)
    accelerator.synchronize(CPU)
    with accelerator.on(CPU):
        pass
    assert accelerator.generators(CPU) == []


def test_without_an_accelerator_everything_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "is_available", lambda: False)
    assert accelerator.default_device() == accelerator.default_kind() == CPU
    assert (accelerator.count(), accelerator.in_use(), accelerator.random_state()) == (0, False, None)
    accelerator.set_random_state(torch.empty(0))
    accelerator.synchronize()
    assert accelerator.register(torch.empty(8, dtype=torch.uint8)) == -1
    numbers = torch.arange(3)
    assert accelerator.send(numbers, CPU) is numbers


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch with two accelerators of a kind that is not CUDA, of which the second is current."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    made = mock.Mock(spec=["mem_get_info", "get_rng_state", "set_rng_state", "is_initialized", "get_device_properties"])
    made.mem_get_info.return_value = (3, 8)
    made.get_rng_state.return_value = torch.tensor([7], dtype=torch.uint8)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def test_another_kind_than_cuda_is_taken_as_it_comes(module: Any) -> None:
    assert accelerator.default_device() == accelerator.with_index(torch.device("xpu")) == GPU
    assert accelerator.default_device(0) == torch.device("xpu", 0)
    assert (accelerator.count(), accelerator.has_streams(GPU), accelerator.is_current(torch.device("xpu", 0))) == (
        2,
        True,
        False,
    )
    assert accelerator.free_and_total(GPU) == (3, 8)
    assert accelerator.name(GPU) == "xpu:1"
    assert not accelerator.limit_memory(GPU, 100)
    # Only CUDA's driver pins memory that is there already.
    assert accelerator.register(torch.empty(8, dtype=torch.uint8)) == -1


def test_streams_and_events_of_cuda_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch.Stream does not wait for a torch.cuda.Event."""
    cuda = mock.Mock()
    cuda.Stream.return_value.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "cuda", cuda)
    device, plain = torch.device("cuda", 0), mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(torch, "Stream", plain)
    monkeypatch.setattr(torch, "Event", plain)
    monkeypatch.setattr(torch.accelerator, "current_stream", plain)
    stream = accelerator.stream(device)
    assert stream is cuda.Stream.return_value
    assert accelerator.use(stream) is cuda.stream.return_value
    assert accelerator.current_stream(device) is cuda.current_stream.return_value
    assert accelerator.event(device, blocking=True) is cuda.Event.return_value


def test_memory_that_a_device_does_not_tell_is_not_checked(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    assert accelerator.tells_memory(GPU)
    monkeypatch.setattr(torch, "get_device_module", lambda device: mock.Mock(spec=["set_per_process_memory_fraction"]))
    assert not accelerator.limit_memory(GPU, 100)
    assert device_memory(GPU) is None
    assert [kind_of(device) for device in (GPU, CPU, torch.device("meta"))] == ["cuda", "cpu", "cpu"]


def test_random_states_of_a_device_that_was_not_used_are_not_asked_for(module: Any) -> None:
    module.is_initialized.return_value = False
    assert accelerator.random_state() is None
    module.get_rng_state.assert_not_called()
    module.is_initialized.return_value = True
    state = accelerator.random_state()
    assert state is not None
    accelerator.set_random_state(state)
    module.set_rng_state.assert_called_once_with(state)
