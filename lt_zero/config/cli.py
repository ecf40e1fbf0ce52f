"""``lt-zero config``: check, show, convert and explain configurations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as File
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lt_zero.common.errors import ConfigError, dotted
from lt_zero.config.catalog import json_schema
from lt_zero.config.document import HIDDEN, leaves
from lt_zero.config.explain import explain as explanation
from lt_zero.config.keys import AUTO, lookup
from lt_zero.config.load import Loaded, ZeroConfig, examine
from lt_zero.config.rules import switched_off
from lt_zero.config.show import clean, with_origins

_WIDE = 16  # width of the column of values; longer values shift only their own line

config_command = typer.Typer(
    help="Check, show, convert and explain configurations.", no_args_is_help=True, add_completion=False
)
Source = Annotated[File, typer.Argument(help="A JSON or YAML file with DeepSpeed's keys.")]
Changes = Annotated[list[str] | None, typer.Argument(help="key=value or group=option, in Hydra's grammar.")]
Stage = Annotated[int | None, typer.Option(help="The stage, as in ZeroStrategy(stage=...).")]


@config_command.command()
def check(file: Source, overrides: Changes = None, stage: Stage = None) -> None:
    """Print the status of each key. Exits with 1 if the file cannot be used, else 0."""
    loaded = _read(file, overrides, stage)
    console = Console(soft_wrap=True, highlight=False)  # one line per key at any width: never cut or folded
    colours = {"works": "green", "auto": "green", "error": "red"}
    rows = list(key_statuses(loaded))
    width = max((len(value) for _, value, _, _ in rows if len(value) <= _WIDE), default=0)
    for key, value, status, note in rows:
        mark = f"[{colours.get(status, 'yellow')}]{status:9}[/]"
        console.print(f"{mark}  {escape(value.ljust(width))}  {escape(key)}" + (f": {escape(note)}" if note else ""))
    for notice in loaded.notices:
        if notice.kind == "file":
            console.print(escape(str(notice)), style="yellow")
    for problem in loaded.problems:
        console.print(escape(str(problem)), style="red")
    count = len(loaded.problems)
    console.print(escape(f"{file}: {'it can be used' if not count else f'{count} problem' + 's' * (count > 1)}"))
    raise typer.Exit(int(bool(count)))


@config_command.command()
def show(
    file: Source,
    overrides: Changes = None,
    stage: Stage = None,
    everything: Annotated[bool, typer.Option("--all", help="Also show keys that have their defaults.")] = False,
) -> None:
    """Print the resolved configuration and the source of each value."""
    print(with_origins(_usable(_read(file, overrides, stage)), everything))


@config_command.command()
def convert(
    file: Source,
    overrides: Changes = None,
    stage: Stage = None,
    out: Annotated[File | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Write the configuration as YAML with current keys, without keys that have no effect."""
    text = clean(_usable(_read(file, overrides, stage)))
    if out is None:
        print(text)
    elif out.exists():
        _stop(f"{out} exists. Remove it, or name another file.")
    else:
        out.write_text(text, encoding="utf-8")


@config_command.command()
def explain(key: Annotated[str, typer.Argument(help="A key, or a part of one.")]) -> None:
    """Tell what a key does."""
    print(explanation(key))


@config_command.command()
def schema() -> None:
    """Print the JSON Schema of all supported keys, for editors."""
    print(json_schema())


def key_statuses(loaded: Loaded) -> Iterator[tuple[str, str, str, str]]:
    """Key, value, status and note of each written key."""
    notices = {notice.key: notice for notice in loaded.notices}
    wrong = {problem.key for problem in loaded.problems}
    for path, value in leaves(loaded.written, lists=False):
        key = dotted(path)
        secret = loaded.hides(path) or any(found[: len(path)] == path for found in loaded.secret)  # in a list
        shown = HIDDEN if secret else _short(value)
        around = [dotted(path[:length]) for length in range(len(path), 0, -1)]
        if any(name in wrong for name in around):
            yield key, shown, "error", "see below"
        elif (notice := next((notices[name] for name in around if name in notices), None)) is not None:
            said = notice.message.removeprefix(f"{notice.key} ").removeprefix("has no effect here: ")
            yield key, shown, notice.kind, said.removesuffix(" Write the latter.")
        elif value == "auto" and key in AUTO:
            yield key, shown, "auto", AUTO[key]
        elif key == "train_batch_size" and loaded.config is not None:
            yield key, shown, "works", _divided(loaded.config)
        elif switched_off(loaded.written, path) or (
            (row := lookup(path)) is not None and row.status in ("later", "unsupported")
        ):
            yield key, shown, "off", ""
        else:
            yield key, shown, "works", ""


def _divided(config: ZeroConfig) -> str:
    """What the Trainer or data loader must provide for ``train_batch_size``, which depends on the number of ranks."""
    total = config.train_batch_size
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if total is None or (micro is not None and steps is not None):
        return ""
    if micro is not None:
        return f"Trainer(accumulate_grad_batches) becomes {total // micro} / ranks"
    rest = f"{total // steps}" if steps is not None else f"{total} / accumulation"
    return f"the data loader's batch_size has to be {rest} / ranks"


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read(file: File, overrides: list[str] | None, stage: int | None) -> Loaded:
    try:
        return examine(file, stage, overrides or ())
    except ConfigError as error:
        _stop(str(error))
        raise AssertionError from None  # _stop does not return


def _usable(loaded: Loaded) -> Loaded:
    if loaded.config is None:
        _stop(str(ConfigError(loaded.problems)))
    return loaded


def _stop(message: str) -> None:
    Console(stderr=True).print(escape(message), style="red", soft_wrap=True)
    raise typer.Exit(1)
