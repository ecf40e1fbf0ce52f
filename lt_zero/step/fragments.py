"""This rank's fragments of an optimizer's parameters, and the swap of parameters for fragments during a step.

Note [Narrowing]
    Between steps ``param_groups[i]["params"]`` are the module's parameters, because schedulers, callbacks and
    ``toggle_optimizer`` look there. During ``step`` they are replaced by this rank's fragments: flat pieces of the
    master weights whose ``.grad`` is a piece of the accumulator. State is that of fragments, and keyed by parameter
    between steps. A fragment that is a full parameter has the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

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
    """The fragments of one optimizer's parameters.

    Args:
        engine: owns the parameters; a parameter that it does not own is its own fragment.
        optimizer: the user's.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self._known: dict[int, list[Parameter]] = {}  # fragments by id of the parameter
        self._wide: list[list[Parameter]] | None = None

    def of(self, parameter: Parameter) -> list[Parameter]:
        """This rank's fragment of ``parameter`` (none or one), or ``parameter`` if the engine does not own it.

        A frozen parameter has none until it is unfrozen: it needs no master weights.
        """
        place = self.engine.owner.get(id(parameter))
        if place is None:
            return [parameter]
        bucket, index = place
        if id(parameter) not in self._known:
            if _rests(bucket, parameter):
                return []
            bucket.weights.enable_training()
            shape = torch.Size(bucket.shapes[index])
            master = bucket.weights.master
            assert master is not None
            self._known[id(parameter)] = [
                cast(Parameter, master.lend(p.offset, _shape_of(p, shape), Parameter)) for p in bucket.pieces_of(index)
            ]
        return self._known[id(parameter)]

    def groups(self) -> list[list[Parameter]]:
        """The module's parameters, by group. See Note [Narrowing]."""
        return self._wide if self._wide is not None else [g["params"] for g in self.optimizer.param_groups]

    def parameters(self) -> list[Parameter]:
        """The module's parameters, in the order of the groups."""
        return [p for params in self.groups() for p in params]

    def places(self) -> list[tuple[Bucket, int, Parameter]]:
        """(bucket, index in it, parameter) of all parameters that the engine owns, in the order of the groups."""
        owner = self.engine.owner
        return [(*owner[id(p)], p) for p in self.parameters() if id(p) in owner]

    def indices(self) -> dict[Bucket, set[int]]:
        """This optimizer's parameters in each bucket."""
        found: dict[Bucket, set[int]] = {}
        for bucket, index, _ in self.places():
            found.setdefault(bucket, set()).add(index)
        return found

    def members(self, used: Callable[[Bucket, int], bool]) -> dict[Bucket, list[Member]]:
        """The fragments by bucket, in order; also buckets of which this rank has no fragment, but no frozen ones."""
        found: dict[Bucket, list[Member]] = {}
        for bucket, index, parameter in self.places():
            if _rests(bucket, parameter):
                continue
            members = found.setdefault(bucket, [])
            for piece, fragment in zip(bucket.pieces_of(index), self.of(parameter), strict=True):
                members.append(Member(parameter, fragment, piece, used(bucket, index)))
        return {bucket: sorted(members, key=lambda m: m.piece.offset) for bucket, members in found.items()}

    # ---- groups and state --------------------------------------------------------------------------------------

    @property
    def narrowed(self) -> bool:
        """Whether groups and state hold fragments."""
        return self._wide is not None

    def narrow(self) -> None:
        """Replace parameters by fragments in groups and state. See Note [Narrowing]."""
        assert self._wide is None, "a step of this optimizer failed half way; its groups hold fragments"
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._wide = [group["params"] for group in groups]
        for group, wide in zip(groups, self._wide, strict=True):
            group["params"] = [fragment for p in wide for fragment in self.of(p)]
            for p in wide:
                for fragment in self.of(p):
                    if fragment is not p and p in state:
                        state[fragment] = state.pop(p)

    def drop(self, buckets: set[Bucket]) -> None:
        """Remove the fragments of stepped buckets from the groups, until ``widen``."""
        if buckets:
            done = {id(f) for bucket, _, p in self.places() if bucket in buckets for f in self.of(p)}
            for group in self.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in done]

    def widen(self) -> None:
        """Undo ``narrow``; no-op if groups hold parameters."""
        if self._wide is None:
            return
        state = self.optimizer.state
        for group, wide in zip(self.optimizer.param_groups, self._wide, strict=True):
            group["params"] = wide
            for p in wide:
                for fragment in self.of(p):
                    if fragment is not p and fragment in state:
                        state[p] = state.pop(fragment)
                    fragment.grad = None if fragment is not p else fragment.grad
        self._wide = None

    def adopt_state(self) -> None:
        """Shard and cast state that the constructor made in the parameters' full shape (Adagrad)."""
        for bucket, index, parameter in self.places():
            state = self.optimizer.state.get(parameter)
            if not state:
                continue
            pieces = bucket.pieces_of(index)
            if not pieces:
                del self.optimizer.state[parameter]
            for piece in pieces:
                for key, value in state.items():
                    cut = cut_state(value, bucket.shapes[index], piece.lo, piece.hi)
                    # The constructor used the dtype of the compute copy.
                    wide = cut is not value and cut.is_floating_point()
                    state[key] = cut.to(bucket.step_dtype) if wide else cut


def _rests(bucket: Bucket, parameter: Parameter) -> bool:
    """Whether ``parameter`` is frozen, in a bucket that has never trained. The same on all ranks."""
    return not parameter.requires_grad and not bucket.weights.trains


def cut_state(value: Any, shape: tuple[int, ...], lo: int, hi: int) -> Any:
    """Elements [lo, hi) of a state tensor that has its parameter's shape; any other value unchanged."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dim() == 0:
        return value
    return _shaped(value.reshape(-1)[lo:hi].clone(), shape)


def _shaped(row: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``row`` in the parameter's shape if it has all elements, else 1D."""
    return row.view(shape) if row.numel() == torch.Size(shape).numel() else row


def _shape_of(piece: Piece, shape: torch.Size) -> torch.Size:
    """The shape of a fragment, as ``_shaped``."""
    return shape if piece.numel == shape.numel() else torch.Size([piece.numel])
