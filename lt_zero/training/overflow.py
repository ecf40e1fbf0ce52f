"""Diagnosis of overflow: the first module whose output is not finite, the gradients that are not, and the message.

The culprit is the first module to finish with an output that is not finite although its inputs were. Later modules got
its output as input, and enclosing modules finish later. A module that overflows between its children is found as well:
the children after that got a bad input. If there is no such module, the values were bad already in the input of the
first bad module.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_zero.common import plain_names
from lt_zero.common.compat import in_running_backward
from lt_zero.common.module_hooks import Hook, hookable_modules
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.find_units import clean_name
from lt_zero.core.engine.guard import is_guarded
from lt_zero.core.step.overflow import OverflowReport, not_finite, trained_into_the_weights

_INPUT = "the input of "
_QUOTE = "'"  # around a module's name
_SHOWN = 5  # names in a message


@dataclass(eq=False)
class _Visit:
    """One call of a module; the flags are 0D, or None if there was nothing to look at."""

    module: nn.Module
    given: Tensor | None
    made: Tensor | None = None


_stance = ExitStack()
_open_watches = 0


def _force_eager() -> None:
    """Let compiled code of this process run eagerly until ``_allow_graphs`` was called as often.

    Watches may be closed in any order, and torch puts back the stance of the time when one was opened.
    """
    global _open_watches
    if _open_watches == 0:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _open_watches += 1


def _allow_graphs() -> None:
    global _open_watches
    _open_watches -= 1
    if _open_watches == 0:
        _stance.close()


class FiniteWatch:
    """Records, while open, if the output of each module's forward is finite, without synchronising a GPU.

    With ``training_only`` forwards without gradients (validation) are ignored.
    """

    def __init__(self, root: nn.Module, training_only: bool = False) -> None:
        self.root, self._training_only = root, training_only
        self._names: dict[nn.Module, str] = {}
        self._handles: list[Any] = []
        self._eager: weakref.finalize[Any, Any] | None = None
        self.reset()

    def open(self) -> None:
        """Install the hooks; no-op if they are installed."""
        if self._handles:
            return
        # Scripted modules take no hooks.
        modules = {m: n for n, m in hookable_modules(self.root)}
        before, after = Hook(self._before), Hook(self._after)
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
        self._names = modules
        # A compiled graph ignores hooks that were registered after its compilation.
        _force_eager()
        # A watch may be dropped with its model, by a run that has ended on an overflow, say.
        self._eager = weakref.finalize(self, _allow_graphs)

    def close(self) -> None:
        """Remove the hooks and forget the flags."""
        for handle in self._handles:
            handle.remove()
        if self._eager is not None:
            self._eager()
        self._handles, self._names = [], {}
        self.reset()

    def reset(self) -> None:
        """Forget recorded forwards, before those of the next optimizer step."""
        self._running: list[_Visit] = []  # innermost last
        self._started: list[_Visit] = []
        self._finished: list[_Visit] = []

    def first(self) -> str | None:
        """The culprit, such as ``'blocks.3.mlp' (Linear)`` or ``the input of 'embedding' (Linear)``; None: no culprit.

        Waits for the GPU.
        """
        for visit in self._finished:
            if _bad(visit.made) and not _bad(visit.given):
                return self._label(visit.module)
        for visit in self._started:
            if _bad(visit.given) and _bad(visit.made):
                return _INPUT + self._label(visit.module)
        return None

    def _label(self, module: nn.Module) -> str:
        # ``clean_name`` removes prefixes that end with a dot, so append one and remove it again.
        name = clean_name(f"{self._names[module]}.").removesuffix(".")
        return f"{repr(name) if name else 'the model'} ({type(module).__name__})"

    def _ignores(self, module: nn.Module) -> bool:
        """True for calls to skip: those of a shallow copy, which shares the hooks, and recomputation in backward."""
        untrained = self._training_only and not torch.is_grad_enabled()
        return untrained or module not in self._names or in_running_backward()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._ignores(module):
            visit = _Visit(module, _finite((args, kwargs)))
            self._started.append(visit)
            self._running.append(visit)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._ignores(module):
            return
        while self._running:
            visit = self._running.pop()
            # Calls that were popped before this one ended with an exception.
            if visit.module is module:
                visit.made = _finite(output)
                self._finished.append(visit)
                return


def _bad(flag: Tensor | None) -> bool:
    return flag is not None and not flag.item()


@torch.no_grad()
def _finite(value: Any) -> Tensor | None:
    """True (0D) if all floating-point tensors in ``value`` are finite, None if there are none."""
    total = None
    for tensor in iter_tensors(value):
        readable = not is_guarded(tensor) and tensor.is_floating_point() and tensor.itemsize >= 2
        if readable and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta) and tensor.numel():
            finite, low, high = _extremes(tensor)
            # An additive attention mask is full of -inf by design.
            if not tensor.requires_grad:
                finite = finite | ((low == -torch.inf) & (high <= 0))
            total = finite if total is None else total & finite
    return total


def _extremes(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A flag that all elements are finite, the minimum and the maximum (0D; NaN if any element is).

    ``isfinite`` of all elements would need temporary memory of the tensor's size.
    """
    low, high = torch.aminmax(tensor)
    return torch.isfinite(torch.stack((low, high))).all(), low, high


@torch.no_grad()
def nonfinite_parameters(engine: Engine) -> list[str]:
    """The parameters whose accumulated gradient is not finite on any rank, in registration order. Collective."""
    names, flags = [], []
    for bucket in engine.buckets:
        grads = bucket.grads
        if grads.streamed and engine.offload_manager.partially_stepped:
            # A background step may have discarded the gradients.
            continue
        for piece in bucket.pieces:
            if grads.accumulated and piece.index in grads.valid:
                names.append(bucket.layout.spans[piece.index].name)
                flags.append(_extremes(grads.of(piece, write=False))[0])
        grads.put_away()
    finite = torch.stack(flags).tolist() if flags else []
    mine = [name for name, ok in zip(names, finite, strict=True) if not ok]
    found = {name for some in engine.world.host_gather(mine, "overflowed gradients") for name in some}
    every = plain_names.named_parameters(engine.root, remove_duplicate=True)
    order = {name: number for number, (name, _) in enumerate(every)}
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))


# ---- the message -------------------------------------------------------------------------------------------------


def nonfinite_warning(engine: Engine, parameters: list[str]) -> str:
    """The warning, shown once, where steps are not checked.

    Args:
        engine: the engine that owns the parameters.
        parameters: from ``nonfinite_parameters``; empty if they were stepped beside backward.
    """
    kinds = {
        clean_name(f"{path}.{name}".removeprefix(".")): type(module).__name__
        for path, module in engine.root.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    named = [f"{name!r} (of {kinds[name]})" if name in kinds else repr(name) for name in parameters]
    which = f" Parameters with such gradients: {_some(named)}." if named else ""
    return trained_into_the_weights(which)


def overflow_report(parameters: list[str], culprits: Sequence[str | None], skipped: int, scale: float | None) -> str:
    """The error or warning about gradients that are not finite.

    Args:
        parameters: from ``nonfinite_parameters``.
        culprits: ``FiniteWatch.first`` of each rank.
        skipped: number of skipped optimizer steps.
        scale: the loss scale; None: weights are fp32.
    """
    what = not_finite(skipped, scale)
    named = tuple(f"{culprit.split(_QUOTE)[1]}." for culprit in culprits if culprit is not None and _QUOTE in culprit)
    # Name the culprit's own parameters first.
    parameters = sorted(parameters, key=lambda name: not name.startswith(named))
    if parameters:
        what += f" Parameters: {_some([repr(name) for name in parameters])}."
    ranks: dict[str | None, list[str]] = {}
    for rank, culprit in enumerate(culprits):
        ranks.setdefault(culprit, []).append(str(rank))
    places = []
    for culprit in ranks:
        if culprit is None:
            found = (
                "every module's output was finite: the gradients overflowed in backward (or a loss outside of modules)"
            )
        elif culprit.startswith(_INPUT):
            found = f"{culprit} was not finite"
        else:
            found = f"the first output that was not finite is that of {culprit}"
        places.append(f"on rank {_some(ranks[culprit])}: {found}" if len(ranks) > 1 else found)
    if places:
        what += f" In forward: {_some(places, '; ')}."
    return f"{what} {_remedy([c for c in ranks if c is not None], scale)}"


def _some(items: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


def _remedy(culprits: list[str], scale: float | None) -> str:
    if scale is None:
        return "Check the data of that batch, or lower the learning rate or clip gradients."
    advice = ["check the data of that batch"] if any(c.startswith(_INPUT) for c in culprits) else []
    advice += ["train in bf16", "lower the learning rate or clip gradients"]
    named = [culprit.rsplit(" (", 1)[0] for culprit in culprits if culprit.startswith("'")]
    if named:
        advice.append(f"keep {_some(named)} in fp32 with `fp16_override_modules`")
    if not culprits and scale > 1:
        advice.append("allow lower scales with a smaller `min_loss_scale`")
    text = ", or ".join(advice)
    cause = ", as the scale does not change what forward computes" if culprits else ""
    return f"{text[0].upper()}{text[1:]}. A larger `min_loss_scale` is no remedy{cause}."


class NamedOverflow(OverflowReport):
    """Names the module where values stopped being finite, and the parameters whose gradients are not."""

    def __init__(self) -> None:
        self._modules: FiniteWatch | None = None

    @override
    def watch(self, root: nn.Module) -> None:
        self._modules = self._modules or FiniteWatch(root, training_only=True)
        self._modules.open()
        self._modules.reset()

    @override
    def end(self) -> None:
        if self._modules is not None:
            self._modules.close()
            self._modules = None

    @override
    def unchecked(self, engine: Engine) -> str:
        return nonfinite_warning(engine, nonfinite_parameters(engine))

    @override
    def skipped(self, engine: Engine, steps: int, scale: float | None, watched: bool) -> str:
        modules = self._modules if watched else None
        culprits = engine.world.host_gather(modules.first(), "overflow") if modules is not None else []
        return overflow_report(nonfinite_parameters(engine), culprits, steps, scale)
