"""Copies between host memory and a device (offload/copy_streams.py), as tests have them on a CPU: put off until due."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from lt_zero.offload.copy_streams import DONE, CopyStream, StagingBuffers

CPU = torch.device("cpu")


def pair(value: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.zeros(4), torch.full((4,), value)


def test_without_streams_a_copy_is_done_at_once() -> None:
    target, source = pair()
    assert CopyStream(CPU).copy(target, source) is DONE
    assert target.eq(1).all()


def test_late_copies_happen_when_somebody_waits() -> None:
    lane = CopyStream(CPU, late=True)
    (first, a), (second, b), (third, c) = pair(1), pair(2), pair(3)
    lane.copy(first, a)
    event = lane.copy(second, b)
    last = lane.copy(third, c)
    b.fill_(5)  # too early
    assert first.eq(0).all()
    event.wait()
    assert first.eq(1).all(), "copies keep their order"
    assert second.eq(5).all()
    assert third.eq(0).all()
    last.synchronize()
    event.wait()
    assert third.eq(3).all()


def test_what_is_launched_in_line_comes_after_the_copies() -> None:
    lane = CopyStream(CPU, late=True)
    target, source = pair()
    lane.copy(target, source)
    with lane.in_line():
        assert target.eq(1).all()
    other, source = pair(2)
    lane.copy(other, source)
    lane.mark().wait()
    assert other.eq(2).all()
    assert lane.mark() is DONE


def test_a_limit_bounds_what_is_on_its_way() -> None:
    lane = CopyStream(CPU, late=True, limit=2)
    pairs = [pair(number) for number in range(1, 6)]
    for number, (target, source) in enumerate(pairs):
        lane.copy(target, source)
        done = [t.ne(0).all().item() for t, _ in pairs]
        assert done == [i <= number - 2 for i in range(5)]


def test_slots_are_reused_when_their_copy_is_done() -> None:
    lane, made = CopyStream(CPU, late=True), list[Tensor]()

    def make(nbytes: int) -> Tensor:
        made.append(torch.zeros(nbytes, dtype=torch.uint8))
        return made[-1]

    slots = StagingBuffers(make, 16)
    assert slots.nbytes == 32
    targets = [torch.zeros(4, dtype=torch.bfloat16) for _ in range(5)]
    for number, target in enumerate(targets):
        slot = slots.take(4, torch.bfloat16)
        slot.tensor.fill_(number + 1)
        slot.send(lane, target)
    lane.flush()
    assert [target[0].item() for target in targets] == [1, 2, 3, 4, 5]
    assert len(made) == 2


def test_who_finds_no_slot_waits() -> None:
    lane, slots = CopyStream(CPU), StagingBuffers(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), 8)
    begun, got = threading.Event(), threading.Event()
    held = [slots.take(2, torch.float32) for _ in range(2)]

    def take() -> None:
        begun.set()
        slots.take(2, torch.float32)
        got.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert begun.wait(10)
    assert not got.wait(0.2)
    held[0].send(lane, torch.zeros(2))
    assert got.wait(10)
    thread.join()
