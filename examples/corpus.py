"""Real text that every machine has: the sources of the running Python's standard library, read as bytes.

Files, not windows, are split into training and validation, so that no text is seen on both sides.
"""

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Not the library itself, or (encodings, pydoc_data) generated tables and text rather than code.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
VALIDATION_SHARE = 10  # one file in this many
SMALLEST = 1_000_000  # bytes of text below which training would be pointless


def source_files() -> list[Path]:
    """The library's sources, relative to its folder, in the same order on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path for path in paths if not SKIPPED & set(path.parts))


def is_validation(path: Path) -> bool:
    """Decide a file's side by its name alone, so that every rank and every run agree."""
    return zlib.crc32(path.as_posix().encode()) % VALIDATION_SHARE == 0


def read_text(*, validation: bool) -> Tensor:
    """The files of one side, concatenated, as a tensor of bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join((root / path).read_bytes() for path in source_files() if is_validation(path) == validation)
    if not validation and len(text) < SMALLEST:
        raise RuntimeError(f"only {len(text)} bytes of Python sources under {root}: this demo trains on them")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` bytes as inputs, each with the bytes shifted by one as targets."""

    def __init__(self, text: Tensor, context: int, limit: int | None = None) -> None:
        """Cut `text` end to end; with `limit`, keep that many windows, spread evenly over the text."""
        self.text = text
        self.context = context
        count = (len(text) - 1) // context
        kept = count if limit is None else min(limit, count)
        self.starts = [index * count // kept * context for index in range(kept)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
