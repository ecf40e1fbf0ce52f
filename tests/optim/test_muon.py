"""Muon: torch's arithmetic, DeepSpeed's keys, which parameters it takes, and what is said if it cannot work."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.nn import Parameter

from lt_zero import ZeroConfig, ZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.core.step.supported_optimizers import check_supported, states_by_group
from lt_zero.optim import Muon, build_optimizer, muon_groups
from lt_zero.optim.muon import divide, orthogonalize
from lt_zero.planning.estimate import states_of
from tests.support.lightning_tools import single_trainer

SHAPES = [(7, 5), (5, 7), (6, 6), (1, 9)]


def _pair(shape: tuple[int, ...]) -> tuple[Parameter, Parameter]:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return Parameter(value.clone()), Parameter(value.clone())


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torchs(rule: str, nesterov: bool) -> None:
    matrices, vectors = [_pair(shape) for shape in SHAPES], [_pair((4,)), _pair((2, 3))]
    ours = Muon(
        [
            {"params": [a for a, _ in matrices], "use_muon": True},
            {"params": [a for a, _ in vectors], "use_muon": False},
        ],
        muon_lr=0.02,
        adam_lr=0.01,
        weight_decay=0.1,
        ns_method="standard",
        ns_steps=4,
        nesterov=nesterov,
        adjust_lr_fn=rule,
    )
    how: dict[str, Any] = {"nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": rule}
    theirs = [
        torch.optim.Muon([b for _, b in matrices], lr=0.02, weight_decay=0.1, **how),
        torch.optim.AdamW([b for _, b in vectors], lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
    ]
    for _ in range(50):
        for a, b in matrices + vectors:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        for optimizer in theirs:
            optimizer.step()
    for a, b in matrices + vectors:
        assert torch.equal(a, b)
    assert set(ours.state[matrices[0][0]]) == {"momentum_buffer"}
    assert set(ours.state[vectors[0][0]]) == set(theirs[1].state[vectors[0][1]])


def _exact(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of the polynomial on the singular values, in fp64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / torch.linalg.vector_norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(7, 5), (5, 17), (6, 6)])
def test_both_methods_are_the_same_polynomial(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 1e3
    want = _exact(matrix)
    torch.testing.assert_close(orthogonalize(matrix, "gram").double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(orthogonalize(matrix, "standard").double(), want, rtol=0, atol=3e-2)


def test_a_zero_gradient_moves_nothing() -> None:
    parameter = Parameter(torch.ones(3, 2))
    parameter.grad = torch.zeros(3, 2)
    for method in ("gram", "standard"):
        Muon([{"params": [parameter], "use_muon": True}], ns_method=method).step()
    assert torch.equal(parameter, torch.ones(3, 2))


def test_rates_of_both_halves() -> None:
    def rates(**params: Any) -> list[float]:
        made = build_optimizer("Muon", params, [Parameter(torch.zeros(2, 3)), Parameter(torch.zeros(2))])
        return [group["lr"] for group in made.param_groups]

    assert rates() == [0.02, 3e-4]
    assert rates(lr=0.5) == [0.5, 0.5]
    assert rates(lr=0.5, adam_lr=0.1) == [0.5, 0.1]
    assert rates(lr=0.5, muon_lr=0.1) == [0.1, 0.5]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"ns_method": "cubic"}, "ns_method='cubic': write gram or standard"),
        ({"per_head_muon": True}, "per_head_muon=True: .*remove it"),
        ({"momentum": -1}, "momentum=-1: write a number of at least 0"),
        ({"muon_lr": "x"}, "muon_lr='x'"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"nestrov": True}, "Did you mean nesterov"),
        ({"fp32_optimizer_states": False}, "optimizer_states.dtype"),
    ],
)
def test_wrong_values_are_named(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_optimizer("muon", params, [Parameter(torch.zeros(2, 3))])


def test_names_and_paths() -> None:
    named = build_optimizer("Muon", {}, nn.Linear(2, 3).named_parameters())
    assert [(group["param_names"], group["use_muon"]) for group in named.param_groups] == [
        (["weight"], True),
        (["bias"], False),
    ]
    for path in ("lt_zero.optim.Muon", "lt_zero.optim.muon.Muon"):
        with pytest.raises(ConfigError, match=f"optimizer.type='{path}' .* Write Muon"):
            build_optimizer(path, {}, nn.Linear(2, 3).parameters())


def test_deepspeeds_keys_are_taken() -> None:
    params = {"momentum": 0.8, "betas": [0.8, 0.9], "eps": 1e-6, "per_head_muon": False, "adam_w_mode": False}
    made = build_optimizer(
        "MUON", {**params, "torch_adam": True}, [Parameter(torch.zeros(2, 3)), Parameter(torch.zeros(2))]
    )
    muon, adam = made.param_groups
    assert (muon["momentum"], muon["ns_method"]) == (0.8, "gram")
    assert (adam["betas"], adam["eps"], adam["adam_w_mode"]) == ((0.8, 0.9), 1e-6, False)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([{"params": [Parameter(torch.zeros(2))]}], "use_muon=True or False"),
        ([Parameter(torch.zeros(2, 2))], "use_muon=True or False"),
        ([{"params": [Parameter(torch.zeros(2))], "use_muon": True}], r"shape \(2,\)"),
        ([{"params": [Parameter(torch.zeros(2, 2))], "use_muon": True, "ns_method": "x"}], "gram or standard"),
    ],
)
def test_wrong_groups_are_refused(groups: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Muon(groups)


def test_copies_take_groups() -> None:
    made = Muon([{"params": [Parameter(torch.zeros(2, 2))], "use_muon": True}], adam_lr=0.7)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        other.add_param_group({"params": [Parameter(torch.zeros(2))], "use_muon": False})
        assert other.param_groups[1]["lr"] == 0.7


class Transformer(nn.Module):
    """Names as they occur."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.embed_positions = nn.Linear(4, 4)
        layer = nn.ModuleDict({"output": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 1), "norm": nn.LayerNorm(4)})
        self.layers = nn.ModuleList([layer])
        self.proj = nn.Linear(4, 6)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.tokens.weight
        self.head = nn.Linear(6, 2)
        self.lm_head_extra = nn.Linear(6, 2)


def test_which_parameters_are_muons() -> None:
    matrices, rest = divide(Transformer())
    assert [name for name, _ in matrices] == ["layers.0.output.weight", "proj.weight"]
    names = [name for name, _ in rest]
    assert {"tokens.weight", "embed_positions.weight", "head.weight", "layers.0.conv.weight"} <= set(names)
    assert not any(name.startswith("frozen") for name in names)
    muon, adam = muon_groups(Transformer())
    assert (len(muon["params"]), len(adam["params"])) == (len(matrices), len(rest))


def test_what_needs_whole_matrices_says_the_remedy() -> None:
    optimizer = Muon([{"params": [Parameter(torch.zeros(3, 10))], "use_muon": True}])
    with pytest.raises(TypeError, match="Muon computes its update .* zero_optimization.shard_along=parameter"):
        check_supported(optimizer, sharded=True)
    check_supported(optimizer, sharded=True, whole=True)


def test_states_are_counted_by_group() -> None:
    optimizer = Muon(
        [
            {"params": [Parameter(torch.zeros(3, 10))], "use_muon": True},
            {"params": [Parameter(torch.zeros(10))], "use_muon": False},
        ]
    )
    assert states_by_group(optimizer) == [1, 2]
    assert states_of(optimizer) == (1.25, "")
    assert states_by_group(torch.optim.Adafactor([Parameter(torch.zeros(3, 3))])) == [0]


# ---- from the configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Muon", "muon", "Adafactor", "torch.optim.Adafactor"])
def test_whole_matrices_are_asked_for(name: str) -> None:
    block = {"optimizer": {"type": name}, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match=rf"optimizer.type='{name}'.*zero_optimization.shard_along=parameter"):
        ZeroConfig.of(block)
    ZeroConfig.of({**block, "zero_optimization": {"stage": 0}})
    ZeroConfig.of({**block, "zero_optimization": {"stage": 3, "shard_along": "parameter"}})


def test_the_option_says_both() -> None:
    config = ZeroConfig.of({"zero_optimization": {"stage": 2}}, overrides=["optimizer=muon"])
    assert config.zero_optimization.shard_along == "parameter"
    assert config.zero_optimization.stage == 2
    assert config.optimizer is not None
    assert config.optimizer.type == "Muon"


class Model(BoringModel):
    """Matrices, biases and an embedding; nothing makes its optimizer."""

    configure_optimizers = pl.LightningModule.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.table = nn.Embedding(3, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.hidden:
            x = layer(x) + self.table.weight[0]
        return self.layer(x)


def test_the_division_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "optimizer": {"type": "Muon", "params": {"muon_lr": 0.01, "adam_lr": 0.001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 1}},
        "zero_optimization": {"stage": 2, "shard_along": "parameter"},
    }
    model = Model()
    trainer = single_trainer(strategy=ZeroStrategy(config=config), max_steps=3, limit_val_batches=0)
    trainer.fit(model)
    text = capsys.readouterr().out
    muon, rest = 2 * 32 * 32 + 32 * 2, 32 * 2 + 2 + 3 * 32
    assert f"3 of {muon:,} elements" in text
    assert f"4 of {rest:,} elements" in text
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.01, 0.001]
