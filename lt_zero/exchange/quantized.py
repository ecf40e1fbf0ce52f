"""Weights that rest in 8 bits, for inference: the codes are gathered, and decoded on each rank.

Symmetric integers of blocks of 256 elements that share a scale, as in ZeRO++ (arXiv:2306.10209, section 3.1). Unlike
there the codes are all that is kept: what is decoded are the weights, for checkpoints and exports, too.
"""

from __future__ import annotations

import torch

from lt_zero.comm.work import Work
from lt_zero.engine.bucket import Bucket, GatherStrategy
from lt_zero.offload.coded_store import coded_place
from lt_zero.offload.store import Place
from lt_zero.ops.codecs import Codec


class RestingGather(GatherStrategy):
    """Gathers of one bucket whose weights rest encoded. They are exact, as nothing else is known of the weights.

    ``codec``: of the weights.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def place(self, place: Place, device: torch.device) -> Place:
        return coded_place(place, self._codec, device)

    def launch(self, bucket: Bucket) -> Work:
        with bucket.weights.gather_source.source(bucket.shard) as codes:
            return bucket.group.all_gather_encoded(bucket.flat, bucket.name, self._codec, codes)
