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
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lt_zero.common.arguments import expect
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of

_ROW = 1024  # elements
_CHUNK = 256  # rows that are added at a time: 1 MB of fp32, which is in the cache for the second sum
_SIZE = _CHUNK * _ROW  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16}  # by the bytes of an element; of all others int32


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
    if not bucket.pieces:
        return torch.zeros(2, dtype=torch.int64, device=bucket.group.device)
    plan = _plans.get(bucket)
    if plan is None or plan.kind != (values.dtype, values.device):
        plan = _plans[bucket] = _Plan.of(bucket, values)
    integers = _INTEGERS.get(values.element_size(), torch.int32)
    by_row: list[Tensor] = []
    by_column: list[Tensor] = []
    for part in plan.parts:
        # A view: a copy of the elements takes longer than their sums.
        bits = values[part.begin : part.end].view(integers).view(part.rows, -1)
        by_row.append(bits.sum(1, dtype=torch.int64))
        columns = bits.sum(0, dtype=torch.int64)
        if part.goes_on:
            by_column[-1] += columns
        else:
            by_column.append(columns)
    sums = (torch.cat(by_row) * plan.of_rows).sum(), (torch.cat(by_column) * plan.of_columns).sum()
    return torch.stack(sums).to(bucket.group.device)


class _Part(NamedTuple):
    """Elements [begin, end) of a shard: ``rows`` whole rows of a parameter, or a part of one row.

    ``goes_on``: their columns are added to those of the part before, which has the rows before them.
    """

    begin: int
    end: int
    rows: int
    goes_on: bool


class _Plan(NamedTuple):
    """The parts of a shard, and what their sums are multiplied by: the same at each step, made once.

    Attributes:
        kind: dtype and device of the elements.
        parts: of all pieces.
        of_rows: factors (1D int64) of the sums of rows.
        of_columns: factors (1D int64) of the sums of columns, of a part and those that go on from it.
    """

    kind: tuple[torch.dtype, torch.device]
    parts: list[_Part]
    of_rows: Tensor
    of_columns: Tensor

    @classmethod
    def of(cls, bucket: Bucket, values: Tensor) -> _Plan:
        """The plan of a bucket with at least one piece, whose shard has the elements ``values``."""
        parts: list[_Part] = []
        of_rows: list[Tensor] = []
        of_columns: list[Tensor] = []
        integers = _INTEGERS.get(values.element_size(), torch.int32)
        words = _ROW * values.element_size() // integers.itemsize
        of_place = _numbers(-1, words, values.device)
        for piece in bucket.pieces:
            spec = bucket.layout.spans[piece.index].spec
            one, other = _factors(f"{spec.name} {spec.global_shape} {spec.local_box} {values.dtype}")
            offset = piece.offset - piece.lo  # of the parameter's first element, in the shard
            after_whole = False  # the part before has whole rows
            for begin, end in _parts(piece.lo, piece.lo + piece.numel):
                first = begin // _ROW
                last = -(-end // _ROW)
                whole = (end - begin) % _ROW == 0
                chunk = first // _CHUNK
                goes_on = whole and after_whole
                parts.append(_Part(offset + begin, offset + end, last - first, goes_on))
                drawn = _numbers(chunk, _CHUNK, values.device)
                of_rows.append(drawn[first - chunk * _CHUNK : last - chunk * _CHUNK] * one)
                if not goes_on:
                    low = begin % _ROW
                    high = (end - 1) % _ROW + 1
                    of_columns.append(of_place[low * words // _ROW : high * words // _ROW] * other)
                after_whole = whole
        return cls((values.dtype, values.device), parts, torch.cat(of_rows), torch.cat(of_columns))


_plans: WeakKeyDictionary[Bucket, _Plan] = WeakKeyDictionary()


def _parts(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Yield the elements [lo, hi) of a parameter as parts of single rows, and as whole rows of one chunk."""
    while lo < hi:
        row = lo // _ROW * _ROW
        end = row + _ROW
        if lo == row and end <= hi:
            end = min((lo // _SIZE + 1) * _SIZE, hi // _ROW * _ROW)
        yield lo, min(end, hi)
        lo = end


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
