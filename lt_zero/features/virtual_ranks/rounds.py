"""Rounds of virtual ranks, shared out over the ranks that there are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lt_zero.common.errors import ConfigError
from lt_zero.common.random_states import RandomStates
from lt_zero.common.saved_random_states import read_states
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.rounds import Rounds
from lt_zero.features.virtual_ranks.buffers import RoundBuffers
from lt_zero.features.virtual_ranks.data import RoundLoader
from lt_zero.features.virtual_ranks.streams import Streams

KEY = "reproducible.virtual_ranks"


class VirtualRounds(Rounds):
    """A round is a micro-batch of each of ``count`` virtual ranks; data rank r runs that of j * N + r in turn j.

    Args:
        count: the number of virtual ranks.
        group: all ranks.
        sizes: of their mesh, with N data ranks; N divides ``count``.
    """

    def __init__(self, count: int, group: ShardGroup, sizes: ParallelSizes) -> None:
        self._ranks = group
        self._sizes = sizes
        self.count: int = count
        self.turns = count // sizes.data
        self._streams = Streams(count, [self.number(turn) for turn in range(self.turns)])
        self._buffers: RoundBuffers | None = None

    @override
    def parts(self, data_ranks: int) -> int:
        return self.count

    @override
    def number(self, turn: int) -> int:
        return turn * self._sizes.data + self._sizes.data_rank(self._ranks.rank)

    @override
    def place(self, turn: int) -> int:
        return self.number(turn) * self._sizes.sequence + self._sizes.sequence_rank(self._ranks.rank)

    # ---- random numbers ----------------------------------------------------------------------------------------

    @override
    def begin(self, anew: bool) -> None:
        mine = RandomStates.now().state_dict() if self._ranks.rank == 0 else None
        first = read_states(self._ranks.host_broadcast(mine, "random states"), "random states of rank 0")
        first.apply()
        if anew:
            self._streams.begin(first)

    @override
    def turn(self, turn: int) -> AbstractContextManager[None]:
        return self._streams.of(self.number(turn))

    @override
    def now(self) -> Any:
        return self._streams.now()

    @override
    def set(self, states: Any) -> None:
        if states is not None:
            self._streams.set(states)

    # ---- data --------------------------------------------------------------------------------------------------

    @override
    def loader(self, loader: Any) -> Any:
        return RoundLoader.of(loader, self._streams, self._ranks)

    # ---- buffers -----------------------------------------------------------------------------------------------

    @override
    def follow(self, root: nn.Module, peers: Ranks) -> None:
        self._buffers = RoundBuffers(root, peers)

    @override
    def begin_turn(self, turn: int) -> None:
        if self._buffers is not None:
            self._buffers.begin_turn(turn)

    @override
    def end_round(self) -> None:
        if self._buffers is not None:
            self._buffers.end_round(self.turns)

    # ---- values ------------------------------------------------------------------------------------------------

    @override
    def in_order(self, mine: Sequence[Any], name: str) -> list[Any]:
        found = self._ranks.host_gather([map_tensors(value, _on_host) for value in mine], name)
        # Of ranks that have parts of one model and see the same tokens the first tells its values.
        return [
            found[first + part * self._sizes.tensor][turn]
            for turn in range(self.turns)
            for first in self._sizes.firsts()
            for part in range(self._sizes.sequence)
        ]

    @override
    def of_first(self, value: Any, name: str) -> Any:
        return self._ranks.host_broadcast(map_tensors(value, _on_host), name)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def packed(self, states: Any) -> dict[str, Any] | None:
        return self._streams.packed(states)

    @override
    def unpacked(self, saved: Sequence[Any], where: str) -> Any:
        found = [states for states in saved if states is not None]
        return self._streams.unpacked(found, where) if found else None

    @override
    def merged(self, saved: Sequence[Any], own: Any) -> Any:
        return RoundLoader.merged(saved) if RoundLoader.has_saved(own) else own


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def rounds_of(config: Any, group: ShardGroup) -> VirtualRounds:
    """The rounds that a configuration asks for.

    Raises:
        ConfigError: ranks have buffers of their own.
    """
    count: int = config.reproducible.virtual_ranks
    if not config.broadcast_buffers:
        raise ConfigError.about(
            KEY,
            f"{KEY}={count}: micro-batches begin with the same buffers, and broadcast_buffers=false lets ranks have "
            "buffers of their own. Remove one of them.",
        )
    return VirtualRounds(count, group, ParallelSizes.of(config, group.size))
