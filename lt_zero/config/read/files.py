"""From what a user passes as configuration, a path, a mapping or text, to plain values with their places."""

from __future__ import annotations

import base64
import codecs
import difflib
import itertools
import os
import re
import reprlib
import stat
import sys
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from lt_zero.common.errors import ConfigError, Path, Problem, dotted
from lt_zero.config.read import foreign, json_text, yaml_text
from lt_zero.config.read.interpolation import resolve
from lt_zero.config.read.source import Budget, Source, leaves, secrets

__all__ = ["Source", "read", "resolve"]

_LARGEST = 10 << 20  # bytes of a file
_LONGEST_PATH = 4096  # characters
_SUFFIXES = {
    **dict.fromkeys((".json", ".jsonc", ".hjson"), json_text.parse),
    **dict.fromkeys((".yaml", ".yml"), yaml_text.parse),
}
_BYTE_ORDER_MARKS = (  # Windows PowerShell's > writes UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> Source:
    """The values of a configuration, not yet compared with any schema.

    A mapping (OmegaConf's too) is copied; of a DictConfig that is part of a larger one, interpolations are resolved
    there. A path is read as JSON (``.json``, ``.jsonc``) or YAML (``.yaml``, ``.yml``), with another suffix as what
    its first character says. Text that starts with ``{`` is JSON itself. None is the empty configuration.

    Raises:
        ConfigError: the file is missing, or not text, or not what it should be; with line and column. A key stands
            twice or is not text. The values are nested more than 50 deep, or more than 100,000. It is base64 text, or
            a file of ``accelerate config``.
    """
    if source is None:
        found = Source({})
    elif isinstance(source, Mapping):
        found = _from_mapping(source)
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        found = json_text.parse(source, "configuration text")
    elif isinstance(source, (str, os.PathLike)):
        found = _from_file(os.fsdecode(source))
    else:
        kind = type(source).__name__
        raise ConfigError(f"a configuration is a path, a mapping or None, not {reprlib.repr(source)} ({kind})")
    foreign.refuse(found)
    found.secret |= secrets(found.values)
    return found


def _from_mapping(mapping: Mapping[Any, Any]) -> Source:
    found = Source({})
    problems: list[Problem] = []
    found.values = _copied(mapping, (), Budget("config"), set(), problems, found.secret)
    if not problems and not isinstance(found.values, dict):
        problems.append(Problem("", "the configuration is a DictConfig without value (None or ???)"))
    if problems:
        raise ConfigError(problems)
    return found


def _copied(
    value: Any, path: Path, budget: Budget, around: set[int], problems: list[Problem], secret: set[Path]
) -> Any:
    """Mappings and lists as dict and list, all else as it is; what ``around`` holds is being copied."""
    omegaconf = sys.modules.get("omegaconf")  # not imported: then nothing is an object of it
    if omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        value = _plain(value, path, problems, secret)
    if not isinstance(value, (Mapping, list, tuple)):
        budget.take(0)
        return _scalar(value, path, problems)
    if id(value) in around:
        problems.append(Problem(dotted(path), f"{dotted(path)} contains itself; write its values out"))
        return None
    budget.take(len(path) + 1)
    around = around | {id(value)}
    if not isinstance(value, Mapping):
        return [_copied(item, (*path, i), budget, around, problems, secret) for i, item in enumerate(value)]
    copied = {}
    for key, item in value.items():
        if not isinstance(key, str):
            where = f"of {dotted(path)} " if path else ""
            problems.append(
                Problem(dotted(path), f"the key {reprlib.repr(key)} {where}is not text; write it in quotes")
            )
        else:
            copied[str(key)] = _copied(item, (*path, str(key)), budget, around, problems, secret)
    return copied


def _scalar(value: Any, path: Path, problems: list[Problem]) -> Any:
    """A value that can be compared with others; numpy's numbers and lists, and tensors, as Python's own."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    try:
        if callable(getattr(value, "tolist", None)):
            return value.tolist()
        bool(value == "auto"), str(value), repr(value)
    except Exception as error:  # classes of all origins
        text = f"{dotted(path)} is an object of {type(value).__name__}, which cannot be read ({type(error).__name__})"
        problems.append(Problem(dotted(path), f"{text}; write numbers, text, lists and mappings"))
        return None
    return value


def _plain(config: Any, path: Path, problems: list[Problem], secret: set[Path]) -> Any:
    """Containers of OmegaConf's as dict or list.

    Interpolations stay for ``resolve``, except in a part of a larger configuration: what they name is outside of it.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from lt_zero.common.compat import is_part_of_config

    try:
        raw = OmegaConf.to_container(config, resolve=False)
        if not is_part_of_config(config):
            return raw
        secret |= {(*path, *end) for end, leaf in leaves(raw) if isinstance(leaf, str) and "${oc.env:" in leaf}
        return OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or dotted(path)
        said = str(error).split("\n", 1)[0]
        problems.append(Problem(key, f"{key or 'an interpolation'} cannot be resolved: {said}"))
        return {}


def _from_file(given: str) -> Source:
    _refuse_text(given)
    try:
        path = FilePath(given).expanduser()
    except RuntimeError:
        raise ConfigError(f"{given}: there is no such user; write the folder out") from None
    text = _decoded(_content(path, given), given)
    parse = _SUFFIXES.get(path.suffix.lower()) or (json_text.parse if _starts_as_json(text) else yaml_text.parse)
    if parse is json_text.parse and path.suffix and not _starts_as_json(text) and text.strip():
        raise ConfigError(
            f"{given} does not start with {{, as JSON does. If it is HJSON without the outer braces, which DeepSpeed "
            "reads, put { before and } after it, keys and text in double quotes, and a comma after each value; if it "
            f"is YAML, name it {path.stem}.yaml"
        )
    return parse(text, given)


def _refuse_text(given: str) -> None:
    """What is no path at all: a message about a missing file would mislead, and hold the whole text."""
    if not given.strip():
        raise ConfigError("the path of the configuration is empty; leave it out, or name a file")
    if "\0" in given or "\n" in given:
        raise ConfigError("the configuration is text of several lines; save it as a file, or pass a mapping")
    if "://" in given:
        raise ConfigError(f"{given}: configurations are read from local files only; download it first")
    text = given.strip().replace("+", "-").replace("/", "_")
    if os.path.exists(given) or not re.fullmatch(r"(?:[\w-]{4}){2,}[\w-]*={0,2}", text, re.ASCII):
        start = b""
    else:
        start = base64.urlsafe_b64decode(text[:8]).lstrip()
    if start[:1] in (b"{", b"["):
        what = "the configuration is base64 text, which nobody can read or review"
        remedy = "decode it to a file: base64 -d text > ds_config.json (- and _ in it stand for + and /)"
        raise ConfigError(f"{what}; {remedy}, and pass its path")
    if len(given) > _LONGEST_PATH:
        raise ConfigError(f"the configuration is neither a path nor JSON: {given[:60]!r}...; save it as a file")


def _content(path: FilePath, given: str) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            names = sorted(entry.name for entry in path.iterdir() if entry.suffix in _SUFFIXES)[:5]
            held = f"; it holds {', '.join(names)}" if names else ""
            raise ConfigError(f"{given} is a folder; name the file in it{held}")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{given} is no regular file (a pipe or a device); save the configuration as a file")
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {given}{_nearest(path)}") from None
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror or error}") from None
    if len(content) > _LARGEST:
        raise ConfigError(
            f"{given} is larger than {_LARGEST >> 20} MB; is it the right file? A configuration has a few KB"
        )
    return content


def _nearest(path: FilePath) -> str:
    folder = path.parent
    try:
        names = [entry.name for entry in itertools.islice(folder.iterdir(), 1000) if entry.is_file()]
    except OSError:
        return f"; there is no folder {folder} either"
    close = difflib.get_close_matches(path.name, names, 1, 0.5)
    configs = sorted(name for name in names if FilePath(name).suffix in _SUFFIXES)[:5]
    if close:
        return f"; did you mean {folder / close[0]}?"
    return f"; {folder.absolute()} holds {', '.join(configs)}" if configs else f" in {folder.absolute()}"


def _decoded(content: bytes, given: str) -> str:
    marked = ((mark, encoding) for mark, encoding in _BYTE_ORDER_MARKS if content.startswith(mark))
    mark, encoding = next(marked, (b"", "utf-8"))
    content = content[len(mark) :]
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{given}, line {line}: it is not text in UTF-8 ({error.reason}); save it as UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{given} is not text: it holds zero bytes; is it the right file?")
    if not text.strip():
        raise ConfigError(f"{given} is empty; write at least {{}}")
    return text


def _starts_as_json(text: str) -> bool:
    """Whether the first character outside of comments is a bracket, or what a careless copy puts before one."""
    for line in text.splitlines():
        start = line.strip()
        if start and not start.startswith("#"):
            return start.startswith(("{", "[", "//", "/*", "```"))
    return False
