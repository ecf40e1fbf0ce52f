"""Exports seen from processes of their own: their memory, and Lightning without this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from tests.support.export_tools import Memory
from tests.support.paths import ROOT

GROWTH = """
import sys, torch
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.source import Spec

class Lazy:
    aliases, optimizers, meta = {}, (), {}
    def __init__(self, count, numel):
        self.weights = {str(n): Spec((numel,), torch.float32) for n in range(count)}
    def read(self, name):
        return torch.full(self.weights[name].shape, float(name))

def peak():  # not ru_maxrss, which a process has from the one that started it
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

for name in ("a.pt", "a.safetensors", "a.ckpt"):
    export(Lazy(2, 100), sys.argv[1] + "/" + name)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
for name in ("a.pt", "a.safetensors", "a.ckpt"):
    export(Lazy(6, 9 << 20), sys.argv[1] + "/" + name)
    print((peak() - before) / 2**20)
"""


def run(script: str, *args: str, **env: str) -> str:
    command = [sys.executable, "-c", script, *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """6 tensors of 36 MiB (which malloc gives back at once); a file that is held would be 108 MiB."""
    growth = [float(line) for line in run(GROWTH, str(tmp_path)).split()]
    assert len(growth) == 3
    assert 30 < max(growth) < 36 + 60, growth  # and the buffers of the threads that write


PLAIN = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lt_zero":
            raise ImportError("lt_zero is not here")

sys.meta_path.insert(0, Refused())
import torch, warnings
import lightning as L
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")

class Model(L.LightningModule):
    def __init__(self, width, rate=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, width)
        self.head.weight = self.body.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.tensor(0))
    def training_step(self, batch, index):
        self.seen += 1
        return (self.head(self.body(batch).relu()) * self.scale).square().mean()
    def configure_optimizers(self):
        groups = [{"params": [self.scale], "lr": 0.1}, {"params": [self.body.weight, self.body.bias, self.head.bias]}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

def fit(epochs, **options):
    torch.manual_seed(3)
    model = Model(6)
    data = DataLoader(torch.arange(48.0).view(8, 6) / 48, batch_size=4)
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, **options.pop("trainer", {}))
    trainer.fit(model, data, **options)
    return trainer, model
"""


def names_of(groups: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    return [{**group, "params": [names[number] for number in group["params"]]} for group in groups]


def as_source(path: Path) -> Memory:
    """A file of Lightning's own as a source."""
    saved = torch.load(path, weights_only=True)
    weights = saved.pop("state_dict")
    (optimizer,) = saved.pop("optimizer_states")
    names = ["scale", "body.weight", "body.bias", "head.bias"]
    states: dict[tuple[int, str, str], Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for number, state in optimizer["state"].items():
        for key, value in state.items():
            entry = entries.setdefault(names[number], {})
            entry[key] = value
            if key != "step":
                states[0, names[number], key] = value
                entry[key] = Spec(tuple(value.shape), value.dtype)
    saved["lt_zero"] = {"optimizers": "what only this package reads"}
    groups = names_of(optimizer["param_groups"], names)
    return Memory(weights, {"head.weight": "body.weight"}, [SavedOptimizer(groups, entries)], saved, states)


@pytest.mark.slow
def test_lightning_reads_it_without_this_package(tmp_path: Path) -> None:
    made = PLAIN + ("trainer, model = fit(1)\ntrainer.save_checkpoint(sys.argv[1] + '/theirs.ckpt')\n")
    run(made, str(tmp_path))
    source = as_source(tmp_path / "theirs.ckpt")
    export(source, tmp_path / "half.ckpt", "fp16")
    export(source, tmp_path / "ours.ckpt", "fp32", training_state=True)
    half = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & set(half)
    assert half["hyper_parameters"] == {"width": 6, "rate": 0.01}
    read = PLAIN + (
        "folder = sys.argv[1]\n"
        "model = Model.load_from_checkpoint(folder + '/half.ckpt')\n"
        "theirs = torch.load(folder + '/theirs.ckpt', weights_only=True)\n"
        "for name, value in model.state_dict().items():\n"
        "    expected = theirs['state_dict'][name]\n"
        "    assert torch.equal(value, expected.half().float() if expected.is_floating_point() else expected), name\n"
        "ours = torch.load(folder + '/ours.ckpt', weights_only=True)\n"
        "assert set(ours) == set(theirs)\n"
        "states = [file['optimizer_states'][0] for file in (ours, theirs)]\n"
        "assert states[0]['param_groups'] == states[1]['param_groups']\n"
        "assert list(states[0]['state']) == [0, 1, 2, 3]\n"
        "results = [fit(3, ckpt_path=f'{folder}/{name}.ckpt', trainer={'strategy': 'ddp'})\n"
        "           for name in ('ours', 'theirs')]\n"
        "(trainer, model), (other, expected) = results\n"
        "assert trainer.global_step == other.global_step == 6\n"
        "for name, value in model.state_dict().items():\n"
        "    assert torch.equal(value, expected.state_dict()[name]), name\n"
        "assert trainer.optimizers[0].param_groups[0]['lr'] == other.optimizers[0].param_groups[0]['lr'] < 0.1\n"
        "assert 'lt_zero' not in sys.modules\n"
        "print('same')\n"
    )
    assert run(read, str(tmp_path)).strip().endswith("same")
