"""The command ``lt-zero``."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="ZeRO for PyTorch Lightning.", no_args_is_help=True, add_completion=False)
ops = typer.Typer(help="The native kernels.", no_args_is_help=True)
app.add_typer(ops, name="ops")


@app.callback()
def _root() -> None:
    """ZeRO for PyTorch Lightning."""


def _later(name: str, module: str, summary: str) -> None:
    """Register a command whose function or app, ``<name>_command`` of ``module``, is imported when it runs: it needs
    torch."""

    @app.command(
        name,
        help=summary,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        found = getattr(importlib.import_module(module), f"{name}_command")
        inner = found if isinstance(found, typer.Typer) else typer.Typer(add_completion=False)
        if inner is not found:
            inner.command()(found)
        inner(context.args, prog_name=f"lt-zero {name}")


_later("config", "lt_zero.config.cli", "Check, show, convert and explain configurations.")
_later("doctor", "lt_zero.doctor", "What this machine has for training, and what to do about what is missing.")
_CHECKPOINTS = "lt_zero.checkpoint.cli"
_later(
    "estimate",
    "lt_zero.memory.cli",
    "How much memory a run needs, by stage and offload, on each rank and node.",
)
_later(
    "export",
    _CHECKPOINTS,
    "Write a checkpoint's weights as files that need no lt_zero: safetensors, a state dict, a Lightning checkpoint.",
)
_later("import", _CHECKPOINTS, "Make a checkpoint directory of what DeepSpeed, FSDP or others wrote.")
_later(
    "plot",
    "lt_zero.lightning.monitor.plot",
    "Draw what a run has logged to CSV files: loss, rates, throughput, memory.",
)
_later("verify", _CHECKPOINTS, "Read every byte of a checkpoint directory, and tell what it holds.")


@ops.command("build")
def build_command(
    cuda: Annotated[
        bool, typer.Option("--cuda/--no-cuda", help="Also the CUDA kernels, for all supported devices; needs no GPU.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Where to put the libraries. Default: LT_ZERO_CACHE, else the user's cache.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compile even if they are there.")] = False,
) -> None:
    """Compile the native kernels now, not on first use: for containers, and for machines without a compiler."""
    from lt_zero.ops.compiler import CSRC, BuildError, build, recipe_of
    from lt_zero.ops.library import cache_dir

    console = Console(soft_wrap=True, highlight=False)
    folder = cache.expanduser().absolute() if cache is not None else cache_dir()
    for kind in ("cpu", "cuda") if cuda else ("cpu",):
        try:
            built = build(recipe_of(kind, CSRC), folder, force=force)
        except BuildError as error:
            errors = Console(stderr=True, soft_wrap=True, highlight=False)
            errors.print(f"The {kind} kernels were not built: {error}", markup=False)
            if error.log is not None:
                errors.print(f"All that the compiler printed: {error.log}", markup=False)
            raise typer.Exit(1) from None
        took = "was there" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
        console.print(f"{kind}: {built.path} ({took})", markup=False)
    if folder != cache_dir():
        console.print(f"They are found with LT_ZERO_CACHE={folder}", markup=False)


@ops.command("report")
def report_command() -> None:
    """Print which implementation of each operation runs here, and why. Compiles what was not compiled yet."""
    from lt_zero.ops.report import operations_table

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is in the table
        operations_table()


def main() -> None:
    """The entry point of the command ``lt-zero``."""
    app()


if __name__ == "__main__":
    main()
