"""All that runs in streams of a GPU is ordered: checked on a CPU, by vector clocks instead of by timing.

See tests/support/happens_before.py. Planted bugs show that the checker sees what it is for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.matrix import only
from tests.support.pool import Pool
from tests.support.stream_order import Run, hazards

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
    "host without overlap, stage 3": Run(3, {**_offloaded("cpu", False, "cpu"), **_FAR}),
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
    "late peer, host, stage 3": Run(3, {**_offloaded("cpu", "auto", "cpu"), **_FAR}, peer=True),
}

_QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
_ONE_BIT = {"gradient_compression": {"codec": "int8"}}

TWO = {
    "stage 0": Run(0),
    "stage 1": Run(1),
    "stage 2": Run(2),
    "stage 3": Run(3, _FAR),
    "MiCS": Run(3, {"mics_shard_size": 1, **_FAR}),
    "ZeRO++": Run(3, {**_QUANTIZED, "zero_hpz_partition_size": 1, **_FAR}),
    "compression, stage 0": Run(0, keys=_ONE_BIT),
    "compression, stage 2": Run(2, keys=_ONE_BIT),
    "host, stage 2": Run(2, _offloaded("cpu", "auto")),
    "host beside the next forward, stage 2": Run(2, _offloaded("cpu", True)),
    "host, stage 3": Run(3, {**_offloaded("cpu", True, "cpu"), **_FAR}),
}


@pytest.mark.parametrize("name", only(list(ONE)[:1] + ["files, stage 3"], ONE))
def test_one_rank(name: str, tmp_path: Path) -> None:
    assert not hazards(ONE[name], tmp_path)


@pytest.mark.parametrize("name", only(["ZeRO++"], TWO))
def test_two_ranks(name: str, pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, hazards, TWO[name], tmp_path) == [[], []]
