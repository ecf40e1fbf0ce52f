"""``deepspeed.checkpointing``: recomputation that models call themselves, by torch's non-re-entrant checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

_configured = False
_KEYS = {
    "partition_activations": "partition_activations: true",
    "checkpoint_in_cpu": "cpu_checkpointing: true",
}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Check what is asked of ``checkpoint``; the block of the configuration is read by ``initialize``.

    ``contiguous_checkpointing``, ``num_checkpoints``, ``synchronize`` and ``profile`` have no effect: torch's allocator
    joins free memory, and profilers see each recomputation.

    Raises:
        ValueError: inputs are to be sharded or kept on the CPU, for which the engine recomputes blocks itself.
    """
    global _configured
    for name, given in (("partition_activations", partition_activations), ("checkpoint_in_cpu", checkpoint_in_cpu)):
        if given:
            raise ValueError(
                f"deepspeed.checkpointing.configure({name}=True): write activation_checkpointing: {{mode: full, "
                f"{_KEYS[name]}}} into the configuration of initialize, which then recomputes repeated blocks, and "
                "remove the calls of checkpoint."
            )
    _configured = True


def is_configured() -> bool:
    """True after ``configure``."""
    return _configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of ``function``, which runs again in backward in place of keeping what it computes."""
    return _checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Do nothing: recomputation keeps no buffers."""


def set_num_layers(nlayers: int) -> None:
    """Do nothing: recomputation keeps no buffers."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """``configure(partition_activations=...)``."""
    configure(partition_activations=partition_activation)
