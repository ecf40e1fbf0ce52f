"""All that runs in streams of a GPU is ordered: checked on a CPU, by vector clocks instead of by timing.

See tests/support/happens_before.py. Planted bugs show that the checker sees what it is for.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lt_zero.common.errors import ConfigError
from lt_zero.config.load import ConfigWarning
from tests.support.features import skip_without, there
from tests.support.matrix import covering, only
from tests.support.pool import Pool
from tests.support.stream_order import (
    TENSOR,
    Bug,
    Run,
    config_of,
    hazards,
    hazards_of_a_foreground_save,
    hazards_of_a_save,
    hazards_of_a_skipped_step,
    planted,
)

_FAR = {"stage3_prefetch_bucket_size": 10**9, "stage3_max_reuse_distance": 0}  # gathers run as far ahead as they can


def _offloaded(optimizer: str, overlap: bool | str, param: str = "none") -> dict[str, object]:
    zero: dict[str, object] = {"offload_optimizer": {"device": optimizer, "overlap_step": overlap}}
    return {**zero, "offload_param": {"device": param}} if param != "none" else zero


_SAVED = {"activation_checkpointing": {"mode": "full", "cpu_checkpointing": True}}
_SAVED_IN_FILES = {"activation_checkpointing": {"mode": "full", "nvme_path": ""}}

ONE = {
    "host, stage 1": Run(1, _offloaded("cpu", "auto")),
    "host, stage 2": Run(2, _offloaded("cpu", "auto")),
    "host, stage 3": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}),
    "host beside the next forward, stage 2": Run(2, _offloaded("cpu", True)),
    "host beside the next forward, stage 3": Run(3, {**_offloaded("cpu", True, "cpu"), **_FAR}),
    "host, fp32, stage 3": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}, precision="32-true"),
    "host without overlap, stage 3": Run(3, {**_offloaded("cpu", False, "cpu"), **_FAR}),
    "host with averages, stage 1": Run(1, _offloaded("cpu", "auto"), averages=True),
    "host with averages, stage 3": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}, averages=True),
    "files, stage 2": Run(2, _offloaded("nvme", "auto")),
    "files, stage 3": Run(3, {**_offloaded("nvme", "auto", "nvme"), **_FAR}),
    "files beside the next forward, stage 3": Run(3, {**_offloaded("nvme", True, "nvme"), **_FAR}),
    "saved activations in host memory": Run(2, keys=_SAVED),
    "saved activations in files": Run(2, keys=_SAVED_IN_FILES),
    "saved activations beside offloaded states": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}, _SAVED),
    "late peer, stage 0": Run(0, peer=True),
    "late peer, stage 1": Run(1, peer=True),
    "late peer, stage 2": Run(2, peer=True),
    "late peer, stage 3": Run(3, _FAR, peer=True),
    "late peer, unused unit": Run(3, _FAR, peer=True, skips=True),
    "late peer, host, stage 3": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}, peer=True),
    "saves, stage 2": Run(2, saves=True),
}

_QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
_ONE_BIT = {"gradient_compression": {"algorithm": "1bit"}}
_VIRTUAL = {"reproducible": {"virtual_ranks": 4}}
_BETWEEN_NODES = {"gradient_compression": {"algorithm": "topk", "topk_ratio": 0.1, "hierarchical_compress": True}}

TWO = {
    "stage 0": Run(0),
    "stage 1": Run(1),
    "stage 2": Run(2),
    "stage 3": Run(3, _FAR),
    "MiCS": Run(3, {"mics_shard_size": 1, **_FAR}),
    "MiCS, several micro-batches": Run(3, {"mics_shard_size": 1, **_FAR}, accumulates=True),
    "MiCS, host, several micro-batches": Run(2, {"mics_shard_size": 1, **_offloaded("cpu", "auto")}, accumulates=True),
    "ZeRO++": Run(3, {**_QUANTIZED, "zero_hpz_partition_size": 1, **_FAR}),
    "compression, stage 0": Run(0, keys=_ONE_BIT),
    "compression, stage 2": Run(2, keys=_ONE_BIT),
    "virtual ranks, stage 0": Run(0, keys=_VIRTUAL, accumulates=True),
    "virtual ranks, stage 3": Run(3, _FAR, _VIRTUAL, accumulates=True),
    "virtual ranks, host, stage 2": Run(2, _offloaded("cpu", True), _VIRTUAL, accumulates=True),
    "host, stage 2": Run(2, _offloaded("cpu", "auto")),
    "host beside the next forward, stage 2": Run(2, _offloaded("cpu", True)),
    "host, stage 3": Run(3, {**_offloaded("cpu", True, "cpu"), **_FAR}),
    "saves, stage 3": Run(3, _FAR, saves=True),
    "two nodes, compression between them": Run(1, keys=_BETWEEN_NODES, nodes=2),
    "ZeRO++, host, MiCS": Run(
        3, {"mics_shard_size": 1, "zero_quantized_weights": True, **_offloaded("cpu", "auto", "cpu"), **_FAR}
    ),
    "two nodes, ZeRO++": Run(3, {**_QUANTIZED, **_FAR}, nodes=2),
    **{f"two groups, stage {stage}": Run(stage, _FAR if stage == 3 else {}, groups=True) for stage in range(4)},
    "two groups, MiCS": Run(3, {"mics_shard_size": 1, **_FAR}, groups=True),
    "two groups, ZeRO++": Run(3, {**_QUANTIZED, "zero_hpz_partition_size": 2, **_FAR}, groups=True),
    "two groups, host beside the next forward, stage 2": Run(2, _offloaded("cpu", True), groups=True),
    "two groups, files, stage 3": Run(3, {**_offloaded("nvme", "auto", "nvme"), **_FAR}, groups=True),
    "two groups, saves": Run(3, {**_offloaded("cpu", "auto"), **_FAR}, groups=True, saves=True),
    **{f"tensor ranks, stage {stage}": Run(stage, _FAR if stage == 3 else {}, TENSOR) for stage in range(4)},
    "tensor ranks, host, stage 3": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}, TENSOR, saves=True),
}

FOUR = {
    "MiCS of two": Run(3, {"mics_shard_size": 2, **_FAR}, nodes=2),
    "MiCS of two, several micro-batches": Run(3, {"mics_shard_size": 2, **_FAR}, nodes=2, accumulates=True),
    "MiCS of two, several micro-batches, files": Run(
        3, {"mics_shard_size": 2, **_offloaded("nvme", "auto", "nvme"), **_FAR}, nodes=2, accumulates=True
    ),
    "MiCS of two, stage 1, host": Run(1, {"mics_shard_size": 2, **_offloaded("cpu", True)}, nodes=2),
    "ZeRO++ on two nodes": Run(3, {**_QUANTIZED, "zero_hpz_partition_size": 2, **_FAR}, nodes=2),
    "compression between two nodes": Run(2, keys=_BETWEEN_NODES, nodes=2),
    "two groups, MiCS of two": Run(3, {"mics_shard_size": 2, **_FAR}, groups=True),
    "two groups, copies in nodes": Run(3, {"zero_hpz_partition_size": 2, **_FAR}, groups=True, nodes=2),
    **{f"tensor and data ranks, stage {s}": Run(s, _FAR if s == 3 else {}, TENSOR) for s in range(4)},
    "tensor and data ranks, saves": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}, TENSOR, saves=True),
    "tensor and data ranks, ZeRO++": Run(3, {**_QUANTIZED, "zero_hpz_partition_size": 2, **_FAR}, TENSOR),
}


_COPIES = "lt_zero.offload.copy_streams"
_HOST = "lt_zero.offload.host_store"
_SAVED_AT = "lt_zero.features.activation_checkpointing.saved_activations"
_ENGINE = "lt_zero.core.engine"

BUGS = {
    "a copy does not wait for its source": Bug(
        f"{_COPIES}:CopyStream._begin",
        "self._stream.wait_event(after if after is not None else self.now())",
        "pass",
        "host, stage 2",
    ),
    "the wait for a copy does nothing": Bug(f"{_COPIES}:_OnStream.wait", "self._end.wait()", "pass", "host, stage 3"),
    "a copy keeps no tensors": Bug(
        f"{_COPIES}:CopyStream._begin",
        "return _OnStream(self.now(), (target, source))",
        "return _OnStream(self.now(), ())",
        "host, stage 2",
    ),
    "a staging buffer is filled while it is sent": Bug(
        f"{_COPIES}:StagingBuffers.take", "event.synchronize()", "pass", "host, stage 2"
    ),
    "a gradient is added before it is on the host": Bug(
        f"{_HOST}:HostStore.wait_arrived", "event.synchronize()", "pass", "host, stage 2"
    ),
    "a gather does not follow the copy of its shard": Bug(
        f"{_HOST}:HostStore.source",
        "return self._link.to_device.in_line()",
        "return nullcontext()",
        "late peer, host, stage 3",
    ),
    "weights from the host are used before they are there": Bug(
        f"{_HOST}:HostStore.sent", "self._sent.wait()", "pass", "host, stage 3"
    ),
    "updated weights are used before they are there": Bug(
        f"{_HOST}:FedStore.wait_copied", "coming.wait()", "pass", "host, stage 2"
    ),
    "updated weights do not wait for the readers of the old ones": Bug(
        f"{_HOST}:FedStore.refresh",
        "staging.send(self._link.to_device, self.tensor, self._after)",
        "staging.send(self._link.to_device, self.tensor, self._after and type(self._after)(self._after._order))",
        "host beside the next forward, stage 2",
        missed="the host steps when the gradients are there, which come after the last readers of the weights",
    ),
    "master weights change while they are sent": Bug(
        f"{_ENGINE}.bucket_weights:MasterWeights.kernel_target",
        "self.gather_source.wait_sent()",
        "pass",
        "host, fp32, stage 3",
        missed="a step decides by the norm, so the host has waited for work that comes after these copies",
    ),
    "averages replace master weights while these are sent": Bug(
        f"{_ENGINE}.bucket_weights:MasterWeights.writable_values",
        "self.gather_source.wait_sent()",
        "pass",
        "host with averages, stage 1",
    ),
    "a gather is not waited for": Bug(
        f"{_ENGINE}.bucket:Bucket.finish_gather", "work.wait()", "pass", "late peer, stage 3"
    ),
    "a reduction is not waited for": Bug(
        f"{_ENGINE}.grad_reducer:GradReducer._finish_oldest", "work.wait()", "pass", "late peer, stage 2"
    ),
    "gradients are collected in a buffer that is being sent": Bug(
        f"{_ENGINE}.grad_reducer:GradReducer._launch",
        "self._in_flight.append((bucket, work, send))",
        "self._in_flight.append((bucket, work, send)); send and self._buffers[bucket.group].give_back(send)",
        "late peer, stage 2",
    ),
    "weights are freed while a gather still fills them": Bug(
        f"{_ENGINE}.bucket:Bucket.release", "self.finish_gather()", "self._gathering = None", "late peer, unused unit"
    ),
    "a saved activation is not waited for": Bug(
        f"{_SAVED_AT}:StoredActivation.bring",
        "self._coming.wait()",
        "pass",
        "saved activations in host memory",
    ),
    "the source of a saved activation is dropped at once": Bug(
        f"{_SAVED_AT}:StoredActivation.__init__",
        "self._source = None if self._copied is DONE else source",
        "self._source = None; self._copied._tensors = ()",
        "saved activations in host memory",
    ),
    "a saved activation is written before it is on the host": Bug(
        f"{_SAVED_AT}:FollowingTransfer._follow", "self._copy.synchronize()", "pass", "saved activations in files"
    ),
    "a saved activation comes back before it has left": Bug(
        f"{_SAVED_AT}:StoredActivation._wait_copied", "self._copied.wait()", "pass", "saved activations in host memory"
    ),
    "a checkpoint does not wait for its copies": Bug(
        "lt_zero.checkpoint.native.save:stage", "accelerator.synchronize()", "pass", "a save"
    ),
    "a checkpoint of a run does not wait for its copies": Bug(
        "lt_zero.checkpoint.native.save:stage", "accelerator.synchronize()", "pass", "saves, stage 2"
    ),
    "a save takes the buffer from which another is being written": Bug(
        "lt_zero.training.checkpoints:Saver.save", "self.wait(world)", "pass", "saves, stage 2"
    ),
    "a gather of one of two groups is not waited for": Bug(
        f"{_ENGINE}.bucket:Bucket.finish_gather",
        "work.wait()",
        "all('.up.' not in span.name for span in self.layout.spans) and work.wait()",
        "two: two groups, stage 3",
    ),
    "a file gets values before they are on the host": Bug(
        "lt_zero.core.stores.checked_file:StagingRing.parts", "copied.synchronize()", "pass", "a save in the foreground"
    ),
    "a buffer is filled while a file reads it": Bug(
        "lt_zero.core.stores.checked_file:StagingRing._room",
        "sink.wait_written(end)",
        "pass",
        "a save in the foreground",
    ),
    "gathered codes are decoded before they are there": Bug(
        "lt_zero.exchange.compression:gather_encoded",
        "return WorkList([gather(codes.view(-1))], decode, costs=costs)",
        "gather(codes.view(-1)); return WorkList([], decode, costs=costs)",
        "two: ZeRO++",
    ),
    "a flag of a skipped step is read before it is on the host": Bug(
        "lt_zero.core.step.loss_scale:_SkipFlag.wait", "self._copied.synchronize()", "pass", "a skipped step"
    ),
    "compressed gradients do not wait for backward": Bug(
        "lt_zero.exchange.compression:Compressor._launch",
        "self._stream.wait_stream(accelerator.current_stream(self._device))",
        "pass",
        "two: compression, stage 2",
    ),
    "compressed sums are used before they are there": Bug(
        "lt_zero.exchange.compression:_Event.wait", "self._event.wait()", "pass", "two: compression, stage 2"
    ),
    "sums over replicas begin before those of shards have ended": Bug(
        "lt_zero.core.comm.transport:Backend.reduce_scatter",
        "        work.wait()\n",
        "",
        "two: MiCS",
    ),
    "an accumulator is summed over replicas before the last sum of shards is in it": Bug(
        "lt_zero.core.comm.transport:Backend.reduce_scatter",
        "        work.wait()\n",
        "",
        "two: MiCS, several micro-batches",
    ),
    "an accumulator is summed over replicas before it is on the device": Bug(
        f"{_HOST}:HostStore.target",
        "self._link.to_device.copy(landing, out).wait()",
        "self._link.to_device.copy(landing, out)",
        "two: MiCS, host, several micro-batches",
    ),
}


def _skip_without_features(name: str) -> None:
    """Skip the run of this name if what it has was taken out: averages, saved activations, states on the host."""
    parts = {"averages": "ema", "saved activations": "activation_checkpointing", "host": "offload", "files": "offload"}
    skip_without(*(feature for part, feature in parts.items() if part in name))


@pytest.mark.parametrize("name", only(["host with averages, stage 3", "files, stage 3"], ONE))
def test_one_rank(name: str, tmp_path: Path) -> None:
    _skip_without_features(name)
    assert not hazards(ONE[name], tmp_path)


@pytest.mark.parametrize("name", only(["two groups, saves"], TWO))
def test_two_ranks(name: str, pool: Pool, tmp_path: Path) -> None:
    skip_without(TWO[name])
    assert pool.run(2, hazards, TWO[name], tmp_path) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(name: str, pool: Pool, tmp_path: Path) -> None:
    skip_without(FOUR[name])
    assert pool.run(4, hazards, FOUR[name], tmp_path) == [[]] * 4


# ---- the product -----------------------------------------------------------------------------------------------------

Row = tuple[Any, ...]

_PLACES = {"none": {}, "device": {}, "cpu": {"cpu_checkpointing": True}, "nvme": {"nvme_path": ""}}
_AWAY = ("cpu", "nvme")
_PLUS_PLUS: dict[str, dict[str, Any]] = {
    "none": {},
    "hpZ": {"zero_hpz_partition_size": 2},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
}
_OF_ONE: list[Sequence[Any]] = [range(4), ["none", "cpu", "nvme"], ["auto", True, False], [*_PLACES], [False, True]]
_OF_TWO = [*_OF_ONE, [*_PLUS_PLUS], ["none", "1bit", "2bit", "topk"], [False, True]]


def _run_of(row: Row) -> Run:
    """The run of values along the axes: stage, place and overlap of offloaded states, place of saved activations, saves
    in the background, ZeRO++, compression, MiCS."""
    stage, place, overlap, saved, saves, plus, method, mics = (*row, "none", "none", False)[:8]
    zero: dict[str, Any] = dict(_PLUS_PLUS[plus])
    if place != "none" or overlap != "auto":
        zero |= _offloaded(place, overlap, place if stage == 3 else "none")
    keys = {"activation_checkpointing": {"mode": "full", **_PLACES[saved]}} if saved != "none" else {}
    if method != "none":
        keys["gradient_compression"] = {"algorithm": method}
    if mics:
        zero["mics_shard_size"] = 1
    return Run(stage, {**zero, **(_FAR if stage == 3 else {})}, keys, saves=saves, accumulates=mics)


def _is_valid(row: Row) -> bool:
    """True if the configuration takes the values of ``row``, and each of them has an effect."""
    if row[1] == "none" and row[2] != "auto":
        return False
    if row[3] != "none" and not there("activation_checkpointing"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        try:
            return bool(config_of(_run_of(row), Path("/")))
        except (ConfigError, ConfigWarning):
            return False


@pytest.mark.slow
@pytest.mark.parametrize("place", _OF_ONE[1])
@pytest.mark.parametrize("stage", _OF_ONE[0])
def test_all_of_one_rank(stage: int, place: str, tmp_path: Path) -> None:
    rows = [row for row in itertools.product([stage], [place], *_OF_ONE[2:]) if _is_valid(row)]
    # The others have no stream beside the computation.
    rows = [(*row, saved, saves) for *row, saved, saves in rows if place != "none" or saved in _AWAY or saves]
    assert len(rows) > 5
    found = {row: some for row in rows if (some := hazards(_run_of(row), tmp_path))}
    assert not found


@functools.cache
def _cover() -> list[Row]:
    """Rows with all pairs of values, and with all triples of the first four axes."""
    rows = [row for row in itertools.product(*_OF_TWO) if _is_valid(row)]
    places = [*itertools.combinations(range(8), 2), *itertools.combinations(range(4), 3)]
    return covering(rows, places)


@pytest.mark.slow
@pytest.mark.parametrize("place", _OF_ONE[1])
@pytest.mark.parametrize("stage", _OF_ONE[0])
def test_a_cover_of_two_ranks(stage: int, place: str, pool: Pool, tmp_path: Path) -> None:
    skip_without("compression", "zero_plus_plus")
    rows = [row for row in _cover() if row[:2] == (stage, place)]
    assert rows
    found = {row: some for row in rows if any(some := pool.run(2, hazards, _run_of(row), tmp_path))}
    assert not found


# ---- what is not of a run --------------------------------------------------------------------------------------------


def test_what_is_not_of_a_run() -> None:
    assert not hazards_of_a_save()
    assert not hazards_of_a_foreground_save()
    assert not hazards_of_a_skipped_step()


def _hazards(name: str, folder: Path) -> list[str]:
    alone = {
        "a save": hazards_of_a_save,
        "a save in the foreground": hazards_of_a_foreground_save,
        "a skipped step": hazards_of_a_skipped_step,
    }
    if name in alone:
        return alone[name]()
    return hazards(TWO[name.removeprefix("two: ")] if name.startswith("two: ") else ONE[name], folder)


def _with_bug(name: str, folder: Path) -> list[str]:
    with planted(BUGS[name]):
        return _hazards(BUGS[name].run, folder)


@pytest.mark.parametrize("name", only(["a file gets values before they are on the host"], BUGS))
def test_a_planted_bug_is_found(name: str, pool: Pool, tmp_path: Path) -> None:
    _skip_without_features(BUGS[name].run)
    skip_without(TWO.get(BUGS[name].run.removeprefix("two: ")))
    two = BUGS[name].run.startswith("two: ")
    found = pool.run(2, _with_bug, name, tmp_path) if two else [_with_bug(name, tmp_path)]
    assert all(found) is not bool(BUGS[name].missed)
