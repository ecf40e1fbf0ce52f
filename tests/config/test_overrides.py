"""Overrides in Hydra's grammar on top of a configuration file, and the ready-made groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lt_zero.common.errors import ConfigError, Mark
from lt_zero.config import overrides as groups
from lt_zero.config.document import Document
from lt_zero.config.interpolations import resolve
from lt_zero.config.overrides import apply
from lt_zero.config.read import read

FILE = """{
  "zero_optimization": {"stage": 2, "bucket": 1},
  "betas": [0.9, 0.99],
  "clip": 1.0, "nothing": null, "same": "${clip}",
  "optimizer": {"type": "Lamb", "params": {"max_coeff": 1}}
}"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Groups like those of lt_zero.conf."""
    for name, text in {
        "zero_optimization/stage3_offload": "stage: 3\noffload_param: {device: cpu}\n",
        "zero_optimization/stage1": "stage: 1\n",
        "precision/bf16": "# what it is\n# @package _global_\nbf16: {enabled: true}\n",
        "optimizer/adamw": "type: AdamW\nparams: {lr: 1e-3}\n",
        "deep/inner/x": "# @package zero_optimization\ny: 1\n",
        "optimizer/lamb": "type: LAMB\nparams: {lr: 1e-3}\n",
        "optimizer/composed": "defaults: [adamw]\n",
        "optimizer/broken": "a: [\n",
    }.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(groups, "group_folder", lambda: tmp_path)
    return tmp_path


def applied(*overrides: str) -> Document:
    return apply(read(FILE), overrides)


def changed(*overrides: str) -> Mapping[str, Any]:
    """Top-level keys that differ from the file; None for those that are gone."""
    before, after = read(FILE).values, applied(*overrides).values
    return {key: after.get(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        applied(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "want"),
    [
        ("clip=5e8", {"clip": 5e8}),
        ("clip=null", {"clip": None}),
        ("clip='5'", {"clip": "5"}),
        ("clip=str(5)", {"clip": "5"}),
        ("zero_optimization.stage=3", {"zero_optimization": {"stage": 3, "bucket": 1}}),
        ("a.b.c=true", {"a": {"b": {"c": True}}}),
        ("+a=[1,{b:x}]", {"a": [1, {"b": "x"}]}),
        ("+nothing=1", {"nothing": 1}),
        ("++clip=2", {"clip": 2}),
        ("+zero_optimization={z:1}", {"zero_optimization": {"stage": 2, "bucket": 1, "z": 1}}),
        ("zero_optimization={stage:1,z:{y:2}}", {"zero_optimization": {"stage": 1, "bucket": 1, "z": {"y": 2}}}),
        ("zero_optimization=true", {"zero_optimization": True}),
        ("betas=[1]", {"betas": [1]}),
        ("betas.1=0.95", {"betas": [0.9, 0.95]}),
        ("clip.x=1", {"clip": {"x": 1}}),
        ("~clip", {"clip": None}),
        ("~clip=1.0", {"clip": None}),
        ("~optimizer.params.max_coeff", {"optimizer": {"type": "Lamb", "params": {}}}),
        ("path=/home/x/y", {"path": "/home/x/y"}),
    ],
)
def test_values(override: str, want: dict[str, Any]) -> None:
    assert changed(override) == want
    if override[0] not in "+~" and "." not in override.split("=")[0]:  # OmegaConf has the same opinion
        config = OmegaConf.create(read(FILE).values)
        key, value = override.split("=", 1)
        if "(" not in value and ":" not in value:
            config.merge_with(OmegaConf.from_dotlist([f"{key}={value}"]))
            assert applied(override).values == OmegaConf.to_container(config) or value.startswith("'")


def test_places_and_the_source_stays() -> None:
    source = read(FILE)
    found = apply(source, ["zero_optimization.stage=3", "betas=[1]", "x.y=1", "~optimizer.params"])
    assert source == read(FILE)
    assert found.marks["zero_optimization",] == source.marks["zero_optimization",]
    assert found.marks["zero_optimization", "stage"] == Mark("override 'zero_optimization.stage=3'")
    assert found.marks["betas",] == found.marks["betas", 0] == Mark("override 'betas=[1]'")
    assert found.marks["x",] == found.marks["x", "y"] == Mark("override 'x.y=1'")
    assert ("betas", 1) not in found.marks
    assert ("optimizer", "params", "max_coeff") not in found.marks
    assert apply(source, []) is source


def test_interpolations_see_overrides() -> None:
    assert resolve(applied("clip=3", "other=${betas.0}")).values["same"] == 3
    assert resolve(applied("other='a${betas.0}'")).values["other"] == "a0.9"
    assert "same is '${clip}', which has no keys" in refused("same.x=1")


def test_secrets_stay_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    found = applied("wandb.api_key=hush", "wandb.team=me")
    assert found.secret == {("wandb", "api_key")}
    assert str(found.marks["wandb", "api_key"]) == "override 'wandb.api_key=...'"
    for wrong in ("wandb.api_key=hush#1", "wandb={api_key:hush", "+hydra.api_key=hush", "--api_key=hush"):
        assert "hush" not in refused(wrong)
    monkeypatch.setenv("LT_KEY", "hush")
    source = resolve(read({"a": "${oc.env:LT_KEY}"}))
    assert "hush" not in str(pytest.raises(ConfigError, apply, source, ["~a=1"]).value)
    assert apply(source, ["a=1"]).secret == set()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("clip", "bad syntax (missing EQUAL at '<EOF>'); write clip=value"),
        ("a=[1", "bad syntax at character 5"),
        ("a=b#c", "bad syntax at character 4"),
        ("betas[0]=1", "write items of lists with a point"),
        ("a=f(1)", "Unknown function 'f'"),
    ],
)
def test_text_that_is_no_override(override: str, says: str) -> None:
    said = refused(override)
    assert says in said
    assert said.startswith("override ")


def test_all_errors_at_once() -> None:
    said = refused("a=1,2", "clip=2", "b=[", "~none")
    assert said.startswith("3 problems:")
    with pytest.raises(ConfigError, match=r'list of texts, not the text .* write \["a=1"\]'):
        apply(read(None), "a=1")
    with pytest.raises(ConfigError, match="an override is text, not int"):
        apply(read(None), [3])  # type: ignore[list-item]


@pytest.mark.usefixtures("conf")
def test_groups() -> None:
    offload = {"stage": 3, "bucket": 1, "offload_param": {"device": "cpu"}}
    assert changed("zero_optimization=stage3_offload") == {"zero_optimization": offload}
    assert changed("precision=bf16") == {"bf16": {"enabled": True}}
    assert changed("optimizer=adamw") == {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "not Lamb's"
    assert ("optimizer", "params", "max_coeff") not in applied("optimizer=adamw").marks
    grouped = '{"optimizer": {"type": "Lamb", "param_groups": [{"match": "*.bias", "max_coeff": 2}]}}'
    made = apply(read(grouped), ["optimizer=adamw"])
    assert made.values == {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "nor its groups"
    assert not any("param_groups" in path for path in made.marks)
    assert "param_groups" in apply(read(grouped), ["optimizer=lamb"]).values["optimizer"]
    same = {"optimizer": {"type": "LAMB", "params": {"lr": 1e-3, "max_coeff": 1}}}
    assert changed("optimizer=lamb") == same, "its own stay"
    kept = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}}
    assert changed("optimizer=adamw", "optimizer.params.eps=1e-6") == {"optimizer": kept}
    assert changed("deep/inner=x") == {"zero_optimization": {"stage": 2, "bucket": 1, "y": 1}}
    mark = Mark("override 'zero_optimization=stage3_offload'")
    found = applied("zero_optimization=stage3_offload")
    assert (
        found.marks["zero_optimization", "offload_param", "device"] == found.marks["zero_optimization", "stage"] == mark
    )
    assert found.marks["zero_optimization", "bucket"].line == 2
    # Hydra too composes groups first and sets values then.
    assert changed("zero_optimization.stage=1", "zero_optimization=stage3_offload")["zero_optimization"]["stage"] == 1
    for value in ("true", "false", "null", "3"):
        assert not isinstance(changed(f"zero_optimization={value}")["zero_optimization"], dict)
    assert changed("zero_optimization='stage1'") == {"zero_optimization": "stage1"}
    assert changed("fp16=stage1") == {"fp16": "stage1"}  # no group


@pytest.mark.usefixtures("conf")
def test_groups_that_fail() -> None:
    said = refused("zero_optimization=stage3_ofload")
    assert "has the options stage1, stage3_offload; did you mean zero_optimization=stage3_offload?" in said
    assert "options" in refused("zero_optimization=../precision/bf16", "zero_optimization=bf16")
    assert "which only Hydra composes" in refused("optimizer=composed")
    assert "optimizer/broken.yaml, line 2" in refused("optimizer=broken")
    assert "one value only" in refused("optimizer=adamw,lamb")


def test_where_groups_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lt_zero" / "config"
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    monkeypatch.setattr(groups, "__file__", str(package / "groups.py"))

    def missing(name: str) -> Path:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.resources.files", missing)
    assert groups.group_folder() is None  # a folder conf in site-packages is somebody else's
    (tmp_path / "pyproject.toml").touch()
    assert groups.group_folder() == tmp_path / "conf"
    assert groups.group_options("optimizer") == []
    assert groups.group_options("../conf") is None
    monkeypatch.setattr("importlib.resources.files", lambda name: tmp_path / name)
    assert groups.group_folder() == tmp_path / "lt_zero.conf"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.sampled_from(
            ["a", "b", ".", "=", "+", "~", "{", "}", "[", "]", ",", ":", "1", "'", "$", " ", "@", "/", "0"]
        ),
        max_size=9,
    )
)
def test_no_override_raises_anything_else(parts: list[str]) -> None:
    try:
        found = apply(read({"a": {"b": [1, {"a": 2}]}}), ["".join(parts)])
    except ConfigError:
        return
    assert isinstance(found.values, dict)
    assert found.marks or "~" in parts or "{" in parts
