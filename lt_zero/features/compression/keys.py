"""The block ``gradient_compression`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from typing_extensions import override

from lt_zero.common.errors import Problem
from lt_zero.common.fields import Block, Elements, IdleKeys, Names, Real, key, lower, off_if_false

_KEY = "gradient_compression"
_ZERO = "zero_optimization"


class GradientCompressionBlock(Block):
    """The ``gradient_compression`` block: gradients are sent in fewer bits, with error feedback."""

    algorithm: Annotated[Literal["none", "topk", "1bit", "2bit"], lower] = key(
        "none", "topk: only the largest elements, 1bit: signs, 2bit: four levels, in blocks with a scale each"
    )
    topk_ratio: Real = key(0.01, "share of the elements that topk sends", gt=0, le=1)
    huffman_coding: bool = key(False, "code what topk sends: fewer bytes, more work for the host")
    hierarchical_compress: bool = key(
        False, "sum gradients inside a node uncompressed, and compress what goes between nodes only"
    )
    exclude: Literal["auto"] | Names = key(
        "auto",
        "parameters that are sent as they are: class names of modules, patterns of modules or parameters; auto: norms, "
        "biases and embeddings with 1bit, else none",
    )
    warmup_steps: Elements = key(0, "optimizer steps whose gradients are sent as they are")

    @classmethod
    @override
    def at_top(cls) -> tuple[Any, Any]:
        return Annotated[cls, off_if_false], key(cls(), "gradients in fewer bits, with error feedback")

    @override
    def problems_in(self, config: Any) -> Iterator[Problem]:
        zero = config.zero_optimization
        if self.algorithm == "none" or zero.stage == 0:
            return
        key = f"{_KEY}.algorithm"
        if zero.replicas_by:
            groups = f"{_ZERO}.{zero.replicas_by}={getattr(zero, zero.replicas_by)}"
            text = f"{key}={self.algorithm!r} compresses the exchange of all ranks, and {groups} sums in two steps."
            yield Problem(key, f"{text} Remove one of them; hierarchical_compress sums inside nodes.")
        if zero.zero_quantized_gradients:
            text = f"{key}={self.algorithm!r} and {_ZERO}.zero_quantized_gradients=true both say how gradients are sent"
            yield Problem(key, f"{text}. Remove one of them.")

    @override
    def idle_in(self, config: Any) -> Iterator[IdleKeys]:
        every = "huffman_coding hierarchical_compress exclude warmup_steps topk_ratio"
        yield IdleKeys(self.algorithm == "none", _KEY, every, f"{_KEY}.algorithm is none")
        of_topk = "huffman_coding topk_ratio"
        yield IdleKeys(self.algorithm != "topk", _KEY, of_topk, "it counts with algorithm: topk only")
