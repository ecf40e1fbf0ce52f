"""Damages of a file, as disks, copies and strangers leave them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 512)


def delete(path: Path) -> None:
    path.unlink()


def zero_a_page(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 3)
        file.write(b"\xa5" * min(700, size // 3))


def flip(path: Path, seed: int = 0) -> None:
    """One bit."""
    chance = random.Random(f"{path.name}{seed}")
    at = chance.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncate": truncate,
    "empty": empty,
    "lengthen": lengthen,
    "delete": delete,
    "overwrite": zero_a_page,
    "flip": flip,
}


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as somebody would who knows the format."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    body.pop("sha256", None)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    digest = hashlib.sha256(lines.encode()).hexdigest()
    (folder / "manifest.json").write_text(f'{{"sha256": "{digest}",\n{lines}}}\n')
