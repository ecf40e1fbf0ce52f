"""Traces which files of the package a step, a save, a load and a configuration enter: docs/internals/walks.md.

``python -m tests.support.walks`` rewrites the page; tests/test_walks.py compares it with what runs.
"""

from __future__ import annotations

import ast
import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist

import lt_zero
from lt_zero import ZeroStrategy
from lt_zero.core.comm import work
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.models import Net, next_token_loss
from tests.support.paths import PACKAGE, ROOT
from tests.support.pool import Pool

PAGE = ROOT / "docs" / "internals" / "walks.md"
ENV = {"LT_ZERO_SHARED_MEMORY": "0"}  # the same files on every machine
WAIT = 60.0  # seconds: a busy machine enters the same files, too
STEP = 3  # the order of gathers is recorded by then
CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
HEAD = """---
search: {exclude: true}
---

# Which files run

Written by `python -m tests.support.walks` from traces of real runs, and compared with them by the tests: a Trainer with
three blocks, AdamW and clipping on 2 ranks that are connected by gloo, rank 0. Files stand in the order in which they
are entered first; `common/` is left out. "Frames" are the most calls of this package in a row above a function of
`torch.distributed`.
"""


class Function(NamedTuple):
    """A function of the package.

    Attributes:
        file: relative to the package.
        line: the first one of its code, that of a decorator if it has one.
    """

    file: str
    line: int


@dataclass
class Walk:
    """The files that a piece of a run enters.

    Attributes:
        files: relative to the package, in the order of the first call.
        functions: that are entered.
        frames: most calls of the package in a row above a collective, by the name of torch's function.
    """

    files: list[str] = field(default_factory=list)
    functions: set[Function] = field(default_factory=set)
    frames: dict[str, int] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if (file := _file_of(frame)) is not None:
            if file not in self.files:
                self.files.append(file)
            self.functions.add(Function(file, code.co_firstlineno))
        elif code.co_filename.endswith("distributed_c10d.py") and code.co_name in COLLECTIVES:
            depth, above = 0, frame.f_back
            while above is not None and (_is_package(above) or _is_between(above)):
                depth, above = depth + _is_package(above), above.f_back
            self.frames[code.co_name] = max(depth, self.frames.get(code.co_name, 0))


COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "all_to_all", "broadcast", "all_reduce", "all_gather")


def _is_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE)) and not frame.f_code.co_name.endswith("comp>")


def _is_between(frame: FrameType) -> bool:
    """True for comprehensions, decorators and contexts of Python and torch, and one like torch's, which are no steps.

    Comprehensions are frames until Python 3.11 only.
    """
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    return name.endswith(("comp>", "in_no_grad")) or file.endswith(
        ("contextlib.py", "_contextlib.py", "c10d_logger.py")
    )


def _file_of(frame: FrameType) -> str | None:
    if not _is_package(frame) or frame.f_code.co_name == "<module>":
        return None
    file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
    return None if file.startswith("common/") else file


@contextmanager
def traced(walk: Walk) -> Iterator[None]:
    """Context in which ``walk`` sees all calls of this thread, and of threads that it starts."""
    gc.collect()
    gc.disable()  # what ends objects of runs before is no part of the walk
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()


class _Trace(pl.Callback):
    """Traces one step, and a save after it."""

    def __init__(self, folder: str) -> None:
        self.step = Walk()
        self.save = Walk()
        self._folder = folder
        self._open: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEP:
            self._open = traced(self.step)
            self._open.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEP + 1:
            self._open.__exit__(None, None, None)
            with traced(self.save):
                trainer.save_checkpoint(f"{self._folder}/walk.ckpt")


def _trainer(stage: int, folder: str) -> tuple[Walk, Walk]:
    trace = _Trace(folder)
    options = {"callbacks": [trace], "max_steps": STEP + 1, "gradient_clip_val": 1.0}
    trainer = sharded_trainer(stage, config={"gradient_clipping": 1.0}, **options)
    trainer.fit(GPT(dist.get_world_size(), depth=3, optimizer="AdamW"))
    return trace.step, trace.save


def _load(folder: str) -> Walk:
    walk = Walk()
    config = {**CONFIG, "bf16": {"enabled": False}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    config |= {"train_micro_batch_size_per_gpu": 1}
    engine: Any = lt_zero.initialize(model=Net(depth=3), config=config)[0]
    engine.backward(next_token_loss(engine, 0, 0, dist.get_rank()))
    engine.step()
    engine.save_checkpoint(folder)
    with traced(walk):
        engine.load_checkpoint(folder)
    return walk


def _configure(folder: str) -> Walk:
    path, walk = Path(folder, "ds_config.json"), Walk()
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    with traced(walk):
        ZeroStrategy(config=path, overrides=["zero_optimization.stage=2"])
    return walk


def _all(folder: str) -> dict[str, Walk]:
    torch.manual_seed(0)
    own = Path(folder, str(dist.get_rank()))
    own.mkdir()
    with mock.patch.object(work, "_SLICE", WAIT):  # after which a wait for a rank that is late is examined
        walks = {f"A step at stage {stage}": _trainer(stage, folder)[0] for stage in (2, 3)}
        walks |= {"A save": _trainer(3, folder)[1], "A load": _load(folder)}
    return {**walks, "A configuration": _configure(str(own))}


def walks(pool: Pool, folder: str) -> dict[str, Walk]:
    """The walks of rank 0, by title."""
    found: dict[str, Walk] = pool.run(2, _all, folder, env=ENV)[0]
    return found


def page(found: dict[str, Walk]) -> str:
    """The text of PAGE."""
    text = [HEAD]
    for title, walk in found.items():
        text.append(f"## {title}: {len(walk.files)} files\n")
        if walk.frames:
            told = ", ".join(f"{name} {depth}" for name, depth in sorted(walk.frames.items()))
            text.append(f"Frames: {told}.\n")
        text += [*(f"{n}. `{file}`: {_says(file)}" for n, file in enumerate(walk.files, 1)), ""]
    return "\n".join(text)


def _says(file: str) -> str:
    """The first sentence of a file's docstring."""
    document = ast.get_docstring(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))) or ""
    return " ".join(document.partition("\n\n")[0].split())


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        pool = Pool()
        PAGE.write_text(page(walks(pool, folder)), encoding="utf-8")
        pool.close()


if __name__ == "__main__":
    main()
