"""The code blocks of README.md and docs/, and what they may use without defining it.

A comment right before a block says how the tests treat it (``Block.marks``):

    hidden      Python code that runs before the block, in its namespace
    ranks       ``2``: on two ranks of the pool; ``script``: also as a script, as it stands
    script      the number of processes that it starts as it stands, in a slow test
    run by      another test module runs it
    printed by  Python code that prints the block
    output of   the command that prints the block; ``ds_config.json`` is the JSON block before it
    not run     why nothing runs it
"""

from __future__ import annotations

import linecache
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_zero
import lt_zero.ops
import lt_zero.optim
from tests.support.features import KEYS
from tests.support.lightning_tools import QUIET
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKS = {"hidden", "ranks", "script", "run by", "printed by", "output of", "not run"}
_COMMENT = re.compile(r"<!-- ([a-z ]+): ?(.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    lines = path.read_text(encoding="utf-8").splitlines()
    found, between, start = [], 0, None
    for number, line in enumerate(lines):
        if not line.startswith("```") or line.count("```") > 1:
            continue
        if start is None:
            start = number
            continue
        before = "\n".join(lines[between:start])
        block = Block(
            page=str(path.relative_to(ROOT)),
            line=start + 2,
            language=lines[start][3:].strip(),
            text="\n".join(lines[start + 1 : number]) + "\n",
            marks=_marks_at_end(before),
        )
        found.append(block)
        between, start = number + 1, None
    assert start is None, f"{path}: a code block that begins in line {start} has no end"
    return found


def _marks_at_end(text: str) -> dict[str, str]:
    """Comments with nothing but white space after them."""
    marks: dict[str, str] = {}
    rest = text.rstrip()
    while rest.endswith("-->"):
        comment = rest[rest.rindex("<!--") :]
        match = _COMMENT.fullmatch(comment)
        if match is not None:
            assert match[1] in MARKS, f"{comment!r}: not one of {sorted(MARKS)}"
            marks[match[1]] = textwrap.dedent(match[2]).strip()
        rest = rest[: -len(comment)].rstrip()
    return marks


# Public names of features, which may have been taken out.
_NAMES = {
    r"lt_zero\.attention": "sparse_attention",
    r"lt_zero\.(tiled|loss_head|TiledLinear)": "tiles",
    r"lt_zero(\.| import.*)EMA": "ema",
    r"virtual_ranks": "virtual_ranks",  # also an argument of the strategies
    r"stage[23]_offload": "offload",  # options of the group zero_optimization
}


def features_in(block: Block) -> list[str]:
    """The features that a block uses."""
    text = block.text + "".join(block.marks.values())
    patterns = _NAMES | {rf"\b{key}\b": feature for key, feature in KEYS.items()}
    return [feature for pattern, feature in patterns.items() if re.search(pattern, text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


class DemoNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens).relu())


class DemoModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = DemoNet()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SmallTrainer(L.Trainer):
    """The Trainer of a block, in this process, on the CPU, for a few batches."""

    def __init__(self, **arguments: Any) -> None:
        defaults = {"logger": False, "max_epochs": 1, "limit_train_batches": 4, "enable_checkpointing": False}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1}
        super().__init__(**{**defaults, **quiet, **arguments, **here})


class AskedTrainer:
    """Keeps the strategy that a script gives to its Trainer, and trains nothing."""

    def __init__(self, **arguments: Any) -> None:
        self.strategy = arguments["strategy"]

    def fit(self, *_: Any) -> None: ...


def names_of_script(test: str) -> dict[str, Any]:
    """The names that the script which the module ``test`` runs has at its end; ``trainer`` is an AskedTrainer."""
    (block,) = (block for block in BLOCKS if block.marks.get("run by") == test)
    found: dict[str, Any] = {"__name__": "__main__"}
    with patch.object(L, "Trainer", AskedTrainer):
        run_text(block.text, str(block), found)
    return found


def losses_of_page(test: str, loader: DataLoader[Any], alone: bool) -> list[float]:
    """The losses of ``Model`` of the script that the module ``test`` runs, on one process or as its trainer says."""
    found = names_of_script(test)
    losses = list[float]()

    class Model(found["Model"]):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    torch.manual_seed(3)
    how = {"strategy": "auto" if alone else found["trainer"].strategy, "devices": 1 if alone else 2, "max_epochs": 2}
    L.Trainer(**{**QUIET, **how, "use_distributed_sampler": False}).fit(Model(), loader)
    return losses


def execute(block: Block) -> None:
    """Run a block of Python in a namespace with the names that the pages do not define again and again."""
    namespace: dict[str, Any] = {
        "__name__": "__main__",
        "L": L,
        "torch": torch,
        "lt_zero": lt_zero,
        "ZeroStrategy": lt_zero.ZeroStrategy,
        "DemoNet": DemoNet,
        "DemoModel": DemoModel,
        "loader": DataLoader(torch.randn(16, 32), batch_size=4),  # type: ignore[arg-type]
    }
    run_text(block.marks.get("hidden", ""), f"{block} (hidden)", namespace)
    run_text("\n" * (block.line - 1) + block.text, str(block), namespace)


def run_text(text: str, name: str, namespace: dict[str, Any]) -> None:
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks
    exec(compile(text, name, "exec"), namespace)


def execute_in(folder: Path, block: Block) -> None:
    """On a rank of the pool."""
    os.chdir(folder)
    try:
        execute(block)
    finally:
        os.chdir("/")
