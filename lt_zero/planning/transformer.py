"""A transformer by its dimensions: parameters, activations, and the bytes that a rank sends.

Activations are those of arXiv:2205.05198 in 16 bits, with dropout; each formula is of one block and one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lt_zero.common.arguments import expect_number
from lt_zero.planning.sizes import Sizes

_BITS16 = 2  # bytes
_RANKS = 8  # that usual numbers of heads are multiples of
_RATIO = 128  # of the hidden size and the layers, where only parameters are known: that of GPT-3 and Llama


class Activations(NamedTuple):
    """Bytes that one block keeps of one micro-batch for its backward.

    Attributes:
        whole: with the matrices of attention.
        fused: without them: flash attention, and torch's scaled_dot_product_attention.
        recomputed: its input only.
    """

    whole: float
    fused: float
    recomputed: float


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal blocks; feed-forward layers are four times as wide.

    Attributes:
        layers: blocks.
        hidden: width.
        heads: of attention.
        sequence: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        vocabulary: rows of the embedding, and of the head; 0: there are none.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 4096
    micro_batch: int = 1
    vocabulary: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            expect_number(value, f"--{name.replace('_', '-')}", whole=True)
            if value < (name != "vocabulary"):
                raise ValueError(f"--{name.replace('_', '-')} {value} is not positive.")

    @classmethod
    def like(cls, parameters: int, sequence: int = 4096, micro_batch: int = 1) -> Transformer:
        """One of the usual proportions with so many parameters."""
        layers = max(1, round((parameters / (12 * _RATIO**2)) ** (1 / 3)))
        heads = max(1, round((parameters / (12 * layers)) ** 0.5 / _RATIO))
        heads = heads if heads < _RANKS else round(heads / _RANKS) * _RANKS
        return cls(layers, heads * _RATIO, heads, sequence, micro_batch)

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return 12 * self.hidden**2 + 13 * self.hidden

    def sizes(self) -> Sizes:
        """The embedding, the blocks, and the head."""
        ends = (self.vocabulary * self.hidden,) if self.vocabulary else ()
        layers = (*ends, *(self.block,) * self.layers, *ends)
        return Sizes(sum(layers), max(layers), layers)

    @property
    def boundary(self) -> int:
        """Bytes between two blocks, of one micro-batch."""
        return _BITS16 * self.sequence * self.micro_batch * self.hidden

    def activations(self, tensor: int = 1, sequence: int = 1) -> Activations:
        """Activations of a block on one of ``tensor * sequence`` ranks.

        Each of the tensor ranks keeps those of norms and residual connections, of its part of sequences.
        """
        elements = self.sequence * self.micro_batch * self.hidden / sequence
        fused = elements * (10 + 24 / tensor)
        whole = fused + elements * 5 * self.heads * self.sequence / self.hidden / tensor
        return Activations(whole, fused, self.boundary / sequence)

    def __str__(self) -> str:
        return f"{self.layers} blocks, {self.hidden:,} wide, {self.heads} heads, sequences of {self.sequence:,}"
