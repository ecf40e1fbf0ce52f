"""Readers of files from elsewhere, each with damaged files: an error that names the file, or something is read."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.import_ import import_checkpoint
from tests.faults.case import Case, Outcome
from tests.faults.one_by_one import Wrong, each
from tests.support.file_readers import BESIDE, ERRORS, FACTS, KINDS, READERS, WRONG, places, record_of_two_steps
from tests.support.paths import DATA

TRIALS = 80  # of a case
_TEXT_LIMIT = 8000  # characters of an error


# ---- right files, each made in a folder beside which nothing lies ----------------------------------------------------


def _native(file: Path) -> None:
    shutil.rmtree(file.parent)
    import_checkpoint(DATA / "deepspeed" / "stage1", file.parent)


def _exported(file: Path, **options: Any) -> None:
    source = file.parent.with_name("source")
    import_checkpoint(DATA / "deepspeed" / "stage1", source)
    if file.name.endswith(".index.json"):
        shutil.rmtree(file.parent)
        export(source, file.parent, dtype="fp32", shard_size=300)
    else:
        export(source, file, dtype="fp32", **options)


def _torch_file(file: Path) -> None:
    export_to = file.with_suffix(".ckpt")
    _exported(export_to, training_state=True)
    export_to.rename(file)


def _copied(source: Path) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        shutil.copytree(source, file.parent, dirs_exist_ok=True)

    return make


def _text(content: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(content) and None


def _lines(lines: list[Any]) -> Callable[[Path], None]:
    return _text("".join(json.dumps(line) + "\n" for line in lines))


def _events(file: Path) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        file.write_bytes(b"")
        return
    with SummaryWriter(str(file.parent)) as writer:
        for step in range(3):
            writer.add_scalar("zero/loss", 1.0 / (step + 1), step)
    next(file.parent.glob("events.*")).rename(file)


ADAPTER = {"peft_type": "LORA", "lora_alpha": 8, "r": 2, "alpha_pattern": {"a": 1.0}, "use_rslora": False}
RIGHT: dict[str, Callable[[Path], None]] = {
    "config.json": lambda file: shutil.copy(DATA / "configs" / "hf_stage3.json", file) and None,
    "config.yaml": lambda file: shutil.copy(DATA / "configs" / "zero_infinity_at_stage_2.yaml", file) and None,
    "adapter_config.json": _lines([ADAPTER]),
    "manifest.json": _native,
    "latest": _copied(DATA / "deepspeed" / "stage1"),
    "latest_universal": _text("global_step3_universal\n"),
    "model.safetensors.index.json": _exported,
    "a.safetensors": _exported,
    "a.pt": _torch_file,
    ".metadata": _copied(DATA / "fsdp" / "fsdp"),
    "weights-00000.pt": _text("12345"),
    "lt_zero.jsonl": _lines(FACTS),
    "metrics.csv": _text("step,zero/loss,epoch\n0,1.0,0\n1,0.5,0\n2,,1\n"),
    "Train_Samples_lr.csv": _text("step,Train/Samples/lr\n1,0.1\n2,0.2\n"),
    "events.out.tfevents.1": _events,
    "tuned.yaml": _text("# written by somebody\nzero_optimization: {stage: 2}\n"),
    "engine0.jsonl": _lines(record_of_two_steps()),
}


# ---- damages ---------------------------------------------------------------------------------------------------------


def _flipped(chance: random.Random, data: bytearray) -> None:
    for _ in range(chance.choice([1, 1, 3, 20])):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _cut(chance: random.Random, data: bytearray) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _noise(chance: random.Random, data: bytearray) -> None:
    place = chance.randrange(len(data) + 1)
    data[place : place + chance.choice([0, 8, 64])] = chance.randbytes(chance.choice([1, 8, 64]))


def _twice(chance: random.Random, data: bytearray) -> None:
    place = chance.randrange(len(data) + 1)
    data[place:place] = data[: chance.randrange(len(data) + 1)] * chance.choice([1, 1, 300])


def _piece(chance: random.Random, data: bytearray) -> None:
    """What means something in one of the formats, somewhere."""
    odd = [
        "\0",
        "\x1b[2J",
        "\ufeff",
        "\ud7ff",
        '"',
        "{",
        "]",
        ",",
        "\n",
        "\r",
        "-",
        "1e999",
        "9" * 5000,
        "../../x",
        "NaN",
    ]
    place = chance.randrange(len(data) + 1)
    data[place:place] = chance.choice(odd).encode()


def _value(chance: random.Random, data: bytearray) -> None:
    """Another value in JSON, or in one of its lines."""
    try:
        lines = [json.loads(line) for line in data.decode().splitlines()]
        whole = False
    except ValueError:
        try:
            lines, whole = [json.loads(data.decode())], True
        except ValueError:
            return _flipped(chance, data)
    found = [path for path in places(lines) if path]
    if not found:
        return _flipped(chance, data)
    path = chance.choice(found)
    holder = lines
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = chance.choice(WRONG)
    data[:] = "\n".join(json.dumps(line, indent=1 if whole else None) for line in lines).encode() + b"\n"
    return None


DAMAGES = [_flipped, _flipped, _cut, _noise, _twice, _piece, _value, _value, _value]


def _trial(name: str, read: Callable[[Path], object], right: Path, seed: int, number: int, folder: Path) -> str:
    chance = random.Random(f"{seed} {name} {number}")
    shutil.copytree(right, folder / "given")
    file = folder / "given" / name
    if name in BESIDE:
        beside, text = BESIDE[name]
        (file.parent / beside).write_text(text)
    if chance.random() < 0.1:
        kind = chance.choice(KINDS)
        file.unlink()
        kind(file)
        told = kind.__name__
    else:
        data = bytearray(file.read_bytes())
        damages = [chance.choice(DAMAGES) for _ in range(chance.choice([1, 1, 2]))]
        for damage in damages:
            damage(chance, data)
        file.write_bytes(data)
        told = " and ".join(damage.__name__.strip("_") for damage in damages)
    (folder / "what").write_text(told)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(file)
    except ERRORS as error:
        text = str(error)
        if len(text) > _TEXT_LIMIT or "Traceback" in text or " object at 0x" in text or "\x1b" in text:
            raise Wrong(f"no sentence: {text[:500]!r}") from None
        if str(file.parent) not in text and name not in text:
            raise Wrong(f"the file is not named: {text[:500]!r}") from None
        return "named errors"
    except BaseException as error:
        raise Wrong(f"{type(error).__name__}: {str(error)[:300]}") from None
    return "read"


def _case(name: str, read: Callable[[Path], object], seed: int, folder: Path) -> Outcome:
    right = folder / "right"
    right.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        RIGHT[name](right / name)
    return each(range(TRIALS), partial(_trial, name, read, right, seed))


def cases(seed: int) -> list[Case]:
    """A case for each reader."""
    made = []
    for number, (module, name, read) in enumerate(READERS):
        made.append(Case("readers", f"{number}, {name}, {module}", partial(_case, name, read, seed)))
    return made
