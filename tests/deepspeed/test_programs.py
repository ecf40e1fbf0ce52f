"""Programs that train through DeepSpeed run as they are: ``python -m lt_zero.deepspeed -m ...``.

Each needs other versions of transformers than the rest: ``make compat-programs`` makes an environment for each of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import trl_script
from tests.support.docs_tools import ROOT

STEPS = 4
SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_steps": STEPS,
    "save_steps": STEPS,
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "report_to": "none",
    "use_cpu": True,
}
PAIRS = list(zip(trl_script.sentences(32, 0), trl_script.sentences(32, 1), strict=True))


def swift(folder: Path, out: Path, file: Path | None) -> list[str]:
    """ms-swift's command."""
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in PAIRS]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"messages": turn}) for turn in turns))
    told = {
        **SHARED,
        "model": folder / "lm",
        "model_type": "llama",
        "template": "default",
        "dataset": folder / "data.jsonl",
        "split_dataset_ratio": 0,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "bf16": False,
        "fp16": False,
        "attn_impl": "eager",
        "gradient_checkpointing": False,
        "add_version": False,
        "output_dir": out,
    }
    told |= {} if file is None else {"deepspeed": file}
    return ["swift.cli.sft", *(word for key, value in told.items() for word in (f"--{key}", str(value)))]


def llamafactory(folder: Path, out: Path, file: Path | None) -> list[str]:
    """LLaMA-Factory's command, with its file."""
    rows = [{"instruction": one, "input": "", "output": two} for one, two in PAIRS]
    (folder / "tiny.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    told = {
        **SHARED,
        "model_name_or_path": str(folder / "lm"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "tiny",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 64,
        "overwrite_cache": True,
        "disable_gradient_checkpointing": True,
        "output_dir": str(out),
    }
    told |= {} if file is None else {"deepspeed": str(file)}
    out.mkdir()
    (out / "run.yaml").write_text(json.dumps(told))  # JSON is YAML
    return ["llamafactory.launcher", str(out / "run.yaml")]


def axolotl(folder: Path, out: Path, file: Path | None) -> list[str]:
    """axolotl's command, with its file."""
    rows = [{"instruction": one, "input": "", "output": two} for one, two in PAIRS]
    (folder / "tiny.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    told = {
        "base_model": str(folder / "lm"),
        "datasets": [{"path": str(folder / "tiny.jsonl"), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "val_set_size": 0,
        "sequence_len": 64,
        "micro_batch_size": SHARED["per_device_train_batch_size"],
        "gradient_accumulation_steps": SHARED["gradient_accumulation_steps"] * (2 if file is None else 1),
        **{key: SHARED[key] for key in ("learning_rate", "max_steps", "save_steps", "logging_steps")},
        "optimizer": "adamw_torch",
        "lr_scheduler": "linear",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "eager",
        "output_dir": str(out),
    }
    told |= {} if file is None else {"deepspeed": str(file)}
    out.mkdir()
    (folder / "axolotl.yaml").write_text(json.dumps(told))
    return ["axolotl.cli.train", str(folder / "axolotl.yaml")]


PROGRAMS: dict[str, Callable[[Path, Path, Path | None], list[str]]] = {
    "swift": swift,
    "llamafactory": llamafactory,
    "axolotl": axolotl,
}


def run(program: str, folder: Path, stage: int | None) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step on two ranks; without a ``stage`` those of DistributedDataParallel."""
    # On several ranks axolotl puts the model onto accelerators, except at stage 3. Its one rank has the samples of two.
    ranks = 1 if program == "axolotl" and stage is None else 2
    file = None
    if stage is not None:
        file = folder / f"stage{stage}.json"
        file.write_text(json.dumps(trl_script.config(stage)))
    out = folder / f"out_{stage}"
    words = ["-m", *PROGRAMS[program](folder, out, file)]
    beside = folder / "beside"
    if find_spec("torchaudio") is None:
        # LLaMA-Factory imports it for sounds, which no text needs; its wheels are for other versions of torch.
        (beside / "torchaudio").mkdir(parents=True, exist_ok=True)
        (beside / "torchaudio" / "__init__.py").touch()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{beside}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "USE_HF": "1"}
    env |= {"HF_HOME": str(folder / "home"), "MODELSCOPE_CACHE": str(folder / "home")}
    env |= {"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1"} if program == "axolotl" else {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [*launcher, *(["-m", "lt_zero.deepspeed"] if stage is not None else []), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1000, cwd=folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-10000:]
    state = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [(row["loss"], row["grad_norm"]) for row in state["log_history"] if "loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_training_is_that_of_ddp(tmp_path: Path, program: str) -> None:
    if find_spec(program) is None:  # one that is there and cannot be imported has to fail
        pytest.skip(f"{program} is not installed")
    trl_script.write_models(tmp_path)
    wanted = run(program, tmp_path, None)
    assert len(wanted) == STEPS
    assert wanted[0][1] > 0
    assert len({loss for loss, _ in wanted}) == STEPS
    for stage in (3,) if program == "axolotl" else (2, 3):
        for row, other in zip(run(program, tmp_path, stage), wanted, strict=True):
            assert row == pytest.approx(other, rel=1e-6), stage
