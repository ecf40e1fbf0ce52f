"""A digest of an engine's weights that depends on their bits, and neither on the ranks nor on how they are sharded.

Note [Sums of bits]
    A parameter, row-major, is read as rows of 1,024 elements, of which the last is filled with zeros. Its digest is two
    sums modulo 2**64 of the elements' bits, in integers of at most 32 bits: in one the sum of each row is multiplied by
    an odd number that is drawn for the row, in the other the sum of each column by one of the column. So an element's
    share depends on its place in the parameter only, and ranks add up the shares of their pieces, whatever these are.
    A change of a single element always changes both sums; other changes are missed with a chance of about 1 in 2**31.
    In integers of 64 bits those of signs would be missed often: a sign alone would be a multiple of 2**63, which is
    lost where it is multiplied by the difference of two odd numbers. The digest is no protection against an attacker.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor, nn

from lt_zero.common.arguments import expect
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of

_ROW = 1024  # elements
_CHUNK = 256  # rows that are copied at a time: 1 MB of fp32


def weights_digest(module: nn.Module) -> str:
    """A digest of the weights that a module trains: 32 hexadecimal digits. Collective.

    It is of the master weights, after all steps so far, and is the same at any number of ranks, stage and offload if
    their bits, names, shapes and dtypes are. (Parts of tensors, of tensor parallelism, count as tensors of their own.)
    While averaged weights take the place of those that are trained, as EMA's do in a validation, it is of the average.
    Call it outside of ``lt_zero.gathered(module, write=True)``, at whose end changes count.

    Args:
        module: that is sharded, in a Trainer, Fabric, by ``lt_zero.initialize`` or ``lt_zero.shard``.

    Raises:
        TypeError: it is no module.
        ValueError: it is not sharded, or trains no parameter.
    """
    expect(module, nn.Module, "The module of lt_zero.weights_digest", "pass the module that is trained")
    owners = (owner_of(parameter) for parameter in module.parameters())
    engine = next((owner for owner in owners if isinstance(owner, Engine)), None)
    if engine is None:
        raise ValueError(
            f"lt_zero.weights_digest({type(module).__name__}): the module is not sharded. Call it in a run that trains "
            "it, on all ranks."
        )
    engine.prepare_reading()
    for bucket in engine.buckets:
        bucket.edits.check(values=True)
    found = digest_of(engine)
    if not int(found, 16):  # as of weights that are all zeros
        trained = torch.tensor(any(bucket.weights.trains for bucket in engine.buckets), device=engine.device)
        if not engine.world.sum_all(trained.long(), "trained parameters").item():
            raise ValueError(
                f"lt_zero.weights_digest({type(module).__name__}): it trains no parameter. Call requires_grad_() of "
                "those that are trained, before the module is sharded."
            )
    return found


@torch.no_grad()
def digest_of(engine: Engine) -> str:
    """``weights_digest`` of an engine's root, right after a step. Collective."""
    engine.finish_steps()
    sums = torch.zeros(2, dtype=torch.int64, device=engine.device)
    for bucket in engine.buckets:
        if bucket.weights.trains and not _counts_elsewhere(bucket):
            sums += _shares(bucket)
        bucket.put_away()
    total = engine.world.sum_all(sums, "digest of weights").tolist()
    return "".join(f"{part % (1 << 64):016x}" for part in total)


def _counts_elsewhere(bucket: Bucket) -> bool:
    """True if other ranks have the elements of this one, too, and they count there."""
    return bucket.group.mesh.replica > 0 or (bucket.storage.is_whole and bucket.group.rank > 0)


def _shares(bucket: Bucket) -> Tensor:
    """The shares (2, int64) of this rank's elements in the two sums of a digest."""
    values = bucket.weights.values()
    found = torch.zeros(2, dtype=torch.int64, device=bucket.group.device)
    for piece in bucket.pieces:
        rows = values[piece.offset : piece.offset + piece.numel]
        spec = bucket.layout.spans[piece.index].spec
        by_row, by_column = _sums(rows, piece.lo)
        one, other = _factors(f"{spec.name} {spec.global_shape} {spec.local_box} {values.dtype}")
        found[0] += by_row.to(found.device) * one
        found[1] += by_column.to(found.device) * other
    return found


def _sums(values: Tensor, lo: int) -> tuple[Tensor, Tensor]:
    """The two sums (0D int64) of elements (1D) [lo, lo + n) of a parameter. See Note [Sums of bits]."""
    integers = {1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32)
    words = _ROW * values.element_size() // integers.itemsize
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    columns = torch.zeros(words, dtype=torch.int64, device=values.device)
    hi = lo + values.numel()
    size = _CHUNK * _ROW
    for chunk in range(lo // size, -(-hi // size)):
        # Only the rows of the chunk that have some of the elements.
        begin = max(lo, chunk * size)
        end = min(hi, (chunk + 1) * size)
        first = begin // _ROW
        last = -(-end // _ROW)
        whole = values.new_zeros((last - first) * _ROW)
        whole[begin - first * _ROW : end - first * _ROW] = values[begin - lo : end - lo]
        bits = whole.view(integers).view(last - first, words)
        drawn = _numbers(chunk, _CHUNK, values.device)[first - chunk * _CHUNK : last - chunk * _CHUNK]
        total += (bits.sum(1, dtype=torch.int64) * drawn).sum()
        columns += bits.sum(0, dtype=torch.int64)
    return total, (columns * _numbers(-1, words, values.device)).sum()


@lru_cache(maxsize=256)
def _numbers(chunk: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers (1D int64) that are drawn for the rows of a chunk; -1: for columns."""
    # Whatever the default device is, as these are kept.
    generator = torch.Generator("cpu").manual_seed(chunk + 1)
    drawn = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator, dtype=torch.int64, device="cpu")
    return (drawn * 2 + 1).to(device)


@lru_cache(maxsize=1 << 16)
def _factors(text: str) -> tuple[int, int]:
    """Two odd numbers of 63 bits for a parameter."""
    found = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(found[:8], "big") >> 1 | 1, int.from_bytes(found[8:16], "big") >> 1 | 1
