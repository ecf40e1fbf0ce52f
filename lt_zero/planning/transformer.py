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
    """A decoder of equal blocks; feed-forward layers, or experts, are four times as wide.

    Attributes:
        layers: blocks.
        hidden: width.
        heads: of attention.
        sequence: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        vocabulary: rows of the embedding, and of the head; 0: there are none.
        experts: of a block, in place of its feed-forward layer; 0: there are none.
        top_k: experts that a router chooses for each token.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 4096
    micro_batch: int = 1
    vocabulary: int = 0
    experts: int = 0
    top_k: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            expect_number(value, f"--{name.replace('_', '-')}", whole=True)
            if value < (name not in ("vocabulary", "experts")):
                raise ValueError(f"--{name.replace('_', '-')} {value} is not positive.")
        if 0 < self.experts < self.top_k:
            raise ValueError(f"--top-k {self.top_k} is more than --experts {self.experts}.")

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
        if not self.experts:
            return 12 * self.hidden**2 + 13 * self.hidden
        return 4 * self.hidden**2 + (8 + self.experts) * self.hidden + self.of_experts  # with a router

    @property
    def of_experts(self) -> int:
        """Parameters of the experts of a block."""
        return self.experts * (8 * self.hidden**2 + 5 * self.hidden)

    def sizes(self) -> Sizes:
        """The embedding, the blocks, and the head."""
        ends = (self.vocabulary * self.hidden,) if self.vocabulary else ()
        layers = (*ends, *(self.block,) * self.layers, *ends)
        if not self.experts:
            return Sizes(sum(layers), max(layers), layers)
        none = (0,) * len(ends)
        of_experts = (*none, *(self.of_experts,) * self.layers, *none)
        return Sizes(sum(layers), max(layers), layers, sum(of_experts), of_experts)

    def to_experts(self, sequence: int = 1, itemsize: int = _BITS16) -> float:
        """Bytes of one block and micro-batch that one of ``sequence`` ranks sends to experts, and these back.

        In forward and backward, with those to experts of its own. A block that is recomputed sends half as much again.
        """
        return 4 * itemsize * self.top_k * self.sequence * self.micro_batch * self.hidden / sequence

    @property
    def boundary(self) -> int:
        """Bytes between two blocks, of one micro-batch."""
        return _BITS16 * self.sequence * self.micro_batch * self.hidden

    def activations(self, tensor: int = 1, sequence: int = 1) -> Activations:
        """Activations of a block on one of ``tensor * sequence`` ranks.

        Each of the tensor ranks keeps those of norms and residual connections, of its part of sequences.
        """
        elements = self.sequence * self.micro_batch * self.hidden / sequence
        # Experts keep the rows that they got and made, and are whole on tensor ranks.
        inner = 16 / tensor if not self.experts else 20 * self.top_k
        fused = elements * (10 + 8 / tensor + inner)
        whole = fused + elements * 5 * self.heads * self.sequence / self.hidden / tensor
        return Activations(whole, fused, self.boundary / sequence)

    def __str__(self) -> str:
        with_experts = f" of {self.experts} experts" if self.experts else ""
        heads = f"{self.hidden:,} wide, {self.heads} heads"
        return f"{self.layers} blocks{with_experts}, {heads}, sequences of {self.sequence:,}"
