"""What README.md and the pages of docs/ show works: code runs, configurations are valid, commands and links exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import typer
import yaml
from hydra import compose, initialize_config_dir
from torch.distributed.run import get_args_parser as torchrun_options
from typer.testing import CliRunner

import lt_zero
import lt_zero.conf
from lt_zero.cli import app
from lt_zero.config import ZeroConfig
from lt_zero.core.feature import Feature
from tests.support import published
from tests.support.docs_tools import (
    BLOCKS,
    PAGES,
    ROOT,
    Block,
    SmallTrainer,
    execute,
    execute_in,
    features_in,
    run_text,
)
from tests.support.features import missing_features, needs, needs_all, skip_without, there
from tests.support.paths import PACKAGE
from tests.support.pool import Pool

LANGUAGES = {"python", "bash", "yaml", "json", "text", "console"}
FILES = {"ds_config.json": '{"zero_optimization": {"stage": 2}}', "zero3.yaml": "zero_optimization: {stage: 3}\n"}
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}


def of(*languages: str, mark: str | None = None) -> Any:
    """The blocks of these languages, as parameters: all, or those with a mark."""
    found = [b for b in BLOCKS if b.language in languages and (mark is None or mark in b.marks)]
    assert found
    return pytest.mark.parametrize("block", found, ids=str)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


# ---- Python ----------------------------------------------------------------------------------------------------


@of("python")
def test_python_runs(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: Pool) -> None:
    skip_without(*features_in(block))
    ranks = block.marks.get("ranks", "1")
    if "run by" in block.marks:
        (test,) = ROOT.glob(f"tests/**/{block.marks['run by']}.py")
        assert Path(block.page).name in test.read_text()
    elif "not run" in block.marks or "script" in block.marks:
        compile(block.text, str(block), "exec")
    elif ranks == "2":
        pool.run(2, execute_in, tmp_path, block)
    else:
        assert ranks in ("1", "script")
        monkeypatch.setattr(L, "Trainer", SmallTrainer)
        execute(block)


SCRIPTS = [b for b in BLOCKS if b.marks.get("ranks") == "script" or "script" in b.marks]


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_scripts_run_as_they_stand(block: Block, tmp_path: Path) -> None:
    skip_without(*features_in(block))
    ranks = block.marks.get("script", "2")
    (tmp_path / "train.py").write_text(block.text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "train.py"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"MEMBER: {ranks}/{ranks}" in done.stderr
    assert "export(" not in block.text or any(tmp_path.glob("model*"))


def test_few_blocks_are_left_out() -> None:
    assert [str(block) for block in BLOCKS if "not run" in block.marks] == []
    assert {block.language for block in BLOCKS} <= LANGUAGES, "a block without a language is not tested"


@of("text", mark="printed by")
def test_printed_text(block: Block) -> None:
    skip_without(*features_in(block))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_text(block.marks["printed by"], str(block), {"lt_zero": lt_zero})
    assert block.text.split() == out.getvalue().split()


# ---- configurations --------------------------------------------------------------------------------------------


@of("yaml", "json")
def test_configurations_are_valid(block: Block) -> None:
    content = json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)
    skip_without(content)
    if "trainer" in content:  # of LightningCLI
        lt_zero.ZeroStrategy(**content["trainer"]["strategy"]["init_args"])
    elif "defaults" in content:  # of Hydra
        assert content["hydra"]["searchpath"] == ["pkg://lt_zero.conf"]
        groups = [entry for entry in content["defaults"] if isinstance(entry, dict)]
        assert groups
        for ((group, option),) in (entry.items() for entry in groups):
            assert (Path(lt_zero.conf.__file__).parent / group / f"{option}.yaml").exists(), f"{group}={option}"
    else:
        ZeroConfig.of(content)


INLINE = re.compile(r"`([a-z_0-9.]+: [^`]+)`")
WORKING = re.findall(r"^\| `([a-z0-9_.]+)` \|", TEXTS[ROOT / "docs/config.md"].split('## "auto"')[0], re.MULTILINE)
NOT_ALONE = {  # values of several keys, or within free ones
    "device: nvme",
    "grad_allreduce: true",
    "offload_param: true",
    "overlap_step: true",
    "adam_w_mode: false",
    "params: {monitor: val_loss}",
    "lt_zero.gather: transformer.h.3",
}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "config.md"], ids=lambda page: page.name)
def test_settings_in_sentences_are_valid(page: Path) -> None:
    for text in INLINE.findall(TEXTS[page]):
        if "..." in text or text in NOT_ALONE:
            continue
        ((key, value),) = yaml.safe_load(text).items()
        first = f"{key}.{next(iter(value))}" if isinstance(value, dict) else key
        (whole, *_) = [name for name in WORKING if f".{name}".endswith(f".{first}")] or [None]
        assert whole is not None, f"{page.name}: {text}"
        for name in reversed(whole.removesuffix(first).split(".")[:-1] + key.split(".")):
            value = {name: value}
        if missing_features(value):
            continue
        ZeroConfig.of(value, default_stage=3)


BLOCK_NAMES = [name for name in ZeroConfig.model_fields if name not in ("optimizer", "scheduler")]
KEYS = re.compile(rf"`((?:{'|'.join(BLOCK_NAMES)})(?:\.[a-z0-9_]+)+)`")


def test_keys_that_are_named_exist() -> None:
    all_keys = TEXTS[ROOT / "docs/config.md"]
    named = {(page.name, key) for page, text in TEXTS.items() if page.name != "config.md" for key in KEYS.findall(text)}
    assert len(named) > 25
    assert {(page, key) for page, key in named if f"`{key}`" not in all_keys and f"`{key}." not in all_keys} == set()


def test_variables_of_the_environment_are_listed() -> None:
    pattern = re.compile(r"LT_ZERO_[A-Z_]+")
    sources = [path for folder in (PACKAGE, ROOT / "conf") for path in folder.rglob("*") if path.is_file()]
    texts = [path.read_text() for path in sources if path.suffix in (".py", ".yaml")]
    used = {name for text in texts for name in pattern.findall(text)} - {
        "LT_ZERO_JOB_RESULT",
        "LT_ZERO_TRIAL",
    }  # between processes
    table = TEXTS[ROOT / "docs/configuration.md"].split("## Environment variables")[1]
    assert set(pattern.findall(table)) == used


# ---- messages --------------------------------------------------------------------------------------------------

FOREIGN = {
    "expected scalar type Float but found Half",
    "The Batch size finder is not supported with distributed strategies",
    "IsADirectoryError: [Errno 21] Is a directory",
    "You selected an invalid strategy name: ...",
}
OF_FEATURES = {"... has no repeated blocks to checkpoint": "activation_checkpointing"}


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_that_are_quoted_exist() -> None:
    said = "\0".join(text for path in PACKAGE.rglob("*.py") for text in literals(path))
    symptoms = re.findall(r"^### (.+)$", TEXTS[ROOT / "docs/troubleshooting.md"], re.MULTILINE)
    quoted = {quote for symptom in symptoms for quote in re.findall(r"`([^`]+)`", symptom)} - FOREIGN
    quoted -= {quote for quote, feature in OF_FEATURES.items() if not there(feature)}
    messages = [quote.split("...") for quote in quoted if quote.count(" ") > 2]
    assert len(messages) > 12
    assert [parts for parts in messages if not all(part.strip() in said for part in parts)] == []


# ---- commands --------------------------------------------------------------------------------------------------


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        yield words[: words.index(">")] if ">" in words else words


def parse(typer_app: typer.Typer, arguments: list[str], patch: pytest.MonkeyPatch, whole: bool = True) -> None:
    """Fails if a command or an option does not exist, or (``whole``) an argument is missing; runs nothing.

    A tool that was taken out has no options.
    """
    if arguments[:1] == ["compare"] and not there("compare"):
        return
    command: Any = typer.main.get_command(typer_app)
    while hasattr(command, "commands"):
        if not arguments and not whole:
            return
        if arguments[0].startswith("-"):  # an option of all commands, and its value
            assert any(arguments[0] in option.opts for option in command.params), arguments
            arguments = arguments[2:]
        assert arguments[0] in command.commands, arguments
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        context = command.make_context("lt-zero", list(arguments))
    except Exception as error:  # of typer's own copy of click
        if whole or type(error).__name__ != "MissingParameter":
            raise
        return
    if context.allow_extra_args:  # a command that is imported when it is called
        inner: list[tuple[typer.Typer, list[str]]] = []
        with patch.context() as patched:
            patched.setattr(typer.Typer, "__call__", lambda self, args, **_: inner.append((self, args)))
            command.invoke(context)
        ((found, rest),) = inner
        parse(found, rest, patch, whole)


@of("bash", "console")
def test_commands_exist(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in commands(block):
        if not words:
            continue
        if words[0] == "lt-zero":
            parse(app, words[1:], monkeypatch)
        elif words[0] == "make":
            assert_target(words[1])
        elif words[0] == "torchrun":
            torchrun_options().parse_args(words[1:])
        elif words[:2] == ["python", "examples/train_gpt.py"]:
            assert_composes(words[2:])
        else:
            assert words[:2] == ["pip", "install"], f"nothing checks {' '.join(words)!r}"


def assert_target(name: str) -> None:
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {name}"


def assert_composes(arguments: list[str]) -> None:
    sweep = "-m" in arguments
    overrides = [word for word in arguments if word not in ("-m", "--cfg", "job")]
    choices = [word.split("=")[1].split(",") for word in overrides] if sweep else [[]]
    with initialize_config_dir(str(ROOT / "examples/conf"), version_base="1.3"):
        for choice in choices[0] or [None]:
            given = overrides if choice is None else [f"{overrides[0].split('=')[0]}={choice}"]
            assert compose("train_gpt", given)["zero_optimization"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in re.findall(r"`(lt-zero [^`|]+)`", TEXTS[page]):
        parse(app, shlex.split(line)[1:], monkeypatch, whole=False)
    for name in re.findall(r"`make ([a-z-]+)`", TEXTS[page]):
        assert_target(name)
    for script in re.findall(r"`(?:python )?((?:benchmarks|examples)/[^` ]+)", TEXTS[page]):
        assert (ROOT / script).exists(), script


@of("text", mark="output of")
def test_output_of_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [b for b in BLOCKS if b.page == block.page and b.language == "json" and b.line < block.line]
    if before:
        Path("ds_config.json").write_text(before[-1].text)
    monkeypatch.setenv("COLUMNS", "200")
    # The table of states in fewer bits has rows and a column of these features, and leaves them out without one.
    if "bits, adapters" in block.text:
        skip_without("low_bit_states", "offload", "quantize")
    done = CliRunner().invoke(app, shlex.split(block.marks["output of"])[1:])
    assert done.exit_code == 0, done.output
    assert block.text.strip() in "\n".join(line.rstrip() for line in done.output.splitlines())


# ---- the site --------------------------------------------------------------------------------------------------


def anchor(title: str) -> str:
    """As Python-Markdown and GitHub make it, for titles without other punctuation than `.,:`."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    for target, _, fragment in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", prose)):
        if target.startswith("http"):
            continue
        file = page if not target else (page.parent / target).resolve()
        assert file.exists(), f"{page.name}: {target}"
        if page.parent.name != ROOT.name and page.is_relative_to(ROOT / "docs"):
            assert file.is_relative_to(ROOT / "docs"), f"{page.name}: {target} is not part of the site"
        if fragment and not fragment.startswith("lt_zero"):  # those of the API reference are made from the code
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert fragment in map(anchor, titles), f"{page.name}: {target}#{fragment}"


# A path with a folder, or in texts about the code any name of a source file; and a dotted name.
_IN_FOLDER = r"(?<![\w/.:~<>$}*{-])((?:[\w-]+/)+[\w-]+\.(?:py|tsv|cpp|cuh?|h))(?![\w/*])"
_SOURCE = r"(?<![\w/.:~<>$}*{-])([\w-]+\.(?:py|tsv|cpp|cuh?))(?![\w/*])"
_DOTTED = r"(?<![\w./-])(lt_zero(?:\.\w+)+)"
ELSEWHERE = {  # what other projects, users and runs have
    *("train.py", "sft.py", "ds_to_universal.py", "cifar/cifar10_deepspeed.py", "HelloDeepSpeed/train_bert_ds.py"),
    *("tensor_parallel/basic_example/autotp_example.py", "pipeline_parallelism/train.py"),
    *("gan/gan_deepspeed_train.py", "DeepSpeed-SuperOffload/finetune_zero3.py", "trl/scripts/sft.py"),
    *("runtime/fp16/onebit/zoadam.py", "csrc/lamb/fused_lamb_cuda_kernel.cu", "linux/capability.h"),
    *("lt_zero.jsonl", "lt_zero.gather", "lt_zero.module", "lt_zero.h"),
    # keys of a manifest, and an operation of torch
    *("lt_zero.extra_state", "lt_zero.frozen_left_out", "lt_zero.optimizers", "lt_zero.tensor"),
}


def is_there(name: str) -> bool:
    """True if a dotted name is that of a module or folder of the package, or is written in the module before it."""
    words = name.split(".")[1:]
    for end in range(len(words), -1, -1):
        place = PACKAGE.joinpath(*words[:end])
        files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
        if end == len(words) and (files or place.is_dir()):
            return True
        if files:
            # The package itself names folders in its texts.
            if words[:end] and re.search(rf"\b{words[end]}\b", files[0].read_text(encoding="utf-8")):
                return True
            return hasattr(importlib.import_module(".".join(["lt_zero", *words[:end]])), words[end])
    return False


def missing_names(path: Path, sources: set[str]) -> list[str]:
    """The paths and dotted names in a text that lead nowhere; ``sources``: names of all files of sources."""
    about_code = path.suffix == ".py" or path.parent.name == "internals" or path.name == "CONTRIBUTING.md"
    bases = (ROOT, PACKAGE, PACKAGE / "core", ROOT / "tests", path.parent)
    text = path.read_text(encoding="utf-8")
    found = [name for name in re.findall(_IN_FOLDER, text) if not any((base / name).exists() for base in bases)]
    found += [name for name in re.findall(_DOTTED, text) if name not in ELSEWHERE and not is_there(name)]
    if about_code:
        found += [name for name in re.findall(_SOURCE, text) if name not in sources]
    return [name for name in found if name not in ELSEWHERE]


@needs_all()
def test_files_and_names_that_are_told_exist(tmp_path: Path) -> None:
    places = (PACKAGE, *(ROOT / folder for folder in ("tests", "benchmarks", "examples", "docs")))
    sources = {path.name for place in places for path in place.rglob("*.*")}
    texts = [*PAGES, *sorted(PACKAGE.rglob("*.py"))]
    wrong = {str(path): names for path in texts if (names := missing_names(path, sources))}
    assert not wrong
    stale = tmp_path / "stale.py"
    stale.write_text(
        '"""See engines/bucket.py, core/engine/bucket.py, moved.py and bucket.py."""\n'
        "step = 1  # lt_zero.engine.bucket, lt_zero.core.engine.bucket.Bucke\n"
        "# lt_zero.core.engine.bucket, lt_zero.core.engine.bucket.Bucket, lt_zero.ops.Codec\n"
    )
    names = ["engines/bucket.py", "lt_zero.engine.bucket", "lt_zero.core.engine.bucket.Bucke", "moved.py"]
    assert missing_names(stale, sources) == names


def test_the_architecture_names_every_package() -> None:
    table = TEXTS[ROOT / "docs/internals/index.md"].split("## Floors")[1].split("## ")[0]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"conf"}
    for folder in ("core", "features", "tools", "training"):
        packages |= {f"{folder}/{path.parent.name}" for path in PACKAGE.glob(f"{folder}/*/__init__.py")}
    named = set(re.findall(r"`([\w/]+)/`", table)) - {"csrc"}
    gone = {f"{folder}/{name}" for folder, name in (each.split("/") for each in named if "/" in each)}
    gone = {each for each in gone if each.startswith(("features/", "tools/")) and not there(each.split("/")[1])}
    assert named - gone == packages


def test_the_picture_of_the_architecture_has_folders_that_there_are() -> None:
    named = re.findall(r"[\w/]+/(?=[\s<:;,])", (ROOT / "docs/internals/architecture.svg").read_text(encoding="utf-8"))
    assert len(named) > 15
    assert not [
        name for name in named if not (PACKAGE / name).is_dir() and not name.startswith(("features/", "tools/"))
    ]


def test_the_page_of_features_has_every_hook() -> None:
    hooks = TEXTS[ROOT / "docs/internals/features.md"].split("## The hooks\n")[1].split("\n## ")[0]
    found = re.findall(r"^### `(\w+)`$", hooks, re.MULTILINE)
    assert sorted(found) == sorted(name for name in vars(Feature) if not name.startswith("_"))


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/-]+\.md", text.split("nav:")[1])
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents
    )


@needs("ema", "sparse_attention", "tiles")
def test_the_api_reference_has_all_public_names() -> None:
    shown = {}
    for path in re.findall(r"^::: (\S+)$", TEXTS[ROOT / "docs/api.md"], re.MULTILINE):
        parts = path.split(".")
        module = importlib.import_module(".".join(parts[:-1]))
        shown[parts[-1]] = getattr(module, parts[-1])
    public = {name: getattr(module, name) for module in (lt_zero, lt_zero.attention) for name in module.__all__}
    assert shown == public


def test_the_readme_is_short() -> None:
    lines = TEXTS[ROOT / "README.md"].splitlines()
    assert len(lines) <= 120
    first_screen = lines[: lines.index("## A complete script")]
    assert len(first_screen) <= 50


def test_links_of_a_published_readme_are_absolute(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    with pytest.raises(ValueError, match="PROJECT_URL"):
        published.main(tmp_path, "github.com/some/project")
    published.main(tmp_path, "https://example.org/some/project/")
    links = re.findall(r"\]\((.+?)\)", (tmp_path / "README.md").read_text())
    assert "https://example.org/some/project/blob/main/docs/exactness.md" in links
    assert all(link.startswith("https://") for link in links)
    tomllib = pytest.importorskip("tomllib", reason="since Python 3.11")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == "https://example.org/some/project"
