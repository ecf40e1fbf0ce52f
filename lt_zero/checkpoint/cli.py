"""The commands ``lt-zero export``, ``import`` and ``verify``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.native.directory import file_system, is_in_memory
from lt_zero.checkpoint.open import verify
from lt_zero.checkpoint.source import Format
from lt_zero.common.errors import CheckpointError
from lt_zero.common.output import printable
from lt_zero.common.units import exact_bytes, format_bytes

Option = typer.Option


@contextmanager
def _reporting() -> Iterator[None]:
    """Context that prints errors and warnings as lines on stderr, and exits with code 1 after an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except (CheckpointError, ValueError, OSError) as error:
            typer.echo(printable(" ".join(str(error).split())), err=True)
            raise typer.Exit(1) from None
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(printable(f"Warning: {message}"), err=True)


def export_command(
    ckpt: Annotated[str, typer.Argument(metavar="CKPT", help="The checkpoint: a file or a folder, or its URL.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The file to write, or the folder for several files; or its URL.")
    ],
    dtype: Annotated[
        str | None,
        Option(help="Dtype of floating-point tensors: fp16 (default), bf16, fp32, fp64, or same: as saved."),
    ] = None,
    format: Annotated[Format, Option(help="auto decides by the suffix of OUT; a folder gets safetensors.")] = "auto",
    shard_size: Annotated[
        str | None, Option(help="Maximum size of a file, such as 5GB: Hugging Face's layout in the folder OUT.")
    ] = None,
    training_state: Annotated[
        bool, Option("--training-state", help="Include what a plain Trainer resumes from; .ckpt in fp32 only.")
    ] = False,
    keep_fp32: Annotated[
        list[str] | None, Option(help="Pattern for names that stay in fp32, such as 'head.*'; repeatable.")
    ] = None,
    strip_prefix: Annotated[
        str | None, Option(help="Prefix to remove from names, such as net. (the attribute of your module).")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace weights that are in the folder OUT.")] = False,
    merge_lora: Annotated[
        str | None,
        Option(
            metavar="CONFIG", help="Merge low-rank adapters: peft's adapter_config.json, its folder, or lora_alpha."
        ),
    ] = None,
) -> None:
    """Export a checkpoint's weights to files that need no lt_zero. One tensor is in memory at a time."""
    with _reporting():
        _refuse_memory(out)
        how = (dtype, format, shard_size, training_state, keep_fp32 or (), True, strip_prefix, overwrite)
        files = export(ckpt, out, *how, merge_lora=merge_lora)
        sizes = [file.stat().st_size if isinstance(file, Path) else file_system(file).size(file) for file in files]
    for file, size in zip(files, sizes, strict=True):
        typer.echo(printable(f"{file} ({format_bytes(size)})"))


def _refuse_memory(out: str) -> None:
    """Raise CheckpointError if what the command writes would be gone with its process."""
    if is_in_memory(out):
        raise CheckpointError(
            f"{out} is in the memory of this command, and is lost when it ends. Name a path, or a URL of another kind."
        )


def import_command(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of any format: a folder or a file, or its URL.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The checkpoint directory to create, or its URL.")],
    tag: Annotated[
        str | None, Option(help="Tag of a DeepSpeed directory; default: the one in its file `latest`.")
    ] = None,
    inert: Annotated[
        list[str] | None, Option(help="A class, as package.module.Name, whose objects are left out; repeatable.")
    ] = None,
    add_prefix: Annotated[
        str,
        Option(help="Prefix for all names, such as model. (the attribute of your module with what was saved)."),
    ] = "",
    cut: Annotated[
        list[str] | None,
        Option(
            help="PATTERN=DIM: the dimension along which tensor ranks of DeepSpeed cut parameters, if its files do not "
            "tell it; -1: not at all. Repeatable."
        ),
    ] = None,
) -> None:
    """Convert a checkpoint of another format to a checkpoint directory. One tensor is in memory at a time."""
    from lt_zero.checkpoint.import_ import import_checkpoint  # with the engine: half a second

    with _reporting():
        _refuse_memory(out)
        path = import_checkpoint(src, out, tag, True, inert or (), add_prefix, _cuts(cut or ()))
        facts = verify(path)
    typer.echo(printable(f"{path} ({exact_bytes(facts['bytes'])})"))


def _cuts(texts: Sequence[str]) -> dict[str, int]:
    """Dimensions by pattern.

    >>> _cuts(["*.dense.weight=1"])
    {'*.dense.weight': 1}
    """
    found = {}
    for text in texts:
        pattern, _, dim = text.rpartition("=")
        if not pattern or dim not in ("-1", "0", "1", "2"):
            raise ValueError(
                f"--cut {text}: write PATTERN=DIM with a dimension of 0 to 2, or -1, as in '*.dense.weight=1'."
            )
        found[pattern] = int(dim)
    return found


def verify_command(
    ckpt: Annotated[str, typer.Argument(metavar="CKPT", help="The checkpoint directory.")],
) -> None:
    """Read every byte of a checkpoint directory of lt_zero, and print its contents. Exit code 1: it is damaged."""
    with _reporting():
        facts = verify(ckpt)
    typer.echo(printable(f"{ckpt}: complete, all checksums match"))
    for name, value in facts.items():
        typer.echo(printable(f"{name}: {exact_bytes(value) if name == 'bytes' else value}"))
