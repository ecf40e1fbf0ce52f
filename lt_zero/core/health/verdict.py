"""The verdict on ranks that will never meet, in words: which rank waits where, and what the user may look for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lt_zero.core.comm.work import CALL, FENCE, MEETING, START, CollectiveId
from lt_zero.core.health.ended_ranks import ALIKE, COUNTS, WHERE
from lt_zero.core.health.foreign_waits import FOREIGN, Blocked

GONE = "has ended or left the process group"
OVER = "has come to its end without an error"
_ENDED = f"See the last that it printed{WHERE}, and whether its host runs (dmesg, the scheduler)."
CALLED = (
    "Every rank has a part of the state: call it on every rank, without `if trainer.is_global_zero:` or"
    " `rank_zero_only` around it."
)
_ALONE = (
    "Every rank has to call `fit`, `validate`, `test`, `predict` and saves in the same order, without"
    " `if trainer.is_global_zero:` around them."
)
RAN = (
    "Every rank has to launch the same collectives in the same order: look for a branch or a loop that depends on the"
    " rank or its data."
)
Remedy = Callable[[CollectiveId, CollectiveId | None], str]  # what to tell users whose ranks ran these two, or this one


@dataclass
class RankState:
    """A rank: the collective in which it waits, its line of the user's code, and both in words.

    ``came``: it is, or was, in the collective that is examined. ``never``: it never will be. ``needs``: the ranks of
    the run for which it has waited long, in a collective whose launches are not known. ``lasts``: its wait began before
    a question was asked that all ranks have answered since.
    """

    launch: CollectiveId | None
    place: str
    text: str
    came: bool = False
    never: bool = False
    needs: tuple[int, ...] = ()
    lasts: bool = False

    @classmethod
    def waiting(cls, launch: CollectiveId, place: str, lasts: bool = False) -> RankState:
        return cls(launch, place, f"waits in {launch} ({place})", came=True, lasts=lasts)

    def compare(self, launch: CollectiveId, ran: CollectiveId) -> None:
        """Compare ``launch``, which is examined, with ``ran``, which the rank launched under the same number."""
        self.came = launch.like(ran)
        self.never = not self.came
        if self.never and not ran.like(self.launch):
            self.text += f", and ran {ran} ({ran.numel:,} elements) in its place"


def close_circles(states: Mapping[int, RankState], launch: CollectiveId) -> None:
    """Set ``never`` of ranks that wait in collectives whose launches are not known.

    One of the ranks that such a collective needs has not launched it, else it would have ended. If all of these wait
    for ``launch``, or in the same way, that rank is one of them, and none goes on before ``launch`` is complete. All of
    this has to be so at one moment: a rank that has come to ``launch`` since may have ended the wait of another.
    """
    waits = {rank for rank, state in states.items() if state.lasts and (state.launch == launch or state.needs)}
    while open_ones := {rank for rank in waits if not waits.issuperset(states[rank].needs)}:
        waits -= open_ones
    for rank in waits:
        states[rank].never |= bool(states[rank].needs)


def diverged(histories: Mapping[int, tuple[list[CollectiveId], str]], remedy: Remedy) -> str:
    """The verdict on ranks that meet in different collectives, from the history and user line of each.

    The same text on every rank.
    """
    least = min(ran[-1].number for ran, _ in histories.values())
    ran_at = {rank: {launch.number: launch for launch in ran} for rank, (ran, _) in histories.items()}
    first, *others = ran_at.values()
    common = sorted(set(first).intersection(*others))
    number = next((n for n in common if not all(ran[n].like(first[n]) for ran in others)), least)
    head = next(rank for rank, (ran, _) in histories.items() if ran[-1].number == least)
    states = {rank: RankState.waiting(ran[-1], place) for rank, (ran, place) in histories.items()}
    for rank, state in states.items():
        if number in ran_at[rank]:
            state.compare(ran_at[head][number], ran_at[rank][number])
        else:
            state.came, state.never = False, True
    lost = next((rank for rank, state in states.items() if state.never), next(rank for rank in states if rank != head))
    return sentence(states, head, lost, remedy)


def sentence(states: dict[int, RankState], head: int, lost: int, remedy: Remedy) -> str:
    """The verdict: rank ``head`` waits for rank ``lost``, which will never arrive."""
    first, other = states[head], states[lost]
    assert first.launch is not None
    called = first.launch.operation == CALL
    calls = other.launch is not None and other.launch.operation == CALL
    sooner = other.launch is not None and other.launch[:2] <= first.launch[:2]
    if other.launch is not None and sooner and _known(other.launch) < _known(first.launch):
        states = {rank: replace(state, came=False) for rank, state in states.items()}
        return sentence(states, lost, head, remedy)
    came = sorted(rank for rank, state in states.items() if state.launch == first.launch)
    if called and calls:
        return (
            f"{first.launch} was called on {_names(came)} ({first.place}) while {other.launch} was called on rank"
            f" {lost} ({other.place}). Both need all ranks: call the same operations in the same order on every rank."
        )
    others = sorted(r for r, state in states.items() if r not in (*came, lost) and not state.came)
    also = f" (nor on {_names(others)})" if others else ""
    meets, starts = first.launch.operation == MEETING, first.launch.operation == START
    done = "was called" if called else "was reached" if meets or starts else "was begun"
    begun = f"{first.launch} {done}" if called else f"T{str(first.launch)[1:]} {done}"
    if called and other.text.startswith(OVER):
        advice = CALLED
    elif meets or other.text.startswith(OVER):
        advice = COUNTS
    elif other.text.startswith(GONE):
        advice = _ENDED
    elif starts:
        advice = _ALONE
    else:
        advice = CALLED if called else remedy(first.launch, other.launch)
    return f"{begun} on {_names(came)} ({first.place}) and not on rank {lost}, which {other.text}{also}. {advice}"


def at_standstill(states: Mapping[int, Blocked], circle: list[int], remedy: Remedy) -> str:
    """The verdict on ranks that wait in a circle, each for a collective that the next one has not launched.

    ``states``: of the ranks that wait. The same text whichever rank of the circle comes first.
    """
    turns = [[*circle[n:], *circle[:n]] for n in range(len(circle))]
    first, other, *rest = min(turns, key=lambda turn: (_known(states[turn[0]].wait), turn[0]))
    head = states[first]
    if head.wait.operation != FOREIGN:
        told = {
            rank: RankState(state.wait if state.wait.operation != FOREIGN else None, state.place, state.text)
            for rank, state in states.items()
        }
        for rank, state in told.items():
            state.came = states[rank].wait == head.wait
        return sentence(told, first, other, remedy)
    came = sorted(rank for rank, state in states.items() if state.wait == head.wait)
    waits = head.text if len(came) == 1 else head.text.replace("waits", "wait", 1)
    others = "".join(f", for rank {rank}, which {states[rank].text}" for rank in rest)
    return (
        f"{_names(came).capitalize()} {waits} for rank {other}, which {states[other].text}{others}: none of these waits"
        f" can end. {ALIKE}"
    )


def _known(launch: CollectiveId) -> int:
    """Order of launches by how well users know them: calls, batches and epochs, modules, fences, other packages."""
    return {CALL: 0, START: 0, MEETING: 1, FENCE: 3, FOREIGN: 4}.get(launch.operation, 2)


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" if len(ranks) <= 8 else f"{len(ranks)} ranks ({shown}, ...)"
