"""The command ``lt-zero``."""

from __future__ import annotations

import gc
import importlib
import warnings
from pathlib import Path
from typing import Annotated

import typer

from lt_zero.common.garbage import gc_disabled
from lt_zero.common.output import printable

app = typer.Typer(help="ZeRO for PyTorch Lightning.", no_args_is_help=True, add_completion=False)
ops = typer.Typer(help="The native kernels.", no_args_is_help=True)
app.add_typer(ops, name="ops")


@app.callback()
def _root() -> None:
    """ZeRO for PyTorch Lightning."""


def _lazy(name: str, module: str, summary: str) -> None:
    """Register the function or app ``<name>_command`` of ``module``, which is only imported to run: it needs torch."""

    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, add_help_option=False, context_settings=passed_on)
    def run(context: typer.Context) -> None:
        # What is imported stays until the end: looking for garbage in it takes as long as half of torch.
        with gc_disabled():
            command = getattr(importlib.import_module(module), f"{name}_command")
            gc.freeze()
        inner = command if isinstance(command, typer.Typer) else typer.Typer(add_completion=False)
        if inner is not command:
            inner.command()(command)
        inner(context.args, prog_name=f"lt-zero {name}")


_CHECKPOINTS, _PLANNING = "lt_zero.checkpoint.cli", "lt_zero.planning"
_lazy("compare", "lt_zero.session.compare", "Find the first output, gradient or update in which two runs differ.")
_lazy("config", "lt_zero.config.cli", "Check, show, convert and explain configurations.")
_lazy("doctor", "lt_zero.doctor", "Check whether this machine is ready for training, with a remedy for each problem.")
_lazy("estimate", f"{_PLANNING}.estimate_cli", "Estimate the memory of a run per rank and node, by stage and offload.")
_lazy("export", _CHECKPOINTS, "Export a checkpoint's weights as safetensors, a state dict or a Lightning checkpoint.")
_lazy("import", _CHECKPOINTS, "Convert a checkpoint of DeepSpeed, FSDP or others to a checkpoint directory.")
_lazy("logs", "lt_zero.lightning.monitor.logs", "Print and plot what a run recorded: metrics, times, memory, traffic.")
_lazy("plot", "lt_zero.lightning.monitor.plot", "Plot a run's CSV logs: loss, rates, throughput, memory.")
_lazy("tune", f"{_PLANNING}.tune_cli", "Find the fastest configuration of a training script that fits into the memory.")
_lazy("verify", _CHECKPOINTS, "Read every byte of a checkpoint directory, and print its contents.")


@ops.command("build")
def build_command(
    cuda: Annotated[
        bool, typer.Option("--cuda/--no-cuda", help="Also the CUDA kernels, for all supported devices; needs no GPU.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the libraries. Default: LT_ZERO_CACHE, else the user's cache.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compile even if they are cached.")] = False,
) -> None:
    """Compile the native kernels ahead of their first use: for containers, and for machines without a compiler."""
    from lt_zero.ops.compiler import CSRC, BuildError, build, recipe_of
    from lt_zero.ops.library import cache_dir

    folder = cache.expanduser().absolute() if cache is not None else cache_dir()
    for kind in ("cpu", "cuda") if cuda else ("cpu",):
        try:
            built = build(recipe_of(kind, CSRC), folder, force=force)
        except BuildError as error:
            typer.echo(printable(f"The {kind} kernels were not built: {error}"), err=True)
            if error.log is not None:
                typer.echo(printable(f"Output of the compiler: {error.log}"), err=True)
            raise typer.Exit(1) from None
        origin = "cached" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
        typer.echo(printable(f"{kind}: {built.path} ({origin})"))
    if folder != cache_dir():
        typer.echo(printable(f"Set LT_ZERO_CACHE={folder} to use them."))


@ops.command("report")
def report_command() -> None:
    """Print the implementation of each operation on this machine, and why it runs. Compiles missing kernels."""
    from lt_zero.ops.report import operations_table

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows the same
        operations_table()


def main() -> None:
    """Entry point of the command ``lt-zero``."""
    app()


if __name__ == "__main__":
    main()
