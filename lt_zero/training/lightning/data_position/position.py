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
    samples) and for iterable datasets, batches are loaded and dropped. An order that depends on random numbers drawn
    between batches (``torch.randperm``, beside a model with dropout on the CPU), or on a generator that was not found,
    cannot be repeated. The last batch that is read again, or its indices, show it: a warning says that it is another
    one than before. So it is where a program passes by what was seen itself, after which the pass begins too late.
    Private state of samplers and data is restored twice: to repeat the pass as it was when the pass began, and then as
    it was before the batch to go on from (see own_state.py). Meanwhile Lightning's counter of batches counts those of
    the pass: samplers that resume by themselves pass by as many batches as it says, and must not do so here.

Note [Loaders that resume by themselves]
    Loaders with ``state_dict`` and ``load_state_dict`` (torchdata's, for example) are asked for their state before each
    batch from which a resumed run may go on, and get it back right before the pass is opened, with the epoch that their
    sampler had and what its order was drawn from (see openings.py). Lightning saves the state after batches that it has
    read ahead, and restores it before the epoch is set and only inside of an epoch. A state of a pass that has ended is
    passed by: the next pass follows it. A loader that has opened no pass is not asked, since torchdata's would draw a
    seed.

Note [Epochs that begin after a resume]
    A run that was not interrupted reads the first batch of an epoch after the hooks ``on_train_epoch_start``, in which
    users tell datasets the epoch. If the number of batches is unknown, Lightning reads it at set-up when it resumes,
    before these hooks and before it tells samplers the epoch. So the loaders show Lightning no batch at set-up, are
    restored when training starts, and are opened again where the run that was not interrupted opens them.

Note [Resuming with another batch size]
    With another world size or batch size the position is counted in samples of all ranks, rounded up to full batches:
    under ``DistributedSampler``, which orders samples by seed and epoch only, none is seen twice in the epoch.
"""

from __future__ import annotations

import copy
import inspect
import operator
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric

from lt_zero.common.errors import CheckpointError
from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.common.random_states import RandomStates
from lt_zero.common.users_code import warn
from lt_zero.core.rounds import Rounds
from lt_zero.training.lightning.data_position.attributes import asked, attributes_of, slots_of, write
from lt_zero.training.lightning.data_position.epochs import Epochs
from lt_zero.training.lightning.data_position.inexact import inexact
from lt_zero.training.lightning.data_position.iteration import rest_of
from lt_zero.training.lightning.data_position.loader_place import (
    COUNTED,
    POSITION,
    VERSION,
    Draws,
    LoaderPlace,
    Moment,
)
from lt_zero.training.lightning.data_position.logged import EpochValues, TurnValues, saved_values, turns_of
from lt_zero.training.lightning.data_position.own_state import OwnState, reader_of, same_states
from lt_zero.training.lightning.data_position.plain_values import LONGEST
from lt_zero.training.lightning.data_position.request import LoaderRequest
from lt_zero.training.lightning.data_position.witness import Witness

if TYPE_CHECKING:
    from lt_zero.training.lightning.data_position.openings import Openings

_EMPTY = 10  # epochs on end without a batch that end a run which only steps would end
Make = Callable[[], Iterator[Any]]


class DataPosition:
    """Random states and the position in the data, of one rank."""

    def __init__(self) -> None:
        self._over = True
        self._rounds = Rounds()
        self.turns: TurnValues | None = None  # of rounds
        self._reset(None)

    def _reset(self, trainer: pl.Trainer | None) -> None:
        self._trainer = trainer
        self._feed = Feed(self._before_batch, self._after_batch, self._after_epoch, self._count_repeated)
        self._feed.rounds = self._rounds
        self._started = False  # whether on_train_start was called
        self._before_validation: Draws | None = None  # of training, during validation
        self._loaded: dict[str, Any] | None = None  # until training starts
        self._pending: list[LoaderPlace] | None = None  # the saved position, until it is restored
        self._upcoming: deque[Draws] = deque()  # see Note [When random states are set]
        self._ahead: Draws | None = None  # after batches that a resumed run has read before training starts
        self._new_epoch = False  # whether a resumed run goes on with an epoch that had not begun
        self._request = LoaderRequest()
        self._told: set[str] = set()  # warnings of this run
        self._hidden: Any = None  # the filter of a warning of Lightning's
        self._empty = 0  # epochs on end without a batch
        self._has_metrics = False  # whether the module has objects of torchmetrics
        self._values: EpochValues | None = None  # logged, before the batches that a resume would repeat
        self._same_ranks = True  # whether as many ranks have saved what is loaded
        self._of_turns: list[Any] = []  # values that rounds of the saved run have logged

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, rounds: Rounds) -> None:
        """Look after the random states of the micro-batches of ``rounds``, too."""
        self._rounds = self._feed.rounds = rounds

    def _now(self) -> Draws:
        return Draws(RandomStates.now(), self._rounds.now())

    def _packed(self, draws: Sequence[Draws]) -> dict[str, Any]:
        """Random states as plain containers and tensors; those of rounds only where there are some."""
        packed: dict[str, Any] = {"states": [draw.states.state_dict() for draw in draws]}
        if self._rounds.count is not None:
            packed["rounds"] = [self._rounds.packed(draw.rounds) for draw in draws]
        return packed

    def _set(self, draws: Draws) -> None:
        draws.states.apply()
        self._rounds.set(draws.rounds)

    def watch(self, trainer: pl.Trainer) -> None:
        """A fit begins. Loaders may exist already, if user code has read the number of steps."""
        if self._over:
            self._feed.live = False
            self._over = False
            self._reset(trainer)
            self._request.watch(trainer)
        # All of an accumulation window, one that Lightning reads ahead, and the read that finds no other.
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
            clone = self._feed.add(loader, ranks)
            if trainer.is_global_zero:
                self._tell_inexact(loader)
            return clone
        feed, plain = self._feed, untracked(loader)

        def open(make: Make) -> Iterator[Any]:
            return LazyIterator(make, self.before_validation) if feed.live else make()

        clone = tracked(plain, open)
        return plain if clone is None else clone  # not `or`: bool() calls len(), which some loaders lack

    def _tell_inexact(self, loader: object) -> None:
        """Warn, once in a run, of what a resume will not repeat in a loader."""
        plain = untracked(loader)
        reasons = list(inexact(plain, OwnState(plain, is_stateful(plain)), is_stateful(plain)))
        if _name(plain) in self._feed.untracked:
            reasons.append("cannot be tracked: a resumed run may see samples of the epoch twice. Use a DataLoader")
        for text in (f"The training loader {_name(plain)} {reason}." for reason in reasons):
            if text not in self._told:
                self._told.add(text)
                warn(text, UserWarning)

    def start(self) -> None:
        """Training begins. Collective in a run that is resumed; see Note [The rest of an iteration]."""
        assert self._trainer is not None
        self._started = True
        self._has_metrics = any(isinstance(child, Metric) for child in self._trainer.lightning_module.modules())
        state, self._loaded = self._loaded, None
        if state is not None:
            self._request.restore_schedule()
            if not self._feed.untracked:
                self._hide_advice()
            from lt_zero.training.lightning.data_position import resume

            if state["consumed"] and not state["ended"]:
                units = [position.unit for position in self._feed.positions]
                resume.scale_counters(self._trainer, state, units, self._feed.untracked)
            resume.restore_logged(self._trainer, state, self._same_ranks)
            if self.turns is not None and self._of_turns and state["logged"] is not None:
                self.turns.restore(self._of_turns)
        if self._upcoming:
            self._set(self._upcoming.popleft())
        elif self._ahead is not None:
            self._set(self._ahead)
        self._upcoming.clear()
        self._ahead = None
        if state is not None:
            if self._new_epoch:
                self._begin_epoch()
            elif state["rest"] == "begin" and self._pending is not None:
                self._restore_pending()  # before hooks that tell samplers the epoch
            resume.do_rest(self._trainer, state)

    def begin_batch(self) -> None:
        """A batch is trained on next."""
        assert self._trainer is not None
        window = self._trainer.accumulate_grad_batches
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if (batches.ready - 1) % window == 0:
            copies = window > 1 and self._has_metrics
            self._values = EpochValues.now(self._trainer, copies, self.turns)

    def _hide_advice(self) -> None:
        """Hide, until the first batch, Lightning's warning that a loader is not resumable: here it resumes exactly."""
        text = "You're resuming from a checkpoint that ended before the epoch ended"
        warnings.filterwarnings("ignore", re.escape(text), PossibleUserWarning)
        self._hidden = warnings.filters[0]

    def _show_advice(self) -> None:
        if self._hidden in warnings.filters:
            cast(list[Any], warnings.filters).remove(self._hidden)
        self._hidden = None

    def _begin_epoch(self) -> None:
        """Restore the loaders for an epoch that begins. See Note [Epochs that begin after a resume]."""
        assert self._trainer is not None
        loop = self._trainer.fit_loop
        self._feed.closed = False
        if self._pending is not None:
            self._restore_pending()
        loop._resuming_from_checkpoint = False  # Lightning opens the loaders again
        if type(loop._data_fetcher) is _PrefetchDataFetcher:
            loop._data_fetcher.__class__ = _OpenedLater

    def before_validation(self) -> None:
        if self._before_validation is None:
            self._before_validation = self._now()

    def after_validation(self) -> None:
        if self._before_validation is not None:
            states, self._before_validation = self._before_validation, None
            self._set(states)

    def finish(self) -> None:
        """The run has ended; its position can still be saved."""
        self._feed.live = False
        self._over = True
        self._request.release()
        self._show_advice()
        for position in self._feed.positions:
            position.close()

    def _before_batch(self) -> None:
        if self._started and self._hidden is not None:
            self._show_advice()
        self.after_validation()  # Lightning does not end a validation that it fast-forwards
        if self._pending is not None:
            self._restore_pending()
        if not self._started and self._upcoming:
            self._set(self._upcoming.popleft())
        assert self._trainer is not None
        self._feed.remember(first_of_window=self._feed.served % self._trainer.accumulate_grad_batches == 0)

    def _after_batch(self) -> None:
        if not self._started and self._loaded is not None:
            self._ahead = self._now()

    def _after_epoch(self) -> None:
        """Count epochs that had no batch: Lightning goes on with them for ever, if only steps end the run.

        Raises:
            RuntimeError: there were too many on end.
        """
        assert self._trainer is not None
        self._empty = 0 if self._feed.served else self._empty + 1
        if self._empty >= _EMPTY and self._trainer.max_epochs == -1:
            names = ", ".join(_name(position.loader) for position in self._feed.positions)
            raise RuntimeError(
                f"The training loader {names} gave no batch in {self._empty} epochs on end, and without max_epochs "
                "only steps would end this run. Check its data, or set max_epochs."
            )

    # ---- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's states as plain containers and tensors. Draws no random number."""
        if self._loaded is not None:
            return self._loaded  # nothing was trained since
        now = self._before_validation or self._now()
        feed = self._feed
        consumed, repeats, ended, counted = self._consumed()
        again: list[Moment] = []  # from the first batch that a resumed run reads again
        open_window = 0  # micro-batches of an incomplete accumulation window are repeated
        if self._trainer is not None and not ended and not _reads_itself(self._trainer):
            open_window = consumed % self._trainer.accumulate_grad_batches
            again = [moment for moment in feed.recent if moment.served >= consumed - open_window]
        # Before its first batch a resumed run may not have restored its loaders yet.
        places = again[0].places if again else self._pending or [position.place() for position in feed.positions]
        places = [position.saved(place) for position, place in zip(feed.positions, places, strict=False)] or places
        for position in feed.positions:
            position.tell_unsaved()
        draws = [Draws(moment.states, moment.rounds) for moment in again]
        draws += [] if again and (repeats or open_window) else [now]
        draws = draws[:2]  # one at set-up and one when training starts
        return {
            "version": VERSION,
            **self._packed(draws),
            "consumed": consumed - open_window,
            "ended": ended,
            "counted": counted,
            "window": open_window > 0,
            **self._rest(consumed - open_window, repeats or open_window > 0, ended, counted),
            "loaders": [place.state_dict() for place in places],
            "request": self._request.state_dict(),
            "seed": _seed(),
        }

    def _rest(self, position: int, repeats: bool, ended: bool, counted: bool) -> dict[str, Any]:
        """Tell what is left of the iteration, and what was logged before ``position``."""
        if self._trainer is None:
            return {"rest": "nothing", "logged": None}
        rest, before = rest_of(self._trainer), self._values
        if not repeats or (before is not None and before.batch != position + 1):
            before = None
        in_epoch = not ended and rest != "validation"
        logged = saved_values(self._trainer, before, in_epoch, cut=counted and not ended, turns=self.turns)
        return {"rest": rest, "logged": logged}

    def _consumed(self) -> tuple[int, bool, bool, bool]:
        """Batches trained on in this epoch; whether one is incomplete; whether the epoch has ended, and is counted."""
        if self._trainer is None:
            return 0, False, False, False
        loop = self._trainer.fit_loop
        batches, epochs = loop.epoch_loop.batch_progress, cast(Any, loop.epoch_progress.current)
        counted = epochs.processed == epochs.ready > 0
        current: Any = batches.current
        complete = current.ready == current.started == current.processed
        consumed = current.processed if complete else current.completed
        ended = complete and (batches.is_last_batch or consumed >= self._trainer.num_training_batches)
        # An iterable beside a loader with a length may end earlier than Lightning has counted.
        ended = ended or (counted and loop._data_fetcher is not None and loop._data_fetcher.done)
        return consumed, current.ready > consumed, bool(ended and consumed), counted

    # ---- restoring -----------------------------------------------------------------------------------------------

    def load(self, states: Sequence[dict[str, Any]], rank: int, ranks: int) -> None:
        """Load the ``state_dict`` of all ranks of the saved run, for the fit that begins.

        The saved run may not have had this ``rank``, or another number of ``ranks``.

        Raises:
            CheckpointError: the states cannot be read.
        """
        from lt_zero.common.saved_random_states import own_or_derived, read_states
        from lt_zero.training.lightning.data_position.resume import check_state, correct_counters, place_of

        if not isinstance(states, Sequence) or not states:
            raise CheckpointError(
                f"{POSITION}: the states of the saved ranks were expected, not {type(states).__name__}."
            )
        for number, state in enumerate(states):
            check_state(state, f"{POSITION}[{number}]")
        number = rank if rank < len(states) else 0
        own = states[number]
        where = f"{POSITION}[{number}]"
        upcoming = []
        for i in range(len(own["states"])):
            packed = [s["states"][i] for s in states if i < len(s["states"])]
            of_rounds = [s["rounds"][i] for s in states if i < len(s.get("rounds", ()))]
            process = own_or_derived([read_states(state, where) for state in packed], rank)
            upcoming.append(Draws(process, self._rounds.unpacked(of_rounds, where)))
        for i, loader in enumerate(own["loaders"]):
            others = [s["loaders"][i]["state"] for s in states if i < len(s["loaders"])]
            loader["state"] = self._rounds.merged(others, loader["state"])
        requests = [s["request"]["states"] for s in states]
        asked = [read_states(request, where) for request in requests if request is not None]
        self._pending = [place_of(packed, where) for packed in own["loaders"]]
        self._upcoming = deque(upcoming)
        self._loaded = {**own, **self._packed(upcoming)}
        self._same_ranks = len(states) == ranks or self.turns is not None
        self._of_turns = turns_of(states)
        assert self._trainer is not None
        loop = self._trainer.fit_loop
        correct_counters(self._trainer, own)
        self._new_epoch = own["ended"] or (own["counted"] and not own["consumed"])
        self._feed.closed = self._new_epoch
        loop._combined_loader_states_to_load = []  # the positions have them, of the moments to go on from
        self._request.repeat(own["request"]["epoch"], own_or_derived(asked, rank) if asked else None)
        if rank == 0 and own["seed"] != _seed():
            seeds = own["seed"], _seed()
            told = ["without seed_everything" if seed is None else f"with seed {seed}" for seed in seeds]
            warn(
                f"The checkpoint is of a run {told[0]}, and this run is one {told[1]}. Random states are those of "
                "the checkpoint, but Lightning's DistributedSampler shuffles by the seed: samples may be seen twice or "
                "not at all. Call seed_everything as the saved run did to go on like the run that was not interrupted.",
                UserWarning,
            )

    def _restore_pending(self) -> None:
        """Restore the saved position, without changing the random states."""
        assert self._pending is not None
        assert self._trainer is not None
        places, self._pending = self._pending, None
        before = self._now()
        counter = self._trainer.fit_loop.epoch_loop.batch_progress.current
        counted = counter.state_dict()
        from lt_zero.training.lightning.data_position import resume

        for position, place in zip(self._feed.positions, places, strict=False):
            if place.fetched and not self._new_epoch and self._trainer.is_global_zero:
                text = resume.other_shares(position.loader, position.at, place)
                if text is not None:
                    position.tell(text)
            position.resume(place, self._new_epoch)
        counter.load_state_dict(counted)
        self._set(before)

    def _count_repeated(self, batches: int) -> None:
        """Let Lightning's counter say what it said when the pass that is read again was read first."""
        assert self._trainer is not None
        counter: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        for name in COUNTED:
            setattr(counter, name, batches)


def _seed() -> int | None:
    """The seed of ``seed_everything``, from which Lightning makes those of its samplers."""
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.lstrip("-").isdigit() else None


def _reads_itself(trainer: pl.Trainer) -> bool:
    """True if the module's training step reads the iterator itself; batches that it reads ahead are not tracked."""
    return "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters


# ---- training loaders ------------------------------------------------------------------------------------------------


class LazyIterator(ProcessLocal):
    """An iterator that is made on first read, with callbacks around each item. See Note [Lazy iterators]."""

    def __init__(
        self,
        make: Make,
        before: Callable[[], object],
        after: Callable[[Any], object] = lambda batch: None,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._make = make
        self._before = before
        self._after = after
        self._at_end = at_end
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
        self._after(batch)
        return batch


class _OpenedLater(_PrefetchDataFetcher):
    """A fetcher that has read nothing at set-up. It is opened by Lightning, or by the first read."""

    def __iter__(self) -> _PrefetchDataFetcher:
        self.__class__ = _PrefetchDataFetcher  # type: ignore[assignment]
        return iter(self)

    def __next__(self) -> Any:
        return next(iter(self))


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


def tracked(
    loader: object,
    open: Callable[[Make], Iterator[Any]],
    ask: Callable[[], Any] | None = None,
    give: Callable[[Any], None] | None = None,
) -> object | None:
    """``loader`` with ``open`` as its ``__iter__``, which gets the original one; None if its class is not Python's.

    Args:
        ask: its ``state_dict``, if it has one.
        give: its ``load_state_dict``; None: the original one.
    """
    kind: Any = type(loader)
    try:
        slots = ("_lt_zero_open", "_lt_zero_original")
        copied = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        users: dict[str, Any] = {name: _of_the_original(name) for name in slots_of(kind) if name not in slots}
        if ask is not None and callable(getattr(kind, "state_dict", None)):
            users["state_dict"] = lambda clone: ask()
        if give is not None:
            users["load_state_dict"] = lambda clone, state: give(state)
        bases = (_Tracked, kind)
        clone = object.__new__(type(kind)(kind.__name__, bases, {"__slots__": slots, **copied, **users}))
        object.__setattr__(clone, "__dict__", vars(loader))
        for slot, value in zip(slots, (open, loader), strict=True):
            object.__setattr__(clone, slot, value)
    except Exception:  # also of a metaclass or an `__init_subclass__` of the user's, a registry of names say
        return None
    return cast(object, clone)


def _of_the_original(name: str) -> property:
    """An attribute that the class of a loader keeps in ``__slots__``, which a clone cannot share."""
    return property(
        lambda clone: getattr(clone._lt_zero_original, name),
        lambda clone, value: setattr(clone._lt_zero_original, name, value),
        lambda clone: delattr(clone._lt_zero_original, name),
    )


class LoaderPosition:
    """The position in one training loader, and the random states that the current pass began with."""

    def __init__(self, feed: Feed, loader: Any, world: int) -> None:
        self._feed = feed
        self.loader = loader
        self.stateful = is_stateful(loader)
        sizes = [asked(x, "batch_size") for x in (loader, asked(loader, "batch_sampler"))]
        size = next((size for size in sizes if isinstance(size, int) and size > 0), 1)
        self.ranks = world  # that see different data
        self.unit = world * size  # samples of all ranks in a batch
        self.workers = getattr(reader_of(loader), "num_workers", 0)
        # The present place, as far as it is known without looking at the loader.
        self.at = LoaderPlace(self.unit, ranks=self.ranks, workers=self.workers)
        self.make: Make | None = None
        self.own = OwnState(loader, self.stateful)
        self._openings: Openings | None = None
        if self.stateful:
            from lt_zero.training.lightning.data_position.openings import Openings

            self._openings = Openings(loader, self.own)
        self._before: RandomStates | None = None  # the read that is under way
        # Of a loader that ``skips_indices``: the number of samples in this pass, and the indices of the last batch.
        self._size: int | None = None
        self._indices: Any = None
        self._epochs = Epochs(self.own.parts)
        self._resumed: list[Iterator[Any]] = []
        self._loaded: Any = None  # the state that a stateful loader was given, until it is read
        self._last: Any = None  # its state at the end of the run
        self._set_up = False  # whether Lightning has opened it
        # From which the next pass draws the seed of its workers; None: the present ones.
        self._of_workers: RandomStates | None = None
        self._goes_on = False  # whether the next pass goes on from a state that the loader was given

    def open(self, make: Make) -> Iterator[Any]:
        feed = self._feed
        if not feed.live:
            return make()
        self.make = make
        self._last = None
        if feed.closed and self._set_up:
            return make()  # the user's hooks read it before training starts
        self._set_up = True
        feed.opening(self)
        return LazyIterator(self._begin, *(partial(tell, self) for tell in (feed.fetching, feed.fetched, feed.ended)))

    def ask(self) -> Any:
        """The state of a loader that resumes by itself, for Lightning's part of a checkpoint.

        Before its first pass such a loader may begin one when it is asked, and draw an order for it. So a copy is asked
        then, and what that changes is put back.
        """
        if not self._feed.live or self.at.openings > 0:
            return self.loader.state_dict()
        states = RandomStates.now()
        own = self.own.take(long=True)
        try:
            return copy.copy(self.loader).state_dict()
        finally:
            self.own.set(own)
            states.apply()

    def _begin(self) -> Iterator[Any]:
        """The iterator of a new pass, or of the restored one."""
        self.at.exhausted = False
        return self._resumed.pop(0) if self._resumed else self._new_pass()

    def _new_pass(self) -> Iterator[Any]:
        assert self.make is not None
        self.at.start = RandomStates.now()
        self.at.own = self.own.take()
        self.at.fetched = 0
        self.at.epochs = self._epochs.state_dict()
        self.at.witness = None
        self.at.openings += 1
        if self.stateful and not self._goes_on:
            _forget_loaded(self.loader, self.own.parts.values())
        self._goes_on = False
        return self._opened()

    def close(self) -> None:
        """End the run. Lightning takes the iterator from the loader next, and torchdata's then forgets its place."""
        self.make = None
        if self.stateful and self.at.openings > 0:
            # A loader that cannot tell its state says so in the save that asks for it.
            with suppress(Exception):
                self._last = _copied(self.loader.state_dict())

    def _opened(self) -> Iterator[Any]:
        """A pass from its begin."""
        assert self.make is not None
        states = self._of_workers
        self._of_workers = None
        batches = self._openings.passed(self.make, states) if self._openings is not None else self.make()
        self._watch_indices(batches)
        return batches

    def _watch_indices(self, batches: Any) -> None:
        """Remember the indices of each batch, where they are what a resumed run reads again."""
        self._indices = None
        indices = getattr(batches, "_sampler_iter", None)
        if self.skips_indices and indices is not None:
            self._size = _size_of(self.loader.dataset)
            batches._sampler_iter = self._remembered(indices)

    def _remembered(self, indices: Iterator[Any]) -> Iterator[Any]:
        for item in indices:
            # A sampler may give the same list again, in another order.
            self._indices = list(item) if type(item) is list else _copied(item)
            yield item

    def reading(self, states: RandomStates | None) -> None:
        """The next batch will be read, with these random states; None: with the present ones."""
        if not self.stateful:
            self._before = states or RandomStates.now()

    def given(self, batch: Any) -> None:
        """A batch was read."""
        self.at.fetched += 1
        self.at.served += 1
        self._loaded = None
        if self._before is None:
            return
        self.at.witness = None
        if not self.skips_indices:
            self.at.witness = Witness(batch, self._before)
        elif self._indices is not None:
            self.at.witness = Witness((self._size, self._indices), self._before, stays=True, size=self._size)
        self._before = None

    # ---- saving and restoring ------------------------------------------------------------------------------------

    def place(self, complete: bool = True, goes_on: bool = False) -> LoaderPlace:
        """The place of the loader before the next batch.

        Args:
            complete: a run may resume from it. Else what only a resume needs is left out, as taking it has a cost: the
                private state, and that of a loader that resumes by itself.
            goes_on: the next batch is of the same pass, if this has not ended; else the next pass may begin.
        """
        state = self._loaded if self._loaded is not None else self._last
        if complete and state is None and self.stateful and self.at.openings > 0:  # else asking would begin a pass
            state = _copied(self.loader.state_dict())
        inside = goes_on and self.at.fetched > 0 and not self.at.exhausted
        own = self.own.take(inside, known=goes_on and self.at.exhausted) if complete else {}
        opening = self._openings.last if self._openings is not None else None
        return replace(self.at, own_now=own, epochs_now=self._epochs.state_dict(), state=state, opening=opening)

    def saved(self, place: LoaderPlace) -> LoaderPlace:
        """A place of this loader with the private state that a checkpoint needs."""
        opening = place.opening
        own, own_now, opened = self.own.needed(place.own, place.own_now, opening.own if opening is not None else {})
        opening = opening._replace(own=opened) if opening is not None else None
        return replace(place, own=own, own_now=own_now, opening=opening)

    def resume(self, place: LoaderPlace, new_epoch: bool) -> None:
        """Make the next pass begin at ``place``, or a new epoch after it; changes the random states."""
        assert self.make is not None
        # Both count batches: what was served is compared with Lightning's counters, which are scaled, too.
        count, served = (-(-count * place.unit // self.unit) for count in (place.fetched, place.served))
        if new_epoch:
            count, served = 0, 0
        workers = bool(getattr(self.loader, "persistent_workers", False))
        if workers and place.openings > min(count, 1):
            self.tell("keeps its workers (persistent_workers=True), whose random numbers start over")
            # Start the workers now, so that the pass draws no seed for them; a loader that is opened late starts them
            # with the first batch.
            self.make()
            self._of_workers = RandomStates.now()
        self.at.openings = min(place.openings, 1)
        self.at.served = served
        state = place.state if self._is_alike(place) else None
        if not new_epoch and place.cycled:
            self._resumed.append(iter(()))  # shows Lightning's CombinedLoader the end of this loader again
            self.at.cycled = True
            self.at.exhausted = place.exhausted
        if count > 0 and place.start is not None and not place.exhausted:
            self._resume_pass(place, count, state)
            return
        own_now = place.own_now
        if self.stateful and state is not None:
            # The state is of a pass that was left: the next one begins after it.
            restored = self._load(state)
            untouched = self.own.take(long=True)
            counts = _counts(self.loader)
            self.make()
            self.own.set(untouched)  # the sampler was opened
            for name, count in _counts(self.loader).items():
                if count > counts.get(name, count):  # of passes: the one that was left is counted already
                    write(self.loader, name, counts[name])
            own_now = {path: value for path, value in own_now.items() if path not in restored}
        self._epochs.restore(place.epochs_now)  # may seed generators anew
        self.own.set(own_now)
        if not self.own.agrees(place.own_now):
            self.own.set(place.own_now, state_dicts=True)

    def load(self, state: Any) -> None:
        """Give a loader that resumes by itself a state that came without a place: its next pass goes on there."""
        self.loader.load_state_dict(state)
        self._goes_on = True

    def tell_epochs(self, epochs: dict[str, int]) -> None:
        """Tell parts of the loader, by their paths, an epoch."""
        self._epochs.restore(epochs)

    def _is_alike(self, place: LoaderPlace) -> bool:
        """True if the batches of a rank are those of the run that has saved, and its loader can read that state."""
        same_ranks = place.unit == self.unit and place.ranks in (None, self.ranks)
        return same_ranks and place.workers in (None, self.workers)

    def tell_inexact(self) -> None:
        """Warn of what a resume will not repeat."""
        for reason in inexact(self.loader, self.own, self.stateful):
            self.tell(reason)

    def _resume_pass(self, place: LoaderPlace, count: int, state: Any) -> None:
        """Restore a pass after its first ``count`` batches."""
        assert place.start is not None
        assert self.make is not None
        self.at.start = place.start
        self.at.epochs = place.epochs
        self.at.fetched = count
        self.at.witness = place.witness
        # Lightning sets the epoch after it reads ahead, and counts an epoch that max_steps ended.
        self._epochs.restore(place.epochs)
        if self._openings is not None and state is not None:
            self.own.set(place.own)
            self.at.own = self.own.take()
            place.start.apply()
            restored = self._load(state)
            opening = place.opening.without(restored) if place.opening is not None else None
            batches = self._openings.passed(self.make, place.start, opening)
            from lt_zero.training.lightning.data_position.resume import count_once

            count_once(self.loader, count)
        else:
            batches = self._repeat(place, count)
        self._epochs.restore(place.epochs_now)
        # A loader that resumes by itself may draw the order as late as with its first batch.
        self.own.set(place.own_now, only="samples" if self.stateful else None)
        self._resumed.append(self._or_next_pass(batches) if self.at.cycled else batches)

    def _load(self, state: Any) -> dict[str, Any]:
        """Give a loader that resumes by itself its state; returns the private state that it has restored by that."""
        before = self.own.take(long=True)
        self.loader.load_state_dict(copy.deepcopy(state))
        self._loaded = state
        after = self.own.take(long=True)
        return {path: value for path, value in after.items() if not same_states(before.get(path), value)}

    def _or_next_pass(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, or those of a new pass if there are none.

        The resumed CombinedLoader has been shown an end of the loader, and would take another one for the epoch's.
        """
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            yield from self._new_pass()

    @property
    def skips_indices(self) -> bool:
        """True if batches are passed by without loading them: a map-style dataset in this process."""
        plain = isinstance(self.loader, DataLoader) and type(self.loader).__iter__ is DataLoader.__iter__
        return plain and self.loader.num_workers == 0 and not isinstance(self.loader.dataset, IterableDataset)

    def _repeat(self, place: LoaderPlace, count: int) -> Iterator[Any]:
        """The pass after its first ``count`` batches. See Note [Repeating a pass].

        Samplers with ``state_dict`` need it only if what they return was not found in their attributes. Then they may
        expect the state of the begin of the pass, or that of the place.
        """
        assert place.start is not None
        assert self.make is not None
        witness = place.witness if self._is_alike(place) else None
        for state_dicts in (False, True):
            self.own.set(place.own, state_dicts=state_dicts)
            self.at.own = self.own.take()
            place.start.apply()
            batches, same = self._skip(count, witness)
            if self.own.agrees(place.own_now):
                break
        else:
            self.own.set(place.own_now, state_dicts=True)
            return self._opened()
        if not same:
            self.tell(
                f"was read again up to the checkpoint, and batch {count} is another one now, or missing: the order of "
                "its samples is not repeated, and samples may be seen twice or not at all in this epoch. The order "
                "depends on random numbers that are drawn between batches, on a generator that was not found, or on "
                "other data, or the program leaves out the samples that were seen (by `trainer.global_step`), as "
                "lt_zero does by itself"
            )
        elif witness is not None and None not in (witness.size, self._size) and witness.size != self._size:
            # A program that leaves out the samples that were seen gives the same indices to a shorter data set.
            self.tell(
                f"had {witness.size} samples at the checkpoint, and has {self._size} now. The indices of the samples "
                "that were seen are the same, so the run goes on after them. If the program leaves out the samples "
                "that were seen (by `trainer.global_step`), as many are left out once more, as lt_zero does so by "
                "itself: let the data begin where it does in a new run"
            )
        return batches

    def _skip(self, count: int, witness: Witness | None) -> tuple[Iterator[Any], bool]:
        """A pass after its first ``count`` batches, and whether the last of these is the one that was seen before."""
        assert self.make is not None
        earlier = max(0, self.at.served - count)  # batches of earlier passes in this epoch
        self._feed.repeating(earlier)
        if self.skips_indices:
            loader = copy.copy(self.loader)
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            items = iter(getattr(loader, name))
            # An iterator of an iterator is the same object, so it goes on where it is.
            vars(loader)[name] = items
            batches: Iterator[Any] = iter(loader)
            self._watch_indices(batches)
        else:
            batches = items = self._opened()
        item: Any = None
        for number in range(1, count + 1):
            self._feed.repeating(earlier + number - 1)
            # The first batch has the states of the begin of the pass; opening it has drawn from them since.
            if number == count > 1 and witness is not None:
                witness.states.apply()
            item = next(items, self)
            if item is self:
                return batches, witness is None  # the dataset has become smaller: the epoch ends here
        if witness is None:
            return batches, True
        if not self.skips_indices:
            return batches, witness.saw(item)
        # The caller compares the number. Older checkpoints tell it only by their checksum.
        size = witness.size if witness.size is not None else self._size
        return batches, witness.saw((size, item))

    def tell_unsaved(self) -> None:
        """Warn about private state that a checkpoint does not have."""
        for path, error in self.own.untold.items():
            self.tell(f"has a {path} whose `state_dict` fails ({error}): a resumed run may see another order")
        if self.own.too_long:
            longest, self.own.too_long = ", ".join(sorted(set(self.own.too_long))), []
            self.tell(
                f"changes {longest} in place, which is too long for a checkpoint (more than {LONGEST} elements): a "
                "resumed run will have another order"
            )

    def tell(self, text: str) -> None:
        """Warn of the loader: ``text`` is what it does."""
        warn(f"The training loader {_name(self.loader)} {text}.", UserWarning)


class Feed:
    """The training loaders of a run, in Lightning's order.

    ``before`` is called before each combined batch of all loaders, ``after`` after each batch of one loader, and
    ``at_end`` at the end of one. ``repeating`` is called before each batch that is read again, with the number of
    batches of the epoch before it.
    """

    def __init__(
        self,
        before: Callable[[], object],
        after: Callable[[], object],
        at_end: Callable[[], object] = lambda: None,
        repeating: Callable[[int], object] = lambda batches: None,
    ) -> None:
        self.positions: list[LoaderPosition] = []
        self.untracked: list[str] = []  # names of loaders that cannot be tracked
        self.live = True
        self.closed = False  # see Note [Epochs that begin after a resume]
        self.recent: deque[Moment] = deque(maxlen=3)  # before each of the last batches
        self._before = before
        self._after = after
        self._at_end = at_end
        self.repeating = repeating
        self.rounds = Rounds()  # of the run
        self._read = False  # whether the current loaders were read
        self._last = ("", -1)  # the last event, and the ID of its loader

    @property
    def served(self) -> int:
        """The number of batches in this epoch."""
        return max([position.at.served for position in self.positions], default=0)

    def add(self, loader: object, world: int) -> object:
        if self._read:
            self._read = False
            self.positions = []
            self.untracked = []
        position = LoaderPosition(self, untracked(loader), world)
        clone = tracked(position.loader, position.open, position.ask)
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
            other.at.cycled = other.at.exhausted = False
            other.at.served = other.at.fetched = 0
        self.recent.clear()
        self._last = ("open", id(position))

    def remember(self, first_of_window: bool) -> None:
        """A combined batch will be read."""
        places = [position.place(first_of_window, goes_on=True) for position in self.positions]
        self.recent.append(Moment(RandomStates.now(), self.served, places, self.rounds.now()))

    def fetching(self, position: LoaderPosition) -> None:
        if self.closed:
            raise StopIteration
        states = None
        if position is self.positions[0] and self._last != ("cycle", id(position)):
            self._before()
            states = self.recent[-1].states
        self._last = ("fetch", id(position))
        position.reading(states)

    def fetched(self, position: LoaderPosition, batch: Any) -> None:
        position.given(batch)
        self._after()

    def ended(self, position: LoaderPosition) -> None:
        if self.closed:
            return
        position.at.cycled = position.at.exhausted = True
        self._last = ("stop", id(position))
        self._at_end()


def _size_of(dataset: Any) -> int | None:
    """The number of samples of a data set; None if it does not tell."""
    try:
        return len(dataset)
    except Exception:  # of a class of the user's
        return None


def _copied(value: Any) -> Any:
    """A deep copy; of plain containers a tenth as long as ``copy.deepcopy``, since this is done for each batch."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is dict:
        return {key: _copied(child) for key, child in value.items()}
    if type(value) is list:
        return [_copied(child) for child in value]
    return value.clone() if type(value) is torch.Tensor else copy.deepcopy(value)


def _forget_loaded(loader: Any, parts: Iterable[Any]) -> None:
    """Let a loader of litdata, or of Hugging Face's streams, begin a new pass.

    Until one pass has been read to its end, which Lightning does not do, its passes go on from the state that was
    loaded, and are empty once that is the end of the data: a run with ``max_steps`` would never end.
    """
    if any(kind.__module__.startswith("litdata.") for kind in type(loader).__mro__):
        loader.restore = False
    # Each pass of a stream begins at the state that it was given, until the user tells it another epoch.
    for part in parts:
        if type(part).__module__.split(".")[0] == "datasets" and asked(part, "_starting_state_dict") is not None:
            part._starting_state_dict = None


def _counts(loader: object) -> dict[str, int]:
    """Numbers that a loader keeps itself."""
    return {name: value for name, value in attributes_of(loader) if type(value) is int}


def is_stateful(loader: object) -> bool:
    """True if a loader resumes by itself."""
    return callable(asked(loader, "state_dict")) and asked(loader, "load_state_dict") is not None


def _name(loader: Any) -> str:
    dataset = asked(loader, "dataset")
    return type(loader).__name__ + (f"({type(dataset).__name__})" if dataset is not None else "")
