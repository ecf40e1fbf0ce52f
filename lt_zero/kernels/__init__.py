"""Fused kernels for CPU and CUDA, each with a torch reference of the same signature.

The steps and flat operations are ``torch.library`` operators (``torch.ops.lt_zero``), so they work under
``torch.compile``; compression, which stands around collectives, is plain functions. Kernels are compiled on first use;
where that is impossible, the references run (see ``lt-zero ops report``).
"""

from typing import TYPE_CHECKING

from lt_zero.common.codec import Codec
from lt_zero.common.places import is_there, public_names
from lt_zero.kernels.dispatch import DTYPES, available, fits
from lt_zero.kernels.flat import (
    accumulate,
    accumulate_reference,
    cast_scale,
    cast_scale_reference,
    norm_squared,
    norm_squared_reference,
    take_edits,
    take_edits_reference,
)

if TYPE_CHECKING:
    from lt_zero.kernels.blocks import (
        dequantize,
        dequantize_sum,
        dequantize_sum_reference,
        quantize,
        quantize_reference,
        quantized_nbytes,
    )
    from lt_zero.kernels.codecs import INT4, INT8, ONE_BIT, TWO_BITS, BlockCodec, TopK
    from lt_zero.kernels.huffman import (
        CorruptError,
        huffman_decode,
        huffman_decode_reference,
        huffman_encode,
        huffman_encode_reference,
    )
    from lt_zero.kernels.rounding import round_stochastic, round_stochastic_reference
    from lt_zero.kernels.sparsify import (
        decode_topk_add,
        encode_topk,
        select_topk,
        select_topk_reference,
        topk_max_nbytes,
    )
    from lt_zero.kernels.steps.adagrad import adagrad_step, adagrad_step_reference
    from lt_zero.kernels.steps.adam import adam_step, adam_step_reference
    from lt_zero.kernels.steps.lamb import lamb_apply, lamb_apply_reference, lamb_update, lamb_update_reference
    from lt_zero.kernels.steps.lion import lion_step, lion_step_reference
    from lt_zero.kernels.steps.sgd import sgd_step, sgd_step_reference

# Imported when they are first used, by their modules: a run uses the steps of one optimizer, and most runs compress and
# round nothing.
_LATER = {
    "lt_zero.kernels.blocks": (
        *("dequantize", "dequantize_sum", "dequantize_sum_reference"),
        *("quantize", "quantize_reference", "quantized_nbytes"),
    ),
    "lt_zero.kernels.codecs": ("BlockCodec", "INT4", "INT8", "ONE_BIT", "TWO_BITS", "TopK"),
    "lt_zero.kernels.huffman": (
        *("CorruptError", "huffman_decode", "huffman_decode_reference"),
        *("huffman_encode", "huffman_encode_reference"),
    ),
    "lt_zero.kernels.sparsify": (
        *("decode_topk_add", "encode_topk"),
        *("select_topk", "select_topk_reference", "topk_max_nbytes"),
    ),
    "lt_zero.kernels.rounding": ("round_stochastic", "round_stochastic_reference"),
    "lt_zero.kernels.steps.adagrad": ("adagrad_step", "adagrad_step_reference"),
    "lt_zero.kernels.steps.adam": ("adam_step", "adam_step_reference"),
    "lt_zero.kernels.steps.lamb": ("lamb_apply", "lamb_apply_reference", "lamb_update", "lamb_update_reference"),
    "lt_zero.kernels.steps.lion": ("lion_step", "lion_step_reference"),
    "lt_zero.kernels.steps.sgd": ("sgd_step", "sgd_step_reference"),
}

__all__ = [
    "BlockCodec",
    "Codec",
    "CorruptError",
    "DTYPES",
    "INT4",
    "INT8",
    "ONE_BIT",
    "TWO_BITS",
    "TopK",
    "accumulate",
    "accumulate_reference",
    "adagrad_step",
    "adagrad_step_reference",
    "adam_step",
    "adam_step_reference",
    "available",
    "cast_scale",
    "cast_scale_reference",
    "decode_topk_add",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_reference",
    "encode_topk",
    "fits",
    "huffman_decode",
    "huffman_decode_reference",
    "huffman_encode",
    "huffman_encode_reference",
    "lamb_apply",
    "lamb_apply_reference",
    "lamb_update",
    "lamb_update_reference",
    "lion_step",
    "lion_step_reference",
    "norm_squared",
    "norm_squared_reference",
    "quantize",
    "quantize_reference",
    "quantized_nbytes",
    "select_topk",
    "select_topk_reference",
    "sgd_step",
    "sgd_step_reference",
    "take_edits",
    "take_edits_reference",
    "topk_max_nbytes",
]
if is_there("lt_zero.kernels.rounding"):
    __all__ += ["round_stochastic", "round_stochastic_reference"]

__getattr__ = public_names(
    __name__, {name: module for module, names in _LATER.items() for name in names}, shown="lt_zero.ops"
)
