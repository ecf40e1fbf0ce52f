"""Private APIs of Lightning. Checked on lightning 2.6."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning.pytorch.plugins import HalfPrecision  # only the strategy imports lightning at run time


def is_interactive() -> bool:
    """True if Lightning takes this process for an interactive one: a notebook, or a Python prompt."""
    from lightning.fabric.utilities import imports

    return bool(imports._IS_INTERACTIVE)


def announce_device(root: torch.nn.Module, device: torch.device) -> None:
    """Let the modules of Lightning in ``root`` report ``device`` as theirs, without moving anything."""
    for module in root.modules():
        if isinstance(getattr(module, "_device", None), torch.device):
            vars(module)["_device"] = device


def announce_compute_dtype(plugin: HalfPrecision, dtype: torch.dtype) -> None:
    """Tell Lightning's ThroughputMonitor in which dtype ``plugin`` computes.

    The monitor knows Lightning's own plugins only and reads this attribute of HalfPrecision, which also casts inputs
    to it.
    """
    plugin._desired_input_dtype = dtype


def asked_precision() -> str | None:
    """The ``precision`` with which a Trainer or Fabric is being made now; None if it has none, or none is being made.

    On a CPU Lightning replaces "16-mixed" by "bf16-mixed", and afterwards nothing tells what was asked for. So this
    reads the argument in the frame of Lightning's connector.
    """
    frame = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals if frame.f_code.co_name == "__init__" else {}
        if type(own.get("self")).__name__ in ("_AcceleratorConnector", "_Connector"):
            asked = own.get("precision")
            return None if asked is None else {"16": "16-mixed"}.get(str(asked), str(asked))
        frame = frame.f_back  # type: ignore[assignment]
    return None


def override_dtype(module: torch.nn.Module, dtype: torch.dtype) -> list[tuple[torch.nn.Module, torch.dtype]]:
    """Set ``dtype`` of ``module`` and its submodules where they are LightningModules; returns the previous dtypes.

    ``module.to(dtype)`` would cast sharded parameters.
    """
    from lightning.pytorch import LightningModule

    found = [child for child in module.modules() if isinstance(child, LightningModule)]
    before = [(child, child.dtype) for child in found]
    for child in found:
        child._dtype = dtype
    return before  # type: ignore[return-value]


def is_plain_closure(closure: Any) -> bool:
    """True if ``closure`` is that of Lightning's automatic optimization: one training step, one backward, nothing
    after it.
    """
    cls = type(closure)
    return cls.__name__ == "Closure" and cls.__module__ == "lightning.pytorch.loops.optimization.automatic"


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Let ``LightningModule.device_mesh`` be ``mesh``, as Lightning's ModelParallelStrategy does."""
    module._device_mesh = mesh


class SignalOverride:
    """Replaces Lightning's reactions to SIGTERM and SLURM's requeue signal.

    Handlers of Lightning and of users stay registered; only Lightning's own reaction changes.

    Args:
        trainer: must not have registered handlers yet.
        on_stop, on_requeue: called in signal handlers in place of Lightning's reaction.
    """

    def __init__(self, trainer: Any, on_stop: Callable[[], object], on_requeue: Callable[[], object]) -> None:
        self._connector = connector = trainer._signal_connector
        self._cls = cls = type(connector)
        self._signum = signal.SIGUSR1
        held = self

        class Connector(cls):  # type: ignore[misc, valid-type]
            def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
                launcher = self.trainer.strategy.launcher
                if launcher is not None and not self.received_sigterm:
                    launcher.kill(signum)  # the child processes
                on_stop()

            def _slurm_sigusr_handler_fn(self, signum: Any, frame: Any) -> None:
                held._signum = signum
                on_requeue()

            def __reduce__(self) -> Any:  # copies are plain connectors of Lightning
                return _bare_object, (cls,), self.__getstate__()

        connector.__class__ = Connector

    def give_back(self) -> None:
        """Restore Lightning's reactions."""
        self._connector.__class__ = self._cls

    def stop(self) -> None:
        """Make Lightning's loops stop at their next check for SIGTERM."""
        self._connector.received_sigterm = True

    def requeue(self) -> None:
        """Run Lightning's reaction to the requeue signal: finish loggers, save, requeue the job. Collective."""
        self._cls._slurm_sigusr_handler_fn(self._connector, self._signum, None)


def _bare_object(cls: Any) -> Any:
    return cls.__new__(cls)


def counts_batches(frame: FrameType) -> bool:
    """True if ``frame`` is where Lightning adds up the lengths of the ranks' loaders, which may not all be 0."""
    return frame.f_code.co_name == "has_len_all_ranks" and frame.f_globals.get("__name__") == _COUNTS_BATCHES


_COUNTS_BATCHES = "lightning.pytorch.utilities.data"


def logged_step(trainer: Any) -> int:
    """The step under which Lightning logs: the number of batches that ended with an optimizer step."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


# Lightning opens every checkpoint with this function, and modules import it under names of their own. The last one has
# ``load_from_checkpoint``.
_LOAD = ("lightning.fabric.utilities.cloud_io", "_load")
_LOADING = (_LOAD, ("lightning.fabric.plugins.io.torch_io", "pl_load"), ("lightning.pytorch.core.saving", "pl_load"))

_LOADS_WEIGHTS = ("lightning.pytorch.strategies.strategy", "Strategy", "load_model_state_dict")
_MAKES_MODULE = ("lightning.pytorch.core.saving", "_load_state")


def open_first(opened: Callable[[Any, Any, bool | None, bool], Any]) -> None:
    """Let Lightning ask ``opened`` for a checkpoint before it opens a file. Idempotent.

    Args:
        opened: called for what is no local file, with the path, the ``map_location``, ``weights_only``, and whether
            ``load_from_checkpoint`` asks, for a module; returns the checkpoint, or None: Lightning goes on as before.

    A version of Lightning without that function, or that opens checkpoints elsewhere, too, goes on as before.
    """
    known = getattr(sys.modules.get(_LOAD[0]), _LOAD[1], None)
    if known is None or getattr(known, "asks_first", False):
        return

    def asking(for_module: bool) -> Any:
        @functools.wraps(known)
        def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
            if isinstance(path_or_url, (str, os.PathLike)) and not os.path.isfile(path_or_url):
                found = opened(path_or_url, map_location, weights_only, for_module)
                if found is not None:
                    return found
            return known(path_or_url, map_location, weights_only)

        load.asks_first = True  # type: ignore[attr-defined]
        return load

    for module, name in _LOADING:
        if getattr(sys.modules.get(module), name, None) is known:
            setattr(sys.modules[module], name, asking(module == _LOADING[-1][0]))


def load_within(context: Callable[[Any, dict[str, Any]], AbstractContextManager[None]]) -> None:
    """Let ``load_from_checkpoint`` make its module inside of ``context(cls, checkpoint)``. Idempotent.

    A version of Lightning without that function, or that loads in another way, goes on as before.
    """
    module, name = _MAKES_MODULE
    known = getattr(sys.modules.get(module), name, None)
    if known is None or getattr(known, "has_context", False):
        return

    @functools.wraps(known)
    def load(cls: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with context(cls, checkpoint):
            return known(cls, checkpoint, *args, **kwargs)

    load.has_context = True  # type: ignore[attr-defined]
    setattr(sys.modules[module], name, load)


def rename_weights(renamed: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Let strategies that load a checkpoint's weights into a module load ``renamed(module, checkpoint)``. Idempotent.

    A strategy with a loading of its own (FSDP, this package's) goes on as before, and so does a version of Lightning
    without this method.
    """
    module, name, method = _LOADS_WEIGHTS
    cls = getattr(sys.modules.get(module), name, None)
    known = getattr(cls, method, None)
    if cls is None or known is None or getattr(known, "renames", False):
        return

    @functools.wraps(known)
    def load(strategy: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return known(strategy, renamed(strategy.lightning_module, checkpoint), *args, **kwargs)

    load.renames = True  # type: ignore[attr-defined]
    setattr(cls, method, load)


def module_from_checkpoint(cls: Any, checkpoint: dict[str, Any], strict: bool | None, kwargs: dict[str, Any]) -> Any:
    """``cls.load_from_checkpoint`` of a loaded checkpoint."""
    from lightning.pytorch.core.saving import _load_state

    return _load_state(cls, checkpoint, strict=strict, **kwargs)
