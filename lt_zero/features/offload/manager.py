"""The offload of one engine: its buckets in host memory or files; its background steps: overlap.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.units import format_bytes
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.bucket_weights import NO_COPY
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.storage_plan import DEVICE, HOST, NVME
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.pinned import return_large_blocks
from lt_zero.core.stores.store import Place, Speed, stream
from lt_zero.features.offload.overlap import SteppingOffload
from lt_zero.offload.background import Background
from lt_zero.offload.host_store import HostLink, host_place
from lt_zero.offload.nvme_store import NvmeFiles

log = logging.getLogger("lt_zero")

_PROBE = 256 << 20  # most bytes that a measurement of the disk moves
# Devices of the configuration whose stores are streamed.
_TIERS: dict[str, Callable[..., NvmeFiles]] = {"nvme": NvmeFiles}


@dataclass(kw_only=True)
class OffloadManager(SteppingOffload):
    """Files, host link and background thread of one engine."""

    optim: NvmeFiles | None = None  # files of master weights, states and gradients
    params: NvmeFiles | None = None  # files of the weights that gathers read
    host_link: HostLink | None = None

    @property
    @override
    def streams(self) -> bool:
        return self.optim is not None

    @override
    def stream_buckets(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        assert self.optim is not None
        groups = [bucket.stores_of_step for bucket in buckets]
        with self.optim.streaming():
            for number in stream(groups, self.optim.room, self.how.pipeline_read, self.how.pipeline_write):
                yield buckets[number]

    @override
    def streaming(self) -> AbstractContextManager[object]:
        """Context for visiting buckets one by one. See ``NvmeFiles.streaming``."""
        return self.optim.streaming() if self.optim is not None else nullcontext()

    @property
    def tiers(self) -> Collection[NvmeFiles]:
        """The files."""
        return dict.fromkeys(tier for tier in (self.optim, self.params) if tier is not None)

    @override
    def find_problem(self) -> SwapError | None:
        problems = (tier.problem for tier in self.tiers)
        return self.failure or next(filter(None, problems), None) or super().find_problem()

    @override
    def check(self, world: Ranks, name: str) -> None:
        if self.has_files or self.overlaps:
            with world.agree(name, SwapError):
                if (problem := self.find_problem()) is not None:
                    raise problem

    @override
    def require(self, world: World, states: int) -> None:
        if self.optim is not None:
            with world.agree("reserving room for optimizer states", SwapError):
                self.optim.require(states)

    @override
    def announce(self, buckets: Sequence[Bucket], states: int) -> str:
        tier = self.optim or self.params
        if tier is None:
            return ""
        read = written = 0  # bytes of this rank per optimizer step with one backward, clipping included
        for bucket in buckets:
            numel = bucket.compute.shard.numel()
            weights = bucket.weights
            kept = numel * (weights.master_dtype.itemsize + bucket.storage.moments.bytes_per_element * states)
            if bucket.streamed:
                grads = numel * bucket.grads.dtype.itemsize
                read, written = read + int(kept) + 2 * grads, written + int(kept) + grads
            if bucket.sharding.params and weights.gather_source.streamed:
                read += 2 * numel * weights.gather_source.dtype.itemsize  # in forward and in backward
                written += numel * bucket.dtype.itemsize if bucket.streamed and weights.copy is not NO_COPY else 0
        world = buckets[0].group.world
        mine = Speed(1.0, 1.0)
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

    @property
    @override
    def buffer_nbytes(self) -> int:
        staging = self.host_link.slots.nbytes if self.host_link is not None else 0
        return staging + sum(tier.spare_nbytes for tier in self.tiers)

    @property
    @override
    def file_nbytes(self) -> int:
        return sum(tier.bytes_on_disk for tier in self.tiers)

    @override
    def rest(self) -> None:
        super().rest()
        for tier in self.tiers:
            tier.rest()

    @override
    def close(self) -> None:
        super().close()
        for tier in self.tiers:
            tier.close()
        self.optim = self.params = None


def open_offload(
    world: World, buckets: Sequence[Bucket], options: EngineOptions, device: torch.device
) -> OffloadManager:
    """Say where the tensors of each bucket are kept, as the options say.

    Call it before ``Bucket.load_initial``. Collective over ``world``, some of whose ranks may have no buckets, or none
    that is offloaded.

    Raises:
        SwapError: a path cannot be used.
    """
    optim = options.offload_states
    params = options.offload_params
    apart = accelerator.is_apart(device)
    for name, block in (("offload_optimizer", optim), ("offload_param", params)):
        if block.device == "cpu" and not apart:
            log.info("zero_optimization.%s.device=cpu has no effect: the model is on the CPU already", name)
    manager = OffloadManager(how=optim, has_files=bool(_TIERS.keys() & {optim.device, params.device}))
    pin = accelerator.is_accelerator(device) and options.pin_memory
    if manager.has_files:
        return_large_blocks()
        numels = [b.compute.shard.numel() for b in buckets]
        moments = [b.storage.moments for b in buckets]
        codec = next(filter(None, (b.storage.codecs.rests for b in buckets)), None)
        files = (world.rank, options.files, numels, moments, [b.storage.trains for b in buckets], codec)
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
    if own:
        pipeline = (optim.buffer_count, optim.pipeline_read, optim.pipeline_write)
        streaming = manager.optim.streaming if manager.optim is not None else nullcontext  # without the manager
        manager.overlap(Background(*pipeline, streaming, device))
    elif bool(offloads):
        manager.overlap(None)
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
