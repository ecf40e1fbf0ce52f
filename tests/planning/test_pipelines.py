"""``lt-zero estimate`` with pipelines, and the meshes that ``--fit`` suggests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lt_zero import Sizes, ZeroConfig
from lt_zero.cli import app
from lt_zero.parallel.mesh import ParallelSizes
from lt_zero.planning.meshes import MeshPlan, TrainingJob, meshes, plans, reasons, sent, with_mesh
from lt_zero.planning.sizes import stages_of_sizes
from lt_zero.planning.transformer import Transformer
from tests.support.paths import ROOT


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def rows(text: str, first: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first]]


LLAMA = ("--layers", "32", "--hidden", "4096", "--vocabulary", "32000", "--precision", "bf16-mixed")


def test_the_command_shows_ranks_schedules_and_stages() -> None:
    ranks = ("--world", "16", "--per-node", "8", "--pipeline", "4")
    code, text = run(*LLAMA, *ranks, "--micro-batches", "8", "--stage", "2")
    assert code == 0, text
    assert "16 ranks: 4 pipeline x 4 data" in text
    assert ["3", "12", "13", "14", "15", "1"] in rows(text, "3"), "ranks of the last stage, on the second node"
    assert rows(text, "1F1B") == [["1F1B", "*", "1", "27.3%", "4", "to", "1"]]
    assert rows(text, "GPipe") == [["GPipe", "1", "27.3%", "8", "to", "8"]]
    assert rows(text, "Interleaved1F1B") == [["Interleaved1F1B", "2", "15.8%", "11", "to", "5"]]
    first = next(row for row in rows(text, "0") if len(row) > 6 and "GB" in row)
    block, ends = 12 * 4096**2 + 13 * 4096, 32000 * 4096
    assert first[1:4] == ["9", f"{8 * block + ends:,}", "4"], "the embedding and 8 blocks"
    sbh = 4096 * 4096
    whole, fused, recomputed = (float(first[index]) for index in (4, 6, 8))
    assert whole == pytest.approx(4 * 8 * sbh * (34 + 5 * 32) / 1e9, abs=0.1)
    assert fused == pytest.approx(4 * 8 * sbh * 34 / 1e9, abs=0.1)
    assert recomputed == pytest.approx((4 * 8 * 2 * sbh + 34 * sbh) / 1e9, abs=0.1)
    assert "Stage 2 reduces gradients for each of the 8 micro-batches" in text
    assert f"Of {32 * block + 2 * ends:,} parameters a pipeline rank has {8 * block + ends:,}, at most" in text


def test_the_command_builds_each_stage_of_a_module(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"pipeline": {"stages": 3}}))
    code, text = run("--module", "tests.support.pipelines:Model", "--world", "6", "--config", str(path))
    assert code == 0, text
    text = text[text.index("Ranks of the pipeline") :]
    found = [row for number in "012" for row in rows(text, number) if len(row) == 4]
    assert sum(int(row[1]) for row in found) == 8
    code, text = run("--module", "tests.support.cut_blocks:CutBlocks", "--world", "2", "--pipeline", "2")
    assert code == 2
    assert "has no lt_zero.parallel.Pipeline" in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--params", "1B", "--layers", "4", "--hidden", "8"), "Give --params"),
        (("--layers", "4"), "--layers and --hidden"),
        (("--params", "1B", "--pipeline", "3", "--world", "4"), "does not divide the 4 ranks"),
        (("--params", "1B", "--pipeline", "64", "--world", "64"), "more than the 32 layers"),
        (("--params", "1B", "--pipeline", "2", "--world", "2", "--schedule", "zigzag"), "schedule"),
        (("--params", "1M", "--world", "2", "--fit", "--gpu-gb", "8", "--batch", "7", "--micro-batch", "2"), "no mesh"),
    ],
)
def test_wrong_options_are_errors(arguments: tuple[str, ...], text: str) -> None:
    code, found = run(*arguments)
    assert code == 2
    assert text in " ".join(found.replace("│", " ").split())


def job(world: int = 64, gpu: float = 80e9, batch: int = 256, parameters: str = "70B", **options: str) -> TrainingJob:
    sizes = Sizes(parameters)  # type: ignore[arg-type]
    shape = Transformer.like(sizes.total)
    each, rest = divmod(sizes.total, shape.layers)
    sizes = Sizes(sizes.total, layers=tuple(each + (number < rest) for number in range(shape.layers)))
    options = {"precision": "bf16-mixed", **options}
    return TrainingJob(shape, sizes, batch, world, min(8, world), int(gpu), ZeroConfig.of(None), options)


def test_meshes_can_run() -> None:
    asked = job(batch=192)
    found = list(meshes(asked))
    assert len(found) == len(set(found)) > 10
    for sizes in found:
        assert sizes.data * sizes.tensor * sizes.pipeline == 64
        assert sizes.tensor in (1, 2, 4, 8)
        assert 192 % sizes.data == 0
    assert all(sizes.data != 64 / 2 or 192 % 32 == 0 for sizes in found)


def test_the_best_fits_and_others_lose_more() -> None:
    asked = job(world=16)
    found = plans(asked)
    assert found
    assert found == sorted(found, key=lambda plan: plan.lost)
    assert all(plan.nbytes <= 80e9 for plan in found)
    lines = " ".join(reasons(found, asked))
    assert f"suggested: {found[0]}" in lines
    assert plans(job(world=2, gpu=1e9)) == []


def test_a_small_model_needs_data_ranks_only() -> None:
    best = plans(job(world=8, parameters="100M"))[0]
    assert best.sizes == ParallelSizes(8)
    assert (best.stage, best.recomputes) == (1, False)


def _sent(sizes: ParallelSizes, stage: int = 1, count: int = 4) -> tuple[float, float]:
    asked = job(world=sizes.data * sizes.tensor * sizes.pipeline)
    has = stages_of_sizes(asked.sizes, with_mesh(asked.config, sizes))[0]
    return sent(asked, sizes, has, stage, count)


def test_what_a_rank_sends() -> None:
    """A ring of two ranks sends half of the gradients and of the weights; all of it crosses if each is on a node."""
    total = 70e9 * (4 + 2) / 2  # gradients in 32 bits, weights in 16
    assert _sent(ParallelSizes(2)) == (pytest.approx(total), 0)
    inside, between = _sent(ParallelSizes(64))
    assert inside == pytest.approx(7 * between), "one of eight ranks sends to another node"
    hop = 4 * job().model.boundary  # of 4 micro-batches, there or back
    assert _sent(ParallelSizes(1, 1, 2)) == (pytest.approx(hop), 0), "stages share a node"
    assert _sent(ParallelSizes(8, 1, 2))[1] == pytest.approx(hop), "stages on nodes of their own"
    assert _sent(ParallelSizes(2), 2, 4)[0] > _sent(ParallelSizes(2), 1, 4)[0], "a reduction for each micro-batch"
    of_tensor = _sent(ParallelSizes(1, 2))
    assert of_tensor == (pytest.approx(4 * job().model.layers * 4 * job().model.boundary), 0)


def test_fit_suggests_a_mesh() -> None:
    code, text = run("--params", "70e9", "--world", "512", "--fit", "--gpu-gb", "80", "--precision", "bf16-mixed")
    assert code == 0, text
    assert "Meshes of 512 ranks that fit 80 GB, 1,024 sequences per step" in text
    assert "suggested: " in text
    assert "ZeroStrategy(stage=" in text
    assert "Taken to be a transformer of" in text


@pytest.mark.parametrize("world", [1, 2, 4096])
def test_fit_on_any_number_of_ranks(world: int) -> None:
    code, text = run("--params", "1B", "--world", str(world), "--fit", "--gpu-gb", "80", "--precision", "bf16-mixed")
    assert code == 0, text
    assert ("suggested: " in text) == (world > 1)


PAGE = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")
SUGGESTED = re.findall(r"^\| (70?B), ([\d,]+) \| (.*) \|$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "world", "cells"), SUGGESTED)
def test_the_suggestions_of_the_page_are_those_of_the_command(model: str, world: str, cells: str) -> None:
    ranks = int(world.replace(",", ""))
    how = ("--fit", "--gpu-gb", "80", "--precision", "bf16-mixed")
    code, text = run("--params", model, "--world", str(ranks), "--batch", str(8 * ranks), *how)
    if "nothing fits" in cells:
        assert code == 0, text
        assert "suggested: " not in text
        return
    found = re.search(r"suggested: (.*), [\d,]+ micro-batches", text)
    seconds = re.search(r"beside ([\d.]+) s", " ".join(text.split()))
    assert found is not None
    assert seconds is not None
    table = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    best = next(row for row in table if len(row) == 11 and row[0].isdecimal())
    gpu, inside, between, waits, lost = best[6:]
    lost = f"{lost.removesuffix(' s')} of {float(seconds[1]):.2g} s"
    assert cells.split(" | ") == [found[1], gpu, f"{inside}, {between.replace('-', '0')}", waits, lost]


def test_a_plan_says_itself() -> None:
    plan = MeshPlan(ParallelSizes(4, 2, 2), 1, 8, True, 0, 0, 0, 0, 0)
    assert str(plan) == "2 tensor x 2 pipeline x 4 data, stage 1, recomputing blocks"
