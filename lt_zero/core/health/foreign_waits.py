"""Waits in collectives that a run did not launch: Lightning's, the user's, and those of other runs in this process.

Note [Numbers of foreign collectives]
    Backends match the collectives of a process group by their order. torch's flight recorder has the number and the
    operation of the last 2,000 of a process. It is read once a wait has lasted for seconds, so nothing is added to a
    launch. Two ranks wait in the same collective if group, number and operation are the same. A rank that has another
    number, or another operation under the same number, waits in another one.
    A wait has such a number only if the innermost frame is a collective of torch.distributed that has been launched and
    has not ended, or waits for a work of one (awaited_works.py), and only one collective of this kind has not ended.
    Sends and receives have no numbers. Nothing is concluded about ranks that wait in these.
    ``dist.new_group`` waits in the store for the ranks of the group. All ranks make all groups, so these are numbered.
    In layers that exchange (tensor ranks) frames do not name the group. There a wait has a number if only one
    collective of the process has not ended.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lt_zero.common.compat import (
    count_of_groups,
    count_of_launches,
    group_in_making,
    operation_of,
    process_groups,
    recorded_launches,
)
from lt_zero.common.users_code import is_users
from lt_zero.core.comm.process_groups import awaits_all, number_of_set_ups
from lt_zero.core.comm.work import POINT_TO_POINT, CollectiveId, in_layer
from lt_zero.core.health.awaited_works import work_awaited
from lt_zero.core.health.other_runs import is_elsewhere, progress_elsewhere

FOREIGN = "torch.distributed"  # the operation of a CollectiveId that this package did not launch
_CHANNEL = "group of torch.distributed: "
_SET_UP = "set-up"  # in place of a group: the first point of a run, before it has numbers of its own
_NEW_GROUP = "new_group"  # likewise: groups that are made
_WORK = "work "  # likewise, with a number that no other has: the wait for a work
_looked = threading.local()  # ``launches``: how many the process had when a thread last looked for one that is pending
_RECORDED = {"gloo", "nccl"}  # backends whose works the recorder has
# Where the code of Python and of packages is, and beginnings of names of code that has no file.
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen ")
# Operations that several functions of torch.distributed share: a backend does not tell these functions apart.
_FAMILIES = ("allgather", "allreduce", "alltoall", "reducescatter", "broadcast", "barrier")


class ForeignCall(NamedTuple):
    """A call of torch.distributed in which a thread is: equal as long as it is the same call.

    ``group``: the name of its process group. ``launches``: how many the group has launched. ``function``: its name.
    """

    group: str
    launches: int
    function: str


@dataclass(frozen=True)
class Blocked:
    """Answer of a rank about a wait that has lasted for some time.

    ``wait``: the collective; its channel and number are the same on all ranks. ``members``: the ranks that have to
    launch it. ``text``, ``place``: for messages. ``ran``: by ``question_of`` of waits that were asked about, the number
    of this rank's last launch in that channel, and its launch of that number, None if that is unknown.
    """

    wait: CollectiveId
    members: list[int]
    text: str
    place: str
    ran: dict[str, tuple[int, CollectiveId | None]]

    def lacks(self, other: Blocked) -> bool:
        """True if this rank has not launched what ``other`` waits for, or another collective in its place."""
        if (ran := self.ran.get(question_of(other.wait))) is None:
            return False
        launched, found = ran
        return launched < other.wait.number or (found is not None and not found.like(other.wait))


def question_of(wait: CollectiveId) -> str:
    """Key of a collective in answers."""
    return f"{wait.channel}#{wait.number}"


def call_of(frame: FrameType | None) -> ForeignCall | None:
    """The collective of torch.distributed in whose frame a thread is; None if it is in none."""
    if frame is None:
        return None
    if awaits_all(frame):
        return ForeignCall(_SET_UP, number_of_set_ups(), "await_all")
    if (made := group_in_making(frame)) is not None:
        return ForeignCall(_NEW_GROUP, made[0] + 1, _NEW_GROUP)
    group = group_of(frame)
    try:
        if group is None and in_layer(frame):
            group = _group_of_pending()
        if group is not None:
            return ForeignCall(group.group_name, count_of_launches(group), frame.f_code.co_name)
        if (work := work_awaited(frame)) is not None and (operation := operation_of(work)) is not None:
            # A later work may have the place of this one in memory, but was launched after it.
            return ForeignCall(f"{_WORK}{id(work)}", sum(map(count_of_launches, process_groups())), operation)
    except (RuntimeError, KeyError, ValueError):
        # The group was destroyed meanwhile, or its backend does not count launches. The wait then has no number, and
        # nothing is concluded from it.
        return None
    return None


def group_of(frame: FrameType | None) -> dist.ProcessGroup | None:
    """The process group of a collective of torch.distributed, in whose frame a thread is; None if it is in none."""
    if frame is None or frame.f_code.co_filename != distributed_c10d.__file__:
        return None
    name = frame.f_code.co_name
    if name in POINT_TO_POINT or name.startswith("_") or "group" not in frame.f_locals:
        return None
    group = frame.f_locals["group"]
    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, dist.ProcessGroup) else None


def _group_of_pending() -> dist.ProcessGroup | None:
    """The group of the only collective of this process that has not ended; None if there are several, or none.

    A thread that waits in a layer, such as that of a DTensor, waits for it: the frames do not tell the group there.
    None, too, if the process has launched anything since the calling thread looked last. A run that goes on is mostly
    found in layers, and reading the recorder takes 70 ms, in which it could not go on.
    """
    count = sum(map(count_of_launches, process_groups()))
    if count != getattr(_looked, "launches", None):
        _looked.launches = count
        return None
    pending = {
        (launch.group, launch.number) for launch in recorded_launches() if launch.number > 0 and not launch.ended
    }
    if len(pending) != 1 or not _all_are_recorded():
        return None
    name = next(iter(pending))[0]
    return next((group for group in process_groups() if group.group_name == name), None)


def launched_by(call: ForeignCall) -> CollectiveId | None:
    """The collective that ``call`` has launched, and that has not ended; None if there is none, or it is unknown."""
    if call.group in (_SET_UP, _NEW_GROUP):
        return CollectiveId(f"{_CHANNEL}{call.group}", call.launches, FOREIGN, call.group)
    launches = [launch for launch in recorded_launches() if launch.number > 0]
    if call.group.startswith(_WORK):
        open_ones = [n for n in launches if not n.ended and _family(n.operation) == call.function]
        if len(open_ones) != 1 or not _all_are_recorded():
            return None
        only = open_ones[0]
        return CollectiveId(_channel(only.group, only.operation), only.number, FOREIGN, call.function)
    ours = [launch for launch in launches if launch.group == call.group]
    if call.launches == 0 or not ours or ours[-1].ended:
        return None
    last = ours[-1]
    return CollectiveId(_channel(call.group, last.operation), last.number, FOREIGN, _family(last.operation))


def _channel(group: str, operation: str) -> str:
    """Collectives of one order: a group with several backends ("cpu:gloo,cuda:nccl") has one for each."""
    return f"{_CHANNEL}{operation.partition(':')[0]} {group}"


def _all_are_recorded() -> bool:
    """True if all process groups have backends that the recorder knows."""
    pairs = [pair for group in process_groups() for pair in dist.get_backend_config(group).split(",")]
    return all(pair.rpartition(":")[2] in _RECORDED for pair in pairs)


def group_of_channel(channel: str) -> dist.ProcessGroup | None:
    """The process group of a foreign channel; None if it has none, or the group is destroyed."""
    name = channel.removeprefix(_CHANNEL).partition(" ")[2]
    found = [group for group in process_groups() if group.group_name == name]
    return found[0] if channel.startswith(_CHANNEL) and found else None


def is_foreign(channel: str) -> bool:
    """True for the channel of a collective that this run did not launch."""
    return channel.startswith(_CHANNEL) or is_elsewhere(channel)


def progress(channel: str, number: int) -> tuple[int, CollectiveId | None] | None:
    """The number of this process's last launch in a foreign ``channel``, and its launch of ``number``, if recorded.

    None if it is not known whether the process has launched anything there.
    """
    if is_elsewhere(channel):
        return progress_elsewhere(channel, number)
    if channel == f"{_CHANNEL}{_SET_UP}":
        return number_of_set_ups(), None
    if channel == f"{_CHANNEL}{_NEW_GROUP}":
        return count_of_groups(), None
    # A group that was destroyed may have had the same name, and the recorder still has its launches.
    if _is_unused(channel):
        return 0, None
    ours = [launch for launch in recorded_launches() if _channel(launch.group, launch.operation) == channel]
    launches = [launch for launch in ours if launch.group_id == ours[-1].group_id and launch.number > 0]
    if not launches:
        return None  # the recorder has forgotten them
    same = (launch for launch in launches if launch.number == number)
    found = next((CollectiveId(channel, number, FOREIGN, _family(launch.operation)) for launch in same), None)
    return launches[-1].number, found


def _is_unused(channel: str) -> bool:
    """True if nothing was launched in the group of a foreign ``channel``."""
    name = channel.removeprefix(_CHANNEL).partition(" ")[2]
    groups = [group for group in process_groups() if group.group_name == name]
    return bool(groups) and all(count_of_launches(group) == 0 for group in groups)


def _family(operation: str) -> str:
    """The operation as backends match it: "gloo:all_gather" and "gloo:_all_gather_base" are one."""
    name = operation.rpartition(":")[2].replace("_", "")
    return next((family for family in _FAMILIES if name.startswith(family)), name)


def another_may_launch(thread: int) -> bool:
    """True if a thread other than ``thread`` runs code that could launch a collective sooner or later.

    Code of the script, or of a module that has imported torch.distributed. A thread of a pool that has nothing to do is
    in code of Python's library.
    """
    return any(_may_launch(frame) for other, frame in sys._current_frames().items() if other != thread)


def _may_launch(frame: FrameType | None) -> bool:
    """True if the function of ``frame``, or one that has called it, is of such code."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "lt_zero":  # what its threads launch is known by name
            of_script = not frame.f_code.co_filename.startswith(_INSTALLED)
            if of_script or any(value is dist for value in list(frame.f_globals.values())):
                return True
        frame = frame.f_back
    return False


def described_call(frame: FrameType) -> str:
    """The call of torch.distributed in which a frame is, in words, and who called it if that was not the user."""
    if awaits_all(frame):
        return "the set-up of a run, which needs all ranks"
    if (work := work_awaited(frame)) is not None and group_of(frame) is None:
        return f"`wait` for an asynchronous {operation_of(work)} of torch.distributed"
    name, caller = frame.f_code.co_name, frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        if caller.f_code.co_filename == distributed_c10d.__file__:
            name = caller.f_code.co_name
        caller = caller.f_back
    by = ""
    if caller is not None and not is_users(caller):
        by = f", called by {getattr(caller.f_code, 'co_qualname', caller.f_code.co_name)}"
    return f"{name} of torch.distributed{by}"


def standstill(states: dict[int, Blocked]) -> list[int]:
    """Ranks that wait in a circle, each for a collective that the next one has not launched; [] if there are none.

    A collective needs all of its members. So none of these waits can end, if all of them last at the same time.
    """
    blocking = {
        rank: [other for other in state.members if other in states and other != rank and states[other].lacks(state)]
        for rank, state in states.items()
    }
    # Ranks that no rank of the rest blocks may go on: what is left once they are taken out, again and again, cannot.
    left = set(blocking)
    while free := {rank for rank in left if left.isdisjoint(blocking[rank])}:
        left -= free
    path = list[int]()
    rank = min(left, default=-1)
    while left and rank not in path:
        path.append(rank)
        rank = next(other for other in blocking[rank] if other in left)
    return path[path.index(rank) :] if path else []
