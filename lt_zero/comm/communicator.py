"""Every collective of the engine, as launch/wait pairs; what differs between gloo and NCCL is decided here.

Note [Collectives on gloo]
    gloo's reduce-scatter is an all-reduce that throws most of its result away, and its all-gather slows down above
    16 MB. An all-to-all followed by a local sum, and one broadcast per rank into views of the result, move half the
    bytes and run 2-3x faster. The local sum adds the ranks' contributions in rank order in the accumulator's dtype
    (fp32 by default), so an element's sum does not depend on where in a bucket it lies: on gloo all stages agree
    bitwise. And 16-bit gradients can be sent as they are: nothing is rounded, and no sum overflows, on the way.
    NCCL has good collectives of its own and gets them as they are.
    Ranks of one host do not even need the sockets: shared_memory.py.

Note [Order of launches]
    Ranks must launch the same collectives in the same order. Nothing in this file reorders; the callers launch in an
    order that depends on the module and the recorded schedule only, never on data (grad_reducer.py, gather_order.py).
    When a bucket's gradients are complete does depend on data, relative to the gathers around it: a rank whose router
    skipped an expert reduces later. So reductions have a process group of their own, and are numbered apart. A user's
    module may break the rule, so it is checked: collective_check.py, Note [Unforeseen collectives].
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.comm.agreement import Agreement
from lt_zero.comm.collective_check import Sequence
from lt_zero.comm.ended_ranks import in_collective
from lt_zero.comm.hang_detection import HangDetector, user_line
from lt_zero.comm.shared_memory import SharedArena, supported, wide
from lt_zero.comm.work import CALL, FENCE, All, Done, Launch, Watch, Work
from lt_zero.common.flat_storage import flat_empty
from lt_zero.common.module_hooks import Here


def with_index(device: torch.device) -> torch.device:
    """``device`` with the number that "cuda" leaves out: the calling thread's, which other threads do not share."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _collective(new: str, old: str) -> Any:
    """The single-tensor collective under its current name (torch renamed them in 2.13 and warns on the old ones)."""
    return getattr(dist, new, None) or getattr(dist, old)


class Comm(Here):
    """The collectives of one data-parallel group.

    Args:
        group: the process group of the engine's traffic, or None for a single process without one.
        reductions: a second group over the same ranks, for gradients. See Note [Order of launches].
        device: where the buckets live.
        check: agree on each collective before its launch, reductions included (debug mode).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        reductions: dist.ProcessGroup | None,
        device: torch.device,
        check: bool = False,
    ) -> None:
        self.device = with_index(device)
        self.use_reduce_scatter = True  # zero_optimization.reduce_scatter
        self.sum_gradients = False  # gradient_allreduce_op: sum
        self.predivide: float | None = None  # gradient_predivide_factor, or the world size for prescale_gradients
        self._group, self._reductions = group, reductions
        self.world = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self._gloo = group is not None and dist.get_backend(group) == "gloo"
        # Decisions of the host (which parameters were used, in which order) must not make the GPU wait.
        self._host = group
        # A simulated group (torch's "fake" backend) has no other processes; it answers for them with this one's values.
        if group is not None and dist.get_backend(group) not in ("gloo", "fake"):
            self._host = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._checked = reductions
        if check and group is not None and self._host is not group:
            self._checked = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._check = check
        self._sequences = {"collective": Sequence(), "reduction": Sequence()}
        self._agreements = 0
        self._watch = Watch()
        self._roll_call: HangDetector | None = None
        self.agreement = Agreement()  # of this rank alone, unless there are others
        self._background: dist.ProcessGroup | None = None  # see ``allow_background``
        self._saving: dist.ProcessGroup | None = None  # see ``saving_group``
        self._arena: SharedArena | None = None
        self._written = self._read = False  # windows changed, or read, since the last fence
        self._all_gather = _collective("all_gather_single", "all_gather_into_tensor")
        self._reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")

    @classmethod
    def for_world(cls, device: torch.device, check: bool = False) -> Comm:
        """A communicator over all ranks of the default process group, with a process group of its own.

        Lightning issues collectives on the default group between batches and swallows their errors; traffic of ours
        on the same group could then be matched with theirs.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None, None, device)
        groups = [dist.new_group(), dist.new_group()]
        comm = cls(groups[0], groups[1], device, check)
        assert comm._host is not None
        comm._roll_call = calls = HangDetector.over(groups, comm._host, comm._watch)
        if calls is not None:
            comm.agreement, comm._watch.cause = calls.agreement, calls.ended.explain
        if comm._gloo and device.type == "cpu":
            comm._share_memory()
        return comm

    # ---- operations of all ranks -----------------------------------------------------------------------------------

    def roll_call(self, what: str) -> None:
        """Wait until every rank has called this for ``what``, an operation that needs them all; collective.

        Raises:
            RuntimeError: a rank never will, or called it for something else. No collective works afterwards.
        """
        if self._roll_call is None:
            return
        self._roll_call.refuse_fork(what)
        try:
            self._announce(CALL, what, 0, agree=True)
        except RuntimeError as error:
            if self._watch.verdict is not None or not (gone := self._roll_call.gone()):
                raise
            ended = ", ".join(f"rank {rank}" for rank in gone)
            raise RuntimeError(
                f"`{what}` was called on rank {self.rank} ({user_line(sys._getframe())}) and not on {ended}, which has"
                " ended or left the process group."
            ) from error

    def begin_run(self) -> None:
        """From now on this rank answers others that ask for it, and comes to ``agreement``. On all ranks."""
        if self._roll_call is not None:
            self._roll_call.listen()
            self._roll_call.ended.forget()
        self.agreement.begin()

    def rest(self) -> None:
        """The run is over, on this rank at least: end the thread. The next operation of all ranks starts it again."""
        with suppress(RuntimeError):  # who serves the store is gone
            self.agreement.end()
        if self._roll_call is not None:
            self._roll_call.rest()

    def explain(self, error: BaseException) -> bool:
        """Put into an error's text what led to it, if that is known: a failed roll call, another rank's end."""
        if self._roll_call is None or not isinstance(error, RuntimeError):
            return False
        verdict = self._watch.verdict
        if verdict is not None:
            if verdict not in str(error):
                error.args = (f"{verdict} ({error})",)
            return True
        cause = self._roll_call.ended.explain() if in_collective(error) else None
        if cause is not None and cause not in str(error):
            error.args = (f"{error}\n{cause}",)
        return cause is not None

    def tell(self, error: BaseException) -> None:
        """An error ends this rank: explain it, or leave word of it for the ranks that fail because of it."""
        if not self.explain(error) and self._roll_call is not None:
            self._roll_call.tell(error)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around collectives of torch's that wait by themselves: errors in it are explained."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise

    # ---- in the background ---------------------------------------------------------------------------------------

    def allow_background(self) -> None:
        """Have a process group for what another thread launches (background.py). Collective."""
        if self.world > 1 and self._background is None:
            ranks = dist.get_process_group_ranks(self._group)
            self._background = dist.new_group(ranks, backend=dist.get_backend(self._group))
            dist.barrier(self._background)  # connects it now: later other collectives might wait for each other

    def saving_group(self, background: bool) -> dist.ProcessGroup | None:
        """The process group over which ranks agree on what they save; None in a single process. Collective.

        ``background``: one of its own, for a thread that saves while training goes on.
        """
        if self.world > 1 and background and self._saving is None:
            self._saving = dist.new_group(dist.get_process_group_ranks(self._group), backend="gloo")
            dist.barrier(self._saving)  # connects it now
        return self._saving if background else self._host

    def leave_saving_group(self) -> None:
        """The next save in the background gets a group of its own."""
        self._saving = None

    def publish(self, flat: Tensor | None) -> Work:
        """In the background: fill ``flat`` as ``all_gather`` does; None: what was written to windows is complete.

        Not compared in debug mode: the order does not depend on the model.
        """
        if self.world == 1:
            return Done()
        if flat is None:
            if self._arena is not None:
                return self._all([dist.barrier(self._background, async_op=True)], None)
            return Done()
        return self._gather_shards(flat, self._background, None)

    # ---- windows: see shared_memory.py, Note [Shared windows] -------------------------------------------------------

    def _share_memory(self) -> None:
        """Use shared windows if all ranks can."""
        arena = SharedArena() if supported() else None
        addresses = self.host_gather(arena.address() if arena else None, "shared memory")
        agreed = self.host_gather(arena is not None and arena.connect(self.rank, addresses), "shared memory")
        self._arena = arena if all(agreed) else None

    @property
    def shares_memory(self) -> bool:
        return self._arena is not None

    @property
    def gathers_in_background(self) -> bool:
        """Whether a launched all-gather goes on while the caller computes; reading a peer's memory does not."""
        return self._arena is None and self.world > 1

    @property
    def sums_wide(self) -> bool:
        """Whether ``reduce_scatter`` adds in the dtype of ``out`` whatever dtype is sent."""
        return self.world == 1 or self._arena is not None or (self._gloo and self.use_reduce_scatter)

    def factors(self, wire: torch.dtype) -> tuple[float, float]:
        """By what gradients sent as ``wire`` are multiplied before and after the sum.

        A sum in fp16 could exceed 65504 although the mean does not, so it is divided beforehand; bf16 has fp32's range.
        """
        whole = 1.0 if self.sum_gradients else float(self.world)
        before = self.predivide
        if before is None:
            before = whole if wire == torch.float16 and not self.sums_wide else 1.0
        return 1.0 / before, before / whole

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1D tensor that collectives read best, for the life of a run; in the same order on all ranks."""
        if self._arena is not None:
            return self._arena.allocate(numel, dtype)
        return flat_empty(numel, dtype, self.device)

    def before_write(self) -> None:
        """What was allocated here is about to change: wait until no rank reads it any more."""
        if self._read:
            self.fence()

    def after_write(self) -> None:
        """What was allocated here has changed: the next reader waits until every rank is done writing."""
        self._written = self._arena is not None

    def fence(self) -> None:
        """A barrier of the engine's group."""
        self._written = self._read = False
        if self._arena is not None:
            self._announce(FENCE, "shared memory", 0, agree=True)

    def _announce(
        self, operation: str, name: str, numel: int, channel: str = "collective", agree: bool = False
    ) -> Launch:
        """Number a collective that is launched next; all ranks are here afterwards if it has to be agreed upon.

        Raises:
            RuntimeError: ranks diverge, see collective_check.py.
        """
        launch = self._watch.launch(channel, operation, name, numel)
        foreseen = self._sequences[channel].add(operation, name, numel)
        if self._check or agree or not (foreseen or channel == "reduction"):
            self._agree(launch)
        return launch

    def _agree(self, launch: Launch) -> None:
        """Compare what the ranks have run so far, ``launch`` included; a barrier."""
        mine, group = self._sequences[launch.channel].sign, self._host
        if self._roll_call is None or group is None:
            return
        if launch.channel == "reduction":
            group = self._checked
        if self._arena is not None and launch.channel == "collective":
            self._agreements += 1
            self._arena.post(self._agreements % 2, mine)
            self._watch.wait(dist.barrier(group, async_op=True), launch)
            signs = self._arena.posted(self._agreements % 2)
        else:
            row = torch.empty(self.world, dtype=torch.int64)
            self._watch.wait(self._all_gather(row, torch.tensor([mine]), group=group, async_op=True), launch)
            signs = row.tolist()
        if any(sign != mine for sign in signs):
            self._roll_call.compare(launch)

    def _require_device(self, tensor: Tensor, name: str) -> None:
        """Raise for a tensor that the backend of a GPU's group would not take; so a run on the CPU shows it, too."""
        if tensor.device.type != self.device.type:
            raise RuntimeError(
                f"A collective for {name!r} got a tensor on {tensor.device}, its group is of {self.device}."
            )

    def _all(self, works: list[Any], launch: Launch | None, finish: Callable[[], object] | None = None) -> All:
        return All(works, finish, self._watch if self._gloo else None, launch)

    def _finish(self, work: Any, launch: Launch) -> None:
        if work is not None:  # or the backend has waited
            self._watch.wait(work, launch)

    def _peer(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

    def all_gather(self, flat: Tensor, name: str, own: Tensor | None = None) -> Work:
        """Fill ``flat`` (1D, world equal shards) from the ranks' own shards, which already lie in place.

        ``own`` is where the ranks' shards come from, if it was made by ``allocate``.
        """
        self._require_device(flat, name)
        if self.world == 1:
            return Done()
        shared = self._arena is not None and own is not None and self._arena.has(own)
        if shared and self._written:
            self.fence()
        launch = self._announce("all-gather", name, flat.numel())
        if self._arena is not None and own is not None and shared:
            self._arena.gather(self.rank, own, flat)
            self._read = True
            return Done()
        return self._gather_shards(flat, self._group, launch)

    def _gather_shards(self, flat: Tensor, group: dist.ProcessGroup | None, launch: Launch | None) -> Work:
        shards = flat.chunk(self.world)
        if self._gloo:
            works = [dist.broadcast(s, self._peer(r), group, async_op=True) for r, s in enumerate(shards)]
            return self._all(works, launch)
        return self._all([self._all_gather(flat, shards[self.rank], group=group, async_op=True)], launch)

    def reduce_scatter(self, out: Tensor, flat: Tensor, scratch: Tensor, add: bool, name: str) -> Work:
        """Average ``flat`` (1D, world shards) over the ranks and put this rank's shard into ``out``, or add it there.

        The caller has multiplied by what ``factors`` says comes before. ``flat`` and ``scratch`` (as large as ``flat``)
        belong to the collective until it was waited for. ``flat`` may have a narrower dtype than ``out`` if
        ``sums_wide``: the sum is as exact as if ``flat`` had been cast before.
        """
        after = self.factors(flat.dtype)[1]
        self._require_device(flat, name)
        if self.world == 1:
            return All([], lambda: _store(out, flat, add, after))
        launch = self._announce("reduce-scatter", name, flat.numel(), "reduction")
        arena = self._arena
        if arena is not None and arena.has(flat):
            entered = dist.barrier(self._reductions, async_op=True)
            return self._all([entered], launch, lambda: arena.sum(self.rank, flat, flat.numel(), out, add, after))
        if not self.use_reduce_scatter:
            summed = flat.chunk(self.world)[self.rank]
            work = dist.all_reduce(flat, group=self._reductions, async_op=True)
            return self._all([work], launch, lambda: _store(out, summed, add, after))
        if self._gloo:
            work = dist.all_to_all_single(scratch, flat, group=self._reductions, async_op=True)
            parts = scratch.chunk(self.world)
            return self._all([work], launch, lambda: _store(out, _sum_in_rank_order(parts, out.dtype), add, after))
        mine = scratch[: out.numel()]
        work = self._reduce_scatter(mine, flat, group=self._reductions, async_op=True)
        return self._all([work], launch, lambda: _store(out, mine, add, after))

    def all_reduce(self, out: Tensor, flat: Tensor, scratch: Tensor, add: bool, name: str) -> Work:
        """Average ``flat`` (1D, world shards) over the ranks and put all of it into ``out``, or add it there."""
        after = self.factors(flat.dtype)[1]
        self._require_device(flat, name)
        if self.world == 1:
            return All([], lambda: _store(out, flat, add, after))
        launch = self._announce("all-reduce", name, flat.numel(), "reduction")
        if not self._gloo:
            work = dist.all_reduce(flat, group=self._reductions, async_op=True)
            return self._all([work], launch, lambda: _store(out, flat, add, after))
        work = dist.all_to_all_single(scratch, flat, group=self._reductions, async_op=True)

        def finish() -> None:
            mine = flat.chunk(self.world)[self.rank]
            mine.copy_(_sum_in_rank_order(scratch.chunk(self.world), out.dtype).mul_(after))
            self._gather_shards(flat, self._reductions, launch).wait()
            _store(out, flat, add, 1.0)

        return self._all([work], launch, finish)

    def broadcast(self, tensor: Tensor, name: str, src: int = 0) -> None:
        """Give every rank the values that ``tensor`` has on rank ``src``."""
        self._require_device(tensor, name)
        if self.world > 1:
            launch = self._announce("broadcast", name, tensor.numel())
            self._finish(dist.broadcast(tensor, self._peer(src), group=self._group, async_op=self._gloo), launch)

    def sum_scalar(self, value: Tensor, name: str) -> Tensor:
        """The sum over all ranks of an fp64 tensor, which may be overwritten."""
        return self._reduce_small(value, dist.ReduceOp.SUM, name)

    def max_scalar(self, value: Tensor, name: str) -> Tensor:
        """The maximum over all ranks of a tensor."""
        return self._reduce_small(value, dist.ReduceOp.MAX, name)

    def _reduce_small(self, value: Tensor, op: Any, name: str) -> Tensor:
        self._require_device(value, name)
        if self.world > 1:
            launch = self._announce("all-reduce", name, value.numel())
            self._finish(dist.all_reduce(value, op=op, group=self._group, async_op=self._gloo), launch)
        return value

    def host_max(self, flags: Tensor, name: str) -> Work:
        """Element-wise maximum over the ranks of a CPU tensor, through the CPU side channel, in place."""
        if self.world == 1:
            return Done()
        launch = self._announce("flags", name, flags.numel())
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._host, async_op=True)
        return All([work], None, self._watch if self._roll_call is not None else None, launch)

    def problems(self, problem: str | None, name: str) -> list[str]:
        """What went wrong on any rank ("rank 1: ..."), on every rank; [] if nothing did."""
        flag = torch.tensor([problem is not None], dtype=torch.uint8)
        self.host_max(flag, name).wait()
        if not flag.item():
            return []
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.host_gather(problem, name)) if text is not None]

    def host_broadcast(self, value: Any, name: str) -> Any:
        """Rank 0's (small, picklable) Python value on every rank."""
        if self.world == 1:
            return value
        self._announce("object", name, 0, agree=True)  # torch's collective waits by itself: have all ranks at it
        box = [_packed(value) if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=self._peer(0), group=self._host)
        assert box[0] is not None
        return pickle.loads(box[0])

    def host_gather(self, value: Any, name: str) -> list[Any]:
        """The (small, picklable) Python values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        self._announce("objects", name, 0, agree=True)
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, _packed(value), group=self._host)
        return [pickle.loads(packed) for packed in box]


def try_gloo() -> None:
    """Open a gloo group of this process alone, and close it: most failures are those of the network interface.

    Raises:
        RuntimeError: torch is built without gloo, or gloo cannot use the network interface.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("torch is built without gloo.")
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))  # type: ignore[attr-defined]


def nccl_version() -> str:
    """The version of torch's NCCL; "" if it is built without."""
    if not dist.is_available() or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


class _Pickler(pickle.Pickler):
    """Tensors as bytes: left to itself, pickle calls ``torch.save`` for the whole storage of each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
        return _unpacked, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, value.shape)


def _packed(value: Any) -> bytes:
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getvalue()


def _unpacked(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _sum_in_rank_order(shards: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The sum of the ranks' contributions for a result in ``dtype``; may overwrite the first."""
    total = shards[0].to(wide(dtype))
    for shard in shards[1:]:
        total.add_(shard)
    return total


def _store(out: Tensor, value: Tensor, add: bool, factor: float) -> None:
    """``out = value * factor`` or ``out += value * factor``; ``value`` may be overwritten."""
    value = value.mul_(factor) if value.dtype == wide(value.dtype) else value.to(wide(value.dtype)).mul_(factor)
    if add:
        out.add_(value)
    else:
        out.copy_(value)
