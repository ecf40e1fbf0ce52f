"""The translation of a configuration to the options of what it configures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_zero import ZeroConfig
from lt_zero.common.errors import ConfigError
from lt_zero.common.moment_form import PlainMoments
from lt_zero.config.options import (
    communication_options,
    engine_options,
    group_options,
    io_options,
    recorded_collectives,
)
from lt_zero.config.precision import dtype_policy
from lt_zero.core.comm.options import CommunicationOptions, RecordedCollectives
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.options import EngineOptions

pytestmark = pytest.mark.filterwarnings("ignore::lt_zero.config.load.ConfigWarning")


def _engine(keys: dict[str, Any], precision: str = "32-true") -> EngineOptions:
    config = ZeroConfig.of(keys)
    return engine_options(config, dtype_policy(config, precision))


STATES = "offload_states"
PARAMS = "offload_params"
LEAF = "leaf_modules"
OFFLOADED = {"device": "nvme", "nvme_path": "/tmp"}


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def _states(**keys: Any) -> dict[str, Any]:
    return _zero(offload_optimizer={**OFFLOADED, **keys})


def _params(**keys: Any) -> dict[str, Any]:
    return _zero(stage=3, offload_optimizer=OFFLOADED, offload_param={**OFFLOADED, **keys})


# Field -> the keys that set it, and its value then, which is not the default.
FIELDS: dict[str, tuple[dict[str, Any], Any]] = {
    "stage": (_zero(stage=2), 2),
    "shard_along": (_zero(shard_along="parameter"), "parameter"),
    "optimizer_is_elementwise": (_zero(optimizer_is_elementwise=True), True),
    "fused_step": ({"fused_step": False}, False),
    "overlap_comm": (_zero(overlap_comm=False), False),
    "broadcast_buffers": ({"broadcast_buffers": False}, False),
    "reduce_bucket_size": (_zero(reduce_bucket_size=11), 11),
    "allgather_bucket_size": (_zero(allgather_bucket_size=12), 12),
    "sub_group_size": (_zero(sub_group_size=13), 13),
    "param_persistence_threshold": (_zero(stage3_param_persistence_threshold=14), 14),
    "model_persistence_threshold": (_zero(stage3_model_persistence_threshold=15), 15),
    "allowed_param_types": (_zero(zero_allowed_param_types=["A"]), ("A",)),
    "force_param_types": (_zero(zero_force_param_types=["B"]), ("B",)),
    f"{LEAF}.classes": (_zero(leaf_module={"classes": ["C"]}), ("C",)),
    f"{LEAF}.names": (_zero(leaf_module={"names": ["d"]}), ("d",)),
    f"{LEAF}.name_suffixes": (_zero(leaf_module={"name_suffixes": ["e"]}), ("e",)),
    "max_live_parameters": (_zero(stage3_max_live_parameters=16), 16),
    "max_reuse_distance": (_zero(stage3_max_reuse_distance=17), 17),
    "prefetch_bucket_size": (_zero(stage3_prefetch_bucket_size=18), 18),
    f"{STATES}.device": (_states(), "nvme"),
    f"{STATES}.nvme_path": (_states(), Path("/tmp")),
    f"{STATES}.ratio": (_states(ratio=0.5), 0.5),
    f"{STATES}.buffer_count": (_states(buffer_count=9), 9),
    f"{STATES}.pipeline_read": (_states(pipeline_read=False), False),
    f"{STATES}.pipeline_write": (_states(pipeline_write=False), False),
    f"{STATES}.overlap_step": (_states(overlap_step=True), True),
    f"{PARAMS}.device": (_params(), "nvme"),
    f"{PARAMS}.nvme_path": (_params(), Path("/tmp")),
    f"{PARAMS}.buffer_count": (_params(buffer_count=7), 7),
    f"{PARAMS}.buffer_size": (_params(buffer_size=19), 19),
    f"{PARAMS}.max_in_cpu": (_params(max_in_cpu=20), 20),
    "pin_memory": (_states(pin_memory=False), False),
    "files.threads": ({"aio": {"intra_op_parallelism": 3}}, 3),
    "files.block_size": ({"aio": {"block_size": 8192}}, 8192),
    "files.queue_depth": ({"aio": {"queue_depth": 5}}, 5),
    "files.checksum": ({"aio": {"checksum": True}}, True),
    "moments": ({"optimizer_states": {"dtype": "bf16"}}, PlainMoments(torch.bfloat16)),
    "predivides": ({"gradient_predivide_factor": 4}, True),
}
# Those with tests of their own, and those that features set.
APART = {"adds_one_by_one", "align", "dtypes", "norms", "resting", "rounding", "sent_dense"}
OF_GROUPS: dict[str, tuple[dict[str, Any], Any]] = {
    "topology": ({"communication": {"topology": 2}}, 2),
    "scatters": (_zero(reduce_scatter=False), False),
    "sums_gradients": ({"gradient_allreduce_op": "sum"}, True),
    "prescales": ({"prescale_gradients": True}, True),
    "predivide_factor": ({"gradient_predivide_factor": 4}, 4.0),
}


def _values(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(options):
        name = prefix + field.name
        value = getattr(options, field.name)
        if is_dataclass(value) and name in (STATES, PARAMS, LEAF, "files"):
            yield from _values(value, f"{name}.")
        else:
            yield name, value


def test_each_option_is_that_of_its_key() -> None:
    defaults = dict(_values(_engine({})))
    assert defaults.keys() == FIELDS.keys() | APART
    for name, (keys, value) in FIELDS.items():
        assert defaults[name] != value, name
        assert dict(_values(_engine(keys)))[name] == value, name


def test_each_option_of_a_group_is_that_of_its_key() -> None:
    defaults = dict(_values(group_options(ZeroConfig())))
    assert defaults.keys() == OF_GROUPS.keys() | {"shards"}
    for name, (keys, value) in OF_GROUPS.items():
        assert defaults[name] != value, name
        assert dict(_values(group_options(ZeroConfig.of(keys))))[name] == value, name


def test_options_without_a_configuration_are_those_of_an_empty_one() -> None:
    assert CommunicationOptions() == communication_options(ZeroConfig())
    changed = {"communication": {"link_timeout": 30}, "zero_optimization": {"enable_sanity_checks": True}}
    assert communication_options(ZeroConfig.of(changed)) == CommunicationOptions(30.0, True)
    everything = {"enabled": True, "debug": True}
    assert recorded_collectives(ZeroConfig.of({"comms_logger": everything}).comms_logger) == RecordedCollectives()


def test_recorded_collectives() -> None:
    block = {"enabled": True, "verbose": True, "prof_all": False, "prof_ops": ["all-reduce"]}
    found = recorded_collectives(ZeroConfig.of({"comms_logger": block}).comms_logger)
    assert found == RecordedCollectives(frozenset({"all_reduce"}), by_name=False, prints=True)


def test_dtypes_are_those_of_the_precision() -> None:
    assert _engine({}, "bf16-true").dtypes.compute == torch.bfloat16


def test_parameters_are_not_offloaded_below_stage_3() -> None:
    assert _engine(_zero(stage=2, offload_param=OFFLOADED)).offload_params.device == "none"


def test_one_key_that_forbids_pinned_memory_is_enough() -> None:
    assert not _engine(_params(pin_memory=False)).pin_memory


def test_one_request_at_a_time() -> None:
    assert io_options(ZeroConfig.of({"aio": {"single_submit": True, "queue_depth": 5}}).aio).queue_depth == 1


def test_shards_of_groups() -> None:
    options = group_options(ZeroConfig.of(_zero(stage=3, mics_shard_size=2, zero_hpz_partition_size=1)))
    assert options.shards(6) == 2
    with pytest.raises(ConfigError, match="mics_shard_size=2 does not divide the 5 ranks"):
        options.shards(5)


def test_prescaling_comes_before_a_factor() -> None:
    factor = {"gradient_predivide_factor": 4}
    assert group_options(ZeroConfig.of(factor)).predivides
    assert not group_options(ZeroConfig.of(factor | {"prescale_gradients": True})).predivides
    assert not group_options(ZeroConfig()).predivides


@pytest.mark.parametrize(
    ("dtypes", "key"),
    [
        (DtypePolicy(stochastic=True), "bf16.stochastic_rounding"),
        (DtypePolicy(moments=torch.int8), "optimizer_states.dtype"),
    ],
    ids=["rounding", "moments"],
)
def test_dtypes_whose_feature_is_not_asked_for_are_refused(dtypes: DtypePolicy, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*policy"):
        engine_options(ZeroConfig.of({}), dtypes)
