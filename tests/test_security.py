"""The page "Security", sentence by sentence: each is quoted by the test that shows it, here or where it is named."""

from __future__ import annotations

import ast
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.load import examine
from lt_zero.core.comm import shared_memory
from lt_zero.core.health import ended_ranks
from lt_zero.offload.private_folder import SwapFolder
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")

# Tests elsewhere, each with the sentences that it shows.
ELSEWHERE = """
tests/kernels/test_build.py::test_a_library_of_another_user_is_not_loaded
    - A library in the cache is loaded only if you or root own the folder and the file, no other user can write
      to them, and neither is a link.
    - Otherwise kernels are compiled into a private folder, and one warning names the cause.
tests/kernels/test_build.py::test_the_command_refuses_a_folder_of_others
    - `lt-zero ops build` refuses a folder that others can write to.
tests/config/test_bounds.py::test_what_is_no_file_is_not_waited_for
    - A pipe, a device, or a file without a size, such as `/proc/kmsg`, is an error, and never waited for.
tests/config/test_bounds.py::test_files
    - A file may have 128 KiB, 10,000 values, 1,000 interpolations and 50 nested mappings; more is an error, also
      if aliases or interpolations expand to it.
tests/config/test_bounds.py::test_thousands_of_problems
    - At most 50 problems are printed.
tests/config/test_secrets.py::test_secrets_are_not_shown
    - Its value, and that of a key with a secret's name (`api_key`, `password`, `hf_token`), is shown as `***`
      in errors, in tables, by `dump_state`, and in checkpoints.
tests/config/test_secrets.py::test_no_form_of_a_variable_is_shown
    - No message shows what was read from the environment, whatever becomes of it: `${oc.env:${oc.env:NAME}}` and
      `${key.${oc.env:NAME}}` make names of it.
tests/config/test_secrets.py::test_a_file_that_cannot_be_read_does_not_show_them
    - Lines of a file with such a name are not quoted in errors.
tests/checkpoint/test_damage.py::test_nothing_in_a_checkpoint_runs
    - It can't execute code: files are read with `weights_only=True`, and of other formats with stubs in place
      of the classes that they name.
tests/checkpoint/test_plain.py::test_every_file_of_a_checkpoint_loads_anywhere
    - `weights_only=False` executes code in `objects.pkl` or in a file of torch, so pass it for your own
      checkpoints only.
tests/checkpoint/test_plain.py::test_keys_are_kept_exactly
    - A class that is a key of a dictionary is found among the classes that are loaded, and nothing is imported.
tests/checkpoint/test_damage.py::test_damage_is_an_error_on_every_rank
    - A flipped bit, a truncated file, or a file of another kind is an error on all ranks.
tests/checkpoint/test_damage.py::test_manifests_that_make_no_sense
    - A file name in a manifest that leads out of the checkpoint is refused.
tests/checkpoint/test_export_universal.py::test_a_state_that_names_no_file_writes_none
    - A weight or state whose name leads out of the folder of an export is refused.
tests/checkpoint/test_disk.py::test_a_planted_link_is_not_written_to
    - What a save or an export writes lies in a new folder beside its place until it is complete; no link that lies
      there is followed, and two runs never share one.
tests/checkpoint/test_export_errors.py::test_what_a_killed_export_wrote_is_removed_by_the_next
    - The next save or export removes what a killed one has left.
tests/core/stores/test_readers.py::test_no_reader_waits_or_fills_the_memory
    - No file is waited for, and none fills the memory: of what lies in a folder or is named to a command
      (manifests, indices, `.metadata`, adapters, records, logs), pipes, devices, sockets and too large files are
      errors that name it.
tests/core/stores/test_readers.py::test_damaged_adapters
    - Patterns in `adapter_config.json` are matched in a time that does not explode.
tests/core/stores/test_readers.py::test_a_damaged_record_is_no_difference
    - Fields of another type are an error of one line, for `lt-zero compare` with status 2.
tests/training/lightning/test_console.py::test_commands_show_control_characters
    - Names in files are printed with `\\x1b` and the like in place of what controls a terminal.
tests/config/test_errors.py::test_errors_show_control_characters
    - Errors print what they quote of a file or configuration in the same way.
tests/offload/test_private_folder.py::test_a_link_that_takes_a_folders_name_is_not_followed
    - The folders in `nvme_path` are removed when their process ends, and those of killed processes by the next
      one, which follows no link.
"""


def elsewhere() -> dict[str, str]:
    """The sentences of ``ELSEWHERE`` with their tests."""
    found, place = {}, ""
    for text in re.split(r"\n(?=tests/|    - )", ELSEWHERE):
        if text.strip().startswith("- "):
            found[" ".join(text.split())[2:]] = place
        else:
            place = text.strip()
    return found


HERE: dict[str, Callable[..., Any]] = {}


def says(sentence: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a test that shows a sentence of the page."""

    def decorated(test: Callable[..., Any]) -> Callable[..., Any]:
        HERE[sentence] = test
        return test

    return decorated


def sentences() -> list[str]:
    """The sentences under the headings of the page, without tables and the last heading."""
    sections = PAGE.split("\n## ")[1:-1]
    texts = [part for section in sections for part in section.split("\n\n")[1:] if not part.startswith("|")]
    return [part for text in texts for part in re.split(r"(?<=\.) (?=[A-Z`])", " ".join(text.split()))]


def test_each_sentence_is_shown_by_a_test() -> None:
    assert sorted(sentences()) == sorted([*HERE, *elsewhere()])


def test_the_tests_that_are_named_exist() -> None:
    for place in set(elsewhere().values()):
        file, _, name = place.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], place


@says("Nothing but the kernels is compiled, loaded and executed by lt_zero itself.")
def test_only_the_kernels_are_loaded() -> None:
    loads, evaluates = set(), set()
    for path in (ROOT / "lt_zero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("ctypes.CDLL", "CDLL") and ast.unparse(node.args[0]) != "None":
                    loads.add(path.name)
                if name in ("eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads"):
                    evaluates.add((path.name, name))
    assert loads == {"compiler.py"}
    # What ranks send each other, see the page's last heading; and ``objects.pkl``, with ``weights_only=False`` only.
    places = {"objects.py", "ranks.py", "values_of_ranks.py", "archive.py"}
    assert evaluates == {("objects.py", "pickle.load"), *((place, "pickle.loads") for place in places)}


@says("Their sources are part of the package.")
def test_sources_are_in_the_package() -> None:
    from lt_zero.kernels.compiler import CSRC, recipe_of

    assert CSRC.is_relative_to(ROOT / "lt_zero")
    assert all(source.is_relative_to(CSRC) for source in recipe_of("cpu").sources())


@says(
    "Code that you name is imported and thus executed: a function that `lt-zero tune` or `lt-zero estimate` gets, and "
    "the class in `optimizer.type` if it is a path such as `my.package.MyOptimizer`."
)
@says("So read a stranger's configuration before you use it.")
def test_an_optimizer_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strangers_module.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = ZeroConfig.of({"optimizer": {"type": "strangers_module.Mine", "params": {"lr": 0.1}}})
    assert made.optimizer is not None
    assert sys.modules.pop("strangers_module").Mine


@says("Reading a configuration executes nothing.")
@says("YAML tags such as `!!python/object` are refused.")
def test_yaml_tags(tmp_path: Path) -> None:
    file, touched = tmp_path / "config.yaml", tmp_path / "touched"
    for tag in ("object/apply:os.system", "object/new:os.system", "name:os.system", "module:os"):
        file.write_text(f"stage: !!python/{tag} ['touch {touched}']\n")
        with pytest.raises(ConfigError, match="has the tag !!python|not YAML"):
            examine(file)
    assert not touched.exists()


@says("`${oc.env:NAME}` reads a variable of your environment.")
def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRANGE", "0.25")
    assert ZeroConfig.of({"gradient_clipping": "${oc.env:STRANGE}"}).gradient_clipping == 0.25


@says("It can have wrong values in weights, states and counters; such a checkpoint looks like a good one.")
def test_nothing_signs_a_manifest() -> None:
    from lt_zero.checkpoint.native.directory import Manifest
    from lt_zero.checkpoint.native.manifest_reader import parsed

    text = Manifest({}, {}, [], {}, [], {}).dump()  # anybody can write one with fitting checksums
    assert parsed(text.encode(), "manifest.json").dump() == text


@says("Shared memory between ranks has no name that another process could open.")
@pytest.mark.skipif(not shared_memory.supported(), reason="no memfd_create")
def test_shared_memory_has_no_name() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    arena = shared_memory.SharedArena()
    assert os.readlink(arena.address()[1]).startswith("/memfd:")
    assert (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) <= before


@says("Tracebacks of ranks are written to new files that only you can read.")
def test_tracebacks_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = ended_ranks._kept(RuntimeError("x"))
    assert path is not None
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert ended_ranks._kept(RuntimeError("x")) != path


@says("Of a rank's, the last five are kept.")
def test_few_tracebacks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = [tmp_path / name for name in ("lt_zero_rank00_x.txt", "lt_zero_rank10_x.txt", "notes.txt")]
    for path in others:
        path.touch()
    written = []
    for number in range(8):
        written.append(Path(str(ended_ranks._kept(RuntimeError(str(number))))))
        os.utime(written[-1], (number, number))
    assert sorted(tmp_path.iterdir()) == sorted([*others, *written[-5:]])


def test_the_table_of_places(tmp_path: Path) -> None:
    assert "| `nvme_path` | anybody may; each process has a folder with mode 700 in it | |" in PAGE
    tmp_path.chmod(0o1777)
    folder = SwapFolder(tmp_path, 0)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.close()
