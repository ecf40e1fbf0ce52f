"""Weights that rest in 8 bits, for inference: the codes are gathered, and decoded on each rank.

Symmetric integers of blocks of 256 elements that share a scale, as in ZeRO++ (arXiv:2306.10209, section 3.1). Unlike
there the codes are all that is kept: what is decoded are the weights, for checkpoints and exports, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.engine.bucket import Bucket
from lt_zero.offload.coded_store import CodedStore, coded_place
from lt_zero.offload.store import Waits
from lt_zero.ops.codecs import INT8


class CodedRoute:
    """Gathers of one bucket whose weights rest encoded (``Route``)."""

    exact = True  # nothing else is known of the weights
    nbytes = 0

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def launch(self) -> Waits:
        bucket, store = self._bucket, self._bucket.weights.gather_source
        assert isinstance(store, CodedStore)
        return store.launch_codes(lambda own: bucket.group.all_gather_encoded(bucket.flat, bucket.name, INT8, own))

    def landed(self) -> None:
        pass

    def weights_changed(self) -> None:
        pass

    def decoded(self, shard: Tensor) -> Tensor:
        return shard


def rest_quantized(config: ZeroConfig, buckets: Iterable[Bucket]) -> None:
    """Keep sharded parameters in as many bits as ``quantize`` says. Before the buckets are filled."""
    for bucket in buckets if config.quantize is not None else ():
        if bucket.sharding.params and bucket.dtype in (torch.float32, torch.bfloat16, torch.float16):
            bucket.use(bucket.step_place, coded_place(bucket.gather_place, INT8, bucket.group.device))
            bucket.route = CodedRoute(bucket)


def refuse_quantized(config: ZeroConfig) -> None:
    """Raise ConfigError if weights are to rest in few bits, from which nothing can be trained."""
    if config.quantize is not None:
        text = f"quantize={config.quantize} keeps nothing of the weights but 8-bit codes, which cannot be trained. "
        raise ConfigError.about("quantize", f"{text}Remove the key, or use predict, validate, test or inference.")
