"""What to write instead: each hint leads to a key that can be used, and each advice to a configuration that can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config import keys as key_table
from lt_zero.config.catalog import entries
from lt_zero.config.load import Loaded, examine, resolved
from tests.support.features import needs
from tests.support.reach_engine import nested

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}


def said(loaded: Loaded) -> str:
    return " ".join([*(p.message for p in loaded.problems), *(n.message for n in loaded.notices)])


def refuses(key: str) -> bool:
    row = key_table.lookup(tuple(key.split(".")))
    return row is not None and row.refused


def test_no_suggestion_is_refused() -> None:
    """All that there are, and what is suggested where a key that is refused was meant."""
    accepted = key_table.accepted(ZeroConfig)
    suggestions = key_table._with_blocks(accepted)
    assert len(suggestions) > 150
    assert not [key for key in suggestions if refuses(key)]
    for number, key in enumerate(row.key for row in key_table.rows() if row.refused):
        written = key.removesuffix(".**")[:-1] if number % 2 else f"fp16.{key.removesuffix('.**').rpartition('.')[2]}"
        near = key_table.nearest(written, accepted)
        assert near is None or not refuses(near), (written, near)


def _modes_with(name: str) -> list[str]:
    """The modes of sparse attention that have a key."""
    from lt_zero.features.sparse_attention.keys import SPARSE_MODES

    return [mode for mode, keys in SPARSE_MODES.items() if name in keys]


def test_the_default_of_each_suggestion_is_accepted() -> None:
    for entry in entries():
        if entry.default and "<name>" not in entry.key and not entry.key.startswith(("optimizer", "scheduler")):
            block, _, name = entry.key.rpartition(".")
            modes = _modes_with(name) if block == "sparse_attention" else []
            config = {f"{block}.mode": mode for mode in modes[:1]} | {entry.key: yaml.safe_load(entry.default)}
            assert not examine(nested(config, Path())).problems, entry.key


ONE_BIT = {"lr": 1e-3, "cuda_aware": False, "comm_backend_name": "nccl", "eps_inside_sqrt": False, "max_grad_norm": 1.0}
ONE_BIT |= {"weight_decay": 0.01, "bias_correction": False, "betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": False}


@needs("one_bit")
@pytest.mark.parametrize(
    ("type_", "more", "plain"),
    [
        (
            "ZeroOneAdam",
            {"var_freeze_step": 9, "var_update_scaler": 16, "local_step_scaler": 8, "local_step_clipper": 16},
            "Adam",
        ),
        (
            "OneBitLamb",
            {"freeze_step": 9, "max_coeff": 0.3, "min_coeff": 0.01, "coeff_beta": 0.9, "factor_max": 4.0}
            | {"factor_min": 0.5, "factor_threshold": 0.1},
            "Lamb",
        ),
    ],
)
def test_the_plain_optimizer_takes_the_file_of_a_1_bit_one(type_: str, more: dict[str, Any], plain: str) -> None:
    config = {"optimizer": {"type": type_, "params": {**ONE_BIT, **more}}}
    assert examine(config).problems == []
    loaded = examine(config, overrides=[f"optimizer.type={plain}"])
    assert loaded.problems == []
    assert loaded.config is not None
    assert loaded.config.optimizer is not None
    assert not {"freeze_step", "cuda_aware", "comm_backend_name"} & set(loaded.config.optimizer.params)
    for name in more.keys() - {"max_coeff", "min_coeff"}:
        assert f"optimizer.params.{name} has no effect here" in said(loaded)


def test_names_with_dots() -> None:
    """Sizes that TRL writes so are dropped, as by DeepSpeed. All others are problems that say how to write them."""
    zero = {"stage": 3, "reduce_bucket_size": 500}
    sizes = {"reduce_bucket_size": 576, "stage3_param_persistence_threshold": 240, "stage3_prefetch_bucket_size": 518.4}
    loaded = examine({"zero_optimization": zero, **{f"zero_optimization.{name}": size for name, size in sizes.items()}})
    assert loaded.usable().zero_optimization.reduce_bucket_size == 500
    for name in sizes:
        assert f"zero_optimization.{name} has no effect here" in said(loaded)
    (problem,) = examine({"zero_optimization.stage": 3}).problems
    assert "write stage into the block zero_optimization" in problem.message
    (problem,) = examine({"zero_optimization": {"offload_param.device": "cpu"}}).problems
    assert "write device into the block zero_optimization.offload_param" in problem.message


def test_names_with_an_underscore_are_comments() -> None:
    zero = {"stage": 2, "_stage": 3, "_why": ["any", "value"]}
    loaded = examine({"_comment": "of the author", "zero_optimization": zero, "_optimizer": {"type": "Adam"}})
    made = loaded.usable()
    assert (made.zero_optimization.stage, made.optimizer) == (2, None)
    for name in ("_comment", "_optimizer", "zero_optimization._stage", "zero_optimization._why"):
        assert f"{name} has no effect here" in said(loaded)


COMPILED = {"disable": False, "backend": "inductor", "kwargs": {}}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"disable": False}, COMPILED),
        ({"backend": "eager"}, {**COMPILED, "backend": "eager"}),
        ({"kwargs": {"dynamic": True}, "deepcompile": False}, {**COMPILED, "kwargs": {"dynamic": True}}),
        ({"disable": True, "backend": "eager"}, {**COMPILED, "disable": True, "backend": "eager"}),
        ({"deepcompile": False, "double_buffer": True}, {**COMPILED, "disable": True}),
        ({}, {**COMPILED, "disable": True}),
        (False, {**COMPILED, "disable": True}),
    ],
)
def test_what_the_compile_block_means(written: Any, meant: dict[str, Any]) -> None:
    loaded = examine({"compile": written})
    assert resolved(loaded.usable())["compile"] == meant
    assert examine(resolved(loaded.usable())).usable() == loaded.usable()
    for key in ("deepcompile", "symmetric_memory"):
        (problem,) = examine({"compile": {key: True}}).problems
        assert "compile: {disable: false} compiles the repeated blocks" in problem.message


def test_the_advised_optimizer_takes_the_file() -> None:
    config = {"optimizer": {"type": "MuAdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}}
    (problem,) = examine(config).problems
    assert "Use AdamW" in problem.message
    assert examine(config, overrides=["optimizer.type=AdamW"]).problems == []


@pytest.mark.parametrize(
    "placeholder",
    ["<your batch size>", "<BS>", "${BS}", "$BS", "$(BS)", "{{ bs }}", "{{bs}}", "%BS%", "@BS@", "__BS__", "YOUR SIZE"]
    + ["CONFIG_BS"],
)
def test_one_advice_for_a_placeholder(placeholder: str) -> None:
    with pytest.raises(ConfigError) as caught:
        examine(f'{{"zero_optimization": {{"stage": 2}},\n"train_batch_size": {placeholder}}}')
    (problem,) = caught.value.problems
    assert placeholder in problem.message, "the line is shown"
    assert "a placeholder to be filled in" in problem.message or "in double quotes" in problem.message
    assert problem.mark is not None
    assert problem.mark.line == 2


@pytest.mark.parametrize("name", ["ds.json", "ds.hjson"])
def test_hjson_without_its_braces_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("train_batch_size: 8\nzero_optimization: {\n  stage: 2\n}\n")
    with pytest.raises(ConfigError, match=r"HJSON without the outer braces.*put { before and } after it"):
        examine(file)
