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


# Manifests that cannot be read.
STRANGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no version": lambda body: body.pop("version"),
    "a version that is no number": lambda body: body.update(version="one"),
    "no files": lambda body: body.pop("files"),
    "files as text": lambda body: body.update(files="x"),
    "no tensors": lambda body: body.pop("tensors"),
    "a dtype that is none": lambda body: next(iter(body["tensors"].values())).update(dtype="load"),
    "a dtype that is not there": lambda body: next(iter(body["tensors"].values())).update(dtype="float7"),
    "a file that is not there": lambda body: next(iter(body["tensors"].values()))["chunks"][0].__setitem__(2, 99),
    "a file elsewhere": lambda body: body["files"][0].update(name="../../../../etc/passwd"),
    "no chunks": lambda body: next(iter(body["tensors"].values())).pop("chunks"),
}


def _overlap(body: dict[str, Any]) -> None:
    """Two halves of a weight that are the same half: as many elements as it has."""
    first, second = _halves(_halved(body))
    second[0], second[3] = first[0], first[3]


def _halved(body: dict[str, Any]) -> dict[str, Any]:
    """An entry of a matrix with an even number of rows, in one chunk."""
    for entry in body["tensors"].values():
        if len(entry["chunks"]) == 1 and len(entry["shape"]) == 2 and entry["shape"][0] % 2 == 0:
            found: dict[str, Any] = entry
            return found
    raise AssertionError("there is none")


def _halves(entry: dict[str, Any]) -> list[Any]:
    rows, columns = entry["shape"]
    file, start = entry["chunks"][0][2:]
    half = rows // 2 * columns * 4
    entry["chunks"] = [[[0, 0], [rows // 2, columns], file, start], [[rows // 2, 0], [rows // 2, columns], file, start]]
    entry["chunks"][1][3] += half
    return list(entry["chunks"])


def _removed(body: dict[str, Any]) -> None:
    body["tensors"].pop(next(name for name in body["tensors"] if name.startswith("model.")))


def _weight(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for name, entry in body["tensors"].items() if name.startswith("model."))
    return found


# Manifests that can be read, and contradict themselves or the rest of the checkpoint.
BELIEVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "overlapping chunks": _overlap,
    "a chunk twice": lambda body: _weight(body)["chunks"].append(_weight(body)["chunks"][0]),
    "a chunk less": lambda body: _weight(body)["chunks"].pop(),
    "a weight less": _removed,
    "no name of a weight": lambda body: body["order"].pop(0),
    "a tie to nothing": lambda body: body["aliases"].update(x="y"),
    "ties as a list": lambda body: body.update(aliases=["x"]),
    "names that are numbers": lambda body: body.update(order=[1, 2]),
    "a shape of halves": lambda body: _weight(body).update(shape=[1.5]),
    "a start that is true": lambda body: _weight(body)["chunks"][0].__setitem__(3, True),
    "a length that is text": lambda body: body["files"][0].update(bytes="9"),
    "a run that is a list": lambda body: body.update(run=[]),
    "a tensor of nobody": lambda body: body["tensors"].update(weights=_weight(body)),
    "an optimizer too many": lambda body: body["tensors"].update({"optimizer_7.state.a.b": _weight(body)}),
}
