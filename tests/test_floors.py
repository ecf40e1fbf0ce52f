"""The rooms of the package stand on floors: a file imports its own floor and lower ones only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lt_zero

ROOT = Path(lt_zero.__file__).parent
FLOORS = (
    {"batches", "clock", "compat", "config", "conf", "ops", "optim", "waiting"},
    {"offload"},
    {"core"},
    {"planning", "checkpoint", "activation"},
    {"build"},
    {"precision", "attach", "progress", "hparams", "unanimous", "reconcile", "loggers", "monitoring"}
    | {"flops", "flops_formulas", "flops_table", "profiler", "readings", "signals", "watcher"},
    {"breakdown", "persistence", "restoring", "loading", "checkpointing", "monitored"},
    {"strategy", "cli", "sweep", "plotting", "__init__", "__main__"},
)
TOP = FLOORS[-1] | FLOORS[-2] | FLOORS[-3] | {"compat"}  # know lightning
# The first does them; the others compare what it is to do, and find out why it fails.
COLLECTIVES = {"core/comm.py", "core/sequence.py", "core/rollcall.py", "core/ended.py"}
SAVES = "torch.distributed.checkpoint"  # plans over a process group that comm.py makes


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    """Also those inside of functions; not those that only a type checker sees."""
    seen_by_checkers = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in seen_by_checkers:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def test_nobody_imports_from_above() -> None:
    for file, tree in files():
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] != "lt_zero" or room(file) == "__init__":
                continue
            below = parts[1] if any(parts[1] in rooms for rooms in FLOORS) else "__init__"  # from lt_zero import shard
            assert floor(below) <= floor(room(file)), f"{file} imports {name}"


def test_only_the_top_knows_lightning() -> None:
    for file, tree in files():
        if room(file) not in TOP:
            assert not [name for name in imports(tree) if name.split(".")[0] in ("lightning", "torchmetrics")], file


def test_collectives_are_in_one_place() -> None:
    for file, tree in files():
        if file not in COLLECTIVES:
            found = [name for name in imports(tree) if name.startswith("torch.distributed")]
            if room(file) in ("checkpoint", "compat"):
                found = [name for name in found if not name.startswith(SAVES)]
            assert not found, file
