"""Checks that all ranks have the same model when it is set up, and in training the same options of optimizers.

Note [Compared without a message]
    Ranks that step with different learning rates, or clip to different norms, move the parts of a weight differently,
    and nothing else would tell. A step exchanges flags of used parameters in any case (step_flags.py), so a digest
    travels with them: 16 bytes, whose element-wise maximum over the ranks tells whether all are equal. It covers what
    the steps since the last exchange were taken with, what the optimizers of these steps have now, which parameters
    are frozen, and trainable parameters that the engine does not know. So a change is found before its step, or if it
    came between backward and step, in the next exchange; and before weights leave the engine
    (``Engine.prepare_reading``). Digests are computed again only when values have changed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from lt_zero.common.compat import without_torch_function
from lt_zero.common.errors import differences
from lt_zero.common.users_code import warn
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.step_flags import Section

_DIGEST = 8  # bytes
_KEPT = 3  # exchanges whose facts are kept: where ranks may be late, a step waits for the one before
_ATTRIBUTE = "attribute "  # begins facts about modules of which it is not known whether a forward runs them
_REMEDY = "Every rank has to compute the same: look for values that depend on the rank, its data or its environment."

Facts = Mapping[str, Any]  # what -> its value on this rank


def _bits_of(tensor: Tensor) -> str:
    """A digest of the bits of ``tensor``."""
    rows = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(rows.data, digest_size=_DIGEST).hexdigest()


def digest_of(value: object) -> bytes:
    """The digest of a value of plain types, or of anything whose ``repr`` is the same on all ranks."""
    return hashlib.blake2b(repr(value).encode(), digest_size=_DIGEST).digest()


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank, for a comparison.

    Attributes:
        digest: equal on ranks that have the same.
        facts: for the error, if ranks differ.
        problem: why no rank can go on with it, even if all have the same; "": all can.
    """

    digest: bytes
    facts: Callable[[], Facts]
    problem: str = ""

    @classmethod
    def of(cls, facts: Facts) -> Snapshot:
        return cls(digest_of(sorted(facts.items())), lambda: facts)


class _Exchange(NamedTuple):
    """An exchange: its number, how many notes there were until then, and what it covered, first ``taken`` notes."""

    number: int
    notes: int
    covered: list[Snapshot]
    taken: int


class Source(Protocol):
    """An object with values that change in training."""

    def snapshot(self) -> Snapshot: ...


class SameOnRanks:
    """Compares values of an engine's ranks in training. See Note [Compared without a message].

    Args:
        peers: the ranks that have the same parameters.
        parameters: that the engine owns.
    """

    def __init__(self, peers: Ranks, root: nn.Module, parameters: Iterable[Parameter]) -> None:
        self._peers, self._root = peers, root
        self._owned = {id(p): p for p in parameters}
        self._noted: list[Snapshot] = []  # snapshots of steps, until an exchange that had them is checked
        # Of these steps. References are strong, and dropped by the check: were they weak, the garbage collector, which
        # runs at other times on other ranks, would decide what is compared.
        self._sources: dict[Source, None] = {}
        self._dropped = 0  # notes before those
        self._told: deque[_Exchange] = deque(maxlen=_KEPT)
        self._error = ""  # steps were taken with different values: what follows, such as a save, fails as well
        self._trains: bytes | None = None  # ``requires_grad`` of the owned parameters, as in ``_frozen``
        self._frozen = Snapshot.of({})
        self._seen = _registered()
        self._unknown: list[tuple[str, Parameter]] = []

    def note(self, source: Source) -> None:
        """Note that a step is taken with the current values of ``source``.

        Raises:
            RuntimeError: it has a problem.
        """
        if self._peers.alone:
            return
        snapshot = source.snapshot()
        if snapshot.problem:
            raise RuntimeError(snapshot.problem)
        self._noted.append(snapshot)
        self._sources[source] = None

    def note_value(self, what: str, value: float) -> None:
        """Note that the next step is taken with this value."""
        if not self._peers.alone:
            self._noted.append(Snapshot.of({what: float(value)}))

    def note_edits(self, values: Mapping[str, Tensor]) -> None:
        """Note that user code has given parameters these values, by name, on this rank, and has to on all."""
        if not self._peers.alone:
            facts = {f"the value that a forward gave to parameter {name!r}": _bits_of(v) for name, v in values.items()}
            self._noted.append(Snapshot.of(facts))

    def begin(self, source: Source) -> None:
        """Compare at once what a new source has. Collective.

        Raises:
            RuntimeError: on all ranks, if they differ, or have a problem.
        """
        if not self._peers.alone:
            compare(self._peers, source.snapshot(), "optimizers")
            self._sources[source] = None

    def check_now(self) -> None:
        """Compare what steps were taken with, unless the last exchange has. Collective. Raises as ``compare``."""
        if self._error:
            raise RuntimeError(self._error)
        if self._noted:
            flags = torch.tensor(self._cover([]), dtype=torch.uint8)
            self._peers.host_max(flags, "what was stepped with").wait()
            self.check(flags.tolist())
            self._dropped += len(self._noted)
            self._noted = []

    def section(self) -> Section:
        """The flags of a step by which values are compared."""
        return Section("options", self._report, self.check, nothing=bytes(_NOTHING))

    def _report(self) -> tuple[int, ...]:
        """This rank's bytes of an exchange; ``check`` gets their maximum over the ranks."""
        if self._peers.alone:
            return _NOTHING
        now = [source.snapshot() for source in self._sources]
        return self._cover([*now, self._frozen_parameters(), *self._find_unknown()])

    def _cover(self, now: list[Snapshot]) -> tuple[int, ...]:
        """The flags of an exchange about the steps so far, and what there is ``now``."""
        covered, taken = [*self._noted, *now], len(self._noted)
        number = self._told[-1].number + 1 if self._told else 0
        self._told.append(_Exchange(number, self._dropped + taken, covered, taken))
        return _flags(b"".join([snapshot.digest for snapshot in covered]))

    def check(self, flags: Sequence[int]) -> None:
        """Check the outcome of the last exchange, or of the one before. Other exchanges need not be checked.

        Raises:
            RuntimeError: on all ranks, if they differ, or have a problem.
        """
        if self._error:
            raise RuntimeError(self._error)
        if not _equal(flags):
            text, taken = self._difference()
            self._error = text if taken else ""
            raise RuntimeError(text)
        for snapshot in self._told[-1].covered if self._told else ():
            if snapshot.problem:
                raise RuntimeError(snapshot.problem)
        self._sources = {}
        # Notes that the exchange before this one covered were compared in both, and can go.
        if len(self._told) > 1:
            del self._noted[: max(0, self._told[-2].notes - self._dropped)]
            self._dropped = max(self._dropped, self._told[-2].notes)

    def _difference(self) -> tuple[str, bool]:
        """The first difference between what the ranks had, and whether steps were taken with it. Collective."""
        taken = {exchange.number: exchange.taken for exchange in self._told}
        mine = {e.number: [(s.digest, dict(s.facts()), s.problem) for s in e.covered] for e in self._told}
        every = self._peers.host_gather(mine, "what the ranks step with")
        for number in sorted(set.intersection(*map(set, every))):
            rows = [ran[number] for ran in every]
            for place in range(max(map(len, rows))):
                found = [row[place] if place < len(row) else (b"", {}, "") for row in rows]
                if len({digest for digest, _, _ in found}) > 1:
                    text = _sentence(self._peers, [facts for _, facts, _ in found], [text for _, _, text in found])
                    return text, place < taken[number]
        return f"The ranks step with different options. {_REMEDY}", True

    def _frozen_parameters(self) -> Snapshot:
        """A snapshot of the frozen parameters: a rank that froze others would count as one that uses none."""
        with without_torch_function():
            trains = bytes([p.requires_grad for p in self._owned.values()])
        if trains != self._trains:
            frozen = frozenset(key for key, one in zip(self._owned, trains, strict=True) if not one)
            self._trains = trains
            self._frozen = Snapshot(digest_of(trains), lambda: self._named(frozen))
        return self._frozen

    def _named(self, frozen: Collection[int]) -> Facts:
        """Facts, by name, that say of each owned parameter if it is frozen or trainable."""
        named = {f"parameter {name!r}": id(p) for name, p in self._root.named_parameters()}
        return {name: "frozen" if key in frozen else "trainable" for name, key in named.items() if key in self._owned}

    def _find_unknown(self) -> list[Snapshot]:
        """Trainable parameters of the model that the engine does not know, because they were added later."""
        seen = _registered()
        if seen != self._seen:
            self._seen = seen
            with without_torch_function():
                named = self._root.named_parameters()
                self._unknown = [(name, p) for name, p in named if id(p) not in self._owned]
        names = [name for name, parameter in self._unknown if parameter.requires_grad]
        if not names:
            return []
        shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text = (
            f"Parameter {shown} of {type(self._root).__name__} was added or replaced after the model was sharded: no "
            "rank would get the others' gradients for it. Make it before training starts (in __init__, or "
            "configure_model of a LightningModule), or freeze it with requires_grad_(False) if it is not trained."
        )
        facts = dict.fromkeys((f"trainable parameter {name!r}, which was added after set-up," for name in names), True)
        return [Snapshot(digest_of(names), lambda: facts, text)]


def compare(ranks: Ranks, snapshot: Snapshot, what: str) -> None:
    """Compare what ``ranks`` have. Collective.

    Modules without parameters that only some ranks have, as attributes of a class outside of torch, are no error as
    long as nothing else differs: a script may make one where it logs, on rank 0 only. A forward that uses them would
    differ, so a warning says so.

    Raises:
        RuntimeError: on all ranks, if they differ, or have a problem.
    """
    flags = torch.tensor(_flags(snapshot.digest), dtype=torch.uint8)
    ranks.host_max(flags, what).wait()
    if not _equal(flags.tolist()):
        found = ranks.host_gather((dict(snapshot.facts()), snapshot.problem), what)
        of_ranks = [facts for facts, _ in found]
        problems = [text for _, text in found]
        if any(problems) or not _only_attributes_are_missing(of_ranks):
            raise RuntimeError(_sentence(ranks, of_ranks, problems))
        if ranks.rank == 0:
            warn(
                f"The ranks have different modules: {differences(dict(zip(ranks.ranks, of_ranks, strict=True)))}. If a"
                " forward uses them, the ranks compute different things: make them on every rank."
            )
    if snapshot.problem:
        raise RuntimeError(snapshot.problem)


def _only_attributes_are_missing(of_ranks: Sequence[Facts]) -> bool:
    """True if all facts in which ranks differ are settings of modules that some ranks have not."""
    for key in {key for facts in of_ranks for key in facts}:
        values = {facts[key] for facts in of_ranks if key in facts}
        missing = any(key not in facts for facts in of_ranks)
        if len(values) > 1 or (missing and not key.startswith(_ATTRIBUTE)):
            return False
    return True


def _sentence(ranks: Ranks, facts: Sequence[Facts], problems: Sequence[str]) -> str:
    told = [f"Rank {rank}: {text}" for rank, text in zip(ranks.ranks, problems, strict=True) if text]
    differ = dict(zip(ranks.ranks, facts, strict=True))
    return " ".join(told) if told else f"The ranks differ: {differences(differ)}. {_REMEDY}"


# An engine that steps as it did before hashes nothing: one entry for each of a few engines.
@lru_cache(maxsize=8)
def _flags(data: bytes) -> tuple[int, ...]:
    digest = hashlib.blake2b(data, digest_size=_DIGEST).digest()
    return *digest, *(255 - byte for byte in digest)


_NOTHING = (0,) * _DIGEST + (255,) * _DIGEST  # the flags where nothing is compared


def _equal(flags: Sequence[int]) -> bool:
    """True if all ranks had the same digest: the maximum of a byte, and that of its complement, are complements."""
    return [255 - byte for byte in flags[:_DIGEST]] == list(flags[_DIGEST:])


def compare_models(
    ranks: Ranks,
    root: nn.Module,
    policy: DtypePolicy | None = None,
    apart: Collection[Parameter] = (),
    more: Facts | None = None,
) -> None:
    """Compare the models of ``ranks``: before the first collective that depends on them. Collective.

    Args:
        policy: of a model that is about to be sharded: it is compared, too, and buffers, which are then broadcast.
        apart: parameters whose shapes may differ between ranks.
        more: what else the ranks have to have alike.

    Raises:
        RuntimeError: on all ranks, if they differ; names parameters, ranks and values.
    """
    if not ranks.alone:
        facts: dict[str, Any] = {}
        if policy is not None:
            facts |= {"precision": policy.mode, "the dtype of computation": str(policy.compute)}
        facts |= model_facts(root, policy is not None, apart)
        compare(ranks, Snapshot.of(facts | dict(more or {})), "the model's parameters")


def model_facts(
    root: nn.Module,
    buffers: bool = True,
    apart: Collection[Parameter] = (),
    prefix: str = "",
    leaves_out: Collection[str] = (),
) -> dict[str, Any]:
    """List what ranks with the same model have alike, by name: parameters, settings of torch's modules, ``buffers``.

    Args:
        apart: parameters whose shapes may differ between ranks.
        prefix: of all names.
        leaves_out: the names of modules that are left out, with all that is inside of them.
    """
    facts = dict[str, Any]()
    settings = dict[str, str]()
    seen = dict[str, nn.Module]()  # by path; a module comes before those inside of it
    order = dict[str, str]()
    first, differ = dict[int, str](), set(map(id, apart))
    # Parameters that are sharded already have guards, which would intercept the access.
    with without_torch_function():
        for path, module in root.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
            if any(path == name or path.startswith(f"{name}.") for name in leaves_out):
                continue
            inside, kind = f"{path}." if path else "", type(module).__name__
            seen[path] = module
            outer = seen.get(path.rpartition(".")[0]) if path else None
            own = list(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own:
                name = inside + name
                tied = first.setdefault(id(parameter), name)
                more = ("" if parameter.requires_grad else ", frozen") + (f", tied to {tied!r}" if tied != name else "")
                form = str(parameter.dtype) if id(parameter) in differ else described(parameter)
                facts[f"parameter {name!r} (of {kind})"] = form + more
                order[f"parameter number {len(order)}" + (f" of {prefix!r}" if prefix else "")] = repr(name)
            if buffers:
                for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                    facts[f"buffer {inside + name!r} (of {kind})"] = described(buffer)
            if _has_settings(module) and not any(id(parameter) in differ for _, parameter in own):
                what = f"module {path!r}"
                if not _runs_its_modules(outer):
                    what = f"{_ATTRIBUTE}{path!r} (of {type(outer).__name__})"
                settings[what] = f"{kind}({module.extra_repr()})"
    # Last, since an error shows the first differences: the text of a module often follows from its parameters. Their
    # order is that of the elements of a bucket, and another one where a script registers what it finds in a set.
    return facts | settings | order


# Of torch.nn, modules that compute nothing, and losses, which a script may make where it logs: on rank 0 only.
_NO_SETTINGS = ("torch.nn.modules.container", "torch.nn.modules.module", "torch.nn.modules.loss")


def _has_settings(module: nn.Module) -> bool:
    """True if what ``module`` computes follows from its class and its text: a dropout, an activation, a norm.

    What other classes write into their text is not known, and may depend on the rank.
    """
    place = type(module).__module__
    return place.startswith("torch.nn.modules.") and place not in _NO_SETTINGS


def _runs_its_modules(outer: nn.Module | None) -> bool:
    """True if the forward of ``outer`` runs what is in it, as far as is known: containers, and the model itself."""
    contains = isinstance(outer, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return outer is None or contains or type(outer).__module__.startswith("torch.")


def described(tensor: torch.Tensor) -> str:
    """Shape and dtype."""
    shape = "of unknown shape" if is_lazy(tensor) else f"{tuple(tensor.shape)}"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


# ---- parameters that are registered while a model trains -------------------------------------------------------------

_counts: list[int] = []  # registrations of parameters and modules in this process, once they are counted


def _registered() -> int:
    """The number of parameters and modules registered in modules of this process since the first call."""
    if not _counts:
        _counts.append(0)
        register_module_parameter_registration_hook(_count)
        register_module_module_registration_hook(_count)
    return _counts[0]


def _count(module: nn.Module, name: str, registered: Any) -> None:
    # A forward that torch.compile traces may make lists of modules (``self.layers[:n]``), which register nothing new. A
    # graph that counts them is one for a single count, so that it would be compiled again at each call.
    if not torch.compiler.is_dynamo_compiling():
        _counts[0] += 1
