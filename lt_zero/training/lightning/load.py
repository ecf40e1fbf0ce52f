"""Loads a LightningModule from a checkpoint of any supported format; opens directories for Lightning's own loading."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import is_url, plain_path
from lt_zero.checkpoint.native.load import as_lightning, with_names
from lt_zero.checkpoint.native.plain import has_missing
from lt_zero.checkpoint.native.save import LT_ZERO
from lt_zero.checkpoint.open import found_at, open_source
from lt_zero.common.arguments import expect, expect_path
from lt_zero.common.compat import module_from_checkpoint
from lt_zero.common.errors import CheckpointError
from lt_zero.common.plain_names import names_of, renamed
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.engine.lazy_tensor import read_now, whole

_HPARAMS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
Module = TypeVar("Module", bound=pl.LightningModule)


def load_from_checkpoint(
    cls: type[Module],
    path: str | os.PathLike[str],
    map_location: str | torch.device | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Module:
    """Like ``cls.load_from_checkpoint``, but also for checkpoint directories. Needs no process group.

    Args:
        cls: the class of the module.
        path: a checkpoint directory, a path inside one, or anything else that ``lt-zero export`` reads.
        map_location: the device of the module; default: the CPU.
        strict: whether all names must agree; default: the module's ``strict_loading``.
        weights_only: False also unpickles arbitrary objects; use it for trusted checkpoints only.
        kwargs: for ``cls``; override saved hyper-parameters.

    Weights are read one by one into the module, which is the only copy in memory. Whether the saved module, or a part
    of it, was compiled does not matter.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; or a hyper-parameter was left out because it has no
            plain form.
        RuntimeError: names or shapes do not agree, or frozen parameters were not saved.
    """
    expect(cls, type, "lt_zero.load_from_checkpoint(cls=...)", "pass the class of the module first, then the path")
    expect_path(path, "lt_zero.load_from_checkpoint(path=...)")
    checkpoint = _opened(path, weights_only)
    own = checkpoint.get(LT_ZERO, {})
    checkpoint[_HPARAMS].update(kwargs)
    if left_out := _left_out(cls, checkpoint):
        names = ", ".join(left_out)
        raise CheckpointError(
            f"{path}: {cls.__name__} was made with objects in {names}, which have no plain form and are unpickled only "
            f"if you say so. Pass weights_only=False to lt_zero.load_from_checkpoint if you trust the checkpoint, or "
            f"{left_out[0]}=... in their place."
        )
    if (missing := own.get("frozen_left_out")) and strict is not False:
        names = f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        raise RuntimeError(
            f"{path} was saved with save_frozen=false: {names} are not in it. Pass strict=False, and load them from "
            "their original source."
        )
    with taking_plain_names(cls):
        module: Module = module_from_checkpoint(cls, checkpoint, strict, kwargs)
    read_now(module)
    return module.to(map_location) if map_location is not None else module


def open_directory(
    path: str | os.PathLike[str], map_location: Any, weights_only: bool | None, for_module: bool
) -> dict[str, Any] | None:
    """The checkpoint in a directory of lt_zero, as Lightning's loading has that of a file; None: there is none.

    Args:
        path: a path or URL.
        map_location: as for ``torch.load``; what is saved is on the CPU.
        weights_only: as for ``load_from_checkpoint``.
        for_module: a module is made of it, so its hyper-parameters have to be whole, and the states of optimizers,
            which take most of the memory, are read only if a hook asks for their values.

    States of optimizers are numbered in the order of their groups, as torch saves them. States that another program
    has written are left out: its parameters may have another order.

    Raises:
        CheckpointError: the checkpoint is damaged; or, ``for_module``, a hyper-parameter has no plain form.
    """
    path = plain_path(path)
    if path.startswith("http") or not (is_url(path) or os.path.isdir(path)):
        return None
    found = found_at(path)
    if not Archive.is_at(found):
        return None
    checkpoint = _opened(found, weights_only)
    lacking = [str(name) for name, value in checkpoint[_HPARAMS].items() if has_missing(value)]
    if for_module and lacking:
        raise CheckpointError(
            f"{path}: the module was made with objects in {', '.join(lacking)}, which have no plain form and are "
            "unpickled only if you say so. Pass weights_only=False if you trust the checkpoint, or call "
            f"lt_zero.load_from_checkpoint(Model, path, {lacking[0]}=...)."
        )
    optimizers = checkpoint.pop("optimizer_states", None)
    states = None
    if optimizers is not None and not any(state["foreign"] for state in optimizers):
        states = [_numbered(state) for state in optimizers]
        if not for_module:
            checkpoint["optimizer_states"] = states
    device, read = _device(map_location), dict[int, torch.Tensor]()

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in read:  # tied names share one
            read[id(tensor)] = whole(tensor).to(device)
        return read[id(tensor)]

    content = {key: map_tensors(value, values) for key, value in checkpoint.items()}
    return content if states is None else {"optimizer_states": states, **content}


def _opened(path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
    """Lightning's checkpoint dictionary with lazy tensors, and with hyper-parameters of the class that they had."""
    checkpoint = as_lightning(open_source(path), weights_only)
    hparams = checkpoint.setdefault(_HPARAMS, {})
    if checkpoint.get(LT_ZERO, {}).get("hparams") == "omegaconf":
        checkpoint[_HPARAMS] = hparams = OmegaConf.create(dict(hparams))
        checkpoint[pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    return checkpoint


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with torch's numbers in place of the names of parameters."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return with_names({key: state[key] for key in ("state", "param_groups")}, numbers.__getitem__)


def _device(map_location: Any) -> torch.device:
    """The device where ``torch.load`` would put a tensor that was saved on the CPU."""
    if callable(map_location):
        placed = map_location(torch.empty(0).untyped_storage(), "cpu")
        return torch.device("cpu") if placed is None else placed.device
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    return torch.device("cpu" if map_location is None else map_location)


@contextmanager
def taking_plain_names(cls: type[pl.LightningModule]) -> Iterator[None]:
    """Context in which ``load_state_dict`` of the class takes the names of files, which have those of no wrapper.

    Lightning makes the module and calls it, so the class is changed: there is no module before. No-op for data modules.
    """
    if not issubclass(cls, pl.LightningModule):
        yield
        return
    own, known = vars(cls).get("load_state_dict"), cls.load_state_dict

    def load(module: pl.LightningModule, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return known(module, renamed(state, names_of(module)), *args, **kwargs)

    cls.load_state_dict = load  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is not None:
            cls.load_state_dict = own  # type: ignore[method-assign]
        else:
            del cls.load_state_dict


def _left_out(cls: type[pl.LightningModule], checkpoint: Mapping[str, Any]) -> list[str]:
    """The hyper-parameters that ``cls`` would get with a text in place of what has no plain form."""
    accepted = inspect.signature(cls.__init__).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    whole = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in accepted  # one parameter gets all of them
    hparams = checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY]
    return [
        str(name) for name, value in hparams.items() if (anything or whole or name in accepted) and has_missing(value)
    ]
