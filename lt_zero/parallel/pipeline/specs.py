"""Specs from which the layers of a pipeline are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lt_zero.common.arguments import expect


class LayerSpec:
    """A layer that is made on the ranks that have it.

    Args:
        typename: its class, or a function that returns a module.
        args, kwargs: what it is called with.
    """

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(typename):
            raise TypeError(f"LayerSpec({typename!r}): the first argument has to be a class of modules.")
        self.typename, self.args, self.kwargs = typename, args, kwargs

    def build(self) -> nn.Module:
        """Make the layer."""
        made = self.typename(*self.args, **self.kwargs)
        expect(made, nn.Module, f"What {self.name} makes", "return an nn.Module")
        return made

    @property
    def name(self) -> str:
        """Name of the layer's class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class TiedLayerSpec(LayerSpec):
    """A layer that the pipeline has at several places, with the same parameters.

    Args:
        key: the same for all of these places. The module of the first is used at all.
        forward_fn: called with the module and its inputs in place of the module: ``lambda m, x: x @ m.weight.T``.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",  # of DeepSpeed: all of the layer is tied here
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        if not key or "." in key:
            raise ValueError(f"TiedLayerSpec({key!r}): the key is a part of parameters' names. Write one without dots.")
        self.key, self.forward_fn = key, forward_fn


Layer = LayerSpec | nn.Module | Callable[..., Any]


def class_of(spec: Layer) -> str:
    """The name of a layer's class."""
    if isinstance(spec, LayerSpec):
        return spec.name
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", "")


def numel_of(spec: Layer) -> int:
    """The elements of a layer's parameters."""
    if isinstance(spec, LayerSpec):
        with torch.device("meta"):
            spec = spec.build()
    return sum(p.numel() for p in spec.parameters()) if isinstance(spec, nn.Module) else 0


def as_arguments(output: Any) -> tuple[Any, ...]:
    """Arguments of the next layer from the output of one."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)
