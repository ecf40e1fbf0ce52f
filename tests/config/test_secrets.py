"""What a file must not show appears nowhere: in errors, notices, tables and files that are written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.cli import clean, key_statuses, with_origins
from lt_zero.config.load import examine, shown
from lt_zero.training.lightning.monitor.run_monitor import config_lines

SECRET = "hunter2-abcdefghijklmnopqrstuvwxyz-0123456789-and-more-of-it-so-that-it-is-cut-somewhere"
FROM = "${oc.env:LT_ZERO_TEST_SECRET}"
CONFIGS: list[dict[str, Any]] = [
    {"train_batch_size": FROM},
    {"zero_optimization": {"cpu_offload": FROM}},
    {"zero_optimization": {"stage": 3, "offload_params": {"device": "nvme", "nvme_path": FROM}}},
    {"optimizer": {"type": FROM}},
    {"optimizer": {"type": "AdamW", "params": {"lr": FROM}}},
    {"optimizer": {"type": "AdamW", "params": {"betas": [FROM, 2]}}},
    {"optimizer": {"type": "Adam", "params": {"api_token": SECRET}}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": FROM}}},
    {"comet": {"api_key": [SECRET]}},
    {"comet": {"enabled": True, "api_key": SECRET}},
    {"train_batch_size": "${wandb.team}", "wandb": {"team": FROM}},
    {"gradient_clipping": {"clip_value": FROM}},
    {"fp16_override_modules": [FROM]},
    {"fp16": {"type": FROM}, "unknown": FROM},
    {"optimizer": "${block}", "block": {"type": "Adam", "params": {"note": "${more.text}"}}, "more": {"text": FROM}},
    {"optimizer": {"type": "${all.here}"}, "all": "${block}", "block": {"here": FROM}},
    {"optimizer": {"type": "${block.${name}}"}, "name": "text", "block": {"text": FROM}},
    {"optimizer": {"type": "${${name}}"}, "name": "block.text", "block": {"text": FROM}},
    {"zero_optimization": {"stage": f"3 api_key:{SECRET}"}},
    {"zero_optimization": {f"api_key:{SECRET}": None}},
    {f"token={SECRET}": 3},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_secrets_are_not_shown(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", SECRET)
    loaded = examine(config)
    said = [str(ConfigError(loaded.problems)), *map(str, loaded.notices), *map(str, key_statuses(loaded))]
    if loaded.config is not None:
        changed = ZeroConfig.of(loaded.config, overrides=["steps_per_print=3"])
        said += [clean(loaded), with_origins(loaded, True), with_origins(loaded, False)]
        said += [str(shown(made)) + str(config_lines(made, made.secret)) for made in (loaded.config, changed)]
    assert not [text for text in said if "hunter2" in text]


FORMS = [  # of texts that read a variable; in most of them its value, or a part, becomes a name
    "${${oc.env:LT_ZERO_TEST_SECRET}}",
    "${.${oc.env:LT_ZERO_TEST_SECRET}}",
    "${zero_optimization.${oc.env:LT_ZERO_TEST_SECRET}.x}",
    "${oc.env:${oc.env:LT_ZERO_TEST_SECRET}}",
    "${oc.env:PRE${oc.env:LT_ZERO_TEST_SECRET}POST}",
    "${oc.${oc.env:LT_ZERO_TEST_SECRET}:x}",
    "${oc.env:${oc.decode:${oc.env:LT_ZERO_TEST_SECRET}}}",
    "${oc.decode:${oc.env:LT_ZERO_TEST_SECRET}${oc.env:LT_ZERO_TEST_SECRET}}",
    "${${other}}",
    "${oc.env:${other}}",
    "${oc.decode:'[${other}'}",
    "${oc.${word}:LT_ZERO_TEST_SECRET} ${absent}",
    "${oc.env:LT_ZERO_TEST_SECRET}${absent}",
    "${lt_zero_test.env:LT_ZERO_TEST_SECRET}",
    "${lt_zero_test_upper:${other}}",
]
VALUES = [
    "hunter2",
    "hunter2 and more words of it " * 9,
    "\"hunter2\"\\\n\thunter2 'hunter2'",
    "[hunter2, {a: hunter2}",
]


@pytest.mark.parametrize("key", ["wandb.team", "optimizer.type", "zero_optimization.stage"])
@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_variable_is_shown(form: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are masked against all that was read from the environment, whatever a text makes of it."""
    for name, resolver in (("lt_zero_test.env", os.environ.get), ("lt_zero_test_upper", _fails_with_upper_case)):
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    block, _, name = key.partition(".")
    texts = {block: {name: form}, "other": "${oc.env:LT_ZERO_TEST_SECRET}", "word": "env"}
    for value in VALUES:
        monkeypatch.setenv("LT_ZERO_TEST_SECRET", value)
        with pytest.raises(ConfigError) as caught:
            ZeroConfig.of(texts)
        with pytest.raises(ConfigError) as of_part:  # Hydra's configuration, of which a part is ours
            ZeroConfig.of(OmegaConf.create({**texts, "ours": texts, "all": 1}).ours)
        assert "hunter2" not in f"{caught.value}{of_part.value}".lower()


def _fails_with_upper_case(text: str) -> None:
    raise ValueError(text.upper())


def test_parts_of_configurations_keep_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of ours may name one outside that reads a variable."""
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", "hunter2")
    whole = {"secret": FROM, "plain": "text", "ours": {"wandb": {"team": "${secret}", "group": "${plain}"}}}
    loaded = examine(OmegaConf.create(whole).ours)
    assert loaded.secret == {("wandb", "team")}
    assert loaded.usable().wandb.team == "hunter2"


def test_overrides_in_the_environment_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", "hunter2-of-overrides")
    monkeypatch.setenv("LT_ZERO_OVERRIDES", f"optimizer.type={FROM}")
    said = str(ConfigError(examine({}, for_run=True).problems))
    assert "optimizer.type" in said
    assert "hunter2" not in said


def test_values_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that holds ``${...}`` is text, also when another configuration is made; later texts are resolved."""
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", "${oc.env:HOME}${x}\\${y}")
    made = ZeroConfig.of({"wandb": {"team": FROM}})
    monkeypatch.setenv("LT_ZERO_OVERRIDES", f"wandb.group={FROM} wandb.project=${{tensorboard.job_name}}")
    changed = examine(made, overrides=["tensorboard.job_name=${wandb.team}"], for_run=True).usable()
    assert made.wandb.team == "${oc.env:HOME}${x}\\${y}"
    for value in (changed.wandb.team, changed.wandb.group, changed.wandb.project, changed.tensorboard.job_name):
        assert value == made.wandb.team
    assert {str(shown(changed)["wandb"][key]) for key in ("team", "group", "project")} == {"***"}


def test_what_is_saved_and_printed_lacks_only_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", "hunter2/disk")
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": FROM}, "reduce_bucket_size": 12345}
    config = ZeroConfig.of({"zero_optimization": zero, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    assert str(config.zero_optimization.offload_param.nvme_path) == "hunter2/disk"
    saved = shown(config)
    assert saved["zero_optimization"]["offload_param"]["nvme_path"] == "***"
    assert saved["zero_optimization"]["reduce_bucket_size"] == 12345
    assert saved["optimizer"]["params"]["lr"] == 0.5
    lines = config_lines(config, config.secret)
    assert '      nvme_path: "***"' in lines
    assert "    reduce_bucket_size: 12345" in lines


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize(
    "text",
    [
        "api_key:hunter2\n",
        "api_key:hunter2\nstage: 3\n",
        "stage: 3\napi_key:hunter2\n",
        "zero_optimization:\n  stage: 3\n  api_key:hunter2\n",
        "{stage: 3, api_key:hunter2}",
        "api_key: *hunter2\n",
        "api_key: !hunter2 x\n",
        "api_key: !!hunter2 x\n",
        "api_key:\n  @hunter2\n",
        "api_key:\n  - hunter2: hunter2: hunter2\n",
        'api_key: "abc\n  hunter2\n',
        "api_key: {hunter2\n",
        "hunter2: 1\nhunter2: 2\npassword: x",
        '{"api_key":\n hunter2}',
        '{"api_key": "a" "hunter2"}',
    ],
)
def test_a_file_that_cannot_be_read_does_not_show_them(tmp_path: Path, text: str, suffix: str) -> None:
    (file := tmp_path / f"config{suffix}").write_text(text)
    said = []
    with pytest.raises(ConfigError) as caught:  # noqa: PT012
        loaded = examine(file)
        said = [*map(str, loaded.notices), *map(str, key_statuses(loaded))]
        loaded.usable()
    assert not [text for text in (*said, str(caught.value)) if "hunter2" in text.replace("the key hunter2", "")]


def test_other_sources_do_not_show_them() -> None:
    for config in ("https://user:hunter2@host/config.json", ["api_key=hunter2"]):
        with pytest.raises(ConfigError) as caught:
            ZeroConfig.of(config)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)
    for override in ("api_key:hunter2", "comet.api_key:hunter2=1", "+token", "comet={api_key:hunter2"):
        with pytest.raises(ConfigError) as caught:
            ZeroConfig.of({}, overrides=[override])
        assert "hunter2" not in str(caught.value)


NAMES = "token hf_token HF_TOKEN authToken accesstoken api_key apiKey WANDB_API_KEY api-key db_password passwd "
NAMES += "client_secret aws_secret_access_key access_key private_key credentials"


@pytest.mark.parametrize("name", NAMES.split())
def test_names_of_secrets(name: str) -> None:
    assert (name,) in examine({name: SECRET}).secret
    assert ("block", name) in examine({"block": {name: SECRET}}).secret
    if "token" not in name.lower():
        assert (name, "inner") in examine({name: {"inner": SECRET}}).secret
    with pytest.raises(ConfigError) as caught:
        examine(f'{{"{name}": hunter2}}')
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["tokenizer", "tokenizer_config", "token_dropping", "tokens", "max_tokens", "key", "monkey"]
)
def test_names_of_blocks_that_are_no_secrets(name: str) -> None:
    loaded = examine({name: {"path": "gpt2-medium", "length": 512}})
    assert loaded.secret == set()
    assert {value for _, value, _, _ in key_statuses(loaded)} == {"gpt2-medium", "512"}
    assert ("max_tokens",) not in examine({"max_tokens": 512}).secret
    with pytest.raises(ConfigError, match="gpt2-medium"):
        examine('{"tokenizer": gpt2-medium}')


def test_short_ones_leave_messages_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", "4")
    with pytest.raises(
        ConfigError, match=r"zero_optimization.stage=(\"?)\*\*\*\1 is wrong: it is not one of 0, 1, 2, 3"
    ):
        ZeroConfig.of({"zero_optimization": {"stage": FROM}})


def test_what_is_converted_has_to_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LT_ZERO_TEST_SECRET", "/local")
    zero = {"stage": 3, "offload_params": {"device": "nvme", "nvme_path": FROM}}
    file = tmp_path / "converted.yaml"
    file.write_text(clean(examine({"zero_optimization": zero})))
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path is \?\?\?"):
        examine(file)
