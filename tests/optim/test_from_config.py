"""Optimizers and schedulers from configuration blocks: what names mean, and all errors at once."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import lt_zero.optim
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.optim import Lamb, Lion, WarmupLR, build_optimizer, build_scheduler, check_optimizer, check_scheduler
from lt_zero.optim.adam import UncorrectedAdam
from tests.support.features import there
from tests.support.paths import DATA

CONFIGS = DATA / "ds_configs"


def make(kind: str, params: dict[str, Any] | None = None) -> Optimizer:
    assert check_optimizer(kind, params or {}) == []
    return build_optimizer(kind, params or {}, iter([Parameter(torch.zeros(2))]))


def keys(problems: list[Problem]) -> list[str]:
    assert all(problem.key in problem.message and problem.mark is None for problem in problems)
    return [problem.key for problem in problems]


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params", "cls", "expected"),
    [
        ("Adam", {}, AdamW, {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999)}),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, Adam, {"weight_decay": 0.1}),
        (
            "AdamW",
            {"adam_w_mode": False, "betas": [0.8, 0.9], "eps": "1e-6"},
            AdamW,
            {"betas": (0.8, 0.9), "eps": 1e-6},
        ),
        ("ADAMW", {"torch_adam": True, "foreach": True}, AdamW, {"weight_decay": 0.01, "foreach": True}),
        ("AdamW", {"amsgrad": True, "fp32_optimizer_states": True, "set_grad_none": True}, AdamW, {"amsgrad": True}),
        ("DeepSpeed_Adam", {"lr": "1.5e-4"}, AdamW, {"lr": 1.5e-4}),
        ("FusedAdam", {"bias_correction": True}, AdamW, {}),
        ("DeepSpeedCPUAdam", {"adam_w_mode": False}, Adam, {}),
        ("AdamW", {"bias_correction": False, "foreach": True}, UncorrectedAdam, {"decoupled_weight_decay": True}),
        ("lion", {"set_grad_none": True}, Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("Adagrad", {"fp32_optimizer_states": True}, Adagrad, {"lr": 1e-2, "eps": 1e-10}),
        (
            "lamb",
            {"max_coeff": "0.5", "min_coeff": 0.08, "bias_correction": False, "amsgrad": False},
            Lamb,
            {"max_coeff": 0.5, "min_coeff": 0.08, "bias_correction": False, "lr": 1e-3, "eps": 1e-8, "weight_decay": 0},
        ),
        ("FusedLamb", {"eps_inside_sqrt": True}, Lamb, {"eps_inside_sqrt": True, "betas": (0.9, 0.999)}),
        ("lt_zero.optim.Lamb", {"max_coeff": "2"}, Lamb, {"max_coeff": 2.0, "min_coeff": 0.01}),
        ("sgd", {"lr": 1, "momentum": "0.9", "nesterov": True}, SGD, {"lr": 1, "momentum": 0.9, "nesterov": True}),
        ("RMSprop", {"alpha": "0.9"}, torch.optim.RMSprop, {"alpha": 0.9}),
        ("Adafactor", {"eps": [None, 1e-4]}, torch.optim.Adafactor, {"eps": [None, 1e-4]}),
        ("torch.optim.AdamW", {}, AdamW, {"weight_decay": 0.01}),
        ("lt_zero.optim.Lion", {}, Lion, {"betas": (0.9, 0.99)}),
        (
            "tests.optim.test_from_config.Custom",
            {"power": 3, "anything": "auto"},
            None,
            {"power": 3, "anything": "auto"},
        ),
    ],
)
def test_names(kind: str, params: dict[str, Any], cls: type | None, expected: dict[str, Any]) -> None:
    optimizer = make(kind, params)
    assert type(optimizer).__name__ == "Custom" if cls is None else type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


class Custom(SGD):
    """A user's own, with options that nobody else knows."""

    def __init__(self, params: Any, power=2, **options: Any) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params)
        self.param_groups[0].update(options, power=power)


def test_groups_keep_their_own_values() -> None:
    groups = [{"params": [Parameter(torch.zeros(1))], "lr": 0.5}, {"params": [Parameter(torch.zeros(1))]}]
    assert [group["lr"] for group in build_optimizer("Lion", {"lr": 0.1}, groups).param_groups] == [0.5, 0.1]
    with pytest.raises(ConfigError, match="empty parameter list"):
        build_optimizer("Adam", {}, [])


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("adamx", "Did you mean Adamax?"),
        ("rmsprop", "Did you mean RMSprop?"),
        ("MuSGD", "is not supported.*SGD"),
        ("no_such_package.Adam", "cannot be imported.*Correct the path"),
        ("json.JSONDecoder", "not a subclass of torch.optim.Optimizer"),
        ("torch.optim.Optimizer", "not a subclass"),
        ("Optimizer", "cannot be used"),
        (None, "type=None cannot be used. Write a name"),
    ],
)
def test_names_that_cannot_be_used(kind: Any, part: str) -> None:
    assert keys(check_optimizer(kind, {})) == ["optimizer.type"]
    with pytest.raises(ConfigError, match=part):
        build_optimizer(kind, {}, [Parameter(torch.zeros(1))])


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("Adam", {"lr": "fast"}, "optimizer.params.lr='fast': write a number of at least 0, such as 1e-3."),
        ("Adam", {"lr": -1}, "optimizer.params.lr=-1: write a number"),
        ("Adam", {"lr": True}, "optimizer.params.lr=True: write a number"),
        ("Adam", {"lr": None}, "optimizer.params.lr=None: write a number"),
        ("Adam", {"lr": math.nan}, "optimizer.params.lr=nan: write a number"),
        ("Adam", {"lr": 10**400}, "optimizer.params.lr=1000"),
        ("AdamW", {"betas": [0.9, 0.99, 0.999]}, "optimizer.params.betas=[0.9, 0.99, 0.999]: write a list of 2"),
        ("Lion", {"betas": [0.9, 1.0]}, "optimizer.params.betas=[0.9, 1.0]: write a list of 2, each a number"),
        ("Adam", {"adam_w_mode": "false"}, "optimizer.params.adam_w_mode='false': write true or false."),
        ("Adam", {"foreach": "auto"}, "optimizer.params.foreach='auto': write true or false, or null."),
        (
            "Adam",
            {"weigth_decay": 1},
            "optimizer.params.weigth_decay=1 is not a parameter of Adam. Did you mean weight",
        ),
        ("SGD", {"xyz": 1}, "optimizer.params.xyz=1 is not a parameter of SGD. Remove it, or write one of dampening"),
        ("Adam", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm=1.0: remove it, and set gradient_clipping"),
        ("Adam", {"freeze_step": 400}, "optimizer.params.freeze_step=400: it belongs to the 1-bit optimizers"),
        ("Adam", {"cuda_aware": False}, "optimizer.params.cuda_aware=False: it belongs to the 1-bit"),
        ("Adam", {"max_coeff": 0.5}, "optimizer.params.max_coeff=0.5: it belongs to Lamb"),
        ("Lamb", {"max_coeff": "big"}, "optimizer.params.max_coeff='big': write a number of at least 0, such as 10.0."),
        ("Lamb", {"max_coeff": 0.001}, "optimizer.params.max_coeff=0.001: write a number of at least min_coeff=0.01"),
        ("Lamb", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm=1.0: remove it, and set gradient_clipping"),
        ("Lamb", {"amsgrad": True}, "optimizer.params.amsgrad=True: Lamb has no such variant; write false"),
        ("Lamb", {"max_coef": 1}, "optimizer.params.max_coef=1 is not a parameter of Lamb. Did you mean max_coeff?"),
        ("Adam", {"fp32_optimizer_states": False}, "set optimizer_states.dtype=bf16 instead"),
        ("Adam", {"bias_correction": False, "amsgrad": True}, "optimizer.params.amsgrad=True cannot be combined with"),
        (
            "SGD",
            {"nesterov": True},
            "optimizer.params={'nesterov': True} is rejected by SGD: Nesterov momentum",
        ),
        ("Rprop", {"etas": [2, 1]}, "is rejected by Rprop: Invalid eta values"),
        ("Adam", {3: 4}, "optimizer.params.3=4 is not a parameter"),
        ("Adam", [1], "optimizer.params=[1]: write a mapping"),
    ],
)
def test_wrong_values_of_optimizers(kind: str, params: Any, expected: str) -> None:
    (problem,) = check_optimizer(kind, params)
    assert expected in problem.message
    assert problem.key.startswith("optimizer.params")
    with pytest.raises(ConfigError) as error:
        build_optimizer(kind, params, [Parameter(torch.zeros(1))])
    assert error.value.problems == (problem,)


def test_all_problems_at_once() -> None:
    params = {"lr": "fast", "eps": "1e-8", "betas": 3, "max_grad_norm": 1, "weigth_decay": "auto"}
    assert keys(check_optimizer("Adam", params)) == [
        f"optimizer.params.{key}" for key in ("lr", "betas", "max_grad_norm", "weigth_decay")
    ]
    assert keys(check_scheduler("WarmupDecayLR", {"warmup_num_steps": 0, "warmup_type": "lin"})) == [
        f"scheduler.params.{key}" for key in ("warmup_num_steps", "warmup_type", "total_num_steps")
    ]


def test_auto_is_for_others_to_fill_in() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    assert check_optimizer("AdamW", params) == []
    with pytest.raises(ConfigError, match="optimizer.params.betas='auto': auto cannot be resolved here") as error:
        build_optimizer("AdamW", params, [Parameter(torch.zeros(1))])
    assert keys(list(error.value.problems)) == [f"optimizer.params.{key}" for key in params]
    params = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    assert check_scheduler("WarmupDecayLR", params) == []
    with pytest.raises(ConfigError, match="scheduler.params.total_num_steps='auto'"):
        build_scheduler("WarmupDecayLR", params, make("SGD"))
    assert keys(check_scheduler("WarmupLR", {"warmup_type": "auto"})) == ["scheduler.params.warmup_type"]


# ---- schedulers ----------------------------------------------------------------------------------------------------


def test_schedulers() -> None:
    optimizer = make("SGD", {"lr": 0.5})
    warmup = build_scheduler("WarmupLR", {"warmup_num_steps": "1e1", "warmup_type": "linear"}, optimizer)
    assert type(warmup) is WarmupLR
    assert (warmup.warmup_num_steps, optimizer.param_groups[0]["lr"]) == (10, 0.0)
    optimizer = make("SGD", {"lr": 0.5})
    stairs = build_scheduler("StepLR", {"step_size": "2", "gamma": "0.5"}, optimizer)
    assert type(stairs) is torch.optim.lr_scheduler.StepLR
    for _ in range(2):
        optimizer.step()
        stairs.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    for kind, params in (
        ("MultiStepLR", {"milestones": [2, "3"]}),
        ("OneCycleLR", {"max_lr": [0.1], "total_steps": 9}),
    ):
        assert check_scheduler(kind, params) == []
        build_scheduler(kind, params, make("SGD", {"momentum": 0.9}))


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("warmuplr", {}, "scheduler.type='warmuplr' cannot be used. Did you mean WarmupLR?"),
        ("LambdaLR", {}, "scheduler.type='LambdaLR' cannot be used. It is not supported."),
        ("ReduceLROnPlateau", {}, "scheduler.params.monitor is missing: ReduceLROnPlateau requires it"),
        ("LRScheduler", {}, "scheduler.type='LRScheduler' cannot be used"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "scheduler.params.warmup_num_steps=2.5: write a whole number"),
        ("WarmupLR", {"warmup_min_lr": []}, "scheduler.params.warmup_min_lr=[]: write a number"),
        ("WarmupLR", {"warmup_type": "lin"}, "scheduler.params.warmup_type='lin': write log or linear."),
        ("WarmupLR", {"warmup_min_ratio": 0.1}, "warmup_min_ratio=0.1 is not a parameter of WarmupLR"),
        ("WarmupCosineLR", {}, "scheduler.params.total_num_steps is missing: WarmupCosineLR requires it"),
        ("OneCycle", {"cycle_max_lr": 1}, "scheduler.params.cycle_min_lr is missing"),
        (
            "StepLR",
            {"step_size": 0},
            "scheduler.params={'step_size': 0} is rejected by StepLR: integer ",
        ),
        ("MultiStepLR", {"milestones": 3}, "scheduler.params.milestones=3: write a list, each a whole number"),
    ],
)
def test_wrong_schedulers(kind: str, params: dict[str, Any], expected: str) -> None:
    (problem,) = check_scheduler(kind, params)
    assert expected in problem.message
    with pytest.raises(ConfigError) as error:
        build_scheduler(kind, params, make("SGD"))
    assert error.value.problems == (problem,)


def test_lists_have_one_value_for_each_group() -> None:
    params = {"warmup_max_lr": [0.1, 0.2]}
    assert check_scheduler("WarmupLR", params) == []
    match = r"scheduler.params.warmup_max_lr=\[0.1, 0.2\] has 2 values for 1 parameter groups"
    with pytest.raises(ConfigError, match=match) as error:
        build_scheduler("WarmupLR", params, make("SGD"))
    assert keys(list(error.value.problems)) == ["scheduler.params.warmup_max_lr"]


# ---- anything ------------------------------------------------------------------------------------------------------

OPTIMIZERS = [
    "Adam",
    "AdamW",
    "Lamb",
    "Lion",
    "SGD",
    "Adagrad",
    "RMSprop",
    "Rprop",
    "Adafactor",
    "NAdam",
    "Muon",
    "a.b",
    "ada",
]
SCHEDULERS = [
    "LRRangeTest",
    "OneCycle",
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    "StepLR",
    "OneCycleLR",
    "PolynomialLR",
]
NAMES = "lr betas eps weight_decay bias_correction amsgrad foreach adam_w_mode nesterov momentum etas fused "
NAMES += "max_coeff min_coeff "
NAMES += "warmup_num_steps warmup_min_lr warmup_max_lr total_num_steps warmup_type cycle_min_lr cycle_max_lr step_size "
NAMES += "gamma total_steps max_lr last_batch_iteration last_epoch decay_step_size cycle_first_stair_count total_iters "
NAMES += "cycle_first_step_size"
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 10**400, "auto", "1e-3", "log", "linear", [0.9, 0.999], ["1", "2"], math.inf]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2))
PARAMS = st.dictionaries(st.sampled_from(NAMES.split()) | st.text(max_size=4) | st.integers(), VALUES, max_size=4)


# Half of the blocks are nearly right: with anything at all, next to none would be built.
RATES = st.sampled_from([0.1, "1e-3", 0, 1])
PLAUSIBLE: dict[str, Any] = {
    "lr": RATES,
    "weight_decay": RATES,
    "betas": st.sampled_from([[0.9, 0.99], ("0.5", 0), [0.9, 1.0]]),
    "foreach": st.booleans(),
    "momentum": RATES,
    "gamma": RATES,
    "warmup_min_lr": RATES,
    "warmup_num_steps": st.integers(0, 5),
    "total_num_steps": st.integers(4, 9),
    "step_size": st.integers(0, 3),
    "total_iters": st.integers(1, 3),
    "last_epoch": st.just(-1),
}


TAKES = {kind: "lr weight_decay betas foreach" for kind in OPTIMIZERS[:4]} | {
    "SGD": "lr weight_decay momentum",
    "WarmupLR": "warmup_num_steps warmup_min_lr last_epoch",
    "WarmupDecayLR": "total_num_steps warmup_num_steps",
    "StepLR": "step_size gamma",
    "PolynomialLR": "total_iters last_epoch",
}


def near(kinds: list[str]) -> Any:
    """An example of (type, params) that may be right."""

    def params(kind: str) -> Any:
        return st.fixed_dictionaries({}, optional={name: PLAUSIBLE[name] for name in TAKES[kind].split()})

    return st.sampled_from([k for k in kinds if k in TAKES]).flatmap(
        lambda kind: st.tuples(st.just(kind), params(kind))
    )


def blocks(kinds: list[str]) -> Any:
    """An example of (type, params)."""
    texts = st.text(max_size=4).filter(lambda text: "." not in text)
    return near(kinds) | st.tuples(st.sampled_from(kinds) | texts, PARAMS | VALUES)


class Outcomes:
    """Tries blocks, and counts which are built with values of their own and which are refused for theirs."""

    def __init__(self, block: str) -> None:
        self.block, self.built, self.refused = block, 0, 0

    def take(self, params: Any, problems: list[Problem], build: Callable[[], Any]) -> None:
        found = keys(problems)
        try:
            build()
        except ConfigError as error:
            raised = keys(list(error.problems))
            assert raised
            assert all(key.startswith(f"{self.block}.") for key in raised)
            assert set(found) <= set(raised), "what the check finds, building finds"
            self.refused += f"{self.block}.type" not in raised
        else:
            assert not problems
            self.built += bool(params)


def test_optimizers_raise_configuration_errors_only() -> None:
    outcomes = Outcomes("optimizer")

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(blocks(OPTIMIZERS))
    def take(block: tuple[str, Any]) -> None:
        build = functools.partial(build_optimizer, *block, [Parameter(torch.zeros(2))])
        outcomes.take(block[1], check_optimizer(*block), build)

    take()
    assert outcomes.built > 10
    assert outcomes.refused > 10


@pytest.mark.filterwarnings("ignore:total_num_steps")
def test_schedulers_raise_configuration_errors_only() -> None:
    outcomes = Outcomes("scheduler")

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(blocks(SCHEDULERS))
    def take(block: tuple[str, Any]) -> None:
        def build() -> None:
            optimizer = make("AdamW")
            scheduler = build_scheduler(*block, optimizer)
            optimizer.step()
            scheduler.step()

        outcomes.take(block[1], check_scheduler(*block), build)

    take()
    assert outcomes.built > 10
    assert outcomes.refused > 10


def test_public_names_are_those_that_are_installed() -> None:
    assert [name for name in lt_zero.optim.__all__ if not hasattr(lt_zero.optim, name)] == []
    assert set(lt_zero.optim.__all__) <= set(dir(lt_zero.optim))
    assert ("OneBitAdam" in lt_zero.optim.__all__) == there("one_bit")


def test_public_configurations() -> None:
    refused = {}
    for path in sorted(CONFIGS.glob("*.json")):
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError:
            continue
        problems = []
        if config.get("optimizer"):
            problems += check_optimizer(config["optimizer"]["type"], config["optimizer"].get("params", {}))
        if config.get("scheduler"):
            problems += check_scheduler(config["scheduler"]["type"], config["scheduler"].get("params", {}))
        if problems:
            refused[path.name] = keys(problems)
    assert refused
    clipping = "optimizer.params.max_grad_norm"
    not_installed = set() if there("one_bit") else {("optimizer.type",)}
    assert {tuple(found) for found in refused.values()} == {(clipping,), *not_installed}
