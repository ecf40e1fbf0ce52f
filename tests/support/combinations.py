"""What combines with what: ``python -m tests.support.combinations`` writes the tables of docs/parallelism.md.

A pair of features is refused by the configuration, and the page has its error; or it runs, which
tests/parallel/test_combinations.py compares with one process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from tests.support.mesh_choices import table
from tests.support.paths import ROOT

PAGE = ROOT / "docs/parallelism.md"
RUNS = "tests/parallel/test_combinations.py::test_a_pair_trains_as_one_process"
BLOCKS = re.compile(r"(?P<begin><!-- (?P<name>[a-z]+) begins -->\n).*?(?=<!-- (?P=name) ends -->)", re.DOTALL)
# Several features, or more than a pair's test shows -> the test of it.
MORE = {
    "SP, TP x SP, TP x EP, SP x EP, PP x EP, stages 0 to 3, SGD and AdamW: gradients, norm, weights": (
        "tests/parallel/test_expert_meshes.py::test_experts_train_on_meshes_as_in_one_process"
    ),
    "checkpoints from each of these meshes to the next": (
        "tests/parallel/test_expert_meshes.py::test_checkpoints_go_on_at_other_meshes"
    ),
    "PP x SP in a Trainer, stages 0 to 3": (
        "tests/parallel/test_pipeline_sequences.py::test_a_pipeline_of_parts_trains_as_one_process"
    ),
    "TP x SP in a Trainer, stages 0 to 3": (
        "tests/parallel/test_sequence_runs.py::test_layers_may_be_cut_over_tensor_ranks"
    ),
    "TP x PP x data, stages 0 to 3": "tests/parallel/test_pipeline.py::test_meshes",
    "TP x precisions against plain PyTorch": (
        "tests/parallel/test_precision_and_memory.py::test_error_is_that_of_plain_pytorch"
    ),
    "TP x offload to files and hosts": (
        "tests/parallel/test_precision_and_memory.py::test_offloads_states_and_parameters"
    ),
    "PP x offload to files": "tests/parallel/test_pipeline_offload.py::test_states_in_files",
    "PP x precisions": "tests/parallel/test_pipeline_precision.py::test_a_run_is_that_of_plain_pytorch",
    "PP x EMA in a Trainer": "tests/parallel/test_pipeline_trainer.py::test_averages_are_those_of_one_process",
    "SP x recomputation, offload, fp16, clipping, MiCS": (
        "tests/parallel/test_sequence_runs.py::test_options_train_as_one_process"
    ),
    "EP x inference": "tests/parallel/test_expert_meshes.py::test_inference_sends_tokens_to_experts",
}


class Feature(NamedTuple):
    """A feature of a run.

    Attributes:
        name: in tables.
        keys: of the configuration; none: it is not a matter of the configuration.
        shown: what the user writes.
    """

    name: str
    keys: dict[str, Any]
    shown: str


FEATURES: dict[str, Feature] = {
    "tensor": Feature("TP", {"tensor_parallel": {"autotp_size": 2}}, "`tensor_parallel_size`"),
    "sequence": Feature("SP", {"sequence_parallel_size": 2}, "`sequence_parallel_size`"),
    "pipeline": Feature("PP", {"pipeline": {"stages": 2}}, "`pipeline_parallel_size`"),
    "experts": Feature("EP", {"expert_parallel": {"enabled": True, "autoep_size": 2}}, "`expert_parallel_size`"),
    "stage": Feature("stage 3", {"zero_optimization": {"stage": 3}}, "`stage=3`; the other rows have stage 1"),
    "offload": Feature(
        "offload",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "`offload_optimizer`, at stage 3 also `offload_param`",
    ),
    "bf16": Feature("bf16", {"bf16": {"enabled": True}}, '`precision="bf16-true"`'),
    "compile": Feature("compile", {}, "`block.compile()`"),
    "recompute": Feature("recompute", {"activation_checkpointing": {"mode": "full"}}, "`activation_checkpointing`"),
    "compress": Feature(
        "compress",
        {"gradient_compression": {"algorithm": "topk", "topk_ratio": 1.0}},
        "`gradient_compression`, and as it 1-bit optimizers and `slow_node_tolerance`",
    ),
    "lora": Feature("LoRA", {}, "adapters beside frozen layers"),
    "ema": Feature("EMA", {}, "the callback `EMA`"),
}
PAIRS = list(itertools.combinations(FEATURES, 2))


def merged(*keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of several features, with those of the same block together."""
    found: dict[str, Any] = {}
    for each in keys:
        for key, value in each.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def keys_of(*features: str) -> dict[str, Any]:
    """The configuration of a run with ``features``."""
    found = merged(*(FEATURES[feature].keys for feature in features))
    if {"stage", "offload"} <= set(features):
        found = merged(found, {"zero_optimization": {"offload_param": {"device": "cpu"}}})
    return merged({"zero_optimization": {"stage": 1}}, found)


def refusal(*features: str) -> str:
    """The error of the configuration; "": it is accepted."""
    try:
        ZeroConfig.of(keys_of(*features))
    except ConfigError as error:
        return str(error)
    return ""


# ---- the page --------------------------------------------------------------------------------------------------------


def _matrix() -> Iterator[str]:
    names = [feature.name for feature in FEATURES.values()]
    yield f"| | {' | '.join(names)} |"
    yield f"|---|{':-:|' * len(names)}"
    for row, feature in FEATURES.items():
        cells = [_cell(row, column) for column in FEATURES]
        yield f"| **{feature.name}** | {' | '.join(cells)} |"


def _cell(row: str, column: str) -> str:
    if row == column:
        return ""
    pair = tuple(sorted((row, column), key=list(FEATURES).index))
    return "no" if refusal(*pair) else "yes"


def _refusals() -> Iterator[str]:
    yield "| pair | error |"
    yield "|---|---|"
    for pair in PAIRS:
        if text := refusal(*pair):
            yield f"| {' x '.join(FEATURES[feature].name for feature in pair)} | {text} |"


def _legend() -> Iterator[str]:
    yield "| | a run with it |"
    yield "|---|---|"
    for key, feature in FEATURES.items():
        yield f"| {feature.name} (`{key}`) | {feature.shown} |"


def _more() -> Iterator[str]:
    yield "| what | test |"
    yield "|---|---|"
    for what, test in MORE.items():
        yield f"| {what} | `{test}` |"


COMBINATIONS = {"matrix": _matrix, "errors": _refusals, "legend": _legend, "more": _more}
ALL = {**COMBINATIONS, "choices": table}


def page(text: str, blocks: Mapping[str, Callable[[], Iterator[str]]]) -> str:
    """The page with some of its generated blocks as they should be."""
    found = {match["name"] for match in BLOCKS.finditer(text)}
    assert found == ALL.keys(), found

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        return match["begin"] + "".join(f"{line}\n" for line in blocks[name]()) if name in blocks else match[0]

    return BLOCKS.sub(made, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), ALL), encoding="utf-8")
