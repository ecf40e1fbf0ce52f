"""The weights of a pipeline's layers, by which they are divided over stages (config/pipelines.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lt_zero.common import accelerator
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.parallel.pipeline.specs import Layer, LayerSpec, TiedLayerSpec, as_arguments, numel_of
from lt_zero.parallel.random import seeded


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
