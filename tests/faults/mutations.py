"""Mutated configurations, checkpoints, commands and variables: an error that is a sentence, or what was meant."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lt_zero.common.errors import ConfigError
from lt_zero.config.load import examine
from tests.faults.case import Case, Outcome
from tests.faults.damaged import damaged_cases
from tests.faults.one_by_one import Wrong, each
from tests.support.config_mutations import BASES, KEYS, TYPICAL, check, places
from tests.support.paths import DATA, ROOT
from tests.support.time_limit import time_limit

CONFIGS, FILES, COMMANDS, VARIABLES = 300, 100, 120, 80  # mutations of a case
_SLOW_S = 10.0  # for one configuration

# ---- configurations ------------------------------------------------------------------------------------------------

_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1,
    0,
    2**63,
    10**40,
    1e-320,
    -0.0,
    "1e999",
    "0x10",
    "1_000",
    "٣",
    "½",
]
_TEXTS = [
    "\0",
    "\ud800",
    "\u202e",
    "é" * 5000,
    "🙂",
    "${",
    "${a.b}",
    "${oc.env:NO_SUCH}",
    "a\nb",
    " ",
    "../..",
    "%s",
    "{}",
]
_SIZES = [
    [],
    {},
    [[]],
    [None] * 100,
    {"a": {"b": {"c": 1}}},
    {"": 0},
    {"enabled": "x"},
    {str(n): n for n in range(100)},
]


def _typo(config: dict[str, Any], path: tuple[str, ...], block: dict[str, Any], chance: random.Random) -> None:
    name = path[-1]
    at, odd = chance.randrange(len(name) + 1), chance.choice(["", "x", "_", "é", ".", " ", "E"])
    block[name[:at] + odd + name[at + 1 :]] = block.pop(name)


def _value(values: list[Any]) -> Callable[..., None]:
    def change(config: dict[str, Any], path: tuple[str, ...], block: dict[str, Any], chance: random.Random) -> None:
        block[path[-1]] = copy.deepcopy(chance.choice(values))

    return change


def _swap(config: dict[str, Any], path: tuple[str, ...], block: dict[str, Any], chance: random.Random) -> None:
    """Exchange a value with another one, or put a block into another."""
    other = chance.choice(list(places(config)))
    if other[: len(path)] == path or path[: len(other)] == other:
        config[chance.choice(KEYS).split(".")[0]] = copy.deepcopy(block[path[-1]])
        return
    there = functools.reduce(lambda found, key: found[key], other[:-1], config)
    block[path[-1]], there[other[-1]] = there[other[-1]], block[path[-1]]


def _known(config: dict[str, Any], path: tuple[str, ...], block: dict[str, Any], chance: random.Random) -> None:
    """Set a key that exists to anything."""
    *outer, last = chance.choice(KEYS).split(".")
    block = config
    for key in outer:
        if not isinstance(block.get(key), dict):
            block[key] = {}
        block = block[key]
    block[last] = copy.deepcopy(chance.choice([*TYPICAL, *_NUMBERS, *_TEXTS, *_SIZES]))


MUTATORS: dict[str, Callable[..., None]] = {
    "misspelt keys": _typo,
    "other types": _value([*TYPICAL, *_SIZES]),
    "numbers": _value(_NUMBERS),
    "texts": _value(_TEXTS),
    "swapped places": _swap,
    "known keys": _known,
}


def _sources(name: str) -> list[dict[str, Any]]:
    if name == "Hugging Face's":
        return BASES
    found = []
    for path in sorted((DATA / "ds_configs").glob("*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except ValueError:  # that is what its project has
            continue
    return [config for config in found if isinstance(config, dict) and config]


def mutated(kind: str, source: str, seed: int, number: int) -> dict[str, Any]:
    """The configuration of one mutation."""
    chance = random.Random(f"{seed} {kind} {source} {number}")
    config = copy.deepcopy(chance.choice(_sources(source)))
    for _ in range(chance.choice([1, 1, 2, 4])):
        there = list(places(config))
        if not there:
            break
        path = chance.choice(there)
        block = functools.reduce(lambda found, key: found[key], path[:-1], config)
        MUTATORS[kind](config, path, block, chance)
    return config


def _configurations(kind: str, source: str, seed: int, folder: Path) -> Outcome:
    understood, failures = 0, list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(CONFIGS):
            config = mutated(kind, source, seed, number)
            try:
                with time_limit(_SLOW_S):
                    understood += check(config)
            except Exception as error:
                failures.append(f"mutation {number}: {type(error).__name__}: {str(error)[:300]}")
    errors = CONFIGS - understood - len(failures)
    return Outcome(
        not failures,
        f"{errors} named errors, {understood} understood" + (f", {len(failures)} failed" if failures else ""),
        f"seed {seed}, mutated({kind!r}, {source!r}, {seed}, number)\n" + "\n".join(failures[:10]),
    )


def _file_mutation(seed: int, number: int, folder: Path) -> Path:
    """Write a configuration file that is damaged in some way; its path."""
    chance = random.Random(f"{seed} file {number}")
    source = chance.choice(sorted((DATA / "configs").glob("*")) + sorted((DATA / "ds_configs").glob("*.json")))
    data, target = bytearray(source.read_bytes()), folder / f"config{source.suffix}"
    how = chance.randrange(9)
    at = chance.randrange(len(data))
    if how == 0:
        data = data[:at]
    elif how == 1:
        data[at] ^= 1 << chance.randrange(8)
    elif how == 2:
        data[at:at] = chance.choice(
            [b"\xff\xfe", b"\0", b"{", b"}", b"[", b'"', b"&a *a", b"!!python/object:os.system ", b"\t"]
        )
    elif how == 3:
        data = bytearray(chance.randbytes(chance.randrange(400)))
    elif how == 4:
        data = bytearray(data.decode(errors="replace").encode(chance.choice(["utf-16", "utf-32", "utf-7", "cp037"])))
    elif how == 5:
        data = bytearray(chance.choice([b"[" * 20_000, b'{"a":' * 20_000, b"a: " * 5000, b"", b"null", b"3", b"[1]"]))
    elif how == 6:
        target = folder / f"config{chance.choice(['.toml', '.py', '.JSON', '', '.yaml', '.hjson', '.ckpt'])}"
    elif how == 7:
        target.mkdir()
        return target
    else:
        return folder / chance.choice(["missing.json", "a/b.json", "\udcff.json", "x" * 300 + ".json"])
    target.write_bytes(data)
    return target


def _configuration_file(seed: int, number: int, folder: Path) -> str:
    path = _file_mutation(seed, number, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            examine(str(path)).usable()
        except ConfigError as error:
            return _sentence(str(error), "named errors")
    return "understood"


def _sentence(text: str, what: str) -> str:
    """``what``, if the text is an error for a reader.

    Raises:
        Wrong: it is not.
    """
    if not text.strip() or "Traceback (most recent" in text or "object at 0x" in text or len(text) > 20_000:
        raise Wrong(f"no sentence: {text[-600:]!r}")
    return what


# ---- commands ------------------------------------------------------------------------------------------------------

_GOOD = DATA / "configs" / "hf_stage3.json"
_LINES: list[list[str]] = [
    ["config", "check", str(_GOOD)],
    ["config", "show", str(_GOOD)],
    ["config", "convert", str(_GOOD)],
    ["config", "explain", "zero_optimization.stage"],
    ["estimate", "--params", "7e9", "--world", "8", "--gpu-gb", "80"],
    ["estimate", "--params", "1e8", "--world", "4", "--stage", "3", "--config", str(_GOOD)],
    ["export", str(DATA / "deepspeed" / "stage1"), "out.safetensors", "--dtype", "fp32"],
    ["import", str(DATA / "fsdp" / "fsdp"), "out"],
    ["verify", str(DATA / "fsdp" / "fsdp")],
    ["plot", "metrics.csv"],
    ["ops", "report"],
    ["tune", "train.py", "--timeout", "5"],
]
_WORDS = [
    "",
    " ",
    "-",
    "--",
    "--help",
    "-x",
    "--no-such",
    "nan",
    "inf",
    "-1",
    "0",
    "1e16",
    "99999999999999999999",
    "é" * 50,
]
_WORDS += [
    "\ud800",
    "../..",
    "/",
    "/dev/null",
    "~nobody",
    "a=b",
    "stage=",
    "=3",
    "zero_optimization.stage=9",
    "x" * 5000,
    "🙂",
    "%s",
]


def command(seed: int, number: int) -> list[str]:
    """The words of one mutated command."""
    chance = random.Random(f"{seed} command {number}")
    words = list(chance.choice(_LINES))
    for _ in range(chance.choice([1, 1, 2, 3])):
        at, odd = chance.randrange(len(words) + 1), chance.choice(_WORDS)
        how = chance.randrange(4)
        if how == 0:
            words.insert(at, odd)
        elif how == 1 and words:
            words[at % len(words)] = odd
        elif how == 2 and words:
            del words[at % len(words)]
        elif words:
            words.insert(at, words[chance.randrange(len(words))])
    return [word.replace("\0", "") for word in words]


def _command(seed: int, number: int, folder: Path) -> str:
    from typer.testing import CliRunner

    from lt_zero.cli import app

    os.chdir(folder)
    os.environ["CXX"] = "false"  # nothing is compiled
    words = command(seed, number)
    (folder / "what").write_text(ascii(words))
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise Wrong(f"{type(result.exception).__name__}: {str(result.exception)[:300]}")
    if result.exit_code not in (0, 1, 2):
        raise Wrong(f"exit status {result.exit_code}")
    if result.exit_code:
        _sentence(result.output, "")
    return f"exit status {result.exit_code}"


def _real_commands(seed: int, folder: Path) -> Outcome:
    """A few in processes of their own, as a shell would start them."""
    failures, codes = list[str](), list[int]()
    for number in range(1000, 1006):
        words = [word for word in command(seed, number) if "\ud800" not in word]
        call = [sys.executable, "-c", "from lt_zero.cli import app; app()", *words]
        path = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": "false"}
        try:
            done = subprocess.run(call, capture_output=True, text=True, cwd=folder, env=path, timeout=100)
        except subprocess.TimeoutExpired:
            failures.append(f"{words}: no end after 100 s")
            continue
        codes.append(done.returncode)
        if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr + done.stdout:
            failures.append(f"{words}: {done.returncode}\n{done.stderr[-500:]}")
        elif done.returncode and not (done.stderr + done.stdout).strip():
            failures.append(f"{words}: nothing is said")
    return Outcome(not failures, f"exit status {sorted(set(codes))}", "\n".join(failures))


# ---- variables -----------------------------------------------------------------------------------------------------

_OURS = ["ALONE", "CACHE", "DEBUG", "ISA", "MEMORY_CHECK", "NATIVE", "NODE_RANK", "NVME", "OVERRIDES", "SHARED_MEMORY"]
_LAUNCHERS = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"]
_LAUNCHERS += ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
_LAUNCHERS += ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "OMP_NUM_THREADS", "LOCAL_SIZE"]
# No number above 1: a run that waits for ranks which nobody has started is what such a variable asks for.
_TEXTS_OF = [
    "",
    " ",
    "x",
    "-1",
    "0",
    "1",
    "1.5",
    "nan",
    "é",
    "0x1",
    "true",
    "/proc/no/such",
    "/dev/null",
    "1 2",
    "=",
    "'",
    "🙂",
]


def _variables(seed: int, ours: bool, number: int, folder: Path) -> str:
    chance = random.Random(f"{seed} variables {ours} {number}")
    names = [f"LT_ZERO_{name}" for name in _OURS] if ours else _LAUNCHERS
    chosen = {name: chance.choice(_TEXTS_OF) for name in chance.sample(names, chance.choice([1, 1, 2, 3]))}
    os.chdir(folder)
    (folder / "what").write_text(str(chosen))
    os.environ.update({"CXX": "false", **chosen})  # nothing is compiled a hundred times
    import torch

    import lt_zero

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = lt_zero.initialize(
                model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 2}}
            )
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
    except (ValueError, RuntimeError, OSError) as error:
        text = str(error)
        if not any(name in text for name in chosen):
            raise Wrong(f"the error names no variable: {type(error).__name__}: {text[:300]}") from None
        return _sentence(text, "named errors")
    except BaseException as error:
        raise Wrong(f"{type(error).__name__}: {str(error)[:300]}") from None
    return "trained"


def _trials(count: int, trial: Callable[[int, Path], str], folder: Path) -> Outcome:
    return each(range(count), trial)


def cases(seed: int) -> list[Case]:
    """One case per kind and source, with hundreds of mutations each."""
    found = [
        Case("configurations", f"{kind}, {source} files", functools.partial(_configurations, kind, source, seed))
        for kind in MUTATORS
        for source in ("Hugging Face's", "other projects'")
    ]

    def of(count: int, trial: Callable[..., str], *args: Any) -> Callable[[Path], Outcome]:
        return functools.partial(_trials, count, functools.partial(trial, seed, *args))

    found.append(Case("configurations", "damaged files", of(FILES, _configuration_file)))
    found += damaged_cases(seed)
    found.append(Case("commands", "mutated arguments", of(COMMANDS, _command)))
    found.append(Case("commands", "in processes of their own", functools.partial(_real_commands, seed)))
    found.append(Case("variables", "LT_ZERO_*", of(VARIABLES, _variables, True)))
    found.append(Case("variables", "of launchers", of(VARIABLES, _variables, False)))
    return found
