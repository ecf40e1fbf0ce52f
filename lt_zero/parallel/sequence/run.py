"""A run whose sequences are cut over ranks: its models are switched, its batches are cut, its ranks draw other numbers.

Note [Random numbers of sequence ranks]
    Data, and choices that all ranks of a sequence have to make alike, come from one stream: these ranks have the same
    generators. In forwards of training they draw from streams of their own, or dropout would give the parts of a
    sequence equal masks. As those of ``LocalRandom`` (random.py), such a stream begins with a number of the common one
    and that of the rank, and has no state: a resumed run, and recomputation in backward, repeat it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isclose, isnan
from typing import Any

from torch import Tensor, nn

from lt_zero.common.errors import ConfigError
from lt_zero.common.transformers_models import models_of
from lt_zero.common.users_code import warn
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.parallel.random import draw_seed, seed_of, seeded
from lt_zero.parallel.sequence.batches import (
    HOOK,
    SIZE,
    cut_for,
    cuts_itself,
    had_labels,
    means_are_of_user,
    model_takes,
)
from lt_zero.parallel.sequence.huggingface import switch
from lt_zero.parallel.sequence.loss import means_taken
from lt_zero.parallel.sequence.ranks import SequenceRanks, whole_sequences
from lt_zero.parallel.stages import pipeline_of


class SequenceRun:
    """Batches and models of a run whose sequences are cut.

    Args:
        ranks: with parts of the same sequences.
        tensor: ranks that share the heads of a model.
        stages: of pipelines.

    Attributes:
        whole_in_eval: in evaluation mode each rank computes sequences of its own, which are whole.
    """

    def __init__(self, ranks: SequenceRanks, tensor: int, stages: int = 1) -> None:
        self.ranks, self._tensor, self._stages = ranks, tensor, stages
        self.whole_in_eval = False
        self._compared = False

    def switch(self, module: nn.Module) -> None:
        """Let models of transformers know of the parts.

        Raises:
            ConfigError: one would mix tokens in another way than by attention that is switched.
        """
        pipeline = pipeline_of(module, self._stages)
        if pipeline is not None and pipeline.of_model:
            raise ConfigError.about(
                SIZE,
                f"{SIZE}={self.ranks.size}: Pipeline.of runs the layers of a model of transformers, whose masks and "
                "loss are those of whole rows. Write the layers as a Pipeline, with sequence_attention(), "
                "or remove pipeline.stages.",
            )
        takes = switch(module, self.ranks, self._tensor)
        if models_of(module):
            model_takes(self.ranks, takes)

    def cut(self, batch: Any, module: nn.Module | None) -> Any:
        """This rank's part of a batch. Errors: ``cut_for``."""
        return cut_for(batch, self.ranks, module)

    def cut_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of the inputs of ``module``, by the names of its ``forward``.

        Raises:
            ConfigError: it is unknown how to cut them, or the module takes no positions.
        """
        signature = inspect.signature(module.forward)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        more = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]
        # In part, since the cut adds positions, and makes shift_labels of labels, which the module need not take.
        others = {name: value for name, value in kwargs.items() if name not in kinds and not more}
        named = {name: value for name, value in kwargs.items() if name not in others}
        bound = signature.bind_partial(*args, **named).arguments
        given = {name: value for name, value in bound.items() if name not in more} | others
        for name in more:
            given |= bound.get(name, {})
        if any(
            kinds.get(name) in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for name in given
        ):
            text = f"{SIZE}: {type(module).__name__}.forward has inputs without names, which cannot be cut"
            raise ConfigError.about(SIZE, f"{text}. Cut them before, with lt_zero.parallel.cut_sequence.")
        cut = self.cut(given, module)
        # What the caller has passed by a name that the module does not know, the call itself refuses.
        if unknown := [name for name in cut if name not in kinds and name not in others and not more]:
            raise ConfigError.about(
                SIZE,
                f"{SIZE}: {type(module).__name__}.forward takes no {unknown[0]!r}, which a part of a sequence needs. "
                f"Add the argument, or define {type(module).__name__}.{HOOK}(inputs), which returns what is passed.",
            )
        return dict(cut)

    @property
    def cuts_inputs(self) -> bool:
        """True if inputs of a model have to be cut: the user has not cut a batch by himself."""
        return not cuts_itself(self.ranks)

    def as_trained(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context of a forward of ``module``: in evaluation mode that of whole sequences, if these were asked for."""
        return whole_sequences() if self.whole_in_eval and not module.training else nullcontext()

    def compare_loss(self, loss: Tensor, world: World) -> None:
        """Warn if the user takes means of losses, and the first one differs over the parts of a sequence. Collective.

        That is a mean over the tokens of each part, which have labels in different numbers.
        """
        if self._compared or not means_are_of_user(self.ranks):
            return
        self._compared = True
        mine = float(loss.detach())
        told = world.host_gather((self.ranks.group.ranks, mine), "the first loss")
        parts = [value for ranks, value in told if ranks == self.ranks.group.ranks]
        if world.rank == 0 and not all(isclose(value, parts[0], rel_tol=1e-3) or isnan(value) for value in parts):
            warn(
                f"{SIZE}={self.ranks.size}: the first loss differs over the parts of a sequence ({parts}): it is a "
                "mean over the tokens of each part, which may have labels in different numbers. Gather the losses of "
                "all parts with the numbers of their labels, and take the weighted mean, as transformers' Trainer does."
            )

    def own_numbers(self, device_type: str) -> AbstractContextManager[None]:
        """Context in which this rank draws other numbers. See Note [Random numbers of sequence ranks]."""
        return seeded(seed_of(draw_seed(), self.ranks.rank), device_type)

    def watch(self, engine: Engine) -> Callable[[], None]:
        """Check that parts of sequences have seen each other, and how their loss was computed.

        That is before the first backward. Stages of a pipeline have some of the layers each, so that they check it when
        the returned function is called on all ranks, after the first batch. Collective then.
        """
        first = _FirstLoss(self.ranks, weakref.ref(engine), self.ranks.group.exchanges, means_taken())
        if pipeline_of(engine.root, self._stages) is None:
            engine.before_backward.append(_Once(partial(first.check, lambda value: [value])))
        return partial(first.check, partial(engine.world.host_gather, name="the first loss"))


class _Once:
    """A call that is made once."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self) -> None:
        call, self._call = self._call, lambda: None
        call()


@dataclass(frozen=True)
class _FirstLoss:
    """The first loss, before which there were so many exchanges, and means over tokens."""

    ranks: SequenceRanks
    engine: weakref.ref[Engine]
    exchanges: int
    means: int

    def check(self, of_ranks: Callable[[Any], list[Any]]) -> None:
        """Check how it was computed; ``of_ranks``: what those who compute it together say.

        Raises:
            ConfigError: no attention has exchanged anything; or tokens have labels, and a mean was taken of each part.
        """
        ranks, known = self.ranks, self.engine()
        if known is None:
            return
        mine = ranks.group.exchanges > self.exchanges, had_labels(ranks), means_taken() > self.means
        exchanged, labelled, averaged = map(any, zip(*of_ranks(mine), strict=True))
        text = f"{SIZE}={ranks.size}: {type(known.root).__name__} has computed a loss, but"
        if not exchanged:
            raise ConfigError.about(
                SIZE,
                f"{text} its tokens have not seen those of other ranks. Compute attention with "
                "lt_zero.parallel.sequence_attention(), or remove the key.",
            )
        if labelled and not averaged and not means_are_of_user(ranks):
            raise ConfigError.about(
                SIZE,
                f"{text} as a mean over the tokens of each rank, which have labels in different numbers. Compute it "
                "with lt_zero.parallel.token_mean(losses, labels != -100), with shift_labels for next tokens.",
            )
