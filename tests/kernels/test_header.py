"""ctypes types that are read from csrc/lt_zero.h."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from lt_zero.kernels.compiler import find_compiler
from lt_zero.kernels.header import HEADER, STRUCTS, HeaderError, parse

HEADER_TEXT = """
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
#define LT_LIMIT 256
enum lt_kind { LT_A = 0, LT_B = 7 };  // a comment; with { and (
typedef struct {
    int64_t count, numel;
    const int32_t *sizes;       // [count]
    void *const *data;
    const float *scale;
} lt_list;
typedef struct { lt_list first, second; double rate; } lt_two;
const char *lt_cpu_text(int code);
int64_t lt_cpu_size(void);
int lt_cpu_run(const lt_two *, const void *const *data, const uint8_t *in, double factor,
               const char *name, int threads);
"""


def test_declarations_become_ctypes() -> None:
    declared = parse(HEADER_TEXT)
    assert declared.constants == {"LT_LIMIT": 256, "LT_A": 0, "LT_B": 7}
    a_list, two = declared.structs["lt_list"], declared.structs["lt_two"]
    assert a_list._fields_ == [
        ("count", ctypes.c_int64),
        ("numel", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("scale", ctypes.c_void_p),
    ]
    assert two._fields_ == [("first", a_list), ("second", a_list), ("rate", ctypes.c_double)]
    address = ctypes.c_void_p
    assert declared.functions == {
        "lt_cpu_text": (ctypes.c_char_p, [ctypes.c_int]),
        "lt_cpu_size": (ctypes.c_int64, []),
        "lt_cpu_run": (
            ctypes.c_int,
            [ctypes.POINTER(two), address, address, ctypes.c_double, ctypes.c_char_p, ctypes.c_int],
        ),
    }


@pytest.mark.parametrize(
    "declaration",
    [
        "typedef struct { int a[3]; } lt_x;",
        "typedef struct { int a : 3; } lt_x;",
        "typedef struct { unsigned int a; } lt_x;",
        "typedef struct { lt_later *a; } lt_x;",
        "union lt_x { int a; };",
        "enum lt_x { LT_C };",
        "#define LT_X (1 + 2)",
        "int lt_cpu_x(const lt_later *, int threads);",
        "int lt_cpu_x(int (*call)(int));",
        "int lt_cpu_x(int a, ...);",
        "long lt_cpu_x(void);",
        "void lt_cpu_x(void);",
        "int lt_cpu_x(int a",
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_line(declaration: str) -> None:
    lines = HEADER_TEXT.count("\n")
    with pytest.raises(HeaderError, match=rf"^lt_zero\.h, line {lines + 1}: .*{declaration[:5]}"):
        parse(f"{HEADER_TEXT}{declaration}\n", "lt_zero.h")


def test_structures_have_the_layout_that_the_compiler_gives_them(tmp_path: Path) -> None:
    lines, expected = [], []
    for name, structure in STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(structure))
        for field, *_ in structure._fields_:
            lines.append(f'printf("%zu\\n%zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
            expected += [getattr(structure, field).offset, getattr(structure, field).size]
    source = "#include <stdio.h>\n#include <stddef.h>\n#include <lt_zero.h>\nint main() {\n" + "\n".join(lines) + "}\n"
    (tmp_path / "layout.cpp").write_text(source)
    program = tmp_path / "layout"
    command = [*find_compiler("cpu").command, f"-I{HEADER.parent}", tmp_path / "layout.cpp", "-o", program]
    subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert len(expected) > 100
    assert [int(line) for line in printed.split()] == expected
