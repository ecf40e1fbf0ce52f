"""Arithmetic of pipelines: the layers of each stage, the share of a step in which ranks wait, forwards that wait."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from lt_zero.common.errors import ConfigError

_METHOD = "pipeline.partition_method"
Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]


def running(schedule: Schedule, ranks: int, count: int, trains: bool = True) -> Schedule:
    """The schedule that runs ``count`` micro-batches: another one where ``schedule`` cannot."""
    if schedule == "1F1B":
        return "1F1B" if trains and count >= ranks else "GPipe"
    if schedule == "Interleaved1F1B":
        return "Interleaved1F1B" if trains and count % max(1, count // ranks) == 0 else "LoopedBFS"
    return schedule


def bubble(ranks: int, count: int, chunks: int = 1) -> float:
    """The share of a step in which a rank has nothing to compute, if all stages take equally long.

    Args:
        ranks: of the pipeline.
        count: micro-batches.
        chunks: stages on each rank.
    """
    return (ranks - 1) / (chunks * count + ranks - 1)


def in_flight(schedule: Schedule, ranks: int, count: int, chunks: int, rank: int) -> int:
    """Forwards of a rank's stages that wait for their backward, at most: each keeps the activations of one stage.

    Args:
        schedule, ranks, count, chunks: as for ``bubble``.
        rank: of the pipeline.
    """
    every = chunks * count
    after = ranks - 1 - rank
    runs = running(schedule, ranks, count)
    if runs == "1F1B":
        return min(every, after + 1)
    if runs == "Interleaved1F1B":
        each_round = count // max(1, count // ranks)
        return min(every, (chunks - 1) * each_round + 2 * after + 1)
    return every


def micro_batches(rows: int, wanted: int) -> int:
    """Number of equal micro-batches for a batch of ``rows``: the least that divides it and is at least ``wanted``.

    So the mean of their losses is that of the batch, and no micro-batch is larger than those of whole batches.
    """
    return next(count for count in range(min(wanted, rows), rows + 1) if rows % count == 0) if rows else 1


def weights_of(method: str, classes: Sequence[str], measured: Sequence[float]) -> list[float]:
    """Weights of the layers when they are distributed over stages.

    Args:
        method: ``parameters``, ``time``, ``uniform``, or ``type:REGEX``.
        classes: the names of the layers' classes.
        measured: the elements of their parameters, or the times of their forwards.

    Raises:
        ConfigError: no class matches the expression.
    """
    if method == "uniform":
        return [1.0] * len(classes)
    if method in ("parameters", "time"):
        return list(measured)
    pattern = method.partition(":")[2]
    found = [1.0 if re.search(pattern, name, re.IGNORECASE) else 0.0 for name in classes]
    if not any(found):
        known = ", ".join(dict.fromkeys(classes))
        raise ConfigError.about(_METHOD, f"{_METHOD}={method!r}: no layer's class matches it. There are {known}.")
    return found


def divide(weights: Sequence[float], stages: int) -> list[range]:
    """Cut layers into ``stages`` ranges, none empty, so that the heaviest is as light as possible.

    Raises:
        ConfigError: there are more stages than layers.
    """
    layers = len(weights)
    if stages > layers:
        key = "pipeline.stages"
        text = f"{key}: {stages} stages (ranks times stages on each) are more than the {layers} layers"
        raise ConfigError.about(key, f"{text}. Use fewer.")
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[n]: the lightest heaviest range of the first n layers in as many ranges as were looked at, and its last cut.
    best = [(sums[n], 0) for n in range(layers + 1)]
    cuts: list[list[int]] = []
    for number in range(1, stages):
        row = [(float("inf"), 0)] * (layers + 1)
        for n in range(number + 1, layers + 1):
            row[n] = min((max(best[cut][0], sums[n] - sums[cut]), cut) for cut in range(number, n))
        cuts.append([cut for _, cut in row])
        best = row
    ends = [layers]
    for row_of_cuts in reversed(cuts):
        ends.append(row_of_cuts[ends[-1]])
    starts = [0, *reversed(ends[1:])]
    return [range(start, end) for start, end in zip(starts, reversed(ends), strict=True)]
