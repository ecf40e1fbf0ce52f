"""Muon for the matrices of hidden layers and Adam for everything else, in one optimizer.

Sources: https://kellerjordan.github.io/posts/muon/ (Muon, and the quintic Newton-Schulz iteration);
``torch.optim.Muon``, whose arithmetic this is; https://tridao.me/blog/2026/gram-newton-schulz/ (the iteration on the
Gram matrix), which is the default as in DeepSpeed 0.19.8.

Note [Which parameters]
    Muon steps 2D weights that are neither embeddings nor output layers. An embedding is a weight of ``nn.Embedding``
    or ``nn.EmbeddingBag`` (also if tied to an output layer), or has "embed" in its name. An output layer has "lm_head"
    in its name, or is a module outside of all lists (no number in its name) called ``head``, ``output``,
    ``classifier``, ``score``, ``logits`` or ``fc``. DeepSpeed only tests for the names "embed" and "lm_head", and also
    takes weights with more dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common import accelerator
from lt_zero.common.names import OfRanks, alone
from lt_zero.optim.adam import run_closure, step_adam
from lt_zero.optim.params import Flag, Signature, choice, number, only
from lt_zero.optim.registry import OPTIMIZER_RULES, RATE, Factory

NS_METHODS = ("gram", "standard")
RATES = ("original", "match_rms_adamw")
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic polynomial
_TINY = 1e-7  # lower bound of a divisor
_RESTART = 2  # iterations after which the Gram matrix is recomputed: its errors grow with each
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_OUTPUTS = {"head", "output", "classifier", "score", "logits", "fc"}


class Muon(Optimizer):
    """Steps groups with ``use_muon=True`` by Muon and the others by Adam.

    Options of a group override these arguments. States are those of ``torch.optim.Muon`` and ``torch.optim.AdamW``.
    Parameters without a gradient are skipped.

    Args:
        params: groups (dicts) that all have ``use_muon``; ``muon_groups`` makes them.
        muon_lr: learning rate of Muon.
        adam_lr: learning rate of Adam.
        momentum: of Muon; with ``nesterov`` Nesterov momentum.
        weight_decay: of both, decoupled.
        ns_method: how updates are orthogonalized: "standard" in bf16, or "gram" on the smaller Gram matrix, in fp16 on
            a GPU and in fp32 on a CPU.
        ns_steps: iterations.
        adjust_lr_fn: the factor of a matrix's learning rate: "original": sqrt(rows / columns), at least 1;
            "match_rms_adamw": 0.2 * sqrt(max(rows, columns)), for learning rates tuned for AdamW.
        betas, eps: of Adam.
        adam_w_mode: False adds Adam's weight decay to the gradient.

    Raises:
        ValueError: a group lacks ``use_muon``, a parameter of Muon is not 2D, or an option is unknown.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        muon_lr: float = 0.02,
        adam_lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_method: str = "gram",
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        adam_w_mode: bool = True,
    ) -> None:
        self._settings: dict[bool, dict[str, Any]] = {
            True: {
                "lr": muon_lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "ns_method": ns_method,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
            False: {
                "lr": adam_lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "adam_w_mode": adam_w_mode,
            },
        }
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group that has ``use_muon``."""
        if not isinstance(param_group, dict) or not isinstance(param_group.get("use_muon"), bool):
            raise ValueError(
                "Muon needs parameter groups that have use_muon=True or False. Make them with "
                "lt_zero.optim.muon_groups(model)."
            )
        group = {**self._settings[param_group["use_muon"]], **param_group}
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            _check(added)
        except ValueError:
            del self.param_groups[-1]
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` (run first, with gradients) returns.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = run_closure(closure)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError("Muon has no update for sparse gradients. Use sparse=False in the embedding.")
            if group["use_muon"]:
                for parameter in parameters:
                    self._step_matrix(parameter, group)
            elif parameters:
                step_adam(self, parameters, group, group["adam_w_mode"])
        return loss

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffer, momentum, lr = state["momentum_buffer"], group["momentum"], float(group["lr"])
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonalize(update, group["ns_method"], group["ns_steps"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-lr * _factor(parameter.shape, group["adjust_lr_fn"]))


def _check(group: dict[str, Any]) -> None:
    numbers = ("lr", "momentum", "weight_decay") if group["use_muon"] else ("lr", "eps", "weight_decay")
    for name in numbers:
        if not group[name] >= 0:
            raise ValueError(f"{name}={group[name]} is below 0. Write a number of at least 0.")
    if not group["use_muon"]:
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas={group['betas']}: write two numbers of at least 0 and below 1.")
        return
    for name, known in (("ns_method", NS_METHODS), ("adjust_lr_fn", RATES)):
        if group[name] not in known:
            raise ValueError(f"{name}={group[name]!r} is unknown. Write {' or '.join(known)}.")
    for parameter in group["params"]:
        if parameter.ndim != 2 or parameter.is_complex():
            raise ValueError(
                f"use_muon=True: a parameter of shape {tuple(parameter.shape)} is not a real 2D tensor. Put it into a "
                "group with use_muon=False."
            )


def _factor(shape: torch.Size, rule: str) -> float:
    """The factor of a matrix's learning rate."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def orthogonalize(matrix: Tensor, method: str = "gram", steps: int = 5) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows or columns: its singular values are between 0.7 and 1.2.

    Args:
        matrix: 2D.
        method: one of ``NS_METHODS``.
        steps: iterations.
    """
    if method == "gram" and matrix.size(0) != matrix.size(1):
        return _by_gram(matrix, steps)
    x = _scaled(matrix) if method == "gram" else matrix.bfloat16()
    tall = matrix.size(0) > matrix.size(1)
    x = x.T if tall else x
    if method == "standard":
        x = x / x.norm().clamp(min=_TINY)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


def _scaled(matrix: Tensor) -> Tensor:
    """Scale singular values to at most 1, then cast to the dtype of the iteration: fp16 overflows above 65504."""
    wide = matrix.float()
    dtype = torch.float16 if accelerator.holds(matrix) else torch.float32
    scaled: Tensor = wide / (wide.norm() + _TINY)
    return scaled.to(dtype)


def _by_gram(matrix: Tensor, steps: int) -> Tensor:
    """The same iteration on the smaller Gram matrix: each step multiplies from the left by a polynomial of it."""
    tall = matrix.size(0) > matrix.size(1)
    x = _scaled(matrix.T if tall else matrix)
    gram = x @ x.T
    product: Tensor | None = None
    for iteration in range(steps):
        if iteration == _RESTART and product is not None:
            x = product @ x
            gram, product = x @ x.T, None
        step = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        step.diagonal().add_(_A)
        product = step if product is None else step @ product
        if iteration + 1 not in (steps, _RESTART):
            # Valid because both are symmetric and commute: ``step`` is a polynomial of ``gram``.
            gram = step @ gram @ step
    if product is not None:
        x = product @ x
    return x.T if tall else x


def muon_groups(model: nn.Module, of_ranks: OfRanks = alone) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` as groups for ``Muon``, without empty groups.

    ``of_ranks``: returns what all ranks have, if their modules are parts of one model: a group may be empty then, if
    another rank has parameters in it. Collective then.
    """
    matrices, rest = divide(model)
    groups = [
        {"params": [p for _, p in matrices], "use_muon": True, "name": "muon"},
        {"params": [p for _, p in rest], "use_muon": False, "name": "adam"},
    ]
    filled = zip(*of_ranks([bool(group["params"]) for group in groups]), strict=True)
    return [group for group, has in zip(groups, filled, strict=True) if any(has)]


def divide(model: nn.Module) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """The named trainable parameters that Muon steps, and those that Adam steps, by the rule above."""
    embeddings = {p for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    matrices: list[tuple[str, Parameter]] = []
    rest: list[tuple[str, Parameter]] = []
    for parameter, aliases in names.items():
        if parameter.requires_grad:
            is_hidden = parameter.dim() == 2 and parameter not in embeddings and not any(map(_is_by_name, aliases))
            (matrices if is_hidden else rest).append((aliases[0], parameter))
    return matrices, rest


def _is_by_name(name: str) -> bool:
    """True if a weight of this name is an embedding or an output layer."""
    low = name.lower()
    *path, _ = low.split(".")
    listed = any(part.isdecimal() for part in path)
    return "embed" in low or "lm_head" in low or (not listed and bool(path) and path[-1] in _OUTPUTS)


# ---- in configurations -----------------------------------------------------------------------------------------------

_HALVES = (
    "Muon has two fixed groups, the matrices of hidden layers and all other parameters. Remove the key and set their "
    "rates by optimizer.params.muon_lr and adam_lr. For other groups return lt_zero.optim.Muon from "
    "configure_optimizers."
)
_HEADS = "an attention projection is updated as one matrix; remove it. A matrix per head gets its own update"
# As in DeepSpeed 0.19.8, ``lr`` and ``weight_decay`` apply to both groups, ``muon_lr``, ``momentum`` and ``ns_method``
# to Muon, ``adam_lr``, ``betas`` and ``eps`` to Adam. Not in DeepSpeed: ``nesterov``, ``ns_steps``, ``adjust_lr_fn``.
_RULES: Mapping[str, Any] = {
    **OPTIMIZER_RULES,
    "muon_lr": RATE,
    "adam_lr": RATE,
    "ns_method": choice(NS_METHODS),
    "ns_steps": number(1, 99, whole=True, example="5"),
    "adjust_lr_fn": choice(RATES),
}
_NOT_THERE: Mapping[str, Any] = {
    "torch_adam": Flag,  # selects an implementation, not an algorithm
    "fp32_optimizer_states": only(True, "write true; for moments in bf16 set optimizer_states.dtype=bf16"),
    "per_head_muon": only(False, _HEADS),
}


def factory_of(name: str) -> Factory:
    """The factory of ``optimizer.type: Muon``."""
    own = Signature.of(Muon, _RULES).plus({**_NOT_THERE, "lr": RATE})
    return Factory(own, _make, ungrouped=_HALVES, divide=muon_groups, shares=_shares)


def _shares(optimizer: Optimizer) -> Iterator[tuple[str, str, str]]:
    """The parameters that Muon steps, and those that Adam steps; see ``Factory.shares``."""
    for by, uses_muon, which in (
        ("Muon", True, "matrices of hidden layers"),
        ("Adam", False, "all other parameters"),
    ):
        groups = [group for group in optimizer.param_groups if group["use_muon"] is uses_muon]
        members = [p for group in groups for p in group["params"]]
        yield f"stepped by {by}", f"{len(members)} of {sum(p.numel() for p in members):,} elements", which


def _make(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    """Muon; bare parameters are divided by their number of dimensions alone."""
    options = {key: value for key, value in values.items() if key not in _NOT_THERE}
    if "lr" in options:
        rate = options.pop("lr")
        options = {"muon_lr": rate, "adam_lr": rate, **options}
    groups = list(parameters)
    if not any(isinstance(group, dict) for group in groups):
        divided = [(use, [p for p in groups if (_tensor(p).dim() == 2) is use]) for use in (True, False)]
        groups = [{"params": members, "use_muon": use} for use, members in divided if members]
    return Muon(groups, **options)


def _tensor(parameter: Any) -> Tensor:
    """The tensor of a parameter, which may be a (name, parameter) pair as in torch."""
    tensor: Tensor = parameter[1] if isinstance(parameter, tuple) else parameter
    return tensor
