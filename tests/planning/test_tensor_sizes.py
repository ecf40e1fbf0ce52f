"""``lt-zero estimate`` with tensor ranks: the drawing, a model's rules, and which numbers of tensor ranks fit."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from lt_zero.cli import app
from tests.support.cut_blocks import RULES, CutBlocks
from tests.support.features import needs

pytestmark = needs("parallel")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "120"})
    return result.exit_code, result.output


def rows(text: str, first: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first]]


def test_the_command_draws_the_ranks_in_few_lines() -> None:
    code, text = run("--params", "7B", "--world", "4096", "--per-node", "8", "--tensor", "4", "--stage", "3")
    assert code == 0, text
    assert "4,096 ranks: 1,024 data x 4 tensor" in text
    numbers = {row: [f"{4 * row + column}" for column in range(4)] for row in (0, 1, 2, 1023)}
    for row, cells in numbers.items():
        assert [str(row), *cells, str(row // 2)] in rows(text, str(row))
    assert len(text.splitlines()) < 60
    assert "ZeRO shards the part over its 1,024 rank(s)" in text
    assert "a tensor rank has 1,750,000,000: all are taken to be cut" in text


def test_the_command_draws_sequence_ranks_and_shards_states_over_them() -> None:
    size = ("--params", "7B", "--world", "16", "--per-node", "8", "--stage", "1")
    code, text = run(*size, "--sequence-ranks", "4", "--tensor", "2")
    assert code == 0, text
    assert "16 ranks: 2 data x 4 sequence x 2 tensor" in text
    assert ["1", "3", "14", "15"] in [row[:4] for row in rows(text, "1")]
    assert "Neighbours, 8 at a time, see one batch, of which each sequence rank has 1/4" in text
    code, text = run(*size, "--sequence-ranks", "4")
    _, alone = run(*size)
    assert text[text.index("as configured") :] == alone[alone.index("as configured") :], "as over as many data ranks"


def test_the_command_counts_a_models_rules(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": RULES}}}))
    code, text = run("--module", "tests.support.cut_blocks:CutBlocks", "--world", "4", "--config", str(path))
    assert code == 0, text
    whole = sum(p.numel() for p in CutBlocks().parameters())
    cut = sum(p.numel() for block in CutBlocks().blocks for p in (block.up.weight, block.up.bias, block.down.weight))
    assert f"Of {whole:,} parameters a tensor rank has {whole - cut // 2:,}: its parts" in " ".join(text.split())


@needs("offload")
def test_fit_tells_which_tensor_sizes_fit() -> None:
    """A layer of 8e9 parameters is too large for a GPU, until two ranks share it with offload, or four without."""
    large = ("--params", "64e9", "--largest", "8e9", "--world", "64", "--per-node", "8", "--precision", "bf16-mixed")
    code, text = run(*large, "--fit", "--gpu-gb", "30", "--tensor", "4")
    assert code == 0, text
    assert "fits: stage 3" in text
    text = text[text.index("Tensor ranks that fit") :]
    found = {row[0]: " ".join(row[1:]) for size in "1248" for row in rows(text, size)}
    assert "none fits" in found["1"]
    assert "stage 3" in found["8"]
    code, text = run(*large, "--fit", "--gpu-gb", "30")
    assert code == 1
    assert "Tensor ranks that fit" in text, "with other numbers of tensor ranks it does"
