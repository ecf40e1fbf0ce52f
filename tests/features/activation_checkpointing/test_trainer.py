"""Activation checkpointing asked of the strategy: what it says to the configuration, and a module that comes back."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import ActivationCheckpointing, ConfigError, ZeroConfig, ZeroStrategy, gathered
from lt_zero.config.load import ConfigWarning
from lt_zero.features.activation_checkpointing.checkpointing import installed
from tests.support.lightning_tools import FULL, GPT, sharded_trainer
from tests.support.matrix import only_rows
from tests.support.models import Block
from tests.support.parity import RELEASE
from tests.support.pool import Pool

BLOCK = "activation_checkpointing"


class Seeing(Block):
    """Notes whether it is checkpointed when its forward runs, and drops at random."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append("forward" in vars(self))
        return super().forward(self.drop(x))


class Model(GPT):
    def __init__(self, manual: bool = False) -> None:
        super().__init__(dist.get_world_size(), tied=False)
        self.net.blocks = nn.ModuleList(Seeing() for _ in range(3))
        self.automatic_optimization = not manual
        self.copied: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        for _ in range(2):  # two losses for one step
            self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        return None

    def on_train_end(self) -> None:
        with gathered(self):
            self.copied = copy.deepcopy(self.net.blocks)


def _trained(stage: int, manual: bool, **keys: Any) -> Any:
    module, text = Model(manual), io.StringIO()
    options = {} if manual else {"accumulate_grad_batches": 2}
    trainer = sharded_trainer(stage, RELEASE if stage == 3 else {}, {**FULL, BLOCK: keys}, max_epochs=1, **options)
    torch.manual_seed(11)
    with redirect_stdout(text):
        trainer.fit(module)
    assert not any("forward" in vars(block) for block in module.net.blocks), "nothing is left after the run"
    return trainer.strategy.full_state_dict(), text.getvalue(), module, trainer


def _runs(stage: int, manual: bool, mode: str) -> None:
    want = _trained(stage, manual)[0]
    got, text, module, trainer = _trained(stage, manual, mode=mode, every=2)
    for name, value in want.items():
        assert torch.equal(value, got[name]), name
    line = f"activation checkpointing: {mode}, 2 of 3 Seeing modules"
    assert (line in text) is (dist.get_rank() == 0)
    first, second = module.net.blocks[0].seen, module.net.blocks[1].seen
    assert all(first)
    assert not any(second)
    steps = sum(1 for _ in module.net.blocks[2].seen)
    assert steps > len(second), "its forward ran again in backward"
    assert all(
        type(vars(b).get("forward")).__module__ != "lt_zero.features.activation_checkpointing.checkpointing"
        for b in module.copied
    )
    trainer.fit_loop.max_epochs = 2
    before = len(first)
    trainer.fit(module)
    assert len(first) > before
    assert all(first[before:]), "put on again for the next run"
    before = len(first)
    trainer.validate(module, verbose=False)
    assert len(first) > before
    assert not any(first[before:]), "there is no backward"


@pytest.mark.parametrize(
    ("manual", "mode"), only_rows([(True, "selective")], itertools.product([False, True], ["full", "selective"]))
)
def test_a_run_is_the_one_without(pool: Pool, manual: bool, mode: str) -> None:
    pool.run(2, _runs, 3, manual, mode)


# ---- what the strategy is told -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "config", "mode", "every"),
    [
        (True, None, "full", 1),
        (False, {BLOCK: {"every": 2}}, "none", 2),
        ({"mode": "selective"}, {BLOCK: {"every": 3}}, "selective", 3),
        (ActivationCheckpointing(mode="full", every=2), {BLOCK: {"mode": "full"}}, "full", 2),
        ({"mode": "full", "every": "2"}, {BLOCK: {"every": 2}}, "full", 2),
        ("full", {BLOCK: {"every": 2}}, "full", 2),
        ("selective", None, "selective", 1),
        ({"cpu_checkpointing": True, "partition_activations": True}, {BLOCK: {"every": 2}}, "none", 2),
        (None, {BLOCK: {"mode": "selective"}}, "selective", 1),
        (True, ZeroConfig.of({"zero_optimization": {"stage": 2}}), "full", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:These keys have no effect here")
def test_what_the_strategy_is_told(given: Any, config: Any, mode: str, every: int) -> None:
    block = ZeroStrategy(config=config, activation_checkpointing=given).config.activation_checkpointing
    assert (block.mode, block.every) == (mode, every)


def test_contradictions_and_mistakes() -> None:
    with pytest.raises(ConfigError) as raised:
        ZeroStrategy(
            config={BLOCK: {"mode": "selective", "every": 2}}, activation_checkpointing={"mode": "full", "every": 3}
        )
    text = str(raised.value)
    assert "says mode='full', which contradicts activation_checkpointing.mode='selective'. Remove one" in text
    assert "says every=3, which contradicts activation_checkpointing.every=2" in text
    with pytest.raises(ConfigError, match="Did you mean activation_checkpointing.modules"):
        ZeroStrategy(activation_checkpointing={"module": ["Block"]})
    with pytest.raises(ConfigError, match='mode="all" is wrong: it must be one of'):
        ZeroStrategy(activation_checkpointing="all")  # type: ignore[arg-type]


NEEDS = f"nothing is recomputed without {BLOCK}.mode: full or selective"


def told(block: dict[str, Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        ZeroConfig.of({BLOCK: block})
    return " ".join(str(entry.message) for entry in caught)


def test_keys_without_effect() -> None:
    text = told({"mode": "none", "every": 2, "modules": ["Block"], "profile": False, "cpu_checkpointing": True})
    for key in ("every", "modules", "cpu_checkpointing"):
        assert f"{BLOCK}.{key}" in text
    assert f"({NEEDS})" in text
    assert "profile" not in text, "it says what is so anyway"
    assert told({"mode": "full", "every": 2, "modules": ["Block"], "profile": True}) == ""
    assert "number_checkpoints (it needs contiguous" in told({"mode": "full", "number_checkpoints": 4})
    assert told({"mode": "full", "contiguous_memory_optimization": True, "number_checkpoints": 4}) == ""
    assert "without tensor_parallel.autotp_size above 1" in told({"mode": "full", "partition_activations": True})


@pytest.mark.parametrize(
    "modifier",
    [
        {"partition_activations": True},
        {"cpu_checkpointing": True},
        {"contiguous_memory_optimization": True, "number_checkpoints": 4},
        {"nvme_path": "/tmp"},
        {"synchronize_checkpoint_boundary": True},
        {"profile": True},
    ],
    ids=lambda block: next(iter(block)),
)
def test_modifiers_switch_nothing_on(modifier: dict[str, Any]) -> None:
    """As in DeepSpeed; a model without repeated blocks trains."""
    for key in modifier:
        assert key in told(modifier)
    assert NEEDS in told(modifier)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    strategy = ZeroStrategy(config={BLOCK: modifier})
    engine = lt_zero.shard(model, strategy.config)
    assert installed(engine) is None
    engine.detach()


def test_from_the_command_line_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse, which is not a dependency")
    from tests.support.cli_tools import CLASS, strategy_of

    monkeypatch.setattr("sys.argv", ["train.py"])
    run = tmp_path / "run.yaml"
    written = f"trainer:\n  strategy:\n    class_path: {CLASS}\n    init_args:\n      {BLOCK}: "
    for text, mode, every in (("true", "full", 1), ("{mode: selective, every: 2}", "selective", 2)):
        run.write_text(written + text + "\n")
        block = strategy_of(f"--config={run}").config.activation_checkpointing
        assert (block.mode, block.every) == (mode, every)
    block = strategy_of(
        f"--trainer.strategy={CLASS}", f"--trainer.strategy.{BLOCK}=true"
    ).config.activation_checkpointing
    assert block.mode == "full"
