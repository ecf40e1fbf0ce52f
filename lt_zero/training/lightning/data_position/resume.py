"""A run that goes on from a checkpoint: the states that it has loaded are checked and read, and the loops set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

import lightning.pytorch as pl
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from lt_zero.common.compat.of_lightning_loops import TrainingLoops
from lt_zero.common.errors import CheckpointError
from lt_zero.common.saved_random_states import read_states
from lt_zero.common.users_code import warn
from lt_zero.training.lightning.data_position.iteration import RESTS, Rest
from lt_zero.training.lightning.data_position.loader_place import COUNTED, POSITION, VERSION, LoaderPlace
from lt_zero.training.lightning.data_position.logged import are_values, restore_values
from lt_zero.training.lightning.data_position.openings import Opening
from lt_zero.training.lightning.data_position.own_state import are_states, reader_of
from lt_zero.training.lightning.data_position.witness import Witness


def check_state(state: Any, where: str) -> None:
    """Check the state of a rank; ``where``: in the checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    kinds: dict[type[Any], tuple[str, ...]]
    kinds = {list: ("states", "loaders"), int: ("consumed",), bool: ("ended", "counted", "window"), dict: ("request",)}
    if not isinstance(state, dict) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"{where}: version {VERSION} of the position in the data was expected, not {found!r}. Remove the key "
            f"{POSITION!r} from the checkpoint to resume without it."
        )
    wrong = [name for kind, names in kinds.items() for name in names if not isinstance(state.get(name), kind)]
    wrong += [] if state.get("states") else ["states"]
    wrong += [] if state.get("rest") in RESTS else ["rest"]
    wrong += [] if "logged" in state and (state["logged"] is None or are_values(state["logged"])) else ["logged"]
    wrong += [] if {"epoch", "states"} <= (state.get("request") or {}).keys() else ["request"]
    for loader in state.get("loaders") or []:
        wrong += faults_of(loader)
    if wrong or state["consumed"] < 0:
        raise CheckpointError(
            f"{where}: {', '.join(dict.fromkeys(wrong)) or 'the count of batches'} cannot be read. The checkpoint is "
            f"damaged. Remove the key {POSITION!r} from it to resume without the position in the data."
        )


def faults_of(packed: Any) -> list[str]:
    """Names of what cannot be read."""
    # Checkpoints from before there were openings, or numbers of ranks or workers, have none.
    later = ("opening", "ranks", "workers")
    if not isinstance(packed, dict) or {*later, *packed} != {known.name for known in fields(LoaderPlace)}:
        return ["loaders"]
    if wrong := [name for name in later[1:] if not isinstance(packed.get(name), (int, type(None)))]:
        return wrong
    numbers = [packed[name] for name in ("fetched", "served", "openings", "unit")]
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or packed["unit"] < 1:
        return ["loaders"]
    if wrong := [name for name in ("own", "own_now") if not are_states(packed[name])]:
        return wrong
    maps = [packed["epochs"], packed["epochs_now"]]
    if not all(isinstance(found, dict) and all(isinstance(e, int) for e in found.values()) for found in maps):
        return ["epochs"]
    opening = packed.get("opening")
    if opening is not None and not (isinstance(opening, dict) and are_states(opening.get("own"))):
        return ["opening"]
    witness = packed["witness"]
    if witness is not None and not Witness.can_be_read(witness):
        return ["witness"]
    return []


def place_of(packed: dict[str, Any], where: str) -> LoaderPlace:
    """The place of a loader that ``LoaderPlace.state_dict`` has told; ``where``: in the checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    start = packed["start"]
    opening = packed.get("opening")
    witness = packed["witness"]
    read = {
        "start": read_states(start, where) if start is not None else None,
        "opening": Opening.of(opening, where) if opening is not None else None,
        "witness": Witness.of(witness, where) if witness is not None else None,
    }
    return LoaderPlace(**{**packed, **read})


def restore_logged(trainer: pl.Trainer, state: dict[str, Any], same_ranks: bool) -> None:
    """Restore logged values. Warns about those of the epoch that cannot be restored."""
    if (saved := state["logged"]) is None:
        return
    lost = restore_values(trainer, saved, same_ranks)
    if lost and state["consumed"] and not state["ended"]:
        warn(
            f"Values of the epoch for {', '.join(map(repr, lost))} will cover its batches after this resume only: "
            "the checkpoint does not have what was logged before.",
            UserWarning,
        )


def scale_counters(trainer: pl.Trainer, state: dict[str, Any], units: Sequence[int], untracked: Sequence[str]) -> None:
    """Scale Lightning's counters of batches. Warns about loaders that lose their position.

    See position.py, Note [Resuming with another batch size].

    Args:
        units: samples of all ranks in a batch of each loader that is tracked.
        untracked: names of the other loaders.
    """
    saved = state["loaders"]
    reasons = [f"{name} cannot be tracked" for name in untracked]
    if not reasons and len(units) != len(saved):
        reasons = [f"there are {len(units)} loaders, but {len(saved)} when the checkpoint was saved"]
    if reasons:
        warn(
            f"The position in the training loaders cannot be restored: {'; '.join(reasons)}. Samples of this epoch "
            "may be seen twice. Use a DataLoader, or an object with `state_dict` and `load_state_dict`.",
            UserWarning,
        )
    if not (saved and units) or saved[0]["unit"] == units[0]:
        return
    saved_unit = saved[0]["unit"]
    unit = units[0]
    shift = -(-state["consumed"] * saved_unit // unit) - state["consumed"]
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for tracker in (progress.total, progress.current):
        for name in COUNTED:
            setattr(tracker, name, max(0, getattr(tracker, name) + shift))


# ---- the rest of an iteration: iteration.py, Note [The rest of an iteration] -----------------------------------------


def correct_counters(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Set Lightning's counters to what was trained on, before its loops read them.

    Args:
        state: of ``DataPosition``.
    """
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress
    if state["ended"]:
        position = batches.current.processed
    else:
        position = state["consumed"]
        if state["counted"] and position:
            _set_epochs(trainer, processed=-1, completed=-1)
            loop.restarting = True
    surplus = batches.current.processed - position
    _set_all(batches.total, batches.total.processed - surplus)
    _set_all(batches.current, position)


def do_rest(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Do what was left when ``state`` was saved. Collective, where that is.

    Args:
        state: of ``DataPosition``.
    """
    loops = TrainingLoops(trainer)
    rest = cast(Rest, state["rest"])
    epochs: Any = trainer.fit_loop.epoch_progress
    if rest == "begin":
        for tracker in (epochs.total, epochs.current):
            _set_all(tracker, tracker.processed)
        loops.begin_epoch()
        return
    if not state["ended"] and epochs.current.processed == epochs.current.ready:
        return  # no epoch was begun
    if rest in ("step", "validation", "batch") and not state["window"]:
        if state["ended"]:
            _set_epochs(trainer, processed=-1, completed=-1)
        loops.in_epoch()
        if rest == "step":
            loops.end_step()
        loops.end_batch(validated=rest == "batch")
    if not state["ended"]:
        if state["consumed"]:
            loops.in_epoch()
        loops.continue_epoch()
        return
    if rest == "nothing" and state["counted"]:
        _set_epochs(trainer, processed=0, completed=0)
    elif rest == "epoch":
        _set_epochs(trainer, processed=0, completed=-1)
        loops.end_epoch(after_hooks=True)
    else:
        _set_epochs(trainer, processed=-1, completed=-1)
        loops.end_epoch(after_hooks=False)
    loops.begin_epoch()


def _set_all(tracker: Any, count: int) -> None:
    for name in ("ready", "started", "processed", "completed"):
        setattr(tracker, name, count)


def _set_epochs(trainer: pl.Trainer, processed: int, completed: int) -> None:
    """Set two counters of epochs relative to the epochs that were begun."""
    epochs: Any = trainer.fit_loop.epoch_progress
    for tracker in (epochs.total, epochs.current):
        tracker.processed = tracker.ready + processed
        tracker.completed = tracker.ready + completed


def other_shares(loader: Any, here: LoaderPlace, place: LoaderPlace) -> str | None:
    """The text of a warning if a run does not go on after the samples that were seen; None if it does.

    Args:
        loader: the user's.
        here: has the ranks, batches and workers of this run.
        place: of the run that has saved.
    """
    before = place.ranks
    if before is not None and here.ranks is not None and before != here.ranks:
        if is_shared_out(loader, min(before, here.ranks)):
            return None
        return (
            f"goes on with {here.ranks} ranks in an epoch that {before} began, and decides itself which samples a rank "
            "reads: samples of this epoch may be seen twice or not at all. DistributedSampler shares out one order "
            "among any number of ranks"
        )
    if not isinstance(getattr(reader_of(loader), "dataset", None), IterableDataset):
        return None
    workers = here.workers or 0
    if place.workers is not None and max(place.workers, 1) != max(workers, 1):
        return (
            f"goes on with num_workers={workers} in an epoch that num_workers={place.workers} began, and its workers "
            "share out the samples: samples of this epoch may be seen twice or not at all"
        )
    if place.unit != here.unit and workers > 0:
        return (
            "goes on with another batch size: its workers share out batches, so that samples of this epoch may be seen "
            "twice or not at all"
        )
    return None


def is_shared_out(loader: object, fewest: int) -> bool:
    """True if any number of ranks, of at least ``fewest``, shares out one order of a loader's samples.

    One process has no DistributedSampler. Lightning's, which it adds for training on several ranks, shuffles.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(getattr(loader, "batch_sampler", None), BatchSampler):
        sampler = loader.batch_sampler.sampler  # type: ignore[attr-defined]
    return isinstance(sampler, DistributedSampler) and (fewest > 1 or not sampler.shuffle)


def count_once(loader: Any, given: int) -> None:
    """Let a resumed pass of a loader of torchdata have as many batches as were ``given``.

    It reads an iterable data set that has no state up to there again, and adds these batches to the number that it has
    loaded. A state that it tells later would be of a place twice as far.
    """
    iterator = vars(loader).get("_iterator")
    surplus = getattr(iterator, "_num_yielded", given) - given
    if surplus <= 0 or type(iterator).__module__.split(".")[0] != "torchdata":
        return
    iterator._num_yielded -= surplus
    snapshot = getattr(iterator, "_snapshot", None)  # of its workers
    if isinstance(snapshot, dict):
        snapshot["_snapshot_step"] -= surplus
