"""The command `lt-zero plot`: what is drawn is what was logged; errors name file, line and remedy."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from typer.testing import CliRunner

from lt_zero.cli import app
from lt_zero.training.lightning.monitor import plot as plotting
from lt_zero.training.lightning.monitor.plot import draw, plot, read_drawn
from lt_zero.training.lightning.monitor.reading import LogsError, find_metrics
from lt_zero.training.lightning.monitor.step_metrics import StepMetrics


def written(folder: Path, rows: list[tuple[int, dict[str, Any]]], **kwargs: Any) -> Path:
    """A run as Lightning's CSVLogger writes it."""
    logger = CSVLogger(folder, name="job", **kwargs)
    for step, metrics in rows:
        logger.log_metrics(metrics, step=step)
        logger.save()
    return folder


def a_run(folder: Path, scale: float = 1.0, steps: int = 4) -> Path:
    rows: list[tuple[int, dict[str, Any]]] = []
    for step in range(steps):
        loss = math.nan if step == 2 else scale / (step + 1)
        known = {"loss_scale": 2.0**step, "samples_per_s": 100 + step, "tflops": 3.5, "memory_gb": 1.25}
        norm = 0.5 * step if step != 1 else None
        reading = StepMetrics(step + 1, None, (0.1, 0.25 / (step + 1)), loss, norm, **known)  # type: ignore[arg-type]
        rows += [(step, reading.metrics()), (step, {"train_loss": 99.0, "epoch": 0})]
    return written(folder, [*rows, (steps - 1, {"val_loss": 7.0, "epoch": 0}), (steps, {"val_loss": 6.0})])


def panels(figure: Any) -> dict[str, dict[str, Any]]:
    """Label of an axis -> label of a line -> the line."""
    return {axes.get_ylabel(): {line.get_label(): line for line in axes.lines} for axes in figure.axes}


def same(line: Any, steps: list[float], values: list[float]) -> bool:
    return bool(np.array_equal(line.get_xdata(), steps) and np.array_equal(line.get_ydata(), values, equal_nan=True))


def test_what_is_drawn_is_what_was_logged(tmp_path: Path) -> None:
    figure = draw([read_drawn(a_run(tmp_path))])
    found = panels(figure)
    assert list(found) == [
        *("loss", "learning rate", "gradient norm", "loss scale"),
        *("samples/s", "TFLOP/s per device", "memory, GB"),
    ]
    losses = found["loss"]
    assert set(losses) == {"zero/loss", "val_loss"}, "the user's own is the same, and is not drawn twice"
    assert same(losses["zero/loss"], [0, 1, 2, 3], [1, 0.5, math.nan, 0.25]), "a gap"
    assert same(losses["val_loss"], [3, 4], [7, 6])
    assert (losses["val_loss"].get_linestyle(), losses["val_loss"].get_marker()) == ("None", "o")
    assert losses["zero/loss"].get_linestyle() == "-"
    assert same(found["learning rate"]["zero/lr_1"], [0, 1, 2, 3], [0.25, 0.125, 0.25 / 3, 0.0625])
    assert same(found["gradient norm"]["zero/grad_norm"], [0, 2, 3], [0, 1, 1.5]), "not logged is no gap"
    assert same(found["loss scale"]["zero/loss_scale"], [0, 1, 2, 3], [1, 2, 4, 8])
    assert same(found["memory, GB"]["zero/memory_gb"], [0, 1, 2, 3], [1.25] * 4)
    assert same(found["samples/s"]["zero/samples_per_s"], [0, 1, 2, 3], [100, 101, 102, 103])
    assert same(found["TFLOP/s per device"]["zero/tflops"], [0, 1, 2, 3], [3.5] * 4)
    scales = {axes.get_ylabel(): axes.get_yscale() for axes in figure.axes}
    assert [name for name, scale in scales.items() if scale == "log"] == ["loss scale"]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1, "the same steps"


def test_columns_of_the_user(tmp_path: Path) -> None:
    rows = [(9, {"train_loss_step": 2.0, "lr-AdamW/pg1": 0.1, "acc": 0.5, "note": "text", "valid/loss": 3.0})]
    found = panels(draw([read_drawn(written(tmp_path, rows))]))
    assert {name: set(lines) for name, lines in found.items()} == {
        "loss": {"train_loss_step", "valid/loss"},
        "learning rate": {"lr-AdamW/pg1"},
    }
    assert found["loss"]["train_loss_step"].get_marker() == ".", "a lone value is seen"


def test_runs_over_each_other(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "a"), written(tmp_path / "b", [(0, {"loss": 5.0}), (1, {"loss": 4.0})])
    figure = draw([read_drawn(first), read_drawn(second)])
    losses = panels(figure)["loss"]
    assert set(losses) == {"a zero/loss", "a val_loss", "b loss"}
    assert same(losses["b loss"], [0, 1], [5, 4])
    assert losses["a zero/loss"].get_color() != losses["b loss"].get_color()
    a_run(tmp_path / "c" / "a")
    names = set(panels(draw([read_drawn(first), read_drawn(tmp_path / "c" / "a")]))["samples/s"])
    assert names == {str(first), str(tmp_path / "c" / "a")}, "whole paths where the last parts are alike"
    shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert set(shown) == set(losses)


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "new" / "p.png"
    result = CliRunner().invoke(app, ["plot", str(a_run(tmp_path / "run")), "--output", str(out)])
    assert result.exit_code == 0, result.output
    assert "version_0/metrics.csv" in result.output
    pixels = matplotlib.image.imread(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert pixels.shape[0] > 1000
    assert pixels.shape[1] > 1000
    drawn = (pixels[..., :3] < 0.98).any(-1)
    assert 0.01 < drawn.mean() < 0.3
    blue = np.abs(pixels[..., :3] - np.array([0x1F, 0x77, 0xB4]) / 255).max(-1) < 0.02
    rows = np.flatnonzero(blue.any(1)) / pixels.shape[0]
    assert set((rows * 7).astype(int)) == set(range(7)), "a line in each of the seven pictures"


def test_newest_version(tmp_path: Path) -> None:
    for number in (9, 10):
        written(tmp_path, [(0, {"loss": float(number)})], version=number)
    old = written(tmp_path / "other", [(0, {"loss": 1.0})])
    os.utime(find_metrics(old), (1, 1))
    os.utime(tmp_path / "job" / "version_10" / "metrics.csv", (2, 2))
    assert find_metrics(tmp_path).parent.name == "version_10", "numbers, not letters or times"
    assert find_metrics(tmp_path / "job" / "version_9").parent.name == "version_9"
    assert read_drawn(find_metrics(old)).columns["loss"] == ([0], [1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: nothing was logged"),
        ("loss\n1\n", "line 1: there is no column 'step'"),
        ("step,loss\n1,2\n\n3,4,5\n", "line 4: 3 values for 2 columns"),
        ("step,loss\n1,2\n3,x\n", "line 3, column 'loss': 'x' is not a number"),
        ("step,loss\n,2\n", "line 2, column 'step': '' is not a number"),
        ('step,loss\n1,"2\n', "line 2: "),
        ("step,acc\n1,2\n", "nothing to plot.*csv_monitor.enabled=true"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(LogsError, match=message) as caught:
        plot([tmp_path], tmp_path / "p.png")
    assert str(tmp_path / "metrics.csv") in str(caught.value)
    assert not (tmp_path / "p.png").exists()


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss,val_loss\n1,2,\n2,3,4\n3,")
    assert read_drawn(tmp_path).columns == {"loss": ([1, 2], [2, 3]), "val_loss": ([2], [4])}


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert result.exit_code == 1
    assert f"No metrics.csv in {tmp_path} or below. Set csv_monitor.enabled=true" in result.output
    with pytest.raises(LogsError, match="does not exist. Name the folder"):
        read_drawn(tmp_path / "none")
    run = a_run(tmp_path / "run")
    with pytest.raises(LogsError, match=r"the format is PNG. Write a name such as .*p\.png"):
        plot([run], tmp_path / "p.pdf")
    (tmp_path / "file").touch()
    with pytest.raises(LogsError, match=r"--output .*p\.png cannot be written"):
        plot([run], tmp_path / "file" / "p.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LogsError, match=r"pip install 'lt-zero\[plot\]'"):
        plot([run], tmp_path / "p.png")


def test_the_command_starts_without_torch() -> None:
    source = Path(plotting.__file__).read_text()
    assert "import torch" not in source
    assert "lightning" not in [line.split()[1].split(".")[0] for line in source.splitlines() if "import" in line[:7]]


def test_names_are_text_and_always_in_the_legend(tmp_path: Path) -> None:
    runs = []
    for name in ("_a", "$^$"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("\ufeffstep,train_loss\n0,1\n1,5\n", encoding="utf-8")
        runs.append(tmp_path / name)
    plot(runs, tmp_path / "both.png")
    plot(runs[1:], tmp_path / "one.png")
    (axes,) = draw([read_drawn(run) for run in runs]).axes
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["_a", "$^$"]


def test_a_file_without_rows_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss\n")
    with pytest.raises(LogsError, match=r"metrics\.csv has no row yet"):
        plot([tmp_path], tmp_path / "x.png")
