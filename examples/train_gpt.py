"""Train a small GPT on Python's own sources with ZeRO, on two CPU processes or on every GPU.

    python examples/train_gpt.py                               # ZeRO stage 3
    python examples/train_gpt.py zero_optimization=stage1      # another stage
    python examples/train_gpt.py precision=bf16_mixed
    python examples/train_gpt.py save_every=100                # checkpoints in out/checkpoints
    python examples/train_gpt.py "resume='out/checkpoints/step=300.ckpt'" trainer.devices=3 zero_optimization=stage2
    python examples/train_gpt.py strategy=ddp                  # Lightning's own replicated training, to compare
    python examples/train_gpt.py --help                        # everything that can be set

The configuration is composed from conf/train_gpt.yaml and the groups of lt_zero.conf. What differs between ddp and
the others is the `strategy` argument of the Trainer. Lightning starts the other ranks by running this script again,
so every rank executes `main`; only rank 0 writes files and prints.
"""

import csv
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity

from corpus import Windows, read_text
from gpt import GPT
from lt_zero import ZeroStrategy
from lt_zero.sweep import own_process

Config = dict[str, Any]
OWN_KEYS = {"strategy", "out", "seed", "threads", "learning_rate", "save_every", "resume", "data", "trainer", "model"}


class GPTModule(L.LightningModule):
    """Trains a GPT to predict the next byte. It is independent of sharding."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt
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


class GPTWithAdamW(GPTModule):
    """Makes its optimizer itself; without `configure_optimizers` the strategy builds that of the configuration."""

    def __init__(self, gpt: GPT, steps: int, peak_rate: float, schedule: bool = True) -> None:
        """`steps` is the length of the whole run, at the end of which the learning rate is lowest.

        Without `schedule` the configuration's is used.
        """
        super().__init__(gpt)
        self.steps = steps
        self.peak_rate = peak_rate
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        """AdamW, whose rate warms up over the first tenth of the run and falls along a cosine to a tenth of its peak.

        Norms and biases are left out of weight decay.
        """
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.peak_rate, betas=(0.9, 0.95))
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate_factor(self, step: int) -> float:
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def trainer_arguments(config: Config) -> Config:
    """Arguments of the Trainer, with what depends on the machine and on the length of the run filled in."""
    given: Config = dict(config["trainer"])
    if given["accelerator"] == "auto":
        given["accelerator"] = "gpu" if torch.cuda.is_available() else "cpu"
    if given["devices"] == "auto":
        given["devices"] = torch.cuda.device_count() if given["accelerator"] == "gpu" else 2
    given["enable_checkpointing"] |= config["save_every"] is not None
    if given["val_check_interval"] is None:
        batches = given["max_steps"] * given["accumulate_grad_batches"]
        given["val_check_interval"] = max(1, batches // config["data"]["validations"])
        given["check_val_every_n_epoch"] = None
    return given


def make_strategy(config: Config) -> Strategy:
    """Pass all keys but the script's own to lt_zero, which refuses unknown ones."""
    if config["strategy"] == "ddp":
        return DDPStrategy()
    if config["strategy"] != "zero":
        raise ValueError(f"strategy={config['strategy']!r} is not one of zero, ddp")
    return ZeroStrategy(config={key: value for key, value in config.items() if key not in OWN_KEYS})


def make_callbacks(config: Config, folder: Path) -> list[Callback]:
    """A progress bar, and checkpoints of all steps that are multiples of `save_every`."""
    bar = TQDMProgressBar(refresh_rate=20)
    if config["save_every"] is None:
        return [bar]
    saves = {"every_n_train_steps": config["save_every"], "save_top_k": -1, "filename": "{step}"}
    # Without the counter, a resumed run replaces the checkpoints that it passes again.
    return [bar, ModelCheckpoint(folder / "checkpoints", **saves, enable_version_counter=False)]


def use_threads(threads: int | None, processes: int) -> None:
    """Share the cores among the processes: more threads than cores would only get in each other's way."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // processes))


def silence_warnings() -> None:
    """Hide warnings about which a reader of this demo can do nothing."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # slicing a tensor needs none
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated.*")  # Lightning 2.6 with torch 2.13


def make_loaders(data: Config, context: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation batches; Lightning gives every rank its own share of them."""
    train = Windows(read_text(validation=False), context)
    validation = Windows(read_text(validation=True), context, data["validation_windows"])
    return (
        DataLoader(train, batch_size=data["batch_size"], shuffle=True, drop_last=True),
        DataLoader(validation, batch_size=2 * data["batch_size"]),
    )


def make_module(config: Config) -> GPTModule:
    """The model, with an optimizer and a schedule of its own unless lt_zero is to build them."""
    built = {key for key in ("optimizer", "scheduler") if config["strategy"] == "zero" and config.get(key)}
    gpt = GPT(256, **config["model"])
    if "optimizer" in built:
        return GPTModule(gpt)
    steps = config["trainer"]["max_steps"]
    return GPTWithAdamW(gpt, steps, config["learning_rate"], schedule="scheduler" not in built)


def megabytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def print_memory(report: dict[str, tuple[int, int]], console: Console) -> None:
    """Print the bytes that this rank holds at rest, and those of a rank in a replicated run."""
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
        trainer.strategy.export(path, dtype="fp16")
    elif trainer.is_global_zero:
        torch.save({name: weight.half() for name, weight in module.state_dict().items()}, path)


def generate(path: Path, context: int) -> str:
    """Sample from the exported file in a fresh process, which loads it with torch alone."""
    script = Path(__file__).with_name("generate.py")
    command = [sys.executable, str(script), str(path), "--context", str(context)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@hydra.main(version_base="1.3", config_path="conf", config_name="train_gpt")
@own_process
def main(composed: DictConfig) -> float | None:
    """Train, export, sample; returns the validation perplexity on rank 0."""
    started = time.perf_counter()
    config: Config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    folder = Path(os.path.relpath(HydraConfig.get().runtime.output_dir))
    strategy = make_strategy(config)
    arguments = trainer_arguments(config)
    if arguments["accelerator"] == "cpu":
        use_threads(config["threads"], arguments["devices"])
    silence_warnings()

    L.seed_everything(config["seed"])
    module = make_module(config)
    logger = CSVLogger(folder, name="logs")
    trainer = L.Trainer(strategy=strategy, logger=logger, callbacks=make_callbacks(config, folder), **arguments)
    trainer.fit(module, *make_loaders(config["data"], module.gpt.context), ckpt_path=config["resume"])
    trained = time.perf_counter()

    report = strategy.memory_report() if isinstance(strategy, ZeroStrategy) else None
    exported = folder / "gpt-fp16.pt"
    export(trainer, module, exported)
    if not trainer.is_global_zero:
        return None

    console = Console()
    if report is not None:
        print_memory(report, console)
    picture = folder / "loss.png"
    plot_losses(Path(logger.log_dir) / "metrics.csv", picture)
    sample = generate(exported, module.gpt.context)
    console.rule(f"sample from {exported}")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    perplexity = float(trainer.callback_metrics["val_perplexity"])
    print(f"validation perplexity {perplexity:.2f} per byte; wrote {exported} and {picture}")
    print(f"training took {trained - started:.0f} s, all of it {time.perf_counter() - started:.0f} s")
    return perplexity


if __name__ == "__main__":
    main()
