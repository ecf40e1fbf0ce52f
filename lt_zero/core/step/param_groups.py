"""An optimizer's parameter groups, sharded: their fragments on this rank, and their options, the same on all ranks.

Note [Narrowing]
    Between steps ``param_groups[i]["params"]`` are the module's parameters, because schedulers, callbacks and
    ``toggle_optimizer`` look there. During ``step`` they are replaced by this rank's fragments: flat pieces of the
    master weights whose ``.grad`` is a piece of the accumulator. State is that of fragments, and keyed by parameter
    between steps. A fragment that is a full parameter has the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.compat import version_of, without_torch_function
from lt_zero.common.errors import differences
from lt_zero.common.moment_form import MomentForm, PlainMoments
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.layout import ALIGN, Piece
from lt_zero.core.engine.same_on_ranks import Snapshot, compare, digest_of

_MEMBERS = ("params", "param_names")
_PLAIN = frozenset((float, bool, str, type(None)))
# States of torch's optimizers that are one number of a parameter (mu_product: of NAdam); they stay in fp32.
_NUMBERS = ("step", "mu_product")

# ---- fragments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepParam:
    """A fragment in a step."""

    parameter: Parameter
    fragment: Parameter
    piece: Piece
    used: bool  # whether any rank has a gradient for its parameter


@dataclass(eq=False)
class BucketStep:
    """One bucket in a step.

    Attributes:
        members: its fragments on this rank, in the order of elements; there may be none.
        kernel_rows: ``KernelRows`` (fused_step.py) that are kept from step to step; None: there are none.
    """

    bucket: Bucket
    members: list[StepParam] = field(default_factory=list)
    kernel_rows: Any = None

    @cached_property
    def used(self) -> bool:
        """True if any rank has a gradient for one of this rank's fragments."""
        return any(member.used for member in self.members)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The elements [lo, hi) of the used fragments, joined if only alignment is between them."""
        return edges_of(member.piece for member in self.members if member.used)


def edges_of(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """The elements [lo, hi) of ordered ``pieces`` of a shard, joined if only alignment is between them."""
    edges: list[tuple[int, int]] = []
    for lo, hi in ((piece.offset, piece.offset + piece.numel) for piece in pieces):
        # Less than ALIGN elements between two pieces are zeros: a parameter in between would take at least as many.
        if edges and lo - edges[-1][1] < ALIGN:
            edges[-1] = edges[-1][0], hi
        else:
            edges.append((lo, hi))
    return edges


class StepPlan:
    """The plan of steps of one optimizer, as long as groups, used parameters and training are the same.

    Args:
        groups: has the parameters.
        trained: which ``groups.places`` have master weights, or get them.
        places: this optimizer's parameters, as (bucket, index), that have a gradient on any rank.

    Attributes:
        used: the indices of these, in order, by bucket.
        steps: by bucket, in the order of the groups; also those of which this rank has no fragment, but no frozen ones.
        fragments: of each group.
        swapped: the (parameter, fragment) of buckets.
        bucket_of: by id of a fragment.
    """

    def __init__(self, groups: ShardedParamGroups, trained: list[bool], places: Set[tuple[Bucket, int]]) -> None:
        self.trained = trained
        self.places = places
        self.used: dict[Bucket, list[int]] = {}
        self.steps: dict[Bucket, BucketStep] = {}
        for (bucket, index, parameter), trains in zip(groups.places(), trained, strict=True):
            if not trains:
                continue
            step = self.steps.setdefault(bucket, BucketStep(bucket))
            if used := (bucket, index) in places:
                self.used.setdefault(bucket, []).append(index)
            for piece, fragment in zip(bucket.pieces_of(index), groups.of(parameter), strict=True):
                step.members.append(StepParam(parameter, fragment, piece, used))
        for step in self.steps.values():
            step.members.sort(key=lambda member: member.piece.offset)
        for indices in self.used.values():
            indices.sort()
        owner = groups.engine.owner
        pairs = [[(p, fragment) for p in params for fragment in groups.of(p)] for params in groups.groups()]
        self.fragments = [[fragment for _, fragment in some] for some in pairs]
        self.swapped = [(p, fragment) for some in pairs for p, fragment in some if fragment is not p]
        self.bucket_of = {id(fragment): owner[id(p)][0] for p, fragment in self.swapped}


class ShardedParamGroups:
    """The fragments of one optimizer's parameters.

    Args:
        engine: owns the parameters; a parameter that it does not own is its own fragment.
        optimizer: the user's.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self._known: dict[int, list[Parameter]] = {}  # fragments by id of the parameter
        self._wide: list[list[Parameter]] | None = None  # the groups' parameters during a step
        self._grouped: list[list[Parameter]] = []  # the groups' parameters that the places are of
        self._places: list[tuple[Bucket, int, Parameter]] = []
        self._indices: dict[Bucket, set[int]] = {}
        self._owned: Set[tuple[Bucket, int]] = frozenset()
        self._plan: StepPlan | None = None  # the last one; None: the groups have changed since
        self._narrowed: StepPlan | None = None  # that of the running step

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
        # Frozen, in a bucket that has never trained; the same on all ranks.
        if not parameter.requires_grad and not bucket.weights.trains:
            return []
        bucket.weights.enable_training(bucket.name)
        shape, master = torch.Size(bucket.layout.spans[index].shape), bucket.weights.master
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
            self._grouped = [list(params) for params in groups]
            self._plan = None
            self._places = [(*owner[id(p)], p) for params in groups for p in params if id(p) in owner]
            self._owned = {(bucket, index) for bucket, index, _ in self._places}
            self._indices = {}
            for bucket, index, _ in self._places:
                self._indices.setdefault(bucket, set()).add(index)
        return self._places

    def indices(self) -> dict[Bucket, set[int]]:
        """This optimizer's parameters in each bucket: the same until a group changes; the caller leaves them so."""
        self.places()
        return self._indices

    def buckets(self) -> Set[Bucket]:
        """The buckets of ``places``."""
        return self.indices().keys()

    def plan(self, used: Set[tuple[Bucket, int]]) -> StepPlan:
        """The plan of a step of the parameters in ``used``, as (bucket, index), that have a gradient on any rank.

        The last plan if nothing has changed since; the caller leaves it as it is.
        """
        places = self.places()
        # Guards would intercept each access to ``requires_grad``, although it needs no values.
        with without_torch_function():
            trained = [parameter.requires_grad or bucket.weights.trains for bucket, _, parameter in places]
        mine = used & self._owned
        if self._plan is None or self._plan.places != mine or self._plan.trained != trained:
            self._plan = StepPlan(self, trained, mine)
        return self._plan

    # ---- groups and state --------------------------------------------------------------------------------------

    @property
    def narrowed(self) -> bool:
        """True if groups and state hold fragments."""
        return self._wide is not None

    def narrow(self, plan: StepPlan) -> None:
        """Replace parameters by fragments in groups and state, until ``widen``. See Note [Narrowing]."""
        assert self._wide is None, "a step of this optimizer failed half way; its groups hold fragments"
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._wide = [group["params"] for group in groups]
        self._narrowed = plan
        for group, fragments in zip(groups, plan.fragments, strict=True):
            group["params"] = list(fragments)
        for p, fragment in plan.swapped if state else ():
            if p in state:
                state[fragment] = state.pop(p)

    def drop(self, buckets: Set[Bucket]) -> None:
        """Remove the fragments of stepped buckets from the groups, until ``widen``."""
        if buckets and self._narrowed is not None:
            bucket_of = self._narrowed.bucket_of
            for group in self.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if bucket_of.get(id(p)) not in buckets]

    @contextmanager
    def only(self, members: Iterable[StepParam]) -> Iterator[None]:
        """Context in which groups have these fragments alone.

        What is done to groups inside is undone: counters in them are advanced by the step of the others only.
        """
        mine = {id(member.fragment) for member in members}
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        try:
            yield
        finally:
            for group, entries in zip(groups, before, strict=True):
                for key in group.keys() - entries.keys():
                    del group[key]
                group.update(entries)

    def widen(self) -> None:
        """Undo ``narrow``; no-op if groups hold parameters."""
        if self._wide is None:
            return
        state = self.optimizer.state
        for group, wide in zip(self.optimizer.param_groups, self._wide, strict=True):
            group["params"] = wide
        for p, fragment in self._narrowed.swapped if self._narrowed is not None else ():
            # torch computes the hash of a tensor in Python.
            if state and fragment in state:
                state[p] = state.pop(fragment)
            fragment.grad = None
        self._wide = self._narrowed = None

    def adopt_state(self) -> None:
        """Shard and cast state that the constructor made in the parameters' full shape (Adagrad)."""
        for bucket, index, parameter in self.places():
            state, shape = self.optimizer.state.get(parameter), bucket.layout.spans[index].shape
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
                        state[key] = bucket.storage.moments.kept(cut, key)


def widen_moments(state: dict[str, Any], fragment: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Replace the moments of a fragment by copies in ``dtype``; returns what was replaced."""
    form = PlainMoments(dtype)
    kept = {key: value for key, value in state.items() if _is_moment(key, value, fragment) and not form.keeps(value)}
    state.update({key: form.kept(value, key) for key, value in kept.items()})
    return kept


def keep_moments(state: dict[str, Any], fragment: Tensor, form: MomentForm, kept: Mapping[str, Tensor]) -> None:
    """Bring a fragment's moments into ``form``, in the tensors that ``widen_moments`` has replaced."""
    for key, value in state.items():
        if _is_moment(key, value, fragment) and not form.keeps(value):
            state[key] = kept[key].copy_(value) if key in kept else form.kept(value, key)


def _is_moment(key: str, value: Any, fragment: Tensor) -> bool:
    """True if a state has a value for each element of ``fragment``: names tell 0D parameters' moments from numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() != fragment.numel():
        return False
    return value.dim() > 0 or (fragment.dim() == 0 and key not in _NUMBERS)


def _are_same(groups: Sequence[Sequence[Parameter]], others: Sequence[Sequence[Parameter]]) -> bool:
    """True if both have the same parameters in the same order."""
    if len(groups) != len(others):
        return False
    for some, other in zip(groups, others, strict=True):
        if len(some) != len(other) or not all(map(is_, some, other)):
            return False
    return True


# ---- options ---------------------------------------------------------------------------------------------------------


class StepOptions:
    """The snapshots of one optimizer, made anew only when something has changed.

    Args:
        fragments: of the optimizer. Trainable parameters that their engine does not own are a problem.
    """

    def __init__(self, fragments: ShardedParamGroups) -> None:
        self._fragments = fragments
        self._engine = fragments.engine
        self._optimizer = fragments.optimizer
        self._places: list[Any] | None = None  # of the groups whose members were seen last
        self._member_names: list[tuple[str, ...]] = []
        self._members_digest = b""
        self._foreign: list[Any] = []  # parameters that the engine does not own
        self._raw: list[tuple[Any, ...] | None] = []  # the values of each group; None: some may change in place
        self._values: list[dict[str, Any]] = []
        self._last: Snapshot | None = None
        self._read: dict[int, tuple[Tensor, int, Any]] = {}  # tensors on a GPU, at the version that was read

    def snapshot(self) -> Snapshot:
        """A snapshot of the options and members that the optimizer's groups have now."""
        groups = self._optimizer.param_groups
        if (places := self._fragments.places()) is not self._places:
            self._places = places
            self._see_members()
        unfrozen = any([p.requires_grad for p in self._foreign])
        if self._last is not None and unfrozen == bool(self._last.problem) and self._has_same(groups):
            return self._last
        values = self.values()
        if self._last is None or unfrozen != bool(self._last.problem) or values != self._values:
            digest = digest_of((self._members_digest, [sorted(some.items()) for some in values]))
            names, kind = self._member_names, type(self._optimizer).__name__
            self._last = Snapshot(digest, lambda: _facts(kind, values, names), self._problem() if unfrozen else "")
            self._values = values
        fixed = [all(_is_fixed(v) for k, v in group.items() if k not in _MEMBERS) for group in groups]
        self._raw = [tuple(group.values()) if kept else None for group, kept in zip(groups, fixed, strict=True)]
        return self._last

    def values(self) -> list[dict[str, Any]]:
        """The options of each group, in plain types."""
        groups = self._optimizer.param_groups
        return [{k: self._plain(v) for k, v in group.items() if k not in _MEMBERS} for group in groups]

    def _has_same(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """True if the groups have the very objects of the last snapshot, none of which can change in place."""
        if len(groups) != len(self._raw):
            return False
        for group, raw in zip(groups, self._raw, strict=True):
            if raw is None or len(raw) != len(group) or not all(map(is_, group.values(), raw)):
                return False
        return True

    def _see_members(self) -> None:
        groups = self._fragments.groups()
        self._foreign = [p for some in groups for p in some if id(p) not in self._engine.owner]
        known, kind = self._names(), type(self._optimizer).__name__
        self._last = None
        self._member_names = [tuple(repr(known.get(id(p), f"#{n}")) for n, p in enumerate(some)) for some in groups]
        self._members_digest = digest_of((kind, self._member_names))

    def _names(self) -> dict[int, str]:
        owned = {key: bucket.layout.spans[index].name for key, (bucket, index) in self._engine.owner.items()}
        if not self._foreign:
            return owned
        return {id(p): name for name, p in self._engine.root.named_parameters()} | owned

    def _problem(self) -> str:
        known = self._names()
        parameter = next(p for p in self._foreign if p.requires_grad)
        members = [list(map(id, some)) for some in self._fragments.groups()]
        group, place = next(
            (number, ids.index(id(parameter))) for number, ids in enumerate(members) if id(parameter) in ids
        )
        name = repr(known[id(parameter)]) if id(parameter) in known else f"number {place}"
        whose = "the model got it after set-up" if id(parameter) in known else "it is not one of the model"
        return (
            f"{type(self._optimizer).__name__}, group {group}, has parameter {name} {tuple(parameter.shape)}, which "
            f"the engine does not know: {whose}. No rank would get the others' gradients for it. Make it a parameter "
            "of the model before set-up (in __init__, or configure_model of a LightningModule)."
        )

    def _plain(self, value: Any) -> Any:
        """Convert ``value`` to a form that ``==`` compares and whose ``repr`` is the same on all ranks."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Real):
            return float(value)
        if isinstance(value, Tensor):
            return self._number(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._plain, value))
        if isinstance(value, Mapping):
            return tuple((str(key), self._plain(item)) for key, item in value.items())
        return type(value).__qualname__

    def _number(self, value: Tensor) -> Any:
        """The value of a tensor of one element. One on a GPU is waited for only if it has changed."""
        if value.numel() != 1:
            return tuple(value.shape)
        if value.device.type == "cpu":
            return value.item()
        known, version, read = self._read.get(id(value), (None, 0, None))
        if known is not value or version != version_of(value):
            read = value.item()
            self._read[id(value)] = value, version_of(value), read
        return read


def _is_fixed(value: Any) -> bool:
    """True if a value cannot change in place."""
    return type(value) in _PLAIN or type(value) is int or (type(value) is tuple and all(map(_is_fixed, value)))


def _facts(kind: str, values: Sequence[Mapping[str, Any]], members: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    facts: dict[str, Any] = {"the optimizer": kind, "the number of parameter groups": len(values)}
    for number, (group, names) in enumerate(zip(values, members, strict=True)):
        place = f"{kind}, group {number}" + (f" ({group['name']})" if group.get("name") else "")
        facts |= {f"{place}, {key}": value for key, value in group.items()}
        facts[f"{place}, the number of parameters"] = names
    return facts


def compare_optimizers(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Compare all optimizers of a run before the first of them is sharded. Collective.

    Raises:
        RuntimeError: on all ranks, if they differ, or have parameters that the engine does not own.
    """
    if engine.peers.alone:
        return
    found = [StepOptions(ShardedParamGroups(engine, optimizer)).snapshot() for optimizer in optimizers]
    facts: dict[str, Any] = {"the number of optimizers": len(optimizers)}
    for number, snapshot in enumerate(found):
        place = f"optimizer {number}: " if len(found) > 1 else ""
        facts |= {f"{place}{key}": value for key, value in snapshot.facts().items()}
    problem = next((snapshot.problem for snapshot in found if snapshot.problem), "")
    compare(engine.peers, Snapshot(digest_of([s.digest for s in found]), lambda: facts, problem), "optimizers")


def compare_options(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Compare the options of groups between ranks that have other parts of a model. Collective if there are any.

    A checkpoint has each group once, so that the stages of a pipeline may not differ in them.

    Raises:
        RuntimeError: on all ranks, if they differ.
    """
    mine: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        place = f"{kind} (optimizer {number})" if len(optimizers) > 1 else kind
        mine[f"optimizer {number}"] = kind
        for index, options in enumerate(StepOptions(ShardedParamGroups(engine, optimizer)).values()):
            mine |= {f"{place}, group {index}, {key}": value for key, value in options.items()}
    told = engine.peers.ask_all(mine, "options of optimizers")
    found: dict[str, list[Any]] = {}
    for theirs in told:
        for key, value in theirs.items():
            found.setdefault(key, []).append(value)
    wrong = [key for key, values in found.items() if any(value != values[0] for value in values)]
    if wrong:
        differ = {rank: {key: theirs[key] for key in wrong if key in theirs} for rank, theirs in enumerate(told)}
        raise RuntimeError(
            f"The stages of a pipeline differ: {differences(differ)}. They need the same parameter groups, with the "
            "same options: make all groups on each rank; one may be without parameters ({'params': []})."
        )


def keep_assigned(fragment: Parameter, row: Tensor) -> bool:
    """Copy a fragment that is not a view of ``row`` any more to ``row``; returns whether it was one."""
    moved = fragment.data_ptr() != row.data_ptr()
    if moved:
        row.copy_(fragment.detach())
    return moved


def row_of(bucket: Bucket, member: StepParam) -> Tensor:
    """The master weights of a fragment, in its shape."""
    lo = member.piece.offset
    return bucket.weights.master_rows[lo : lo + member.piece.numel].view(member.fragment.shape)


def grad_of(bucket: Bucket, member: StepParam) -> Tensor | None:
    """The gradient of a fragment, in its shape, which torch's step may change in place.

    None: no rank used it (reduced_grads.py, Note [Unused parameters]).
    """
    return bucket.grads.of(member.piece).view(member.fragment.shape) if member.used else None
