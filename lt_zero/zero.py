"""``lt_zero.Init``: modules are built with their parameters sharded; ``lt_zero.GatheredParameters``.

Scripts for DeepSpeed find both as ``zero.Init`` and ``zero.GatheredParameters``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from lt_zero.comm.communicator import Comm
from lt_zero.comm.process_groups import init_distributed
from lt_zero.config.load import examine
from lt_zero.engine.full_params import gathered
from lt_zero.engine.materialize import ConstructionSharder


class Init:
    """Context in which modules, the same on every rank, are built with their parameters sharded over all ranks.

    So no rank ever holds the whole model. Without effect below stage 3, with one rank, or if not ``enabled``.

    Args:
        config_dict_or_path: the configuration of ``initialize``; without one parameters are sharded.
        config: the same.
        dtype: of the parameters; default: torch's.
        enabled: whether anything is done.
    """

    def __init__(
        self,
        *,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
    ) -> None:
        given = config if config is not None else config_dict_or_path
        loaded = examine(given, default_stage=3 if given is None else None, for_run=True)
        made = loaded.usable()
        loaded.announce()
        self._dtype, self._before = dtype, torch.float32
        self._sharder: AbstractContextManager[Any] = nullcontext()
        if enabled and made.zero_optimization.stage == 3:
            init_distributed()
            device = (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
            comm = Comm.for_world(device)
            if comm.world > 1:
                comm.configure(made)
                self._sharder = ConstructionSharder(comm, made.zero_optimization.stage3_param_persistence_threshold)

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        self._sharder.__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self._before)
        self._sharder.__exit__(*error)


def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: nn.Module | Parameter | Iterable[Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """``lt_zero.gathered``, with DeepSpeed's arguments. Collective.

    Args:
        params: a parameter, several, or a module.
        modifier_rank: whose changes are kept; None: none are.
        fwd_module: not needed here.
        enabled: False: do nothing.

    Raises:
        ValueError: ``modifier_rank`` is another rank than 0.
    """
    if modifier_rank not in (None, 0):
        raise ValueError(
            f"modifier_rank={modifier_rank}: the values of rank 0 are kept. Write 0, and change them there."
        )
    return gathered(params, write=modifier_rank == 0) if enabled else nullcontext()
