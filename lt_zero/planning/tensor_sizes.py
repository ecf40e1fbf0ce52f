"""Numbers of tensor ranks that fit a machine, each with its fastest setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lt_zero.common.errors import ConfigError
from lt_zero.common.tables import bytes_cell, show
from lt_zero.config import ZeroConfig
from lt_zero.core.engine.storage_plan import DEVICE, HOST
from lt_zero.planning.estimate import Fit, Machine, cheapest
from lt_zero.planning.sizes import Model


def with_tensor_ranks(config: ZeroConfig, size: int) -> ZeroConfig:
    """``config`` with so many tensor ranks."""
    return ZeroConfig.of(config, overrides=[f"tensor_parallel.autotp_size={size}"])


def fits_by_size(
    model: Model, machine: Machine, config: ZeroConfig, world: int, **options: Any
) -> dict[int, Fit | str]:
    """The result of ``cheapest`` for each number of tensor ranks in a node, or the reason why the model cannot be cut.

    Arguments are those of ``cheapest``. Numbers that leave a node's last tensor ranks on another one are left out.
    """
    together = math.gcd(world, machine.ranks)
    found: dict[int, Fit | str] = {}
    for size in (n for n in range(1, together + 1) if together % n == 0):
        try:
            found[size] = cheapest(model, machine, with_tensor_ranks(config, size), world, **options)
        except ConfigError as error:
            found[size] = error.problems[0].message
    return found


def sizes_table(found: Mapping[int, Fit | str], world: int, console: Console) -> Table:
    """Print, and return, which numbers of tensor ranks fit."""
    table = Table(title="Tensor ranks that fit", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("tensor", "data", "GPU / rank", "host / node"):
        table.add_column(name, justify="right")
    table.add_column("fastest setting", overflow="fold")
    for size, fit in found.items():
        numbers, needs, said = [str(size), str(world // size)], ["-", "-"], fit if isinstance(fit, str) else "none fits"
        if isinstance(fit, Fit) and fit.setting is not None and fit.forecast is not None:
            nbytes, said = (fit.forecast.rank(DEVICE), fit.forecast.node(HOST)), str(fit.setting)
            needs = [bytes_cell(each) for each in nbytes]
        table.add_row(*numbers, *needs, said)
    return show(table, console)
