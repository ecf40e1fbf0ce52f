"""Loads a LightningModule from a checkpoint of any supported format."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf

from lt_zero.checkpoint.native.load import as_lightning
from lt_zero.checkpoint.native.plain import has_missing
from lt_zero.checkpoint.native.save import LT_ZERO
from lt_zero.checkpoint.open import open_source
from lt_zero.common.arguments import expect, expect_path
from lt_zero.common.compat import module_from_checkpoint
from lt_zero.common.errors import CheckpointError
from lt_zero.common.plain_names import names_of, renamed
from lt_zero.engine.lazy_tensor import read_now

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
    source = open_source(path)
    checkpoint = as_lightning(source, weights_only)
    own = checkpoint.get(LT_ZERO, {})
    hparams = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if own.get("hparams") == "omegaconf":
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = hparams = OmegaConf.create(dict(hparams))
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    hparams.update(kwargs)
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
    with _taking_plain_names(cls):
        module: Module = module_from_checkpoint(cls, checkpoint, strict, kwargs)
    read_now(module)
    return module.to(map_location) if map_location is not None else module


@contextmanager
def _taking_plain_names(cls: type[pl.LightningModule]) -> Iterator[None]:
    """Context in which ``load_state_dict`` of the class takes the names of files, which have those of no wrapper.

    Lightning makes the module and calls it, so the class is changed: there is no module before.
    """
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
