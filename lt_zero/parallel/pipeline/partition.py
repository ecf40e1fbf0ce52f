"""Partition of a pipeline's layers into stages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lt_zero.common.errors import ConfigError

_METHOD = "pipeline.partition_method"


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
