"""How the native kernels are built, cached, loaded and reported, on small stand-ins for their sources."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lt_zero import cli
from lt_zero.common import progress_bar
from lt_zero.kernels import compiler as build
from lt_zero.kernels import library
from lt_zero.kernels.compiler import BuildError, Recipe, cached, find_compiler, recipe_of
from lt_zero.kernels.dispatch import chunks
from lt_zero.kernels.library import Loader

KERNELS = """
#include "lt_zero.h"
#define FUNCTION(type, name) extern "C" __attribute__((visibility("default"))) type name
FUNCTION(int, lt_KIND_abi)() { return LT_ABI_VERSION; }
FUNCTION(const char *, lt_KIND_isa)() { return "portable"; }
FUNCTION(const char *, lt_KIND_pool)() { return "own"; }
FUNCTION(const char *, lt_KIND_error)(int) { return "bad argument"; }
FUNCTION(int, lt_KIND_use_isa)(const char *) { return 0; }
FUNCTION(long, lt_KIND_scratch)(long, const long *) { return 64; }
FUNCTION(long, lt_KIND_topk_scratch)(long) { return 64; }
""" + "".join(
    f"FUNCTION(int, lt_KIND_{name})(const void *) {{ return 0; }}\n"
    for name in dict.fromkeys([*library.operations("cpu"), *library.operations("cuda")])
)
HOLDER = "import sys, time, filelock\nlock = filelock.FileLock(sys.argv[1])\nlock.acquire()\nprint('held', flush=True)"
# build.py without the package, which would import torch and Lightning.
BUILDER = f"""
import importlib.util, pathlib, sys, types
package = sys.modules["lt_zero"] = types.ModuleType("lt_zero")
package.__path__ = [{str(Path(build.__file__).parent.parent)!r}]
spec = importlib.util.spec_from_file_location("build", {build.__file__!r})
build = sys.modules["build"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
try:
    print(build.build(build.recipe_of("cpu", pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2])).path)
except build.BuildError as error:
    print("failed:", error)
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LT_ZERO_NATIVE", "LT_ZERO_ISA", "LOCAL_RANK", "CXX", "NVCC", "CUDA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LT_ZERO_CACHE", str(tmp_path / "a cache"))


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """Sources of two tiny libraries, in a folder with a space."""
    root = tmp_path / "the sources"
    for kind, name in (("cpu", "api.cpp"), ("cuda", "api.cu")):
        (root / kind).mkdir(parents=True)
        (root / kind / name).write_text(KERNELS.replace("KIND", kind))
    (root / "cpu" / "portable.cpp").write_text("int portable;\n")
    (root / "cpu" / ("neon.cpp" if build.MACHINE == "x86_64" else "avx512.cpp")).write_text("#error another machine\n")
    (root / "lt_zero.h").write_text("#define LT_ABI_VERSION 1\n")
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "a cache"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler that notes each file it makes, at a path with a space; returns the notes."""
    notes = tmp_path / "notes"
    notes.touch()
    real = find_compiler("cpu").command[0]
    text = f'case "$*" in *" -o "*) echo "$@" >> "{notes}";; esac\nexec {real} "$@"\n'
    monkeypatch.setenv("CXX", str(script(tmp_path / "the tools" / "c++", text)))
    return notes


@pytest.fixture
def holder(csrc: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the CPU library."""
    cache.mkdir()
    recipe = recipe_of("cpu", csrc)
    assert recipe.compiler is not None
    lock = cache / f"{recipe.key(recipe.compiler)}.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER + "\ntime.sleep(60)", str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def count(notes: Path) -> int:
    return len(notes.read_text().splitlines())


def test_first_use_compiles_and_later_ones_do_not(
    csrc: Path, cache: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Loader(csrc)
    assert first.get("cpu") is first.get("cpu") is not None
    told = capsys.readouterr().err
    assert told.count("lt_zero compiles its cpu kernels") == 1
    assert f"into {cache}." in told
    assert "`lt-zero ops build`" in told
    assert count(runs) == 3  # two sources and the library; the source for other machines is left out
    status = first.status("cpu")
    assert (status.available, status.isa) == (True, "portable")
    assert status.path is not None
    assert status.path.parent == cache
    assert status.seconds is not None
    again = Loader(csrc)
    assert again.get("cpu") is not None
    assert again.status("cpu").seconds is None
    assert "compiles" not in capsys.readouterr().err
    assert count(runs) == 3
    assert {file.suffix for file in cache.iterdir()} == {".so", ".log", ".lock"}


def test_a_library_that_is_shipped_beside_the_sources_is_loaded_without_a_compiler(
    csrc: Path, cache: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.build(recipe_of("cpu", csrc), csrc / build.SHIPPED)
    monkeypatch.setenv("CXX", "no-compiler")
    shipped = Loader(csrc)
    assert shipped.status("cpu").path == made.path
    assert shipped.status("cpu").why == "shipped with the package"
    assert not cache.exists()
    # Of other sources, or damaged, it is not loaded.
    content = made.path.read_bytes()
    made.path.unlink()  # this process has mapped the file, and would crash at its exit if it changed
    made.path.write_bytes(content[:-1])
    with pytest.warns(UserWarning, match="no-compiler"):
        assert Loader(csrc).get("cpu") is None
    monkeypatch.delenv("CXX")
    rebuilt = Loader(csrc).status("cpu")
    assert rebuilt.path is not None
    assert rebuilt.path.parent == cache


def test_threads_compile_once(csrc: Path, runs: Path) -> None:
    loader = Loader(csrc)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(loader.get("cpu"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(lib) for lib in found}) == 1
    assert count(runs) == 3


def test_the_key(csrc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def key() -> str:
        recipe = recipe_of("cpu", csrc)
        assert recipe.compiler is not None
        return recipe.key(recipe.compiler)

    keys = [key()]
    assert key() == keys[0]
    (csrc / "cpu" / "portable.cpp").write_text("int portable = 1;\n")
    keys.append(key())
    (csrc / "lt_zero.h").write_text("#define LT_ABI_VERSION 1 \n")
    keys.append(key())
    (csrc / "cpu" / "more.h").write_text("\n")
    keys.append(key())
    monkeypatch.setattr(build, "CPU_FLAGS", (*build.CPU_FLAGS, "-g"))
    keys.append(key())
    tool = script(tmp_path / "tool", "echo version 1\n")
    monkeypatch.setenv("CXX", str(tool))
    keys.append(key())
    script(tool, "echo version 2\n")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    (csrc / "cuda" / "api.cu").write_text("another library's source\n")
    assert key() == keys[-1]
    csrc.rename(tmp_path / "moved")  # where the sources lie does not count
    csrc = tmp_path / "moved"
    assert key() == keys[-1]


def test_processes_compile_once(csrc: Path, cache: Path, runs: Path) -> None:
    command = [sys.executable, "-c", BUILDER, str(csrc), str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=240)[0] for process in processes}
    assert len(paths) == 1
    assert paths.pop().strip().endswith(".so")
    assert count(runs) == 3


def test_who_waited_for_a_failure_does_not_repeat_it(
    csrc: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = tmp_path / "notes"
    wait = f'echo x >> "{notes}"; until [ -e "{tmp_path}/go" ]; do sleep 0.02; done; echo error: never; exit 1'
    monkeypatch.setenv("CXX", str(script(tmp_path / "tool", f'case "$*" in *" -o "*) {wait};; esac\n')))
    caplog.set_level(logging.INFO, "lt_zero")
    (csrc / "cpu" / "portable.cpp").unlink()
    reasons: list[str] = []

    def attempt() -> None:
        try:
            build.build(recipe_of("cpu", csrc), cache)
        except BuildError as error:
            reasons.append(str(error))

    threads = [threading.Thread(target=attempt) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: caplog.text.count("Waiting") == 2)
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join()
    assert reasons == [f"{tmp_path / 'tool'} ended with code 1: error: never"] * 3
    assert count(notes) == 1


def test_a_killed_process_leaves_no_lock(
    holder: subprocess.Popen[str],
    csrc: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lt_zero")
    killer = threading.Thread(target=lambda: (until(lambda: "Waiting" in caplog.text), holder.kill()))
    killer.start()
    assert build.build(recipe_of("cpu", csrc), cache).path.exists()
    killer.join()
    assert holder.wait() < 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"Waiting (330 s at most) for process {holder.pid}, which compiles" in line
    assert str(cache) in line


def test_it_tells_what_takes_long(csrc: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[progress_bar.Work] = []
    monkeypatch.setattr(progress_bar, "_watch", lambda work, *_: seen.append(work))
    monkeypatch.setattr(progress_bar, "_local_rank", 0)
    build.build(recipe_of("cpu", csrc), cache)
    build.build(recipe_of("cpu", csrc), cache)
    jobs = len(recipe_of("cpu", csrc).sources()) + 1
    assert [(work.what, work.done, work.total) for work in seen] == [("Compiling lt_zero's cpu kernels", jobs, jobs)]


def test_waiting_is_limited(
    holder: subprocess.Popen[str], csrc: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(build.TIME_LIMIT, "cpu", 0.2 - build.MARGIN)
    with pytest.raises(BuildError, match=f"process {holder.pid} has held"):
        build.build(recipe_of("cpu", csrc), cache)


def test_a_compiler_that_hangs_is_ended(
    csrc: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'case "$*" in *" -o "*) sleep 60 & echo $! > "{tmp_path}/child"; wait;; esac\n'
    monkeypatch.setenv("CXX", str(script(tmp_path / "tool", text)))
    (csrc / "cpu" / "portable.cpp").unlink()
    monkeypatch.setitem(build.TIME_LIMIT, "cpu", 3.0)
    with pytest.raises(BuildError, match="tool did not end within 3 s") as caught:
        build.build(recipe_of("cpu", csrc), cache)
    assert caught.value.log is not None
    assert "Failed: " in caught.value.log.read_text()
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive(child))


def until(condition: Callable[[], bool], limit: float = 30.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def spoil(path: Path, content: bytes, honest: bool) -> Path:
    """Replace a library in the cache; ``honest``: under a name that fits to its content."""
    path.unlink()
    path.write_bytes(content)
    return (
        path.rename(path.parent / f"{path.stem.rpartition('-')[0]}-{hashlib.sha256(content).hexdigest()[:16]}.so")
        if honest
        else path
    )


@pytest.mark.parametrize("damage", ["cut short", "no library", "another version"])
def test_a_corrupt_library_is_rebuilt(csrc: Path, cache: Path, runs: Path, tmp_path: Path, damage: str) -> None:
    path = build.build(recipe_of("cpu", csrc), cache).path
    if damage == "cut short":
        spoiled = spoil(path, path.read_bytes()[:5000], honest=False)
    elif damage == "no library":
        spoiled = spoil(path, b"\x7fELF and so on", honest=True)
    else:
        (tmp_path / "x.cpp").write_text('extern "C" int lt_cpu_abi() { return 99; }\n')
        command = [*find_compiler("cpu").command, "-shared", "-fPIC", tmp_path / "x.cpp", "-o", tmp_path / "x.so"]
        subprocess.run(command, check=True)
        spoiled = spoil(path, (tmp_path / "x.so").read_bytes(), honest=True)
    before = count(runs)
    loader = Loader(csrc)
    assert loader.get("cpu") is not None
    assert count(runs) == before + 3
    assert Loader(csrc).get("cpu") is not None
    assert count(runs) == before + 3
    assert list(cache.glob("*.so")) == [loader.status("cpu").path]
    assert not spoiled.exists() or spoiled == path


def test_a_library_of_another_abi_is_not_published(csrc: Path, cache: Path) -> None:
    (csrc / "lt_zero.h").write_text("#define LT_ABI_VERSION 2\n")
    with pytest.warns(UserWarning, match="has ABI version 2, not 1"):
        assert Loader(csrc).get("cpu") is None
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob("*.tmp"))


def test_a_failed_build_is_told_once(csrc: Path, cache: Path, runs: Path) -> None:
    (csrc / "cpu" / "portable.cpp").write_text("int portable = no_such_thing;\n")
    loader = Loader(csrc)
    with pytest.warns(UserWarning, match="Reason: .*no_such_thing") as caught:
        assert loader.get("cpu") is None
    (warning,) = caught
    (record,) = cache.glob("*.log")
    assert all(word in str(warning.message) for word in ("CXX", "LT_ZERO_CACHE", "lt-zero ops build", str(record)))
    assert "-ffp-contract=off" in record.read_text()
    before = count(runs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.get("cpu") is None
    assert count(runs) == before
    status = loader.status("cpu")
    assert (status.available, status.path) == (False, None)
    assert "no_such_thing" in status.why


def test_a_warning_made_an_error_is_raised_once(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    loader = Loader(csrc)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="CXX='no-such-compiler'"):
            loader.get("cpu")
        assert loader.get("cpu") is None


def test_other_ranks_do_not_warn(csrc: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "lt_zero"):
        warnings.simplefilter("error")
        assert Loader(csrc).get("cpu") is None
    assert "no-such-compiler" in caplog.text


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("exit 0\n", "wrote no api.cpp.o: is it a compiler?"),
        ("exit 3\n", "ended with code 3"),
        ("echo 'tool: error: no space' >&2; [ $1 = --version ]\n", "ended with code 1: tool: error: no space"),
    ],
)
def test_no_compiler_at_all(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "tool", tool)))
    with pytest.warns(UserWarning, match=re.escape(reason)):
        assert Loader(csrc).get("cpu") is None


def test_a_program_for_another_machine(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tool").write_bytes(b"\x7fELF")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "tool"))
    with pytest.warns(UserWarning, match="ended with code 126: .*Exec format error"):
        assert Loader(csrc).get("cpu") is None


def test_a_compiler_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_compiler("cpu")
    monkeypatch.setenv("CXX", f"{real.command[0]} -march=x")
    assert find_compiler("cpu").command == (real.command[0], "-march=x")


def test_nvcc_of_a_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name.endswith(("nvcc", "cuda/bin/nvcc")) else found(name))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BuildError, match="none of nvcc, "):
        find_compiler("cuda")
    (tmp_path / "nvidia" / "cuda_nvcc" / "bin").mkdir(parents=True)  # of CUDA 12: no nvcc
    for name in ("cu9", "cu99"):
        (tmp_path / "nvidia" / name).mkdir()
        script(tmp_path / "nvidia" / name / "bin" / "nvcc", "echo fake")
    missing = ("nvcc", "/usr/local/cuda/bin/nvcc")
    monkeypatch.setattr(shutil, "which", lambda name: None if name in missing else found(name))
    root = tmp_path / "nvidia" / "cu99"
    assert find_compiler("cuda").command == (str(root / "bin" / "nvcc"), f"-L{root / 'lib'}")


def test_without_a_compiler_a_prebuilt_library_does(csrc: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.build(recipe_of("cpu", csrc), cache)
    monkeypatch.setenv("PATH", "/nowhere")
    loader = Loader(csrc)
    assert loader.get("cpu") is not None
    assert loader.status("cpu").path == built.path
    (csrc / "lt_zero.h").write_text("#define LT_ABI_VERSION 1 // another\n")
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+ is installed"):
        assert Loader(csrc).get("cpu") is None


def test_a_cache_that_cannot_be_written(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LT_ZERO_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loader = Loader(csrc)
    assert loader.get("cpu") is not None
    path = loader.status("cpu").path
    assert path is not None
    assert path.parent == tmp_path / f"lt_zero-{os.getuid()}"
    assert path.parent.stat().st_mode & 0o077 == 0
    assert "file/cache is not writable" in caplog.text
    path.parent.chmod(0o777)  # others could have put a library there
    other = Loader(csrc)
    assert other.get("cpu") is not None
    assert other.status("cpu").path.parent != path.parent


def _planted(csrc: Path, folder: Path, marker: Path) -> Path:
    """A library, under the name that the kernels have in ``folder``, that writes ``marker`` when it is loaded."""
    name = recipe_of("cpu", csrc).key(find_compiler("cpu"))
    (source := marker.with_suffix(".cpp")).write_text(
        (csrc / "cpu" / "api.cpp").read_text().replace("KIND", "cpu")
        + f'#include <cstdio>\n__attribute__((constructor)) static void run() {{ fclose(fopen("{marker}", "w")); }}\n'
    )
    made = marker.with_suffix(".so")
    subprocess.run([*find_compiler("cpu").command, "-shared", "-fPIC", f"-I{csrc}", source, "-o", made], check=True)
    content = made.read_bytes()
    planted = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    planted.write_bytes(content)
    return planted


@pytest.mark.parametrize(
    "whose", ["file of another", "folder of another", "open folder", "open file", "link", "linked"]
)
def test_a_library_of_another_user_is_not_loaded(
    csrc: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    whose: str,
) -> None:
    if "another" in whose and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache.mkdir()
    planted, real = _planted(csrc, cache, marker := tmp_path / "ran"), cache
    if whose.endswith("of another"):
        os.chown(planted if whose.startswith("file") else cache, 12345, 12345)
    elif whose.startswith("open"):
        (planted if whose == "open file" else cache).chmod(0o777)
    elif whose == "link":
        planted.symlink_to(planted.rename(tmp_path / "elsewhere.so"))
    else:
        real = cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(real)
    loader = Loader(csrc)
    assert loader.get("cpu") is not None
    assert loader.status("cpu").why.startswith("compiled")
    assert loader.get("cuda") is None
    assert not marker.exists()
    (path,) = {loader.status("cpu").path}
    assert path is not None
    if whose in ("file of another", "open file", "link"):  # the folder is trusted: what lay there is replaced
        assert path.parent == cache
        assert not planted.exists()
        assert not caplog.text
    else:
        assert path.parent == cache / f"lt_zero-{os.geteuid()}"
        (record,) = caplog.records
        assert re.search("belongs to another user|other users can write to|is a link", record.getMessage())
        assert all(text in record.getMessage() for text in (str(cache), str(path.parent), "set LT_ZERO_CACHE"))
        assert planted.name in os.listdir(real)
    with pytest.raises(BuildError, match="cannot be loaded: .*(another user|other users|link|No such file|symbolic)"):
        build.load(planted, "cpu")
    assert not marker.exists()


def test_a_private_folder_in_an_open_cache(
    csrc: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found again; a name that is taken, or that others could take while it is used, is not."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache.mkdir()
    cache.chmod(0o777)
    first, again = Loader(csrc).status("cpu"), Loader(csrc).status("cpu")
    assert first.path == again.path
    assert again.why == "from the cache"
    assert first.path is not None
    private = first.path.parent
    assert (private.parent, private.stat().st_mode & 0o777) == (cache, 0o700)
    with monkeypatch.context() as patched:
        patched.setattr("lt_zero.kernels.own_folder._OPENED", tmp_path / "nowhere")  # not Linux
        path = Loader(csrc).status("cpu").path
        assert path is not None
        assert path.parent == tmp_path / private.name
    private.chmod(0o777)
    path = Loader(csrc).status("cpu").path
    assert path is not None
    assert path.parent == tmp_path / private.name


def test_the_umask_of_earlier_versions(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LT_ZERO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (folder := tmp_path / "lt_zero").mkdir()
    folder.chmod(0o775)
    _planted(csrc, folder, marker := tmp_path / "ran").chmod(0o664)
    path = Loader(csrc).status("cpu").path
    assert path is not None
    assert path.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o755
    assert not marker.exists()
    assert not caplog.text


def test_what_is_planted_runs_where_it_is_trusted(csrc: Path, cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    _planted(csrc, cache, marker := tmp_path / "ran")
    assert Loader(csrc).get("cpu") is not None
    assert marker.exists()  # so the test above would notice


def test_the_command_refuses_a_folder_of_others(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    told = CliRunner().invoke(cli.app, ["ops", "build", "--cache", str(cache)])
    assert told.exit_code == 1
    assert f"other users can write to {cache} (mode 777; `chmod go-w` would end that)" in told.output.replace("\n", "")
    assert not list(cache.iterdir())


def test_another_umask(csrc: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        path = build.build(recipe_of("cpu", csrc), cache).path
        assert Loader(csrc).status("cpu").path == path
    finally:
        os.umask(before)


def test_a_cache_that_cannot_be_executed_from(csrc: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.warns(UserWarning, match="a cache' is mounted noexec"):
        assert Loader(csrc).get("cpu") is None
    assert count(runs) == 0


def test_default_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LT_ZERO_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.cache_dir() == tmp_path / ".cache" / "lt_zero"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library.cache_dir() == tmp_path / "xdg" / "lt_zero"
    monkeypatch.setenv("LT_ZERO_CACHE", "~/here")
    assert library.cache_dir() == tmp_path / "here"


def test_switched_off(csrc: Path, cache: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_NATIVE", "0")
    loader = Loader(csrc)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.get("cpu") is None
    assert loader.status("cpu").why == "LT_ZERO_NATIVE=0"
    assert count(runs) == 0
    assert not cache.exists()


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvcc 12.4, which knows no sm_100; returns its notes."""
    notes = tmp_path / "nvcc notes"
    real = find_compiler("cpu").command[0]
    text = f"""
case "$*" in *--version) echo fake; exit;; *--list-gpu-code) echo sm_75 sm_80 sm_86 sm_90; exit;; esac
echo "$@" >> "{notes}"
for last; do true; done
case "$*" in
  *" -c "*) while [ "$1" != -c ]; do shift; done; {real} -fPIC -I"$(dirname "$2")/.." -x c++ -c "$2" -o "$last";;
  *) {real} -shared "$1" -o "$last";;
esac
"""
    monkeypatch.setenv("CUDA_HOME", str(script(tmp_path / "bin" / "nvcc", text).parent.parent))
    return notes


def test_cuda(csrc: Path, nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    loader = Loader(csrc)
    assert loader.get("cuda") is None
    assert "torch" in loader.status("cuda").why
    lib = loader.get("cuda", force=True)
    assert lib is not None
    assert lib.lt_cuda_scratch(1, (ctypes.c_int64 * 1)(5)) == 64
    assert loader.status("cuda").isa == "cuda"
    assert re.findall(r"-gencode=\S+", nvcc.read_text().splitlines()[0]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",  # the driver makes of it what sm_100 needs
    ]
    # A machine with a device takes the library for all devices, if it is there, else one for its own device.
    monkeypatch.setattr("torch.version.cuda", "12.4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (8, 6))
    monkeypatch.setattr(library, "try_kernel", lambda loaded: None)
    prebuilt = Loader(csrc).status("cuda")
    assert prebuilt.path == loader.status("cuda").path
    assert prebuilt.path is not None
    prebuilt.path.unlink()
    own = Loader(csrc).status("cuda")
    assert own.path is not None
    assert own.path.name.startswith("cuda_sm_86-")
    assert "-gencode=arch=compute_86,code=sm_86" in nvcc.read_text().splitlines()[-1]


def test_cuda_kernels_that_are_shipped(csrc: Path, cache: Path, nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are used without nvcc, and before those of the cache; where they fail, this machine's nvcc makes others."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(library, "try_kernel", lambda loaded: None)
    cached_one = build.build(recipe_of("cuda", csrc), cache)
    shipped = build.build(recipe_of("cuda", csrc), csrc / build.SHIPPED)
    assert Loader(csrc).status("cuda").path == shipped.path
    with monkeypatch.context() as without:
        without.setenv("NVCC", "no-compiler")
        without.setattr(build, "find_compiler", lambda kind: (_ for _ in ()).throw(BuildError("no compiler")))
        found = Loader(csrc).status("cuda")
    assert (found.available, found.path, found.why) == (True, shipped.path, "shipped with the package")

    def fail_once(loaded: ctypes.CDLL) -> None:
        tried.append(loaded)
        if len(tried) == 1:
            raise BuildError("a kernel fails: the driver is older.")

    tried: list[ctypes.CDLL] = []
    monkeypatch.setattr(library, "try_kernel", fail_once)
    assert Loader(csrc).status("cuda").path == cached_one.path
    assert shipped.path.exists()
    # Those of other sources are not used.
    (csrc / "cuda" / "api.cu").write_text((csrc / "cuda" / "api.cu").read_text() + "\n// changed\n")
    changed = Loader(csrc).status("cuda").path
    assert changed is not None
    assert changed.parent == cache
    assert changed != cached_one.path


def test_an_unknown_device_gets_ptx(csrc: Path, nvcc: Path) -> None:
    assert recipe_of("cuda", csrc, ["sm_120"]).codes == ("compute_90",)


def test_a_device_older_than_the_kernels(csrc: Path, nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: [(8, 0), (7, 5)][index])
    loader = Loader(csrc)
    with pytest.warns(UserWarning, match=r"capability 7.5; the CUDA kernels need 8.0 or more.\n  Remedy: none .*A100"):
        assert loader.get("cuda") is None
    assert not nvcc.exists()  # nothing was compiled


def test_sources_for_this_machine(csrc: Path) -> None:
    names = [source.name for source in Recipe("cpu", csrc, None).sources()]
    assert names == ["api.cpp", "portable.cpp"]


def test_an_unreadable_cache_has_nothing(csrc: Path, tmp_path: Path) -> None:
    assert cached(recipe_of("cpu", csrc), tmp_path / "none") is None


def test_check(csrc: Path) -> None:
    lib = Loader(csrc).get("cpu")
    assert lib is not None
    library.check(lib, 0)
    with pytest.raises(RuntimeError, match=r"cpu kernel failed: bad argument \(code 1\)"):
        library.check(lib, 1)
    with pytest.raises(ValueError, match="kind is 'tpu'"):
        library.status("tpu")


def test_the_command_builds(csrc: Path, cache: Path, tmp_path: Path, nvcc: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(build, "CSRC", csrc)
    runner = CliRunner()
    result = runner.invoke(cli.app, ["ops", "build"])
    assert result.exit_code == 0, result.output
    (path,) = cache.glob("*.so")
    assert f"cpu: {path} (compiled in " in result.output
    assert f"cpu: {path} (cached)" in runner.invoke(cli.app, ["ops", "build"]).output
    elsewhere = tmp_path / "some where"
    result = runner.invoke(cli.app, ["ops", "build", "--cuda", "--force", "--cache", str(elsewhere)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name.split("-")[0] for path in elsewhere.glob("*.so")) == ["cpu", "cuda_all"]
    assert f"LT_ZERO_CACHE={elsewhere}" in result.output


def test_the_command_fails(csrc: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CSRC", csrc)
    (csrc / "cpu" / "portable.cpp").write_text("int portable = no_such_thing;\n")
    result = CliRunner().invoke(cli.app, ["ops", "build"])
    assert result.exit_code == 1
    assert "no_such_thing" in result.output
    assert str(next(cache.glob("*.log"))) in result.output
    (tmp_path / "file").touch()
    result = CliRunner().invoke(cli.app, ["ops", "build", "--cache", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "cannot be used" in result.output


def test_the_command_reports(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(library, "_loader", Loader(csrc))
    result = CliRunner().invoke(cli.app, ["ops", "report"])
    assert result.exit_code == 0, result.output
    path = library.status("cpu").path
    assert all(word in result.output for word in ("adam_step", "native portable", "torch reference", str(path)))
    monkeypatch.setattr(library, "_loader", Loader(csrc))
    monkeypatch.setenv("LT_ZERO_NATIVE", "0")
    result = CliRunner().invoke(cli.app, ["ops", "report"])
    assert "LT_ZERO_NATIVE=0" in result.output
    assert "native portable" not in result.output


def test_the_command_imports_little() -> None:
    code = (
        "import sys, types; package = types.ModuleType('lt_zero'); sys.modules['lt_zero'] = package\n"
        f"package.__path__ = [{str(build.CSRC.parent)!r}]\n"
        "import lt_zero.cli; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


class _OldDriver:
    """A CUDA library that loads, but whose kernels fail; some functions of torch.cuda as they are with a GPU."""

    def __init__(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None: zeros(*size))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        gpu = {"is_available": True, "current_device": 0, "synchronize": None, "current_stream": SimpleNamespace()}
        gpu["current_stream"].cuda_stream = 0
        for name, result in gpu.items():
            monkeypatch.setattr(torch.cuda, name, lambda result=result: result)
        monkeypatch.setattr(library, "declare", lambda loaded, kind: loaded)
        self.lt_cuda_cast_scale = lambda pairs, stream: code
        self.lt_cuda_error = lambda code: b"CUDA driver version is insufficient for CUDA runtime version"


@pytest.mark.parametrize("code", [0, 35])
def test_kernels_that_load_and_fail_are_not_used(
    code: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    loaded = _OldDriver(code, monkeypatch)
    loader = Loader()
    monkeypatch.setattr(loader, "_recipes", lambda kind: [])
    monkeypatch.setattr(loader, "_of_machine", lambda kind, recipes: (build.Built(Path("library")), loaded))
    assert (loader.get("cuda") is loaded) == (code == 0)
    if code:
        assert "a kernel fails on" in loader.status("cuda").why
        assert "CUDA driver version is insufficient" in str(recwarn[0].message)


def test_references_on_a_gpu_take_few_launches() -> None:
    sizes = {device: [len(list(chunks([torch.empty(1 << 25, device=device)])))] for device in ("cpu", "meta")}
    assert sizes == {"cpu": [256], "meta": [2]}
