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

from lt_zero import ZeroConfig
from lt_zero.common.errors import ConfigError
from lt_zero.parallel.mesh import ParallelSizes
from lt_zero.parallel.plan import parallelize
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
            return {row.pattern: row.style for row in parallelize(Small(), mesh, ZeroConfig.of(config))}
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
