"""Finds the fastest setting that fits a machine, and prints a table of all settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from lt_zero.config import ZeroConfig
from lt_zero.config.schema import ZeroOptimization
from lt_zero.memory.estimate import Sizes, estimate
from lt_zero.memory.forecast import Forecast
from lt_zero.memory.limits import amount
from lt_zero.memory.rows import DEVICE, HOST, NVME, PLACES

_NONE: dict[str, Any] = {"device": "none"}
_CPU: dict[str, Any] = {"device": "cpu"}
_NVME: dict[str, Any] = {"device": "nvme"}
# From fast to slow: collectives that are saved, then states that cross PCIe each step, then weights that cross it twice
# per micro-batch, then the disk.
_LADDER: tuple[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    (0, _NONE, _NONE, {}),
    (1, _NONE, _NONE, {}),
    (2, _NONE, _NONE, {}),
    (3, _NONE, _NONE, {}),
    (3, _NONE, _NONE, {"stage3_max_reuse_distance": 0}),
    (1, _CPU, _NONE, {}),
    (2, _CPU, _NONE, {}),
    (3, _CPU, _NONE, {}),
    (3, _CPU, _CPU, {}),
    (3, _CPU, _CPU, {"stage3_max_reuse_distance": 0}),
    (2, _NVME, _NONE, {}),
    (3, _NVME, _NONE, {}),
    (3, _NVME, _CPU, {}),
    (3, _NVME, {**_NVME, "max_in_cpu": 0}, {"stage3_max_reuse_distance": 0}),
)


@dataclass(frozen=True)
class Setting:
    """One rung: keys of ``zero_optimization``."""

    keys: Mapping[str, Any]

    @property
    def stage(self) -> int:
        return int(self.keys["stage"])

    @property
    def places(self) -> tuple[str, str]:
        """The places of master weights and moments, and of the weights that gathers read; "-" for the device."""
        optim, param = (
            str(self.keys[f"offload_{key}"]["device"]).replace("none", "-") for key in ("optimizer", "param")
        )
        return optim, param

    @property
    def releases(self) -> bool:
        """Whether no unit stays gathered between its forward and its backward."""
        return "stage3_max_reuse_distance" in self.keys

    def __str__(self) -> str:
        named = zip(("optimizer", "param"), self.places, strict=True)
        parts = [f"offload_{key}: {place}" for key, place in named if place != "-"]
        parts += ["stage3_max_reuse_distance: 0"] if self.releases else []
        return ", ".join([f"stage {self.stage}", *parts])

    def of(self, config: ZeroConfig) -> ZeroConfig:
        """``config`` with this setting; a missing ``nvme_path`` is left for the user to fill."""
        block = config.zero_optimization
        values: dict[str, Any] = {name: getattr(block, name) for name in block.model_fields_set}
        for key, value in self.keys.items():
            if isinstance(value, Mapping):
                kept = {n: getattr(getattr(block, key), n) for n in getattr(block, key).model_fields_set}
                value = {"nvme_path": Path("nvme_path"), **kept, **value}
            values[key] = value
        return config.model_copy(update={"zero_optimization": ZeroOptimization.model_validate(values)})


@dataclass(frozen=True)
class Machine:
    """One node.

    Attributes:
        device: bytes of one GPU that model states may take; None: not limited, or no GPU.
        host: bytes of its memory.
        nvme: bytes of its disk.
        ranks: processes on it.
    """

    host: int
    device: int | None = None
    nvme: int = 0
    ranks: int = 8


@dataclass(frozen=True)
class Fit:
    """The first setting that fits (None: none does), and why those before it do not."""

    setting: Setting | None
    forecast: Forecast | None
    skipped: tuple[tuple[Setting, str], ...]


def settings(device: str = "cuda", stage: int | None = None) -> Iterator[Setting]:
    """The ladder. On CPUs, offloading to the CPU changes nothing and is left out."""
    for number, optim, param, more in _LADDER:
        moves = {"cpu"} & {optim["device"], param["device"]}
        if (device == "cpu" and moves) or stage not in (None, number):
            continue
        yield Setting({"stage": number, "offload_optimizer": optim, "offload_param": param, **more})


def cheapest(
    model: nn.Module | Sizes | float,
    machine: Machine,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int | None = None,
    *,
    device: str = "cuda",
    **options: Any,
) -> Fit:
    """The fastest setting that fits. See ``_LADDER`` for the order.

    Args:
        model: as in ``estimate``.
        machine: one node; all are alike.
        config: everything but stage, offload and reuse distance.
        world: ranks; default: one node.
        device: "cuda" or "cpu".
        options: further arguments of ``estimate``.
    """
    parsed = ZeroConfig.of(config)
    skipped: list[tuple[Setting, str]] = []
    for setting in settings(device):
        cast = estimate(
            model, setting.of(parsed), world or machine.ranks, ranks_per_node=machine.ranks, device=device, **options
        )
        problem = misfit(cast, machine)
        if not problem:
            return Fit(setting, cast, tuple(skipped))
        skipped.append((setting, problem))
    return Fit(None, None, tuple(skipped))


def misfit(cast: Forecast, machine: Machine) -> str:
    """A sentence that says what is too small; "" if everything fits."""
    needs = {DEVICE: cast.rank(DEVICE), HOST: cast.node(HOST), NVME: cast.node(NVME)}
    limits = {DEVICE: machine.device, HOST: machine.host, NVME: machine.nvme}
    words = {DEVICE: "GPU", HOST: "host", NVME: "NVMe"}
    lacking = []
    for place in PLACES:
        limit = limits[place]
        if limit is not None and needs[place] > limit:
            kind, most = max(_largest(cast, place).items(), key=lambda item: item[1])
            lacking.append(
                f"{words[place]}: {amount(needs[place])} needed, {amount(limit)} there (most: {kind}, {amount(most)})"
            )
    return "; ".join(lacking)


def _largest(cast: Forecast, place: str) -> dict[str, int]:
    phases = [cast.need_of_node(phase, place) for phase in cast.phases]
    most = max(phases, key=lambda need: sum(need.values()))
    ranks = cast.setup.per_node if place == DEVICE else 1
    return {kind: nbytes // ranks for kind, nbytes in most.items()}


def settings_table(
    model: nn.Module | Sizes | float,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int = 1,
    *,
    device: str = "cuda",
    stage: int | None = None,
    console: Console | None = None,
    **options: Any,
) -> Table:
    """Print, and return, what each rung of the ladder needs at most, per rank and per node.

    Args:
        model, config, world, device, options: as in ``estimate``.
        stage: only this one.
        console: where to print.
    """
    parsed = ZeroConfig.of(config)
    casts = [
        (setting, estimate(model, setting.of(parsed), world, device=device, **options))
        for setting in settings(device, stage)
    ]
    per_node = casts[0][1].setup.per_node
    table = Table(
        title=f"{casts[0][1].parameters:,} parameters, {world} rank(s), {per_node} per node",
        caption="Without activations. optim., param: device of offload_optimizer, offload_param.\n"
        "* stage3_max_reuse_distance: 0, nothing stays gathered after its forward.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("stage", "optim.", "param"):
        table.add_column(name, no_wrap=True)
    for name in (f"{place}\n/ {unit}" for unit in ("rank", "node") for place in PLACES):
        table.add_column(name, justify="right", no_wrap=True)
    for setting, cast in casts:
        each = [cast.rank(place) for place in PLACES] + [cast.node(place) for place in PLACES]
        stage_cell = f"{setting.stage}{' *' if setting.releases else ''}"
        table.add_row(stage_cell, *setting.places, *[amount(nbytes, 1) for nbytes in each])
    (console or Console()).print(table)
    return table


def kinds_table(cast: Forecast, title: str, console: Console | None = None) -> Table:
    """Print, and return, the bytes of rank 0 by kind. Kinds do not all exist at once."""
    table = Table(title=title, caption="Rank 0, each kind at its most; not all exist at once.", box=SIMPLE_HEAD)
    table.add_column("kind")
    for place in PLACES:
        table.add_column(place, justify="right")
    kinds = {place: cast.kinds(place) for place in PLACES}
    for kind in dict.fromkeys(kind for place in PLACES for kind in kinds[place]):
        table.add_row(kind, *[amount(kinds[place].get(kind, 0)) for place in PLACES])
    (console or Console()).print(table)
    return table
