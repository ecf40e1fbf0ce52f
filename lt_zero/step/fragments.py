"""This rank's fragments of an optimizer's parameters, and the swap of parameters for fragments during a step.

Note [Narrowing]
    Between steps ``param_groups[i]["params"]`` are the module's parameters, because schedulers, callbacks and
    ``toggle_optimizer`` look there. During ``step`` they are replaced by this rank's fragments: flat pieces of the
    master weights whose ``.grad`` is a piece of the accumulator. State is that of fragments, and keyed by parameter
    between steps. A fragment that is a full parameter has the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import is_
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.compat import without_torch_function
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.engine import Engine
from lt_zero.engine.layout import Piece


@dataclass(frozen=True)
class Member:
    """A fragment in the current step."""

    parameter: Parameter
    fragment: Parameter
    piece: Piece
    used: bool  # whether any rank has a gradient for its parameter


class Fragments:
    """The fragments of one optimizer's parameters. What a step needs of them is kept until groups or training change.

    Args:
        engine: owns the parameters; a parameter that it does not own is its own fragment.
        optimizer: the user's.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self._known: dict[int, list[Parameter]] = {}  # fragments by id of the parameter
        self._wide: list[list[Parameter]] | None = None  # the groups' parameters during a step
        self._swapped: list[tuple[Parameter, Parameter]] = []  # (parameter, fragment) during a step
        self._grouped: list[list[Parameter]] = []  # the groups' parameters that the places are of
        self._places: list[tuple[Bucket, int, Parameter]] = []
        # Of the last ``members``: which places had master weights, which were used, and the result.
        self._members: tuple[list[bool], Container[tuple[Bucket, int]], dict[Bucket, list[Member]]] | None = None

    def of(self, parameter: Parameter) -> list[Parameter]:
        """This rank's fragment of ``parameter`` (none or one), or ``parameter`` if the engine does not own it.

        A frozen parameter has none until it is unfrozen: it needs no master weights.
        """
        place = self.engine.owner.get(id(parameter))
        if place is None:
            return [parameter]
        if id(parameter) in self._known:
            return self._known[id(parameter)]
        bucket, index = place
        if _needs_no_master(bucket, parameter):
            return []
        bucket.weights.enable_training()
        shape, master = torch.Size(bucket.shapes[index]), bucket.weights.master
        assert master is not None
        found = self._known[id(parameter)] = []
        for piece in bucket.pieces_of(index):
            own = shape if piece.numel == shape.numel() else torch.Size([piece.numel])
            found.append(cast(Parameter, master.lend(piece.offset, own, Parameter)))
        return found

    def groups(self) -> list[list[Parameter]]:
        """The module's parameters, by group. See Note [Narrowing]."""
        return self._wide if self._wide is not None else [g["params"] for g in self.optimizer.param_groups]

    def parameters(self) -> list[Parameter]:
        """The module's parameters, in the order of the groups."""
        return [p for params in self.groups() for p in params]

    def places(self) -> list[tuple[Bucket, int, Parameter]]:
        """A (bucket, index in it, parameter) for each parameter that the engine owns, in the order of the groups.

        The same list until a group changes; the caller leaves it as it is.
        """
        groups = self.groups()
        if not _are_same(groups, self._grouped):
            owner = self.engine.owner
            self._grouped, self._members = [list(params) for params in groups], None
            self._places = [(*owner[id(p)], p) for params in groups for p in params if id(p) in owner]
        return self._places

    def indices(self) -> dict[Bucket, set[int]]:
        """This optimizer's parameters in each bucket."""
        found: dict[Bucket, set[int]] = {}
        for bucket, index, _ in self.places():
            found.setdefault(bucket, set()).add(index)
        return found

    def members(self, used: Container[tuple[Bucket, int]]) -> dict[Bucket, list[Member]]:
        """The fragments by bucket, in order; also buckets of which this rank has no fragment, but no frozen ones.

        ``used``: the parameters, as (bucket, index), that have a gradient on any rank. The lists are those of the last
        call if nothing has changed; the caller leaves them as they are.
        """
        places = self.places()
        # Guards would intercept each access to ``requires_grad``, although it needs no values.
        with without_torch_function():
            trained = [not _needs_no_master(bucket, parameter) for bucket, _, parameter in places]
        if self._members is not None and self._members[:2] == (trained, used):
            return dict(self._members[2])
        found: dict[Bucket, list[Member]] = {}
        for (bucket, index, parameter), trains in zip(places, trained, strict=True):
            if not trains:
                continue
            members = found.setdefault(bucket, [])
            for piece, fragment in zip(bucket.pieces_of(index), self.of(parameter), strict=True):
                members.append(Member(parameter, fragment, piece, (bucket, index) in used))
        for members in found.values():
            members.sort(key=lambda m: m.piece.offset)
        self._members = trained, used, found
        return dict(found)

    # ---- groups and state --------------------------------------------------------------------------------------

    @property
    def narrowed(self) -> bool:
        """True if groups and state hold fragments."""
        return self._wide is not None

    def narrow(self) -> None:
        """Replace parameters by fragments in groups and state. See Note [Narrowing]."""
        assert self._wide is None, "a step of this optimizer failed half way; its groups hold fragments"
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._wide, self._swapped = [group["params"] for group in groups], []
        for group in groups:
            pairs = [(p, f) for p in group["params"] for f in self._known.get(id(p)) or self.of(p)]
            group["params"] = [fragment for _, fragment in pairs]
            self._swapped += [(p, fragment) for p, fragment in pairs if fragment is not p]
        for p, fragment in self._swapped if state else ():
            if p in state:
                state[fragment] = state.pop(p)

    def drop(self, buckets: set[Bucket]) -> None:
        """Remove the fragments of stepped buckets from the groups, until ``widen``."""
        if buckets:
            owner = self.engine.owner
            done = {id(fragment) for p, fragment in self._swapped if owner[id(p)][0] in buckets}
            for group in self.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in done]

    def widen(self) -> None:
        """Undo ``narrow``; no-op if groups hold parameters."""
        if self._wide is None:
            return
        state = self.optimizer.state
        for group, wide in zip(self.optimizer.param_groups, self._wide, strict=True):
            group["params"] = wide
        for p, fragment in self._swapped:
            if fragment in state:
                state[p] = state.pop(fragment)
            fragment.grad = None
        self._wide, self._swapped = None, []

    def adopt_state(self) -> None:
        """Shard and cast state that the constructor made in the parameters' full shape (Adagrad)."""
        for bucket, index, parameter in self.places():
            state, shape = self.optimizer.state.get(parameter), bucket.shapes[index]
            if not state:
                continue
            pieces = bucket.pieces_of(index)
            if not pieces:
                del self.optimizer.state[parameter]
            for piece in pieces:
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                        value = self.engine.parts.cut(parameter, value)
                        cut = value.reshape(-1)[piece.lo : piece.hi].clone()
                        cut = cut.view(shape) if cut.numel() == value.numel() else cut
                        # The constructor used the dtype of the compute copy.
                        state[key] = cut.to(bucket.step_dtype) if cut.is_floating_point() else cut


def _are_same(groups: Sequence[Sequence[Parameter]], others: Sequence[Sequence[Parameter]]) -> bool:
    """True if both have the same parameters in the same order."""
    if len(groups) != len(others):
        return False
    return all(
        len(some) == len(other) and all(map(is_, some, other)) for some, other in zip(groups, others, strict=True)
    )


def _needs_no_master(bucket: Bucket, parameter: Parameter) -> bool:
    """True if ``parameter`` is frozen, in a bucket that has never trained. The same on all ranks."""
    return not parameter.requires_grad and not bucket.weights.trains
