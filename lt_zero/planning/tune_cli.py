"""The command ``lt-zero tune``: runs the script in processes of its own, prints what was measured, writes the best."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lt_zero.common import accelerator
from lt_zero.common.console import Console
from lt_zero.common.errors import ConfigError
from lt_zero.common.ports import free_port
from lt_zero.common.tables import bytes_cell, show
from lt_zero.common.units import format_bytes, parse_bytes
from lt_zero.config.cli import to_yaml
from lt_zero.config.load import OVERRIDES, examine
from lt_zero.core.stores.regular_file import read_start
from lt_zero.features import is_installed
from lt_zero.planning.search import MOST_NOISE, Outcome, Tuner, TuningError
from lt_zero.planning.search_space import Candidate, Facts, written
from lt_zero.planning.trial import FACTS, FOLDER, REPORT, Order

_TAIL = 20  # lines of output in an error
_GRACE = 5.0  # seconds for the other ranks to end once one has failed
_SHORT = re.compile(r"NotEnoughMemory|OutOfMemoryError|out of memory|MemoryError|Cannot allocate memory")
_ERROR = re.compile(r"[\w.]+(Error|Exception)\b")
# What needs least, to learn about a model that does not fit as the script has it.
_LEAST = ("zero_optimization.stage=3", "zero_optimization.stage3_max_reuse_distance=0")
_LEAST_GPU = ("zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=cpu")

tune_command = typer.Typer(add_completion=False)
Option = typer.Option


@tune_command.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def tune(
    script: Annotated[str, typer.Argument(help="A training script, or pkg.mod:function that makes what is trained.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    ranks: Annotated[
        int | None, Option(min=1, help="Start so many ranks, as torchrun does. Default: the script starts its ranks.")
    ] = None,
    memory: Annotated[
        str | None, Option(help="Limit of a rank, such as 4GiB: of its GPU, or without GPUs of its process.")
    ] = None,
    output: Annotated[Path, Option(help="YAML file for the fastest configuration.")] = Path("tuned.yaml"),
    micro_batch: Annotated[
        str | None,
        Option(help='Argument of the script for its micro-batch, such as "--batch-size {}": tries others, too.'),
    ] = None,
    accumulation: Annotated[
        str | None, Option(help="The same for micro-batches per step. Default: gradient_accumulation_steps.")
    ] = None,
    config: Annotated[Path | None, Option(help="Of a function's model: a JSON or YAML file.")] = None,
    nvme_path: Annotated[Path | None, Option(help="Also try offload to files in this folder.")] = None,
    trials: Annotated[int, Option(min=1, help="Configurations to measure at most.")] = 12,
    rounds: Annotated[int, Option(min=0, help="Further runs of each of the fastest few.")] = 2,
    minutes: Annotated[float | None, Option(min=0, help="Start nothing new after so many minutes.")] = None,
    warmup: Annotated[int, Option(min=0, help="Steps of a run before those that are timed.")] = 3,
    steps: Annotated[int, Option(min=1, help="Steps of a run that are timed.")] = 7,
    timeout: Annotated[float, Option(min=1, help="Seconds after which a run has failed.")] = 600.0,
    exhaustive: Annotated[bool, Option("--exhaustive", help="Then measure all other candidates, and compare.")] = False,
) -> None:
    """Find the fastest configuration that fits into the memory, by short runs of a training script.

    Options come before the script, its own arguments after it.
    """
    console = Console(highlight=False, soft_wrap=True)
    begun, load = time.monotonic(), os.getloadavg()[0]

    def tell(line: str) -> None:
        console.print(f"{time.monotonic() - begun:5.0f} s  {line}", markup=False)

    try:
        _check_output(output)
        limit = None if memory is None else parse_bytes(memory, "--memory")
        command, batches = _command(script, list(arguments or ()), config, ranks)
        templates = Templates(micro_batch or batches, accumulation)
        order = Order(warmup, steps, limit, None if nvme_path is None else str(nvme_path.absolute()))
        known: dict[str, Any] = {"trials": trials, "rounds": rounds, "minutes": minutes, "tell": tell}
        with tempfile.TemporaryDirectory(prefix="lt_zero-tune-") as folder:
            run = Runs(command, Path(folder), order, templates, ranks, timeout)
            tuner = Tuner(run, limit, batches=templates.micro is not None, nvme=order.nvme, **known)
            tuner.begin([*_LEAST, *(_LEAST_GPU if accelerator.is_available() and is_installed("offload") else ())])
            _check_batches(tuner.facts, {"--micro-batch": micro_batch, "--accumulation": accumulation})
            chosen = tuner.search()
            best = tuner.exhaust(chosen) if exhaustive else chosen
            others = list(tuner.with_rounding(best))
    except (TuningError, ConfigError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    print_table(tuner, best, console, load)
    for other in others:
        keys = " ".join(other.rounding)
        line = (
            f"~ {keys} rounds what ranks send each other: {tuner.ratio(other, best):.3f} times the time. Not written."
        )
        console.print(line, markup=False)
    if exhaustive:
        line = f"suggested without --exhaustive: {chosen}: {tuner.ratio(chosen, best):.3f} times the best of all"
        console.print(line, markup=False)
    _write(tuner, best, templates, output, console)


def _write(tuner: Tuner, best: Candidate, templates: Templates, output: Path, console: Console) -> None:
    """Write the best configuration, and print how to use it."""
    output.write_text(text_of(tuner, best), encoding="utf-8")
    console.print(f"fastest: {best}: {tuner.measured[best].seconds:.4f} s per step; wrote {output}", markup=False)
    if best.micro is not None and templates.micro is not None:
        console.print(f"Start the script with {shlex.join(templates.arguments(best))}", markup=False)


def _check_output(path: Path) -> None:
    """Raise ConfigError, before anything runs, if the result cannot be written."""
    try:
        ours = not os.path.lexists(path) or read_start(path, len(_HEADER.encode())) == _HEADER.encode()
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be read ({error.strerror or error}). Name another file.") from None
    if not ours:
        raise ConfigError(f"--output {path} exists, and lt-zero tune has not written it. Name another file.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}.")


def _check_batches(facts: Facts, given: Mapping[str, str | None]) -> None:
    """Raise ConfigError if options about micro-batches are ``given`` that a pipeline makes itself."""
    option, text = next(((option, text) for option, text in given.items() if text is not None), ("", ""))
    if option and facts.layers and not facts.loop:
        raise ConfigError(
            f"{option} {shlex.quote(text or '')}: a pipeline cuts the batches of the script's data loader into "
            "micro-batches by itself, and pipeline.num_microbatches is tried without it. Remove the option."
        )


def _command(script: str, given: list[str], config: Path | None, ranks: int | None) -> tuple[list[str], str | None]:
    """The command that trains, and its argument for the micro-batch, if there is one.

    Raises:
        ConfigError: there is no such script or function.
    """
    if script.endswith(".py") or Path(script).is_file():
        if not Path(script).is_file():
            raise ConfigError(f"There is no script {script!r}.")
        if config is not None:
            raise ConfigError(f"--config {config}: {script} has its own configuration. Change it there.")
        return [sys.executable, script, *given], None
    module, _, name = script.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        function: Any = getattr(importlib.import_module(module), name)
        parameter = inspect.signature(function).parameters.get("batch_size")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{script}: {error}. Name a script, or a function as pkg.mod:function.") from error
    if given:
        raise ConfigError(f"{script} {shlex.join(given)}: a function takes no arguments here.")
    chosen = [] if config is None else ["--config", str(config)]
    chosen += [] if ranks is None else ["--ranks", str(ranks)]
    command = [sys.executable, "-m", "lt_zero.training.lightning.function_trial", script, *chosen]
    return command, None if parameter is None else "--micro-batch {}"


@dataclass(frozen=True)
class Templates:
    """The script's arguments for micro-batch and accumulation, with {} for the number; None: there is none."""

    micro: str | None
    accumulation: str | None

    def arguments(self, candidate: Candidate | None) -> list[str]:
        if candidate is None or candidate.micro is None:
            return []
        pairs = ((self.micro, candidate.micro), (self.accumulation, candidate.accumulation))
        return [word.replace("{}", str(n)) for text, n in pairs if text is not None for word in shlex.split(text)]


# ---- runs --------------------------------------------------------------------------------------------------------


@dataclass
class Runs:
    """Runs a script; each run is a process group of its own, which is ended with all its processes."""

    command: Sequence[str]
    folder: Path
    order: Order
    templates: Templates
    ranks: int | None
    timeout: float
    count: int = field(default=0, init=False)

    def __call__(self, overrides: Sequence[str], candidate: Candidate | None, facts: bool) -> Outcome:
        folder = self.folder / str(self.count)
        self.count += 1
        folder.mkdir()
        order = Order(self.order.warmup, self.order.steps, self.order.limit, self.order.nvme, facts)
        order.write(folder)
        changes = f"{os.environ.get(OVERRIDES, '')} {shlex.join(overrides)}".strip()
        env = {**os.environ, FOLDER: str(folder), OVERRIDES: changes}
        printed = folder / "output.txt"
        with printed.open("wb") as file:
            problem, code = self._wait(self._start(env, file, self.templates.arguments(candidate)))
        lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
        return self._outcome(folder, problem, code, [line for line in lines if line.strip()], facts)

    def _start(self, env: Mapping[str, str], file: Any, more: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        common: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        common["start_new_session"] = True
        command = [*self.command, *more]
        if self.ranks is None:
            return [subprocess.Popen(command, env=dict(env), **common)]
        world, threads = str(self.ranks), str(max(1, (os.cpu_count() or 1) // self.ranks))
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
        }
        shared |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "lt-zero-tune"}  # by which Lightning knows a launcher
        base = {"OMP_NUM_THREADS": threads, **env, **shared}
        numbers = [str(rank) for rank in range(self.ranks)]
        return [subprocess.Popen(command, env={**base, "RANK": n, "LOCAL_RANK": n}, **common) for n in numbers]

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]]) -> tuple[str, int]:
        """Wait for a run's end; (problem or "", the first exit code that is not 0). No process is left."""
        deadline, problem = time.monotonic() + self.timeout, ""
        watches = self.order.limit is not None and not accelerator.is_available()
        try:
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    return problem or f"no end after {self.timeout:g} s (--timeout)", 1
                if any(process.poll() for process in processes):
                    deadline = min(deadline, time.monotonic() + _GRACE)
                    problem = problem or "a rank has failed"
                elif watches and (most := _largest(processes)) > (self.order.limit or 0):
                    return (
                        f"out of memory: {format_bytes(most)} taken, {format_bytes(self.order.limit or 0)} allowed",
                        1,
                    )
                time.sleep(0.2)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    # The group includes ranks and workers that the process has started.
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return "", next((process.returncode for process in processes if process.returncode), 0)

    def _outcome(self, folder: Path, problem: str, code: int, lines: list[str], asked: bool) -> Outcome:
        facts = Facts.read(folder / FACTS) if (folder / FACTS).exists() else None
        tail = "\n".join(lines[-_TAIL:])
        if (folder / REPORT).exists():
            report = loads((folder / REPORT).read_text(encoding="utf-8"))
            report["seconds"] = tuple(report["seconds"])
            return Outcome(**report, facts=facts, output=tail)
        short = problem.startswith("out of memory") or code == -signal.SIGKILL
        if said := [line.strip() for line in lines if _SHORT.search(line)]:
            problem, short = said[-1], True
        elif problem.startswith(("no end", "out of memory")):
            pass
        elif code:
            problem = next(
                (line.strip() for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), ""
            )
            problem = problem or f"the script ended with exit code {code}"
        elif facts is not None or not asked:
            wanted = 1 + self.order.warmup + self.order.steps
            problem = f"The script ended before step {wanted}. Let it train longer, or lower --warmup and --steps."
        else:
            problem = "The script ended without training with ZeroStrategy, FabricZeroStrategy or lt_zero.initialize."
        return Outcome(problem=problem[:200], too_large=short, facts=facts, output=tail)


def _largest(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Bytes of the largest process of a run."""
    most = 0
    for process in processes:
        with suppress(psutil.Error):
            whole = psutil.Process(process.pid)
            for one in (whole, *whole.children(recursive=True)):
                with suppress(psutil.Error):
                    most = max(most, one.memory_info().rss)
    return most


# ---- results -----------------------------------------------------------------------------------------------------


_HEADER = "# Written by lt-zero tune"
_COLUMNS = ("stage", "offload", "micro", "recompute", "bucket", "s/step", "spread", "samples\n/ s", "peak\n/ rank")
_PIPELINE = ("schedule", "micro-\nbatches")  # beside those, of a pipeline


def print_table(tuner: Tuner, best: Candidate, console: Console, load: float) -> None:
    """Print the measured candidates, fastest first, then those that failed or were not run, and why.

    ``load``: 1-minute load of the machine before the search.
    """
    loads = f"1-minute load of the machine: {load:.2f} before, {os.getloadavg()[0]:.2f} after"
    caption = f"stage *: stage3_max_reuse_distance: 0. -: as the script has it. {loads}."
    table = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False, collapse_padding=True)
    staged = tuner.facts.layers > 0
    many = any(candidate.sharing or candidate.rounding for candidate in tuner.measured)
    for name in (
        *_COLUMNS[:2],
        *(["shards"] if many else []),
        _COLUMNS[2],
        *(_PIPELINE if staged else ()),
        *_COLUMNS[3:],
    ):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(tuner.measured.items(), key=lambda item: item[1].seconds)
    fitting = {candidate: found for candidate, found in ordered if not found.problem}
    for candidate, found in fitting.items():
        setting, micro = candidate.setting, f"{candidate.micro} * {candidate.accumulation}"
        places = "/".join(dict.fromkeys(place for place in setting.places if place != "-"))
        table.add_row(
            f"{setting.stage}{' *' if setting.releases else ''}",
            places or "none",
            *([_shards(candidate)] if many else []),
            micro if candidate.micro is not None else "-",
            *([candidate.schedule or "-", str(candidate.count or "-")] if staged else []),
            candidate.checkpointing or "-",
            "-" if candidate.bucket is None else str(candidate.bucket),
            f"{found.seconds:.4f}",
            f"{found.spread:.1%}" if len(found.runs) > 1 else "-",
            f"{tuner.samples / found.seconds:.1f}" if tuner.samples else "-",
            bytes_cell(found.peak, 1),
            style="bold" if candidate == best else None,
        )
    show(table, console)
    for candidate, found in ordered:
        if candidate not in fitting:
            console.print(f"failed: {candidate}: {found.problem}", markup=False)
    for candidate, reason in tuner.pruned.items():
        console.print(f"not run: {candidate}: {reason}", markup=False)
    spread = max(found.spread for found in fitting.values())
    if spread > MOST_NOISE:
        line = f"The machine did other work: the two fastest runs of a candidate differ by {spread:.0%}, so the order"
        console.print(f"{line} above is not certain: the simplest of what may be fastest is suggested.", style="yellow")


def _shards(candidate: Candidate) -> str:
    """The keys for many shards, in short."""
    keys = [key.rpartition(".")[2] for key in candidate.sharing]
    return "\n".join([*keys, *(f"~ {key}" for key in candidate.rounding)]) or "-"


def text_of(tuner: Tuner, best: Candidate) -> str:
    """The configuration of a candidate as YAML."""
    overrides = best.overrides(tuner.base, tuner.nvme)
    made = examine(written(tuner.base), overrides=overrides).usable()
    found, origin = tuner.measured[best], tuner.measured.get(tuner.origin)
    lines = [f"{_HEADER}: {found.seconds:.4f} s per step, {format_bytes(found.peak)} per rank at most."]
    if origin is not None and origin.runs and overrides:
        lines.append(f"# The script as it was: {origin.seconds:.4f} s per step, {format_bytes(origin.peak)}.")
    lines.append(f"# Changed: {' '.join(overrides) or 'nothing'}")
    return "\n".join([*lines, to_yaml(written(made))])
