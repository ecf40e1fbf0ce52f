"""The structure of the package: each file has a part, and what was taken out of a default fit or the core stays out.

``tests/support/house`` measures; it is shown here, on a tiny package, to see what it has to see.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lt_zero.optim
from tests.support.golden import REWRITE
from tests.support.house.__main__ import table
from tests.support.house.ceilings import keep_list, keep_number
from tests.support.house.entered import Entered, size_of
from tests.support.house.fit import Job, Outcome
from tests.support.house.imports import (
    COMPUTED,
    Import,
    Package,
    between_parts,
    core_to_config,
    core_to_features,
    this_package,
)
from tests.support.house.loaded import by_part, fits, total
from tests.support.house.parts import PARTS as ALL_PARTS
from tests.support.house.parts import part_of, stale
from tests.support.house.taken_out import (
    checkout_without_features,
    feature_folders,
    only_from_copy,
    take_out,
    without_features,
)
from tests.support.house.tested import Verdict, verdicts
from tests.support.paths import PACKAGE, ROOT
from tests.support.walks import Function

FILES = {
    "__init__": "",
    "core/__init__": "",
    "core/hidden": "def act():\n    from fake.tiles.loss import tiled\n    return tiled\n",
    "core/typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fake.tiles.loss\n",
    "core/relative": "from ..tiles import loss\nfrom . import hidden\nfrom .typed import nothing\n",
    "core/dynamic": "import importlib\nloss = importlib.import_module('fake.tiles.loss').loss\n",
    "core/dotted": "from importlib import import_module\nloss = import_module('..tiles.loss', __package__)\n",
    "core/computed": "def named(name):\n    return __import__(name)\n",
    "core/told": "import json\nfrom fake.config import keys\nfrom fake import core\nTEXT = 'import fake.tiles.loss'\n",
    "core/same": "import fake.core.same\n",
    "config/keys": "from fake.tiles.loss import KEY\n",
    "tiles/loss": "",
}
PARTS = {"core.engine": ("core/",), "config": ("config/",), "feature.tiles": ("tiles/",), "public": ("__init__",)}
LOSS = "tiles/loss"
MOST_OF_KEYS = 10_000  # bytes of a file that is loaded although its feature is off


@pytest.fixture
def fake(tmp_path: Path) -> Package:
    for name, text in FILES.items():
        path = tmp_path / "fake" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Package(tmp_path / "fake")


def test_imports_are_found_wherever_they_stand(fake: Package) -> None:
    into = ["core/hidden", "core/typed", "core/relative", "core/dynamic", "core/dotted"]
    others = [("core/relative", "core/hidden"), ("core/relative", "core/typed"), ("core/told", "config/keys")]
    others += [("core/told", "core/__init__"), ("core/computed", COMPUTED), ("config/keys", LOSS)]
    found = fake.imports()
    assert found == {*(Import(file, LOSS) for file in into), *(Import(*pair) for pair in others)}
    features = core_to_features(found, PARTS)
    assert {one.file for one in features} == {*into, "core/computed"}, "who computes a name may import anything"
    assert core_to_config(found, PARTS) == [Import("core/told", "config/keys")]
    assert between_parts(found, PARTS) == {
        ("core.engine", "feature.tiles"): 5,
        ("core.engine", "config"): 1,
        ("core.engine", COMPUTED): 1,
        ("config", "feature.tiles"): 1,
    }


def test_the_longest_line_of_the_table_decides() -> None:
    parts = {"core": ("engine/",), "feature": ("engine/ema", "engine/low/"), "other": ("engine/ema2",)}
    files = ["engine/ema", "engine/ema2", "engine/low/bit", "engine/emas"]
    assert [part_of(file, parts) for file in files] == ["feature", "other", "feature", "core"]
    assert part_of("step/ema", parts) is None
    assert stale(files[:2], parts) == ["engine/low/"]
    with pytest.raises(ValueError, match="engine/ is in several parts: core, other"):
        part_of("engine/bucket", {"core": ("engine/",), "other": ("engine/",)})


def test_every_file_has_a_part() -> None:
    files = this_package().files
    assert not [file for file in files if part_of(file) is None], "give them a line in tests/support/house/parts.py"
    taken_out = ("features/", "tools/")  # folders of them may be missing
    fits_none = [line for line in stale(files) if not (line.startswith(taken_out) and line.endswith("/"))]
    assert not fits_none, "these lines of tests/support/house/parts.py fit no file"


def test_a_part_is_removed_from_a_copy_and_its_tests_are_counted(fake: Package, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "support").mkdir(parents=True)
    (tests / "support" / "losses.py").write_text("def made():\n    from fake.tiles import loss\n")
    (tests / "test_loss.py").write_text("from tests.support import losses\n")
    (tests / "test_core.py").write_text("from fake.core import hidden\n")
    bytecode = fake.folder / "tiles" / "__pycache__"
    bytecode.mkdir()
    (bytecode / "loss.cpython.pyc").write_bytes(b"")
    copy = tmp_path / "copy"
    assert take_out("feature.tiles", fake, Package(tests), copy, PARTS) == (1, 2)
    assert not (copy / "fake" / "tiles").exists(), "an empty folder is a package for Python"
    assert len(list((copy / "fake").rglob("*.py"))) == len(FILES) - 1
    assert (fake.folder / "tiles" / "loss.py").exists()


def test_features_are_removed_from_a_copy_with_their_tests(tmp_path: Path) -> None:
    root = tmp_path / "root"
    kept = ["lt_zero/__init__.py", "lt_zero/features/__init__.py", "lt_zero/tools/doctor.py", "tests/test_core.py"]
    gone = ["lt_zero/features/ema/__init__.py", "lt_zero/tools/compare/__init__.py"]
    gone += ["tests/features/ema/test_ema.py", "tests/tools/compare/test_compare.py"]
    for name in (*kept, *gone, ".venv/lib.py", "build/lib.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    folders = feature_folders(root / "lt_zero")
    assert folders == [Path("features/ema"), Path("tools/compare")]
    copy = checkout_without_features(root, tmp_path / "whole", folders)
    assert sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*.py")) == kept
    bare = without_features(root / "lt_zero", tmp_path / "bare", folders[:1])
    assert not (bare / "features" / "ema").exists()
    assert (bare / "tools" / "compare" / "__init__.py").exists()
    assert all((root / name).exists() for name in gone)


def test_a_process_of_a_copy_finds_nothing_of_this_checkout(tmp_path: Path) -> None:
    """As with an editable install, whose finder knows each module of the package."""
    for name in ("lt_zero/__init__.py", "tests/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "editable").mkdir()
    (tmp_path / "editable" / "usercustomize.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class Finder:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(PACKAGE)!r}]) if name.startswith('lt_zero.') else None\n"
        f"sys.meta_path.append(Finder)\nsys.path.append({str(ROOT)!r})\n"
    )
    code = (
        f"import sys; sys.path.append({str(tmp_path / 'editable')!r}); import usercustomize, sitecustomize\n"
        "from importlib.util import find_spec; print(find_spec('lt_zero').origin, find_spec('tests').origin)\n"
        "print(find_spec('lt_zero.features'), find_spec('tests.support'))"
    )
    words = [sys.executable, "-S", "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=only_from_copy(tmp_path), capture_output=True, text=True, check=True)
    there = f"{tmp_path / 'lt_zero/__init__.py'} {tmp_path / 'tests/__init__.py'}"
    assert done.stdout.splitlines() == [there, "None None"]


def test_functions_are_counted_without_comments_docstrings_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(
        "import functools\n\n\n"
        "@functools.cache\n"
        "def outer(x):\n"
        '    """Says\n\n    much."""\n\n'
        "    # about this\n"
        "    def inner():\n"
        "        return x  # one\n\n"
        "    return inner\n"
        "\n\ndef other(): pass\n"
    )
    # @ functools . cache, def outer ( x ) :, def inner ( ) :, return x, return inner
    assert size_of([Function("file.py", 4), Function("file.py", 11)], tmp_path) == Entered(1, 2, 5, 19)
    assert size_of([Function("file.py", 17), Function("file.py", 99)], tmp_path) == Entered(1, 1, 1, 6)


def test_what_has_risen_is_named_and_what_has_fallen_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "house.json"
    file.write_text('{"imports": ["a -> b", "c -> d"], "lines": 1000}')
    monkeypatch.delenv(REWRITE, raising=False)
    keep_list("imports", ["a -> b"], file)
    keep_list("imports", ["a -> b", "c -> moved"], file)
    keep_number("lines", 1010, file)
    assert file.read_text() == '{"imports": ["a -> b", "c -> d"], "lines": 1000}', "only `make golden` writes"
    monkeypatch.setenv(REWRITE, "1")
    for _ in range(2):  # also when it is asked to write
        with pytest.raises(AssertionError, match="imports: 3, and house.json allows 2. New: e -> f"):
            keep_list("imports", ["a -> b", "c -> d", "e -> f"], file)
        with pytest.raises(AssertionError, match="lines: 1,011, and house.json allows 1,000 and 1% more"):
            keep_number("lines", 1011, file)
    keep_number("lines", 1010, file)
    assert json.loads(file.read_text())["lines"] == 1000, "it is never raised"
    keep_list("imports", ["c -> moved"], file)
    keep_number("lines", 900, file)
    assert json.loads(file.read_text()) == {"imports": ["c -> moved"], "lines": 900}


def test_rows_become_a_table() -> None:
    rows = [{"part": "core", "lines": 1200}, {"part": "a|b", "which": ["x -> y", "z"]}]
    assert table(rows).splitlines() == [
        "| part | lines | which |",
        "| --- | --- | --- |",
        "| core | 1,200 |  |",
        "| a\\|b |  | x -> y; z |",
    ]


def test_the_core_imports_no_more_of_features_and_the_configuration_than_it_did() -> None:
    found = this_package().imports()
    keep_list("imports of the core into features and tools", list(map(str, core_to_features(found))))
    assert core_to_config(found) == []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Fits of this package, of one that needs a file which only this one has, of this one without any feature.

    And of this one at stage 0, which saves one file. One process starts all four.
    """
    other = tmp_path_factory.mktemp("other") / "lt_zero"
    other.mkdir()
    (other / "__init__.py").write_text("from lt_zero.features.tiles import loss\n")
    bare = without_features(PACKAGE, tmp_path_factory.mktemp("bare"), feature_folders(PACKAGE))
    return fits([Job(3, PACKAGE), Job(3, other), Job(3, bare), Job(0, PACKAGE)])


def test_a_default_fit_loads_no_more_than_it_did(outcomes: list[Outcome]) -> None:
    files, problem = outcomes[0]
    assert not problem
    keep_list("files that a default fit loads", files)
    keep_number("lines that a default fit loads", total(by_part(PACKAGE, files)).lines)
    files, problem = outcomes[3]
    assert not problem
    keep_number("lines that a default fit loads at stage 0", total(by_part(PACKAGE, files)).lines)


def test_a_fit_takes_the_package_from_its_folder_only(outcomes: list[Outcome]) -> None:
    assert outcomes[1] == ([], "ModuleNotFoundError: No module named 'lt_zero.features'")


def test_a_default_fit_runs_without_any_feature(outcomes: list[Outcome]) -> None:
    """It loads the same files as with all of them there, but for those that say which keys a feature brings."""
    files, problem = outcomes[2]
    assert not problem
    more = sorted(set(outcomes[0].files) - set(files))
    folders = [file.removesuffix("/keys") for file in more if file.endswith("/keys")]
    assert sorted([*(f"{folder}/__init__" for folder in folders), *(f"{folder}/keys" for folder in folders)]) == more
    assert set(files) <= set(outcomes[0].files)
    assert all((PACKAGE / f"{file}.py").stat().st_size < MOST_OF_KEYS for file in more)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_default_fit_runs_without_each_feature(tmp_path: Path) -> None:
    folders = feature_folders(PACKAGE)
    jobs = [Job(3, without_features(PACKAGE, tmp_path / folder.name, [folder])) for folder in folders]
    problems = {folder.name: fit.problem for folder, fit in zip(folders, fits(jobs), strict=True)}
    assert problems == dict.fromkeys(problems, "")


@pytest.mark.slow
def test_tests_without_features_have_a_verdict(tmp_path: Path) -> None:
    """There are two features, of which one needs the other, and a test of the rest that needs the first one."""
    root = tmp_path / "root"
    files = {f"lt_zero/features/{name}/__init__.py": "" for name in ("a", "b")}
    files |= {"lt_zero/__init__.py": "", "tests/features/a/test_a.py": "def test(): import lt_zero.features.a\n"}
    files["tests/features/b/test_b.py"] = "def test(): import lt_zero.features.b, lt_zero.features.a\n"
    files["tests/tools/test_doctor.py"] = "def test(): pass\n"
    files["tests/test_rest.py"] = (
        "import pytest, lt_zero\nfrom pathlib import Path\n"
        "gone = not (Path(lt_zero.__file__).parent / 'features/b').exists()\n"
        "@pytest.mark.skipif(gone, reason='not installed: b')\ndef test_b(): import lt_zero.features.a\n"
        "def test(): pass\n"
    )
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    who = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    assert dict(verdicts(root, tmp_path / "copies")) == {
        "all": Verdict(2, [], ["tests/test_rest.py::test_b"]),
        "features/a": Verdict(1, ["tests/features/b/test_b.py::test", "tests/test_rest.py::test_b"], []),
        "features/b": Verdict(2, [], ["tests/test_rest.py::test_b"]),
    }


@pytest.mark.slow
def test_a_fit_that_hangs_is_a_problem(tmp_path: Path) -> None:
    (package := tmp_path / "lt_zero").mkdir()
    (package / "__init__.py").write_text("import time\ntime.sleep(1000)\n")
    assert fits([Job(3, package)], limit=3) == [Outcome([], "It has not ended after 3 s.")]


# Statements outside of functions.
STATEMENT = re.compile(r"^(?:from +([\w.]+) +import +(\([^)]*\)|.*)|import +(.*))$", re.MULTILINE)
# Public names of features, and the modules that they are of.
PUBLIC = {f"lt_zero.{name}": f"lt_zero.{module}" for name, module in lt_zero._MODULES.items()}
PUBLIC |= {f"lt_zero.optim.{name}": module for name, module in lt_zero.optim._MODULES.items()}
PUBLIC |= {"lt_zero.attention": "lt_zero.features.sparse_attention"}


def _imported(path: Path) -> Iterator[str]:
    """The modules and names that a file imports outside of functions."""
    for module, names, modules in STATEMENT.findall(path.read_text(encoding="utf-8")):
        if module:
            yield module
            yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))
        else:
            yield from re.findall(r"[\w.]+", modules)


def test_only_its_own_tests_import_a_feature_when_they_are_collected() -> None:
    """Others import it in a function, as without it they have to be skipped."""
    lines = {line for part in ALL_PARTS.values() for line in part if line.startswith(("features/", "tools/"))}
    folders = {line.removesuffix("/") for line in lines if line.endswith("/")}
    assert len(folders) >= 11
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file = path.relative_to(ROOT / "tests")
        for name in _imported(path):
            module = PUBLIC.get(name, name).split(".")
            feature = "/".join(module[1:3])
            if module[0] in ("lt_zero", "tests") and feature in folders and feature != "/".join(file.parts[:2]):
                found.append((file.as_posix(), name))
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_tests_import_no_feature(tmp_path: Path) -> None:
    """All files of tests can be imported without the features and their own tests."""
    copy = checkout_without_features(ROOT, tmp_path, feature_folders(PACKAGE))
    environment = only_from_copy(copy)
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith(("ERROR", "E  "))]
    assert done.returncode == 0, errors or done.stdout[-2000:] + done.stderr
