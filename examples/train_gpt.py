"""Train a small GPT on Python's own sources with ZeRO, on two CPU processes or on every GPU.

    python examples/train_gpt.py              # ZeRO stage 3
    python examples/train_gpt.py --stage 1    # another stage
    python examples/train_gpt.py --precision bf16-mixed
    python examples/train_gpt.py --ddp        # Lightning's own replicated training, to compare

What differs between the last and the others is the `strategy` argument of the Trainer. Lightning starts the other
ranks by running this script again, so every rank executes `main`; only rank 0 writes files and prints.
"""

import argparse
import csv
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity

from corpus import Windows, read_text
from gpt import GPT
from lt_zero import ZeroStrategy

VALIDATION_WINDOWS = 256


class GPTModule(L.LightningModule):
    """Trains a GPT to predict the next byte. It knows nothing of how, or whether, its states are sharded."""

    def __init__(self, gpt: GPT, steps: int, peak_rate: float) -> None:
        """`steps` is the length of the whole run: the learning rate has come down when it ends."""
        super().__init__()
        self.gpt = gpt
        self.steps = steps
        self.peak_rate = peak_rate
        self.perplexity = Perplexity()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.gpt(tokens).flatten(0, 1).float(), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        logits = self.gpt(tokens).float()
        self.perplexity.update(logits, targets)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()), sync_dist=True)
        self.log("val_perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW, whose rate warms up over the first tenth of the run and falls along a cosine to a tenth of its peak.

        Norms and biases are left out of weight decay.
        """
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.peak_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate_factor(self, step: int) -> float:
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--ddp", action="store_true", help="train with plain DDP instead of ZeRO")
    parser.add_argument(
        "--precision",
        default="32-true",
        choices=("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
        help="of forward and backward (default: %(default)s); fp16 is very slow on CPUs",
    )
    parser.add_argument("--devices", type=int, help="processes (default: every GPU, or 2 on CPU)")
    parser.add_argument("--threads", type=int, help="threads of each CPU process (default: cores / processes)")
    parser.add_argument("--max-steps", type=int, default=700, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--validations", type=int, default=7, help="how often to validate (default: %(default)s times)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: %(default)s)")
    parser.add_argument("--width", type=int, default=192, help="width of the stream (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=6, help="windows a process sees in a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for what is written (default: %(default)s)"
    )
    return parser.parse_args()


def use_threads(threads: int | None, processes: int) -> None:
    """Share the cores among the processes: more threads than cores would only get in each other's way."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // processes))


def silence_warnings() -> None:
    """Keep out what a reader of this demo can do nothing about."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # slicing a tensor needs none
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated.*")  # Lightning 2.6 with torch 2.13


def make_loaders(args: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation batches; Lightning gives every rank its own share of them."""
    train = Windows(read_text(validation=False), args.context)
    validation = Windows(read_text(validation=True), args.context, VALIDATION_WINDOWS)
    return (
        DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True),
        DataLoader(validation, batch_size=2 * args.batch),
    )


def make_trainer(args: argparse.Namespace, strategy: Strategy, devices: int) -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=devices,
        precision=args.precision,
        max_steps=args.max_steps,
        val_check_interval=max(1, args.max_steps // args.validations),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=CSVLogger(args.out, name="logs"),
        callbacks=[TQDMProgressBar(refresh_rate=20)],
        enable_checkpointing=False,
    )


def megabytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def print_memory(report: dict[str, tuple[int, int]], console: Console) -> None:
    """Show what this rank holds at rest beside what each rank of a replicated run would hold."""
    table = Table("model states", title="Memory of one rank")
    for heading in ("this run", "replicated", "share"):
        table.add_column(heading, justify="right")
    total = (sum(here for here, _ in report.values()), sum(replicated for _, replicated in report.values()))
    for kind, (here, replicated) in report.items():
        table.add_row(kind, megabytes(here), megabytes(replicated), f"{here / replicated:.0%}")
    table.add_section()
    table.add_row("total", megabytes(total[0]), megabytes(total[1]), f"{total[0] / total[1]:.0%}", style="bold")
    console.print(table)


def read_curve(rows: list[dict[str, str]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged metric; rows that hold other metrics leave its field empty."""
    kept = [row for row in rows if row.get(name)]
    return [int(row["step"]) for row in kept], [float(row[name]) for row in kept]


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw both losses over the run from the logger's CSV file."""
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 4.5), layout="constrained")  # not pyplot: a picture in a file needs no display
    axes = figure.subplots()
    axes.plot(*read_curve(rows, "train_loss"), color="tab:blue", alpha=0.6, linewidth=1, label="training")
    axes.plot(*read_curve(rows, "val_loss"), color="tab:orange", marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="GPT on Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)


def export(trainer: L.Trainer, module: GPTModule, path: Path) -> None:
    """Write the weights as one fp16 file with plain names. Every rank calls this: sharded weights are gathered."""
    if isinstance(trainer.strategy, ZeroStrategy):
        trainer.strategy.export(path)
    elif trainer.is_global_zero:
        torch.save({name: weight.half() for name, weight in module.state_dict().items()}, path)


def generate(path: Path, context: int) -> str:
    """Sample from the exported file in a fresh process, which loads it with torch alone."""
    script = Path(__file__).with_name("generate.py")
    command = [sys.executable, str(script), str(path), "--context", str(context)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    started = time.perf_counter()
    args = parse_arguments()
    on_gpu = torch.cuda.is_available()
    devices = args.devices or (torch.cuda.device_count() if on_gpu else 2)
    if not on_gpu:
        use_threads(args.threads, devices)
    args.out.mkdir(parents=True, exist_ok=True)
    silence_warnings()

    L.seed_everything(0)
    module = GPTModule(GPT(256, args.depth, args.width, args.context), args.max_steps, args.rate)
    strategy = DDPStrategy() if args.ddp else ZeroStrategy(stage=args.stage)
    trainer = make_trainer(args, strategy, devices)
    trainer.fit(module, *make_loaders(args))
    trained = time.perf_counter()

    report = strategy.memory_report() if isinstance(strategy, ZeroStrategy) else None
    exported = args.out / "gpt-fp16.pt"
    export(trainer, module, exported)
    if not trainer.is_global_zero:
        return

    console = Console()
    if report is not None:
        print_memory(report, console)
    assert trainer.logger is not None
    assert trainer.logger.log_dir is not None
    picture = args.out / "loss.png"
    plot_losses(Path(trainer.logger.log_dir) / "metrics.csv", picture)
    sample = generate(exported, args.context)
    console.rule(f"sample from {exported}")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    perplexity = float(trainer.callback_metrics["val_perplexity"])
    print(f"validation perplexity {perplexity:.2f} per byte; wrote {exported} and {picture}")
    print(f"training took {trained - started:.0f} s, all of it {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
