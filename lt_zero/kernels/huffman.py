"""A canonical Huffman coder for bytes (Huffman, 1952), with code words of at most 12 bits, on the CPU only.

A coded string is: one byte, 0 for stored or 1 for coded; the number of bytes before coding (8 bytes, little-endian);
then the bytes themselves, or the lengths of the code words of all 256 symbols, a byte for each run of up to 16 equal
ones (length * 16 + run - 1), and the code words. Words are numbered in the order of their lengths, then symbols; their
first bit is the lowest of a byte. Strings that would not shrink are stored: a coded string is at most 9 bytes longer.

Tensors of a device are copied to the host first: the coder is made for what is left of a tensor after sparsification.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from lt_zero.kernels import library

OVERHEAD = 9  # bytes
_LONGEST, _CORRUPT = 12, 3  # csrc/cpu/huffman.cpp, lt_error
_STORED, _CODED = 0, 1


class CorruptError(ValueError):
    """Encoded data is damaged."""


def huffman_encode(data: Tensor) -> Tensor:
    """Code a string of bytes.

    Args:
        data: 1D uint8 on the CPU, contiguous.

    Returns:
        1D uint8 of at most ``data.numel() + OVERHEAD`` bytes.

    Raises:
        ValueError: ``data`` is something else.
    """
    _check("data", data)
    lib = library.cpu()
    if lib is None:
        return huffman_encode_reference(data)
    out, used = torch.empty(data.numel() + OVERHEAD, dtype=torch.uint8), ctypes.c_int64()
    code = lib.lt_cpu_huffman_encode(data.data_ptr(), data.numel(), out.data_ptr(), ctypes.byref(used))
    library.check(lib, code)
    return out[: used.value]


def huffman_store(data: Tensor) -> Tensor:
    """A string of bytes as ``huffman_encode`` makes it of one that would not shrink."""
    _check("data", data)
    header = bytes([_STORED]) + data.numel().to_bytes(OVERHEAD - 1, "little")
    return torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), data])


def huffman_decode(coded: Tensor, most: int) -> Tensor:
    """The bytes that ``huffman_encode`` coded.

    Args:
        coded: 1D uint8 on the CPU, contiguous.
        most: the bytes that the result may have at most: damaged data must not ask for more memory.

    Raises:
        CorruptError: ``coded`` is damaged.
        ValueError: ``coded`` is no such tensor.
    """
    _check("coded", coded)
    lib = library.cpu()
    if lib is None:
        return huffman_decode_reference(coded, most)
    # Check the size before it is allocated: it comes from the data, which may be damaged.
    size = _checked_size(lib.lt_cpu_huffman_size(coded.data_ptr(), coded.numel()), most)
    out = torch.empty(size, dtype=torch.uint8)
    code = lib.lt_cpu_huffman_decode(coded.data_ptr(), coded.numel(), out.data_ptr(), size)
    if code == _CORRUPT:
        raise CorruptError(f"{coded.numel()} Huffman-coded bytes are damaged.")
    library.check(lib, code)
    return out


def huffman_encode_reference(data: Tensor) -> Tensor:
    """``huffman_encode`` in NumPy operations."""
    _check("data", data)
    raw = data.numpy()
    lengths = _optimal_lengths(np.bincount(raw, minlength=256).tolist())
    runs = _packed_lengths(lengths)
    sizes = np.array(lengths)[raw]
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(raw) else 0
    kind, body = _STORED, raw.tobytes()
    if len(runs) + (total + 7) // 8 < len(raw):
        words, bits = np.array(_code_words(lengths))[raw], np.zeros(total, dtype=np.uint8)
        # Write bit number ``place`` of all words at once, where words are that long.
        for place in range(_LONGEST):
            long = sizes > place
            bits[(ends - sizes + place)[long]] = words[long] >> place & 1
        kind, body = _CODED, runs + np.packbits(bits, bitorder="little").tobytes()
    coded = bytes([kind]) + len(raw).to_bytes(8, "little") + body
    return torch.frombuffer(bytearray(coded), dtype=torch.uint8)


def huffman_decode_reference(coded: Tensor, most: int) -> Tensor:
    """``huffman_decode`` in NumPy operations."""
    _check("coded", coded)
    raw = coded.numpy().tobytes()
    size = int.from_bytes(raw[1:9], "little", signed=True) if len(raw) >= OVERHEAD else -1
    size, kind, body = _checked_size(size, most), raw[0], raw[OVERHEAD:]
    if kind == _STORED and len(body) == size:
        return torch.frombuffer(bytearray(body), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    lengths, begin = _unpacked_lengths(body)
    if kind != _CODED or sum(2 ** (_LONGEST - length) for length in lengths if length) > 2**_LONGEST:
        raise CorruptError(f"{len(raw)} Huffman-coded bytes are damaged.")
    symbols, bits = np.zeros(2**_LONGEST, dtype=np.uint8), np.zeros(2**_LONGEST, dtype=np.int64)
    for symbol, (length, word) in enumerate(zip(lengths, _code_words(lengths), strict=True)):
        if length:
            # The bits after a word are those of the next one: any of them lead to the same entry.
            symbols[word :: 1 << length], bits[word :: 1 << length] = symbol, length
    # The word that would begin at each bit; then from word to word.
    padded = np.frombuffer(body[begin:] + bytes(3), dtype=np.uint8).astype(np.int64)
    wide = padded[:-2] | padded[1:-1] << 8 | padded[2:] << 16
    window = (wide[:, None] >> np.arange(8) & (2**_LONGEST - 1)).ravel()
    steps, place, places = bits[window].tolist(), 0, list[int]()
    for _ in range(size):
        # The padding behind the last byte is no word: without this check damaged data would be decoded from it.
        if place >= len(steps) - 8 or steps[place] == 0:
            raise CorruptError(f"{len(raw)} Huffman-coded bytes are damaged.")
        places.append(place)
        place += steps[place]
    if (place + 7) // 8 != len(body) - begin:
        raise CorruptError(f"{len(raw)} Huffman-coded bytes are damaged.")
    return torch.from_numpy(symbols[window[np.array(places, dtype=np.int64)]])


# ---- for both --------------------------------------------------------------------------------------------------------


def _check(name: str, data: Tensor) -> None:
    if data.dim() != 1 or data.dtype != torch.uint8 or data.device.type != "cpu" or not data.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(data.shape)}, dtype {data.dtype}, on {data.device}, contiguous: "
            f"{data.is_contiguous()}; one dimension of contiguous uint8 on the CPU is needed."
        )


def _checked_size(size: int, most: int) -> int:
    if not 0 <= size <= most:
        raise CorruptError(f"Huffman-coded data says it had {size} bytes; from 0 to {most} are possible.")
    return size


# ---- for references --------------------------------------------------------------------------------------------------


def _optimal_lengths(counts: list[int]) -> list[int]:
    """Optimal lengths of at most ``_LONGEST`` bits, by package-merge (Larmore, Hirschberg, JACM 37, 1990)."""
    order = sorted((symbol for symbol in range(256) if counts[symbol]), key=lambda symbol: counts[symbol])
    lengths = [0] * 256
    if len(order) < 2:
        lengths[order[0] if order else 0] = len(order)
        return lengths
    levels, below = list[list[bool]](), list[int]()
    for _ in range(_LONGEST):
        pairs = [a + b for a, b in zip(below[::2], below[1::2], strict=False)]
        # A stable sort: of equal weights the symbols come first.
        merged = sorted([(counts[s], True) for s in order] + [(w, False) for w in pairs], key=lambda item: item[0])
        levels.append([is_symbol for _, is_symbol in merged])
        below = [weight for weight, _ in merged]
    wanted = 2 * len(order) - 2
    for level in reversed(levels):
        symbols = sum(level[:wanted])
        for symbol in order[:symbols]:
            lengths[symbol] += 1
        wanted = 2 * (wanted - symbols)
    return lengths


def _code_words(lengths: list[int]) -> list[int]:
    """Canonical words with their first bit lowest."""
    words, following = [0] * 256, 0
    for length in range(1, _LONGEST + 1):
        for symbol in range(256):
            if lengths[symbol] == length:
                words[symbol] = int(format(following, f"0{length}b")[::-1], 2)
                following += 1
        following <<= 1
    return words


def _packed_lengths(lengths: list[int]) -> bytes:
    packed, symbol = bytearray(), 0
    while symbol < 256:
        run = 1
        while run < 16 and symbol + run < 256 and lengths[symbol + run] == lengths[symbol]:
            run += 1
        packed.append(lengths[symbol] << 4 | run - 1)
        symbol += run
    return bytes(packed)


def _unpacked_lengths(body: bytes) -> tuple[list[int], int]:
    lengths, at = list[int](), 0
    while len(lengths) < 256:
        run = (body[at] & 15) + 1 if at < len(body) else 256
        if at >= len(body) or body[at] >> 4 > _LONGEST or len(lengths) + run > 256:
            raise CorruptError(f"The code of {len(body)} Huffman-coded bytes is damaged.")
        lengths += [body[at] >> 4] * run
        at += 1
    return lengths, at
