"""``ops``: native kernels where they can be built and torch's operations elsewhere, or an error before training."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero import ZeroConfig, ZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.world import World
from lt_zero.core.engine.guard import is_guarded
from lt_zero.kernels import compiler, dispatch, library
from lt_zero.kernels.library import Loader, Status
from lt_zero.training.build import _check_kernels, built_by
from tests.support.lightning_tools import GPT, QUIET
from tests.support.models import Net, next_token_loss
from tests.support.paths import PACKAGE, ROOT
from tests.support.pool import Pool

THERE = Status("cpu", True, Path("kernels.so"), "from the cache", "avx512")
NOT_THERE = Status("cpu", False, None, "no C++ compiler: none of c++ is installed.")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without compilers, on which nothing was built before."""
    for name in ("LT_ZERO_NATIVE", "LOCAL_RANK", "CXX", "NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LT_ZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "_loader", Loader())
    monkeypatch.setattr(dispatch, "_loaded", {})


def required(**keys: object) -> ZeroConfig:
    return ZeroConfig.of({"zero_optimization": {"stage": 2}, "ops": "required", **keys})


def test_auto_trains_on_references_with_one_warning(no_compiler: None) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = lt_zero.shard(Net(), {"zero_optimization": {"stage": 2}})
        optimizer = torch.optim.AdamW(engine.root.parameters(), lr=0.1)
        lt_zero.ShardedOptimizer(engine, optimizer)
        before = [p.detach().clone() for p in engine.root.parameters()]
        for _ in range(2):
            next_token_loss(engine.root, 0, 0, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any(not torch.equal(p, old) for p, old in zip(engine.root.parameters(), before, strict=True))
    assert ["no C++ compiler" in str(w.message) for w in told if "kernels" in str(w.message)] == [True]


def test_required_says_what_is_missing_why_and_what_to_do(no_compiler: None) -> None:
    module = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that torch's operations are used would not be true
        with pytest.raises(ConfigError) as caught:
            lt_zero.shard(module, required())
    assert [problem.key for problem in caught.value.problems] == ["ops"]
    text = str(caught.value)
    words = ("ops='required'", "cpu", *library.names("cpu"), "no C++ compiler", "install a C++ compiler", "ops='auto'")
    assert [word for word in words if word not in text] == []
    assert not any(map(is_guarded, module.parameters()))  # nothing was changed


def test_required_and_switched_off_contradict_each_other(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_NATIVE", "0")
    with pytest.raises(ConfigError, match="LT_ZERO_NATIVE=0. Remedy: unset LT_ZERO_NATIVE"):
        lt_zero.shard(Net(), required())


def test_required_names_the_record_of_a_compiler_that_fails(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho "error: out of order"\nexit 3\n')
    compiler.chmod(0o755)
    with pytest.raises(ConfigError, match="error: out of order") as caught:
        lt_zero.shard(Net(), required())
    (record,) = (tmp_path / "cache").glob("*.log")
    assert str(record) in str(caught.value)


def test_required_runs_where_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(library, "status", lambda kind: (asked.append(kind), THERE)[1])
    assert built_by(lt_zero.shard(Net(), required())).ops == "required"
    assert asked == ["cpu"]


@pytest.mark.parametrize(
    ("device", "zero", "kinds"),
    [
        ("cuda:0", {}, ["cuda"]),
        ("cuda:0", {"offload_optimizer": {"device": "cpu"}}, ["cpu", "cuda"]),
        ("cpu", {"offload_optimizer": {"device": "cpu"}}, ["cpu"]),
    ],
)
def test_devices_of_the_run_are_looked_at(
    device: str, zero: dict[str, object], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(library, "status", lambda kind: (asked.append(kind), THERE)[1])
    world = World.join(torch.device("cpu"))
    _check_kernels(required(zero_optimization={"stage": 2, **zero}), torch.device(device), world)
    assert asked == kinds


def test_a_device_without_kernels_is_named() -> None:
    with pytest.raises(ConfigError, match="kernels for cpu and cuda, none for xpu"):
        _check_kernels(required(), torch.device("xpu", 0), World.join(torch.device("cpu")))


def _on_one_rank(lacking: int) -> tuple[str, bool]:
    status, module = library.status, Net()
    library.status = lambda kind: NOT_THERE if dist.get_rank() == lacking else THERE
    try:
        lt_zero.shard(module, required())
    except ConfigError as error:
        return str(error), any(map(is_guarded, module.parameters()))
    finally:
        library.status = status
    return "", True


def test_all_ranks_stop_if_one_lacks_kernels(pool: Pool) -> None:
    (first, changed), (second, changed_too) = pool.run(2, _on_one_rank, 1)
    assert first == second
    assert "Rank 1: No cpu kernel for adam_step" in first
    assert "Rank 0" not in first
    assert (changed, changed_too) == (False, False)


class Counting(GPT):
    """Counts the batches it is given."""

    batches = 0

    def training_step(self, *args: object) -> torch.Tensor:
        self.batches += 1
        return super().training_step(*args)  # type: ignore[arg-type]


def test_a_trainer_stops_before_the_first_batch(no_compiler: None) -> None:
    module = Counting(1)
    trainer = pl.Trainer(**{**QUIET, "devices": 1, "max_steps": 1, "strategy": ZeroStrategy(config=required())})
    with pytest.raises(ConfigError, match="ops='required'"):
        trainer.fit(module)
    assert module.batches == 0


def test_packages_have_the_sources_of_the_kernels() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["lt_zero"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    sources = {path for path in compiler.CSRC.rglob("*") if path.is_file()}
    assert len(sources) > 10
    assert sources <= packed
