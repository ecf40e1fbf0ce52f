"""Checks that all ranks have the same configuration; raises on all of them, or the others would hang."""

from __future__ import annotations

import hashlib
import json

from lt_zero.comm.communicator import Comm
from lt_zero.common.errors import ConfigError, dotted
from lt_zero.config import ZeroConfig
from lt_zero.config.document import leaves
from lt_zero.config.show import resolved

# Keys that may differ between nodes or ranks.
_LOCAL = ("aio", "csv_monitor", "tensorboard", "wandb", "comet", "log_level", "disable_python_gc", "max_cpu_gb")
_LOCAL_NAMES = ("nvme_path", "pin_memory")
_SHOWN = 5  # maximum keys in an error


def check_same(config: ZeroConfig, comm: Comm) -> None:
    """Compare the configurations of all ranks. Collective.

    Raises:
        ConfigError: on all ranks, if they differ; shows the values of two of them.
    """
    if comm.world == 1:
        return
    values = {dotted(path): repr(value) for path, value in leaves(resolved(config))}
    values = {
        key: value
        for key, value in values.items()
        if key.partition(".")[0] not in _LOCAL and key.rpartition(".")[2] not in _LOCAL_NAMES
    }
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    digests = comm.host_gather(digest, "configuration")
    if len(set(digests)) == 1:
        return
    ranks = comm.host_gather(values, "configurations")
    other = next(rank for rank, found in enumerate(digests) if found != digests[0])
    raise ConfigError(
        f"The ranks have different configurations: {_difference(ranks[0], ranks[other], other)}. Give all ranks the "
        "same values: look for values that depend on the rank or the environment."
    )


def _difference(first: dict[str, str], second: dict[str, str], rank: int) -> str:
    keys = [key for key in sorted(first | second) if first.get(key) != second.get(key)]
    shown = [
        f"{key} is {first.get(key, 'missing')} on rank 0, {second.get(key, 'missing')} on rank {rank}" for key in keys
    ]
    more = f", and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + more
