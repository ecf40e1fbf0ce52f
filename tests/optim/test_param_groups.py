"""Parameter groups by name: what matches, what is wrong, what a run does with them, and that they keep their places."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from examples.gpt import GPT as Example
from lt_zero import ZeroConfig
from lt_zero.common.errors import ConfigError
from lt_zero.config.cli import clean, to_yaml, with_origins
from lt_zero.config.load import examine
from lt_zero.config.overrides import group_values
from lt_zero.optim import build_grouped, check_optimizer, param_groups
from tests.support.features import skip_without
from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, single_trainer, trust, weights
from tests.support.matrix import only_rows
from tests.support.models import Net
from tests.support.plain_module import Plain, run
from tests.support.pool import Pool

Entries = list[dict[str, Any]]
NO_DECAY: dict[str, Any] = {"match": "*.bias|*norm*", "weight_decay": 0.0}


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def names_in(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    first = {id(p): name for name, p in model.named_parameters()}
    return [[first[id(p)] for p in group["params"]] for group in groups]


# ---- matching --------------------------------------------------------------------------------------------------------


def test_the_first_match_wins_and_groups_keep_their_places() -> None:
    model = Net(1)
    entries = [
        {"match": "nothing.*", "optional": True, "lr": 5.0},
        NO_DECAY,
        {"match": ["head.*", "blocks.0.up.*"], "lr": 0.5, "name": "special"},
    ]
    groups = param_groups(named(model), entries)
    assert names_in(model, groups) == [
        [],
        ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.up.bias", "blocks.0.down.bias"],
        ["embedding.weight", "blocks.0.up.weight"],  # tied to head.weight: once
        ["scale", "blocks.0.down.weight"],
    ]
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == [
        {"name": "nothing", "lr": 5.0},
        {"name": "bias_norm", "weight_decay": 0.0},
        {"name": "special", "lr": 0.5},
        {"name": "rest"},
    ]
    optimizer = AdamW(groups, lr=0.1, weight_decay=0.2)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (5.0, 0.2),
        (0.1, 0.0),
        (0.5, 0.2),
        (0.1, 0.2),
    ]


def test_names_are_those_of_the_model_without_wrappers() -> None:
    model = nn.ModuleDict({"a": nn.Module()})
    model["a"]._orig_mod = nn.Linear(2, 2)
    model["b"] = nn.Module()
    model["b"]._checkpoint_wrapped_module = nn.Linear(2, 2)
    groups = param_groups(named(model), [{"match": "a.bias|b.weight"}])
    assert names_in(model, groups)[0] == ["a._orig_mod.bias", "b._checkpoint_wrapped_module.weight"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"match": "*.bais"}], r"param_groups[0].match: '*.bais' matches no parameter. Similar names: .*\.bias"),
        ([NO_DECAY, {"match": "*.bias|*nrom*"}], r"param_groups[1].match: '*nrom*' matches no .*norm"),
        ([{"match": "zzz"}], "Names are, for example, scale, embedding.weight, "),
        ([NO_DECAY, {"match": "blocks.0.up.bias"}], "param_groups[1].match='blocks.0.up.bias': earlier entries take"),
        ([{"lr": 1}], "param_groups[0].match is missing"),
        ([{"match": "*", "optional": 1}], "param_groups[0].optional=1: write true or false"),
        ([{"match": ["*", 3]}], "param_groups[0].match=['*', 3]: write a pattern"),
        ([{"match": "a||b"}], "param_groups[0].match='a||b': write a pattern"),
        ([{"match": "*", "name": "rest"}], "param_groups[0].name='rest': another group has this name"),
        ([{"match": "*", "name": ""}], "param_groups[0].name='': write a name"),
    ],
)
def test_entries_that_cannot_be(entries: Entries, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        param_groups(named(Net(1)), entries)
    head, _, tail = message.partition(".*")
    assert re.search(re.escape(head) + ".*" * bool(tail) + tail, str(error.value)), str(error.value)
    assert error.value.problems[0].key.startswith("param_groups[")


def test_made_names_differ() -> None:
    entries = [{"match": "*.bias"}, {"match": "*bias*", "optional": True}, {"match": "*", "optional": True}]
    found = [group["name"] for group in param_groups(named(Net(1)), [*entries, {"match": "re*st", "optional": True}])]
    assert found == ["bias", "bias-1", "group2", "re_st", "rest"]


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "entry", "message"),
    [
        ("AdamW", {"weight_decey": 0}, "[0].weight_decey=0 is not a parameter of AdamW. Did you mean weight_decay?"),
        ("AdamW", {"initial_accumulator_value": 1}, "[0].initial_accumulator_value=1 is not a parameter of AdamW."),
        ("AdamW", {"macth": "a"}, "[0].macth='a' is not a parameter of AdamW. Did you mean match?"),
        ("AdamW", {"lr": "fast"}, "[0].lr='fast': write a number of at least 0, such as 1e-3."),
        ("AdamW", {"betas": [0.9]}, "[0].betas=[0.9]: write a list of 2"),
        ("AdamW", {"amsgrad": "auto"}, "[0].amsgrad='auto': write true or false."),
        ("Adam", {"adam_w_mode": False}, "[0].adam_w_mode=False applies to all groups of Adam. Write it in opt"),
        (
            "Adagrad",
            {"initial_accumulator_value": 1},
            "[0].initial_accumulator_value=1 applies to all groups of Ada",
        ),
        ("SGD", {"nesterov": True}, "[0]={'nesterov': True} is rejected by SGD: Nesterov momentum requires"),
        ("Lion", {"momentum": 0.5}, "[0].momentum=0.5 is not a parameter of Lion."),
    ],
)
def test_options_that_cannot_be(kind: str, entry: dict[str, Any], message: str) -> None:
    entry = {"match": "*", **entry}
    (problem,) = check_optimizer(kind, {}, [entry])
    assert f"optimizer.param_groups{message}" in problem.message
    assert problem.key in problem.message
    with pytest.raises(ConfigError) as error:
        build_grouped(kind, {}, [entry], named(Net(1)))
    assert error.value.problems == (problem,)


@pytest.mark.parametrize("entry", [{"match": "*.bias"}, {"match": "*.bias", "weight_decay": 0.0, "use_muon": True}])
def test_muon_makes_its_own(entry: dict[str, Any]) -> None:
    (problem,) = check_optimizer("Muon", {}, [entry])
    assert problem.key == "optimizer.param_groups"
    assert re.match(r"optimizer.param_groups: Muon has two fixed groups.* Remove the key.*configure_", problem.message)
    with pytest.raises(ConfigError) as error:
        build_grouped("Muon", {}, [entry], named(Net(1)))
    assert error.value.problems == (problem,)


def test_uncorrected_adam_has_no_amsgrad_in_groups_either() -> None:
    (problem,) = check_optimizer("Adam", {"bias_correction": False}, [{"match": "*", "amsgrad": True}])
    assert problem.key == "optimizer.param_groups[0]"
    assert "optimizer.param_groups[0].amsgrad=True cannot be combined with" in problem.message


def test_values_are_converted() -> None:
    entries = [{"match": "*.bias", "lr": "1e-2", "betas": ["0.5", 0.75]}]
    group, rest = build_grouped("FusedAdam", {"lr": 1}, entries, named(Net(1))).param_groups
    assert (group["lr"], group["betas"], rest["lr"], rest["betas"]) == (0.01, (0.5, 0.75), 1.0, (0.9, 0.999))


YAML = """\
optimizer:
  type: AdamW
  params: {lr: 1e-3}
  param_groups:
    - match: "*.bias"
      weight_decay: 0.0
    - match: "*norm*"
      weight_decey: 0.0
    - {lr: 1.0}
"""


def test_in_files_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(YAML)
    first, second = examine(path).problems
    assert (first.key, first.mark and first.mark[1:]) == ("optimizer.param_groups[1].weight_decey", (8, 7))
    assert (second.key, second.mark and second.mark[1:]) == ("optimizer.param_groups[2].match", (9, 7))
    good = {"optimizer": {"type": "SGD", "param_groups": [{"match": "*.bias", "lr": "auto"}]}}
    (tmp_path / "a.json").write_text(json.dumps(good))
    made = ZeroConfig.of(tmp_path / "a.json")
    assert made.optimizer is not None
    assert made.optimizer.param_groups == ({"match": "*.bias", "lr": "auto"},)
    with pytest.raises(TypeError, match="frozen"):
        made.optimizer.param_groups[0]["lr"] = 1
    again = ZeroConfig.of(made, overrides=["optimizer.param_groups.0.lr=0.5"])
    text = 'optimizer.param_groups=[{match:"*.bias",lr:0.5}]'
    loaded = examine({"optimizer": {"type": "SGD"}}, overrides=[text])
    assert loaded.config == again
    shown = with_origins(loaded, everything=False)
    assert "param_groups: [{match: '*.bias', lr: 0.5}]" in shown
    assert clean(loaded).endswith(
        to_yaml({"optimizer": {"type": "SGD", "param_groups": [again.optimizer.param_groups[0]]}})
    )
    for wrong, words in (("{match:a}", "it must be a list"), ("[1]", "param_groups.0=1 .* a block of keys")):
        with pytest.raises(ConfigError, match=words):
            ZeroConfig.of(good, overrides=[f"optimizer.param_groups={wrong}"])


BERT = {"embeddings.LayerNorm.weight", "layer.0.output.LayerNorm.bias", "layer.0.query.bias"}
GPT2 = {"h.0.ln_1.weight", "h.0.ln_1.bias", "ln_f.weight", "h.0.attn.c_attn.bias"}
LLAMA = {"model.layers.0.input_layernorm.weight", "model.norm.weight"}
T5 = {"encoder.block.0.layer.0.layer_norm.weight", "encoder.final_layer_norm.weight"}
DECAYED = {"h.0.attn.c_attn.weight", "embeddings.word_embeddings.weight", "model.layers.0.mlp.gate_proj.weight"}


def test_no_decay_for_biases_and_norms() -> None:
    block = group_values("optimizer", "adamw_no_decay")["optimizer"]
    assert check_optimizer(block["type"], block["params"], block["param_groups"]) == []
    model = Example(16, 1, 32, 4)
    groups = build_grouped(block["type"], block["params"], block["param_groups"], named(model)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.01]
    assert all((p.ndim < 2) == (number == 0) for number, group in enumerate(groups) for p in group["params"])
    usual = BERT | GPT2 | LLAMA | T5
    some = [(name, nn.Parameter(torch.zeros(1))) for name in sorted(usual | DECAYED)]
    known = {id(p): name for name, p in some}
    found = [{known[id(p)] for p in group["params"]} for group in param_groups(some, block["param_groups"])]
    assert found == [usual, DECAYED]


# ---- in a run --------------------------------------------------------------------------------------------------------


def test_the_table_is_what_is_stepped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entries = [NO_DECAY | {"lr": 0.25}, {"match": "none", "optional": True}, {"match": "net.1.weight", "lr": "auto"}]
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear"}}
    block = {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.125}, "param_groups": entries}
    logger = CSVLogger(tmp_path)
    module = Plain(lr=0.75)
    module.net[0].bias.requires_grad_(False)
    monitor = LearningRateMonitor()
    options = {"callbacks": [monitor], "logger": logger, "log_every_n_steps": 1, "max_steps": 4}
    entries[0]["match"] = "*.bias"
    optimizer = run(module, {"optimizer": block, "scheduler": schedule}, **options).optimizers[0]
    rows = [line for line in re.split(r"\n", capsys.readouterr().out) if "│" in line]
    shown = [[cell.strip() for cell in row.strip("│ ").split("│")] for row in rows]
    table = {cells[0]: cells[1:] for cells in shown if len(cells) == 5}
    first, second = module.net
    bare, whole = first.bias.numel() + second.bias.numel(), second.weight.numel()
    assert table["bias"] == ["2 (1 frozen)", str(bare), "0.25", "0"]
    assert table["none"] == ["0", "0", "0.5", "0.125"]
    assert table["net.1.weight"] == ["1", str(whole), "0.75", "0.125"]
    assert table["rest"] == ["1", str(32 * 6), "0.5", "0.125"]
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.5, 0.75, 0.5], "each warms up to its own rate"
    assert list(monitor.lrs) == [
        f"lr-AdamW/{name}" for name in table if name in ("bias", "none", "net.1.weight", "rest")
    ]
    assert monitor.lrs["lr-AdamW/bias"][-1] == 0.25


class Grouped(GPT):
    """Three groups, one empty and one frozen, and the rest; a rate for each; more is trained from epoch 2 on."""

    def __init__(self, world: int = 1, late: bool = False) -> None:
        super().__init__(world)
        self.late, self.rates = late, []
        if not late:
            self.net.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        new = {id(p) for p in self.net.blocks[0].up.parameters()}
        some = [(name, p) for name, p in self.named_parameters(remove_duplicate=False) if id(p) not in new]
        entries: Entries = [
            {"match": "nothing", "optional": True, "lr": 7.0},
            {"match": "net.blocks.0.*", "lr": 3e-2},
            {"match": "*.bias|*norm*", "weight_decay": 0.0},
        ]
        groups = param_groups(some, entries)
        scales = [lambda epoch, k=k: 1.0 / (1 + k * epoch) for k in range(4)]
        optimizer = AdamW(groups, lr=1e-2, weight_decay=0.3)
        schedule = LambdaLR(optimizer, scales)
        if self.late:
            self.extend(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def extend(self, optimizer: Optimizer, schedule: LambdaLR) -> None:
        optimizer.add_param_group({"params": list(self.net.blocks[0].up.parameters()), "lr": 2e-2, "name": "late"})
        optimizer.param_groups[-1]["initial_lr"] = 2e-2
        schedule.base_lrs.append(2e-2)
        schedule.lr_lambdas.append(lambda epoch: 0.9**epoch)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2 and not self.late:
            self.late = True
            self.net.blocks[0].requires_grad_(True)
            self.extend(self.optimizers().optimizer, self.lr_schedulers())

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.rates.append([(group.get("name"), group["lr"]) for group in optimizer.param_groups])


Outcome = tuple[list[Any], dict[str, np.ndarray[Any, Any]]]
OPTIONS: dict[str, Any] = {"limit_val_batches": 0}


def _unfrozen(stage: int, zero: dict[str, Any], folder: str) -> tuple[Outcome, Outcome, list[Any]]:
    """Through; what was at the end of epoch 3 and from there on."""
    world, config = dist.get_world_size(), {"checkpoint": {"format": "sharded"}}
    module = Grouped(world)
    trainer = sharded_trainer(stage, zero, config, max_epochs=3, **OPTIONS)
    trainer.fit(module)
    path = f"{folder}/{stage}{len(zero)}.ckpt"
    trainer.save_checkpoint(path)
    first = module.rates, weights(trainer)
    resumed = Grouped(world, late=True)
    trainer = sharded_trainer(stage, zero, config, max_epochs=4, **OPTIONS)
    trainer.fit(resumed, ckpt_path=path, **trust(False))
    return first, (resumed.rates, weights(trainer)), [len(g["params"]) for g in trainer.optimizers[0].param_groups]


@pytest.fixture(scope="module")
def alone() -> tuple[Outcome, Outcome]:
    found = []
    for epochs in (3, 4):
        module, trainer = Grouped(), single_trainer(max_epochs=epochs, **OPTIONS)
        trainer.fit(module)
        found.append((module.rates, {name: value.copy() for name, value in weights(trainer).items()}))
    return found[0], found[1]


CPU = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("stage", "zero"), only_rows([(2, CPU), (3, {})], [(0, {}), (1, {}), (2, {}), (3, {}), (2, CPU), (3, CPU)]), ids=str
)
def test_groups_through_unfreezing_and_resume(
    pool: Pool, tmp_path: Path, stage: int, zero: dict[str, Any], alone: tuple[Outcome, Outcome]
) -> None:
    skip_without(zero)
    (rates, three), (all_rates, four) = alone
    assert [name for name, _ in rates[0]] == ["nothing", "net.blocks.0", "bias_norm", "rest"]
    assert [name for name, _ in rates[-1]][-1] == "late"
    first, second, counts = pool.run(2, _unfrozen, stage, zero, str(tmp_path))[0]
    assert first[0] == rates
    assert_same(first[1], three, rtol=1e-4, atol=1e-5)
    assert second[0] == all_rates[len(rates) :]
    assert_same(second[1], four, rtol=1e-4, atol=1e-5)
    assert counts == [0, 4, 8, 7, 2]


def _on_ranks() -> tuple[Any, ...]:
    """From the configuration: frozen ones stay in the group that matches them, and out of the last one."""

    class Half(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

    entries = [{"match": "*.bias", "lr": 0.5}]
    trainer = sharded_trainer(3, config={"optimizer": {"type": "Adam", "param_groups": entries}}, max_steps=2)
    trainer.fit(module := Half())
    known = {id(p): name for name, p in module.named_parameters()}
    return tuple((g["name"], g["lr"], [known[id(p)] for p in g["params"]]) for g in trainer.optimizers[0].param_groups)


def test_frozen_ones_are_in_groups_that_match_them(pool: Pool) -> None:
    for found in pool.run(2, _on_ranks):
        assert found == (("bias", 0.5, ["net.0.bias", "net.1.bias"]), ("rest", 1e-3, ["net.1.weight"]))


def test_auto_without_a_rate() -> None:
    block = {"type": "SGD", "params": {"lr": 0.5}, "param_groups": [{"match": "*.bias", "lr": "auto"}]}
    with pytest.raises(ConfigError, match=r'optimizer.param_groups\[0\].lr="auto", and the module has neither'):
        run(Plain(), {"optimizer": block})
