"""Models with parts that torch.jit has compiled, as RWKV has them by default: they train as in one process.

Such a part takes no hooks, its tables of parameters and buffers are no dicts, and what is inside is called in C++.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, single_trainer, weights
from tests.support.models import VOCAB
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

WIDTH = 6
Compiled: Any = torch.jit.ScriptModule  # torch has no annotations for it
compiled_method: Any = torch.jit.script_method


class TimeMix(Compiled):  # type: ignore[misc]
    """Is called in Python; two methods of it are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(1, 1, WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.register_buffer("decay", torch.linspace(0.1, 0.9, WIDTH))

    @compiled_method
    def before(self, x):  # type: ignore[no-untyped-def]
        shifted = torch.nn.functional.pad(x, [0, 0, 1, -1])
        mixed = x + (shifted - x) * self.mix
        return torch.sigmoid(self.key(mixed)), self.value(mixed)

    @compiled_method
    def after(self, x):  # type: ignore[no-untyped-def]
        return self.norm(x.flatten(0, 1)).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.before(x)
        made: Tensor = self.after(torch.cumsum(key * value * self.decay, 1))
        return made


class ChannelMix(Compiled):  # type: ignore[misc]
    """All of it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    @compiled_method
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.down(torch.relu(self.up(x)) ** 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.time, self.channel = TimeMix(), ChannelMix()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(self.first(x))
        made: Tensor = x + self.channel(self.second(x))
        return made


class Loss(nn.Module):
    """Has no parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, logits: Tensor, wanted: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) * self.scale


def network() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Sequential(Block(), Block()), nn.Linear(WIDTH, VOCAB))


class Recurrent(GPT):
    def __init__(self, world: int = 1, optimizer: str = "sgd", plain: bool = False) -> None:
        super().__init__(world, optimizer)
        torch.manual_seed(4)
        del self.net
        self.net = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)) if plain else network()
        self.criterion = torch.jit.script(Loss())

    def loss(self, batch: Tensor) -> Tensor:
        made: Tensor = self.criterion(self.net(batch) * self.temperature.mean(0), batch.roll(-1, 1))
        return made


def _trained(stage: int, optimizer: str, config: dict[str, Any], plain: bool) -> Any:
    trainer = sharded_trainer(stage, config=config, max_epochs=1)
    trainer.fit(Recurrent(dist.get_world_size(), optimizer, plain))
    return weights(trainer)


def _compiled_at(stage: int, optimizer: str, config: dict[str, Any]) -> Any:
    """The weights of a run with compiled parts, and of one at stage 3 with a compiled loss."""
    whole = _trained(stage, optimizer, config, False), _trained(3, optimizer, {}, True)
    _traced_model()
    _sharded_parts()
    _loaded()
    return whole


def _traced_model() -> None:
    """A whole model that is traced is one unit at stage 3. Copies of it cannot be trained, so it is made anew."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    torch.manual_seed(0)
    model = torch.jit.trace(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), torch.ones(2, 3))
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    optimizer = lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    wanted = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):  # torch optimizes what it traced from the third call on
        rows = torch.rand(2 * dist.get_world_size(), 3, generator=torch.Generator().manual_seed(step))
        plain(rows).square().mean().backward()
        model(rows.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        for each in (wanted, optimizer):
            each.step()
            each.zero_grad()
    for value, parameter in zip(full_values(engine).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, parameter.detach(), rtol=1e-5, atol=1e-6)


def _sharded_parts() -> None:
    with pytest.raises(TypeError, match=r"'1\.0\.time' is compiled by torch\.jit\.script.*stages 0 to 2"):
        lt_zero.shard(network(), config_of(3))
    with pytest.raises(TypeError, match=r"The model is compiled by torch\.jit\.script"):
        lt_zero.shard(torch.jit.script(nn.Linear(3, 3)), config_of(2))
    with torch.device("meta"):
        empty = network()
    with pytest.raises(RuntimeError, match=r"1\.0\.time .* is compiled by torch\.jit"):
        lt_zero.shard(empty, config_of(2), torch.device("cpu"))
    small = network()
    lt_zero.shard(small, config_of(3, {"stage3_param_persistence_threshold": 10**6}))  # nothing is sharded
    small(torch.zeros(1, 3, dtype=torch.long)).sum().backward()


def _loaded() -> None:
    """Loaded values reach the fp32 master weights of compiled parts, too, and a frozen part has none."""
    net = network()
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(VOCAB, VOCAB)).eval()))
    net.append(frozen)
    engine = lt_zero.shard(net, config_of(2, dtype=torch.bfloat16))
    saved = {name: torch.rand(p.shape) for name, p in net.named_parameters()}
    net.load_state_dict(saved, strict=False)
    for name, value in full_values(engine).items():
        assert torch.equal(value, saved[name]), name


@pytest.mark.parametrize(
    ("stage", "optimizer", "config"),
    [
        (2, "sgd", {"activation_checkpointing": {"modules": ["Block"]}}),
        pytest.param(0, "sgd", {}, marks=pytest.mark.slow),
        pytest.param(1, "adamw", {}, marks=pytest.mark.slow),
        pytest.param(2, "adamw", {}, marks=pytest.mark.slow),
    ],
)
def test_compiled_parts_train_as_in_one_process(pool: Pool, stage: int, optimizer: str, config: dict[str, Any]) -> None:
    (got, lossy), *_ = pool.run(2, _compiled_at, stage, optimizer, config)
    for found, plain in ((got, False), (lossy, True)):
        trainer, module = single_trainer(max_epochs=1), Recurrent(1, optimizer, plain)
        trainer.fit(module)
        assert_same(found, {name: value.numpy() for name, value in module.state_dict().items()})
