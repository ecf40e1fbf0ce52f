"""The facts, besides the configuration of the model and its data, on which the bits of a run depend.

Checkpoints have them. A resumed run may have another number of ranks, and goes on with the same bits if all of these
facts are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lt_zero.common import accelerator
from lt_zero.common.errors import CheckpointError, ConfigError
from lt_zero.common.users_code import warn
from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Handle, Undo

KEY = "reproducible.virtual_ranks"
THREADS = "reproducible.threads"


def hardware_of(device: torch.device) -> str:
    """The kind of processor that chooses between implementations of an operation: of a GPU its name."""
    if accelerator.is_accelerator(device):
        return accelerator.name(device)
    return str(torch.backends.cpu.get_cpu_capability())


def sizes_of(config: Any) -> dict[str, int]:
    """The numbers of ranks that have parts of one model, or of its rows, by their keys."""
    return {
        "tensor_parallel.autotp_size": config.tensor_parallel.autotp_size,
        "pipeline.stages": config.pipeline.ranks,
        "sequence_parallel_size": config.sequence_parallel_size,
        "expert_parallel.autoep_size": config.expert_parallel.ranks,
    }


def check_deterministic(device: torch.device, virtual_ranks: int) -> None:
    """Raise ConfigError if operations of a GPU may add up in the order in which its threads arrive."""
    if accelerator.is_accelerator(device) and not torch.are_deterministic_algorithms_enabled():
        raise ConfigError.about(
            KEY,
            f"{KEY}={virtual_ranks}, and operations of a GPU may give other bits each time. Use "
            "Trainer(deterministic=True), or call torch.use_deterministic_algorithms(True) before the model is set up.",
        )


class Contract:
    """The facts of this run. A state of checkpoints.

    Args:
        virtual_ranks: of the configuration.
        threads: of the configuration.
        device: that computes.
        sizes: the numbers of ranks that have parts of one model, or of its rows, by their keys.
    """

    def __init__(
        self, virtual_ranks: int, threads: int, device: torch.device, sizes: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._keys = {KEY: virtual_ranks, THREADS: threads, **sizes}
        self._device = device

    def _others(self) -> dict[str, Any]:
        """The facts that no key of the configuration says, by what they are called in messages."""
        return {
            "torch": str(torch.__version__),
            "the processor": hardware_of(self._device),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        }

    def state_dict(self) -> dict[str, Any]:
        """All facts, as plain values."""
        return {"keys": dict(self._keys), "others": self._others()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the facts of the run that has saved ``state`` with those of this one.

        Raises:
            CheckpointError: a key has another value.
        """
        for name, value in self._keys.items():
            # Checkpoints from before there were sizes are of runs without parts of models.
            saved = state["keys"].get(name, None if name in (KEY, THREADS) else 1)
            if saved != value:
                raise CheckpointError(
                    f"{name}={value}, and the checkpoint was written with {saved}: the run would not go on with the "
                    f"bits that it would have had. Set {name}={saved}, or begin a new run with its weights "
                    "(checkpoint.load_module_only=true)."
                )
        others = state["others"]
        found = {name: (others.get(name), now) for name, now in self._others().items() if others.get(name) != now}
        if found:
            text = ", ".join(f"{name} ({was} then, {now} now)" for name, (was, now) in found.items())
            warn(f"{KEY}: a run is resumed with other facts than it was saved with: {text}. Its bits may differ.")


class _Threads:
    """The number of threads of operations on a CPU while engines are followed."""

    def __init__(self) -> None:
        self._engines = 0
        self._before = 0

    def use(self, threads: int) -> None:
        """Use so many, until ``give_back`` was called as often."""
        if self._engines == 0:
            self._before = torch.get_num_threads()
        self._engines += 1
        torch.set_num_threads(threads)

    def give_back(self) -> None:
        """Use as many as before the first ``use``, if this ends the last one."""
        self._engines -= 1
        if self._engines == 0:
            torch.set_num_threads(self._before)


_threads = _Threads()


def use_threads(engine: Engine, threads: int) -> Handle | None:
    """Let operations use so many threads until the handle is removed, or ``engine`` is dropped; None: it has a GPU."""
    if accelerator.is_accelerator(engine.device):
        return None
    _threads.use(threads)
    ends = weakref.finalize(engine, _threads.give_back)
    ends.atexit = False
    undo = Undo()
    undo.also(ends)
    return undo
