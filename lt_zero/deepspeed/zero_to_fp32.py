"""``deepspeed.utils.zero_to_fp32``: weights of a checkpoint in fp32, as a state dict, in files, or in a model."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from lt_zero.checkpoint.cast import Cast, some
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import CheckpointSource, Format
from lt_zero.common.errors import CheckpointError
from lt_zero.common.users_code import warn

_WHOLE = 2**62  # bytes of a file without a limit


def _opened(folder: str | os.PathLike[str], tag: str | None, exclude_frozen_parameters: bool) -> CheckpointSource:
    if exclude_frozen_parameters:
        raise ValueError(
            "exclude_frozen_parameters=True is not supported for a checkpoint that has frozen weights. Save it with "
            "engine.save_checkpoint(exclude_frozen_parameters=True), or remove them from the state dict."
        )
    return open_source(folder, tag)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The weights of a checkpoint of lt_zero or DeepSpeed, floating-point ones in fp32, on the CPU.

    Args:
        checkpoint_dir: the folder that ``engine.save_checkpoint`` got.
        tag: default: the one in its file ``latest``.
        exclude_frozen_parameters: True is an error: leave them out of the checkpoint.
        lazy_mode: without effect: tensors are read before this returns.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ValueError: ``exclude_frozen_parameters``.
    """
    cast = Cast(_opened(checkpoint_dir, tag, exclude_frozen_parameters), torch.float32, (), lambda count: None)
    parts = {name: [part.clone() for part in cast.parts(name)] for name in cast.names}
    whole = {name: torch.cat(parts.pop(name)).view(cast.spec(name).shape) for name in cast.names}
    return {name: whole[cast.owner.get(name, name)] for name in cast.weights}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights in fp32 to the folder ``output_dir``, as ``lt_zero.export`` does with ``shard_size``.

    Args:
        max_shard_size: of a file; None: one file.
        safe_serialization: write safetensors in place of ``pytorch_model.bin``.
        checkpoint_dir, tag, exclude_frozen_parameters: as for ``get_fp32_state_dict_from_zero_checkpoint``.
    """
    source = _opened(checkpoint_dir, tag, exclude_frozen_parameters)
    kind: Format = "safetensors" if safe_serialization else "pt"
    export(source, output_dir, "fp32", kind, max_shard_size or _WHOLE, overwrite=True)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the weights in fp32 into a model, which is moved to the CPU, and return it.

    Weights that the checkpoint lacks (frozen ones may be left out) stay as they are, with a warning.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or has weights that the model lacks.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    lacks, extra = model.load_state_dict(state, strict=False)
    if extra:
        text = f"has weights that {type(model).__name__} lacks: {some(extra)}. Pass the model that was trained"
        raise CheckpointError(f"The checkpoint {checkpoint_dir} {text}.")
    if lacks:
        warn(f"The checkpoint {checkpoint_dir} lacks these weights, which stay as they are: {some(lacks)}.")
    return model
