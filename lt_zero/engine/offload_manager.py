"""The offload of one engine: its buckets in host memory or files, and the background step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from lt_zero.comm.ranks import Ranks
from lt_zero.comm.world import World
from lt_zero.common import accelerator
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.units import format_bytes
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import OffloadOptimizer
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.bucket_weights import NO_COPY
from lt_zero.engine.step_flags import Section
from lt_zero.engine.storage_plan import DEVICE, HOST, NVME
from lt_zero.io.pinned import return_large_blocks
from lt_zero.io.thread_pool import SwapError
from lt_zero.offload.background import Background
from lt_zero.offload.host_store import HostLink, host_place, is_apart
from lt_zero.offload.nvme_store import NvmeFiles
from lt_zero.offload.store import Place, Speed, stream

log = logging.getLogger("lt_zero")

_PROBE = 256 << 20  # most bytes that a measurement of the disk moves
# Devices of the configuration whose stores are streamed.
_TIERS: dict[str, Callable[..., NvmeFiles]] = {"nvme": NvmeFiles}


@dataclass
class OffloadManager:
    """Files, host link and background thread of one engine.

    Attributes:
        active: there are some; without them, and without ``others``, ``find_problem`` finds nothing.
    """

    active: bool = False
    optim: NvmeFiles | None = None  # files of master weights, states and gradients
    params: NvmeFiles | None = None  # files of the weights that gathers read
    how: OffloadOptimizer = OffloadOptimizer()
    background: Background | None = None
    overlaps: bool = False  # there is, or was, a background thread on some rank
    has_files: bool = False  # on some rank
    partially_stepped: str = ""  # buckets whose weights are a step ahead; see overlap.py, Note [Beside backward]
    host_link: HostLink | None = None
    failure: SwapError | None = None  # the first error of a background step
    others: list[Callable[[], SwapError | None]] = field(default_factory=list)  # return errors of other files

    def stream_buckets(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """Yield each bucket with its stores in memory; the next is read and the last written meanwhile."""
        assert self.optim is not None
        groups = [bucket.stores_of_step for bucket in buckets]
        with self.optim.streaming():
            for number in stream(groups, self.optim.room, self.how.pipeline_read, self.how.pipeline_write):
                yield buckets[number]

    def note(self, error: Exception) -> None:
        """Record an error of a background step. See background.py, Note [Errors in the thread]."""
        if not isinstance(error, SwapError):
            log.error("A step in the background failed", exc_info=error)
            error = SwapError(f"a step in the background failed ({error!r}); restart from a checkpoint")
        self.failure = self.failure or error

    def streaming(self) -> AbstractContextManager[object]:
        """Context for visiting buckets one by one. See ``NvmeFiles.streaming``."""
        return self.optim.streaming() if self.optim is not None else nullcontext()

    def find_problem(self) -> SwapError | None:
        """The error of this rank, if any. See offload/nvme_store.py, Note [A failing disk]."""
        problems = [tier.problem for tier in (self.optim, self.params) if tier is not None]
        problems += [find() for find in self.others]
        return self.failure or next(filter(None, problems), None)

    def section(self, peers: Ranks) -> Section:
        """The flag of a step that says whether files of a rank failed; raises SwapError on all ``peers`` then."""

        def raise_problems(flags: Sequence[int]) -> None:
            if any(flags):
                problem = self.find_problem()
                raise SwapError(" ".join(peers.problems(str(problem) if problem else None, "files")))

        return Section("files", self._report, raise_problems)

    def _report(self) -> list[bool]:
        return [(self.active or bool(self.others)) and self.find_problem() is not None]

    def check(self, world: Ranks, name: str) -> None:
        """Raise SwapError on all ranks if one has an error. Collective if there are files or a background step."""
        if self.has_files or self.overlaps:
            with world.agree(name, SwapError):
                if (problem := self.find_problem()) is not None:
                    raise problem

    def refuse_partially_stepped(self, world: World, problem: str = "") -> None:
        """Raise SwapError on all ranks if one stepped buckets in a backward that no step followed. Collective.

        No rank can have done so unless ``overlaps``. ``problem``: another reason to raise, on this rank.
        """
        with world.agree("checking steps beside backward", SwapError):
            if problem:
                raise SwapError(problem)
            if self.partially_stepped:
                raise SwapError(
                    f"{self.partially_stepped} were stepped during a backward that no optimizer step followed, so the "
                    "weights are from two different steps. Load a checkpoint; to step only after backward, set "
                    "zero_optimization.offload_optimizer.overlap_step=false."
                )

    def accept_partially_stepped(self) -> None:
        """Go on with buckets that are a step ahead, if there are any, with a warning."""
        if self.partially_stepped:
            ahead, self.partially_stepped = self.partially_stepped, ""
            warn(f"Training goes on although the weights of {ahead} are a step ahead of the others: load a checkpoint.")

    def require(self, world: World, states: int) -> None:
        """Raise SwapError if a disk has no room for ``states`` states per element. Collective with files."""
        if self.optim is not None:
            with world.agree("reserving room for optimizer states", SwapError):
                self.optim.require(states)

    def announce(self, buckets: Sequence[Bucket], states: int) -> str:
        """Measure the disks on all ranks at once: a line for the user, '' if there are no files. Collective.

        ``states``: number of element-wise states of the optimizer.
        """
        tier = self.optim or self.params
        if tier is None:
            return ""
        read = written = 0  # bytes of this rank per optimizer step with one backward, clipping included
        for bucket in buckets:
            numel, weights = bucket.shard.numel(), bucket.weights
            kept = numel * (weights.master_dtype.itemsize + bucket.moments.bytes_per_element * states)
            if bucket.streamed:
                grads = numel * bucket.grads.dtype.itemsize
                read, written = read + int(kept) + 2 * grads, written + int(kept) + grads
            if bucket.sharding.params and weights.gather_source.streamed:
                read += 2 * numel * weights.gather_source.dtype.itemsize  # in forward and in backward
                written += numel * bucket.dtype.itemsize if bucket.streamed and weights.copy is not NO_COPY else 0
        world, mine = buckets[0].group.world, Speed(1.0, 1.0)
        with world.agree("measuring the disk", SwapError), progress_bar(f"Measuring the speed of {tier.where}"):
            mine = tier.speed(min(_PROBE, max(1 << 20, read)))
        speeds = world.host_gather(tuple(mine), "the speed of the disk")
        slowest = Speed(*(min(side) for side in zip(*speeds, strict=True)))
        seconds = slowest.seconds(read, written)
        return (
            f"{tier.where}: {format_bytes(slowest.read)}/s read, {format_bytes(slowest.write)}/s written by "
            f"each of {world.size} rank(s) at once. A step reads {format_bytes(read)} and writes "
            f"{format_bytes(written)} per rank: about {seconds:.1f} s, part of it overlapped with computation."
        )

    def rest(self) -> None:
        """Stop all threads; they restart when they are needed."""
        if self.background is not None:
            self.background.close()
        for tier in filter(None, {self.optim, self.params}):
            tier.rest()

    def close(self) -> None:
        """Stop the background thread and remove the files."""
        if self.background is not None:
            self.background.close()
        for tier in filter(None, {self.optim, self.params}):
            tier.close()
        self.background = self.optim = self.params = None


def open_offload_manager(
    world: World, buckets: Sequence[Bucket], config: ZeroConfig, device: torch.device
) -> OffloadManager:
    """Say where the tensors of each bucket are kept, as the configuration offloads them.

    Call it before ``Bucket.load_initial``. Collective over ``world``, some of whose ranks may have no buckets, or none
    that is offloaded.

    Raises:
        SwapError: a path cannot be used.
    """
    zero, manager, apart = config.zero_optimization, OffloadManager(), is_apart(device)
    optim, params = zero.offload_optimizer, zero.param_offload
    for name, block in (("offload_optimizer", optim), ("offload_param", params)):
        if block.device == "cpu" and not apart:
            log.info("zero_optimization.%s.device=cpu has no effect: the model is on the CPU already", name)
    if (optim.device, params.device) == ("none", "none"):
        return manager
    manager.active, manager.how = True, optim
    pin = accelerator.is_accelerator(device) and optim.pin_memory and params.pin_memory
    manager.has_files = bool(_TIERS.keys() & {optim.device, params.device})
    if manager.has_files:
        return_large_blocks()
        numels, moments = [b.shard.numel() for b in buckets], [b.moments for b in buckets]
        codec = next(filter(None, (b.storage.codecs.rests for b in buckets)), None)
        files = (world.rank, config.aio, numels, moments, [b.storage.trains for b in buckets], codec)
        with (
            world.agree("opening the folder for states", SwapError),
            progress_bar("Preparing the files of states in nvme_path"),
        ):
            if optim.device in _TIERS:
                manager.optim = _TIERS[optim.device](optim.nvme_path, *files, room=optim.buffer_count, pin=pin)
            if (optim.device, optim.nvme_path) == (params.device, params.nvme_path):
                manager.params = manager.optim
            elif params.device in _TIERS:
                manager.params = _TIERS[params.device](params.nvme_path, *files, pin=pin)
    link: HostLink | None = None
    if apart:
        link = manager.host_link = HostLink(device, pin, max((b.storage.cast_nbytes for b in buckets), default=0))
    for record, bucket in enumerate(buckets):
        bucket.set_stores(*_places(manager, bucket, record, link))
    if optim.device == "none" or optim.overlap_step is False:
        return manager
    offloads = torch.tensor([any(bucket.offloaded for bucket in buckets)], dtype=torch.uint8)
    own = bool(offloads)
    world.host_max(offloads, "whether steps run in the background").wait()
    manager.overlaps = bool(offloads)
    if own:
        pipeline = (optim.buffer_count, optim.pipeline_read, optim.pipeline_write)
        streaming = manager.optim.streaming if manager.optim is not None else nullcontext  # without the manager
        manager.background = Background(*pipeline, streaming, device)
    return manager


def _places(manager: OffloadManager, bucket: Bucket, record: int, link: HostLink | None) -> Iterator[Place]:
    """The places of what a step of a bucket reads, and of what gathers read. ``record``: its number in files."""
    keeps = bucket.storage
    cast = keeps.weights != DEVICE or keeps.dtype != keeps.master
    for tier, kept in ((manager.optim, keeps.states), (manager.params, keeps.weights)):
        if tier is not None and kept == NVME:
            yield tier.place(record, link)
        elif link is not None and kept == HOST:
            yield host_place(link, pin_master=not cast)
        else:
            yield bucket.memory
