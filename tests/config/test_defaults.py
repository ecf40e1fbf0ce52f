"""Defaults are DeepSpeed's, or the description of the key says what DeepSpeed's is."""

from __future__ import annotations

import csv

import pytest

from lt_zero.config import catalog
from tests.support.paths import DATA

# Written in another way, with the same meaning.
SAME = {
    "fp16.enabled": ("null", "false"),
    "bf16.enabled": ("null", "false"),
    "zero_optimization.stage3_model_persistence_threshold": ("null", "sys.maxsize"),
    "optimizer.type": ("", "null"),
    "scheduler.type": ("", "null"),
    "data_parallel_size": ("null", "absent"),
    "tensor_parallel.partition_config.lm_head_patterns": ("[lm_head, embed_out]", '["lm_head","embed_out"]'),
}
# null: the same, but what null stands for is another dtype.
MEANING = {"data_types.grad_accum_dtype", "fp16.auto_cast"}


def plain(text: str) -> str:
    """A default without remarks, numbers in one spelling.

    >>> plain("null (keep loaded dtype)"), plain("1e6")
    ('null', '1000000.0')
    """
    word = text.split(" (")[0].strip().strip('"')
    try:
        return str(float(word))
    except ValueError:
        return word


def test_other_defaults_than_deepspeeds_are_told() -> None:
    with (DATA / "deepspeed_keys.tsv").open(encoding="utf-8", newline="") as file:
        theirs = {row["key_path"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}
    for entry in catalog.entries():
        default = theirs.get(entry.key, {}).get("default", "-")
        if default == "-":  # not a key of DeepSpeed, whose name other projects use
            continue
        ours, their = plain(entry.default), plain(default)
        same = (ours == their and entry.key not in MEANING) or SAME.get(entry.key) == (ours, their)
        assert same or "(DeepSpeed: " in entry.description, (entry.key, ours, their)


@pytest.mark.parametrize("key", SAME)
def test_only_keys_that_exist_are_excused(key: str) -> None:
    assert key in {entry.key for entry in catalog.entries()}
