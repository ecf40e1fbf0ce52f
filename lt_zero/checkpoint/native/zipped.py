"""The bytes of a zip with stored records: what stands before each record, after it, and at the end.

Python's ``zipfile`` cannot align values, nor put a record's checksum behind it without hiding its size, nor write a
directory that leaves bytes out; see Note [Two zips in one] in torchfile.py for what needs that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_U32, _U16 = 0xFFFFFFFF, 0xFFFF  # what stands in a field whose value is in the zip64 part
_ZIP64, _OURS = 0x0001, 0x5A4C  # tags of extra fields
_DESCRIBED = 0x0008  # flag: a descriptor follows the content
_DATE = 0x0021  # 1980-01-01: equal values make equal files
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_TAG = struct.Struct("<HH")


class Record(NamedTuple):
    """One file of the archive."""

    name: bytes
    offset: int  # of its header
    nbytes: int
    crc: int = 0
    described: bool = False  # the CRC stands behind the content


def local_header(record: Record, extra: bytes = b"") -> bytes:
    """What stands before the record's content."""
    size = min(record.nbytes, _U32)
    extra = _zip64(record.nbytes) + extra
    needs = 45 if record.nbytes >= _U32 else 20
    crc, flags = (0, _DESCRIBED) if record.described else (record.crc, 0)
    lengths = (len(record.name), len(extra))
    return _LOCAL.pack(0x04034B50, needs, flags, 0, 0, _DATE, crc, size, size, *lengths) + record.name + extra


def aligned_header(record: Record, alignment: int, inlay: bytes) -> bytes:
    """The same, such that the content is aligned in the file. ``inlay`` is its end.

    Raises:
        ValueError: the inlay is longer than an extra field can be, 65535 bytes less some.
    """
    start = record.offset + _LOCAL.size + len(record.name) + len(_zip64(record.nbytes)) + _TAG.size + len(inlay)
    length = -start % alignment + len(inlay)
    if len(_zip64(record.nbytes)) + _TAG.size + length > _U16:
        raise ValueError(f"{length} bytes do not fit into the extra field of a zip.")
    return local_header(record, _TAG.pack(_OURS, length) + bytes(length - len(inlay)) + inlay)


def descriptor(record: Record) -> bytes:
    """What stands after the record's content."""
    if not record.described:
        return b""
    sizes = "QQ" if record.nbytes >= _U32 else "II"
    return struct.pack(f"<II{sizes}", 0x08074B50, record.crc, record.nbytes, record.nbytes)


def directory(records: Sequence[Record], at: int) -> bytes:
    """What ends the archive. ``at``: the offset at which it will stand."""
    parts = []
    for name, offset, nbytes, crc, described in records:
        extra = _zip64(nbytes, nbytes, offset)
        size, needs = min(nbytes, _U32), 45 if extra else 20
        flags = _DESCRIBED if described else 0
        rest = (len(name), len(extra), 0, 0, 0, 0, min(offset, _U32))
        parts.append(_CENTRAL.pack(0x02014B50, needs, needs, flags, 0, 0, _DATE, crc, size, size, *rest) + name + extra)
    entries = b"".join(parts)
    count, length = len(records), len(entries)
    end = b""
    if count >= _U16 or length >= _U32 or at >= _U32:
        end = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, at)
        end += struct.pack("<IIQI", 0x07064B50, 0, at + length, 1)
    count, length, at = min(count, _U16), min(length, _U32), min(at, _U32)
    return entries + end + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, length, at, 0)


def _zip64(*values: int) -> bytes:
    """The extra field with the values that do not fit into 32 bits."""
    large = [value for value in values if value >= _U32]
    if not large:
        return b""
    if len(values) == 1:
        large *= 2  # in a local header both sizes are there
    return _TAG.pack(_ZIP64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large)
