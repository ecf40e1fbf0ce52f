"""Where a configuration's values are looked for without a Trainer: in an engine, its dtypes, its loss scale."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.common.errors import ConfigError
from lt_zero.core.engine.compute_copy import State
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.grad_reducer import GradReducer
from lt_zero.exchange.error_feedback import FeedbackExchange
from lt_zero.features import features_of
from lt_zero.kernels import library
from lt_zero.ops import TopK
from lt_zero.planning.limits import NotEnoughMemory
from lt_zero.training.lightning.precision import ZeroPrecision
from tests.support.models import VOCAB, Net, tokens
from tests.support.parity import full_values
from tests.support.pool import Pool

Config = dict[str, Any]  # dotted keys


@dataclass
class Lab:
    """What a look may use.

    Attributes:
        folder: empty; each look gets a new one.
        pool: processes, for what takes two ranks.
    """

    folder: Path
    pool: Pool


def nested(config: Config, folder: Path) -> dict[str, Any]:
    """Dotted keys as blocks; ``{folder}`` in a value is a folder of the test."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        *blocks, name = key.split(".")
        block = found
        for part in blocks:
            block = block.setdefault(part, {})
        block[name] = value.replace("{folder}", str(folder)) if isinstance(value, str) else value
    return found


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plugin_of(lab: Lab, config: Config) -> tuple[ZeroConfig, ZeroPrecision]:
    made, plugin = ZeroConfig.of(nested(config, lab.folder)), ZeroPrecision()
    plugin.configure(made)
    return made, plugin


class Pair(nn.Module):
    """Two layers that nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(VOCAB, VOCAB), nn.Linear(VOCAB, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Toy(Net):
    """With a pair of layers, a buffer at the root, and one in a module whose name can be kept."""

    _keep_in_fp32_modules = ("rotary",)

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.pair = Pair()
        self.register_buffer("table", torch.ones(3))
        self.rotary = nn.Module()
        self.rotary.register_buffer("angles", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.pair(super().forward(tokens))


def engine_of(lab: Lab, config: Config) -> Engine:
    torch.manual_seed(0)
    made, plugin = plugin_of(lab, config)
    return lt_zero.shard(Toy(), made, policy=plugin.policy)


def compiled(lab: Lab, config: Config) -> Any:
    """Names of the modules that are compiled, and arguments of ``torch.compile``."""
    with mock.patch.object(nn.Module, "compile", autospec=True) as compile_:
        names = {module: name for name, module in engine_of(lab, config).root.named_modules()}
    return [(names[call.args[0]], call.kwargs) for call in compile_.call_args_list]


def backward(engine: Engine) -> None:
    with torch.autocast("cpu", enabled=False):
        engine.root(tokens(0, 0, 0)).float().square().mean().backward()


# ---- units and buckets ---------------------------------------------------------------------------------------------


def sum_of_gradients(lab: Lab, config: Config) -> Any:
    """What sums gradients."""
    engine = engine_of(lab, config)
    name = engine.groups[0].sums.name
    engine.detach()
    return name


def threads(lab: Lab, config: Config) -> Any:
    """The threads of operations while an engine is followed."""
    engine = engine_of(lab, config)
    found = torch.get_num_threads()
    engine.detach()
    return found


def sharded(lab: Lab, config: Config) -> Any:
    """Whether optimizer states, gradients and parameters are."""
    return dataclasses.astuple(engine_of(lab, config).buckets[0].sharding)


def largest(lab: Lab, config: Config) -> Any:
    """Elements of the largest bucket that has several parameters."""
    return max([b.layout.numel for b in engine_of(lab, config).buckets if len(b.params) > 1], default=0)


def whole(lab: Lab, config: Config) -> Any:
    """The parameters that every rank has all of."""
    buckets = engine_of(lab, config).buckets
    return sorted(span.name for b in buckets if not b.sharding.params for span in b.layout.spans)


def count_whole(lab: Lab, config: Config) -> Any:
    return len(whole(lab, config))


def units(lab: Lab, config: Config) -> Any:
    """The units that are no blocks."""
    return [unit.name for unit in engine_of(lab, config).units if not unit.name.startswith("blocks")]


def gathered(lab: Lab, config: Config) -> Any:
    """How many units stay gathered after a forward."""
    engine = engine_of(lab, config)
    engine.root(tokens(0, 0, 0))
    return sum(all(not b.released for b in unit.sharded) for unit in engine.units)


def ahead(lab: Lab, config: Config) -> Any:
    """How many units are on their way while the first one runs, in the second forward."""
    engine, seen = engine_of(lab, config), []

    def look(module: nn.Module, args: Any) -> None:
        seen.append(sum(b.state is State.GATHERING for u in engine.units for b in u.buckets))

    engine.units[0].module.register_forward_pre_hook(look)
    with torch.no_grad():
        for _ in range(2):
            engine.root(tokens(0, 0, 0))
    engine.offload_manager.close()
    return seen[1]


def flying(lab: Lab, config: Config) -> Any:
    """Reductions that were launched when the first of them is waited for."""
    engine = engine_of(lab, config)
    seen = []
    land = GradReducer._finish_oldest

    def look(reducer: GradReducer) -> None:
        seen.append(len(reducer._in_flight))
        land(reducer)

    with mock.patch.object(GradReducer, "_finish_oldest", look):
        backward(engine)
    return max(seen)


def compressed(lab: Lab, config: Config) -> Any:
    """The parameters whose gradients are sent compressed."""
    return sorted(span.name for b in engine_of(lab, config).buckets if b.plan.compresses for span in b.layout.spans)


def codec(lab: Lab, config: Config) -> Any:
    (feature,) = features_of(plugin_of(lab, config)[0])
    found = feature.codec
    assert isinstance(found, TopK)
    return found.share, found.huffman


def _compresses(config: Config) -> bool | None:
    """Whether the first gradients are; None: none ever are."""
    made = lt_zero.shard(Toy(), ZeroConfig.of(nested(config, Path()))).exchange
    return made.compresses if isinstance(made, FeedbackExchange) else None


def _counts(config: Config) -> list[float]:
    """A buffer that counts a rank's forwards by its rank, after two steps."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    engine = lt_zero.shard(model, ZeroConfig.of(nested(config, Path())))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        model[1].num_batches_tracked += engine.world.rank
        optimizer.step()
    return [float(model[1].num_batches_tracked)]


def counts(lab: Lab, config: Config) -> Any:
    """Of two ranks."""
    return lab.pool.run(2, _counts, config)


def compresses(lab: Lab, config: Config) -> Any:
    """Of two ranks in one node."""
    return lab.pool.run(2, _compresses, config)[0]


# ---- dtypes --------------------------------------------------------------------------------------------------------


def weights(lab: Lab, config: Config) -> Any:
    """The dtype of the weights that forward uses."""
    return {short(bucket.dtype) for bucket in engine_of(lab, config).buckets}


def master(lab: Lab, config: Config) -> Any:
    return {short(bucket.weights.values().dtype) for bucket in engine_of(lab, config).buckets}


def accumulated(lab: Lab, config: Config) -> Any:
    """The dtype in which gradients are kept after a backward."""
    engine = engine_of(lab, config)
    backward(engine)
    return {short(bucket.grads.read().dtype) for bucket in engine.buckets if bucket.grads.accumulated}


def moments(lab: Lab, config: Config) -> Any:
    """The dtype of an optimizer's state after a step."""
    engine = engine_of(lab, config)
    optimizer = torch.optim.AdamW(engine.root.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    backward(engine)
    optimizer.step()
    return {short(state["exp_avg"].dtype) for state in optimizer.state.values()}


def small_step(lab: Lab, config: Config) -> Any:
    """Whether a step of less than half a unit of bf16 moves weights."""
    engine = engine_of(lab, config)
    with lt_zero.gathered(engine.root, write=True), torch.no_grad():
        for parameter in engine.root.parameters():
            parameter.fill_(1)
    optimizer = torch.optim.AdamW(engine.root.parameters(), lr=1e-3, weight_decay=0.0)
    lt_zero.ShardedOptimizer(engine, optimizer)
    backward(engine)
    optimizer.step()
    return any(bool((bucket.weights.values() != bucket.weights.values().round()).any()) for bucket in engine.buckets)


def kernel(lab: Lab, config: Config) -> Any:
    """Whether an AdamW is stepped by the native kernel: how many buckets it takes."""
    engine = engine_of(lab, config)
    return (
        len(
            lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(engine.root.parameters())).kernel_buckets(engine.buckets)
        )
        > 0
    )


def in_fp32(lab: Lab, config: Config) -> Any:
    """The modules with fp32 weights in forward."""
    buckets = engine_of(lab, config).buckets
    names = [span.name for b in buckets if b.dtype == torch.float32 for span in b.layout.spans]
    return sorted({name.rpartition(".")[0] for name in names})


def buffers(lab: Lab, config: Config) -> Any:
    return {name: short(value.dtype) for name, value in engine_of(lab, config).root.named_buffers()}


def inputs(lab: Lab, config: Config) -> Any:
    """The dtype in which a floating-point batch reaches forward."""
    return short(plugin_of(lab, config)[1].convert_input(torch.ones(1)).dtype)


def autocast(lab: Lab, config: Config) -> Any:
    """In which dtype a product of fp32 matrices is computed in forward."""
    with plugin_of(lab, config)[1].forward_context():
        return short((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)


def scales(*outcomes: bool) -> Any:
    """A look that notes the loss scale after each step; ``outcomes`` says which of them overflow."""

    def look(lab: Lab, config: Config) -> Any:
        gate, seen = plugin_of(lab, config)[1].loss_scale_controller, []
        assert gate.scaler is not None
        for overflow in outcomes:
            gate.scaler.update(overflow)
            seen.append(gate.scale)
        return seen or gate.scale

    return look


# ---- errors --------------------------------------------------------------------------------------------------------


def refusal(lab: Lab, config: Config) -> Any:
    """The key that an error is about; "" if the configuration is taken."""
    try:
        engine_of(lab, config)
    except ConfigError as error:
        return [problem.key for problem in error.problems]
    except NotEnoughMemory:
        return ["memory"]
    except ValueError as error:
        return [str(error).split("=")[0]]
    return []


def without_kernels(lab: Lab, config: Config) -> Any:
    """The key that an error is about where native kernels are missing."""
    with mock.patch.dict(os.environ, LT_ZERO_NATIVE="0"), mock.patch.object(library, "_loader", library.Loader()):
        return refusal(lab, config)


def trained(lab: Lab, config: Config) -> dict[str, Tensor]:
    """All weights after two steps."""
    engine = engine_of(lab, config)
    optimizer = torch.optim.AdamW(engine.root.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(2):
        backward(engine)
        optimizer.step()
        optimizer.zero_grad()
    found = full_values(engine)
    engine.offload_manager.close()
    return found
