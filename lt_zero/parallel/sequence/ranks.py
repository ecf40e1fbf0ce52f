"""The ranks that have parts of the same sequences, in the run of this process, and which tokens each of them has.

Note [Order of tokens]
    In plain order the first rank has the first tokens. Under a causal mask later tokens have more keys, so that the
    last rank of ``method: gather`` would compute almost twice the mean. In zigzag order the sequence is cut into 2n
    chunks for n ranks, and rank r has chunks r and 2n - 1 - r: all ranks compute the same number of scores.
    Ulysses has whole sequences, so its ranks share parts that are cut from a rank's of ``gather``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.process_groups import exists
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.sequence import SequenceGroup
from lt_zero.core.division import current_row_ranks

METHODS = ("ulysses", "gather")


@dataclass(frozen=True)
class SequenceRanks:
    """The sequence ranks that this rank belongs to.

    Attributes:
        group: these ranks, in the order of their parts.
        data: the sequence ranks of all data ranks, over which the engine means gradients.
        method: "ulysses" (heads are exchanged for tokens) or "gather" (keys and values are gathered).
        gather: how many parts of the sequence the keys are gathered from; 1 with ulysses, all ranks with gather, and in
            between ``size / gather`` neighbours exchange heads first.
        zigzag: tokens are in zigzag order, see Note [Order of tokens].
    """

    group: SequenceGroup
    data: Ranks
    method: str = "ulysses"
    gather: int = 1
    zigzag: bool = False

    def __post_init__(self) -> None:
        check_method(self.method, self.gather, self.group.size)

    @property
    def rank(self) -> int:
        """This rank's number among the sequence ranks."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of sequence ranks."""
        return self.group.size

    @property
    def parts(self) -> int:
        """The number of parts of the sequence that keys are gathered from."""
        return parts_of(self.method, self.gather, self.size)

    @property
    def multiple(self) -> int:
        """Lengths of whole sequences have to be multiples of this."""
        return lcm(self.size, 2 * self.parts) if self.zigzag else self.size

    def positions(self, length: int) -> Tensor:
        """The positions of this rank's tokens in a sequence of ``length``: int64, [length / ranks].

        Raises:
            ValueError: ``length`` is no multiple of ``multiple``.
        """
        if length % self.multiple:
            raise ValueError(f"A sequence of {length} tokens is no multiple of {self.multiple}. Pad it.")
        order = torch.arange(length)
        if self.zigzag:
            order = to_zigzag(order, 0, self.parts)
        return order.chunk(self.size)[self.rank]


def parts_of(method: str, gather: int, ranks: int) -> int:
    """The number of parts of the sequence that keys are gathered from."""
    return ranks if method == "gather" and gather == 1 else gather


def check_method(method: str, gather: int, ranks: int) -> None:
    """Check a method of attention for so many sequence ranks.

    Raises:
        ConfigError: it is unknown, or does not fit the ranks.
    """
    if method not in METHODS:
        known = " or ".join(f'"{name}"' for name in METHODS)
        raise ConfigError.about("sequence_parallel.method", f"method={method!r} is unknown. Write {known}.")
    if gather < 1 or ranks % gather:
        text = f"gather={gather} does not divide the {ranks} sequence ranks. Use a divisor."
        raise ConfigError.about("sequence_parallel.gather", text)


def to_zigzag(x: Tensor, dim: int, parts: int) -> Tensor:
    """Bring whole sequences into zigzag order: part r of ``parts`` equal ones then has chunks r and 2 parts - 1 - r.

    The length along ``dim`` is a multiple of ``2 * parts``.
    """
    chunks = x.chunk(2 * parts, dim)
    return torch.cat([chunks[n] for r in range(parts) for n in (r, 2 * parts - 1 - r)], dim)


def from_zigzag(x: Tensor, dim: int, parts: int) -> Tensor:
    """Bring sequences in zigzag order back into the order of their positions."""
    chunks = x.chunk(2 * parts, dim)
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])], dim)


_whole: list[bool] = []  # has an entry inside of ``whole_sequences``


def current() -> SequenceRanks | None:
    """The sequence ranks of the run that this process has joined last; None if sequences are not cut, or it is over."""
    ranks = current_row_ranks()
    assert ranks is None or isinstance(ranks, SequenceRanks)
    return ranks


def in_use(ranks: SequenceRanks | None) -> SequenceRanks | None:
    """The sequence ranks of a run, or None where they are gone, and inside of ``whole_sequences``."""
    if ranks is None or _whole:
        return None
    group = ranks.group.process_group
    return ranks if group is None or exists(group) else None


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Context in which this rank computes whole sequences, as in a run that does not cut them."""
    _whole.append(True)
    try:
        yield
    finally:
        _whole.pop()
