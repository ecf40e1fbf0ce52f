"""docs/parallelism.md says what combines with what: each pair of features trains as one process, or is refused so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.compat.of_compile import is_compiled
from lt_zero.core.engine.averaged_weights import AveragedWeights
from lt_zero.core.engine.engine import Engine
from lt_zero.core.followers import followers
from lt_zero.parallel.mesh import ParallelSizes
from tests.support.blended import Attend, Blend, OneProcess, start
from tests.support.combinations import ALL, COMBINATIONS, FEATURES, MORE, PAGE, PAIRS, RUNS, keys_of, page, refusal
from tests.support.features import needs_all_blocks, skip_without
from tests.support.matrix import only_rows
from tests.support.mixtures import MixtureBlock
from tests.support.parallel_nets import Feed
from tests.support.paths import ROOT
from tests.support.pipelines import all_weights
from tests.support.pool import Pool

STEPS = 3
AXES = {"tensor": "tensor", "sequence": "sequence", "pipeline": "pipeline", "experts": "expert"}
BLOCKS = (Attend, Feed, MixtureBlock)


def _started(features: set[str]) -> Blend:
    counts = {AXES[feature]: 2 for feature in features & AXES.keys()}
    keys = keys_of(*features)
    zero, _ = keys.pop("zero_optimization"), keys.pop("pipeline", None)
    mode = "bf16-true" if "bf16" in features else "32-true" if "compress" in features else "64-true"
    run = start(
        ParallelSizes(_data(features), **counts),
        zero.pop("stage"),
        "sgd",
        mode,
        "lora" in features,
        zero,
        **{key: value for key, value in keys.items() if key not in ("tensor_parallel", "expert_parallel", "bf16")},
    )
    if "compile" in features:
        torch.compiler.reset()
        for kind in BLOCKS:
            for block in run.model.of(kind)[:1]:  # one of each kind: compiling takes seconds
                block.compile(backend="aot_eager")
                assert is_compiled(block)
    beside = [type(follower.feature).__name__ for follower in followers(run.engine)]
    assert ("ActivationCheckpoints" in beside) == ("recompute" in features)
    return run


def _train(first: str, second: str) -> None:
    """Compare what a run and one process have added to the weights, or to their averages."""
    features = {first, second}
    accelerator._apart = "offload" in features
    run = _started(features)
    one = OneProcess(_data(features), "sgd", "lora" in features)
    before, averages = _weights(one), dict[str, Tensor]()
    average = _average(run.engine) if "ema" in features else None
    for step in range(STEPS):
        run.backward(step)
        run.optimizer.step()
        one.backward(step)
        one.optimizer.step()
        if average is not None:
            average.update(0.5)
            now = _weights(one)
            averages = {name: (averages.get(name, value) + value) / 2 for name, value in now.items()}
    want = averages or _weights(one)
    if average is not None:
        with average.showing(True):
            found = all_weights(run.engine)
    else:
        found = all_weights(run.engine)
    assert found.keys() <= want.keys()
    wrong = torch.cat([(value.double() - want[name]).flatten() for name, value in found.items()]).norm()
    moved = torch.cat([(want[name] - before[name]).flatten() for name in found]).norm()
    assert moved > 1e-3
    assert wrong < moved * (0.1 if "bf16" in features else 2e-3 if "compress" in features else 1e-9), wrong / moved
    if "compress" in features:
        assert run.engine.exchange.nbytes > 0
    run.over()
    accelerator._apart = False
    if "compile" in features:
        torch.compiler.reset()


def _average(engine: Engine) -> AveragedWeights:
    from lt_zero.features.ema.average import WeightAverage  # these rows are skipped where it was taken out

    return WeightAverage(engine)


def _data(features: set[str]) -> int:
    """The number of data ranks."""
    return _ranks(features) // 2 ** len(features & {"tensor", "sequence", "pipeline"})


def _ranks(features: set[str]) -> int:
    cut = len(features & {"tensor", "sequence", "pipeline"})
    return 2 if "compile" in features and cut < 2 else 4


def _weights(one: OneProcess) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}


ACCEPTED = [pair for pair in PAIRS if not refusal(*pair)]


@pytest.mark.parametrize(
    ("first", "second"),
    only_rows([("experts", "lora"), ("stage", "offload")], ACCEPTED),
    ids=lambda value: value if value in FEATURES else None,
)
def test_a_pair_trains_as_one_process(pool: Pool, first: str, second: str) -> None:
    skip_without(*(first, second), keys_of(first, second))
    pool.run(_ranks({first, second}), _train, first, second)


@needs_all_blocks()
def test_the_page_says_what_the_configuration_accepts() -> None:
    """If it does not: ``python -m tests.support.combinations``."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, COMBINATIONS) == text
    for test in (RUNS, *MORE.values()):
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.slow
def test_the_meshes_of_the_page_are_those_of_the_forecasts() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, ALL) == text
