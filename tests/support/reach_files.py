"""Where a configuration's values are looked for in host memory and files: what rests there, and how it moves."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from lt_zero.config.options import engine_options
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.thread_pool import IoPool
from lt_zero.offload import host_store
from lt_zero.offload.swap_file import SwapFile
from tests.support.offload_tools import change, noise
from tests.support.reach_engine import Config, Lab, engine_of, plugin_of


def files(lab: Lab, config: Config) -> Any:
    """Files in the folder of the test, by what they hold."""
    engine = engine_of(lab, config)
    found = {path.name.split("-")[1] for path in lab.folder.rglob("*") if path.is_file() and path.name[0].isdigit()}
    engine.offload_manager.close()
    return sorted(found)


def folder(lab: Lab, config: Config) -> Any:
    """Where the files are."""
    engine = engine_of(lab, config)
    found = {path.relative_to(lab.folder).parts[0] for path in lab.folder.rglob("*") if path.is_file()}
    engine.offload_manager.close()
    return found


def resting(lab: Lab, config: Config) -> Any:
    """How many buckets have files: for the optimizer, for gathers."""
    engine = engine_of(lab, config)
    found = [[b.places.step.streamed, b.places.gather.streamed] for b in engine.buckets]
    engine.offload_manager.close()
    return [sum(column) for column in zip(*found, strict=True)]


def pinned(lab: Lab, config: Config) -> Any:
    """Whether a GPU would have page-locked memory: for buckets, for what crosses to it."""
    from lt_zero.features.offload import manager as offload_manager

    made, _ = plugin_of(lab, config)
    engine, asked = engine_of(lab, {}), []
    options = engine_options(made, engine.policy)

    def link(device: torch.device, pin: bool, nbytes: int) -> Any:
        asked.append(pin)
        return SimpleNamespace(pin=pin)

    def buffer(nbytes: int, pin: bool) -> torch.Tensor:
        asked.append(pin)
        return torch.empty(nbytes, dtype=torch.uint8)

    with (
        mock.patch.object(offload_manager, "HostLink", link),
        mock.patch.object(host_store, "host_buffer", buffer),
    ):
        manager = offload_manager.open_offload(engine.world, engine.buckets, options, torch.device("cuda"))
        assert manager.host_link is not None
        host_store.host_place(manager.host_link).store("weights", 1, torch.float32).overwrite()
    return asked


def walked(lab: Lab, config: Config) -> Any:
    """While the third bucket is stepped: do the one before, itself, and the next one take memory?"""
    engine = engine_of(lab, config)
    stores = [bucket.weights.master for bucket in engine.buckets]
    visits = [[store.nbytes > 0 for store in stores] for _ in engine.offload_manager.stream_buckets(engine.buckets)]
    engine.offload_manager.close()
    return visits[2][1:4]


def requests(lab: Lab, config: Config) -> Any:
    """How many requests 64 KiB take."""
    engine = engine_of(lab, config)
    seen = []
    submit = IoPool.submit
    assert engine.offload_manager.optim is not None

    def look(pool: IoPool, count: int, *args: Any, **kwargs: Any) -> Any:
        seen.append(count)
        return submit(pool, count, *args, **kwargs)

    with mock.patch.object(IoPool, "submit", look):
        file = SwapFile(lab.folder / "file", [65536], engine.offload_manager.optim.pool)
        file.write(0, noise(65536)).wait()
    file.close()
    engine.offload_manager.close()
    return seen


def in_flight(lab: Lab, config: Config) -> Any:
    """How many requests of one transfer are worked on at a time, when none of them ends."""
    engine = engine_of(lab, config)
    assert engine.offload_manager.optim is not None
    lock = threading.Lock()
    release = threading.Event()
    running = 0

    def move(block: int) -> None:
        nonlocal running
        with lock:
            running += 1
        release.wait()

    pool = engine.offload_manager.optim.pool
    transfer, until = pool.submit(32, move, lambda error: None, None), time.monotonic() + 30
    while running < min(pool.threads, transfer._handed_out) and time.monotonic() < until:
        time.sleep(0.001)
    now = running
    release.set()
    transfer.wait()
    engine.offload_manager.close()
    return now


def damage(lab: Lab, config: Config) -> Any:
    """Whether a file that somebody has changed is found out."""
    engine = engine_of(lab, config)
    assert engine.offload_manager.optim is not None
    file = SwapFile(lab.folder / "file", [65536], engine.offload_manager.optim.pool)
    file.write(0, noise(65536)).wait()
    change(lab.folder / "file", 77, b"changed")
    try:
        file.read(0, noise(65536)).wait()
    except SwapError:
        return "found"
    finally:
        file.close()
        engine.offload_manager.close()
    return "taken as it is"
