"""transformers' Trainer and Accelerate over ``lt_zero.as_deepspeed()``: what they ask, and whole runs on two ranks."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.deepspeed.huggingface import clone_tensors_for_torch_save, mark_optimizer
from tests.support import huggingface_script
from tests.support.docs_tools import BLOCKS, ROOT
from tests.support.pool import Pool


@pytest.fixture
def installed() -> Iterator[Any]:
    """DeepSpeed's names for the length of a test."""
    finders = list(sys.meta_path)
    yield lt_zero.as_deepspeed()
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_the_package_is_found_with_its_version(installed: Any) -> None:
    metadata = importlib.metadata.metadata("deepspeed")
    assert (metadata["Name"], metadata["Version"]) == ("deepspeed", installed.__version__)
    assert importlib.metadata.version("torch").startswith("2.")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("deepspeed-no-such")


def test_copies_of_state_dicts_share_no_memory() -> None:
    layer = nn.Linear(2, 3)
    copies = clone_tensors_for_torch_save(layer.state_dict())
    assert torch.equal(copies["weight"], layer.weight)
    assert copies["weight"].data_ptr() != layer.weight.data_ptr()


def test_a_skipped_step_is_told_to_the_optimizer(installed: Any) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, "zero_optimization": {"stage": 1}}
    model = nn.Linear(3, 1)
    engine, optimizer, _, _ = lt_zero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config
    )
    mark_optimizer(engine)
    optimizer_: Any = optimizer
    skipped, scales = [], [optimizer_.loss_scaler.cur_scale]
    for factor in (1.0, float("inf"), 1.0):
        engine.backward((engine(torch.ones(2, 3)) * factor).sum())
        engine.step()
        skipped.append(bool(optimizer_.overflow))
        scales.append(optimizer_.loss_scaler.cur_scale)
        assert engine.was_step_applied() is engine.was_step_applied() is not skipped[-1]
    assert (skipped, scales) == ([False, True, False], [16.0, 16.0, 8.0, 8.0])
    assert (optimizer_.loss_scaler.cur_iter, optimizer_.loss_scaler.scale_window) == (3, 1000)
    assert optimizer_.dynamic_loss_scale
    inner = optimizer_.optimizer
    assert isinstance(inner, torch.optim.SGD)
    assert inner.param_groups is optimizer_.param_groups
    assert not hasattr(inner, "optimizer")
    inner.param_groups = []
    assert optimizer_.param_groups == []


def _status() -> None:
    from lt_zero.deepspeed.engines import initialize
    from lt_zero.deepspeed.sharding import ZeroParamStatus

    seen = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.head.weight.ds_status == ZeroParamStatus.AVAILABLE)
            return x @ self.head.weight.t()  # outside of its module

    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    model = Net()
    engine, *_ = initialize(model=model, config=config)
    weight: Any = model.head.weight
    assert (weight.ds_numel, weight.ds_shape, weight.ds_id, weight.ds_persist) == (15, (3, 5), 0, False)
    assert weight.ds_status != ZeroParamStatus.AVAILABLE
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert weight.ds_status.name == "NOT_AVAILABLE"
    own = weight.ds_tensor
    assert (own.ds_numel, own.dim()) == (own.numel(), 1)
    assert torch.equal(own, lt_zero.safe_get_local_fp32_param(weight))
    with pytest.raises(RuntimeError, match="inference"):
        own.zero_()
    assert not hasattr(nn.Linear(1, 1).weight, "ds_tensor")
    engine(torch.ones(2, 5))
    assert seen == [True]
    with lt_zero.GatheredParameters(weight):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
    engine.destroy()


def _generation() -> None:
    """What TRL does around the generation of a model at stage 3, and for log-probabilities before training."""
    from lt_zero.deepspeed.engines import initialize
    from lt_zero.training.loop.engine import ended

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7)), torch.ones(2, 5)
    twin, wanted = deepcopy(model), model(batch).detach()
    reference, *_ = initialize(model=model, config={"zero_optimization": zero})
    reference.eval()
    assert torch.equal(reference(batch), wanted)
    for wrong in ({"stage": 4}, {"stage": 3, "stage3_param_persistence_threshold": -1}):
        with pytest.raises(ConfigError):
            initialize(model=model, config={"zero_optimization": wrong})
        assert reference.engine not in ended, "the engine of before is still in use"
    made = torch.optim.SGD(model.parameters(), 0.1)  # an engine that trains the model takes it
    engine, optimizer, *_ = initialize(model=model, optimizer=made, config={"zero_optimization": zero})
    offload: Any = optimizer.parameter_offload
    assert offload.module is model
    for module in model.modules():
        assert list(module.ds_external_parameters()) == []  # type: ignore[operator]
    with lt_zero.GatheredParameters(engine.parameters()):
        for _, parameter in model.named_parameters():
            parameter.ds_active_sub_modules.clear()  # type: ignore[attr-defined]
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        with torch.no_grad():
            assert torch.equal(engine.module(batch), wanted)
        offload._register_deepspeed_module(offload.module)
    engine.train()
    for _ in range(2):
        engine.backward(engine(batch).sum())
        engine.step()
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(2):
        plain.zero_grad()
        twin(batch).sum().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)  # DeepSpeed's default
        plain.step()
    torch.testing.assert_close(engine(batch), twin(batch))
    with pytest.raises(ValueError, match="sharded already"):
        initialize(model=model, config={"zero_optimization": zero})  # this one trains it
    engine.destroy()


def _marks() -> None:
    _status()
    _generation()


def test_marks_of_parameters_and_optimizers(pool: Pool) -> None:
    pool.run(2, _marks)


# ---- whole runs ------------------------------------------------------------------------------------------------------


def run(folder: Path, face: str, stage: int | None, **options: Any) -> list[dict[str, float]]:
    """The rows of a run on two ranks; without a ``stage`` that of DistributedDataParallel."""
    for name in ("transformers", "accelerate", "peft"):
        pytest.importorskip(name)
    folder.mkdir(parents=True, exist_ok=True)
    told = json.dumps({"folder": str(folder), "face": face, "stage": stage, **options})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = {**os.environ, "PYTHONPATH": str(Path(lt_zero.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, huggingface_script.__file__, told], env=env, capture_output=True, text=True, timeout=900
    )
    assert (folder / "rows").exists(), done.stdout + done.stderr
    found: list[dict[str, float]] = json.loads((folder / "rows").read_text(encoding="utf-8"))
    return found


KEYS = ("loss", "grad_norm", "learning_rate")


def assert_close(
    rows: list[dict[str, float]],
    wanted: list[dict[str, float]],
    tolerance: float = 1e-5,
    keys: tuple[str, ...] = KEYS,
) -> None:
    assert len(rows) == len(wanted) > 1
    for row, other in zip(rows, wanted, strict=True):
        for key in keys:
            assert row[key] == pytest.approx(other[key], rel=tolerance), (key, rows, wanted)


def weights_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    [file] = folder.glob("*model.safetensors")
    return load_file(file)


def events_in(folder: Path, name: str) -> list[float]:
    """The values of an event of DeepSpeed's that ``csv_monitor`` has written."""
    with (folder / "events" / f"Train_Samples_{name}.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


TRAINER_RUNS = {
    "full": {"accumulation": 2},
    "lora": {"lora": True},
    "configured optimizer": {"configured_optimizer": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINER_RUNS)
def test_trainer_trains_as_with_ddp_and_resumes(tmp_path: Path, name: str) -> None:
    options = TRAINER_RUNS[name]
    wanted = run(tmp_path / "ddp", "trainer", None, **options)
    final = weights_in(tmp_path / "ddp" / "final")
    # A schedule that the engine steps is a step ahead when the Trainer logs it, as with DeepSpeed.
    keys = KEYS[:2] if "configured_optimizer" in options else KEYS
    for stage, other in ((2, 3), (3, 2))[0 if name == "full" else 1 :]:
        here = tmp_path / str(stage)
        assert_close(run(here, "trainer", stage, **options), wanted, keys=keys)
        assert events_in(here, "train_loss") == pytest.approx([row["loss"] for row in wanted], rel=1e-3)  # logs round
        assert events_in(here, "grad_norm") == pytest.approx([row["grad_norm"] for row in wanted], rel=1e-5)
        saved = weights_in(here / "final")
        assert saved.keys() == final.keys()
        for key, value in final.items():
            torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=1e-5)
        again = tmp_path / f"{stage} to {other}"  # at another stage
        rows = run(again, "trainer", other, **options, resume=str(here / "checkpoint-2"))
        assert_close(rows[-2:], wanted[-2:], keys=keys)


@pytest.mark.slow
def test_trainer_in_bf16(tmp_path: Path) -> None:
    two, three = (run(tmp_path / str(stage), "trainer", stage, bf16=True) for stage in (2, 3))
    assert_close(two, three, 1e-6)
    assert_close(two, run(tmp_path / "ddp", "trainer", None, bf16=True), 3e-2)
    assert {value.dtype for value in weights_in(tmp_path / "3" / "final").values()} == {torch.bfloat16}


@pytest.mark.slow
def test_models_of_folders_are_read_onto_shards(tmp_path: Path) -> None:
    wanted = run(tmp_path / "first", "trainer", None)
    source = str(tmp_path / "first" / "final")
    wanted = run(tmp_path / "ddp", "trainer", None, pretrained=source)
    assert_close(run(tmp_path / "3", "trainer", 3, pretrained=source), wanted)


@pytest.mark.slow
def test_loop_of_accelerate_trains_as_with_ddp(tmp_path: Path) -> None:
    wanted = run(tmp_path / "ddp", "accelerate", None, accumulation=3)
    for stage in (1, 2, 3):
        assert_close(run(tmp_path / str(stage), "accelerate", stage, accumulation=3), wanted)
        assert len(events_in(tmp_path / str(stage), "lr")) == len(wanted)
        saved = torch.load(tmp_path / str(stage) / "weights.pt")
        for key, value in torch.load(tmp_path / "ddp" / "weights.pt").items():
            torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=1e-5)


ON_CPUS = """
import os
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
import lt_zero
lt_zero.as_deepspeed()
import accelerate, torch
accelerate.PartialState(backend="gloo")
rows = torch.randint(0, 60, (8, 9))
dataset = [{"input_ids": row, "labels": row} for row in rows]
"""
FOR_ACCELERATE = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(dataset, batch_size=2)
"""
SMALLER = {
    'TrainingArguments("out",': 'TrainingArguments("out", use_cpu=True, report_to=[], save_steps=1,'
    ' accelerator_config={"use_configured_state": True},',
    "max_steps=100": "max_steps=2",
    "num_hidden_layers=2": "vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2",
}


@pytest.mark.slow
def test_snippets_of_the_page_run(tmp_path: Path) -> None:
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name)
    blocks = [block for block in BLOCKS if Path(block.page).name == "transformers.md" and "run by" in block.marks]
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        text = block.text
        for old, new in SMALLER.items():
            text = text.replace(old, new)
        script = tmp_path / f"script{number}.py"
        script.write_text(ON_CPUS + (FOR_ACCELERATE if "Accelerator" in text else "") + text + "\nprint('done')\n")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", str(script)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert "done" in done.stdout, done.stdout + done.stderr
