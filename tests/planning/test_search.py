"""The search of ``lt-zero tune``, with runs whose times and sizes are given: what is run, pruned and chosen."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import yaml

from lt_zero.common.console import Console
from lt_zero.config import ZeroConfig
from lt_zero.config.load import examine
from lt_zero.planning.estimate import Setting, settings
from lt_zero.planning.search import Measured, Outcome, Tuner, TuningError, choose
from lt_zero.planning.search_space import Candidate, Facts, Plan, configured
from lt_zero.planning.tune_cli import print_table, text_of

BASE: dict[str, Any] = {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}
LADDER = [setting for setting in settings("cpu") if "nvme" not in setting.places]
SIZES = {0: 1000, 1: 600, 2: 500, 3: 300}  # bytes of a rank by stage
BUCKETS = (None, 1 << 20)


def facts(base: dict[str, Any] | None = None, **changes: Any) -> Facts:
    plans = tuple(
        Plan(setting, bucket, how, SIZES[setting.stage] + 100 * how, SIZES[setting.stage] + 100 * how)
        for setting, bucket, how in itertools.product(LADDER, BUCKETS, (False, True))
        if bucket is None or setting.stage < 3
    )
    given: dict[str, Any] = {"micro": None, "accumulation": 1, "loop": False, "bare": 50, "unrepeated": ""}
    return Facts("cpu", 2, base or BASE, **{**given, "plans": plans, **changes})


class Script:
    """Runs that take as long as ``seconds`` says for a candidate; notes them."""

    follows = True  # its micro-batch is the configured one

    def __init__(self, seconds: Callable[[Candidate], float], **changes: Any) -> None:
        self.seconds, self.facts = seconds, facts(**changes)
        self.runs: list[Candidate] = []
        self.origin = Candidate(configured(examine(self.facts.base).usable()))

    def __call__(self, overrides: Sequence[str], candidate: Candidate | None, asked: bool) -> Outcome:
        self.runs.append(candidate or self.origin)
        chosen = candidate or self.origin
        made = examine(self.facts.base, overrides=overrides).usable()
        assert configured(made) == chosen.setting, "the overrides say what the candidate does"
        need = SIZES[chosen.setting.stage] + 50 + (20 if chosen.checkpointing == "full" else 200)
        seconds = (self.seconds(chosen),) * 5
        batch = chosen.micro or 8 if self.follows else 8
        return Outcome(seconds, need, need, batch=batch, facts=self.facts if asked else None)


def by_stage(candidate: Candidate) -> float:
    return {0: 1.3, 1: 1.0, 2: 1.1, 3: 1.2}[candidate.setting.stage]


def tuned(script: Any, limit: int | None = None, **options: Any) -> tuple[Tuner, Candidate]:
    tuner = Tuner(script, limit, **options)
    tuner.begin(["zero_optimization.stage=3"])
    return tuner, tuner.search()


def random_cost(seed: int) -> Callable[[Candidate], float]:
    """Times that mostly are products of what each coordinate costs, as they are in training."""
    chance = random.Random(seed)
    factors: dict[Any, float] = {}

    def factor(value: Any, low: float, high: float) -> float:
        return factors.setdefault(value, chance.uniform(low, high))

    def seconds(candidate: Candidate) -> float:
        cost = factor(candidate.setting, 0.7, 1.5) * factor(("micro", candidate.micro), 0.8, 1.2)
        cost *= factor(("mode", candidate.checkpointing), 1.0, 1.4) * factor(("bucket", candidate.bucket), 0.9, 1.1)
        return cost * factor(candidate, 0.99, 1.01)

    return seconds


@pytest.mark.parametrize("seed", range(20))
def test_the_suggestion_is_near_the_best_of_all(seed: int) -> None:
    script = Script(random_cost(seed))
    tuner, chosen = tuned(script, batches=True)
    assert len(set(script.runs)) <= 13
    best = min(map(script.seconds, tuner.everything()))
    assert script.seconds(chosen) <= 1.05 * best
    found = tuner.exhaust(chosen)
    assert script.seconds(found) <= 1.05 * best
    assert set(script.runs) == set(tuner.everything())


MICS = ("zero_optimization.mics_shard_size=64",)
BF16 = ("communication_data_type=bf16",)


def _many(sharing: float, rounding: float) -> tuple[Tuner, Candidate, list[Candidate]]:
    """The tuner of 128 shards, its suggestion, and what is faster with other results. Times with either, relative."""

    def seconds(candidate: Candidate) -> float:
        known = (sharing if candidate.sharing else 1.0) * (rounding if candidate.rounding else 1.0)
        return known * by_stage(candidate)

    plain = facts().plans
    groups = tuple(replace(plan, sharing=MICS) for plan in plain if plan.setting.stage > 0)
    script = Script(seconds, plans=(*plain, *groups), rounding=(BF16,))
    tuner, chosen = tuned(script)
    return tuner, chosen, list(tuner.with_rounding(chosen))


def test_shard_groups_are_tried_and_written() -> None:
    tuner, chosen, others = _many(sharing=0.8, rounding=1.0)
    assert (chosen.setting, chosen.sharing, chosen.rounding) == (Setting(1), MICS, ())
    assert yaml.safe_load(text_of(tuner, chosen))["zero_optimization"]["mics_shard_size"] == 64
    assert str(chosen) == "stage 1, mics_shard_size: 64"
    assert others == []
    assert _many(sharing=1.1, rounding=1.0)[1].sharing == ()


def test_what_changes_results_is_told_and_not_written() -> None:
    tuner, chosen, (other,) = _many(sharing=0.8, rounding=0.9)
    assert (other.sharing, other.rounding) == (MICS, BF16)
    assert tuner.ratio(other, chosen) == pytest.approx(0.9)
    assert len(tuner.measured[other].runs) == 3, "as often as a finalist"
    assert "communication_data_type" not in yaml.safe_load(text_of(tuner, chosen))
    out = io.StringIO()
    print_table(tuner, chosen, Console(file=out, width=200), 0.0)
    assert "mics_shard_size=64" in out.getvalue()
    assert "~ communication_data_type=bf16" in out.getvalue()


def test_what_cannot_fit_is_never_run() -> None:
    script = Script(by_stage)
    tuner, chosen = tuned(script, limit=800)
    assert chosen.setting == Setting(2), "stage 1 needs 600 by its plan, and 250 more as measured at stage 3"
    assert {run.setting.stage for run in script.runs} == {2, 3}
    assert tuner.pruned[Candidate(Setting(1))] == "850 bytes needed at least, 800 bytes allowed"


def test_what_was_measured_above_the_limit_is_not_chosen() -> None:
    class Larger(Script):
        def __call__(self, overrides: Sequence[str], candidate: Candidate | None, asked: bool) -> Outcome:
            made = super().__call__(overrides, candidate, asked)
            return Outcome(made.seconds, made.running, 900 if candidate else made.peak, 8, facts=made.facts)

    tuner, chosen = tuned(Larger(by_stage), limit=800)
    assert chosen == Candidate(Setting(3))
    assert tuner.measured[Candidate(Setting(2))].problem == "900 bytes measured, 800 bytes allowed"


def test_checkpointing_is_found_where_nothing_fits_without() -> None:
    def needing(overrides: Sequence[str], candidate: Candidate | None, asked: bool) -> Outcome:
        made = script(overrides, candidate, asked)
        if candidate is not None and candidate.checkpointing == "full":
            return made
        return Outcome(problem="out of memory", too_large=True, facts=made.facts)

    script = Script(by_stage)
    _, chosen = tuned(needing, limit=400)
    assert chosen == Candidate(Setting(3), checkpointing="full")


def test_nothing_fits() -> None:
    with pytest.raises(
        TuningError, match="Nothing fits. Least is needed by stage 3.*: 350 bytes per rank at least, 300"
    ):
        tuned(Script(by_stage), limit=300)


def test_a_first_run_without_memory_is_repeated_with_what_needs_least() -> None:
    asked: list[list[str]] = []

    def run(overrides: Sequence[str], candidate: Candidate | None, with_facts: bool) -> Outcome:
        asked.append(list(overrides))
        if not overrides:
            return Outcome(problem="NotEnoughMemory: ...", too_large=True)
        return script(overrides, candidate, with_facts)

    script = Script(by_stage)
    tuner, chosen = tuned(run)
    assert asked[1] == ["zero_optimization.stage=3"]
    assert tuner.base.zero_optimization.stage == 0, "what the overrides have set is not the script's"
    assert chosen == Candidate(Setting(1))


def test_differences_below_the_noise_do_not_count() -> None:
    _, chosen = tuned(Script(lambda candidate: 1.0 + 0.001 * (3 - candidate.setting.stage)))
    assert chosen == Candidate(Setting(0)), "stage 3 is 0.3 % faster"


@pytest.mark.parametrize(
    ("runs", "stage"),  # seconds of each run, by stage
    [
        ({0: [2.0, 2.1], 1: [1.5, 1.52], 2: [1.0, 2.32]}, 0),  # 132 % between runs of the fastest
        ({0: [2.5, 2.5], 1: [1.5, 1.52], 2: [1.0, 2.32]}, 1),
        ({0: [2.0, 5.0], 1: [1.5, 1.52], 2: [1.0, 1.01]}, 0),  # of the simpler one
        ({0: [1.5], 1: [1.04, 1.06], 2: [1.0, 1.05]}, 1),
        ({0: [1.5], 1: [1.06, 1.06], 2: [1.0, 1.05]}, 2),
        ({0: [1.019], 1: [1.0, 1.0]}, 0),
        ({0: [1.021], 1: [1.0, 1.0]}, 1),
    ],
)
def test_the_simplest_within_the_spread(runs: dict[int, list[float]], stage: int) -> None:
    measured = {Candidate(Setting(one)): Measured([(run,) * 3 for run in found]) for one, found in runs.items()}
    assert choose(measured, lambda candidate: candidate.setting.stage) == Candidate(Setting(stage))


def test_finalists_run_in_turns() -> None:
    script = Script(by_stage)
    tuned(script, rounds=2)
    rounds = script.runs[-6:]
    assert rounds[:3] == rounds[3:]
    assert len(set(rounds)) == 3


def test_the_fastest_run_counts() -> None:
    """Other work slows runs down: here every first run of a candidate, by more the better it is."""
    seen = set[Candidate]()

    def seconds(candidate: Candidate) -> float:
        first = candidate not in seen
        seen.add(candidate)
        return by_stage(candidate) * (1.2 if first and candidate.setting.stage == 1 else 1.0)

    _, chosen = tuned(Script(seconds))
    assert chosen == Candidate(Setting(1))


def test_runs_that_differ_are_repeated() -> None:
    """Of the first runs of stage 1 only the fourth is undisturbed, and a second one confirms it."""
    runs = [0]

    def seconds(candidate: Candidate) -> float:
        runs[0] += candidate == Candidate(Setting(1))
        disturbed = candidate == Candidate(Setting(1)) and runs[0] not in (4, 5)
        return by_stage(candidate) * (candidate.bucket is None or 1.05) * (1.1 + 0.07 * runs[0] if disturbed else 1.0)

    script = Script(seconds)
    _, chosen = tuned(script, rounds=2)
    assert chosen == Candidate(Setting(1))
    assert runs[0] == 5
    script = Script(lambda candidate: by_stage(candidate) * (1 + 0.2 * random.random()))
    tuned(script, rounds=1, trials=4)
    assert len(script.runs) <= 5 + 2 * 4


def test_the_global_batch_stays() -> None:
    script = Script(lambda candidate: 1.0 / (candidate.micro or 8), accumulation=2)
    tuner, chosen = tuned(script, batches=True)
    tried = {(run.micro, run.accumulation) for run in script.runs}
    assert tried == {(None, None), (4, 4), (16, 1)}
    assert (chosen.micro, chosen.accumulation) == (16, 1)
    made = yaml.safe_load(text_of(tuner, chosen))
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (16, 1)
    assert tuner.samples == 32


STAGED: dict[str, Any] = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}


@pytest.mark.parametrize(
    ("block", "changes", "schedules", "counts"),
    [
        ({}, {"layers": 8}, {None, "GPipe", "Interleaved1F1B", "LoopedBFS"}, {None, 2, 8}),
        ({}, {"layers": 3}, {None, "GPipe"}, {None, 2, 8}),  # two stages on each rank need four layers
        ({"schedule": "1F1B", "num_microbatches": 4}, {"layers": 8}, {None}, {None}),
        ({"schedule": "LoopedBFS"}, {"layers": 8}, {None}, {None, 2, 8}),
        ({}, {"layers": 8, "loop": True, "micro": 8, "accumulation": 4}, {None, "GPipe"}, {None}),
        ({}, {}, {None}, {None}),
    ],
)
def test_what_a_pipeline_leaves_open(
    block: dict[str, Any], changes: dict[str, Any], schedules: set[str | None], counts: set[int | None]
) -> None:
    """Batches of 8 samples are cut into 4 by default. A loop has made its stages, and draws micro-batches."""
    script = Script(by_stage, base={**STAGED, "pipeline": {"stages": 2, **block}}, **changes)
    tuner, _ = tuned(script, trials=40)
    tried = tuner.measured
    assert {one.schedule for one in tried} == schedules
    assert {one.count for one in tried} == counts
    assert {one.micro for one in tried} == ({None, 4, 16} if changes.get("loop") else {None})


def test_the_activations_of_a_pipeline() -> None:
    """200 bytes of two micro-batches of four, in 1F1B: of all four in GPipe, and of two of 8 half of it."""
    script = Script(by_stage, base=STAGED, layers=8)
    tuner, chosen = tuned(script)
    states = tuner.need(replace(chosen, schedule="GPipe")) - 400
    for changes, kept in (({"schedule": "1F1B"}, 200), ({"count": 8}, 100), ({"count": 2}, 400)):
        assert tuner.need(replace(chosen, **changes)) == states + kept  # type: ignore[arg-type]
    other = replace(tuner.origin, schedule="GPipe", count=8)
    tuner.measure(other)
    made = yaml.safe_load(text_of(tuner, other))
    assert made["pipeline"] == {"stages": 2, "schedule": "GPipe", "num_microbatches": 8}


def test_micro_batches_are_left_alone_if_the_script_cannot_be_told() -> None:
    script = Script(by_stage)
    tuned(script)
    assert {run.micro for run in script.runs} == {None}


def test_a_loop_whose_batches_do_not_follow_the_configuration() -> None:
    """Half the samples in half the time are no gain."""
    script = Script(lambda candidate: 1.0 / (candidate.micro or 8), micro=8, accumulation=2, loop=True)
    script.follows = False
    tuner, chosen = tuned(script)
    assert chosen.micro is None
    problems = {run.micro: tuner.measured[run].problem for run in script.runs}
    assert problems[16] == "the script's micro-batch has 8 samples: it takes its size from elsewhere"
    script = Script(by_stage, micro=4, loop=True)
    script.follows = False
    tuned(script)
    assert {run.micro for run in script.runs} == {None}, "its batches could not be compared"


def test_the_file_is_the_configuration_of_the_fastest() -> None:
    script = Script(by_stage)
    tuner, chosen = tuned(script)
    text = text_of(tuner, chosen)
    made = ZeroConfig.of(yaml.safe_load(text))
    assert configured(made) == Setting(1)
    assert made.gradient_clipping == 1.0
    assert text.startswith(
        "# Written by lt-zero tune: 1.0000 s per step, 850 bytes per rank at most.\n# The script as it"
    )


def test_a_script_that_fails_is_shown() -> None:
    def run(overrides: Sequence[str], candidate: Candidate | None, asked: bool) -> Outcome:
        return Outcome(problem="KeyError: 'x'", output="Traceback ...\nKeyError: 'x'")

    with pytest.raises(TuningError, match="KeyError: 'x'\nTraceback"):
        tuned(run)


def test_the_budget_ends_the_search() -> None:
    script = Script(by_stage)
    tuned(script, trials=2, rounds=0)
    assert len(script.runs) == 3
    script = Script(by_stage)
    tuned(script, minutes=0.0)
    assert len(script.runs) == 1


OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("zero", [{"stage": 2}, OFFLOADED, {"stage": 3, "stage3_max_reuse_distance": 0}], ids=str)
def test_overrides_make_every_setting(zero: dict[str, Any]) -> None:
    base = ZeroConfig.of({"zero_optimization": zero})
    for setting in settings("cuda"):
        overrides = Candidate(setting).overrides(base, "/it's a disk")
        made = examine(base, overrides=overrides).usable()
        assert configured(made) == setting
        if "nvme" in setting.places:
            assert str(made.zero_optimization.offload_optimizer.nvme_path) == "/it's a disk"
    assert Candidate(configured(base)).overrides(base) == []
