"""``LT_ZERO_DIGESTS``: digests after each step of every face, and the step at which two runs part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from typer import Typer
from typer.testing import CliRunner

import lt_zero
from lt_zero.tools.compare.compare import compare_command
from lt_zero.tools.compare.digests import DIGESTS, Digests, DigestsError, parting_of, read_digests
from tests.support.lightning_tools import sharded_trainer
from tests.support.pool import Pool


class Module(L.LightningModule):
    def __init__(self, wrong_from: int = 99) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.wrong_from = wrong_from

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean() * (1.0 if self.global_step + 1 < self.wrong_from else 1.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.linspace(-1, 1, 40).view(8, 5), batch_size=2)


def _train(folder: str, stage: int, wrong_from: int = 99, resume: str | None = None, **options: Any) -> str:
    with mock.patch.dict(os.environ, {DIGESTS: folder}):
        trainer = sharded_trainer(stage, **{"max_steps": 4, **options})
        module = Module(wrong_from)
        trainer.fit(module, ckpt_path=resume)
        return lt_zero.weights_digest(module)


def _app() -> Typer:
    app = Typer()
    app.command()(compare_command)
    return app


def test_stages_have_the_same_digests_and_a_wrong_gradient_is_dated(pool: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "abc"]
    last = pool.run(2, _train, folders[0], 1)
    pool.run(2, _train, folders[1], 3)
    pool.run(2, _train, folders[2], 3, 3)
    one, two, wrong = (read_digests(Path(folder)) for folder in folders)
    assert list(one.steps) == [1, 2, 3, 4]
    assert len(set(one.steps.values())) == 4
    assert one.steps == two.steps
    assert [one.steps[4]] * 2 == last
    assert (one.about["stage"], two.about["stage"], one.about["ranks"]) == (1, 3, 2)
    assert parting_of(one, wrong) == (2, 3, 4)
    same = CliRunner().invoke(_app(), folders[:2])
    assert same.exit_code == 0
    assert "The weights are the same, to the bit, after each of 4 steps." in same.output
    other = CliRunner().invoke(_app(), [folders[0], folders[2]])
    assert other.exit_code == 1
    assert "The weights part at step 3; after step 2 they are the same." in other.output


def test_a_resumed_run_goes_on_counting(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole, halves = str(tmp_path / "whole"), str(tmp_path / "halves")
    pool.run(1, _train, whole, 2)
    pool.run(1, _train_and_save, halves, path)
    pool.run(1, _train, halves, 2, 99, path)
    lines = [json.loads(line) for line in (tmp_path / "halves/digests0.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["at"]) for line in lines] == [
        *(("start", 0), ("step", 1), ("step", 2)),
        *(("start", 2), ("step", 3), ("step", 4)),
    ]
    assert read_digests(Path(halves)).steps == read_digests(Path(whole)).steps


def _train_and_save(folder: str, path: str) -> None:
    with mock.patch.dict(os.environ, {DIGESTS: folder}):
        trainer = sharded_trainer(2, max_steps=2)
        trainer.fit(Module())
        trainer.save_checkpoint(path)


def test_a_load_that_goes_back_leaves_later_steps_behind(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(1, _back, str(tmp_path))[0]
    assert list(read_digests(tmp_path).steps.values()) == found


def _back(folder: str) -> list[str]:
    """The digests after two steps, and of one that is taken after a load, between which others have been taken."""
    model = nn.Linear(5, 3)
    with mock.patch.dict(os.environ, {DIGESTS: folder}):
        engine = lt_zero.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            config={"train_micro_batch_size_per_gpu": 2},
        )[0]
    found = []
    for step in range(5):
        engine.backward(engine(torch.ones(2, 5) + step).square().mean())
        engine.step()
        if step < 2:
            found.append(lt_zero.weights_digest(model))
            engine.save_checkpoint(folder, tag="two")
    engine.load_checkpoint(folder, tag="two")
    engine.backward(engine(torch.zeros(2, 5)).square().mean())
    engine.step()
    return [*found, lt_zero.weights_digest(model)]


def _digests(steps: dict[int, str]) -> Digests:
    return Digests("run", {}, steps)


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(DigestsError, match="run has steps 1 to 2 and run steps 3 to 3: none in common"):
        parting_of(_digests({1: "a", 2: "b"}), _digests({3: "a"}))
    assert parting_of(_digests({1: "a", 2: "b"}), _digests({1: "c", 2: "b"})) == (None, 1, 2)


def test_steps_that_a_later_start_has_left_behind_do_not_count(tmp_path: Path) -> None:
    def lines_of(start: int, last: int, digest: str) -> list[dict[str, Any]]:
        steps = [{"kind": "step", "at": step, "digest": digest} for step in range(start + 1, last + 1)]
        return [{"kind": "start", "version": 1, "at": start}, *steps]

    lines = [*lines_of(0, 6, "old"), *lines_of(0, 4, "first"), *lines_of(2, 3, "resumed")]
    (tmp_path / "digests0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_digests(tmp_path).steps == {1: "first", 2: "first", 3: "resumed"}


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "has no step yet"),
        (['{"kind": "start", "version": 0}'], "is of version 0, and this package reads 1"),
        (['{"kind": "start", "version": 1, "at": 0}', "[1]"], "line 2: "),
        (['{"kind": "start", "version": 1, "at": 0}', '{"kind": "step", "at": "x", "digest": "a"}'], "line 2: "),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, lines: list[str], error: str) -> None:
    (tmp_path / "digests0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(DigestsError, match=error):
        read_digests(tmp_path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DigestsError, match=r"digests0.jsonl cannot be read .*Run it with LT_ZERO_DIGESTS="):
        read_digests(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "file").write_text("")
    refused = pool.run(2, _refused, str(tmp_path / "file" / "folder"))
    assert all("cannot be written: Not a directory. Name another folder." in text for text in refused)


def _refused(folder: str) -> str:
    with pytest.raises(lt_zero.ConfigError) as error:
        _train(folder, 2)
    return str(error.value)
