"""From what a user passes as configuration, a mapping, a path or text (files.py), to a document."""

from __future__ import annotations

import itertools
import json
import os
import reprlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lt_zero.common.errors import ConfigError, Path, Problem, dotted
from lt_zero.config.document import (
    DEEPEST,
    MOST_VALUES,
    Document,
    leaves,
    secrets,
    too_deep,
    too_many,
    without_told,
)
from lt_zero.config.fsdp_files import is_for_fsdp


def read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> Document:
    """The values of a configuration, not yet compared with any schema.

    A mapping (OmegaConf's too) is copied; of a DictConfig that is part of a larger one, interpolations are resolved
    there. A path is read as JSON (``.json``, ``.jsonc``) or YAML (``.yaml``, ``.yml``), with another suffix as what
    its first character says. Text that starts with ``{`` is JSON itself. None is the empty configuration.

    Raises:
        ConfigError: the file is missing, or not text, or not what it should be; with line and column. A key stands
            twice or is not text. It is base64 text, or a file of ``accelerate config``, or for FSDP.
    """
    document = Document({})
    if isinstance(source, Mapping):
        document.values = _copied(source, (), document, itertools.count())
        if not document.problems and not isinstance(document.values, dict):
            document.problem((), "the configuration is a DictConfig without value (None or ???)")
        document.check()
    elif isinstance(source, (str, os.PathLike)):
        from lt_zero.config.files import parse_json, parsed  # most strategies are given no file

        if isinstance(source, str) and source.lstrip().startswith("{"):
            document = parse_json(source, "configuration text")
        else:
            document = parsed(source)
    elif source is not None:
        kind = type(source).__name__
        raise ConfigError(
            f"a configuration is a path, a mapping or None, not {without_told(reprlib.repr(source))} ({kind})"
        )
    _refuse_fsdp(document)
    _refuse_accelerate(document)
    document.secret |= secrets(document.values)
    return document


# ---- mappings --------------------------------------------------------------------------------------------------------


def _copied(value: Any, path: Path, document: Document, count: Iterator[int]) -> Any:
    """Mappings and lists as dict and list; numpy's numbers and arrays, and tensors, as Python's own."""
    if len(path) > DEEPEST:  # also ends a mapping that contains itself
        raise too_deep(dotted(path[:3]))
    if next(count) > MOST_VALUES:
        raise too_many("the configuration", "shared mappings")
    omegaconf = sys.modules.get("omegaconf")  # not imported: then nothing is an object of it
    if omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        value = _plain(value, path, document)
    if isinstance(value, (list, tuple)):
        return [_copied(item, (*path, index), document, count) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        copied = {}
        for key, item in value.items():
            if isinstance(key, str):
                copied[str(key)] = _copied(item, (*path, str(key)), document, count)
            else:
                where = f"of {dotted(path)} " if path else ""
                document.problem(path, f"the key {reprlib.repr(key)} {where}is not text; write it in quotes")
        return copied
    if value is None or isinstance(value, (str, int, float)):
        return value
    try:
        if callable(getattr(value, "tolist", None)):
            return value.tolist()
        bool(value == "auto"), str(value), repr(value)
    except Exception as error:  # the class is the user's
        text = f"{dotted(path)} is an object of {type(value).__name__}, which cannot be read ({type(error).__name__})"
        document.problem(path, f"{text}; write numbers, text, lists and mappings")
        return None
    return value


def _plain(config: Any, path: Path, document: Document) -> Any:
    """Containers of OmegaConf's as dict or list.

    Interpolations stay, except in a part of a larger configuration: there they may refer to keys outside of the part.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from lt_zero.common.compat.of_hydra import is_part_of_config

    try:
        raw = OmegaConf.to_container(config, resolve=False)
        if not is_part_of_config(config):
            return raw
        for end, leaf in leaves(raw):
            if isinstance(leaf, str) and "${" in leaf and _reads_environment(config, end, document):
                document.secret.add((*path, *end))
        return OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or dotted(path)
        # The error may have the value of a variable in it, also in other words: a name that is put together.
        said = (
            "it is made of environment variables, which are not shown"
            if document.read
            else str(error).split("\n", 1)[0]
        )
        document.problems.append(Problem(key, f"{key or 'an interpolation'} cannot be resolved: {said}"))
        return {}


def _reads_environment(config: Any, path: Path, document: Document) -> bool:
    """Resolve the value at ``path`` of an OmegaConf container; True if variables are read, which ``document`` notes."""
    from omegaconf import Container, OmegaConf

    from lt_zero.common.compat.of_hydra import environment_read

    with environment_read() as values:
        try:
            for part in path:
                config = config[part]
            if isinstance(config, Container):
                OmegaConf.to_container(config, resolve=True)
        finally:
            document.read |= values
    return bool(values)


# ---- files of accelerate ---------------------------------------------------------------------------------------------

_ACCELERATE = ("compute_environment", "distributed_type", "main_training_function", "num_machines")
_ACCELERATE_ZERO = ("zero_stage", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_config_file")


def _refuse_fsdp(document: Document) -> None:
    """Refuse a file for FSDP; the error says how to convert it."""
    if not is_for_fsdp(document.values):
        return
    of_file = ("distributed_type", "trainer")
    known = [key for key in document.values if str(key).startswith("fsdp") or key in of_file]
    key = next(iter(known or document.values))
    remedy = "`lt-zero config convert FILE --out zero.yaml` writes those of lt_zero, with a verdict on each"
    document.problem((key,), f"{key}: these are keys for FSDP. {remedy}")
    document.check()


def _refuse_accelerate(document: Document) -> None:
    """Refuse the file that ``accelerate config`` writes; the error says how to write it here.

    Its names are those of accelerate 1.15, ``DeepSpeedPlugin``.
    """
    values, block = document.values, document.values.get("deepspeed_config")
    block = block if isinstance(block, dict) else {}
    if sum(key in values for key in _ACCELERATE) < 2 and not any(key in block for key in _ACCELERATE_ZERO):
        return
    zero: dict[str, Any] = {"stage": block.get("zero_stage", 2)}
    written = {"zero_optimization": zero}
    for name in ("offload_optimizer", "offload_param"):
        if (device := block.get(f"{name}_device")) in ("cpu", "nvme"):
            folder = {"nvme_path": str(block.get(f"{name}_nvme_path", "/local_nvme"))} if device == "nvme" else {}
            zero[name] = {"device": device, **folder}
    if block.get("zero3_save_16bit_model") is True:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    kept = ("gradient_accumulation_steps", "gradient_clipping")
    written |= {key: block[key] for key in kept if isinstance(block.get(key), (int, float))}
    devices, nodes = values.get("num_processes"), values.get("num_machines")
    trainer = [f"devices={devices}"] if isinstance(devices, int) else []
    trainer += [f"num_nodes={nodes}"] if isinstance(nodes, int) and nodes > 1 else []
    precision = {"bf16": "bf16-mixed", "fp16": "16-mixed", "no": "32-true"}.get(str(values.get("mixed_precision")))
    trainer += [f'precision="{precision}"'] if precision else []
    remedy = f"Write {json.dumps(written, default=str)} instead"
    remedy += f", and Trainer({', '.join(trainer)}) for the rest" if trainer else ""
    if block.get("deepspeed_config_file"):
        remedy = f"Pass the file that it names, {block['deepspeed_config_file']}"
    what = "this is a file of `accelerate config`, for `accelerate launch`; its keys are not DeepSpeed's"
    path: Path = ("deepspeed_config",) if block else (next(key for key in _ACCELERATE if key in values),)
    document.problem(path, f"{what}. {remedy}")
    document.check()
