"""``memory_budget``: the choice of modules, the forecast of the peak, and training with it on several ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lt_zero
from lt_zero import ActivationCheckpointing, ConfigError, ZeroConfig
from lt_zero.features.activation_checkpointing.budget import KEY, BudgetTrial, Meter, ModuleCost, peak_of, plan_budget
from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing, installed
from lt_zero.planning.activations import Ledger, estimate_activations
from tests.support.checkpointed_nets import net, same
from tests.support.models import tokens
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

# ---- the choice ----------------------------------------------------------------------------------------------------

sizes = st.integers(0, 5)  # small, so that sums are often equal
costs_of = st.builds(
    lambda inputs, fixed, inner, working, spent: ModuleCost(
        "", "Block", inputs, fixed, fixed + inner, working, spent, passes=1
    ),
    *[sizes] * 4,
    st.integers(0, 60),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(costs_of, min_size=1, max_size=6), st.integers(1, 60), st.booleans(), st.integers(1, 3))
def test_the_choice_takes_the_least_time_that_meets_the_budget(
    costs: list[ModuleCost], allowed: int, aside: bool, passes: int
) -> None:
    # Each module has a class of its own, so that no times are averaged.
    costs = [replace(cost, name=str(n), kind=str(n), passes=passes) for n, cost in enumerate(costs)]
    names = [cost.name for cost in costs]

    def spent(chosen: frozenset[str]) -> int:
        return sum(cost.nanoseconds for cost in costs if cost.name in chosen)

    every = [frozenset(some) for n in range(len(names) + 1) for some in itertools.combinations(names, n)]
    fitting = [spent(chosen) for chosen in every if peak_of(costs, chosen, aside) <= allowed]
    if peak_of(costs, frozenset(names), aside) > allowed:
        with pytest.raises(ConfigError, match=KEY):
            plan_budget(costs, allowed, aside)
        return
    plan = plan_budget(costs, allowed, aside)
    assert plan.peak <= allowed
    if passes == 1:
        assert spent(plan.recomputed) == min(fitting)


def test_of_equal_modules_the_first_are_recomputed_and_the_least_is_named() -> None:
    times = (9, 3, 8, 1, 7, 2, 6, 4)
    costs = [ModuleCost(f"blocks.{n}", "Block", 1, 0, 10, 12, spent, 1) for n, spent in enumerate(times)]
    plan = plan_budget(costs, 0.5)
    assert plan.recomputed == {f"blocks.{n}" for n in range(5)}, "noise of times does not choose, and the last is free"
    assert plan.peak <= plan.allowed == peak_of(costs, frozenset(), False) // 2
    with pytest.raises(
        ConfigError, match=r"needs? 20 bytes .* 90 bytes if none.*write .*memory_budget=0\.223"
    ) as caught:
        plan_budget(costs, 0.1)
    assert [problem.key for problem in caught.value.problems] == [KEY]
    assert plan_budget(costs, 0.223).recomputed == {f"blocks.{n}" for n in range(7)}
    assert plan_budget(costs, 1.0).recomputed == frozenset()
    unlike = replace(costs[0], inner=11)  # its input needs no gradient, say
    assert plan_budget([unlike, *costs[1:]], 0.5).recomputed == plan.recomputed


# ---- the forecast --------------------------------------------------------------------------------------------------

WIDTH = 32


class Attending(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide * WIDTH), nn.GELU(), nn.Linear(wide * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return x + self.drop(self.mlp(x))


class Blocks(nn.Module):
    def __init__(self, wide: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending(each) for each in wide)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        return x.sum()


def _measured_peak(model: nn.Module, x: Tensor) -> int:
    ledger = Ledger()
    ledger.leave_out(chain(model.parameters(), [x]))

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        ledger.leave_out([parameter.grad])
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(take) for p in model.parameters()]
    with ledger:
        model(x).backward()
    for hook in hooks:
        hook.remove()
    return ledger.forecast().most


@pytest.mark.parametrize(("mode", "budgets"), [("full", (0.4, 0.6, 0.9)), ("selective", (0.85,))])
def test_the_peak_is_the_forecast(mode: Any, budgets: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    model, x = Blocks((4, 2, 8, 4, 4)), torch.randn(2, 96, WIDTH)
    whole = _measured_peak(model, x)
    modules = {f"blocks.{name}": block for name, block in model.blocks.named_children()}
    meter = Meter(modules, x.device, mode == "selective")
    recomputing = Checkpointing(model, ActivationCheckpointing(mode=mode), meter=meter)
    model(x).backward()
    meter.end_step()
    meter.measure_times()
    model(x).backward()
    costs = meter.costs()
    assert all(cost.nanoseconds > 0 for cost in costs)
    assert costs[0].inputs - 96 * 96 == costs[1].inputs == costs[4].inputs, "they share the mask"
    assert peak_of(costs, frozenset(), False) == pytest.approx(whole, rel=0.05)
    for budget in budgets:
        plan = plan_budget(costs, budget)
        recomputing.follow(plan.recomputed)
        assert 0 < len(plan.recomputed) < len(costs)
        assert _measured_peak(model, x) == pytest.approx(plan.peak, rel=0.05)
        assert _measured_peak(model, x) <= 1.05 * budget * whole
    recomputing.remove()


def test_modules_that_do_not_run_in_the_first_step_stay_recomputed() -> None:
    """As those that are skipped at random, or frozen until later: nobody knows what they keep."""
    torch.manual_seed(0)
    model, mask = Blocks((4,) * 4), torch.ones(96, 96, dtype=torch.bool).tril()
    modules = {f"blocks.{name}": block for name, block in model.blocks.named_children()}
    meter, plans = Meter(modules, torch.device("cpu"), False), list[Any]()
    recomputing = Checkpointing(model, ActivationCheckpointing(mode="full"), meter=meter)
    trial = BudgetTrial(1.0, meter, tuple(modules), False, lambda told: [told], plans.append)
    for ran in ((0, 3), (0, 1, 3)):
        x = torch.randn(2, 96, WIDTH)
        for number in ran:
            x = model.blocks[number](x, mask)
        x.sum().backward()
        trial.end_step()
    assert plans[0].recomputed == {"blocks.1", "blocks.2"}
    recomputing.remove()


def test_the_estimate_of_activations_follows_the_budget() -> None:
    ids = torch.zeros(2, 48, dtype=torch.long, device="meta")

    def most(**keys: Any) -> int:
        blocks = (nn.Sequential(nn.Linear(WIDTH, 90), nn.Tanh(), nn.Linear(90, WIDTH)) for _ in range(8))
        model = nn.Sequential(nn.Embedding(7, WIDTH), *blocks)
        block = {"modules": ["Sequential"], **keys} if keys else {}
        return estimate_activations(model, ids, {"activation_checkpointing": block}).most

    assert most(mode="full") < most(memory_budget=0.7) < most()


# ---- training ------------------------------------------------------------------------------------------------------


def _trained(block: dict[str, Any], stage: int, steps: int = 4) -> tuple[dict[str, Tensor], list[str], str]:
    model = net()
    engine = lt_zero.shard(model, config_of(stage, RELEASE, activation_checkpointing=block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lt_zero.ShardedOptimizer(engine, optimizer)
    torch.manual_seed(5)
    for step in range(steps):
        # Batches of ranks differ in size, and so do their activations and times.
        batch = tokens(step, 0, dist.get_rank(), rows=2 + 4 * dist.get_rank())
        for module in model.blocks:
            module.began = 0
        F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, text = full_values(engine), str(installed(engine))
    again = [name for name, module in model.blocks.named_children() if module.began == 2]
    engine.detach()
    return found, again, text


def _trains(stage: int) -> list[list[str]]:
    want, none, _ = _trained({}, stage)
    got, some, text = _trained({"memory_budget": 0.75}, stage)
    same(got, want, stage)
    assert not none
    assert "memory_budget=0.75" in text
    _, all_of_them, _ = _trained({"memory_budget": 0.75}, stage, steps=2)
    assert all_of_them == ["0", "1", "2"], "nothing is chosen before the second step"
    # Rank 0 alone would recompute nothing with the first size, and could meet the second one.
    _, more, _ = _trained({"memory_budget": 24_000}, stage)
    with pytest.raises(ConfigError, match="The least that can be met"):
        _trained({"memory_budget": 12_000}, stage)
    return [some, more]


def test_ranks_choose_the_same_and_train_to_the_same_weights(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = pool.run(2, _trains, 3)
    assert first == second
    assert [0 < len(again) < 3 for again in first] == [True, True]


def test_a_compiled_module_is_refused_and_one_that_never_runs_is_told(pool: Pool) -> None:
    pool.run(1, _odd_modules)


def _odd_modules() -> None:
    config = config_of(3, activation_checkpointing={"memory_budget": 0.75})
    model = net()
    model.blocks[1].compile()
    with pytest.raises(ConfigError, match="blocks.1 is compiled") as caught:
        lt_zero.shard(model, config)
    assert [problem.key for problem in caught.value.problems] == [KEY]
    engine = lt_zero.shard(net(), config)
    (end_step,) = engine.after_step
    end_step()
    with pytest.warns(UserWarning, match="none could be measured"):
        end_step()
    engine.detach()


# ---- the key -------------------------------------------------------------------------------------------------------


def test_values_of_the_key() -> None:
    def block(**keys: Any) -> ActivationCheckpointing:
        return ZeroConfig.of({"activation_checkpointing": keys}).activation_checkpointing

    for value, kept in ((0.5, 0.5), ("0.5", 0.5), (1, 1.0), ("4GB", 4 * 10**9), ("1.5 KiB", 1536), (2048, 2048)):
        made = block(memory_budget=value)
        assert (made.memory_budget, made.mode, type(made.memory_budget)) == (kept, "full", type(kept))
    assert block(memory_budget=0.5, mode="selective").mode == "selective"
    for wrong in (0, -0.5, 1.5, True, "half", "0 GB", float("nan"), [0.5]):
        with pytest.raises(ConfigError, match="memory_budget"):
            block(memory_budget=wrong)
    strategy = lt_zero.ZeroStrategy(stage=3, activation_checkpointing={"memory_budget": "2GB"})
    assert strategy.config.activation_checkpointing == block(memory_budget=2 * 10**9)
    for key, value in (("every", 2), ("contiguous_memory_optimization", True)):
        with pytest.raises(ConfigError, match=rf"{key}.* fixes what memory_budget=0.5 chooses"):
            block(memory_budget=0.5, **{key: value})
