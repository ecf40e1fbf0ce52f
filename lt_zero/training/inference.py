"""Inference of models that are larger than the memory of a device, or of the machine (ZeRO-Inference).

ZeRO-Infinity, arXiv:2104.07857: weights are sharded over the ranks and rest on the device, in host memory or in files;
each unit is gathered for its forward only, the next one meanwhile. There are no gradients, master weights or optimizer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lt_zero.checkpoint.open import opened_source
from lt_zero.checkpoint.same import load_same
from lt_zero.checkpoint.source import CheckpointSource
from lt_zero.common import plain_names
from lt_zero.common.arguments import expect
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import CheckpointError, ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import check_same, tell_ignored, without_training
from lt_zero.config.options import communication_options
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.ask import divide
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.features import features_of
from lt_zero.training.build import shard

log = logging.getLogger("lt_zero")
Module = TypeVar("Module", bound=nn.Module)


def inference(
    module: Module,
    config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    device: torch.device | None = None,
    group: ShardGroup | None = None,
) -> Module:
    """Shard ``module`` in place for inference over all ranks of the default process group, and return it. Collective.

    The module is in evaluation mode afterwards, and its parameters need no gradients. Call it, or methods that call it
    such as ``generate``, the same number of times on all ranks, or inside of ``lt_zero.synced``. Experts may be on
    several ranks (``expert_parallel``): they get the tokens of all of these.

    Args:
        module: with its weights, or built inside of ``lt_zero.empty_weights()``: then no rank ever holds all of them.
        config: the stage (default: 3), ``offload_param``, ``quantize``, ``bf16`` and so on: a mapping, a ``ZeroConfig``
            or the path of a file. Keys of optimizers and gradients are ignored, which a line of the log tells.
        weights: where to read the weights: anything that ``lt-zero export`` reads, or a folder of Hugging Face's.
            They are read and sharded unit by unit.
        device: where to compute; default: the device of the first parameter or buffer, or the CPU.
        group: the collectives; default: over all ranks.

    Raises:
        ConfigError: the configuration is wrong.
        CheckpointError: on all ranks: ``weights`` is no checkpoint, or has other names or shapes than the module.
        NotEnoughMemory: a machine has too little memory; the module is unchanged, unless it is cut over ranks.
    """
    expect(module, nn.Module, "The module of lt_zero.inference", "pass an nn.Module")
    chosen, ignored = without_training(config)
    _refuse_parts(chosen)
    placed = (t.device for t in (*module.parameters(), *module.buffers()) if t.device.type != "meta")
    device = device or next(placed, torch.device("cpu"))
    group = group or ShardGroup.of_all(World.join(device, communication_options(chosen)))
    check_same(chosen, group.world.host_gather)
    tell_ignored(ignored, group.world.rank)
    policy = dtype_policy(chosen, resolve_mode(chosen, "32-true"))
    readers = dict[str, Callable[[], Tensor]]()
    if weights is not None:
        use = partial(_readers, module, path=str(weights))
        readers = load_same(group.world, weights, partial(opened_source, weights, use))
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                setattr(part, name, buffer.to(device))
    module.eval().requires_grad_(False)
    parts = divide(features_of(chosen), group, chosen).arguments(module, chosen)
    saved = dict(parts.pop("saved", {}))
    for name, parameter in plain_names.named_parameters(module):
        if name in readers:
            saved[parameter] = readers[name]
    # Weights rest in the dtype in which they compute.
    how = replace(policy, low_master=True)
    engine = shard(module, chosen, device, how, training=False, saved=saved, **parts)
    engine.buffers.sync()
    return module


def _refuse_parts(config: ZeroConfig) -> None:
    """Raise ConfigError if no rank would run the whole module on whole sequences."""
    takes = {
        "pipeline.stages": (config.pipeline.ranks, "runs whole modules"),
        "sequence_parallel_size": (config.sequence_parallel_size, "takes whole sequences"),
    }
    for key, (size, what) in takes.items():
        if size > 1:
            text = f"{key}={size}: lt_zero.inference {what}. Remove the key, or call trainer.predict."
            raise ConfigError.about(key, text)


@torch.no_grad()
def _readers(module: nn.Module, source: CheckpointSource, path: str) -> dict[str, Callable[[], Tensor]]:
    """Functions that read the parameters from ``source``, by the parameter's name; buffers are read now.

    Raises:
        CheckpointError: a name is missing, or a shape differs; names all of them.
    """
    names = _names(module, source)
    found: dict[str, Callable[[], Tensor]] = {}
    used = set[str]()
    wrong = list[str]()
    missing = dict[nn.Parameter, str]()
    filled = dict[nn.Parameter, None]()

    def check(saved: str, value: Tensor) -> None:
        if (shape := source.weights[saved].shape) != tuple(value.shape):
            wrong.append(f"{saved} has the shape {list(shape)}, the module needs {list(value.shape)}")

    for name, parameter in plain_names.named_parameters(module):
        saved = names(name)
        if saved is None:
            missing[parameter] = name
            continue
        used.add(saved)
        check(saved, parameter)
        found[name] = partial(source.read, saved)
        filled[parameter] = None
    persistent = plain_names.state_dict(module).keys()
    buffers = list[tuple[nn.Module, str, Tensor, str]]()
    for path_, part in module.named_modules():
        for own, buffer in part.named_buffers(recurse=False):
            name = clean_name(f"{path_}.{own}".lstrip("."))
            if (saved := names(name)) is not None:
                used.add(saved)
                check(saved, buffer)
                buffers.append((part, own, buffer, saved))
            elif name in persistent:
                wrong.append(f"{name} is missing")
    wrong += [f"{name} is missing" for parameter, name in missing.items() if parameter not in filled]  # else it is tied
    if wrong:
        raise CheckpointError(f"{path} does not fit {type(module).__name__}: {'; '.join(wrong[:10])}.")
    for part, own, buffer, saved in buffers:
        setattr(part, own, source.read(saved).to(buffer.dtype))
    if left := sorted(source.weights.keys() - used - source.aliases.keys()):
        log.info("%s has tensors that %s does not have: %s.", path, type(module).__name__, ", ".join(left[:10]))
    return found


def _names(module: nn.Module, source: CheckpointSource) -> Callable[[str], str | None]:
    """The saved name of a parameter or buffer, by its plain name; None if there is none.

    Hugging Face's files of a model without its head lack the prefix ``base_model_prefix``, or have it where the model
    has none. All names of a LightningModule begin with that of the attribute that the model was.
    """
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    saved = {clean_name(name): name for name in source.weights}
    first = {name.partition(".")[0] for name in saved}
    attribute = f"{next(iter(first))}." if len(first) == 1 else ""

    def find(name: str) -> str | None:
        tried = (name, name.removeprefix(prefix), prefix + name, attribute + name)
        return next((saved[candidate] for candidate in tried if candidate in saved), None)

    return find
