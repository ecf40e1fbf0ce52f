"""``lt-zero config``: check, show, convert and explain configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path as File
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape

from lt_zero.common.console import Console
from lt_zero.common.errors import ConfigError, Path, dotted
from lt_zero.common.fields import scalars
from lt_zero.common.output import printable
from lt_zero.config import catalog
from lt_zero.config.applicability import Face, refused, without_effect
from lt_zero.config.document import HIDDEN, MISSING, Document, leaves, masked, without_told
from lt_zero.config.files import parsed
from lt_zero.config.fsdp import added, converted, verdicts
from lt_zero.config.fsdp_files import is_for_fsdp
from lt_zero.config.keys import AUTO, NO_EFFECT, lookup
from lt_zero.config.load import Loaded, ZeroConfig, examine, plain, resolved
from lt_zero.config.rules import switched_off

_SECRET = "???"  # in place of its value
_WIDE = 16  # width of the column of values; longer values shift only their own line

config_command = typer.Typer(
    help="Check, show, convert and explain configurations.", no_args_is_help=True, add_completion=False
)
Source = Annotated[File, typer.Argument(help="A JSON or YAML file with DeepSpeed's keys.")]
Changes = Annotated[list[str] | None, typer.Argument(help="key=value or group=option, in Hydra's grammar.")]
Stage = Annotated[int | None, typer.Option(help="The stage, as in ZeroStrategy(stage=...).")]
Trains = Annotated[Face, typer.Option(help="Who trains: a Trainer, Fabric, or a loop of lt_zero.initialize.")]


@config_command.command(epilog="Example: lt-zero config check ds_config.json")
def check(
    file: Source,
    overrides: Changes = None,
    stage: Stage = None,
    face: Trains = Face.TRAINER,
) -> None:
    """Print the status of each key. Exits with 1 if the file cannot be used, else 0."""
    loaded = _read(file, overrides, stage, must_work=False)
    if loaded.config is not None:
        loaded.problems += refused(loaded.config, face)
    console = Console(soft_wrap=True, highlight=False)  # one line per key at any width: never cut or folded
    colours = {"works": "green", "auto": "green", "error": "red"}
    rows = list(key_statuses(loaded, face))
    width = max((len(value) for _, value, _, _ in rows if len(value) <= _WIDE), default=0)
    for key, value, status, note in rows:
        mark = f"[{colours.get(status, 'yellow')}]{status:9}[/]"
        console.print(f"{mark}  {escape(value.ljust(width))}  {escape(key)}" + (f": {escape(note)}" if note else ""))
    for notice in (notice for notice in loaded.notices if notice.kind == "file"):
        console.print(escape(str(notice)), style="yellow")
    for problem in loaded.problems:
        console.print(escape(str(problem)), style="red")
    count = len(loaded.problems)
    console.print(escape(f"{file}: {'it can be used' if not count else f'{count} problem' + 's' * (count > 1)}"))
    raise typer.Exit(int(bool(count)))


@config_command.command(epilog="Example: lt-zero config show ds_config.json zero_optimization.stage=2")
def show(
    file: Source,
    overrides: Changes = None,
    stage: Stage = None,
    everything: Annotated[bool, typer.Option("--all", help="Also show keys that have their defaults.")] = False,
) -> None:
    """Print the resolved configuration and the source of each value."""
    print(printable(with_origins(_read(file, overrides, stage), everything)))


@config_command.command(epilog="Example: lt-zero config convert ds_config.json")
def convert(
    file: Source,
    overrides: Changes = None,
    stage: Stage = None,
    out: Annotated[File | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Write the configuration as YAML with current keys, without keys that have no effect; as JSON to a file .json.

    FILE may be for FSDP: of accelerate config, axolotl, transformers or LightningCLI. Each of its keys gets a verdict.
    """
    as_json = out is not None and out.suffix.lower() in (".json", ".jsonc")
    comments, loaded = _converted(file, overrides, stage)
    values = _written(loaded)
    text = json.dumps(scalars(values), indent=2) + "\n" if as_json else "\n".join([*comments, to_yaml(values)])
    if out is None:
        print(printable(text))
        return
    if out.exists():
        raise _stopped(f"{out} exists. Remove it, or name another file.")
    if as_json:
        print(printable("\n".join(comments)))
    out.write_text(text, encoding="utf-8")


@config_command.command(epilog="Example: lt-zero config explain reduce_bucket_size")
def explain(key: Annotated[str, typer.Argument(help="A key, or a part of one.")]) -> None:
    """Tell what a key does."""
    print(catalog.explain(key))


@config_command.command(epilog="Example: lt-zero config schema > schema.json")
def schema() -> None:
    """Print the JSON Schema of all supported keys, for editors."""
    print(catalog.json_schema())


def key_statuses(loaded: Loaded, face: Face = Face.TRAINER) -> Iterator[tuple[str, str, str, str]]:
    """Key, value, status and note of each written key."""
    idle = without_effect(loaded.config, face) if loaded.config is not None else []
    notices = {notice.key: notice for notice in loaded.notices}
    wrong = {problem.key for problem in loaded.problems}
    for path, value in leaves(loaded.values, lists=False):
        key = dotted(path)
        named = without_told(key)
        secret = any(found[: len(path)] == path[: len(found)] for found in loaded.secret)  # also a part of a list
        shown = HIDDEN if secret else _short(value)
        around = [dotted(path[:length]) for length in range(len(path), 0, -1)]
        if any(name in wrong for name in around):
            yield named, shown, "error", "see below"
        elif (notice := next((notices[name] for name in around if name in notices), None)) is not None:
            said = notice.message.removeprefix(f"{notice.key}{NO_EFFECT}").removeprefix(f"{notice.key} ")
            yield named, shown, notice.kind, said.removesuffix(" Write the latter.")
        elif any(name in idle for name in around):
            yield named, shown, "no effect", f"with --face {face.value} nothing uses it"
        elif value == "auto" and key in AUTO:
            yield named, shown, "auto", AUTO[key]
        elif key == "train_batch_size" and loaded.config is not None:
            yield named, shown, "works", _divided(loaded.config)
        else:
            row = lookup(path)
            off = switched_off(loaded.values, path) or (row is not None and row.refused)
            yield named, shown, "off" if off else "works", ""


def _divided(config: ZeroConfig) -> str:
    """Text that tells what ``train_batch_size`` asks of the Trainer or data loader, for any number of ranks."""
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


def _read(file: File, overrides: list[str] | None, stage: int | None, must_work: bool = True) -> Loaded:
    try:
        loaded = examine(file, stage, overrides or ())
        if must_work:
            loaded.usable()
        return loaded
    except ConfigError as error:
        raise _stopped(str(error)) from None


def _converted(file: File, overrides: list[str] | None, stage: int | None) -> tuple[list[str], Loaded]:
    """Comments on the changes of a file, and the result."""
    try:
        values = parsed(file).values
        if not is_for_fsdp(values):
            loaded = _read(file, overrides, stage)
            return _changes(loaded), loaded
        found = verdicts(values)
        loaded = examine(converted(values, found), stage, overrides or ())
        loaded.usable()
    except ConfigError as error:
        raise _stopped(str(error)) from None
    return [f"# {line}" for line in (*found, *added(values))], loaded


def _stopped(message: str) -> typer.Exit:
    Console(stderr=True).print(escape(message), style="red", soft_wrap=True)
    return typer.Exit(1)


# ---- YAML ------------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Blocks in block style, lists in flow style."""


_Dumper.add_representer(list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True))


def to_yaml(values: Mapping[str, Any]) -> str:
    """YAML with two spaces of indentation and keys in order; ``read`` returns the same values."""
    text = yaml.dump(scalars(values), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return str(text)


def clean(loaded: Loaded) -> str:
    """The written keys as YAML with current spellings, preceded by comments on the changes."""
    return "\n".join([*_changes(loaded), to_yaml(_written(loaded))])


def _changes(loaded: Loaded) -> list[str]:
    lines = [f"# {notice.message}" for notice in loaded.notices if notice.kind in ("alias", "no effect")]
    if _SECRET in (leaf for _, leaf in leaves(_written(loaded))):
        lines.append(f"# {_SECRET}: a secret, or from an environment variable; write ${{oc.env:NAME}} for it")
    return lines


def _written(loaded: Loaded) -> dict[str, Any]:
    """The written keys with current spellings, without the values of secrets."""
    assert loaded.config is not None
    values: dict[str, Any] = masked(plain(loaded.config), loaded.secret, _SECRET)
    return values


def with_origins(loaded: Loaded, everything: bool) -> str:
    """YAML of the validated configuration with the source of each value; ``everything``: also keys with defaults."""
    assert loaded.config is not None
    written = Document(plain(loaded.config), dict(loaded.marks))
    values = resolved(loaded.config) if everything else written.values
    lines = list(_lines(masked(values, loaded.secret), written, ()))
    width = max((len(text) for text, origin in lines if origin), default=0)
    return "\n".join(f"{text.ljust(width)}  # {origin}" if origin else text for text, origin in lines)


def _lines(values: Mapping[str, Any], written: Document, path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a block, each with the source of its value."""
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, written, here)
            continue
        origin = "default" if written.get(here) is MISSING else str(written.mark(here) or "given")
        rule = AUTO.get(dotted(here), "") if value == "auto" else ""
        yield f"{indent}{to_yaml({key: value}).rstrip()}", f"{origin}; becomes {rule}" if rule else origin
