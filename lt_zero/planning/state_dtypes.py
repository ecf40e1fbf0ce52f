"""Bytes of a model's states for each choice of dtypes: of moments, master weights, and frozen weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn

from lt_zero.common.console import Console, RunConsole
from lt_zero.common.errors import ConfigError
from lt_zero.common.tables import bytes_cell, show
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import resolve_mode
from lt_zero.core.engine.storage_plan import DEVICE, HOST, NVME
from lt_zero.features import is_installed
from lt_zero.planning.estimate import Setting, estimate
from lt_zero.planning.sizes import Model, Sizes, Stage

_FULL = "32-true"
_ADAPTERS = 100  # of a model given by its size: this part of its parameters, about rank 16 on every matrix


class StateDtypes(NamedTuple):
    """A choice of dtypes.

    Attributes:
        name: for users.
        overrides: of the configuration.
        adapted: adapters train, and the model is frozen.
        least: the lowest stage that has the choice.
        feature: folder of the feature that the choice needs; "": none.
    """

    name: str
    overrides: tuple[str, ...]
    adapted: bool = False
    least: int = 0
    feature: str = ""


_LOW = ("bf16.enabled=true", "bf16.bf16_master_weights_and_grads=true", "bf16.bf16_optimizer_states=true")
CHOICES = (
    StateDtypes("moments fp32", ("optimizer_states.dtype=fp32",)),
    StateDtypes("moments bf16", ("optimizer_states.dtype=bf16",)),
    StateDtypes("moments int8", ("optimizer_states.dtype=int8",), feature="low_bit_states"),
    StateDtypes("all in bf16", _LOW),
    StateDtypes("frozen bf16, adapters", (), adapted=True),
    *(
        StateDtypes(
            f"frozen {bits} bits, adapters",
            ("zero_optimization.stage=3", f"quantize={bits}"),
            adapted=True,
            least=3,
            feature="quantize",
        )
        for bits in (8, 4)
    ),
)


def dtypes_table(
    model: Model,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int = 1,
    *,
    adapters: int | None = None,
    device: str = "cuda",
    precision: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> Table:
    """Print, and return, what states take on a rank: a row for each choice of dtypes, a column for each setting.

    Args:
        model, config, world, device, precision, options: as in ``estimate``; the precision is bf16 if nothing says it.
            Of a module only what is frozen rests in few bits.
        adapters: parameters of adapters of a model that is given by its size; default: 1 % of all.
        console: where to print.
    """
    parsed = ZeroConfig.of(config)
    if precision is None and resolve_mode(parsed, _FULL) == _FULL:
        parsed = ZeroConfig.of(parsed, overrides=["bf16.enabled=true"])
    table = Table(
        title=f"Model states on each of {world} rank(s), {resolve_mode(parsed, precision or _FULL)}",
        caption="Weights, gradients, master weights and moments at most; without buffers and activations.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    columns = list(_columns(device))
    table.add_column("", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    problems = []
    for choice in CHOICES:
        if choice.feature and not is_installed(choice.feature):
            continue
        sized = _with_adapters(model, adapters) if choice.adapted else model
        if sized is None:
            continue
        cells = list[str]()
        try:
            chosen = ZeroConfig.of(parsed, overrides=list(choice.overrides))
            for _, setting, place in columns:
                reached = setting.stage >= choice.least
                run = setting.of(chosen)
                kept = estimate(sized, run, world, device=device, precision=precision, **options) if reached else None
                cells.append(bytes_cell(kept.model_states(place), 1) if kept is not None else "-")
            table.add_row(choice.name, *cells)
        except ConfigError as error:
            problems.append(f"{choice.name}: {error.problems[0].message}")
    console = console or RunConsole()
    show(table, console)
    for problem in problems:
        console.print(problem, markup=False, soft_wrap=True)
    return table


def _columns(device: str) -> Iterator[tuple[str, Setting, str]]:
    """Headings, settings, and the place whose bytes are counted."""
    name, place, away = ("GPU", DEVICE, HOST) if device == "cuda" else ("memory", HOST, NVME)
    for stage in range(4):
        yield f"stage {stage}\n{name}", Setting(stage), place
    if not is_installed("offload"):
        return
    moved = Setting(3, ("cpu" if away == HOST else "nvme", "-"))
    yield f"optimizer in {'host memory' if away == HOST else 'files'}\nstage 3: {name}", moved, place
    yield f"\n{away}", moved, away


def _with_adapters(model: Model, adapters: int | None) -> Model | None:
    """``model``, frozen, beside adapters; of a module itself, or None if nothing is frozen."""
    if isinstance(model, Stage):
        own = model.model
        if isinstance(own, Sizes) and adapters is not None:
            adapters = max(1, adapters * own.total // (own.total + model.elsewhere))
        made = _with_adapters(own, adapters)
        return replace(model, model=made) if isinstance(made, nn.Module | Sizes) else None
    if isinstance(model, nn.Module):
        return model if any(not parameter.requires_grad for parameter in model.parameters()) else None
    sizes = model if isinstance(model, Sizes) else Sizes(model)  # type: ignore[arg-type]  # it takes text and floats
    return replace(sizes, adapters=adapters or max(1, sizes.total // _ADAPTERS))
