"""The command ``lt-zero``."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

import lt_zero
from lt_zero.common.errors import missing_part
from lt_zero.common.garbage import gc_disabled
from lt_zero.common.output import printable
from lt_zero.common.places import NotInstalled, import_public

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(help="ZeRO for PyTorch Lightning.", no_args_is_help=True, add_completion=False, context_settings=HELP)
ops = typer.Typer(help="The native kernels.", epilog="Example: lt-zero ops report", no_args_is_help=True)
app.add_typer(ops, name="ops")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lt-zero {lt_zero.__version__}")
        raise typer.Exit


@app.callback(epilog="Example: lt-zero estimate --params 7B --world 8")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and end.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module that registers features or transports of your own, so that their keys are known. "
            "May be written several times.",
        ),
    ] = None,
) -> None:
    """ZeRO for PyTorch Lightning."""
    for module in modules or ():
        _register_from(module)


def _register_from(module: str) -> None:
    """Import a module of the user's, installed or in the current folder; end with status 1 if there is none."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (missing := missing_part(module, error)) is None:
            raise
        text = f"lt-zero --import {module}: there is no module {missing}. Install it, or name one of this folder."
        typer.echo(printable(text), err=True)
        raise typer.Exit(1) from None


def _import(module: str, name: str) -> Any:
    """Import the module of the command ``name``; say on stderr if it is not installed, and end with status 1."""
    try:
        return import_public(module, f"lt-zero {name}")
    except NotInstalled as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _lazy(name: str, module: str, summary: str, example: str) -> None:
    """Register the function or app ``<name>_command`` of ``module``, which is only imported to run: it needs torch.

    ``example``: arguments of the command, for its help.
    """

    epilog = f"Example: lt-zero {name} {example}"
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, add_help_option=False, context_settings=passed_on)
    def run(context: typer.Context) -> None:
        # What is imported stays until the end: looking for garbage in it takes as long as half of torch.
        with gc_disabled():
            command = getattr(_import(module, name), f"{name}_command")
            gc.freeze()
        inner = command if isinstance(command, typer.Typer) else typer.Typer(add_completion=False)
        if inner is not command:
            inner.command()(command)
        # The help of an app of one command is that command's.
        only = inner.registered_commands[0] if len(inner.registered_commands) == 1 else inner.info
        only.epilog = epilog
        inner(context.args, prog_name=f"lt-zero {name}", **HELP)


_CHECKPOINTS = "lt_zero.checkpoint.cli"
_PLANNING = "lt_zero.planning"
_lazy(
    "compare",
    "lt_zero.tools.compare.compare",
    "Find the first output, gradient or update in which two runs differ.",
    "FIRST SECOND",
)
_lazy("config", "lt_zero.config.cli", "Check, show, convert and explain configurations.", "check ds_config.json")
_lazy(
    "doctor",
    "lt_zero.tools.doctor",
    "Check whether this machine is ready for training, with a remedy for each problem.",
    "--path /local_nvme",
)
_lazy(
    "estimate",
    f"{_PLANNING}.estimate_cli",
    "Estimate the memory of a run per rank and node, by stage and offload.",
    "--params 7B --world 8 --gpu-gb 80 --fit",
)
_lazy(
    "export",
    _CHECKPOINTS,
    "Export a checkpoint's weights as safetensors, a state dict or a Lightning checkpoint.",
    "last.ckpt model.safetensors --dtype same",
)
_lazy(
    "import",
    _CHECKPOINTS,
    "Convert a checkpoint of DeepSpeed, FSDP or others to a checkpoint directory.",
    "path/to/deepspeed first.ckpt --tag global_step1000",
)
_lazy(
    "logs",
    "lt_zero.training.lightning.monitor.logs",
    "Print and plot what a run recorded: metrics, times, memory, traffic.",
    "lightning_logs/version_0",
)
_lazy(
    "plot",
    "lt_zero.training.lightning.monitor.plot",
    "Plot a run's CSV logs: loss, rates, throughput, memory.",
    "lightning_logs/version_0",
)
_lazy(
    "tune",
    f"{_PLANNING}.tune_cli",
    "Find the fastest configuration of a training script that fits into the memory.",
    "train.py",
)
_lazy("verify", _CHECKPOINTS, "Read every byte of a checkpoint directory, and print its contents.", "last.ckpt")


@ops.command("build", epilog="Example: lt-zero ops build --cuda")
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
    from lt_zero.kernels.compiler import CSRC, BuildError, build, recipe_of
    from lt_zero.kernels.library import cache_dir

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


@ops.command("report", epilog="Example: lt-zero ops report")
def report_command() -> None:
    """Print the implementation of each operation on this machine, and why it runs. Compiles missing kernels."""
    from lt_zero.kernels.report import operations_table

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows the same
        operations_table()


def main() -> None:
    """Entry point of the command ``lt-zero``."""
    app()


if __name__ == "__main__":
    main()
