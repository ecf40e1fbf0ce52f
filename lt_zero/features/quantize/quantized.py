"""Weights that rest in fewer bits, for inference: encoded in memory or files; the codes are gathered, and decoded.

Symmetric integers of blocks of 256 elements that share a scale, as in ZeRO++ (arXiv:2306.10209, section 3.1). Unlike
there the codes are all that is kept: what is decoded are the weights, for checkpoints and exports, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common.codec import Codec
from lt_zero.common.errors import ConfigError
from lt_zero.common.flat_storage import flat_empty
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.bucket import Bucket, GatherStrategy
from lt_zero.core.stores.store import CODES, WEIGHTS, Place, Store
from lt_zero.exchange.encoded import all_gather_encoded


class CodedStore(Store):
    """Keeps a tensor encoded in another store. Writes are encoded at the end of a use.

    Args:
        codes: keeps the bytes.
        numel, dtype: of the tensor.
        codec: how it is encoded; edits are encoded again, with the elements of the same block.
        device: where the tensor is decoded.
    """

    def __init__(self, codes: Store, numel: int, dtype: torch.dtype, codec: Codec, device: torch.device) -> None:
        super().__init__(dtype, lambda: flat_empty(numel, dtype, device))
        self.codes = codes
        self._codec = codec
        self._device = device
        self._coded_nbytes, self.streamed = codec.nbytes(numel), codes.streamed

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.codes.nbytes

    def read(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        values = self._make()
        self._codec.decode_sum([self.codes.read().to(values.device)], values)
        return values

    def write(self) -> Tensor:
        self._tensor = self.read()
        return self._tensor

    def discard(self) -> None:
        super().discard()
        self.codes.discard()

    def prefetch(self) -> None:
        self.codes.prefetch()

    def end_use(self) -> None:
        if self._tensor is not None:
            codes = self.codes.overwrite()
            codes.copy_(self._codec.encode(self._tensor))
            self._tensor = None
        self.codes.end_use()

    def wait_written(self) -> None:
        self.codes.wait_written()

    def wait_sent(self) -> None:
        self.codes.wait_sent()

    @contextmanager
    def source(self, shard: Tensor) -> Iterator[Tensor | None]:
        """Context as of any store, but it gives the codes on the device (1D uint8), and ``shard`` is not filled."""
        # Encode edits first: the gather reads only the codes.
        self.end_use()
        here = torch.empty(self._coded_nbytes, dtype=torch.uint8, device=self._device)
        with self.codes.source(here):
            yield here

    def sent(self) -> None:
        self.codes.sent()


def coded_place(place: Place, codec: Codec, device: torch.device) -> Place:
    """``place`` with its stores encoded."""

    def store(kind: str, numel: int, dtype: torch.dtype) -> Store:
        codes = place.store(CODES if kind == WEIGHTS else f"{kind} {CODES}", codec.nbytes(numel), torch.uint8)
        return CodedStore(codes, numel, dtype, codec, device)

    return replace(place, store=store)


class RestingGather(GatherStrategy):
    """Gathers of one bucket whose weights rest encoded. They are exact, as nothing else is known of the weights.

    ``codec``: of the weights.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def place(self, place: Place, device: torch.device) -> Place:
        return coded_place(place, self._codec, device)

    @override
    def check_training(self, name: str) -> None:
        raise ConfigError.about(
            "quantize",
            f"quantize: {name} has parameters that require gradients, and rests in codes of few bits, which cannot be "
            "trained. Freeze them (requires_grad_(False)), or train adapters beside them; to train them, remove the "
            "key, or unfreeze them before set-up: then they rest in full.",
        )

    def launch(self, bucket: Bucket) -> Work:
        with bucket.weights.gather_source.source(bucket.compute.shard) as codes:
            return all_gather_encoded(bucket.group, bucket.compute.flat, bucket.name, self._codec, codes)
