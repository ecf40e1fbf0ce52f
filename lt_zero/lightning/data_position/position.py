"""Random states and the position in the data: a resumed run continues with the next batch.

Note [When random states are set]
    A checkpoint holds the random states at the time of saving. A resumed run sets them when training starts (after the
    ``on_train_start`` hooks of callbacks and module, which an uninterrupted run does not call there), and restores the
    position in the data when the first batch is read, without changing them. Batches that were read but not trained on
    are read again from the states before them: the batch that Lightning reads ahead if the number of batches is
    unknown, the batch that raised an exception, and the micro-batches of an incomplete accumulation window, whose
    gradients are in no checkpoint.

Note [Random states around validation]
    Validation inside fit restores the random states. Lightning skips a validation that was due at the time of saving;
    thus training does not depend on it.

Note [Lightning's counters]
    The loops' batch counters are corrected before the loops read them, where they differ from what was trained on:
    after ``max_steps`` has ended an epoch early, Lightning would continue in the middle of the next one; at the last
    batch of an epoch, whose count is already full; inside an accumulation window; and with another number of batches
    per epoch for another world size.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor

from lt_zero.common.errors import CheckpointError
from lt_zero.common.users_code import warn
from lt_zero.lightning.data_position.loaders import Feed, LazyIterator, Make, tracked, untracked
from lt_zero.lightning.data_position.random_state import RandomStates, own_or_derived

KEY = "lt_zero_progress"
_VERSION = 1


class DataPosition:
    """Random states and the position in the data, of one rank."""

    def __init__(self) -> None:
        self._over = True
        self._reset(None)

    def _reset(self, trainer: pl.Trainer | None) -> None:
        self._trainer = trainer
        self._feed = Feed(self._before_batch, self._after_batch)
        self._started = False  # whether on_train_start was called
        self._before_validation: RandomStates | None = None  # of training, during validation
        self._loaded: dict[str, Any] | None = None  # until training starts
        self._pending: dict[str, Any] | None = None  # the saved position, until it is restored
        self._upcoming: deque[RandomStates] = deque()  # see Note [When random states are set]
        self._ahead: RandomStates | None = None  # after batches that were read before training started

    # ---- a run ---------------------------------------------------------------------------------------------------

    def watch(self, trainer: pl.Trainer) -> None:
        """A fit begins. Loaders may exist already, if user code has read the number of steps."""
        if self._over:
            self._feed.live, self._over = False, False
            self._reset(trainer)
        if trainer.accumulate_grad_batches + 2 > (self._feed.recent.maxlen or 0):
            self._feed.recent = deque(self._feed.recent, maxlen=trainer.accumulate_grad_batches + 2)

    def process(self, loader: object, trainer: pl.Trainer, ranks: int) -> object:
        """Lightning's loader with its reads tracked. See Note [Lazy iterators] in loaders.py.

        ``ranks``: that see different data.
        """
        if trainer.state.fn != "fit":
            return untracked(loader)
        self.watch(trainer)
        if trainer.training:
            return self._feed.add(loader, ranks)
        feed, plain = self._feed, untracked(loader)

        def open(make: Make) -> Iterator[Any]:
            return LazyIterator(make, self.before_validation) if feed.live else make()

        clone = tracked(plain, open)
        return plain if clone is None else clone  # not `or`: bool() calls len(), which some loaders lack

    def start(self) -> None:
        """Training begins."""
        self._started = True
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            if state["consumed"] and not state["ended"]:
                self._scale_counters(state)
        if self._upcoming:
            self._upcoming.popleft().apply()
        elif self._ahead is not None:
            self._ahead.apply()
        self._upcoming.clear()
        self._ahead = None

    def before_validation(self) -> None:
        if self._before_validation is None:
            self._before_validation = RandomStates.now()

    def after_validation(self) -> None:
        if self._before_validation is not None:
            states, self._before_validation = self._before_validation, None
            states.apply()

    def finish(self) -> None:
        """The run has ended; its position can still be saved."""
        self._feed.live, self._over = False, True
        for position in self._feed.positions:
            position.make = None

    def _before_batch(self) -> None:
        self.after_validation()  # Lightning does not end a validation that it fast-forwards
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._restore(pending)
        if not self._started and self._upcoming:
            self._upcoming.popleft().apply()
        self._feed.recent.append(RandomStates.now())

    def _after_batch(self) -> None:
        if not self._started:
            self._ahead = RandomStates.now()

    # ---- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's states as plain containers and tensors. Draws no random number."""
        now, feed = self._before_validation or RandomStates.now(), self._feed
        consumed, repeats, ended, counted = self._consumed()
        back = open_window = 0  # micro-batches of an incomplete accumulation window are repeated
        if self._trainer is not None and not ended and not _reads_itself(self._trainer):
            open_window = consumed % self._trainer.accumulate_grad_batches
            back = min(max(0, feed.served - consumed + open_window), len(feed.recent))
        states = [*list(feed.recent)[len(feed.recent) - back :], *([] if repeats or open_window else [now])]
        return {
            "version": _VERSION,
            "states": [state.state_dict() for state in states[:2]],  # one at set-up and one when training starts
            "now": now.state_dict(),
            "back": back,
            "consumed": consumed - open_window,
            "ended": ended,
            "counted": counted,
            "full": self._trainer is not None and consumed >= self._trainer.num_training_batches,
            "loaders": [position.state_dict() for position in feed.positions],
        }

    def _consumed(self) -> tuple[int, bool, bool, bool]:
        """Batches trained on in this epoch; whether one is incomplete; whether the epoch has ended, and is counted."""
        if self._trainer is None:
            return 0, False, False, False
        loop = self._trainer.fit_loop
        batches, epochs = loop.epoch_loop.batch_progress, cast(Any, loop.epoch_progress.current)
        current: Any = batches.current
        complete = current.ready == current.started == current.processed
        consumed = current.processed if complete else current.completed
        ended = complete and (batches.is_last_batch or consumed >= self._trainer.num_training_batches)
        return consumed, current.ready > consumed, bool(ended and consumed), epochs.processed == epochs.ready > 0

    # ---- restoring -----------------------------------------------------------------------------------------------

    def load(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Load the ``state_dict`` of all ranks of the saved run, for the fit that begins.

        The saved run may not have had this ``rank``.

        Raises:
            CheckpointError: the states cannot be read.
        """
        if not isinstance(states, Sequence) or not states:
            raise CheckpointError(f"{KEY}: the states of the saved ranks were expected, not {type(states).__name__}.")
        for number, state in enumerate(states):
            _check(state, f"{KEY}[{number}]")
        number = rank if rank < len(states) else 0
        own, where = states[number], f"{KEY}[{number}]"
        upcoming = [
            own_or_derived([RandomStates.of(s["states"][i], where) for s in states if i < len(s["states"])], rank)
            for i in range(len(own["states"]))
        ]
        loaders = [{**p, "start": p["start"] and RandomStates.of(p["start"], where)} for p in own["loaders"]]
        self._pending = {**own, "loaders": loaders, "now": RandomStates.of(own["now"], where)}
        self._upcoming, self._loaded = deque(upcoming), own
        self._correct_counters(own)

    def _correct_counters(self, state: dict[str, Any]) -> None:
        """See Note [Lightning's counters]."""
        assert self._trainer is not None
        loop = self._trainer.fit_loop
        batches: Any = loop.epoch_loop.batch_progress
        epochs: Any = loop.epoch_progress
        if state["counted"] and not state["ended"] and state["consumed"] and loop.restarting:
            for tracker in (epochs.total, epochs.current):
                tracker.processed = tracker.completed = tracker.ready - 1
        if state["ended"] and not state["counted"] and not state["full"]:  # Lightning does not know the epoch's length
            for tracker in (epochs.total, epochs.current):
                tracker.processed = tracker.completed = tracker.ready
            batches.total.completed = batches.total.processed
            batches.reset_on_run()
            loop.restarting = loop.restarting
        elif state["counted"] and state["ended"]:
            batches.reset_on_run()
        elif not state["ended"] and (surplus := batches.current.processed - state["consumed"]) > 0:
            for tracker in (batches.total, batches.current):
                tracker.ready = tracker.started = tracker.processed = tracker.completed = tracker.processed - surplus

    def _scale_counters(self, state: dict[str, Any]) -> None:
        """See Note [Resuming with another batch size] in loaders.py. Warns about loaders whose position is lost."""
        assert self._trainer is not None
        saved, positions = state["loaders"], self._feed.positions
        reasons = [f"{name} cannot be tracked" for name in self._feed.untracked]
        if not reasons and len(positions) != len(saved):
            reasons = [f"there are {len(positions)} loaders, but {len(saved)} when the checkpoint was saved"]
        if reasons:
            warn(
                f"The position in the training loaders cannot be restored: {'; '.join(reasons)}. Samples of this epoch "
                "may be seen twice. Use a DataLoader, or an object with `state_dict` and `load_state_dict`.",
                UserWarning,
            )
        if not (saved and positions) or saved[0]["unit"] == positions[0].unit:
            return
        saved_unit, unit = saved[0]["unit"], positions[0].unit
        shift = -(-state["consumed"] * saved_unit // unit) - state["consumed"]
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        for tracker in (progress.total, progress.current):
            for name in ("ready", "started", "processed", "completed"):
                setattr(tracker, name, max(0, getattr(tracker, name) + shift))

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore the saved position, without changing the random states."""
        assert self._trainer is not None
        back = state["back"]
        ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        unusable = not self._started or _reads_itself(self._trainer)  # Lightning's counter is too early or too late
        new_epoch = state["ended"] if unusable else ready == 0 and back == 0
        before = RandomStates.now()
        for position, saved in zip(self._feed.positions, state["loaders"], strict=False):
            position.resume(saved, None if new_epoch else back, state["now"])
        before.apply()


def _reads_itself(trainer: pl.Trainer) -> bool:
    """Whether the module's training step reads the iterator itself; batches that it reads ahead are not tracked."""
    return "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters


def _check(state: Any, where: str) -> None:
    """Raises: CheckpointError."""
    kinds: dict[type[Any], tuple[str, ...]]
    kinds = {list: ("states", "loaders"), int: ("back", "consumed"), bool: ("ended", "counted", "full")}
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"{where}: version {_VERSION} of the position in the data was expected, not {found!r}. Remove the key "
            f"{KEY!r} from the checkpoint to resume without it."
        )
    wrong = [name for kind, names in kinds.items() for name in names if not isinstance(state.get(name), kind)]
    lists = {"generators", "generators_now"}
    numbers = ("fetched", "served", "openings", "unit")
    for loader in state.get("loaders") or []:
        fields = loader if isinstance(loader, dict) else {}
        counts = all(isinstance(fields.get(name), int) and fields[name] >= 0 for name in numbers)
        if not counts or fields["unit"] < 1 or not {"start", "epoch", "cycled", "exhausted", *lists} <= fields.keys():
            wrong.append("loaders")
        elif not all(isinstance(g, Tensor) for name in lists for g in fields[name]):
            wrong.append("generators")
    if wrong or state["back"] < 0 or state["consumed"] < 0:
        raise CheckpointError(
            f"{where}: {', '.join(dict.fromkeys(wrong)) or 'the count of batches'} cannot be read. The checkpoint is "
            f"damaged. Remove the key {KEY!r} from it to resume without the position in the data."
        )
