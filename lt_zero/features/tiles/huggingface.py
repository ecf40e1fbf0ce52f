"""MLPs and losses of models of Hugging Face's transformers in tiles, as the block ``long_sequences`` asks.

Note [Logits that do not exist]
    A causal model calls its output layer, then maybe caps the logits, and hands them with the labels to its loss
    function. The labels are known when the model is called, so the output layer computes the loss at once: its weight
    is gathered then, also at stage 3. It returns the loss as ``DeferredLogits``, from which the loss function takes it.
    These know the operations that models apply to logits in between. Any other use of them is an error.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_zero.common.compat import without_torch_function
from lt_zero.common.errors import ConfigError
from lt_zero.common.switch import Switched, restore, switch
from lt_zero.core.engine.guard import PASSING, called
from lt_zero.core.feature import Undo
from lt_zero.features.tiles.head import LossHead, check_linear, head_loss
from lt_zero.features.tiles.keys import LongSequences
from lt_zero.features.tiles.loss import mean_of
from lt_zero.features.tiles.tokens import TokenTiles, tiled

log = logging.getLogger("lt_zero")
BLOCK = "long_sequences"
_CAUSAL_LOSS = "ForCausalLMLoss"  # of transformers, which shifts labels
_KEEPING = ("float", "to", "contiguous")  # functions after which logits are the same

# What torch.compile asks of tensors between graphs, beside ``PASSING``.
_ASKED = ("is_view", "untyped_storage", "is_conj", "is_neg")


def install(module: nn.Module, block: LongSequences, rank: int) -> Undo:
    """Let the models of transformers in ``module`` compute in tiles, and log which.

    Raises:
        ConfigError: there is none, or one lacks what can be computed in tiles. Nothing is changed then.
    """
    installed = Undo()
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    models = _outermost(module, base) if base is not None else []
    key = f"{BLOCK}.tiled_{'mlp' if block.tiled_mlp else 'loss'}"
    if not models:
        raise ConfigError.about(
            key,
            f"{key}=true: {type(module).__name__} has no model of transformers. Use lt_zero.tiled and "
            "lt_zero.loss_head in it, and remove the key.",
        )
    try:
        for model in models:
            mlps = _tile_mlps(model, block, installed) if block.tiled_mlp else 0
            if block.tiled_loss:
                _tile_loss(model, block, installed)
            if rank == 0:
                what = [f"{mlps} MLPs"] * block.tiled_mlp + ["its loss"] * block.tiled_loss
                log.info("%s: %s computes %s in tiles of tokens.", BLOCK, type(model).__name__, " and ".join(what))
    except BaseException:
        installed.remove()
        raise
    return installed


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[Any]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def _tile_mlps(model: nn.Module, block: LongSequences, installed: Undo) -> int:
    """Tile the modules that models of transformers call ``mlp``; returns how many."""
    key, name = f"{BLOCK}.tiled_mlp", type(model).__name__
    found = [module for path, module in model.named_modules() if path.rpartition(".")[2] == "mlp"]
    others = [type(module).__name__ for module in found if not type(module).__name__.endswith("MLP")]
    # Ranks with other numbers of tokens would send them to experts unequally often.
    others += [type(module).__name__ for module in found if _routes(module)]
    if others or not found:
        text = f"{others[0]} is no MLP of single tokens" if others else "it has no modules named mlp"
        raise ConfigError.about(
            key, f"{key}=true: {name} is not known: {text}. Use lt_zero.tiled on its modules, and remove the key."
        )
    for mlp in found:
        if not isinstance(mlp, TokenTiles):  # else by the user
            _changing(key, functools.partial(tiled, mlp, tokens_per_tile=block.mlp_tokens_per_tile))
            installed.also(functools.partial(restore, mlp))
    return len(found)


def _routes(module: nn.Module) -> bool:
    """True if ``module`` is a mixture of experts."""
    return any(type(sub).__name__.endswith(("Experts", "Router")) for sub in module.modules())


def _tile_loss(model: Any, block: LongSequences, installed: Undo) -> None:
    key, name = f"{BLOCK}.tiled_loss", type(model).__name__
    remedy = "Use lt_zero.loss_head or lt_zero.tiled_cross_entropy in your step, and remove the key."
    head: Any = model.get_output_embeddings()
    whole: Any = getattr(model, "loss_function", None)
    if head is None:
        raise ConfigError.about(key, f"{key}=true: {name} has no output layer (get_output_embeddings()). {remedy}")
    if getattr(whole, "__name__", "") != _CAUSAL_LOSS and _of_sum(whole) is None:
        shown = getattr(whole, "__name__", type(whole).__name__)
        text = f"{key}=true: the loss function of {name} is {shown}, and not transformers' {_CAUSAL_LOSS}"
        raise ConfigError.about(key, f"{text}. {remedy}")
    _changing(key, functools.partial(check_linear, head, "lt_zero.loss_head"))
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    _changing(key, functools.partial(switch, head, DeferringHead, "lt_zero.loss_head"))
    installed.also(functools.partial(restore, head))
    head.loss_options = {"tokens_per_tile": block.loss_tokens_per_tile, "softcap": softcap, "reduction": "sum"}
    _changing(key, functools.partial(switch, model, LabelledModel, key))
    installed.also(functools.partial(restore, model))
    model.loss_function = DeferredLoss(whole, softcap)
    installed.also(functools.partial(setattr, model, "loss_function", whole))


def _changing(key: str, change: Callable[[], object]) -> None:
    try:
        change()
    except (TypeError, ValueError) as error:
        raise ConfigError.about(key, f"{key}=true: {error}") from error


# ---- what a model calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Labels:
    """The labels of the model's running call, one for each token, and how their losses are reduced."""

    targets: Tensor
    ignored: int
    items: Tensor | int | None  # the sum of the losses is divided by it; None: by the number that count
    given: bool  # the caller has shifted them
    of_sum: Callable[..., Tensor] | None  # makes the loss of a sum where the loss function is of several ranks

    @classmethod
    def of(cls, model: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> _Labels | None:
        """The labels among the arguments of a model; None: there are none."""
        given = dict(signature.bind_partial(model, *args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.get(parameter.name, {})
        labels = given.get("labels")
        shifted = given.get("shift_labels")
        ignored = given.get("ignore_index", -100)
        if labels is None:
            return None
        targets = F.pad(labels, (0, 1), value=ignored)[..., 1:] if shifted is None else shifted
        items, of_sum = given.get("num_items_in_batch"), _of_sum(model.loss_function)
        return cls(targets, ignored, items, shifted is not None, of_sum)

    def loss(self, total: Tensor) -> Tensor:
        """The loss, of the sum over the tokens."""
        counted = (self.targets != self.ignored).sum().to(total.device)
        items = self.items.to(total.device) if isinstance(self.items, Tensor) else self.items
        if self.of_sum is not None:
            return self.of_sum(total, counted, items, self.given)
        return mean_of(total, counted) if items is None else total / items


def _of_sum(function: Any) -> Callable[..., Tensor] | None:
    """The method of a causal loss function by which the ranks that have parts of a sequence share a loss, or None."""
    found: Callable[..., Tensor] | None = getattr(function, "of_sum", None)
    return found if getattr(function, "shifts", True) else None


class LabelledModel(Switched):
    """Forward of a model that tells its output layer the labels, also where it is called without ``__call__``."""

    def __init_subclass__(cls) -> None:
        own: Any = cls.__bases__[1]
        signature = inspect.signature(own.forward)

        @functools.wraps(own.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            head = self.get_output_embeddings()
            vars(head)["labels"] = _Labels.of(self, signature, args, kwargs)
            try:
                return own.forward(self, *args, **kwargs)
            finally:
                vars(head)["labels"] = None

        cls.forward = forward  # type: ignore[attr-defined]


class DeferringHead(LossHead):
    """Output layer that computes the loss while its model is called with labels."""

    labels: _Labels | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        # Here, since hooks of tensor parallelism may replace what forward returns.
        return out if self.labels is None else _deferred(out)

    def forward(self, hidden: Tensor, *, labels: Tensor | None = None) -> Any:
        told = self.labels
        if told is None:
            return super().forward(hidden, labels=labels)
        options = {**self.loss_options, "ignore_index": told.ignored}
        return told.loss(head_loss(self, hidden, told.targets.to(hidden.device), options))


class DeferredLogits(Tensor):
    """A loss in the place of the logits that it was computed from. See Note [Logits that do not exist]."""

    operations: list[str]  # that the model has applied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(getattr(func, "__name__", func)).strip("_"), kwargs or {}
        if func in PASSING or name in _ASKED:
            with without_torch_function():
                return func(*args, **kwargs)
        logits = args[0] if args and isinstance(args[0], DeferredLogits) else None
        others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
        if logits is not None and not others:
            if name in _KEEPING:
                return logits
            if name in ("div", "truediv", "mul", "tanh"):
                logits.operations.append(" ".join([name.removeprefix("true"), *map(str, args[1:])]))
                return logits
        raise RuntimeError(
            f"long_sequences.tiled_loss=true, and {called(func)} was called on logits, which do not exist when a model "
            "gets labels. Call the model without labels for logits, or remove the key."
        )

    def taken(self, softcap: float | None) -> Tensor:
        """The loss, which was computed with ``softcap``.

        Raises:
            RuntimeError: the model has applied something else to its logits.
        """
        known = [] if softcap is None else [f"div {softcap}", "tanh", f"mul {softcap}"]
        if self.operations != known:
            raise RuntimeError(
                f"long_sequences.tiled_loss=true, but the model applies [{', '.join(self.operations)}] to its logits, "
                f"and [{', '.join(known)}] is known from its config. Use lt_zero.tiled_cross_entropy, not the key."
            )
        with without_torch_function():
            return self.as_subclass(Tensor)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _deferred(loss: Tensor) -> DeferredLogits:
    made = loss.as_subclass(DeferredLogits)
    made.operations = []
    return made


class DeferredLoss:
    """Loss function of a model: takes the loss that the output layer has computed, or computes that of logits."""

    def __init__(self, whole: Callable[..., Tensor], softcap: float | None) -> None:
        self._whole = whole
        self._softcap = softcap
        self.of_sum = _of_sum(whole)
        self.__name__ = getattr(whole, "__name__", type(whole).__name__)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(logits, DeferredLogits):
            return logits.taken(self._softcap)
        return self._whole(logits, *args, **kwargs)
