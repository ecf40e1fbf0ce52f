"""Experts of Hugging Face's transformers over ranks: each runs the model's own forward of its part of the stack.

Models of transformers whose experts are one stack of matrices decorate their class by ``use_experts_implementation``,
which gives it public attributes, by which they are recognised here. Their forward takes tokens, the experts of each,
and scores. Rows that other ranks sent go through it, with one expert and the score 1 for each row, so that activations,
biases and the implementation that the user chose (``experts_implementation``) stay the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lt_zero.common import accelerator
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import ConfigError
from lt_zero.common.switch import Switched, own_class, restore, switch
from lt_zero.common.transformers_models import models_of
from lt_zero.parallel.experts import SIZE, Dispatched, Experts, OfStages, one_stage

_OF_A_STACK = ("has_bias", "is_transposed", "num_experts")  # attributes, since transformers 5.0
_OF_PEFT = ("get_base_layer", "get_delta_weight", "parameter_name")  # methods of its wrappers of parameters, since 0.17
_TAKES = 4  # self, tokens, their experts, and scores


Added = Callable[[Callable[[Tensor], Tensor]], Tensor]


class StackedExperts(Switched, Experts):
    """Experts of a model of transformers, some of which are on this rank."""

    _added: Mapping[str, Sequence[Added]] = MappingProxyType({})  # by the name of the parameter

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the experts make of tokens, of the tokens' shape. Collective.

        Args are those of the model's class: tokens [tokens, width], their experts and scores [tokens, k].
        """
        bound = _signature(_kind_of(self)).bind(self, *args, **kwargs)
        _, tokens, expert_ids, scores = bound.arguments.values()
        sent = self.dispatch(tokens, expert_ids)
        return self.combine(self._made_of(sent), sent, scores)

    def _made_of(self, sent: Dispatched) -> Tensor:
        """Results of this rank's experts, row by row."""
        stack = {name: self._local_of(name, p) for name, p in self._parameters.items() if p is not None}
        rows = sent.tokens
        if not len(rows):
            # Zero gradients of all parameters, and a backward of the exchange: see Note [Tokens of no expert].
            inner = [p for child in self.children() for p in child.parameters()]
            return rows + cast(Tensor, sum(p[:0].sum().to(rows.dtype) for p in (*stack.values(), *inner)))
        counts = accelerator.send(torch.tensor(sent.counts), rows.device)
        expert = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        own = _kind_of(self)
        # An object of its own, since backward may run this forward again, in another thread.
        part = own.__new__(own)
        vars(part).update(vars(self), _parameters={**self._parameters, **stack}, num_experts=len(counts))
        made: Tensor = own.forward(part, rows, expert.unsqueeze(1), rows.new_ones(len(rows), 1))
        return made

    def _local_of(self, name: str, parameter: Tensor) -> Tensor:
        added = [make(self._part_of) for make in self._added.get(name, ())]
        return sum(added, self.local(parameter))

    def _part_of(self, value: Tensor) -> Tensor:
        return value if self._ranks is None else value.chunk(self._ranks.size)[self._ranks.rank]

    @contextmanager
    def adding(self, name: str, values: Sequence[Added]) -> Iterator[None]:
        """Context in which ``values`` are added to a parameter. They take what returns this rank's part of a stack."""
        before = self._added
        self._added = {**before, name: values}
        try:
            yield
        finally:
            self._added = before

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, kinds, _ = super().__reduce_ex__(protocol)
        return made, kinds, self.__getstate__()


class AdaptedExperts(Switched):
    """Wrapper of peft (``target_parameters``) of experts: tells them what is added to the part that a rank has.

    Its low-rank matrices are on all ranks. Each rank computes the gradients of its own experts' rows of them, from
    the tokens of all expert ranks, and those of other experts are zero there: the mean over all ranks is that of one
    process.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.disable_adapters or self.merged:
            return self.base_layer(*args, **kwargs)
        active = [partial(self.added, name) for name in self.active_adapters if name in self.lora_A]
        with self.get_base_layer().adding(self.parameter_name, active):
            return self.base_layer(*args, **kwargs)

    def added(self: Any, adapter: str, part: Callable[[Tensor], Tensor]) -> Tensor:
        """The values that an adapter adds to ``part`` of the stack."""
        if self.num_experts == 1 or not hasattr(self, "get_delta_factors"):
            return part(self.get_delta_weight(adapter))
        left, right, scaling = self.get_delta_factors(adapter)
        found: Tensor = part(left) @ part(right) * scaling
        return found


def take_over(module: nn.Module, of_stages: OfStages = one_stage) -> None:
    """Let the stacked experts of transformers' models in ``module`` be ``Experts``. Collective over stages.

    Raises:
        ConfigError: on all ranks: a stage has experts of another kind, or a forward that is not that of its class.
            Nothing is changed then.
    """
    problem, done = None, list[nn.Module]()
    try:
        _switch_all(module, done)
    except ConfigError as error:
        problem = error.problems[0]
    wrong = [each for each in of_stages(problem) if each is not None]
    if wrong:
        for switched in done:
            restore(switched)
        raise ConfigError(wrong[:1])


def _switch_all(module: nn.Module, done: list[nn.Module]) -> None:
    """Switch experts, and wrappers of them, which are added to ``done``."""
    found = dict(_experts_of(module))
    for name, experts in found.items():
        if problem := _problem(experts):
            raise ConfigError.about(
                SIZE,
                f"{SIZE}: {clean_name(name)} is a {own_class(experts).__name__} of transformers, {problem}. Write this "
                "layer's experts as lt_zero.parallel.Experts, or remove the key.",
            )
    for name, experts in found.items():
        made: Any = _switched(name, experts, StackedExperts)
        done.append(made)
        made.number, made._ranks, made._parts = made.num_experts, None, 1
    for name, sub in module.named_modules():
        if isinstance(sub, AdaptedExperts):
            continue
        if all(hasattr(sub, own) for own in _OF_PEFT) and isinstance(sub.get_base_layer(), StackedExperts):
            done.append(_switched(name, sub, AdaptedExperts))


def _switched(name: str, module: nn.Module, kind: type[Switched]) -> nn.Module:
    try:
        return switch(module, kind, SIZE)
    except ValueError as error:
        raise ConfigError.about(SIZE, f"{error} It is {clean_name(name)}.") from error


def _experts_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Stacks of experts, and in models of transformers also modules that are experts by their name; no ``Experts``."""
    inside = {id(sub) for model in models_of(module) for sub in model.modules()}
    seen = set[str]()
    for name, sub in module.named_modules():
        if isinstance(sub, Experts) or any(name.startswith(f"{other}.") for other in seen):
            continue
        if _is_stack(sub) or (id(sub) in inside and _is_list(name, sub)):
            seen.add(name)
            yield name, sub


def _is_stack(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), int) for name in _OF_A_STACK)


def _is_list(name: str, module: nn.Module) -> bool:
    """True if ``module`` has experts in a way of its own."""
    kind = own_class(module).__name__
    routed = kind.endswith("Experts") and "Shared" not in kind
    return routed or (isinstance(module, (nn.ModuleList, nn.ModuleDict)) and name.rpartition(".")[2] == "experts")


def _kind_of(module: nn.Module) -> Any:
    return own_class(module)


@cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _problem(experts: Any) -> str:
    """Why a module cannot be spread; empty if it can."""
    if not _is_stack(experts):
        return "which is not stacked as transformers' use_experts_implementation says"
    takes = len(_signature(_kind_of(experts)).parameters)
    if takes != _TAKES:
        return f"whose forward takes {takes - 1} arguments, and not tokens, their experts and scores"
    return ""
