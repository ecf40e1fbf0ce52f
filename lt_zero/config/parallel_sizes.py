"""Numbers of ranks along each axis of parallelism, out of the keys that ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import Schema

_EXPERTS = "expert_parallel.autoep_size"


@dataclass(frozen=True)
class ParallelSizes:
    """Numbers of ranks along each axis of the mesh."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1  # of the data and sequence ranks

    @classmethod
    def of(cls, config: Schema, ranks: int) -> ParallelSizes:
        """The sizes that the configuration asks for.

        Raises:
            ConfigError: they are not those of so many ranks.
        """
        tensor, stages = config.tensor_parallel.autotp_size, config.pipeline.ranks
        sequence = config.sequence_parallel_size
        asked = {
            "tensor_parallel.autotp_size": tensor,
            "pipeline.stages": stages,
            "sequence_parallel_size": sequence,
        }
        together = prod(asked.values())
        text = " and ".join(f"{key}={size}" for key, size in asked.items() if size > 1)
        if ranks % together:
            key = next(key for key, size in asked.items() if size > 1 and (ranks % size or size == max(asked.values())))
            raise ConfigError.about(
                key,
                f"{text if together in asked.values() else f'{text}: {together}'} does not divide the {ranks} ranks of "
                "this run. Use a divisor, or start another number of processes.",
            )
        data = config.data_parallel_size
        if data not in (None, ranks // together):
            raise ConfigError.about(
                "data_parallel_size",
                f"data_parallel_size={data}, but {ranks} ranks with {text or 'no other axis'} are {ranks // together} "
                "data ranks. Remove the key, or change one of them.",
            )
        experts, others = config.expert_parallel.ranks, ranks // together * sequence
        if others % experts:
            kinds = "data and sequence ranks" if sequence > 1 else "data ranks"
            raise ConfigError.about(
                _EXPERTS,
                f"{_EXPERTS}={experts} does not divide the {others} {kinds} of this run. Use a divisor, or start "
                "another number of processes.",
            )
        return cls(ranks // together, tensor, stages, sequence, experts)

    @property
    def is_plain(self) -> bool:
        """True if all ranks are data ranks, which have the same parameters."""
        return self.tensor == self.pipeline == self.sequence == self.expert == 1

    @property
    def of_stage(self) -> int:
        """The ranks that have the same stage of a pipeline."""
        return self.data * self.of_data_rank

    @property
    def of_data_rank(self) -> int:
        """The ranks of a stage that see the same data, which are neighbours."""
        return self.sequence * self.tensor

    @property
    def with_part(self) -> int:
        """The ranks of a stage that have the same part of what tensor ranks cut, and each see other tokens."""
        return self.data * self.sequence

    @property
    def with_experts(self) -> int:
        """The ranks of a stage that have the same experts."""
        return self.of_stage // self.expert

    def parts(self) -> Tensor:
        """The ranks, [stages * tensor ranks, with_part]: rows have the same part of what tensor ranks cut."""
        return self._all().flatten(1, 2).mT.reshape(-1, self.with_part)

    def expert_rows(self) -> Tensor:
        """The ranks, [..., expert]: rows have all experts, and send each other tokens."""
        return self._by_experts().mT.reshape(-1, self.expert)

    def expert_parts(self) -> Tensor:
        """The ranks, [stages * expert, with_experts]: rows have the same experts."""
        return self._by_experts().transpose(1, 2).reshape(-1, self.with_experts)

    def _all(self) -> Tensor:
        return torch.arange(self.pipeline * self.of_stage).view(self.pipeline, self.data, self.sequence, self.tensor)

    def _by_experts(self) -> Tensor:
        # Neighbours among the ranks that see other tokens: their sequence ranks, and then their data ranks.
        return self._all().reshape(self.pipeline, -1, self.expert, self.tensor)

    def firsts(self) -> range:
        """One rank of each data rank, in their order."""
        return range(0, self.of_stage, self.of_data_rank)

    def data_rank(self, rank: int) -> int:
        """Index of the data rank to which ``rank`` belongs."""
        return rank % self.of_stage // self.of_data_rank

    def sequence_rank(self, rank: int) -> int:
        """Index of the part of sequences that ``rank`` sees."""
        return rank // self.tensor % self.sequence
