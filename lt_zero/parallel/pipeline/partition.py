"""Partition of a pipeline's layers into stages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.parallel.pipeline.specs import Layer, LayerSpec, TiedLayerSpec, as_arguments, numel_of
from lt_zero.parallel.random import seeded

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


def own_numels(specs: Sequence[Layer], keys: Sequence[str]) -> list[float]:
    """The elements of each layer's parameters, where a tied layer counts once.

    Args:
        keys: of the tie that each layer is in; empty without one.
    """
    first = [not key or key not in keys[:number] for number, key in enumerate(keys)]
    return [float(numel_of(spec)) if counts else 0.0 for spec, counts in zip(specs, first, strict=True)]


@torch.no_grad()
def forward_seconds(specs: Sequence[Layer], example: Any, call: Callable[..., Any]) -> list[float]:
    """Seconds of each layer's forward; layers are made, run and dropped one after the other."""
    device, found = next((t.device for t in iter_tensors(example)), torch.device("cpu")), list[float]()
    inputs = as_arguments(example)

    def wait() -> None:
        accelerator.synchronize(device)

    with device, seeded(None, device.type):
        for spec in specs:
            layer = spec.build() if isinstance(spec, LayerSpec) else spec
            if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
                layer = partial(spec.forward_fn, layer)
            times = []
            for _ in range(3):
                wait()
                began = time.perf_counter()
                output = call(layer, *inputs)
                wait()
                times.append(time.perf_counter() - began)
            found.append(min(times))
            inputs = as_arguments(output)
    return found
