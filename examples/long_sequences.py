"""Train a small Llama at the longest sequence that a limit of memory allows, with each remedy for long sequences.

python examples/long_sequences.py              # 4 GB for a process, on the CPU (10 minutes on two idle cores)
python examples/long_sequences.py --memory 8 --depth 8
python examples/long_sequences.py --quick      # a small model and a small limit, in half a minute

Each row is a run of its own in a new process, which is ended as soon as it has more than the limit. Its length is the
longest that `lt_zero.estimate_activations` expects to fit; the table has what was forecast beside what was measured.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lt_zero
from lt_zero.parallel import sequence_attention, token_mean
from train_gpt import silence_warnings

STEP = 64  # tokens of a rank; lengths are multiples


class Attention(nn.Module):
    """Causal attention with rotated positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.size, self.attend = width // heads, sequence_attention()  # over the sequence ranks, if there are any

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.attend(rotated(q, *positions), rotated(k, *positions), v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of features of each head by angles that grow with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 8 // 3
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), positions)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Llama(L.LightningModule):
    def __init__(self, width: int, depth: int, vocabulary: int, heads: int, tiled_loss: bool, tiled_mlp: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.size, self.loss_in_tiles = width // heads, tiled_loss
        if tiled_loss:
            lt_zero.loss_head(self.head)
        if tiled_mlp:
            for block in self.blocks:
                lt_zero.tiled(block.mlp)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        speeds = torch.logspace(0, -4, self.size // 2, device=self.device)
        angles = batch["position_ids"][0, :, None] * speeds
        x = self.tokens(batch["input_ids"])
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()))
        x, labels = self.norm(x), batch["shift_labels"]
        if self.loss_in_tiles:
            # The mean of this rank's tokens, which all count, and how many they are.
            return token_mean(self.head(x, labels=labels), torch.tensor(labels.numel(), device=self.device))
        return token_mean(F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Row:
    """What a run switches on."""

    name: str
    recompute: bool = False
    tiled_loss: bool = False
    tiled_mlp: bool = False
    files: bool = False
    ranks: int = 1


ROWS = (
    Row("nothing"),
    Row("blocks recomputed", True),
    Row("+ loss in tiles", True, True),
    Row("+ MLP in tiles", True, True, True),
    Row("+ inputs of blocks in files", True, True, True, True),
    Row("+ 2 sequence ranks", True, True, True, True, 2),
)


def build(row: Row, args: argparse.Namespace) -> Llama:
    torch.manual_seed(0)
    return Llama(args.width, args.depth, args.vocabulary, args.width // 64, row.tiled_loss, row.tiled_mlp)


def batch_of(length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (1, length + 1))
    return {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:], "position_ids": torch.arange(length)[None]}


def config(row: Row, folder: Path) -> dict[str, Any]:
    """The configuration of a run, with its files in ``folder``."""
    recomputes = {"mode": "full", "nvme_path": str(folder) if row.files else None}
    return {
        "zero_optimization": {"stage": 2},
        "activation_checkpointing": recomputes if row.recompute else {},
        "sequence_parallel_size": row.ranks,
    }


# ---- the forecast ------------------------------------------------------------------------------------------------


def states(row: Row, args: argparse.Namespace) -> int:
    """Bytes of weights, gradients and moments, and of the engine's buffers."""
    with torch.device("meta"):
        model = build(row, args)
    return lt_zero.estimate(model, config(row, Path()), row.ranks, device="cpu", saves=False).rank("host")


def activations(row: Row, args: argparse.Namespace, length: int) -> int:
    """Bytes of activations; a sequence rank has its part of the tokens."""
    with torch.device("meta"):
        model, batch = build(row, args), batch_of(length // row.ranks, args.vocabulary)
    return lt_zero.estimate_activations(model, batch, config(row, Path())).most


def longest(row: Row, args: argparse.Namespace, limit: float) -> int:
    """The most tokens, about, whose activations take at most ``limit`` bytes."""
    step = STEP * row.ranks
    low, length = 16 * step, 32 * step
    less = activations(row, args, low)
    for _ in range(2):  # bytes grow in proportion to the length, beside what is constant
        more = activations(row, args, length)
        found = low + (length - low) * (limit - less) / (more - less)
        low, less, length = length, more, max(0, int(found) // step * step)
        if length in (0, low):
            break
    return length


# ---- the measurement ---------------------------------------------------------------------------------------------


class Stopwatch(L.Callback):
    seconds = 0.0  # of the last step

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.start


def most_memory() -> int:
    """Bytes of this process at most (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def train(row: Row, args: argparse.Namespace) -> None:
    """A short step and one with the whole length; prints memory and seconds."""
    L.seed_everything(0, verbose=False)
    silence_warnings()
    logging.getLogger("lightning").setLevel(logging.WARNING)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=lt_zero.ZeroStrategy(config=config(row, Path(folder))),
            accelerator="cpu",
            devices=row.ranks,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch],
        )
        batches = [batch_of(length, args.vocabulary) for length in (2 * STEP, args.length)]
        trainer.fit(build(row, args), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        print(json.dumps([most_memory(), watch.seconds]))


def measure(row: Row, args: argparse.Namespace, length: int, limit: float) -> tuple[int, float] | None:
    """Bytes at most, and seconds per step, of a run in a new process; None: it had more than ``limit`` bytes."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("width", "depth", "vocabulary")]
    command = [sys.executable, __file__, *sizes, "--length", str(length), "--row", row.name]
    # Freed blocks of 1 MB and more go back to the system at once.
    process = psutil.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    )
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            ranks = [process, *process.children(recursive=True)]
            if max(rank.memory_info().rss for rank in ranks) > limit:
                for rank in reversed(ranks):
                    rank.kill()
        time.sleep(0.02)
    text = process.stdout.read()
    if process.returncode == -signal.SIGKILL:
        return None
    if process.returncode:
        raise SystemExit(process.returncode)
    nbytes, seconds = json.loads(text.splitlines()[-1])
    return nbytes, seconds


def rows(args: argparse.Namespace, limit: float) -> Iterator[tuple[Row, int, float, tuple[int, float]]]:
    """Each row with its length, the forecast, and what was measured."""
    bare = psutil.Process().memory_info().rss  # Python and libraries, which the runs import as well
    for row in ROWS:
        beside = bare + states(row, args)
        length = longest(row, args, 0.96 * limit - beside)
        while length > 2 * STEP and (found := measure(row, args, length, limit)) is None:
            length = length * 15 // 16 // (2 * STEP) * 2 * STEP
        if length > 2 * STEP:
            yield row, length, beside + activations(row, args, length), found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=4.0, help="limit of a process, in GB")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--quick", action="store_true", help="a small model, and 0.2 GB beside its states")
    parser.add_argument("--row", choices=[row.name for row in ROWS], help="only this row, with --length tokens")
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args(arguments)
    if args.row is not None:
        train(next(row for row in ROWS if row.name == args.row), args)
        return
    limit = args.memory * 1e9
    if args.quick:
        args.width, args.depth, args.vocabulary = 128, 4, 8000
        limit = psutil.Process().memory_info().rss + states(ROWS[0], args) + 2e8
    table = Table(title=f"{args.depth} blocks, {args.width} wide, {limit / 1e9:.2f} GB")
    for name in ("switched on", "tokens", "s / step", "GB", "forecast"):
        table.add_column(name, justify="left" if name == "switched on" else "right")
    for row, length, forecast, (nbytes, seconds) in rows(args, limit):
        table.add_row(row.name, f"{length:,}", f"{seconds:.1f}", f"{nbytes / 1e9:.2f}", f"{forecast / 1e9:.2f}")
        print(f"{row.name}: {length:,} tokens, {seconds:.1f} s, {nbytes:,} bytes, forecast {forecast:,}", flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
