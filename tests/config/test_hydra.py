"""Hydra: the groups of ``lt_zero.conf``, and the demo that is configured with them."""

from __future__ import annotations

import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import lt_zero.conf
from lt_zero.config import ZeroConfig, ZeroOptimization
from lt_zero.config.precision import resolve_mode
from tests.support.hydra_script import DEMO

FOLDER = Path(lt_zero.conf.__file__).parent
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in FOLDER.glob("*/*.yaml"))
NOT_OURS = ("trainer", "model")  # blocks of the application
TINY = ("model=tiny", "trainer.max_steps=2", "data.validations=1", "data.validation_windows=4", "trainer=cpu")


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("lt_zero.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose(overrides=list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def parsed(config: dict[str, Any]) -> ZeroConfig:
    return ZeroConfig.of({key: value for key, value in config.items() if key not in NOT_OURS})


@pytest.fixture
def nvme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LT_ZERO_NVME", str(tmp_path))
    return tmp_path


# ---- groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_valid_and_an_override_of_the_strategy(option: str, nvme: Path) -> None:
    group, name = option.split("=")
    config = composed(f"+{option}")
    if group not in ("precision", "monitor"):  # which set blocks of other names
        assert bool(config.get(group)) is (name != "none")
    made = parsed(config)
    if group not in NOT_OURS:
        assert ZeroConfig.of({}, overrides=[option]) == made


@pytest.mark.parametrize("stage", range(4))
def test_stages_say_what_is_the_default_anyway(stage: int) -> None:
    assert parsed(composed(f"+zero_optimization=stage{stage}")).zero_optimization == ZeroOptimization(stage=stage)


@pytest.mark.parametrize(
    ("option", "stage", "optimizer", "param"),
    [("stage2_offload", 2, "cpu", "none"), ("stage3_offload", 3, "cpu", "cpu"), ("infinity", 3, "nvme", "nvme")],
)
def test_offload(option: str, stage: int, optimizer: str, param: str, nvme: Path) -> None:
    block = parsed(composed(f"+zero_optimization={option}")).zero_optimization
    assert (block.stage, block.offload_optimizer.device, block.offload_param.device) == (stage, optimizer, param)
    if option == "infinity":
        assert block.offload_optimizer.nvme_path == block.offload_param.nvme_path == nvme


def test_infinity_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LT_ZERO_NVME", raising=False)
    with pytest.raises(Exception, match=r"(?s)LT_ZERO_NVME.*zero_optimization.offload_optimizer.nvme_path"):
        composed("+zero_optimization=infinity")
    block = composed("+zero_optimization=infinity", "zero_optimization.offload_optimizer.nvme_path=/disk")
    assert block["zero_optimization"]["offload_param"]["nvme_path"] == "/disk"


@pytest.mark.parametrize(
    ("option", "mode"),
    [
        ("auto", "32-true"),
        ("fp32", "32-true"),
        ("fp16", "16-true"),
        ("bf16", "bf16-true"),
        ("fp16_mixed", "16-mixed"),
        ("bf16_mixed", "bf16-mixed"),
    ],
)
def test_precision(option: str, mode: str) -> None:
    config = composed("+trainer=default", f"+precision={option}")
    assert resolve_mode(parsed(config), config["trainer"]["precision"]) == mode


def test_none_takes_away_what_a_file_has() -> None:
    file = composed("+optimizer=sgd", "+scheduler=warmup", "+monitor=csv")
    config = ZeroConfig.of(file, overrides=["optimizer=none", "scheduler=none", "monitor=none"])
    assert (config.optimizer, config.scheduler, config.csv_monitor.enabled) == (None, None, False)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    """Groups in it come first, and blocks can be put below a key."""
    (tmp_path / "zero_optimization").mkdir()
    (tmp_path / "zero_optimization/mine.yaml").write_text("defaults: [stage3, _self_]\nreduce_bucket_size: 2e8\n")
    (tmp_path / "run.yaml").write_text(
        "defaults: [{zero_optimization@zero.zero_optimization: mine}, {precision@zero: bf16}, _self_]\n"
        "hydra: {searchpath: ['pkg://lt_zero.conf']}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("run", overrides=["zero.zero_optimization.sub_group_size=1e8"])
    zero = ZeroConfig.of(OmegaConf.to_container(config.zero, resolve=True))  # type: ignore[arg-type]
    block = zero.zero_optimization
    assert (block.stage, block.reduce_bucket_size, block.sub_group_size) == (3, 200_000_000, 100_000_000)
    assert zero.bf16.enabled is True


# ---- the demo --------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs the script in this process, up to where Hydra would call it; returns exit code and output."""
    root = logging.getLogger()
    before = (list(root.handlers), root.level)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(DEMO), *arguments])
        monkeypatch.syspath_prepend(str(DEMO.parent))
        code = 0
        try:
            runpy.run_path(str(DEMO), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    yield run
    GlobalHydra.instance().clear()
    root.handlers, root.level = before


def test_demo_shows_its_configuration(demo: Any) -> None:
    _, shown = demo("zero_optimization=stage3_offload", "zero_optimization.reduce_bucket_size=5e8", "--cfg", "job")
    config = OmegaConf.create(shown)
    assert isinstance(config, DictConfig)
    assert config.zero_optimization.offload_param.device == "cpu"
    assert config.out == "out"
    assert config.trainer.max_steps == 700
    assert config.optimizer is None


def test_demo_takes_keys_that_no_file_has(demo: Any) -> None:
    _, shown = demo("+zero_optimization.leaf_module.classes=[Block]", "precision=bf16_mixed", "--cfg", "job")
    config = OmegaConf.create(shown)
    assert config.zero_optimization.leaf_module.classes == ["Block"]
    assert config.torch_autocast.dtype == "bf16"


def test_help_names_every_option(demo: Any) -> None:
    code, text = demo("--help")
    assert code == 0
    groups = text[text.index("Groups and their options") : text.index("What is set")]
    rows = {row[0]: row[1:] for row in (line.replace(",", " ").split() for line in groups.splitlines()[1:]) if row}
    own = [f"{path.parent.name}={path.stem}" for path in (DEMO.parent / "conf").glob("*/*.yaml")]
    assert sorted(f"{group}={name}" for group, names in rows.items() for name in names) == sorted([*OPTIONS, *own])
    assert "max_steps: 700" in text


@pytest.mark.parametrize(
    ("override", "error"),
    [
        pytest.param(
            "zero_optimization=stage4",
            "(?s)Could not find 'zero_optimization/stage4'.*stage3_offload",
            marks=pytest.mark.slow,  # Hydra's own errors
        ),
        pytest.param(
            "zero_optimization.reduce_bucket=1", "Key 'reduce_bucket' is not in struct", marks=pytest.mark.slow
        ),
        ("+zero_optimization.reduce_bucket=1", "reduce_bucket"),  # lt_zero's
        ("strategy=dpp", "strategy='dpp' is not one of zero, ddp"),
    ],
)
def test_demo_refuses(demo: Any, tmp_path: Path, override: str, error: str) -> None:
    code, text = demo(override, f"out={tmp_path}", *TINY)
    assert code == 1
    assert re.search(error, text), text


def run_demo(*arguments: str) -> str:
    root = DEMO.parent.parent
    command = [sys.executable, "tests/support/hydra_script.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=True, text=True, capture_output=True, cwd=root, env=environment).stdout


def same_on_ranks(folder: Path) -> dict[str, Any]:
    first, second = (OmegaConf.load(folder / f"rank-{rank}.yaml") for rank in (0, 1))
    assert first == second
    assert (folder / "gpt-fp16.pt").exists()
    return OmegaConf.to_container(first)  # type: ignore[return-value]


@pytest.mark.slow
def test_demo_runs_on_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    output = run_demo(*TINY, "zero_optimization=stage2", "zero_optimization.reduce_bucket_size=5e7", f"out='{folder}'")
    config = same_on_ranks(folder)
    assert config["zero_optimization"]["reduce_bucket_size"] == 5e7
    assert "validation perplexity" in output
    assert (folder / "loss.png").exists()
    assert OmegaConf.load(folder / ".hydra/config.yaml").zero_optimization.stage == 2


@pytest.mark.slow
def test_sweep_of_the_demo(tmp_path: Path) -> None:
    """Over the number of ranks, since ranks that run the sweep in step, as Lightning starts them, cannot do that."""
    output = run_demo("-m", *TINY, "trainer.devices=1,2", "zero_optimization=stage3", f"out={tmp_path}")
    assert output.count("validation perplexity") == 2
    assert len(list((tmp_path / "job-0").glob("rank-*"))) == 1
    assert same_on_ranks(tmp_path / "job-1")["trainer"]["devices"] == 2
