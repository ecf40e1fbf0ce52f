from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

gc.disable()  # until tests are collected: what is imported lives for ever
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers of xdist send warnings to the first process, which imports the classes of these in a thread for each worker.
# Two that import Lightning at the same time can deadlock, which ends the run.
import lightning.pytorch  # noqa: F401
import pytest
import torch
from hypothesis import settings
from simulated_nodes import SimulatedNodes

from tests.support.features import OfParallel, there
from tests.support.nodes import NodePool, unavailable
from tests.support.pool import Pool

# No test depends on an idle machine.
settings.register_profile("of any speed", deadline=None)
settings.load_profile("of any speed")
torch.set_num_threads(1)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell starts jobs in the background so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Few tests that take long. Without this, xdist would give them out last, beside workers that have nothing left to do.
LONG = (
    "tests/test_house.py",
    "tests/test_start_up.py",
    "tests/test_walks.py",
    "tests/checkpoint/test_compiled_names.py",
    "tests/conformance/test_meshes.py",
    "tests/core/engine/test_compiled.py",
    "tests/core/engine/test_stream_order.py",
    "tests/e2e/test_checkpoint_kill.py",
    "tests/kernels/test_build.py",
    "tests/kernels/test_cuda_build.py",
    "tests/offload/test_private_folder.py",
    "tests/training/lightning/test_signals.py",
)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip files of tests that need ``lt_zero.parallel`` if it was taken out."""
    return None if there("parallel") else OfParallel.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: first those that take long for their number of tests, then by that number.

    Slow tests count, although they are left out: a file that has some has other tests that take long. ``make test``
    lets xdist give out the files in this order (``--no-loadscope-reorder``).
    """
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (not item.nodeid.startswith(LONG), -tests[item.path]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """The first process of several collects no tests."""
    if session.config.getoption("dist", "no") != "no":
        gc.enable()


# Python's own first one is 700. A test makes and drops thousands of objects that are in no cycle.
RARE = (20_000, 10, 10)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported lives for ever: collections while tests run need not look at it.

    The fast tests, and the workers of their pools, look for garbage rarely. Each task of a pool ends with a collection.
    The slow tests run with the thresholds that users have.
    """
    gc.collect()
    gc.freeze()
    if not any(item.get_closest_marker("slow") for item in session.items):
        gc.set_threshold(*RARE)
    gc.enable()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo worker processes, shared by all tests."""
    workers = Pool()
    workers.ensure(2)  # here, where no test's time runs
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def node_pool() -> Iterator[NodePool]:
    """Gloo worker processes in two simulated nodes of two ranks, shared by all tests marked ``nodes``."""
    if reason := unavailable():
        pytest.skip(reason)
    with SimulatedNodes(nodes=2, per_node=2) as nodes:
        workers = NodePool(nodes)
        yield workers
        workers.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("nodes") and (reason := unavailable()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """A Trainer that runs in this process leaves a process group and variables for its ranks: not for the next test."""
    environment, modules = dict(os.environ), len(sys.modules)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    if len(sys.modules) > modules:
        # As for what was imported before: most modules are imported when a test first needs them.
        gc.collect()
        gc.freeze()
