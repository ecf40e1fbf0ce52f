"""Checkpoints of a run: their content, and their writing, perhaps in the background.

Note [Life of a save]
    A face collects weights and optimizers' states as fragments, without copies, and ``beside`` what else training needs
    to go on. ``Saver.save`` writes all of it (checkpoint/native/save.py). With ``checkpoint.async`` it copies the
    tensors to host memory, and a thread writes while training continues. At most one save is pending; what depends on
    its success waits for it. All ranks look at the outcome at the same points: between steps, before the next save or
    load, and at the end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.native.directory import PendingDirectory
from lt_zero.checkpoint.native.pieces import on_all_ranks, weight_fragments
from lt_zero.checkpoint.native.rank_state import (
    FEATURES,
    RANK_BUFFERS,
    RESIDUALS,
    feature_states,
    rank_buffers,
)
from lt_zero.checkpoint.native.save import TRAINED_WEIGHTS, Bundle, bundle, make_directory, stage, write
from lt_zero.common import plain_names
from lt_zero.common.errors import CheckpointError
from lt_zero.common.garbage import gc_disabled
from lt_zero.common.places import import_public
from lt_zero.common.progress_bar import progress_bar
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.world import World
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.stores.store import Store

log = logging.getLogger("lt_zero")

GRACE = 15.0  # seconds to wait for the pending save after an error; tests replace this


# ---- content ---------------------------------------------------------------------------------------------------------


def frozen_names(engine: Engine, leave_out: bool) -> list[str]:
    """The names of weights that a checkpoint leaves out, by all names of tied ones; [] unless ``leave_out``.

    Collective if ranks have other modules.
    """
    if not leave_out:
        return []
    every = plain_names.named_parameters(engine.root)
    return on_all_ranks(engine, [name for name, p in every if not p.requires_grad], "frozen parameters")


def weights_to_save(
    engine: Engine, left_out: Iterable[str] = (), averaged: bool = True, sharded: bool = True
) -> dict[str, Any]:
    """The state dict, without the names in ``left_out``. Collective.

    Args:
        averaged: with the averages of ``EMA`` where it has some, in their own dtype, else with the trained weights.
        sharded: in fragments, for a directory; else full tensors on rank 0, and nothing elsewhere.
    """
    without = set(left_out)
    if sharded:
        state = weight_fragments(engine, averaged)
    else:
        from lt_zero.core.engine.whole_model import full_state_dict

        with averages_shown(engine, averaged):
            state = full_state_dict(engine, _wider_averages(engine) if averaged else {})
    return {name: value for name, value in state.items() if name not in without}


def _wider_averages(engine: Engine) -> dict[Bucket, Store]:
    """The averages that the model has in rounded form while it shows them: a run goes on with these."""
    average = average_of(engine)
    if average is None:
        return {}
    found = ((bucket, average.averages(bucket)) for bucket in engine.buckets)
    return {b: averages for b, averages in found if averages is not None and averages.dtype != b.weights.precision}


def averages_shown(engine: Engine, averaged: bool = True) -> AbstractContextManager[None]:
    """Context that gives the model the averages of ``EMA``, if there are some, or its trained weights. Collective."""
    average = average_of(engine)
    return average.showing(averaged) if average is not None else nullcontext()


def whole_weights(engine: Engine, call: str, left_out: Iterable[str] = ()) -> dict[str, Any]:
    """The state dict with full tensors on the CPU of rank 0, {} elsewhere. Collective.

    With ``EMA`` it has the averages, as exports and the model have them. ``call``: name of the public function.
    ``left_out``: names to leave out.
    """
    from lt_zero.core.engine.whole_model import full_state_dict

    engine.world.roll_call(call)
    without = set(left_out)
    with averages_shown(engine):
        return {name: value for name, value in full_state_dict(engine).items() if name not in without}


def export_weights(engine: Engine, path: str | os.PathLike[str], **options: Any) -> None:
    """Write all weights to files, by default in fp16, rank 0 one bucket at a time. Collective, after a roll call.

    ``options`` and errors are those of ``lt_zero.export``.

    Raises:
        NotInstalled: exports are not installed.
    """
    live = import_public("lt_zero.checkpoint.live_weights", "lt_zero.export")
    with averages_shown(engine):
        live.export_engine(engine, path, **options)


def trained_beside(engine: Engine, left_out: Iterable[str] = (), sharded: bool = True) -> dict[str, Any]:
    """The trained weights, by their key in a checkpoint; {} if its state dict has no averages. Collective."""
    average = average_of(engine)
    if average is None or not average.updates:
        return {}
    places = {name: engine.owner.get(id(p)) for name, p in plain_names.named_parameters(engine.root)}
    names = {name for name, place in places.items() if place is not None and average.averages(place[0]) is not None}
    names |= dict(plain_names.named_buffers(engine.root)).keys()
    names = set(on_all_ranks(engine, sorted(names), "names of averages"))
    state = weights_to_save(engine, left_out, averaged=False, sharded=sharded)
    weights = {name: value for name, value in state.items() if name in names}
    return {TRAINED_WEIGHTS: {"weights": weights, "updates": average.updates}}


def beside(engines: Mapping[str, Engine], sharded: bool = True) -> dict[str, Any]:
    """Content beside weights and optimizers' states, by its key in a checkpoint. Collective.

    Args:
        engines: by the prefix of their parameters' names in the checkpoint.
        sharded: with fragments, for a directory; else with full tensors on rank 0.
    """
    found: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for prefix, engine in engines.items():
        if engine.exchange.remembers:
            from lt_zero.checkpoint.native.residuals import residual_state

            if (owed := residual_state(engine, sharded)) is not None:
                found[RESIDUALS] = owed  # of one engine only: session.py, ``Session.build``
        if not engine.buffers.enabled and (different := rank_buffers(engine, prefix)) is not None:
            buffers |= different["buffers"]
            found[RANK_BUFFERS] = {"ranks": engine.world.size, "buffers": buffers}
        for kind, values in feature_states(engine, prefix, sharded).items():
            found.setdefault(FEATURES, {}).setdefault(kind, {}).update(values)
    return found


# ---- saves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """One checkpoint.

    Attributes:
        content: Lightning's dictionary, with fragments.
        names: of each optimizer's parameters, by group.
        config: of the run.
        shown: what the checkpoint tells of it (config/load.py, ``shown``).
        precision: the run's mode.
        left_out: names of weights that are not saved.
        then: is called on rank 0 with the path of the published checkpoint; its errors are those of the save.
        peers: the ranks that have the same modules as this one; (): all.
    """

    content: Mapping[str, Any]
    names: Sequence[Sequence[Sequence[str]]]
    config: ZeroConfig
    shown: Mapping[str, Any]
    precision: str
    left_out: Sequence[str] = ()
    then: Callable[[str], object] = lambda path: None
    peers: Sequence[int] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the run, for the manifest."""
        return {
            "stage": self.config.zero_optimization.stage,
            "precision": self.precision,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": str(torch.__version__),
        }


class Saver:
    """The saves of one run, one pending at most. See Note [Life of a save].

    Attributes:
        pending: the save in the background, until ``wait`` has seen its end.
        writing: the path, or URL, of the pending save's checkpoint.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self.pending: Future[None] | None = None
        self.writing: str | None = None
        self._after: list[Callable[[], object]] = []  # is called when the pending save is done
        self._buffer: Tensor | None = None  # host memory of the last save in the background

    def save(self, saving: Saving, path: str, world: World, background: bool) -> None:
        """Write a directory, after the pending save if there is one. Collective.

        Args:
            background: whether a thread writes it; errors are raised by ``wait`` then.

        Raises:
            CheckpointError: on all ranks; an earlier checkpoint at ``path`` is kept.
        """
        self.wait(world)
        facts = {**saving.facts, "ranks": world.size}
        with gc_disabled():
            made = bundle(saving.content, saving.names, world, facts, saving.shown, saving.left_out, saving.peers)
            if background:
                with world.agree("copying the state for an asynchronous save", CheckpointError):
                    self._buffer = stage(made, self._buffer)
            group = world.saving_group(background)
            # From here on ``write`` removes the directory after an error.
            place = make_directory(world, path)
            then = partial(saving.then, place.name)
            if background:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lt_zero-async-save")
                self.writing = place.name
                self.pending = self._thread.submit(_write_alone, made, place, world, group, then)
                return
            with progress_bar(f"Saving {path}", made.nbytes, rank=world.rank, in_bytes=True) as work:
                write(made, place, world, group, then, work.advance)

    def after_pending(self, action: Callable[[], object]) -> None:
        """Call ``action`` once the pending save has succeeded; now if there is none."""
        if self.pending is not None:
            self._after.append(action)
        else:
            action()

    def check(self, world: World) -> None:
        """``wait`` for the pending save, which there is, if it has ended on all ranks. Collective."""
        assert self.pending is not None
        running = torch.tensor([not self.pending.done()], dtype=torch.uint8)
        world.host_max(running, "save in the background").wait()
        if not running.item():
            self.wait(world)

    def wait(self, world: World | None) -> None:
        """Wait for the pending save, if any. Collective.

        Raises:
            CheckpointError: on all ranks: it failed.
        """
        if self.pending is None:
            return
        pending = self.pending
        with progress_bar("Waiting for the save in the background", rank=world.rank if world is not None else 0):
            # If the user interrupts the wait, the save is still pending and reads the host memory.
            futures.wait([pending])
        self.pending = self.writing = None
        after, self._after = self._after, []
        pending.result()  # raises on all ranks if one failed
        for action in after:
            action()

    def abandon(self, world: World) -> None:
        """Wait for the pending save briefly, without collectives: after an error other ranks may be gone."""
        ended = True
        if self.pending is not None:
            with progress_bar("Waiting for the save in the background", rank=world.rank):
                ended = bool(futures.wait([self.pending], GRACE).done)
            if not ended:
                # The group belongs to the save, which may still be running.
                world.leave_saving_group()
        self.pending = self.writing = None
        self.close(ended)

    def close(self, ended: bool = True) -> None:
        """Release the thread and the memory; ``ended``: no save is running."""
        self._after = []
        if self._thread is not None:
            self._thread.shutdown(wait=ended, cancel_futures=True)
        self._thread = self._buffer = None


def _write_alone(made: Bundle, place: PendingDirectory, world: World, group: Any, then: Callable[[], object]) -> None:
    """``write`` in a thread: an error is logged, too, as the process may end before anybody waits."""
    try:
        write(made, place, world, group, then)
    except BaseException as error:
        log.error("Saving %s in the background failed: %s", place.name, error)
        raise
