"""The CPU library under AddressSanitizer and UndefinedBehaviorSanitizer, driven without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lt_zero.kernels import compiler

# Buffers end exactly where the data does, so that one element too many is found.
DRIVER = """
import ctypes, random, sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_void_p

lib = ctypes.CDLL(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [ctypes.c_size_t], [c_void_p]

class Tensors(Structure):
    _fields_ = [("count", c_int64), *[(n, c_void_p) for n in ("numel", "param", "grad", "state1", "state2", "out")],
                *[(n, c_int32) for n in ("param_dtype", "grad_dtype", "state_dtype", "out_dtype", "maximize")],
                *[(n, c_void_p) for n in ("scale", "clip", "found_inf", "levels", "places")], ("place_count", c_int64)]

class Options(Structure):
    _fields_ = [*[(f"d{i}", c_double) for i in range(6)], ("a", c_int32), ("b", c_int32)]

class Mixed(Structure):
    _fields_ = [("count", c_int64), ("numel", c_void_p), ("data", c_void_p), ("dtype", c_void_p)]

class Pairs(Structure):
    _fields_ = [("count", c_int64), ("numel", c_void_p), ("dst", c_void_p), ("src", c_void_p),
                ("dst_dtype", c_int32), ("src_dtype", c_int32), ("factor", c_double), ("scale", c_void_p)]

WIDTH = [4, 2, 2]

def buffers(sizes, dtype):
    found = []
    for size in sizes:
        address = libc.malloc(max(1, size * WIDTH[dtype]))
        ctypes.memset(address, 1, size * WIDTH[dtype])
        found.append(address)
    return (c_void_p * len(sizes))(*found)

class Blocks(Structure):
    _fields_ = [*[(n, c_int64) for n in ("rows", "numel", "residual_row", "block")],
                *[(n, c_int32) for n in ("bits", "dtype", "normal")]]

def blocks(numel, block, bits, normal, dtype, threads):
    pad = lambda n: -(-n // 16) * 16
    nbytes = pad(-(-numel * bits // 8)) + pad(-(-numel // block) * 4)
    x, residual = buffers([numel], dtype), buffers([numel], 0)
    coded = (c_void_p * 2)(*[libc.malloc(max(1, nbytes)) for _ in range(2)])
    t = ctypes.byref(Blocks(1, numel, 0, block, bits, dtype, normal))
    for out in coded:
        assert lib.lt_cpu_encode_blocks(t, c_void_p(x[0]), c_void_p(residual[0]), c_void_p(out), threads) == 0
    assert lib.lt_cpu_decode_blocks(t, c_int64(2), coded, c_double(0.5), c_void_p(x[0]), threads) == 0
    for address in (*x, *residual, *coded):
        libc.free(address)

def coded_moments(t, sizes, threads):
    # Their codes are bytes of 1, and their levels and middles equal.
    records = [buffers([130 * -(-size // 256) for size in sizes], 1) for _ in range(2)]
    levels = copied([1.0] * 768, ctypes.c_float)
    first, second = [ctypes.cast(one, c_void_p) for one in records]
    dtypes = t.param_dtype, t.grad_dtype, 3, t.out_dtype
    with_codes = Tensors(t.count, t.numel, t.param, t.grad, first, second, t.out, *dtypes)
    with_codes.levels, with_codes.places, with_codes.place_count = levels, t.places, t.place_count
    adam = Options(1e-3, 0.9, 0.999, 1e-8, 0.1, 3.0, 1)
    assert lib.lt_cpu_adam_step(ctypes.byref(with_codes), ctypes.byref(adam), threads) == 0
    for address in (*records[0], *records[1], levels):
        libc.free(address)

def topk(numel, threads):
    c, k = buffers([numel], 0), numel // 3
    indices = libc.malloc(max(1, 4 * k))
    args = (c_void_p(c[0]), c_int64(numel), c_int64(k), c_void_p(indices), threads)
    assert lib.lt_cpu_select_topk(*args) == 0
    libc.free(indices)
    libc.free(c[0])

class Rounding(Structure):
    _fields_ = [(n, c_int64) for n in ("numel", "tensor", "begin", "first", "row", "stride", "seed", "step")]
    _fields_ += [(n, c_void_p) for n in ("counter", "src", "dst")]

def rounding(rng, threads):
    rows, row = rng.choice([(0, 1), (1, 1), (1, 127), (1, 70001), (9, 3), (7, 200), (3, 20001)])
    src, dst = buffers([rows * row], 0)[0], buffers([rows * row], 1)[0]
    t = Rounding(rows * row, 0, 0, rng.choice([0, 8, 127, 1 << 40]), row, row + rng.randrange(99), 5, 1, None, src, dst)
    assert lib.lt_cpu_round_stochastic(ctypes.byref(t), threads) == 0
    libc.free(c_void_p(src))
    libc.free(c_void_p(dst))

def places(rng, sizes):
    # Each tensor is in two parts of parameters.
    found = []
    for tensor, size in enumerate(sizes):
        for begin in sorted({0, rng.randrange(size)}) if size else ():
            row = rng.choice([1, 3, 130, 1 << 40])
            found += [tensor, begin, rng.choice([0, 8, 1 << 40]), row, row + 64, 5, 1]
    return copied(found, c_int64), len(found) // 7

def huffman(rng):
    # Coded, then damaged: copies of exactly the size that the decoder is told.
    raw = bytes(int(abs(rng.gauss(0, rng.choice([1, 20]))) * 8) & 255 for _ in range(rng.choice([0, 1, 7, 3000])))
    out, used = ctypes.create_string_buffer(len(raw) + 9), c_int64()
    assert lib.lt_cpu_huffman_encode(raw, c_int64(len(raw)), out, ctypes.byref(used)) == 0
    coded, results = out.raw[:used.value], set()
    for damage in range(60):
        data = bytearray(coded)
        for _ in range(rng.randint(0, 3) if damage else 0):
            data[rng.randrange(rng.choice([min(len(data), 60), len(data)]))] = rng.randrange(256)
        data[1:9] = coded[1:9]  # the size is checked by the caller
        data = data[:rng.choice([len(data), rng.randrange(len(data))])] if damage else data
        source, target = libc.malloc(max(1, len(data))), libc.malloc(max(1, len(raw)))
        ctypes.memmove(source, bytes(data), len(data))
        lengths = c_int64(len(data)), c_int64(len(raw))
        code = lib.lt_cpu_huffman_decode(c_void_p(source), lengths[0], c_void_p(target), lengths[1])
        assert code in (0, 3) and (damage or (code == 0 and ctypes.string_at(target, len(raw)) == raw))
        libc.free(source)
        libc.free(target)

class Rows(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]

class Attention(Structure):
    _fields_ = [*[(n, c_int64) for n in ("batch", "heads", "kv_heads", "length", "dim", "block", "layouts")],
                *[(n, c_void_p) for n in ("row_begin", "row_index", "column_begin", "column_index")],
                *[(n, Rows) for n in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")],
                ("lse", c_void_p), ("key_bias", c_void_p), ("scale", c_double), ("dropout", c_double),
                ("seed", ctypes.c_uint64), ("dtype", c_int32), ("causal", c_int32)]

def copied(values, kind):
    # To the heap, where the sanitizer sees what is read beyond its end.
    array = (kind * max(1, len(values)))(*values)
    address = libc.malloc(max(1, ctypes.sizeof(kind) * len(values)))
    ctypes.memmove(address, array, ctypes.sizeof(kind) * len(values))
    return address

def attention(rng, threads):
    length, block = rng.choice([1, 15, 33, 70, 150]), rng.choice([1, 7, 16, 32, 48])
    dim = rng.choice([1, 8, 24, 64, 100, 256])
    heads, kv, layouts, dtype, n = 4, rng.choice([1, 2, 4]), rng.choice([1, 4]), rng.randrange(2), -(-length // block)
    layout = [[[rng.random() < 0.6 for _ in range(n)] for _ in range(n)] for _ in range(layouts)]
    addresses, lists = [], []
    for rows in (layout, [list(zip(*one)) for one in layout]):
        found = [[j for j in range(n) if row[j]] for one in rows for row in one]
        ends = [sum(map(len, found[:i])) for i in range(len(found) + 1)]
        lists += [copied(ends, c_int64), copied(sum(found, []), c_int32)]
    def tensor(count, spread=1):
        row = dim * spread
        address = buffers([count * length * row - row + dim], dtype)[0]
        addresses.append(address)
        return Rows(address, count * length * row, length * row, row)
    q, out, dout, dq = (tensor(heads, s) for s in (2, 1, 3, 1))
    k, v, dk, dv = (tensor(kv, s) for s in (1, 2, 1, 1))
    lse, bias = buffers([heads * length, length], 0)
    t = Attention(1, heads, kv, length, dim, block, layouts, *lists, q, k, v, out, dout, dq, dk, dv, lse, bias, 0.5,
                  rng.choice([0.0, 0.25]), 5, dtype, rng.randrange(2))
    assert lib.lt_cpu_attention_forward(ctypes.byref(t), threads) == 0
    assert lib.lt_cpu_attention_backward(ctypes.byref(t), threads) == 0
    for address in (*addresses, *lists, lse, bias):
        libc.free(address)

def main():
    rng = random.Random(0)
    for isa in (b"amx", b"avx512", b"avx2", b"neon", b"portable"):
        if lib.lt_cpu_use_isa(c_char_p(isa)) != 0:
            continue
        for trial in range(60):
            sizes = [rng.choice([0, 1, 3, 8, 15, 16, 17, 31, 33, 40000]) for _ in range(3)]
            numel = (c_int64 * 3)(*sizes)
            g, s, w = rng.randrange(3), rng.randrange(2), rng.randrange(2)
            o = 1 if w else rng.randrange(3)
            lists = [buffers(sizes, d) for d in (w, g, s, s, o)]
            p, grad, m, v, out = [ctypes.cast(l, c_void_p) for l in lists]
            t = Tensors(3, ctypes.cast(numel, c_void_p), p, grad, m, v, out, w, g, s, o, 0)
            if w and any(sizes) and rng.random() < 0.7:
                t.places, t.place_count = places(rng, sizes)
            norms = (c_double * 6)()
            for threads in (1, 3):
                adam, sgd = Options(1e-3, 0.9, 0.999, 1e-8, 0.1, 3.0, 1), Options(0.1, 0.9, 0.0, 0.1)
                r, lamb, rates = ctypes.byref, Options(0.9, 0.99, 1e-6, 0.1), (ctypes.c_float * 3)(0.1, 0.2, 0.3)
                assert lib.lt_cpu_adam_step(r(t), r(adam), threads) == 0
                assert lib.lt_cpu_lion_step(r(t), r(Options(1e-3, 0.9, 0.99, 0.1)), threads) == 0
                assert lib.lt_cpu_adagrad_step(r(t), r(Options(1e-3, 1e-8, 0.1)), threads) == 0
                assert lib.lt_cpu_sgd_step(r(t), r(sgd), threads) == 0
                assert lib.lt_cpu_lamb_update(r(t), r(lamb), norms, threads) == 0
                assert lib.lt_cpu_lamb_apply(r(t), r(lamb), rates, threads) == 0
                mixed = Mixed(3, ctypes.cast(numel, c_void_p), grad, ctypes.cast((c_int32 * 3)(g, g, g), c_void_p))
                assert lib.lt_cpu_norm_squared(r(mixed), r(c_double()), threads) == 0
                pairs = Pairs(3, ctypes.cast(numel, c_void_p), p, grad, 0, g, 0.5, None)
                assert lib.lt_cpu_accumulate(r(pairs), threads) == w  # sums are in fp32
                cast = Pairs(3, ctypes.cast(numel, c_void_p), out, grad, o, g, 0.5, None)
                assert lib.lt_cpu_cast_scale(r(cast), threads) == 0
                for bits, normal in ((8, 0), (4, 0), (2, 0), (1, 0), (4, 1)):
                    blocks(rng.choice(sizes), rng.choice([16, 48, 1024, 65536]), bits, normal, g, threads)
                coded_moments(t, sizes, threads)
                topk(rng.choice(sizes), threads)
                rounding(rng, threads)
                attention(rng, threads)
            huffman(rng)
            for addresses in lists:
                for address in addresses:
                    libc.free(address)
            libc.free(c_void_p(t.places))
    print("clean")

main()
"""


@pytest.mark.slow
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    monkeypatch.setattr(compiler, "CPU_FLAGS", (*compiler.CPU_FLAGS, *checks))
    monkeypatch.setattr(compiler, "CPU_LINK", (*compiler.CPU_LINK, *checks))
    monkeypatch.setattr(compiler, "_load", lambda *_: None)  # only a process that starts with ASan can
    made = compiler.build(compiler.recipe_of("cpu"), tmp_path)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    asan = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    env = {**os.environ, "LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, str(script), str(made.path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "clean" in done.stdout
