"""Random states and the position in the data: a resumed run continues with the next batch.

Note [When random states are set]
    A checkpoint holds the random states at the time of saving. A resumed run sets them when training starts (after the
    ``on_train_start`` hooks of callbacks and module, which an uninterrupted run does not call there), and restores the
    position in the data when the first batch is read, without changing them. Batches that were read but not trained on
    are read again from the states before them: the batch that Lightning reads ahead if the number of batches is
    unknown, the batch that raised an exception, and the micro-batches of an incomplete accumulation window: their
    gradients are in no checkpoint.

Note [Random states around validation]
    Validation inside fit restores the random states, so that training does not depend on whether there is one.

Note [Lightning's counters]
    The loops' counters are corrected before the loops read them, where they differ from what was trained on (see
    iteration.py), and with another number of batches per epoch for another world size.

Note [Lazy iterators]
    A tracked loader is the user's loader with one method replaced: ``__iter__`` returns at once and opens the loader
    when the first batch is read. Lightning calls ``iter`` at set-up, and a resumed run calls it at other moments than
    an uninterrupted one; an iterator that is never read thus draws no random number and starts no worker. The tracked
    loader shares its ``__dict__`` with the user's object, so that both see the same attributes.

Note [Repeating a pass]
    A pass over a loader is repeated from the random states that it began with: the sampler draws the same order and the
    workers get the same seeds. For a map-style dataset in this process only indices are skipped; random numbers that
    samples draw do not matter, as the states are set afterwards. In workers (whose generators advance with their
    samples) and for iterable datasets, batches are loaded and dropped. A dataset may draw its order from this process'
    generators between batches (``torch.randperm``, beside a model with dropout on the CPU). Such an order cannot be
    repeated, and a warning says so. A dataset that shuffles with a private
    generator of unknown seed cannot be detected.

Note [Resuming with another batch size]
    With another world size or batch size the position is counted in samples of all ranks, rounded up to full batches:
    under ``DistributedSampler``, which orders samples by seed and epoch only, none is seen twice in the epoch.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric

from lt_zero.common.errors import CheckpointError
from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.common.users_code import warn
from lt_zero.lightning.data_position.iteration import RESTS, correct_counters, do_rest, rest_of
from lt_zero.lightning.data_position.logged import EpochValues, are_values, restore_values, saved_values
from lt_zero.lightning.data_position.own_state import LONGEST, OwnState, are_states
from lt_zero.lightning.data_position.random_state import RandomStates, own_or_derived

POSITION = "lt_zero_progress"
_VERSION = 1
Make = Callable[[], Iterator[Any]]


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
        self._has_metrics = False  # whether the module has objects of torchmetrics
        self._values: EpochValues | None = None  # logged, before the batches that a resume would repeat
        self._same_ranks = True  # whether as many ranks have saved what is loaded

    # ---- a run ---------------------------------------------------------------------------------------------------

    def watch(self, trainer: pl.Trainer) -> None:
        """A fit begins. Loaders may exist already, if user code has read the number of steps."""
        if self._over:
            self._feed.live, self._over = False, False
            self._reset(trainer)
        if trainer.accumulate_grad_batches + 2 > (self._feed.recent.maxlen or 0):
            self._feed.recent = deque(self._feed.recent, maxlen=trainer.accumulate_grad_batches + 2)

    def process(self, loader: object, trainer: pl.Trainer, ranks: int) -> object:
        """Lightning's loader with its reads tracked. See Note [Lazy iterators].

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
        """Training begins. Collective in a run that is resumed; see Note [The rest of an iteration]."""
        assert self._trainer is not None
        self._started = True
        self._has_metrics = any(isinstance(child, Metric) for child in self._trainer.lightning_module.modules())
        state, self._loaded = self._loaded, None
        if state is not None:
            if state["consumed"] and not state["ended"]:
                self._scale_counters(state)
            self._restore_logged(state)
        if self._upcoming:
            self._upcoming.popleft().apply()
        elif self._ahead is not None:
            self._ahead.apply()
        self._upcoming.clear()
        self._ahead = None
        if state is not None:
            do_rest(self._trainer, state)
            if state["ended"] and self._pending is not None:
                # Before hooks that set the epoch of samplers.
                for position, saved in zip(self._feed.positions, state["loaders"], strict=False):
                    position.begin_epoch(saved)

    def begin_batch(self) -> None:
        """A batch is trained on next."""
        assert self._trainer is not None
        window = self._trainer.accumulate_grad_batches
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if (batches.ready - 1) % window == 0:
            self._values = EpochValues.now(self._trainer, copies=window > 1 and self._has_metrics)

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
            "window": open_window > 0,
            **self._rest(consumed - open_window, repeats or open_window > 0, ended, counted),
            "loaders": [position.state_dict() for position in feed.positions],
        }

    def _rest(self, position: int, repeats: bool, ended: bool, counted: bool) -> dict[str, Any]:
        """Tell what is left of the iteration, and what was logged before ``position``."""
        if self._trainer is None:
            return {"rest": "nothing", "logged": None}
        rest, before = rest_of(self._trainer), self._values
        if not repeats or (before is not None and before.batch != position + 1):
            before = None
        in_epoch = not ended and rest != "validation"
        return {"rest": rest, "logged": saved_values(self._trainer, before, in_epoch, cut=counted and not ended)}

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

    def load(self, states: Sequence[dict[str, Any]], rank: int, ranks: int) -> None:
        """Load the ``state_dict`` of all ranks of the saved run, for the fit that begins.

        The saved run may not have had this ``rank``, or another number of ``ranks``.

        Raises:
            CheckpointError: the states cannot be read.
        """
        if not isinstance(states, Sequence) or not states:
            raise CheckpointError(
                f"{POSITION}: the states of the saved ranks were expected, not {type(states).__name__}."
            )
        for number, state in enumerate(states):
            _check(state, f"{POSITION}[{number}]")
        number = rank if rank < len(states) else 0
        own, where = states[number], f"{POSITION}[{number}]"
        upcoming = [
            own_or_derived([RandomStates.of(s["states"][i], where) for s in states if i < len(s["states"])], rank)
            for i in range(len(own["states"]))
        ]
        loaders = [{**p, "start": p["start"] and RandomStates.of(p["start"], where)} for p in own["loaders"]]
        self._pending = {**own, "loaders": loaders, "now": RandomStates.of(own["now"], where)}
        self._upcoming, self._loaded = deque(upcoming), own
        self._same_ranks = len(states) == ranks
        assert self._trainer is not None
        correct_counters(self._trainer, own)

    def _restore_logged(self, state: dict[str, Any]) -> None:
        """Restore logged values. Warns about those of the epoch that cannot be restored."""
        if (saved := state.get("logged")) is None:
            return
        assert self._trainer is not None
        lost = restore_values(self._trainer, saved, self._same_ranks)
        if lost and state["consumed"] and not state["ended"]:
            warn(
                f"Values of the epoch for {', '.join(map(repr, lost))} will cover its batches after this resume only: "
                "the checkpoint does not have what was logged before.",
                UserWarning,
            )

    def _scale_counters(self, state: dict[str, Any]) -> None:
        """See Note [Resuming with another batch size]. Warns about loaders that lose their position."""
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
    """True if the module's training step reads the iterator itself; batches that it reads ahead are not tracked."""
    return "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters


def _check(state: Any, where: str) -> None:
    """Raises: CheckpointError."""
    kinds: dict[type[Any], tuple[str, ...]]
    kinds = {list: ("states", "loaders"), int: ("back", "consumed"), bool: ("ended", "counted")}
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"{where}: version {_VERSION} of the position in the data was expected, not {found!r}. Remove the key "
            f"{POSITION!r} from the checkpoint to resume without it."
        )
    wrong = [name for kind, names in kinds.items() for name in names if not isinstance(state.get(name), kind)]
    if "rest" in state:  # not in checkpoints of the first versions
        wrong += ["rest"] if state["rest"] not in RESTS or not isinstance(state.get("window"), bool) else []
        wrong += ["logged"] if state.get("logged") is not None and not are_values(state["logged"]) else []
    lists = {"generators", "generators_now"}  # of the first versions
    numbers = ("fetched", "served", "openings", "unit")
    for loader in state.get("loaders") or []:
        fields = loader if isinstance(loader, dict) else {}
        counts = all(isinstance(fields.get(name), int) and fields[name] >= 0 for name in numbers)
        own = {"own", "own_now"} if "own" in fields else lists
        if not counts or fields["unit"] < 1 or not {"start", "epoch", "cycled", "exhausted", *own} <= fields.keys():
            wrong.append("loaders")
        elif "own" in fields:
            wrong += [name for name in ("own", "own_now") if not are_states(fields[name])]
        elif not all(isinstance(g, Tensor) for name in lists for g in fields[name]):
            wrong.append("generators")
    if wrong or state["back"] < 0 or state["consumed"] < 0:
        raise CheckpointError(
            f"{where}: {', '.join(dict.fromkeys(wrong)) or 'the count of batches'} cannot be read. The checkpoint is "
            f"damaged. Remove the key {POSITION!r} from it to resume without the position in the data."
        )


# ---- training loaders ------------------------------------------------------------------------------------------------


class LazyIterator(ProcessLocal):
    """An iterator that is made on first read, with callbacks around each item. See Note [Lazy iterators]."""

    def __init__(
        self,
        make: Make,
        before: Callable[[], object],
        after: Callable[[], object] = lambda: None,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._make, self._before, self._after, self._at_end = make, before, after, at_end
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> LazyIterator:
        return self

    def __next__(self) -> Any:
        self._before()
        if self._inner is None:
            self._inner = self._make()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._at_end()
            raise
        self._after()
        return batch


class _Tracked:
    """Mixin for the class of a user's loader.

    The values lie in slots of the clone, whose ``__dict__`` is the loader's. Python 3.12 caches the classes that
    ``inspect.getattr_static`` has seen: if they held the values, the Trainer would never be freed.
    """

    _lt_zero_open: Callable[[Make], Iterator[Any]]
    _lt_zero_original: object

    def __iter__(self) -> Iterator[Any]:
        return self._lt_zero_open(cast(Any, super()).__iter__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ((self._lt_zero_original,), 0)


def untracked(loader: object) -> object:
    """The user's own object."""
    return loader._lt_zero_original if isinstance(loader, _Tracked) else loader


def tracked(loader: object, open: Callable[[Make], Iterator[Any]]) -> object | None:
    """``loader`` with ``open`` as its ``__iter__``, which gets the original one; None if its class is not Python's."""
    kind: Any = type(loader)
    try:
        slots = ("_lt_zero_open", "_lt_zero_original")
        copied = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        clone = object.__new__(type(kind)(kind.__name__, (_Tracked, kind), {"__slots__": slots, **copied}))
        object.__setattr__(clone, "__dict__", vars(loader))
        for slot, value in zip(slots, (open, loader), strict=True):
            object.__setattr__(clone, slot, value)
    except (TypeError, AttributeError):
        return None
    return cast(object, clone)


class LoaderPosition:
    """The position in one training loader, and the random states that the current pass began with."""

    def __init__(self, feed: Feed, loader: Any, world: int) -> None:
        self._feed, self.loader = feed, loader
        self.stateful = callable(getattr(loader, "state_dict", None)) and hasattr(loader, "load_state_dict")
        sizes = [getattr(x, "batch_size", None) for x in (loader, getattr(loader, "batch_sampler", None))]
        size = next((size for size in sizes if isinstance(size, int) and size > 0), 1)
        self.unit = world * size  # samples of all ranks in a batch
        self.make: Make | None = None
        self.start: RandomStates | None = None  # at the start of the pass
        self.own = OwnState(loader, self.stateful)
        self.own_start: dict[str, Any] = {}  # at the start of the pass
        self.fetched = 0  # batches in the pass
        self.served = 0  # batches in the epoch, over several passes
        self.cycled = False  # whether the loader has ended in this epoch
        self.exhausted = False  # whether the pass has ended
        self.openings = 0  # passes with the same workers
        self._resumed: list[Iterator[Any]] = []
        self._begun = False  # whether the private state for a new epoch was restored

    def open(self, make: Make) -> Iterator[Any]:
        feed = self._feed
        if not feed.live:
            return make()
        self.make = make
        feed.opening(self)
        return LazyIterator(self._begin, *(partial(tell, self) for tell in (feed.fetching, feed.fetched, feed.ended)))

    def _begin(self) -> Iterator[Any]:
        """The iterator of a new pass, or of the restored one."""
        self.exhausted = False
        if self._resumed:
            return self._resumed.pop(0)
        assert self.make is not None
        self.start, self.own_start, self.fetched = RandomStates.now(), self.own.take(), 0
        self.openings += 1
        return self.make()

    # ---- saving and restoring ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        counters = ("fetched", "served", "cycled", "exhausted", "openings", "unit")
        own_now = self.own.take()
        if self.own.too_long:
            longest, self.own.too_long = ", ".join(sorted(set(self.own.too_long))), []
            self._warn(
                f"changes {longest} in place, which is too long for a checkpoint (more than {LONGEST} elements): a "
                "resumed run will have another order"
            )
        return {
            **{name: getattr(self, name) for name in counters},
            "start": self.start.state_dict() if self.start is not None else None,
            "own": self.own_start,
            "own_now": own_now,
            "epoch": getattr(getattr(self.loader, "sampler", None), "epoch", None),
        }

    def resume(self, state: dict[str, Any], back: int | None, target: RandomStates) -> None:
        """Make the next pass begin at the saved position; changes the random states.

        Args:
            state: from ``state_dict``; ``start`` is a RandomStates.
            back: number of batches before the saved position that are read again; None: begin a new epoch.
            target: random states that will be set later, to detect an order that cannot be repeated.
        """
        assert self.make is not None
        counts = (max(0, int(state[name]) - back) if back is not None else 0 for name in ("fetched", "served"))
        # Both count batches: what was served is compared with Lightning's counters, which are scaled, too.
        count, served = (-(-count * int(state["unit"]) // self.unit) for count in counts)
        workers = bool(getattr(self.loader, "persistent_workers", False))
        if workers and int(state["openings"]) > min(count, 1):
            self._warn("keeps its workers (persistent_workers=True), whose random numbers start over")
            # Start the workers now, so that the pass draws no seed for them.
            self._make_beside()
        if back is None and self.stateful and state["fetched"]:
            # Consume the state of the pass that has ended.
            self._make_beside()
        if back is not None and state["cycled"]:
            self._resumed.append(iter(()))  # shows Lightning's CombinedLoader the end of this loader again
            self.cycled = True
        self.openings = min(int(state["openings"]), 1)
        self.served = served
        start = state["start"]
        if back is not None and state["exhausted"]:
            return
        own, own_now = self._own_of(state)
        if back is None or (count == 0 and back == 0):
            self.begin_epoch(state)
        else:
            self.own.set(own)
        if count > 0 and start is not None:
            self.start, self.own_start, self.fetched = start, own, count
            # Lightning sets the epoch after it reads ahead, and counts an epoch that max_steps ended.
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if isinstance(state["epoch"], int) and callable(set_epoch):
                set_epoch(state["epoch"])
            self._resumed.append(self._repeat(state, count, back or 0, target))
            if back == 0:
                self.own.set(own_now, samples_only=not self.stateful)

    def begin_epoch(self, state: dict[str, Any]) -> None:
        """Restore the private state that the next epoch begins with."""
        if not self._begun:
            self._begun = not self.stateful
            own_now = self._own_of(state)[1]
            self.own.set(own_now)
            if not self.own.agrees(own_now):
                self.own.set(own_now, state_dicts=True)

    def _own_of(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The private state at the begin of the pass, and at the time of saving."""
        if "own" in state:
            return state["own"], state["own_now"]
        # Checkpoints of the first versions have generators without names.
        usual = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")
        paths = [path for path in usual if path in self.own.take()]
        before, now = (
            {path: {"kind": "torch", "state": state_of} for path, state_of in zip(paths, state[name], strict=False)}
            for name in ("generators", "generators_now")
        )
        return before, now

    def _make_beside(self) -> None:
        """Make an iterator that is not read, without a change of the private state."""
        assert self.make is not None
        own = self.own.take()
        self.make()
        self.own.set(own)

    def _repeat(self, state: dict[str, Any], count: int, back: int, target: RandomStates) -> Iterator[Any]:
        """The pass after its first ``count`` batches.

        Samplers with ``state_dict`` need it only if what they return was not found in their attributes. Then they may
        expect the state of the begin of the pass, or the present one.
        """
        own, own_now = self._own_of(state)
        assert self.start is not None

        def again(state_dicts: bool, batches: int, drop: bool) -> Iterator[Any]:
            assert self.start is not None
            self.own.set(own, state_dicts=state_dicts)
            self.start.apply()
            return self._skip(batches, target, drop)

        drop = back > 0 and self.own.generators_of_samples()
        state_dicts = False
        if any(saved["kind"] == "state_dict" for saved in own_now.values()):
            fresh = self.own.take()
            for state_dicts in (False, True):
                batches = again(state_dicts, count + back, drop=False)
                if self.own.agrees(own_now):
                    break
            else:
                assert self.make is not None
                self.own.set(own_now, state_dicts=True)
                return self.make()
            if back == 0:
                return batches
            self.own.set(fresh, state_dicts=True)
        return again(state_dicts, count, drop)

    def _skip(self, count: int, target: RandomStates, drop: bool) -> Iterator[Any]:
        """A pass after its first ``count`` batches. See Note [Repeating a pass].

        Args:
            drop: load batches and drop them, also where skipping indices would do.
        """
        assert self.make is not None
        if self.stateful:
            return self.make()  # restores its own position
        plain = isinstance(self.loader, DataLoader) and type(self.loader).__iter__ is DataLoader.__iter__
        if plain and self.loader.num_workers == 0 and not (drop or isinstance(self.loader.dataset, IterableDataset)):
            loader = copy.copy(self.loader)
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            items = iter(getattr(loader, name))
            # An iterator of an iterator is the same object, so it goes on where it is.
            vars(loader)[name] = items
            batches: Iterator[Any] = iter(loader)
        else:
            batches = items = self.make()
        first: RandomStates | None = None
        for _ in range(count):
            if next(items, self) is self:
                return batches  # the dataset has become smaller: the epoch ends here
            # Take the states after the first batch, which may draw the order.
            first = first or RandomStates.now()
        last = RandomStates.now()
        names = sorted(first.differing(last) & last.differing(target)) if first is not None else []
        if names:
            self._warn(
                f"draws random numbers of this process ({', '.join(names)}) with every batch, interleaved with those "
                "of the model. If they decide the order of its samples, the order is not repeated, and samples may be "
                "seen twice or not at all in this epoch"
            )
        return batches

    def tell_hidden(self) -> None:
        """Warn about state that no checkpoint can hold."""
        if self.own.hidden and not self.stateful:
            self._warn(
                f"keeps its place in {', '.join(self.own.hidden)} (an iterator), which cannot be saved: a resumed run "
                "will see other samples. Make it in `__iter__`, or give the loader `state_dict` and `load_state_dict`"
            )

    def _warn(self, text: str) -> None:
        warn(f"The training loader {_name(self.loader)} {text}.", UserWarning)


class Feed:
    """The training loaders of a run, in Lightning's order.

    ``before`` is called before each combined batch of all loaders, ``after`` after each batch of one loader.
    """

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self.positions: list[LoaderPosition] = []
        self.untracked: list[str] = []  # names of loaders that cannot be tracked
        self.live = True
        self.recent: deque[RandomStates] = deque(maxlen=2)  # before each of the last batches
        self._before, self._after = before, after
        self._read = False  # whether the current loaders were read
        self._last = ("", -1)  # the last event, and the ID of its loader

    @property
    def served(self) -> int:
        """The number of batches in this epoch."""
        return max([position.served for position in self.positions], default=0)

    def add(self, loader: object, world: int) -> object:
        if self._read:
            self._read, self.positions, self.untracked = False, [], []
        position = LoaderPosition(self, untracked(loader), world)
        position.tell_hidden()
        clone = tracked(position.loader, position.open)
        if clone is None:
            self.untracked.append(_name(position.loader))
            return loader
        self.positions.append(position)
        return clone

    def opening(self, position: LoaderPosition) -> None:
        """A CombinedLoader opens all loaders for an epoch, and reopens one that has ended ("max_size_cycle")."""
        if position not in self.positions:
            return
        self._read = True
        if self._last == ("stop", id(position)) and len(self.positions) > 1:
            self._last = ("cycle", id(position))
            return
        for other in self.positions:
            other.cycled, other.served = False, 0
        self.recent.clear()
        self._last = ("open", id(position))

    def fetching(self, position: LoaderPosition) -> None:
        if position is self.positions[0] and self._last != ("cycle", id(position)):
            self._before()
        self._last = ("fetch", id(position))

    def fetched(self, position: LoaderPosition) -> None:
        position.fetched += 1
        position.served += 1
        self._after()

    def ended(self, position: LoaderPosition) -> None:
        position.cycled = position.exhausted = True
        self._last = ("stop", id(position))


def _name(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + (f"({type(dataset).__name__})" if dataset is not None else "")
