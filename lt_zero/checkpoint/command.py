"""The command ``lt-zero export``."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console

from lt_zero.checkpoint.errors import CheckpointError
from lt_zero.checkpoint.export import Format, export

Option = typer.Option


def export_command(
    ckpt: Annotated[str, typer.Argument(metavar="CKPT", help="The checkpoint: a file or a folder.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file to write, or the folder for several.")],
    dtype: Annotated[str, Option(help="Of floating-point tensors: fp16, bf16, fp32 or fp64.")] = "fp16",
    format: Annotated[Format, Option(help="auto goes by the suffix of OUT; a folder gets safetensors.")] = "auto",
    shard_size: Annotated[
        str | None, Option(help="Bytes of a file at most, such as 5GB: Hugging Face's layout, OUT is a folder.")
    ] = None,
    training_state: Annotated[
        bool, Option("--training-state", help="Also what a plain Trainer resumes from; .ckpt in fp32 only.")
    ] = False,
    keep_fp32: Annotated[
        list[str] | None, Option(help="Pattern of names that leave in fp32, such as 'head.*'; repeatable.")
    ] = None,
) -> None:
    """Write a checkpoint's weights as files that need no lt_zero. One tensor is in memory at a time."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            files = export(
                ckpt, out, dtype, format, shard_size, training_state, keep_fp32 or (), progress=sys.stderr.isatty()
            )
    except (CheckpointError, ValueError, OSError) as error:
        errors.print(" ".join(str(error).split()), markup=False)
        raise typer.Exit(1) from None
    for warning in caught:
        errors.print(f"Warning: {warning.message}", markup=False)
    console = Console(soft_wrap=True, highlight=False)
    for file in files:
        console.print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)", markup=False)
