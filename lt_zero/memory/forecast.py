"""Bytes of one rank by place, kind and phase, added up over the rows of a plan.

Note [Phases]
    Kinds that never exist together are not added: local gradients of an accumulation window give way to the
    accumulators, gathered weights are gone when the optimizer steps. A forecast therefore has phases:
      build         buckets are filled, one copy in full precision at a time
      accumulation  micro-batches before the last one, where gradients are not sharded (stages 0 and 1)
      backward      reductions and gathers are under way
      step          one bucket after the other is brought from its file, or copied to fp32
      checkpoint    sharded: each rank writes its part, or (checkpoint.async) copies it first. Full: rank 0 collects
                    a full copy on its host, and Lightning makes the file's bytes in memory
    Activations, what libraries and the allocator keep for themselves, and the caller's data are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lt_zero.config import ZeroConfig
from lt_zero.config.blocks.precision import DtypePolicy
from lt_zero.engine.partition import EnginePlan
from lt_zero.memory import costs
from lt_zero.memory.costs import KINDS, Part
from lt_zero.memory.rows import DEVICE, HOST, Setup, rows_of

PHASES = ("build", "accumulation", "backward", "step", "checkpoint")

Amounts = Mapping[tuple[str, str], int]  # (place, kind) -> bytes


@dataclass(frozen=True)
class Forecast:
    """The memory that a run needs.

    Attributes:
        setup: ranks, device, optimizer.
        parameters: elements of the model.
        phases: (place, kind) -> bytes of one rank, in each phase. See Note [Phases].
        first: (place, kind) -> additional bytes of rank 0, in each phase.
    """

    setup: Setup
    parameters: int
    phases: Mapping[str, Amounts]
    first: Mapping[str, Amounts]

    def kinds(self, place: str) -> dict[str, int]:
        """Peak bytes of each kind on rank 0. The peaks may occur in different phases."""
        found: dict[str, int] = {}
        for phase in self.phases:
            for kind, nbytes in self.need_of_rank(phase, place, first=True).items():
                found[kind] = max(found.get(kind, 0), nbytes)
        return {kind: found[kind] for kind in KINDS if found.get(kind)}

    def rank(self, place: str) -> int:
        """Peak bytes of one rank, other than rank 0."""
        return max(sum(self.need_of_rank(phase, place).values()) for phase in self.phases)

    def node(self, place: str) -> int:
        """Peak bytes of the first node, which has rank 0."""
        return max(sum(self.need_of_node(phase, place).values()) for phase in self.phases)

    def model_states(self) -> int:
        """Peak bytes of one rank's weights, gradients, master weights and moments, as the ZeRO paper counts them."""
        amounts = [[n for (_, kind), n in phase.items() if kind in costs.STATES] for phase in self.phases.values()]
        return max(map(sum, amounts))

    def need_of_rank(self, phase: str, place: str, first: bool = False) -> dict[str, int]:
        """Bytes of one rank by kind, in one phase; ``first``: of rank 0."""
        total = Counter(_at(place, self.phases[phase]))
        total.update(_at(place, self.first.get(phase, {})) if first else {})
        return {kind: total[kind] for kind in KINDS if total[kind]}

    def need_of_node(self, phase: str, place: str) -> dict[str, int]:
        """Bytes of the first node by kind, in one phase."""
        others = self.setup.per_node - 1
        total = Counter(self.need_of_rank(phase, place, first=True))
        total.update({kind: nbytes * others for kind, nbytes in self.need_of_rank(phase, place).items()})
        return {kind: total[kind] for kind in KINDS if total[kind]}


def _at(place: str, amounts: Amounts) -> dict[str, int]:
    return {kind: nbytes for (where, kind), nbytes in amounts.items() if where == place}


def forecast(plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> Forecast:
    """Sum up a plan. Allocates nothing; ranks differ only by ``Forecast.first``."""
    table = dict(zip(plan.buckets, rows_of(plan, config, policy, setup), strict=True))
    rows = list(table.values())
    trained = [row for row in rows if row.trains] if setup.training else []
    kept, reduce = costs.kept(rows), costs.reduce(rows, config, setup)
    states = [*kept, *costs.moments(trained, rows, setup), *costs.spare(rows, setup), *costs.crossing(trained, setup)]
    moving = [*reduce, *costs.gathered(plan, table, config, setup), *costs.fresh(plan, setup)]
    grads = [*states, *costs.gradients(trained, rows, setup)]
    phases = {
        "build": [*kept, *costs.building(rows, setup)],
        "backward": [
            *grads,
            *moving,
            *costs.reducing(trained, setup),
            *costs.overlapping(trained, config, setup),
        ],
        "step": [*grads, *reduce, *costs.stepping(trained, config, setup)],
    }
    full = not config.sharded_checkpoints
    if setup.saves:
        how = costs.collecting(rows, trained, setup) if full else costs.staging(rows, trained, config, setup)
        phases["checkpoint"] = [*grads, *reduce, *how]
    local = costs.local(trained, setup)
    if local:
        phases["accumulation"] = [*states, *moving, *local]
    fold = setup.device == "cpu"
    return Forecast(
        setup=setup,
        parameters=sum(row.elements for row in rows),
        phases={name: _sum(phases[name], fold) for name in PHASES if name in phases},
        first={"checkpoint": _sum(costs.full_copy(rows, setup) if full else [], fold)},
    )


def _sum(parts: Iterable[Part], fold: bool) -> Amounts:
    """``fold``: the device is the host."""
    total: Counter[tuple[str, str]] = Counter()
    for place, kind, nbytes in parts:
        total[HOST if fold and place == DEVICE else place, kind] += nbytes
    return {key: nbytes for key, nbytes in total.items() if nbytes}
