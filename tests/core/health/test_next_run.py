"""A Trainer that is fitted again after an error trains on, or every rank says at once why it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn

import lt_zero
from lt_zero.core.comm.work import CollectiveMonitor
from lt_zero.core.health import next_run
from lt_zero.core.health.next_run import RunStart
from tests.support.lightning_tools import GPT, quick, sharded_trainer
from tests.support.pool import Pool

_SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class Fails(Callback):
    """An error in the middle of an epoch, once, on some ranks."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank in self.ranks:
            self.ranks = []
            raise ValueError("broken on purpose")


def _fit_again(ranks: list[int], again: Callable[[Any, Any], Any]) -> Any:
    trainer, model = (
        sharded_trainer(1, max_steps=5, callbacks=[Fails(list(ranks))]),
        GPT(dist.get_world_size(), rows=96),
    )
    with pytest.raises((ValueError, RuntimeError)):
        trainer.fit(model)
    return again(trainer, model)


def _refused(trainer: Any, model: Any) -> list[str]:
    """Errors of two further fits; a new Trainer trains."""
    told = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(model)
        told.append(str(caught.value))
    other = sharded_trainer(1, max_steps=5)
    other.fit(GPT(dist.get_world_size(), rows=96))
    assert other.global_step == 5
    return told


def _after_an_error_of_one() -> list[str]:
    with quick(stuck=30.0):  # the error has to come before a verdict, also on a busy machine
        told: list[str] = _fit_again([1], _refused)
    return told


def _after_a_verdict() -> None:
    with quick(poll=0.4):
        engine, *_ = lt_zero.initialize(model=nn.Linear(3, 5), config=_SGD)
    reporter = engine.world.detector._reporter
    reporter.post_verdict("broken on purpose")
    # Only the first rank that posts writes the text, which the other may have to wait for.
    while not reporter.read_verdict():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        engine.world.watch.raise_verdict()
    # The thread of the engine polls in this wait only.
    time.sleep(1.5 * dist.get_rank())
    dist.barrier()


def _after_an_error_of_all() -> int:
    with quick(stuck=30.0):
        return int(_fit_again([0, 1], lambda trainer, model: trainer.fit(model) or trainer.global_step))


def test_a_fit_after_an_error_of_one_rank_names_it(pool: Pool) -> None:
    for told in pool.run(2, _after_an_error_of_one):
        assert told[0] == told[1]
        assert "Rank 1 ended with ValueError: broken on purpose (" in told[0]
        assert "Make a new Trainer and a new module" in told[0]


def test_code_that_has_caught_a_verdict_may_wait_for_a_late_rank(pool: Pool) -> None:
    pool.run(2, _after_a_verdict)


def test_a_fit_after_the_same_error_on_all_ranks_trains_on(pool: Pool) -> None:
    assert pool.run(2, _after_an_error_of_all) == [5, 5]


def _run_of_one(path: str) -> str:
    """The error of a rank that validates after a fit while the other saves."""
    with quick():
        trainer, model = sharded_trainer(1, max_steps=1), GPT(dist.get_world_size(), rows=96)
        trainer.fit(model)
        first = dist.get_rank() == 0
        with pytest.raises(RuntimeError) as caught:
            trainer.validate(model, verbose=False) if first else trainer.save_checkpoint(path)
    return str(caught.value)


def test_a_run_that_one_rank_begins_alone_ends_on_all(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(2, _run_of_one, str(tmp_path / "a.ckpt")):
        assert "he start of a run" in told  # either rank may find it
        assert "`Trainer.save_checkpoint`" in told
        assert "without `if trainer.is_global_zero:`" in told


def _after_a_pause() -> int:
    with quick(limit=0.2):
        trainer, model = sharded_trainer(1, max_steps=1), GPT(dist.get_world_size(), rows=96)
        trainer.fit(model)
        time.sleep(0.6 * dist.get_rank())
        trainer.validate(model, verbose=False)
    return int(trainer.global_step)


def test_a_late_rank_has_the_timeout_of_the_strategy(pool: Pool) -> None:
    """It may be longer than the half hour of hang detection."""
    assert pool.run(2, _after_a_pause) == [1, 1]


class _Peers:
    def __init__(self, gone: list[int]) -> None:
        self.gone = gone

    def ended(self) -> list[int]:
        return self.gone

    def first_cause(self, ended: list[int]) -> str:
        return f"Rank {ended[0]} was killed."


def _outcomes(errors: list[tuple[str, bool] | None], launched: list[int], gone: list[int]) -> list[str]:
    """What ranks are told, of which each has launched so many collectives; None: a rank that does not come."""
    store, world, told = dist.HashStore(), len(errors), [""] * len(errors)  # type: ignore[attr-defined]

    def begin(rank: int, error: tuple[str, bool]) -> None:
        watch = CollectiveMonitor()
        channel = watch.open("all", range(world))
        start = RunStart(store, rank, world, watch, _Peers(gone), lambda *_: None, 0.05, 0.3)
        start.meet("", False)
        for _ in range(launched[rank]):
            channel.launch("barrier", "test", 0)
        try:
            start.meet(*error)
        except RuntimeError as refusal:
            told[rank] = str(refusal)

    threads = [threading.Thread(target=begin, args=(rank, e)) for rank, e in enumerate(errors) if e is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


@pytest.mark.parametrize(
    ("errors", "launched", "gone", "told"),
    [
        ([("", False), ("", False), ("", False)], [1, 2, 3], [], ""),
        ([("mine", True), ("", False), ("mine", True)], [2, 2, 2], [], ""),
        ([("mine", True), ("", False), ("", False)], [2, 3, 3], [], "Rank 0 ended with mine."),
        ([("", False), ("Rank 2 failed.", False), ("", False)], [2, 2, 2], [], "Rank 2 failed."),
        ([("", False), None, ("", False)], [2, 2, 2], [1], "Rank 1 was killed."),
        ([("", False), None, ("", False)], [2, 2, 2], [], "rank 1 did not within"),
    ],
    ids=["clean", "in step", "apart", "followed", "gone", "late"],
)
def test_ranks_go_on_only_if_all_are_in_step(errors: Any, launched: Any, gone: list[int], told: str) -> None:
    for rank, refusal in enumerate(_outcomes(errors, launched, gone)):
        if errors[rank] is not None:
            assert told in refusal
            assert bool(told) == bool(refusal)


class _Gone:
    """A store whose process has ended once a run was."""

    def __init__(self) -> None:
        self.set = self.add = self.check = self.wait = self.get = self._lost

    def _lost(self, *_: Any) -> Any:
        raise dist.DistNetworkError("failed to recv, got 0 bytes. Connection reset by peer")


def test_a_run_that_begins_after_the_server_of_the_store_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has ended, and another begins to validate: that rank is named, and not a connection."""
    monkeypatch.setattr(next_run, "_CLOSES_S", 0.1)
    for gone, told in ([0], "This run cannot begin: .* Rank 0 was killed."), ([], "Connection reset by peer"):
        start = RunStart(*_arguments(_Peers(gone)))
        start.meet("", False)
        monkeypatch.setattr(start, "_store", _Gone())
        with pytest.raises(RuntimeError, match=told):
            start.meet("", False)


def _arguments(peers: _Peers) -> tuple[Any, ...]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return store, 1, 2, CollectiveMonitor(), peers, lambda *_: None, 0.05, 0.3
