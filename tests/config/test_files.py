"""Configuration files: values, places of keys, and errors that name file, line and remedy; resolved interpolations."""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lt_zero.common.errors import ConfigError, Mark, dotted
from lt_zero.config import ZeroConfig
from lt_zero.config.document import Document
from lt_zero.config.files import parse_json, parse_yaml
from lt_zero.config.interpolations import resolve
from lt_zero.config.read import read
from tests.support.paths import DATA, PACKAGE, ROOT

CONFIGS = DATA / "ds_configs"
TYPICAL = """{
  "train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": "auto", "loss_scale": 0},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "reduce_bucket_size": 5e8
  },
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999]}}
}
"""


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(read(source))
    return str(caught.value)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def check_marks(source: Document, text: str) -> None:
    """Every key and item has a mark, and the text there is the key, or the start of the item."""
    lines = text.splitlines()

    def walk(value: Any, path: tuple[str | int, ...]) -> None:
        if path:
            mark = source.marks[path]
            assert mark.line is not None
            assert mark.column is not None
            there = lines[mark.line - 1][mark.column - 1 :]
            if isinstance(path[-1], str):
                assert there.startswith((path[-1], json.dumps(path[-1]), f"'{path[-1]}'")), (path, there)
            elif isinstance(value, (dict, list)):
                assert there[0] in "{[-" or there.startswith(tuple(value)), (path, there)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            walk(item, (*path, key))

    walk(source.values, ())


def test_json_values_and_places(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", TYPICAL)
    found = read(path)
    assert found.values == json.loads(TYPICAL)
    assert found.notices == []
    assert found.marks["zero_optimization", "stage"] == Mark(str(path), 4, 5)
    assert found.marks["optimizer", "params", "betas", 1] == Mark(str(path), 8, 72)
    check_marks(found, TYPICAL)
    assert found.mark(("optimizer", "params", "unknown")) == found.marks["optimizer", "params"]


def test_json_that_yaml_would_read_otherwise() -> None:
    text = '{"a"\n:\n"\\ud83d\\ude00\\/", "b": 9007199254740993, "c": "http://x/#y", "k": "\u2028\x7f", "d": 0.1}'
    found = read(text)
    assert found.values == json.loads(text)
    assert found.marks["b",].line == 3


def test_comments_and_trailing_commas_are_one_notice(tmp_path: Path) -> None:
    text = '# first\n{"a": 1, // second\n /* of\n two lines */ "b": [1, 2,],\n "url": "http://x//y /* # */",\n}\n'
    found = read(written(tmp_path, "a.json", text))
    assert found.values == {"a": 1, "b": [1, 2], "url": "http://x//y /* # */"}
    assert found.marks["b",][1:] == (4, 15)
    (notice,) = found.notices
    assert "a.json, line 1, column 1: a comment is not JSON (and 4 more places)" in str(notice)
    check_marks(found, text)


def test_the_line_is_shown_without_secrets(tmp_path: Path) -> None:
    said = refused(written(tmp_path, "a.json", '{"b": {},\n "c": x,\n "d": 1\n}'))
    assert '"c": x,' in said
    said = refused(written(tmp_path, "a.json", '{"b": {},\n "api_key": hush,\n "d": 1\n}'))
    assert "line 2, column 13" in said
    assert "hush" not in said


def test_yaml_values_are_those_of_omegaconf(tmp_path: Path) -> None:
    text = (
        "a: 1e-5\nb: 5e8\nc: yes\nd: {e: [on, ~, 2020-01-01], 'f': 0x10}\nbase: &b {x: 1, y: 2}\nm:\n  <<: *b\n  y: 3\n"
    )
    found = read(written(tmp_path, "a.yaml", text))
    assert found.values == OmegaConf.to_container(OmegaConf.create(text))
    assert found.values["m"] == {"x": 1, "y": 3}
    assert found.marks["m", "x"][1:] == (5, 11)  # where it is written
    assert found.marks["d", "e", 2][1:] == (4, 16)
    check_marks(found, text)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text("0123456789+-.eE_:xob~aAfnNyYoOrRuUsSlLtT", max_size=8))
def test_yaml_scalars_are_those_of_omegaconf(text: str) -> None:
    try:
        want = OmegaConf.to_container(OmegaConf.create(f"a: {text}"))
    except Exception:
        return
    if isinstance(want, dict) and isinstance(want["a"], (str, int, float, bool, type(None))):
        got = parse_yaml(f"a: {text}", "t").values
        assert repr(got) == repr(want)  # nan too


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\n---\nb: 1", "line 2, column 1: not YAML: but found another document; a second document starts here"),
        ("a:\n\tb: 1", "YAML indents with spaces"),
        ("a: b: c", "line 1, column 5: not YAML"),
        ("a: *b", "undefined alias"),
        ("a: " + "1:" * 3000 + "1", "cannot be read as int"),
        ("a: \x07", "line 1, column 4: not YAML: special characters are not allowed"),
    ],
)
def test_yaml_that_cannot_be_parsed(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(written(tmp_path, "a.yaml", text))


def test_aliases_do_not_expand_without_end() -> None:
    lists = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 11)]
    with pytest.raises(ConfigError, match="more than 10,000 values"):
        parse_yaml("\n".join(["a0: &a0 [x]", *lists]), "bomb")
    merges = [f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}" for i in range(1, 41)]
    found = parse_yaml("\n".join(["m0: &m0 {x: 1}", *merges]), "merges")
    assert found.values["m40"] == {"x": 1}


def test_shared_mappings_do_not_expand_without_end() -> None:
    shared: Any = {"x": 1}
    for _ in range(20):
        shared = {"a": shared, "b": [shared]}
    too_many = r"more than 10,000 values \(shared mappings counted as often as used\)"
    with pytest.raises(ConfigError, match=too_many):
        read(shared)
    with pytest.raises(ConfigError, match=too_many):
        ZeroConfig.of(activations={"modules": shared})


def test_what_a_file_may_be(tmp_path: Path) -> None:
    text = '{"é": 1}'
    for name, content in {
        "bom.json": b"\xef\xbb\xbf" + text.encode(),
        "u16.json": text.encode("utf-16"),
        "crlf.json": text.replace(" ", "\r\n").encode(),
        "noname": b"# c\n" + text.encode(),
        "noname_yaml": "é: 1".encode(),
        "a.YML": "é: 1".encode(),
        "a.jsonc": f"// c\n{text}".encode(),
    }.items():
        assert read(str(written(tmp_path, name, content))).values == {"é": 1}, name
    assert read(None).values == {}
    assert read(' {"a": [1]}').values == {"a": [1]}


def test_what_a_file_may_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "ds_config.json", "{}")
    os.mkfifo(tmp_path / "pipe.json")
    for name, content, says in (
        ("latin.json", b'{\n"a": "\xe9"}', "latin.json, line 2: it is not text in UTF-8"),
        ("empty.json", b" \n", "empty.json is empty"),
        ("comment.json", b"// x", "comment.json is empty"),
        ("zeros.json", b'{"a": "\0"}', "zero bytes"),
        ("a.json", b"a: 1", "name it a.yaml"),
        ("list.json", b"[{}]", "line 1, column 1: the top level is a list"),
    ):
        assert says in refused(written(tmp_path, name, content))
    assert "did you mean ds_config.json?" in refused("ds_confg.json")
    assert "there is no folder none either" in refused("none/a.json")
    assert "is a folder" in refused(tmp_path)
    assert "no regular file" in refused("pipe.json")
    assert "base64 text, which cannot be reviewed" in refused(base64.b64encode(TYPICAL.encode()).decode())
    assert "base64" in refused(base64.urlsafe_b64encode(b'{"stage": 3}').decode())
    for path, says in (
        ("", "empty"),
        ("a\0", "several lines"),
        ("s3://a/b.json", "local files"),
        ("~no-one/a", "user"),
    ):
        assert says in refused(path)
    assert "cannot be read: File name too long" in refused("y" * 5000)
    assert "(int)" in refused(3)


def test_accelerates_file_is_refused_with_its_translation() -> None:
    block = {
        "zero_stage": 3,
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/nvme",
        "gradient_clipping": 1.0,
    }
    said = refused(
        {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 4, "deepspeed_config": block}
    )
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}
    assert json.dumps({"zero_optimization": zero, "gradient_clipping": 1.0}) in said
    assert 'Trainer(devices=4, precision="bf16-mixed")' in said
    assert "ds.json" in refused({"deepspeed_config": {"deepspeed_config_file": "ds.json"}})
    assert read({"deepspeed_config": {"train_batch_size": 1}}).values  # an unknown key, which the schema names


def test_mappings_are_copied() -> None:
    path, inner = Path("/x"), {"b": (1, [2])}
    given = MappingProxyType(
        {"a": MappingProxyType(inner), "p": path, "t": torch.float16, "c": OmegaConf.create({"d": 1})}
    )
    found = read(given)
    assert found.values == {"a": {"b": [1, [2]]}, "p": path, "t": torch.float16, "c": {"d": 1}}
    assert type(found.values["c"]) is dict
    found.values["a"]["b"][1].append(3)
    assert inner == {"b": (1, [2])}
    circle: dict[str, Any] = {"a": {}}
    circle["a"]["b"] = circle
    assert "a.b.a: mappings and lists are nested more than 50 deep" in refused(circle)
    assert "the key 1 is not text" in refused({1: 2})
    assert "the key None of a" in refused({"a": {None: 1}})


def test_part_of_a_larger_omegaconf_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_KEY", "k")
    whole = OmegaConf.create({"clip": 2.0, "zero": {"gradient_clipping": "${clip}", "x": "${oc.env:LT_KEY}"}})
    found = resolve(read(whole.zero))
    assert found.values == {"gradient_clipping": 2.0, "x": "k"}
    assert found.secret == {("x",)}
    assert read(whole).values["zero"]["gradient_clipping"] == "${clip}"  # overrides may still change clip
    assert "zero.a" in refused(OmegaConf.create({"zero": {"a": "${nothing}"}}).zero)


def test_interpolations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_LR", "1e-4")
    found = resolve(
        read(
            {
                "lr": "${oc.decode:${oc.env:LT_LR}}",
                "again": ["${lr}", "x${oc.env:LT_LR}"],
                "default": "${oc.env:LT_NOT_SET,3}",
                "block": "${plain}",
                "plain": {"t": torch.float16, "p": Path("/x"), "n": "${.t}"},
                "wandb": {"api_key": "hush", "max_tokens": 5, "password": 1234},
            }
        )
    )
    plain = {"t": torch.float16, "p": Path("/x"), "n": torch.float16}
    assert found.values["lr"] == 1e-4
    assert found.values["again"] == [1e-4, "x1e-4"]
    assert found.values["block"] == found.values["plain"] == plain
    secret = {("lr",), ("again", 0), ("again", 1), ("default",), ("wandb", "api_key"), ("wandb", "password")}
    assert found.secret == secret
    assert found.hides(("lr", "below"))
    assert not found.hides(("wandb", "max_tokens"))


def test_interpolations_that_fail_are_told_together(tmp_path: Path) -> None:
    names = {
        "a": ("${oc.env:LT_NOT_SET}", "the environment variable LT_NOT_SET is not set"),
        "b": ("${no.such}", "there is no key no.such"),
        "c": ("${d}", "it leads back to itself"),
        "d": ("${c}", "it leads back to itself"),
        "e": ("${mul:1}", "there is no resolver mul"),
    }
    path = written(tmp_path, "a.json", json.dumps({key: text for key, (text, _) in names.items()}, indent=1))
    with pytest.raises(ConfigError) as caught:
        resolve(read(path))
    assert [(problem.key, problem.mark and problem.mark.line) for problem in caught.value.problems] == [
        (key, line) for line, key in enumerate(names, 2)
    ]
    for problem in caught.value.problems:
        assert names[problem.key][1] in problem.message
    assert "is no interpolation" in refused({"a": "${", "b": "${x"})
    assert "a.b: ${a} cannot be resolved" in refused({"a": {"b": "${a}"}})
    assert "a is ???" in refused({"a": "???", "b": "${a}"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_any_json_is_read_exactly_with_all_its_places(
    values: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
    found = parse_json(text, "t")
    assert repr(found.values) == repr(values)
    for path, mark in found.marks.items():
        start = sum(len(line) + 1 for line in text.split("\n")[: (mark.line or 0) - 1]) + (mark.column or 0) - 1
        key = path[-1]
        assert not isinstance(key, str) or text.startswith(json.dumps(key, ensure_ascii=ascii_only), start), dotted(
            path
        )


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.text(max_size=20)
    | st.lists(st.sampled_from(list("{}[]\"':,/*#\\ \n\t&!<-?|>%@`0e.") + ["/*", "//", "<<", "a"]), max_size=30).map(
        "".join
    ),
    st.integers(0, len(TYPICAL)),
    st.integers(0, 30),
    st.booleans(),
)
def test_no_text_raises_anything_else(inserted: str, at: int, removed: int, whole: bool) -> None:
    text = inserted if whole else TYPICAL[:at] + inserted + TYPICAL[at + removed :]
    for parse in (parse_json, parse_yaml):
        with contextlib.suppress(ConfigError):
            assert isinstance(parse(text, "t").values, dict)


def test_files_from_the_wild() -> None:
    with (CONFIGS / "INDEX.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    failed, noticed = {}, []
    for row in rows:
        path = CONFIGS / row["file name"]
        try:
            found = read(path)
        except ConfigError as error:
            failed[path.name] = str(error)
            continue
        noticed += [path.name] * len(found.notices)
        check_marks(found, path.read_text(encoding="utf-8-sig"))
        if not found.notices:
            assert found.values == json.loads(path.read_text(encoding="utf-8-sig"))
    assert len(rows) == 58
    assert noticed == ["TUM-DI-Lab-Graph-Scaling__ocp__ds_config.json"]  # a trailing comma
    says = {
        "CZtheHusky__rt_torch__ds_config.json": "line 15, column 20: not JSON: True is Python's",
        "KtechB__LMtest__ds_config.json": "line 25, column 1: not JSON: the configuration ended before this",
        "OptimalScale__LMFlow__accelerate_dsz3_config.yaml": '"stage": 3',
        "microsoft__DeepSpeedExamples__ds_zero_stage_2_config_curriculum_fixed_linear.json": "CONFIG_CL_MIN",
    }
    assert failed.keys() == says.keys()
    for name, part in says.items():
        assert part in failed[name]


def test_reading_is_quick_and_loads_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", "[{}]".format(",\n".join([TYPICAL] * 10)).replace("[", '{"a": [', 1) + "}")
    assert path.stat().st_size > 3000
    times = []
    for _ in range(5):
        start = time.thread_time()  # a busy machine does not count
        resolve(read(path))
        times.append(time.thread_time() - start)
    assert min(times) < 0.015  # measured: 2 ms
    stub = """
import sys, types
for name, folder in (("lt_zero", "PACKAGE"), ("lt_zero.config", "PACKAGE/config")):  # without what they import
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from lt_zero.config.interpolations import resolve
from lt_zero.config.overrides import apply
from lt_zero.config.read import read
resolve(apply(read("{}"), []))
print([name for name in ("torch", "yaml", "omegaconf", "hydra", "pydantic") if name in sys.modules])
""".replace("PACKAGE", str(PACKAGE))
    run = subprocess.run([sys.executable, "-c", stub], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
