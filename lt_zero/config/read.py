"""From what a user passes as configuration, a path, a mapping or text, to a document."""

from __future__ import annotations

import base64
import codecs
import difflib
import json
import os
import re
import reprlib
import stat
import sys
from collections.abc import Mapping
from pathlib import Path as File
from typing import Any

from lt_zero.common.errors import ConfigError, Path, Problem, dotted
from lt_zero.config.document import DEEPEST, Document, leaves, secrets, too_deep
from lt_zero.config.text import parse_json, parse_yaml

_SUFFIXES = {
    **dict.fromkeys((".json", ".jsonc", ".hjson"), parse_json),
    **dict.fromkeys((".yaml", ".yml"), parse_yaml),
}
_BYTE_ORDER_MARKS = (  # Windows PowerShell's > writes UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> Document:
    """The values of a configuration, not yet compared with any schema.

    A mapping (OmegaConf's too) is copied; of a DictConfig that is part of a larger one, interpolations are resolved
    there. A path is read as JSON (``.json``, ``.jsonc``) or YAML (``.yaml``, ``.yml``), with another suffix as what
    its first character says. Text that starts with ``{`` is JSON itself. None is the empty configuration.

    Raises:
        ConfigError: the file is missing, or not text, or not what it should be; with line and column. A key stands
            twice or is not text. It is base64 text, or a file of ``accelerate config``.
    """
    if source is None:
        document = Document({})
    elif isinstance(source, Mapping):
        document = _from_mapping(source)
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        document = parse_json(source, "configuration text")
    elif isinstance(source, (str, os.PathLike)):
        document = _from_file(os.fsdecode(source))
    else:
        kind = type(source).__name__
        raise ConfigError(f"a configuration is a path, a mapping or None, not {reprlib.repr(source)} ({kind})")
    _refuse_accelerate(document)
    document.secret |= secrets(document.values)
    return document


# ---- mappings --------------------------------------------------------------------------------------------------------


def _from_mapping(mapping: Mapping[Any, Any]) -> Document:
    document = Document({})
    document.values = _copied(mapping, (), document)
    if not document.problems and not isinstance(document.values, dict):
        document.problem((), "the configuration is a DictConfig without value (None or ???)")
    if document.problems:
        raise ConfigError(document.problems)
    return document


def _copied(value: Any, path: Path, document: Document) -> Any:
    """Mappings and lists as dict and list, all else as it is."""
    if len(path) > DEEPEST:  # also ends a mapping that contains itself
        raise too_deep(dotted(path[:3]))
    omegaconf = sys.modules.get("omegaconf")  # not imported: then nothing is an object of it
    if omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        value = _plain(value, path, document)
    if isinstance(value, (list, tuple)):
        return [_copied(item, (*path, index), document) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return _scalar(value, path, document)
    copied = {}
    for key, item in value.items():
        if isinstance(key, str):
            copied[str(key)] = _copied(item, (*path, str(key)), document)
        else:
            where = f"of {dotted(path)} " if path else ""
            document.problem(path, f"the key {reprlib.repr(key)} {where}is not text; write it in quotes")
    return copied


def _scalar(value: Any, path: Path, document: Document) -> Any:
    """A value that can be compared with others; numpy's numbers and lists, and tensors, as Python's own."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    try:
        if callable(getattr(value, "tolist", None)):
            return value.tolist()
        bool(value == "auto"), str(value), repr(value)
    except Exception as error:  # classes of all origins
        text = f"{dotted(path)} is an object of {type(value).__name__}, which cannot be read ({type(error).__name__})"
        document.problem(path, f"{text}; write numbers, text, lists and mappings")
        return None
    return value


def _plain(config: Any, path: Path, document: Document) -> Any:
    """Containers of OmegaConf's as dict or list.

    Interpolations stay, except in a part of a larger configuration: what they name is outside of it.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from lt_zero.common.compat import is_part_of_config

    try:
        raw = OmegaConf.to_container(config, resolve=False)
        if not is_part_of_config(config):
            return raw
        found = leaves(raw)
        document.secret |= {(*path, *end) for end, leaf in found if isinstance(leaf, str) and "${oc.env:" in leaf}
        return OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or dotted(path)
        said = str(error).split("\n", 1)[0]
        document.problems.append(Problem(key, f"{key or 'an interpolation'} cannot be resolved: {said}"))
        return {}


# ---- files -----------------------------------------------------------------------------------------------------------


def _from_file(given: str) -> Document:
    _refuse_text(given)
    try:
        path = File(given).expanduser()
    except RuntimeError:
        raise ConfigError(f"{given}: there is no such user; write the folder out") from None
    text = _decoded(_content(path, given), given)
    looks_like_json = _starts_as_json(text)
    parse = _SUFFIXES.get(path.suffix.lower()) or (parse_json if looks_like_json else parse_yaml)
    if parse is parse_json and path.suffix and not looks_like_json:
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
    is_base64 = re.fullmatch(r"(?:[\w-]{4}){2,}[\w-]*={0,2}", text, re.ASCII) and not os.path.exists(given)
    if is_base64 and base64.urlsafe_b64decode(text[:8]).lstrip()[:1] in (b"{", b"["):
        what = "the configuration is base64 text, which nobody can read or review"
        remedy = "decode it to a file: base64 -d text > ds_config.json (- and _ in it stand for + and /)"
        raise ConfigError(f"{what}; {remedy}, and pass its path")


def _content(path: File, given: str) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            names = sorted(entry.name for entry in path.iterdir() if entry.suffix in _SUFFIXES)[:5]
            held = f"; it holds {', '.join(names)}" if names else ""
            raise ConfigError(f"{given} is a folder; name the file in it{held}")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{given} is no regular file (a pipe or a device); save the configuration as a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {given}{_nearest(path)}") from None
    except OSError as error:
        raise ConfigError(f"{given:.200} cannot be read: {error.strerror or error}") from None


def _nearest(path: File) -> str:
    folder = path.parent
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    except OSError:
        return f"; there is no folder {folder} either"
    close = difflib.get_close_matches(path.name, names, 1, 0.5)
    configs = sorted(name for name in names if File(name).suffix in _SUFFIXES)[:5]
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
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith(("{", "[", "//", "/*", "```"))


# ---- files of accelerate ---------------------------------------------------------------------------------------------

_ACCELERATE = ("compute_environment", "distributed_type", "main_training_function", "num_machines")
_ACCELERATE_ZERO = ("zero_stage", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_config_file")
_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "no": "32-true"}


def _refuse_accelerate(document: Document) -> None:
    """Refuse the file that ``accelerate config`` writes; the error says how to write it here."""
    values, block = document.values, document.values.get("deepspeed_config")
    block = block if isinstance(block, dict) else {}
    if sum(key in values for key in _ACCELERATE) < 2 and not any(key in block for key in _ACCELERATE_ZERO):
        return
    key = "deepspeed_config" if block else next(key for key in _ACCELERATE if key in values)
    what = "this is a file of `accelerate config`, for `accelerate launch`; its keys are not DeepSpeed's"
    if block.get("deepspeed_config_file"):
        remedy = f"Pass the file that it names, {block['deepspeed_config_file']}"
    else:
        remedy = f"Write {json.dumps(_translated(block), default=str)} instead"
        precision = _PRECISIONS.get(str(values.get("mixed_precision")))
        devices, nodes = values.get("num_processes"), values.get("num_machines")
        trainer = [f"devices={devices}"] if isinstance(devices, int) else []
        trainer += [f"num_nodes={nodes}"] if isinstance(nodes, int) and nodes > 1 else []
        trainer += [f'precision="{precision}"'] if precision else []
        remedy += f", and Trainer({', '.join(trainer)}) for the rest" if trainer else ""
    raise ConfigError([Problem(key, f"{what}. {remedy}", document.mark((key,)))])


def _translated(block: Mapping[str, Any]) -> dict[str, Any]:
    """The block in DeepSpeed's own keys. Names: accelerate 1.15, ``DeepSpeedPlugin``."""
    zero: dict[str, Any] = {"stage": block.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        if (device := block.get(f"{name}_device")) in ("cpu", "nvme"):
            zero[name] = {"device": device}
            if device == "nvme":
                zero[name]["nvme_path"] = str(block.get(f"{name}_nvme_path", "/local_nvme"))
    if block.get("zero3_save_16bit_model") is True:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    kept = {key: block.get(key) for key in ("gradient_accumulation_steps", "gradient_clipping")}
    return {"zero_optimization": zero, **{key: value for key, value in kept.items() if isinstance(value, (int, float))}}
