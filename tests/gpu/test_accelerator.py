"""Streams and events of a GPU, as all code for copies uses them."""

from __future__ import annotations

import pytest
import torch

from lt_zero.common import accelerator

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("blocking", [False, True])
def test_a_stream_waits_for_an_event_of_another(cuda: torch.device, blocking: bool) -> None:
    a, late = torch.randn(4096, 4096, device=cuda), torch.zeros(1 << 20, device=cuda)
    seen, stream = torch.zeros(1 << 20, device=cuda), accelerator.stream(cuda)
    torch.cuda.synchronize()
    for _ in range(40):  # the device is behind the host
        a = a @ a
        a = a / a.norm()
    late.fill_(1.0).add_(0 * a.sum())
    event = accelerator.event(cuda, blocking=blocking)
    event.record(accelerator.current_stream(cuda))
    stream.wait_event(event)
    with accelerator.use(stream):
        seen.copy_(late)
        done = accelerator.event(cuda)
        done.record()
    done.wait()
    assert float(seen.min()) == 1.0
