"""``lt-zero config convert`` of files for FSDP: a verdict on each key, and a configuration that trains as DDP does."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

import lt_zero
from lt_zero.common.errors import ConfigError, dotted
from lt_zero.config.cli import config_command
from lt_zero.config.document import leaves
from lt_zero.config.fsdp import AXES, BLOCK, verdicts
from lt_zero.config.load import examine
from tests.support.docs_tools import ROOT
from tests.support.features import needs, there
from tests.support.pool import Pool

FILES = Path(__file__).parent.parent / "data" / "fsdp_files"
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
ON_CPU = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
RELEASED = {"stage": 3, "stage3_max_reuse_distance": 0}


def units(*names: str) -> dict[str, Any]:
    return {"leaf_module": {"classes": list(names)}}


WHOLE = "stage3_gather_16bit_weights_on_model_save"
RESULTS: dict[str, dict[str, Any]] = {
    "accelerate_1.yaml": {
        **AUTO,
        "zero_optimization": {**RELEASED, **ON_CPU, **units("Block"), WHOLE: False},
        "activation_checkpointing": {"mode": "full"},
    },
    "accelerate_2.yaml": {
        **AUTO,
        "zero_optimization": {**RELEASED, "dp_replicate_size": 2, "enable_sanity_checks": True, WHOLE: True},
        "bf16": {"enabled": True},
        "compile": {"disable": False, "backend": "inductor"},
        "tensor_parallel": {"autotp_size": 2},
    },
    "axolotl.yaml": {
        **AUTO,
        "zero_optimization": {"stage": 3, **units("LlamaDecoderLayer", "OtherLayer"), WHOLE: True},
        "bf16": {"enabled": "auto"},
        "sequence_parallel_size": 2,
    },
    "axolotl_old.yaml": {
        **AUTO,
        "zero_optimization": {"stage": 3, **ON_CPU, **units("LlamaDecoderLayer"), WHOLE: False},
        "bf16": {"enabled": True},
    },
    "transformers.json": {
        **AUTO,
        "zero_optimization": {**RELEASED, **units("LlamaDecoderLayer")},
        "activation_checkpointing": {"mode": "full"},
    },
    "lightning.yaml": {
        "zero_optimization": {**RELEASED, **ON_CPU, **units("my.models.Block"), "dp_replicate_size": 2},
        "bf16": {"enabled": True},
        "checkpoint": {"format": "full"},
        "activation_checkpointing": {"mode": "full", "modules": ["my.models.Block"]},
        "communication_data_type": "fp32",
    },
}


def convert(file: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(config_command, ["convert", str(file), *more])
    return result.exit_code, result.output


@pytest.mark.parametrize("name", RESULTS)
def test_each_key_has_a_verdict_and_the_result_is_valid(name: str, tmp_path: Path) -> None:
    file, out = FILES / name, tmp_path / "zero.json"
    code, text = convert(file)
    assert code == 0
    assert yaml.safe_load(text) == RESULTS[name]
    told = [line for line in text.splitlines() if line.startswith("# ")]
    for path, _ in leaves(yaml.safe_load(file.read_text(encoding="utf-8")), lists=False):
        names = [dotted(path[:length]) for length in range(1, len(path) + 1)]
        assert any(line.startswith((f"# {named}=", f"# {named}[")) for named in names for line in told), path
    code, text = convert(file, "--out", str(out))
    assert (code, json.loads(out.read_text(encoding="utf-8"))) == (0, RESULTS[name])
    assert told == [line for line in text.splitlines() if line.startswith("# ")]  # JSON has no comments
    with pytest.raises(ConfigError, match="lt-zero config convert FILE"):
        examine(file)


def block(**keys: Any) -> dict[str, Any]:
    return {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True, **keys}}


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a typo": (block(offload_parms=True), ["fsdp_config.offload_parms=true", "unknown", "Remove it"]),
    "a strategy": (block(sharding_strategy="FULL"), ["sharding_strategy=FULL", "none of FULL_SHARD"]),
    "left out": (block(ignored_modules=".*router"), ["ignored_modules", "zero_force_param_types"]),
    "TPUs": (block(xla=True), ["fsdp_config.xla=true", "GPUs and CPUs"]),
    "files of ranks": (block(state_dict_type="LOCAL_STATE_DICT"), ["SHARDED_STATE_DICT"]),
    "two answers": (
        block(sharding_strategy="NO_SHARD"),
        ["sharding_strategy means zero_optimization.stage=0", "reshard_after_forward zero_optimization.stage=3"],
    ),
    "another kind": ({"distributed_type": "MULTI_GPU", **block()}, ["distributed_type=MULTI_GPU", "Write FSDP"]),
    "float8": ({"distributed_type": "FSDP", "mixed_precision": "fp8"}, ["mixed_precision=fp8", "torchao"]),
    "machines": (block(sharding_strategy="HYBRID_SHARD"), ["mics_shard_size with the ranks of a node"]),
    "no number": ({**block(), "dp_replicate_size": "two"}, ["dp_replicate_size=two", "cannot be read"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_has_no_counterpart_is_named(name: str, tmp_path: Path) -> None:
    values, parts = WRONG[name]
    file, out = tmp_path / "fsdp.yaml", tmp_path / "zero.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    code, text = convert(file, "--out", str(out))
    assert code == 1
    assert not out.exists()
    for part in parts:
        assert part in " ".join(text.split()), text


ONE_KEY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD", "offload_params": True}, {"stage": 0}),
    "a number": ({"sharding_strategy": 1}, RELEASED),
    "an enum": ({"sharding_strategy": "ShardingStrategy.SHARD_GRAD_OP"}, {"stage": 3}),
    "pinned": (
        {"reshard_after_forward": False, "offload_params": True, "cpu_offload_pin_memory": False},
        {"stage": 3, **{name: {"device": "cpu", "pin_memory": False} for name in ON_CPU}},
    ),
    "a default": ({"transformer_layer_cls_to_wrap": "A, B"}, {**RELEASED, **units("A", "B")}),
}


@pytest.mark.parametrize("name", ONE_KEY)
def test_blocks(name: str, tmp_path: Path) -> None:
    given, zero = ONE_KEY[name]
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump({"fsdp_config": {f"fsdp_{key}": value for key, value in given.items()}}))
    code, text = convert(file)
    assert code == 0, text
    assert yaml.safe_load(text)["zero_optimization"] == zero


def test_overrides_change_the_result() -> None:
    code, text = convert(FILES / "axolotl.yaml", "zero_optimization.stage=2")
    assert (code, yaml.safe_load(text)["zero_optimization"]["stage"]) == (0, 2)


def test_files_for_deepspeed_are_none_of_fsdp() -> None:
    assert [verdict.status for verdict in verdicts({"distributed_type": "DEEPSPEED"})] == ["unsupported"]
    assert examine({"zero_optimization": {"stage": 3}}).config is not None


def test_the_page_lists_all_keys() -> None:
    page = (ROOT / "docs" / "from-fsdp.md").read_text(encoding="utf-8")
    assert [key for key in (*BLOCK, *AXES) if f"`{key}`" not in page] == []


# ---- the result trains -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def _trained(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), Block(), Block(), nn.Linear(7, 3)).double()
    twin = nn.parallel.DistributedDataParallel(deepcopy(model))
    zero = json.loads(Path(path).read_text(encoding="utf-8"))
    zero |= {"gradient_accumulation_steps": 1, "gradient_clipping": 0}  # Accelerate fills what is "auto"
    if not there("activation_checkpointing"):
        del zero["activation_checkpointing"]
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = lt_zero.initialize(model=model, optimizer=made, config=zero)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())).double()
        engine.backward(engine(x).square().mean())
        engine.step()
        twin(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
    with lt_zero.gathered(model):
        for own, other in zip(model.parameters(), twin.module.parameters(), strict=True):
            torch.testing.assert_close(own.data, other.data)
    engine.destroy()


@needs("offload")
def test_a_converted_file_trains_as_ddp(pool: Pool, tmp_path: Path) -> None:
    out = tmp_path / "zero.json"
    assert convert(FILES / "accelerate_1.yaml", "--out", str(out))[0] == 0
    pool.run(2, _trained, str(out))
