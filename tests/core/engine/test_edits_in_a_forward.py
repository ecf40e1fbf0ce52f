"""Forwards that edit their own weights, as data-dependent initialization and constraints do: as in one process."""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lt_zero
from tests.support.matrix import only_rows
from tests.support.models import Block, Net, next_token_loss, tokens
from tests.support.parity import OPTIMIZERS, RELEASE, Case, check, config_of, full_values
from tests.support.pool import Pool


class Edits(Block):
    """Edits its weights from the moment when it gets a bound.

    Attributes:
        how: it is written.
        bound: of all elements; 0: there is none.
    """

    how = "data"

    def __init__(self, checkpointed: str = "") -> None:
        super().__init__(checkpointed=checkpointed)
        self.bound = 0.0
        self.register_buffer("initialized", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            self.down.bias.data.copy_(torch.linspace(-1, 1, len(self.down.bias)))
            self.initialized.fill_(True)
        if self.bound > 0:
            for weight in (self.up.weight, self.down.bias):
                if self.how == "data":
                    weight.data.clamp_(-self.bound, self.bound)
                elif self.how == "assigned":
                    weight.data = weight.data.clamp(-self.bound, self.bound)
                else:
                    with torch.no_grad():
                        weight.clamp_(-self.bound, self.bound)
        return super().forward(x)


def _model(how: str, checkpointed: str = "") -> Net:
    model = Net(depth=0, checkpointed=checkpointed)
    model.blocks = nn.ModuleList(Edits() for _ in range(2))
    for block in model.blocks:
        block.how = how
    return model


def _tighten(model: Any, step: int) -> None:
    """The bound bites after the second step, and more with each."""
    for block in model.blocks:
        block.bound = 0.3 / step if step > 0 else 0.0


def _kept(how: str, optimizer: str, zero: dict[str, Any]) -> None:
    checkpointed = "outside" if how == "assigned" else ""
    check(
        Case(lambda: _model(how, checkpointed), next_token_loss, 3, optimizer, 4, zero=zero, after_step=_tighten),
    )
    _kept_without_grad(optimizer, zero, torch.no_grad if how == "data" else torch.inference_mode)


def _kept_without_grad(optimizer: str, zero: dict[str, Any], context: Any) -> None:
    """A forward without gradients initializes the model, whose buffers say that it did."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = _model("data")
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(3, zero))
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (model, reference)]
    lt_zero.ShardedOptimizer(engine, optimizers[0])
    with context():
        outputs = [m(tokens(9, 0, 0)) for m in (model, reference)]
        torch.testing.assert_close(outputs[0], outputs[1])
    for step in range(3):
        next_token_loss(model, step, 0, rank).backward()
        for other in range(world):
            (next_token_loss(reference, step, 0, other) / world).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


ROWS = [("data", "sgd", RELEASE), ("assigned", "adamw", {}), ("counted", "adamw", RELEASE)]
EVERY = itertools.product(["data", "assigned", "counted"], ["sgd", "adamw"], [RELEASE, {}])


@pytest.mark.parametrize(("how", "optimizer", "zero"), only_rows(ROWS, EVERY))
def test_what_a_forward_writes_to_its_weights_is_kept(
    pool: Pool, how: str, optimizer: str, zero: dict[str, Any]
) -> None:
    pool.run(2, _kept, how, optimizer, zero)


def _digits() -> None:
    """In 16 bits elements that were not edited keep the digits that the compute copy does not show."""
    torch.manual_seed(0)
    model = _model("data")
    engine = lt_zero.shard(model, config_of(3, dtype=torch.bfloat16))
    before = full_values(engine)["blocks.1.up.weight"]
    model.blocks[1].bound = 0.2
    with torch.no_grad():
        model(tokens(0, 0, 0))
    after = full_values(engine)["blocks.1.up.weight"]
    bound = torch.tensor(0.2).bfloat16()
    edited = before.bfloat16().abs() > bound
    assert edited.any()
    assert (after[edited].abs() == bound.float()).all()
    assert torch.equal(after[~edited], before[~edited])
    assert not torch.equal(before, before.bfloat16().float())


def _apart() -> None:
    """Ranks that write other values all raise an error that names the parameter, before a step is taken."""
    model = _model("data")
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    model.blocks[1].bound = 0.01 * (1 + dist.get_rank())
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    with pytest.raises(RuntimeError, match=r"a forward gave to parameter 'blocks\.1\.\w+\.\w+' is .* on rank 0"):
        optimizer.step()


def _unseen() -> None:
    """A write that neither a version nor ``p.data`` shows is found in the first forwards, with gradients or without."""
    model = _model("data")
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    norm = model.blocks[0].up
    handle = norm.register_forward_pre_hook(lambda module, args: module.weight.detach().numpy().fill(0.5))
    with torch.no_grad():
        model(tokens(0, 0, 0))
    handle.remove()
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.weight'.*modified in place"):
        optimizer.step()


class Live(TorchDispatchMode):
    """Measures the bytes of the storages that operators have seen, as long as these live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        found = [reference() for reference in self._storages.values()]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in found if storage is not None))
        return result


def _memory() -> None:
    """The peaks of forwards without edits, and of as many that edit, are less than a unit's weights apart."""
    model = _model("data")
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    peaks = []
    for bound in (0.0, 0.2):
        for block in model.blocks:
            block.bound = bound
        live = Live()
        for step in range(4):
            with torch.no_grad(), live:
                model(tokens(step, 0, 0))
        peaks.append(live.peak)
    largest = max(bucket.compute.flat.numel() * bucket.compute.flat.itemsize for bucket in engine.buckets)
    assert 0 < peaks[1] - peaks[0] <= largest, (peaks, largest)


def _kept_and_refused() -> None:
    _memory()
    _digits()
    _unseen()
    _apart()


def test_what_cannot_be_kept_is_an_error(pool: Pool) -> None:
    pool.run(2, _kept_and_refused)
