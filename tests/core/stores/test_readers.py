"""Every reader of files that strangers may have written: found by itself, and tried with all kinds of files."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lt_zero.checkpoint.lora import LoraScaling
from lt_zero.cli import app
from lt_zero.common.errors import CheckpointError
from lt_zero.training.lightning.monitor.plot import read_drawn
from lt_zero.training.lightning.monitor.reading import LogsError
from tests.support.features import needs
from tests.support.file_readers import (
    BESIDE,
    ERRORS,
    FACTS,
    KINDS,
    NOTHING,
    READERS,
    damaged_lines,
    record_of_two_steps,
)
from tests.support.paths import PACKAGE
from tests.support.time_limit import time_limit

OURS = {"open_regular", "open_bytes", "read_start", "read_bytes", "read_text", "read_json", "open_for_update"}
# Functions and methods that read a file.
CALLS = {"os.open", "io.open", "json.load", "pickle.load", "pickle.Unpickler", "yaml.load", "yaml.safe_load"}
CALLS |= {"safe_open", "load_file", "torch.load", "torch.from_file", "np.load", "np.fromfile", "np.memmap", "mmap.mmap"}
CALLS |= {"ZipFile", "zipfile.ZipFile", "OmegaConf.load", "EventAccumulator", "module.EventAccumulator"}
METHODS = {"read_text", "read_bytes"}
ENDS = {name.rpartition(".")[2] for name in CALLS} | METHODS | OURS | {"open"}

# Readers that do not go through core/stores/regular_file.py, by file and call, each with the reason why that is right.
PACKAGE_DATA = "a file of the package"
SYSTEM = "a file of /proc or /sys"
CACHE = "a file of the cache of kernels, which is opened only if no other user can write to it"
PRIVATE = "a file in a folder that this process, or the one that started it, made for itself"
OPENED = "a file that is open already, and regular"
NEW = "a file, or folder, that is made here"
FOLDER = "a folder: O_DIRECTORY refuses all else"
MEMORY = "no file, or one of shared memory"
EXCEPTIONS = {
    ("checkpoint/formats/reading.py", "torch.load"): OPENED,
    ("checkpoint/formats/mapped_records.py", "maps.read_text"): SYSTEM,
    ("checkpoint/formats/torch_file.py", "safe_open"): OPENED,
    ("checkpoint/native/archive.py", "torch.load"): MEMORY,
    ("checkpoint/native/archive.py", "zipfile.ZipFile"): MEMORY,
    ("checkpoint/native/directory.py", "temporary.open"): NEW,
    ("checkpoint/native/records.py", "zipfile.ZipFile"): OPENED,
    ("checkpoint/native/torchfile.py", "zipfile.ZipFile"): NEW,
    ("checkpoint/open.py", "zipfile.ZipFile"): OPENED,
    ("core/comm/objects.py", "pickle.load"): MEMORY,
    ("core/comm/shared_memory.py", "mmap.mmap"): MEMORY,
    ("core/comm/shared_memory.py", "open"): SYSTEM,
    ("core/comm/shared_memory.py", "os.open"): MEMORY,
    ("common/descriptors.py", "os.open"): "the null device, to see whether there is room for descriptors",
    ("common/flat_storage.py", "mmap.mmap"): MEMORY,
    ("config/keys.py", "TABLE.open"): PACKAGE_DATA,
    ("config/overrides.py", "found.joinpath(*group.split('/'), f'{option}.yaml').read_text"): PACKAGE_DATA,
    ("config/files.py", "open"): "checked there: configurations need nothing else of io; it is among the readers below",
    ("config/files.py", "os.open"): "as above",
    ("deepspeed/names.py", "resources.files(__package__).joinpath('names.tsv').read_text"): PACKAGE_DATA,
    ("tools/doctor.py", "Path('/proc/cpuinfo').read_text"): SYSTEM,
    ("tools/doctor.py", "Path('/proc/self/status').read_text"): SYSTEM,
    ("core/stores/direct_file.py", "Path(node, queue, 'logical_block_size').read_text"): SYSTEM,
    ("core/stores/direct_file.py", "os.open"): NEW,
    ("offload/private_folder.py", "os.open"): "a folder, or a lock in it that is never read; neither is a link",
    ("core/stores/staging.py", "os.open"): FOLDER,
    (
        "training/lightning/checkpoint_loads.py",
        "torch.load",
    ): "a file in which checked_file has found a whole archive",
    ("training/lightning/process_launchers.py", "torch.load"): "bytes that a rank has sent to its parent process",
    ("training/lightning/monitor/reading.py", "module.EventAccumulator"): "a folder whose files were opened before",
    ("kernels/compiler.py", "Path('/proc/locks').read_text"): SYSTEM,
    ("kernels/compiler.py", "file.read_bytes"): PACKAGE_DATA,
    ("kernels/compiler.py", "open"): CACHE,
    ("kernels/compiler.py", "record.read_text"): CACHE,
    ("kernels/header.py", "HEADER.read_text"): PACKAGE_DATA,
    ("kernels/own_folder.py", "os.open"): CACHE,
    ("core/stores/direct_file.py", "Path('/proc/self/mountinfo').read_text"): SYSTEM,
    ("common/host_memory.py", "path.read_text"): SYSTEM,
    ("planning/limits.py", "Path('/proc/self/status').read_text"): SYSTEM,
    ("planning/search_space.py", "path.read_text"): PRIVATE,
    ("planning/trial.py", "(folder / ORDER).read_text"): PRIVATE,
    ("planning/tune_cli.py", "(folder / REPORT).read_text"): PRIVATE,
    ("planning/tune_cli.py", "printed.read_text"): PRIVATE,
    ("sweep.py", "result_file.read_text"): PRIVATE,
}


def found_calls() -> tuple[set[str], set[tuple[str, str]]]:
    """Files that read through core/stores/regular_file.py, and other calls that read, by file."""
    guarded: set[str] = set()
    others: set[tuple[str, str]] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        if file == "core/stores/regular_file.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imported = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "lt_zero.core.stores.regular_file"
            for alias in node.names
        }
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in ENDS:
                continue
            called = ast.unparse(node.func)
            if called in imported & OURS:
                guarded.add(file)
            elif called == "open" or (isinstance(node.func, ast.Attribute) and name == "open" and _has_mode(node)):
                if _reads(node, 1 if called == "open" else 0) and not _is_opened(node, imported):
                    others.add((file, called))
            elif called in CALLS or (isinstance(node.func, ast.Attribute) and name in METHODS):
                others.add((file, called))
    return guarded, others


def _mode(node: ast.Call, place: int) -> str | None:
    """The mode of an ``open``; "r" if it has none, None if it is no constant."""
    given = [keyword.value for keyword in node.keywords if keyword.arg == "mode"] + node.args[place : place + 1]
    if not given:
        return "r"
    return given[0].value if isinstance(given[0], ast.Constant) and isinstance(given[0].value, str) else None


def _has_mode(node: ast.Call) -> bool:
    mode = _mode(node, 0)
    return mode is not None and re.fullmatch(r"[rwxabt+]{1,3}", mode) is not None and bool(node.args or node.keywords)


def _reads(node: ast.Call, place: int) -> bool:
    mode = _mode(node, place)
    return mode is None or "r" in mode or "+" in mode


def _is_opened(node: ast.Call, imported: set[str]) -> bool:
    """True for ``open(open_regular(...), ...)``."""
    first = node.args[0] if node.args else None
    return isinstance(first, ast.Call) and ast.unparse(first.func) in imported & OURS


def test_every_reader_is_known() -> None:
    """A new one goes through core/stores/regular_file.py and is tried below, or has a reason why it need not."""
    guarded, others = found_calls()
    assert others == set(EXCEPTIONS)
    assert guarded | {"config/files.py"} == {file for file, _, _ in READERS}


# ---- kinds of files -------------------------------------------------------------------------------------------------


def _told(read: Callable[[Path], object], file: Path, may_pass: bool) -> None:
    read(file)
    assert may_pass, f"{file.name} was taken for a right one"
    raise CheckpointError(f"{file} is no problem")


@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_waits_or_fills_the_memory(kind: Callable[[Path], None], tmp_path: Path) -> None:
    for number, (_, name, read) in enumerate(READERS):
        file = tmp_path / str(number) / name
        file.parent.mkdir()
        kind(file)
        if name in BESIDE:
            beside, text = BESIDE[name]
            (file.parent / beside).write_text(text)
        with time_limit(60), pytest.raises(ERRORS) as caught:
            _told(read, file, may_pass=kind in NOTHING)
        said = str(caught.value)
        assert str(file.parent) in said or name in said, (name, said)


# ---- fields of other types -------------------------------------------------------------------------------------------

EVERY = pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])


@needs("compare")
@EVERY
def test_a_damaged_record_is_no_difference(tmp_path: Path, every: int) -> None:
    """Status 1 of ``lt-zero compare`` means that the runs differ; whatever cannot be read is 2."""
    runner = CliRunner()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine0.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in record_of_two_steps())
        )
    assert runner.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")]).exit_code == 0
    codes = set()
    for text in damaged_lines(record_of_two_steps(), every):
        (tmp_path / "b" / "engine0.jsonl").write_text(text)
        done = runner.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
        assert done.exception is None or isinstance(done.exception, SystemExit), text
        assert done.exit_code != 1 or "First difference" in done.stdout, text
        codes.add(done.exit_code)
    assert codes == {0, 1, 2}
    for kind in KINDS:
        file = tmp_path / kind.__name__ / "engine0.jsonl"
        file.parent.mkdir()
        kind(file)
        with time_limit(60):
            done = runner.invoke(app, ["compare", str(tmp_path / "a"), str(file.parent)])
        assert done.exit_code == 2, (kind, done.output)
        assert kind.__name__ in done.stderr.replace("\n", "")


@EVERY
def test_damaged_facts_are_an_error_of_one_line(tmp_path: Path, every: int) -> None:
    (tmp_path / "metrics.csv").write_text("step,zero/loss\n0,1.0\n1,0.5\n")
    runner, codes = CliRunner(), set()
    for text in ["".join(json.dumps(fact) + "\n" for fact in FACTS), *damaged_lines(FACTS, every)]:
        (tmp_path / "lt_zero.jsonl").write_text(text)
        done = runner.invoke(app, ["logs", str(tmp_path)])
        assert done.exception is None or isinstance(done.exception, SystemExit), (text, done.exception)
        with suppress(LogsError):
            read_drawn(tmp_path)
        codes.add(done.exit_code)
    assert codes == {0, 1}


def test_damaged_adapters(tmp_path: Path) -> None:
    """Patterns of a stranger take no time that explodes."""
    file = tmp_path / "adapter_config.json"
    content = {"peft_type": "LORA", "lora_alpha": 8, "r": 2, "alpha_pattern": {"a": 1.0}, "use_rslora": False}
    for text in damaged_lines([content]):
        file.write_text(text)
        with suppress(CheckpointError):
            LoraScaling.of(file)
    for pattern in ("(a+)+b", "(a|a)*b", "(.*)*x", "(a{1,99999999}){1,99999999}b"):
        file.write_text(json.dumps({**content, "alpha_pattern": {pattern: 1.0}}))
        with time_limit(60):
            assert LoraScaling.of(file).of_module("a" * 100, 2) == 4
    for pattern in ("(", "(?i)a", "(" * 5000, "a(?=b)"):
        file.write_text(json.dumps({**content, "alpha_pattern": {pattern: 1.0}}))
        with pytest.raises(CheckpointError, match="write the names out"):
            LoraScaling.of(file)
