"""What users are told about wrong configurations, and the schema of all keys: ``tests/data/golden``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lt_zero.common.errors import ConfigError
from lt_zero.config.catalog import json_schema
from lt_zero.config.files import parse_json, parse_yaml
from lt_zero.config.interpolations import resolve
from lt_zero.config.load import examine
from lt_zero.config.overrides import apply
from lt_zero.config.read import read
from tests.support.features import needs_all_blocks
from tests.support.golden import compare, only_pinned

JSON = [
    '{"a": True}',
    '{"a": None}',
    '{"a": CONFIG_CL_MIN}',
    '{\n "a": 1\n "b": 2}',
    '```json\n{"a": 1}\n```',
    '{"a": 1} {"b": 1}',
    '{"a": 1}}',
    '{"a": {"b": 1}',
    '{"a": [1}',
    "{'a': 1}",
    "{a: 1}",
    '{"a" = 1}',
    '{"a": 1_000}',
    '{"a": NaN}',
    '{"a": -Infinity}',
    '{"a": 1e999}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a": "x\n"}',
    '{"a": "x',
    '{"a": "C:\\dir"}',
    '{"a": "x\ty"}',
    '{"a":\u00a01}',
    '{"a": /* 1}',
    '{"a": 1,,}',
    '{"a": [1,,]}',
    '{"a": [,]}',
    '{"a": }',
    '{"a": [{"b": 1, "c": 2, "b": 3}]}',
    '{"a": ' + "[" * 60 + "]" * 60 + "}",
    '{"a": ' + "[" * 10_000,
    '{"zero_optimization": {"stage": 2},\n"train_batch_size": <BS>}',
    "train_batch_size: 8\nzero_optimization: {\n  stage: 2\n}\n",
]
YAML = [
    "a: 1\nb: 2\na: 3",
    "on: 1",
    "a: {1: 2}",
    "? [x]\n: 1",
    "a: !!python/object/apply:os.system ['x']",
    "a: &a [*a]",
    "a: &a {<<: *a}",
    "- " * 50_000,
    "a: 0b_",
    "- 1",
    "# nothing",
]
OVERRIDES = [
    "+clip=1",
    "~none",
    "~clip=2",
    "~betas.0",
    "betas.2=1",
    "a=1,2",
    "a=choice(1,2)",
    "a=range(1,4)",
    "hydra.run.dir=x",
    "hydra/launcher=x",
    "--clip=1",
    "a@b=c",
    "a/b=c",
    "a={1:2}",
    "=1",
    ".".join("a" * 60) + "=1",
]
OVERRIDDEN = '{"zero_optimization": {"stage": 2, "bucket": 1}, "betas": [0.9, 0.99], "clip": 1.0, "nothing": null}'
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}
ON = {"enabled": True}
KEYS: list[dict[str, Any]] = [
    # keys of other programs, and slips
    {"max_grad_norm": 1.0},
    {"gradient_clip_val": 0.5},
    {"per_device_train_batch_size": 4},
    {"accumulate_grad_batches": 4},
    {"optimizer": {**ADAMW, "eps": 1e-8}},
    {"optimizer": {**ADAMW, "amsgrad": True}},
    {"optimizer": {**ADAMW, "momentum": 0.9}},
    {"optimizer": {"type": "SGD", "momentum": 0.9}},
    {"scheduler": {"type": "WarmupLR", "warmup_type": "linear"}},
    {"learning_rate": 1e-3, "lr": 1e-3},
    {"dataloader_drop_last": True},
    {"drop_last": True},
    {"dataloader_num_workers": 4},
    {"cuda_visible_devices": "0,1"},
    {"num_train_epochs": 3},
    {"curiculum_learning": ON},
    {"zero_optimisation": {"stage": 3}},
    {"fp16": {"enable": True}},
    {"frobnicate": 1},
    {"hybrid_engine": ON},
    # values
    {"zero_optimization": {"stage": 4}},
    {"zero_optimization": {"stage": 3, "overlap_comm": "maybe", "reduce_bucket_size": "500MB"}},
    {"train_batch_size": 9, "gradient_accumulation_steps": 2},
    {"fp16": ON, "bf16": ON},
    {"optimizer_states": {"dtype": "fp16"}},
    {"optimizer_states": {"dtype": "uint8"}},
    {"optimizer_states": {"dtype": "fp32"}, "bf16": {"bf16_optimizer_states": True}},
    {"optimizer_states": {"dtype": "int8"}, "bf16": {"bf16_optimizer_states": True}},
    {"bf16": {**ON, "stochastic_rounding": True}},
    {"fp16": {"raise_error_at_min_scale": False}, "on_min_scale": "raise"},
    {"fp16": {"loss_scale": -1}},
    {"fp16": {"loss_scale": float("inf")}},
    {"fp16": {"loss_scale_window": 0}},
    {"fp16": {**ON, "min_loss_scale": 0}},
    {"fp16": {"scale_windows": 100}},
    {"torch_autocast": {**ON, "dtype": "fp16"}, "bf16": ON},
    {"torch_autocast": {**ON, "dtype": "fp32"}},
    {"data_types": {"grad_accum_dtype": "int8"}},
    {"communication_data_type": "none"},
    {"gradient_allreduce_op": "max"},
    {"on_skipped_step": "wait"},
]


def _told(error: ConfigError) -> str:
    return "\n".join(f"[{problem.key}] {problem}" for problem in error.problems)


def _of_text(parse: Any, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "FILE")
    return _told(caught.value)


def _of_override(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(apply(read(OVERRIDDEN), [override]))
    return _told(caught.value)


def _of_keys(config: dict[str, Any]) -> str:
    loaded = examine(config)
    notices = [f"notice: {notice}" for notice in loaded.notices]
    return "\n".join([*([_told(ConfigError(loaded.problems))] if loaded.problems else []), *notices])


def _short(text: str) -> str:
    return text if len(text) < 100 else f"{text[:60]}... ({len(text):,} characters)"


def test_what_is_told_is_in_the_golden_file() -> None:
    texts = {f"JSON {_short(repr(text))}": _of_text(parse_json, text) for text in JSON}
    texts |= {f"YAML {_short(repr(text))}": _of_text(parse_yaml, text) for text in YAML}
    texts |= {f"override {_short(text)}": _of_override(text) for text in OVERRIDES}
    texts |= {f"keys {json.dumps(config)}": _of_keys(config) for config in KEYS}
    assert all(texts.values())
    compare("config", texts)


@needs_all_blocks()
@only_pinned("pydantic")
def test_the_schema_is_in_the_golden_file() -> None:
    compare("schema", {"lt-zero config schema": json_schema()})
