"""Ranks that run different numbers of forwards, as when they generate texts of different lengths.

Gathers are collectives, so a rank that is done has to take part in those of the others. Inside of ``synced`` a rank
says which bucket it gathers next before it does, and again before it waits, as stores in files gather only then. A rank
that is done says that, and follows the others until all are. To say something is one small all-reduce between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from lt_zero.common.arguments import expect
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of

_DONE, _FAILED = -(1 << 40), 1 << 40


class _Meeting:
    """Agreement on what the ranks do next: an even number is a launch, the following odd one a wait."""

    def __init__(self, engines: list[Engine]) -> None:
        self.world = engines[0].world
        self.buckets = [bucket for engine in engines for bucket in engine.buckets if bucket.sharding.params]
        self._number = {bucket: 2 * index for index, bucket in enumerate(self.buckets)}
        self.broken = False  # all ranks raise

    def say(self, what: int) -> int:
        """Say what this rank does next; returns what the ranks do that are not done. Collective.

        Raises:
            RuntimeError: on all ranks, if one has failed, or they do different things.
        """
        done, failed = what == _DONE, what == _FAILED
        # The maxima of a number and of its negative show in one exchange if all ranks said the same.
        said = [_DONE, _DONE] if done else [what, -what]
        flags = torch.tensor([*said, self.world.rank + 1 if failed else 0])
        self.world.host_max(flags, "lt_zero.synced").wait()
        most, least, failing = int(flags[0]), -int(flags[1]), int(flags[2])
        if failing:
            self.broken = True
            raise RuntimeError(f"Rank {failing - 1} failed inside of `lt_zero.synced`; its own error says why.")
        if most != _DONE and most != least:
            self.broken = True
            one, other = (repr(self.buckets[number // 2].name) for number in (least, most))
            raise RuntimeError(
                f"One rank gathers {one}, another {other}. Inside of `lt_zero.synced` ranks may run different numbers "
                "of forwards, but each has to run the same modules. If an encoder and a decoder run in turns, use a "
                "context for each input."
            )
        return most

    def announce(self, bucket: Bucket, waits: bool) -> None:
        self.say(self._number[bucket] + waits)

    def fail(self) -> None:
        """Tell the others that this rank raises, unless all do."""
        if not self.broken:
            with suppress(RuntimeError):
                self.say(_FAILED)

    def attend(self, on: bool) -> None:
        """Announce the gathers of this rank from now on, or no longer."""
        for bucket in self.buckets:
            bucket.announce_gathers(self.announce if on else None)

    def follow(self) -> None:
        """Take part in the gathers of the others until all are done. Collective."""
        while (what := self.say(_DONE)) != _DONE:
            bucket = self.buckets[what // 2]
            if what % 2:
                # The others wait for this bucket. Releasing it waits, too, and frees what is not used here.
                bucket.release()
            elif bucket.released:
                bucket.launch_gather()


@contextmanager
def synced(module: nn.Module) -> Iterator[None]:
    """Context in which ranks may run different numbers of forwards of a sharded model, none included. Collective.

    A rank that leaves the context takes part in the others' gathers until all have left. For forwards without backward:
    generation, or a prediction of data that is not distributed evenly. Each forward has to run the same modules.

    Args:
        module: the model, or a part of it. A model that no engine owns, or whose parameters are not sharded, needs no
            synchronisation: the context does nothing then.

    Raises:
        RuntimeError: on all ranks, if one of them fails inside, if ranks run different modules, or if layers exchange
            tokens with all ranks.
    """
    expect(module, nn.Module, "lt_zero.synced(module=...)", "pass the sharded model, or a part of it")
    found = {id(owner): owner for owner in map(owner_of, module.parameters()) if isinstance(owner, Engine)}
    for engine in found.values():
        engine.refuse_inside_units("lt_zero.synced")
        if engine.parts.uneven:
            raise RuntimeError(f"lt_zero.synced: {engine.parts.uneven}")
    meeting = _Meeting(list(found.values())) if found else None
    if meeting is None or not meeting.buckets or meeting.world.size == 1:
        yield
        return
    meeting.world.roll_call("lt_zero.synced")
    meeting.attend(True)
    try:
        yield
        for engine in found.values():
            engine.gatherer.end_pass()
        meeting.attend(False)
        meeting.follow()
    except BaseException:
        meeting.fail()
        meeting.attend(False)
        # A rank may have ended, so that its collectives fail.
        with suppress(RuntimeError):
            for engine in found.values():
                engine.gatherer.end_pass()
                engine.gatherer.forget_order()
        raise
    for engine in found.values():
        engine.rejoin()
