"""Process groups on devices with a backend of their own, and the end of its collectives after an error."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import lt_zero
from lt_zero.common import accelerator, compat
from lt_zero.config import ZeroConfig
from lt_zero.config.options import group_options
from lt_zero.core.ask import configure_group
from lt_zero.core.comm import launched_group, process_groups
from lt_zero.core.comm import world as world_module
from lt_zero.core.comm.process_groups import Communicators
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.health.hang_detection import HangDetector
from lt_zero.features import features_of
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.planning.communicators import communicators
from tests.support.features import skip_without
from tests.support.pool import Pool
from tests.support.simulated import one_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@contextmanager
def default_group(backend: str | None) -> Iterator[None]:
    """Context with a default group of one rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None])
def test_a_group_is_known_by_its_backend_for_the_device(backend: str | None) -> None:
    with default_group(backend):
        group = ShardGroup.of_all(World(dist.new_group(), CPU))
        assert group.gathers_in_threads
        assert group.backend == "gloo"
        assert group.world.order.host is group.process_group
        assert dist.get_backend(group.reductions) == "gloo"


def test_a_backend_for_each_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert [process_groups.backend_of(device) for device in (CPU, GPU)] == ["gloo", "nccl"]


def test_ranks_on_a_device_whose_tensors_no_backend_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch says it of MPS, and of XPU without its backend."""
    for kind in ("mps", "xpu"):
        monkeypatch.setattr(accelerator, "default_kind", lambda kind=kind: torch.device(kind))
        with default_group("gloo"):
            process_groups.check_device(torch.device(kind), 1)
            with pytest.raises(RuntimeError, match=f"'{kind}' with 2 ranks.*'gloo'.*process_group_backend"):
                process_groups.check_device(torch.device(kind), 2)
    with default_group("gloo"):
        process_groups.check_device(CPU, 2)


def test_a_device_that_torch_accelerator_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, found in ((CPU, "has none"), (GPU, "has 'cuda' only")):
        monkeypatch.setattr(accelerator, "default_kind", lambda there=there: there)
        with pytest.raises(RuntimeError, match=f"device='xla:0'.*{found}"):
            World.join(torch.device("xla", 0))


def test_gloo_for_a_gpu_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with default_group("gloo"), caplog.at_level(logging.WARNING, "lt_zero"):
        World(dist.new_group(), CPU)
        assert not caplog.records
        World(dist.new_group(), GPU)
        (record,) = caplog.records
    assert "gloo for tensors on cuda" in record.getMessage()
    assert "'nccl'" in record.getMessage()


@pytest.mark.parametrize(("backend", "bound"), [(None, True), ("cpu:gloo,cuda:nccl", True), ("gloo", False)])
def test_the_default_group_is_bound_to_the_gpu(
    backend: str | None, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then NCCL splits groups off it, where it would connect each anew."""
    made = list[Any]()
    for name, value in {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks do not meet before they join
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("is_available", "make_current"):
        monkeypatch.setattr(accelerator, name, lambda device=None: True)
    monkeypatch.setattr(accelerator, "default_kind", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    monkeypatch.setattr(accelerator, "default_device", lambda index: torch.device("cuda", index))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: made.append((args, kwargs)))
    monkeypatch.setattr(launched_group, "refuse_alone", lambda size: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    lt_zero.init_distributed(backend)
    (((first, *_), kwargs),) = made
    assert first == (backend or "nccl")
    assert kwargs["device_id"] == (torch.device("cuda", 1) if bound else None)


class _Communicators:
    """NCCL's communicators of some groups, of which ``stuck`` say whether their abort blocks."""

    def __init__(self, count: int, stuck: bool = False) -> None:
        self.calls, self.ended = list[str](), threading.Event()
        self._stuck = stuck
        self.groups = [_Group(self, f"group {number}") for number in range(count)]

    def call(self, what: str) -> None:
        self.calls.append(what)
        if self._stuck and what.startswith("abort"):
            self.ended.wait(60.0)


class _Group:
    def __init__(self, of: _Communicators, name: str) -> None:
        self._of, self._name = of, name

    def _get_backend(self, device: torch.device) -> _Group:
        assert device.type == "cuda"
        return self

    def _group_start(self) -> None:
        self._of.call("start")

    def _group_end(self) -> None:
        self._of.call("end")

    def abort(self) -> None:
        self._of.call(f"abort {self._name}")


@contextmanager
def there_are(found: _Communicators) -> Iterator[None]:
    """Context in which a process has these groups of NCCL, beside those of gloo that it has."""
    known, backend_of = compat.process_groups, process_groups.backend_of

    def backend(device: torch.device, group: Any = None) -> str:
        return "nccl" if isinstance(group, _Group) and device.type == "cuda" else backend_of(device, group)

    with (
        mock.patch.object(compat, "process_groups", return_value=[*known(), *found.groups]),
        mock.patch.object(process_groups, "backend_of", backend),
    ):
        yield


AT_ONCE = ["start", "abort group 2", "abort group 1", "abort group 0", "end"]


def test_all_groups_are_aborted_at_once() -> None:
    found = _Communicators(3)
    with default_group("gloo"), there_are(found):
        process_groups.abort_nccl()
        assert found.calls == AT_ONCE
        dist.barrier()  # gloo's stay


def test_an_abort_that_blocks_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    found = _Communicators(2, stuck=True)
    with there_are(found), caplog.at_level(logging.WARNING, "lt_zero"):
        process_groups.abort_nccl(limit=0.1)
    found.ended.set()
    assert "may wait at its exit" in caplog.text


@pytest.mark.parametrize("stuck", [False, True])
def test_a_device_that_comes_to_rest_keeps_its_groups(stuck: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ended = _Communicators(3), threading.Event()
    monkeypatch.setattr(accelerator, "synchronize", lambda device: ended.wait(60.0) if stuck else None)
    with there_are(found):
        process_groups.abort_if_stuck(GPU, patience=0.1 if stuck else 60.0)
    ended.set()
    assert found.calls == (AT_ONCE if stuck else [])


def _ends(how: str) -> list[str]:
    """The calls of NCCL on a rank after an error, or after none."""
    world, found = World.join(CPU), _Communicators(3)
    detector = world.detector
    assert isinstance(detector, HangDetector)
    error = RuntimeError("fails on all ranks")
    with there_are(found):
        if how == "stuck":
            # A device whose kernels do not end.
            ended, soon = threading.Event(), partial(process_groups.abort_if_stuck, patience=0.1)
            with (
                mock.patch.object(accelerator, "is_accelerator", return_value=True),
                mock.patch.object(accelerator, "synchronize", side_effect=lambda device: ended.wait(60.0)),
                mock.patch.object(world_module, "abort_if_stuck", soon),
            ):
                world.give_up(error)
            ended.set()
        elif how == "error":
            world.post_error(error)
            detector.abort()
        elif how == "verdict":
            detector._reporter.close_connections(0)
        else:
            detector.abort()
    return found.calls


@pytest.mark.parametrize("how", ["none", "error", "verdict", "stuck"])
def test_a_rank_with_an_error_does_not_wait_for_the_others(how: str, pool: Pool) -> None:
    assert pool.run(2, _ends, how) == [[] if how == "none" else AT_ONCE] * 2


@contextmanager
def splits(can: bool) -> Iterator[list[str]]:
    """Context in which rank 0's groups of the fake backend are split off, as NCCL's are; the calls of torch."""
    calls, make = list[str](), dist.new_group

    def new(*args: Any, **kwargs: Any) -> Any:
        calls.append("new_group")
        return make(*args, **kwargs)

    def split(parent: Any, parts: list[list[int]], timeout: Any) -> Any:
        calls.append("split_group")
        ranks = dist.get_process_group_ranks(parent)
        (mine,) = (part for part in parts if dist.get_rank(parent) in part)
        return make([ranks[rank] for rank in mine])

    with (
        mock.patch.object(dist, "new_group", new),
        mock.patch.object(dist, "split_group", split),
        mock.patch.object(world_module, "can_split", return_value=can),
    ):
        yield calls


def _groups(group: ShardGroup) -> list[list[int]]:
    """The ranks of the groups that are made at start-up."""
    config = ZeroConfig.of({"zero_optimization": {"stage": 3, "mics_shard_size": 8}})
    configure_group(group, group_options(config), features_of(config))
    group.allow_background()
    return [dist.get_process_group_ranks(found) for found in group.world.process_groups]


def test_groups_are_split_off_in_one_operation_for_all_parts() -> None:
    """The operations of 1,024 ranks in rows of 8: each is one of all ranks, through the store."""
    with splits(False) as calls, one_of(1024, CPU) as group:
        ranks = _groups(group)
    assert len(calls) == 2 + 2 * 128 + 8 + 128
    with splits(True) as calls, one_of(1024, CPU) as group:
        assert _groups(group) == ranks
    assert calls == ["new_group", *["split_group"] * 5]


def test_a_world_of_some_ranks_splits_by_its_own_numbers() -> None:
    with splits(True) as calls, one_of(8, CPU):
        world = World(dist.new_group([0, 2, 4, 6]), CPU)
        made = world.new_group(None, [[0, 2], [1, 3]])
        assert dist.get_process_group_ranks(made) == [0, 4]
    assert calls[-2:] == ["new_group", "split_group"]


def test_groups_whose_name_is_taken_are_made_one_by_one() -> None:
    """torch counts groups in the names of those that are split off, and raises for a name that there is."""
    with splits(True) as calls, one_of(4, CPU) as group:
        for taken, number, made in [(False, 7, "split_group"), (True, 7, "new_group")]:
            with mock.patch.object(world_module, "name_of_split", return_value=(taken, number)):
                group.world.new_group(None, [[0, 1], [2, 3]])
            assert calls[-1] == made
        name = distributed_c10d._process_group_name([0, 1], use_hashed_name=True)
        with mock.patch.dict(distributed_c10d._world.pg_names):
            assert not compat.name_of_split([0, 1])[0]
            distributed_c10d._world.pg_names[next(iter(distributed_c10d._world.pg_names))] = name
            assert compat.name_of_split([0, 1])[0]


@pytest.mark.parametrize(
    ("backend", "bound", "can"), [("nccl", GPU, True), ("nccl", None, False), ("gloo", GPU, False)]
)
def test_nccl_splits_where_it_is_bound_to_a_device(backend: str, bound: torch.device | None, can: bool) -> None:
    with mock.patch.object(dist, "group", mock.Mock(WORLD=mock.Mock(bound_device_id=bound))):
        assert process_groups.can_split(backend) == can


@contextmanager
def bound_like_nccl(ranks: int) -> Iterator[tuple[World, list[str]]]:
    """Rank 0 of ``ranks`` whose default group is bound to a device, and what NCCL would have to do for all ranks."""
    everywhere = list[str]()
    source = mock.Mock(perform_nocolor_split=lambda device: everywhere.append("split for others"))
    make, take = dist.new_group, distributed_c10d._get_split_source

    def new(members: Any, timeout: Any = None, backend: str = "fake", **how: Any) -> Any:
        if members is None or len(members) == ranks:
            everywhere.append(backend)
        return make(members, timeout, "fake", **how)

    def split(parent: Any, parts: list[list[int]], timeout: Any) -> Any:
        everywhere.append("split")
        (mine,) = (part for part in parts if dist.get_rank(parent) in part)
        with mock.patch.object(distributed_c10d, "_get_split_source", take):
            return make(mine, timeout, "fake")

    with one_of(ranks, CPU) as group:
        dist.group.WORLD.bound_device_id = GPU
        with (
            mock.patch.object(dist, "new_group", new),
            mock.patch.object(dist, "split_group", split),
            mock.patch.object(
                distributed_c10d, "_get_split_source", lambda default: source if default.bound_device_id else None
            ),
            mock.patch.object(process_groups, "backend_of", return_value="nccl"),
            mock.patch.object(world_module, "backend_of", return_value="nccl"),
            mock.patch("lt_zero.core.comm.ranks.backend_of", return_value="nccl"),
        ):
            yield World(group.world.process_group, CPU), everywhere


MESHES: list[dict[str, int]] = [
    {"data": 1024},
    {"data": 128, "tensor": 8},
    {"data": 16, "tensor": 8, "pipeline": 8},
    {"data": 1, "pipeline": 1024},
    {"data": 1024, "expert": 64},
    {"data": 128, "sequence": 8},
    {"data": 8, "sequence": 8, "tensor": 8, "pipeline": 2, "expert": 8},
]


def _make_groups(sizes: dict[str, int], config: ZeroConfig, world: World) -> None:
    """Make the process groups that a rank of a mesh makes until training begins."""
    ranks = ParallelSizes(**sizes)
    groups: list[Any] = [ShardGroup.of_all(world)]
    if not ranks.is_plain:
        mesh = ParallelMesh(ranks, world)
        groups += [mesh.peers, mesh._cut, mesh._experts.same if mesh._experts is not None else None]
    for group in groups:
        if group is not None:
            configure_group(group, group_options(config), features_of(config))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_ranks_take_part_in_no_operation_for_groups_of_others(sizes: dict[str, int]) -> None:
    """They make one group of gloo, and split off what each of them gets.

    torch would split a communicator off the default group, an operation of all ranks, for each group of gloo that other
    ranks make: some of these meshes would need 2,000 of them.
    """
    with bound_like_nccl(1024) as (world, everywhere):
        _make_groups(sizes, ZeroConfig.of({"zero_optimization": {"stage": 3}}), world)
        made = [dist.get_process_group_ranks(group) for group in world.process_groups]
        assert dist.group.WORLD.bound_device_id == GPU
    assert Counter(everywhere) == {"gloo": 1, "split": world.communicators.number}
    assert sum(len(ranks) == 1 for ranks in made) <= 2  # axes of one rank share a group of each backend


def _communicators(sizes: dict[str, int], zero: dict[str, Any] | None = None) -> Counter[int]:
    """How many communicators of NCCL a rank of a mesh has beside the launcher's, by their number of ranks.

    Each takes 3 MiB of the device.
    """
    made = list[dist.ProcessGroup]()
    config = ZeroConfig.of({"zero_optimization": zero or {}})
    with (
        bound_like_nccl(1024) as (world, _),
        mock.patch.object(process_groups, "_connect", lambda group, *_: made.append(group)),
        mock.patch.object(accelerator, "taken_beside", side_effect=lambda device: (100 + 3 * len(made)) << 20),
    ):
        _make_groups(sizes, config, world)
        assert world.communicators == Communicators(len(made), 3 * len(made) << 20)
        return Counter([world.size, *map(dist.get_world_size, made)])  # the world's own was connected before


@pytest.mark.parametrize(
    ("sizes", "communicators"),
    [
        # All ranks: gathers, reductions. Data ranks: the axis, gathers, reductions. Tensor ranks: the axis.
        ({"data": 128, "tensor": 8}, {1024: 2, 128: 3, 8: 1}),
        # Those of a stage, likewise; a pipeline: what stages send, and their agreement.
        ({"data": 64, "tensor": 8, "pipeline": 2}, {1024: 2, 512: 2, 64: 3, 8: 1, 2: 2}),
        # The axis of data ranks is one of all ranks; those with the same experts: gathers, reductions.
        ({"data": 1024, "expert": 64}, {1024: 3, 64: 1, 16: 2}),
        # The user's group of those that see other tokens is one of all ranks.
        ({"data": 128, "sequence": 8}, {1024: 3, 128: 1, 8: 1}),
        ({"data": 64, "sequence": 8, "pipeline": 2}, {1024: 2, 512: 3, 64: 1, 8: 1, 2: 2}),
    ],
    ids=str,
)
def test_a_rank_of_a_mesh_has_as_few_communicators_as_may_be(
    sizes: dict[str, int], communicators: dict[int, int]
) -> None:
    """Each takes hundreds of MB of a GPU. Gathers, reductions and the user's collectives never share one."""
    assert _communicators(sizes) == communicators


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3},
        {"stage": 3, "mics_shard_size": 8},
        {"stage": 2, "mics_shard_size": 1},
        {"stage": 3, "zero_hpz_partition_size": 8},
        {"stage": 2, "offload_optimizer": {"device": "cpu", "overlap_step": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_forecasts_count_communicators(sizes: dict[str, int], zero: dict[str, Any]) -> None:
    skip_without(zero)
    config = ZeroConfig.of({"zero_optimization": zero})
    if sizes.get("pipeline") == 1024 and zero.get("mics_shard_size", 1) + zero.get("zero_hpz_partition_size", 1) > 2:
        pytest.skip("there is nothing to share")
    assert communicators(config, ParallelSizes(**sizes)) == 1 + sum(_communicators(sizes, zero).values())


def test_one_rank_has_no_communicators() -> None:
    assert communicators(ZeroConfig.of({}), ParallelSizes()) == 0


def test_a_world_measures_what_its_first_group_takes() -> None:
    """Groups of gloo take nothing of a device, and a device that does not tell its memory is not asked."""
    with (
        bound_like_nccl(4) as (known, _),
        mock.patch.object(accelerator, "taken_beside", side_effect=[100, 500, 500, 400]),
    ):
        world = World.join(CPU)
        assert world.communicators == Communicators(1, 400)
        world.new_group("gloo", [[0, 1], [2, 3]])
        world.new_group(None, [[0], [1], [2], [3]])
        assert world.communicators == Communicators(1, 400)
        world.new_group(None, [[0, 1], [2, 3]])  # another process has freed some
        assert world.communicators == Communicators(2, 400)
        assert str(world.communicators) == "400 bytes of 2 communicators"
    with bound_like_nccl(4) as (known, _):
        known.new_group(None, [[0, 1], [2, 3]])
        assert known.communicators == Communicators(1, 0)


def test_a_group_makes_all_its_connections_at_the_start() -> None:
    """NCCL connects rings in the first collective that takes them: in a backward that may wait for another group."""
    calls = list[str]()
    names = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
    newer = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
    with one_of(4, CPU), ExitStack() as stack:
        for name in names:
            called = newer[name] if hasattr(dist, newer.get(name, "")) else name
            stack.enter_context(mock.patch.object(dist, called, lambda *_, name=name, **how: calls.append(name)))
        process_groups.new_group([0, 1, 2], None, "fake", CPU)
        process_groups.new_group([0, 1, 2], None, "fake", CPU, exchanges=True)
        process_groups.new_group([0], None, "fake", CPU, connects=False)
    assert calls == [*names[:3], *names]


def test_a_group_that_ranks_no_longer_make_together_names_the_rank_that_has_ended() -> None:
    """Where that rank serves torch's store, or another has ended for it, the store only says that it is closed."""
    with one_of(4, CPU) as group:
        detector = mock.Mock(cause=lambda: "Rank 3 was killed.")
        group.world.watch.detector = lambda: detector
        closed = RuntimeError("The ranks cannot connect a gloo process group: Failed to recv, got 0 bytes.")
        with (
            mock.patch.object(world_module, "new_group", side_effect=closed),
            pytest.raises(RuntimeError, match=r"^Rank 3 was killed\.$"),
        ):
            group.world.new_group(None, [[0, 1], [2, 3]])
