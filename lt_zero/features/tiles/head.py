"""Output layers that compute a loss: ``loss_head``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lt_zero.common.arguments import wrong
from lt_zero.common.switch import Switched, switch
from lt_zero.features.tiles.loss import tiled_cross_entropy

_OPTIONS = {
    name: value.default
    for name, value in inspect.signature(tiled_cross_entropy).parameters.items()
    if value.kind is inspect.Parameter.KEYWORD_ONLY
}


class LossHead(Switched):
    """Forward of a linear layer that returns logits without ``labels``, and their loss with them."""

    weight: Tensor
    bias: Tensor | None
    loss_options: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:  # hooks of tensor parallelism drop all positional arguments but the first
            raise TypeError("A loss head takes labels by name: head(hidden, labels=labels).")
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, hidden: Tensor, *, labels: Tensor | None = None) -> Any:
        if labels is None:
            return super().forward(hidden)  # type: ignore[misc]
        return head_loss(self, hidden, labels, self.loss_options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def head_loss(head: Any, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss of a linear layer's output; a DTensor if hooks of tensor parallelism have made ``hidden`` one."""
    if not isinstance(hidden, DTensor):
        return tiled_cross_entropy(hidden, head.weight, labels, head.bias, **options)
    local = hidden.redistribute(placements=[Replicate()] * hidden.device_mesh.ndim).to_local()
    loss = tiled_cross_entropy(local, head.weight, labels, head.bias, **options)
    return DTensor.from_local(loss, hidden.device_mesh, [Replicate()] * hidden.device_mesh.ndim, run_check=False)


def loss_head(linear: nn.Linear, **options: Any) -> nn.Linear:
    """Let a linear layer return the loss of its output where it gets labels, as ``lt_zero.tiled_cross_entropy`` does.

    ``head(hidden, labels=labels)`` is the loss, and ``head(hidden)`` are logits as before. Weights are gathered for it,
    at every stage, also those that an embedding shares. The layer is changed in place, and keeps its names.

    Args:
        linear: the output layer: [..., features] -> [..., vocabulary].
        options: keyword arguments of ``tiled_cross_entropy``.

    Returns:
        ``linear``.

    Raises:
        TypeError: it is no nn.Linear, or has another forward; or an option is unknown.
        ValueError: it is compiled, or its forward was replaced.
    """
    check_linear(linear, "lt_zero.loss_head")
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise TypeError(f"lt_zero.loss_head({unknown[0]}=...): there are {', '.join(_OPTIONS)}.")
    switch(linear, LossHead, "lt_zero.loss_head")
    vars(linear)["loss_options"] = options
    return linear


def check_linear(module: nn.Module, call: str) -> None:
    """Raise TypeError unless ``module`` multiplies by its weight, and adds its bias."""
    if not isinstance(module, nn.Linear):
        raise wrong(f"The layer of {call}", module, "pass the nn.Linear that makes logits")
    if not isinstance(module, Switched) and type(module).forward is not nn.Linear.forward:
        raise TypeError(f"{call}: {type(module).__name__} has a forward of its own. Pass an nn.Linear.")
