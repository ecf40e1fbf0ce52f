"""Where values of the ``tensor_parallel`` block are looked for: in the plan of a model on two ranks."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.common.errors import ConfigError
from lt_zero.config.applicability import Face
from lt_zero.parallel.mesh import ParallelSizes
from lt_zero.parallel.plan import parallelize as cut
from lt_zero.parallel.sequence.ranks import SequenceRanks
from lt_zero.training.session import Session
from tests.support.parallel_nets import Net, batch, parallelize
from tests.support.reach_engine import Config, Lab, nested

# In place of transformers, which need not be installed.
PLANS = types.SimpleNamespace(CONFIG_MAPPING={"mine": types.SimpleNamespace(base_model_tp_plan={"up": "colwise_rep"})})


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(6, 4), nn.Linear(4, 8)
        self.down, self.head = nn.Linear(8, 4), nn.Linear(4, 6)


def _plan(config: dict[str, Any]) -> dict[str, str] | str:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tensor",))
    try:
        with mock.patch.dict(sys.modules, {"transformers": PLANS}):
            return {row.pattern: row.style for row in cut(Small(), mesh, ZeroConfig.of(config))}
    except ConfigError as error:
        return error.problems[0].key


def plan(lab: Lab, config: Config) -> Any:
    """The styles by patterns, or the key that an error is about."""
    return lab.pool.run(2, _plan, nested(config, lab.folder))[0]


def sizes(lab: Lab, config: Config) -> Any:
    """Data and tensor ranks of four, or the key that an error is about."""
    try:
        found = ParallelSizes.of(ZeroConfig.of(nested(config, lab.folder)), 4)
    except ConfigError as error:
        return error.problems[0].key
    return found.data, found.tensor


def experts(lab: Lab, config: Config) -> Any:
    """How many of four data ranks share experts."""
    return ParallelSizes.of(ZeroConfig.of(nested(config, lab.folder)), 4).expert


def _sequence(config: dict[str, Any]) -> tuple[str, int, list[int]]:
    session = Session(Face.LOOP)
    session.join(ZeroConfig.of(config), torch.device("cpu"))
    ranks = session.division.row_ranks
    assert isinstance(ranks, SequenceRanks)
    found = ranks.method, ranks.parts, ranks.positions(4).tolist()
    session.loss_scale = mock.Mock()
    session.end()
    return found


def sequence(lab: Lab, config: Config) -> Any:
    """The method of attention, from how many parts keys are gathered, and the first rank's places of 4."""
    return lab.pool.run(2, _sequence, nested(config, lab.folder))[0]


def _split(config: dict[str, Any]) -> int | None:
    from lt_zero.features.activation_checkpointing import stores
    from lt_zero.features.activation_checkpointing.checkpointing import installed
    from lt_zero.features.activation_checkpointing.partitioned import PartitionedStore

    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tensor",))
    model = parallelize(Net(), mesh)
    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 3}
    with mock.patch.object(stores, "_MIN_BYTES", 1):
        engine, _, _, _ = lt_zero.initialize(model=model, config={**keys, **config})
        engine.backward(engine(batch(0, 0)).square().mean())
    found = installed(engine.engine)
    assert found is not None
    return found.store.split if isinstance(found.store, PartitionedStore) else None


def split(lab: Lab, config: Config) -> Any:
    """Of how many saved inputs each of two tensor ranks keeps a part; None: none may be split."""
    return lab.pool.run(2, _split, nested(config, lab.folder))[0]
