"""Times around checkpointed modules, layouts of stored tensors, and the benchmarks' meter of live bytes."""

from __future__ import annotations

import gc
import io
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import live_bytes
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_zero.common import accelerator
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.features.activation_checkpointing.profile import Boundary, open_boundary
from lt_zero.features.activation_checkpointing.stores import geometry_of
from tests.features.activation_checkpointing.store_tools import CPU, NBYTES, ROWS, WIDTH, blocks, forward, rows

# ---- profile -------------------------------------------------------------------------------------------------------


class Timed(nn.Module):
    """Takes a while; ``boundary`` is told, and the module measures it, too: a bit less, and a bit more."""

    def __init__(self, name: str, seconds: float, boundary: Boundary) -> None:
        super().__init__()
        self.name, self.seconds, self.boundary = name, seconds, boundary
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.less, self.more = [0.0, 0.0], [0.0, 0.0]  # milliseconds of forward and of recomputation

    def forward(self, x: Tensor) -> Tensor:
        recompute, self.calls = self.calls % 2 == 1, self.calls + 1
        before = time.perf_counter()
        try:
            with self.boundary.around(self.name, recompute):
                start = time.perf_counter()
                time.sleep(self.seconds * (1 + recompute))
                self.less[recompute] += 1000 * (time.perf_counter() - start)
                return self.linear(x).sin()  # type: ignore[no-any-return]
        finally:  # recomputation ends by an exception
            self.more[recompute] += 1000 * (time.perf_counter() - before)


def test_times_are_those_of_forward_and_of_recomputation() -> None:
    out = io.StringIO()
    boundary = Boundary(CPU, profile=True, synchronize=True, every=2, console=Console(file=out, width=100))
    timed = [Timed("layers.0", 0.01, boundary), Timed("layers.1", 0.002, boundary)]
    for step in range(2):
        assert not out.getvalue()
        forward(nn.ModuleList(timed), rows(step)).backward()
        for module in timed:
            found = boundary.times[module.name]
            assert found.calls == [step + 1] * 2
            for less, milliseconds, more in zip(module.less, found.milliseconds, module.more, strict=True):
                assert less < milliseconds < more
        boundary.end_step()
    assert not boundary.times, "the next table begins anew"
    cells = [re.findall(r"layers\.\d|all|\d+(?:\.\d+)?", line) for line in out.getvalue().splitlines()]
    shown = {line[0]: [float(cell) for cell in line[1:]] for line in cells if len(line) == 5}
    assert [row[::2] for row in shown.values()] == [[1, 1], [1, 1], [2, 2]]
    for kind in (0, 1):
        column = [shown[module.name][2 * kind + 1] for module in timed]
        for module, cell in zip(timed, column, strict=True):
            assert module.less[kind] / 2 - 0.001 < cell < module.more[kind] / 2 + 0.001
        assert shown["all"][2 * kind + 1] == pytest.approx(sum(column), abs=0.002)


def test_who_asks_for_nothing_gets_nothing_and_only_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert open_boundary(ActivationCheckpointing(mode="full"), CPU) is None
    for rank in range(2):
        boundary = open_boundary(ActivationCheckpointing(profile=True), CPU, rank, steps_per_print=3)
        assert boundary is not None
        with pytest.raises(KeyError), boundary.around("block"):  # as a recomputation ends
            raise KeyError
        for _ in range(3):
            assert not capsys.readouterr().out
            boundary.end_step()
        assert ("block" in capsys.readouterr().out) is (rank == 0)
    only = open_boundary(ActivationCheckpointing(synchronize_checkpoint_boundary=True), CPU)
    assert only is not None
    with only.around("block"):
        pass
    for _ in range(10):
        only.end_step()
    assert not capsys.readouterr().out


def test_the_device_is_waited_for_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(accelerator, "synchronize", lambda device: done.append(str(device)))
    for synchronize, waits in ((True, ["cuda:0", "inside", "cuda:0"]), (False, ["inside"])):
        done.clear()
        with Boundary(torch.device("cuda:0"), profile=False, synchronize=synchronize).around("block"):
            done.append("inside")
        assert done == waits


# ---- meter ---------------------------------------------------------------------------------------------------------


def test_live_bytes_are_those_that_can_be_counted_by_hand() -> None:
    net, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 2 * WIDTH)), rows(1)
    with live_bytes() as meter:
        out = net(x)  # sigmoid's input is not saved
        assert meter.now == NBYTES + 2 * NBYTES
        view = out[3:].t()
        loss = out.sum()
        del out
        assert meter.now == NBYTES + 2 * NBYTES + 4, "a view keeps its storage"
        del view
        assert meter.now == NBYTES + 4
        meter.reset()
        loss.backward()
        del loss
        grads = sum(p.numel() * 4 for p in net.parameters())
        gc.collect()
        assert meter.now == grads
        assert meter.peak >= grads
        net.zero_grad(set_to_none=True)
        assert meter.now == 0
        with torch.no_grad():
            x.add_(net[0].weight.sum())
        assert meter.now == 0, "what was there before does not count"


def test_the_peak_is_that_of_all_that_was_alive_at_once() -> None:
    with live_bytes() as meter:
        a = torch.empty(1000)
        b = torch.empty(2000)
        del a
        c = torch.empty(500)
        del b, c
    assert (meter.now, meter.peak) == (0, 12000)


def test_checkpointed_blocks_save_their_inputs_only() -> None:
    net = blocks(6)
    with live_bytes() as meter:
        h = rows(1)  # not an operator's inside a plain block: counted as the first input
        first = meter.now
        for block in net:
            h = checkpoint(block, h, use_reentrant=False)
        assert meter.now - first == 6 * NBYTES, "five inputs and the output"
        loss = h.square().sum()
        del h
        plain_start = meter.now
        for_plain = rows(2)
        for block in net:
            for_plain = block(for_plain)
        # rows; then each block keeps gelu's input and output, both twice as wide, and its own output
        assert meter.now - plain_start == 7 * NBYTES + 6 * 4 * NBYTES
        del loss, for_plain
    assert ROWS * WIDTH * 4 == NBYTES


# ---- geometry ------------------------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Some view of numbered elements: sliced, permuted, expanded, with sides of one."""
    sides = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    tensor = torch.arange(torch.Size(sides).numel(), dtype=torch.int32).view(sides)
    for dim, side in enumerate(sides):
        start = draw(st.integers(0, side - 1))
        tensor = tensor.narrow(dim, start, draw(st.integers(1, side - start)))
        if draw(st.booleans()):
            tensor = tensor[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
    for _ in range(draw(st.integers(0, 2))):
        tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    return tensor.expand([draw(st.integers(1, 3)) if side == 1 else side for side in tensor.shape])


@settings(max_examples=100, deadline=None)
@given(views())
def test_any_view_is_restored_from_its_elements(view: Tensor) -> None:
    geometry = geometry_of(view)
    assert geometry is not None
    elements = geometry.elements(view)
    assert sorted(elements.tolist()) == sorted(set(view.flatten().tolist())), "each element once"
    back = geometry.restore(elements.clone())
    assert back.stride() == view.stride()
    assert torch.equal(back, view)


def test_overlapping_and_empty_tensors_have_no_geometry() -> None:
    base = torch.arange(20)
    for tensor in (base.unfold(0, 5, 1), base.as_strided((3, 3), (2, 1)), base[:0]):
        assert geometry_of(tensor) is None
    assert geometry_of(base.as_strided((3, 3), (3, 1))) is not None
