"""The host does not wait for the device in a step: counted on a simulated device, with and without native kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_zero import ops
from lt_zero.optim import Lamb
from tests.support.features import needs, skip_without
from tests.support.matrix import only
from tests.support.stream_order import Bug, Run, planted, waits

_FUSED = partial(torch.optim.AdamW, fused=True)
_RANDOM: dict[str, Any] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "stochastic_rounding": True}
}
_QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}

RUNS = {
    **{f"stage {stage}": Run(stage) for stage in range(4)},
    "fp16": Run(2, precision="16-mixed"),
    "MiCS, several micro-batches": Run(3, {"mics_shard_size": 1}, accumulates=True),
    "ZeRO++": Run(3, _QUANTIZED),
    "compression": Run(2, keys={"gradient_compression": {"algorithm": "1bit"}}),
    "moments in bf16": Run(2, keys={"optimizer_states": {"dtype": "bf16"}}),
    "recomputed": Run(3, keys={"activation_checkpointing": {"mode": "full"}}),
    "several groups, norms of Lamb": Run(3, groups=True, optimizer=Lamb),
    "several groups, norms of Lamb, stage 1": Run(1, groups=True, optimizer=Lamb),
    "counters of torch's fused Adam": Run(2, optimizer=_FUSED),
    "stochastic rounding": Run(2, keys=_RANDOM),
    "stochastic rounding, counters of torch's fused Adam": Run(2, keys=_RANDOM, optimizer=_FUSED),
}
_HOST, _NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": ""}
AWAY = {
    "states on the host": Run(2, {"offload_optimizer": _HOST}),
    "states on the host, stepped beside": Run(2, {"offload_optimizer": {**_HOST, "overlap_step": True}}),
    "states and weights on the host": Run(3, {"offload_optimizer": _HOST, "offload_param": _HOST}),
    "states in files": Run(2, {"offload_optimizer": _NVME}),
}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    "name",
    only(
        [
            "stage 3",
            "several groups, norms of Lamb",
            "counters of torch's fused Adam",
            "stochastic rounding, counters of torch's fused Adam",
        ],
        RUNS,
    ),
)
def test_a_step_waits_for_nothing(name: str, kernels: bool) -> None:
    skip_without(RUNS[name])
    if kernels and not ops.available(torch.device("cpu")):
        pytest.skip("there are no native kernels")
    assert waits(replace(RUNS[name], peer=True, kernels=kernels)) == []


@needs("offload")
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", only(["states on the host"], AWAY))
def test_a_step_on_the_host_waits_for_the_factor_of_clipping(name: str, kernels: bool, tmp_path: Path) -> None:
    """That copy alone; for gradients, and for the digests of all compute copies, it waits by events."""
    if kernels and not ops.available(torch.device("cpu")):
        pytest.skip("there are no native kernels")
    (found,) = waits(replace(AWAY[name], peer=True, kernels=kernels), tmp_path)
    assert found.startswith("to ")
    assert " defer " in found


@pytest.mark.parametrize(("steps", "expected"), [(1, 16), (2, 0)])
def test_values_of_sharded_weights_are_compared_after_the_first_two_forwards(steps: int, expected: int) -> None:
    """They are two forwards of eight buckets each, both in the first step."""
    assert len(waits(Run(3, peer=True, steps=steps))) == expected


@pytest.mark.parametrize(
    ("bug", "operator"),
    [
        (
            Bug(
                "lt_zero.core.comm.shard_group:combine_rows",
                "accelerator.send(torch.tensor([n for n, each in enumerate(groups) if each is group]), rows.device)",
                "torch.tensor([n for n, each in enumerate(groups) if each is group], device=rows.device)",
                "several groups, norms of Lamb",
            ),
            "tensor",
        ),
        (
            Bug(
                "lt_zero.core.comm.shard_group:combine_rows",
                "rows.index_select(0, mine)",
                "rows[torch.zeros(len(rows), device=rows.device).index_fill_(0, mine, 1.0) > 0]",
                "several groups, norms of Lamb",
            ),
            "index",
        ),
        (
            Bug(
                "lt_zero.kernels.rounding:_count",
                "accelerator.holds(known)",
                "False",
                "stochastic rounding, counters of torch's fused Adam",
            ),
            "_local_scalar_dense",
        ),
        (
            Bug(
                "lt_zero.core.engine.grad_accumulator:GradAccumulator.arrived",
                "self.values.arrived()",
                "self.values.arrived(); self.values.read()[:1].tolist()",
                "stage 3",
            ),
            "tolist",
        ),
        (
            Bug("lt_zero.core.engine.inplace_edits:check_all", "digests=digests", "digests=None", "states on the host"),
            "_local_scalar_dense",
        ),
    ],
    ids=["a list", "a mask", "a counter", "numbers in backward", "a digest for each bucket"],
)
def test_a_wait_that_is_planted_is_found(bug: Bug, operator: str) -> None:
    skip_without({**RUNS, **AWAY}[bug.run])
    with planted(bug):
        found = waits(replace({**RUNS, **AWAY}[bug.run], peer=True))
    of_clipping = {"to"} if bug.run in AWAY else set()
    assert {each.split(" ")[0] for each in found} == {operator} | of_clipping
