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
    mine = {dotted(path): repr(value) for path, value in leaves(resolved(config))}
    mine = {
        key: value
        for key, value in mine.items()
        if key.partition(".")[0] not in _LOCAL and key.rpartition(".")[2] not in _LOCAL_NAMES
    }
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests = comm.host_gather(digest, "configuration")
    if len(set(digests)) == 1:
        return
    every = comm.host_gather(mine, "configurations")
    other = next(rank for rank, found in enumerate(digests) if found != digests[0])
    raise ConfigError(f"The ranks have different configurations: {_difference(every[0], every[other], other)}. {_WHY}")


_WHY = "Give all ranks the same values: look for values that depend on the rank or the environment."


def _difference(first: dict[str, str], second: dict[str, str], rank: int) -> str:
    keys = [key for key in sorted(first | second) if first.get(key) != second.get(key)]
    shown = [
        f"{key} is {first.get(key, 'not there')} on rank 0, {second.get(key, 'not there')} on rank {rank}"
        for key in keys
    ]
    more = f", and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + more
