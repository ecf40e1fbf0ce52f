"""Configurations of strangers end in an error, soon and short, whatever they expand to. Without a bound these hang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lt_zero.common.errors import MOST_SHOWN, ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.document import MOST_VALUES
from lt_zero.config.interpolations import _named
from lt_zero.config.load import examine


def _doubling(count: int, text: str) -> dict[str, Any]:
    return {"a0": "xx", **{f"a{i}": text.replace("#", f"a{i - 1}") for i in range(1, count)}}


LISTS: dict[str, Any] = {"a0": ["x"] * 10, **{f"a{i}": [f"${{a{i - 1}}}"] * 10 for i in range(1, 12)}}
COMPOSED = {f"a{i}": f"${{oc.select:${{n{i}}}}}${{oc.select:${{n{i}}}}}" for i in range(39, 0, -1)}
COMPOSED |= {"a0": "xx", **{f"n{i}": f"a{i - 1}" for i in range(1, 40)}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (_doubling(40, "${#}${#}"), r"a2\d: \S* may become too long"),
        (_doubling(40, "${#} ${.#}"), r"a2\d: .* may become too long"),
        (_doubling(40, "\\${x}${#}${#}"), "may become too long"),
        (LISTS, f"more than {MOST_VALUES:,} values"),
        (COMPOSED, "in more than 10 steps"),
        ({"a": "${b}" * 1001, "b": 1}, "has 1,001 interpolations"),
        ({"a": "${b}" + "x" * 10_000, "b": 1}, "too long for an interpolation"),
        ({"a": "${oc.env:" * 60 + "x" + "}" * 60}, "brackets are too deep"),
        ({"a": "${b}", "b": "${a}"}, "leads back to itself"),
        ({str(i): 1 for i in range(MOST_VALUES + 2)}, f"more than {MOST_VALUES:,} values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_expands(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ZeroConfig.of(config)
    assert len(str(caught.value)) < MOST_SHOWN * 1200


def test_values_that_name_each_other_are_resolved_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_ZERO_TEST_NAME", "${not.resolved}")
    config = {
        "first": "${second}/${third.0}",
        "second": "${fourth.inner}",
        "third": ["${..second}", "\\${as.it.is} ${fourth.count}", r"\\\${x}"],
        "fourth": {"inner": "deep", "count": 3, "copy": "${third}"},
        "fifth": "${${sixth}}",
        "sixth": "fourth.count",
        "seventh": "${oc.env:LT_ZERO_TEST_NAME} ${third.1}",
        "eighth": "${fourth.copy.1}${third.2}",
    }
    values = examine(config).values
    assert (values["first"], values["fifth"]) == ("deep/deep", 3)
    assert values["third"] == ["deep", "${as.it.is} 3", "\\${x}"]
    assert values["fourth"] == {"inner": "deep", "count": 3, "copy": values["third"]}
    assert values["seventh"] == "${not.resolved} ${as.it.is} 3"
    assert values["eighth"] == "${as.it.is} 3\\${x}"


def test_many_words_and_many_names() -> None:
    """Compared one by one, these take minutes."""
    names = [f"n{i}" for i in range(5000)]
    texts = {(f"x{i}",): "".join(f"${{.{name}}}${{b.{name}}}" for name in [*names, "y", "b.y"]) for i in range(20)}
    named = _named(texts, [("y",), *(("b", name) for name in names)])
    assert all(set(found) == {("y",), *(("b", name) for name in names)} for found in named.values())


@pytest.mark.parametrize("place", ["top", "block", "params", "list", "override"])
def test_thousands_of_problems(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {f"stage_{i}": 1 for i in range(3000)}
    config: dict[str, dict[str, Any]] = {
        "top": keys,
        "block": {"zero_optimization": keys},
        "params": {"optimizer": {"type": "AdamW", "params": keys}},
        "list": {"fp16_override_modules": list(keys.values())},
        "override": {},
    }
    asked = []
    found = "lt_zero.config.keys.nearest"
    monkeypatch.setattr(found, lambda key, known: asked.append(key))
    loaded = examine(config[place], overrides=[f"{key}=1" for key in keys][:200] if place == "override" else ())
    count = 200 if place == "override" else 3000
    assert len(loaded.problems) == count
    assert len(asked) <= 2 * MOST_SHOWN  # each is a search through all keys
    with pytest.raises(ConfigError) as caught:
        loaded.usable()
    assert len(caught.value.problems) == count
    assert str(caught.value).startswith(f"{count:,} problems:")
    assert str(caught.value).endswith(f"... and {count - MOST_SHOWN:,} more")
    assert len(str(caught.value)) < MOST_SHOWN * 300


def test_long_names_and_numbers() -> None:
    for config in ({"z" * 100_000: 1}, {"zero_optimization": {"stage" + "z" * 100_000: 1}}):
        assert len(str(ConfigError(examine(config).problems))) < 1200
    for value in ("1" + "0" * 5000, "z" * 1_000_000):
        assert len(str(ConfigError(examine({"train_batch_size": value}).problems))) < 1200


_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
_MERGES = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: *{chr(97 + i)}, p: *{chr(97 + i)}, q: *{chr(97 + i)}}}\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("laughs.yaml", _LAUGHS, "more than 10,000 values"),
        ("merges.yaml", _MERGES, "more than 10,000 values"),
        ("itself.yaml", "a: &a [*a]\n", "nested more than 50 deep"),
        ("deep.json", '{"a": ' + "[" * 50_000, "nested more than 50 deep"),
        ("base60.yaml", "a: 1" + ":59" * 20_000, "cannot be read as int"),
        ("number.json", '{"a": ' + "9" * 100_000 + "}", "is no finite number"),
        ("quotes.json", '{"a": ' + '"\\' * 50_000, "a string starts here and does not end"),
        ("comments.json", '{"a": 1' + "/*" * 50_000, "a comma or a closing bracket is missing"),
        ("twice.json", "{" + ",".join(['"a": 1'] * 5000) + "}", "stands twice.*and 4,949 more"),
        ("large.yaml", "#" * 200_000, "has 200,000 bytes, and a configuration at most 131,072"),
    ],
    ids=lambda value: value if value.endswith((".yaml", ".json")) else "",
)
def test_files(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){said}") as caught:
        examine(tmp_path / name)
    assert len(str(caught.value)) < MOST_SHOWN * 300


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for place in (tmp_path / "pipe.json", "/dev/zero", "/dev/stdin"):
        with pytest.raises(ConfigError, match="no regular file"):
            examine(place)
    for place in ("/proc/kmsg", "/proc/self/environ"):  # regular ones without a size; a read of the first waits
        with pytest.raises(ConfigError, match=f"{place} (is empty|cannot be read)"):
            examine(place)
