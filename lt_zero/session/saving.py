"""Writes the checkpoints of a run, in the background if that is configured.

Note [Life of a save]
    A face collects weights and optimizers' states as fragments, without copies, and ``beside`` what else training needs
    to go on. ``Saver.save`` writes all of it (checkpoint/native/save.py). With ``checkpoint.async`` it copies the
    tensors to host memory, and a thread writes while training continues. At most one save is pending; what depends on
    its success waits for it. All ranks look at the outcome at the same points: between steps, before the next save or
    load, and at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.native.directory import Place
from lt_zero.checkpoint.native.save import Bundle, bundle, make_place, stage, write
from lt_zero.comm.world import World
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.config import ZeroConfig
from lt_zero.config.load import shown

log = logging.getLogger("lt_zero")

GRACE = 15.0  # seconds to wait for the pending save after an error; tests replace this


@dataclass(frozen=True)
class Saving:
    """One checkpoint.

    Attributes:
        content: Lightning's dictionary, with fragments.
        names: of each optimizer's parameters, by group.
        config: of the run.
        precision: the run's mode.
        left_out: names of weights that are not saved.
        then: is called on rank 0 with the path of the published checkpoint; its errors are those of the save.
    """

    content: Mapping[str, Any]
    names: Sequence[Sequence[Sequence[str]]]
    config: ZeroConfig
    precision: str
    left_out: Sequence[str] = ()
    then: Callable[[str], object] = lambda path: None

    def bundle(self, world: World) -> Bundle:
        """Divide the checkpoint into what each rank writes. Collective."""
        facts = {
            "stage": self.config.zero_optimization.stage,
            "ranks": world.size,
            "precision": self.precision,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": str(torch.__version__),
        }
        return bundle(self.content, self.names, world, facts, shown(self.config), self.left_out)


class Saver:
    """The saves of one run, of which at most one is pending. See Note [Life of a save].

    Attributes:
        pending: the save in the background that nobody has waited for.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self.pending: Future[None] | None = None
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
        made = saving.bundle(world)
        if background:
            with world.agree("copying the state for an asynchronous save", CheckpointError):
                self._buffer = stage(made, self._buffer)
        group = world.saving_group(background)
        place = make_place(world, path)  # from here on ``write`` removes it after an error
        then = partial(saving.then, place.name)
        if background:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lt_zero-async-save")
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
        pending, self.pending = self.pending, None
        after, self._after = self._after, []
        with progress_bar("Waiting for the save in the background", rank=world.rank if world is not None else 0):
            pending.result()  # raises on all ranks if one failed
        for action in after:
            action()

    def abandon(self, world: World) -> None:
        """After an error other ranks may be gone: wait for the pending save briefly, without collectives."""
        ended = True
        if self.pending is not None:
            with progress_bar("Waiting for the save in the background", rank=world.rank):
                ended = bool(futures.wait([self.pending], GRACE).done)
            if not ended:
                world.leave_saving_group()  # owned by the save, which may still be running
        self.pending = None
        self.close(ended)

    def close(self, ended: bool = True) -> None:
        """Release the thread and the memory; ``ended``: no save is running."""
        self._after = []
        if self._thread is not None:
            self._thread.shutdown(wait=ended, cancel_futures=True)
        self._thread = self._buffer = None


def _write_alone(made: Bundle, place: Place, world: World, group: Any, then: Callable[[], object]) -> None:
    """``write`` in a thread: an error is logged, too, as the process may end before anybody waits."""
    try:
        write(made, place, world, group, then)
    except BaseException as error:
        log.error("Saving %s in the background failed: %s", place.name, error)
        raise
