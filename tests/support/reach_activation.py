"""Where the values of ``activation_checkpointing`` are looked for: in an engine's modules, and in a backward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from lt_zero.common import accelerator
from lt_zero.common.compat.of_dispatch import DispatchMode
from tests.support.models import tokens
from tests.support.reach_engine import Config, Lab, engine_of


def installed(engine: Any) -> Any:
    # Here: without activation checkpointing other keys are looked for all the same.
    from lt_zero.features.activation_checkpointing.checkpointing import installed

    return installed(engine)


class Operators(DispatchMode):
    """Counts the operators that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.counts[op.name()] = self.counts.get(op.name(), 0) + 1
        return op(*args, **kwargs)


def recomputed(loss: torch.Tensor) -> list[str]:
    """Which kinds of forward operators run in the backward of ``loss``: products of linear layers, activations."""
    with Operators() as seen:
        loss.backward()
    return [kind for kind, name in (("products", "aten::addmm"), ("cheap", "aten::gelu")) if name in seen.counts]


def again(lab: Lab, config: Config) -> Any:
    return recomputed(engine_of(lab, config).root(tokens(0, 0, 0)).square().mean())


def checkpointed(lab: Lab, config: Config) -> Any:
    """Names of the modules."""
    found = installed(engine_of(lab, config))
    return [name for name, _ in found.found.chosen] if found else []


def chosen(lab: Lab, config: Config) -> Any:
    """Names of the modules that are recomputed after two steps."""
    engine = engine_of(lab, config)
    found = installed(engine)
    assert found is not None
    for _ in range(2):
        engine.root(tokens(0, 0, 0)).square().mean().backward()
        for listener in engine.after_step:
            listener()
    return [forward.name for forward in found._forwards if forward.recomputes]


def _stored(lab: Lab, config: Config) -> Any:
    """The store of an engine whose device has memory of its own, after a forward, and its loss; None without one."""
    from lt_zero.features.activation_checkpointing import stores

    with (
        mock.patch.object(accelerator, "_apart", True),
        mock.patch.object(stores, "_MIN_BYTES", 1),
    ):
        engine = engine_of(lab, config)
        loss = engine.root(tokens(0, 0, 0)).square().mean()
    found = installed(engine)
    return (found.store if found else None), loss


def place(lab: Lab, config: Config) -> Any:
    """Where saved inputs are kept."""
    store, _ = _stored(lab, config)
    if store is None:
        return None
    return "files" if store.storage.files is not None else "host" if store.storage.apart else "device"


def slots(lab: Lab, config: Config) -> Any:
    """How many saved inputs the block of memory has room for, beside the spare ones."""
    from lt_zero.features.activation_checkpointing import checkpointing, reuse

    store, loss = _stored(lab, config)
    stats = store.stats()
    assert loss.requires_grad
    each = reuse.rounded(stats["bytes"] // stats["stored"], reuse._ALIGN)
    return stats["memory"] // each - checkpointing._SPARE


def waits(lab: Lab, config: Config) -> Any:
    """How often the device is waited for around the three blocks, in forward and in backward."""
    engine = engine_of(lab, config)
    boundary = engine and installed(engine).boundary
    with mock.patch.object(accelerator, "synchronize") as synchronize:
        if boundary is not None:
            boundary._gpu = True
        engine.root(tokens(0, 0, 0)).square().mean().backward()
    return synchronize.call_count


def timed(lab: Lab, config: Config) -> Any:
    """Modules of which times are known after a backward."""
    engine = engine_of(lab, config)
    engine.root(tokens(0, 0, 0)).square().mean().backward()
    boundary = installed(engine).boundary
    return list(boundary.times) if boundary else []
