"""Folders that DeepSpeed's ``ds_to_universal.py`` made: whole tensors, independent of the ranks that trained.

Note [Universal folders]
    ``zero/<name>/`` has ``fp32.pt`` and, of trained parameters, a file for each state: a dictionary with the tensor as
    ``param`` (of a stage 3 run without tensor parallelism: the tensor itself, flat). ``step.pt`` counts steps, or the
    first state in ``zero/optimizer_state.pt`` does, which also has the settings of groups and the loss scaler. Names,
    shapes, groups, buffers and frozen parameters are in the model files, which the script copies: it also writes frozen
    parameters and buffers to ``zero/``, but of tensor ranks only the first one's slice. Experts of AutoEP are whole,
    too, under the names of DeepSpeed's layer. Without shapes in the model files a folder has weights alone
    (``lt_zero.export``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved, mapping
from lt_zero.checkpoint.formats.mapped_records import MappedRecords
from lt_zero.checkpoint.formats.model_rank import ModelRank, Shape
from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError

FOLDER, SETTINGS, WEIGHT, STEP, PARAM = "zero", "optimizer_state.pt", "fp32", "step", "param"


class UniversalTensors:
    """The trained parameters of a universal folder, their states, and the settings of the optimizer.

    Args:
        source: reads files, and takes notes.
        ranks: of the model, whose files have the names and shapes.

    Attributes:
        weights: of trained parameters, whole.
        groups, states, loss_scaler: see ``ModelRank``.

    Raises:
        CheckpointError: a file is missing, damaged, or has a tensor of another size.
    """

    def __init__(self, source: ForeignSource, ranks: Sequence[ModelRank]) -> None:
        self._source, self._folder = source, source.path / FOLDER
        self._is_sliced = len(ranks) > 1
        self.groups: list[dict[str, Any]] = []
        self.weights: dict[str, Saved] = {}
        self.states: dict[str, dict[str, Any]] = {}
        file = self._folder / SETTINGS
        settings = source.load_file(file, "optimizer state")
        self.loss_scaler = settings.get("loss_scaler")
        counted = self._counted(settings)
        shapes = {name: shape for rank in ranks for group in rank.shapes for name, shape in group.items()}
        for name, shape in shapes.items():
            self._open(name, shape, counted)
        if not shapes:  # weights alone, which an export has written
            for folder in sorted(self._folder.iterdir()):
                if folder.is_dir():
                    self._open(folder.name, None, None)
            return
        self.groups = ranks[0].named_groups(settings.get("param_groups"), file)
        for rank in ranks[1:]:
            more = rank.named_groups(settings.get("param_groups"), file)
            for known, own in zip(self.groups, more, strict=True):
                known["params"] = list(dict.fromkeys(chain(known["params"], own["params"])))
        # Fused optimizers count in the group what torch's count in the state.
        for known in self.groups:
            step = known.pop(STEP, None)
            for name in known["params"] if step is not None else ():
                if name in self.states:
                    self.states[name].setdefault(STEP, torch.tensor(float(step)))

    @classmethod
    def are_in(cls, folder: Path) -> bool:
        """True if a checkpoint's folder is a universal one."""
        return (folder / FOLDER).is_dir()

    def _open(self, name: str, shape: Shape | None, counted: Any) -> None:
        folder = self._folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not folder.is_dir():
            raise CheckpointError(f"{self._folder} has no folder {name!r}: the checkpoint is not complete.")
        found: dict[str, Saved] = {}
        entries: dict[str, Any] = {}
        for file in sorted(folder.glob("*.pt" if shape is not None else f"{WEIGHT}.pt")):
            self._source.parts.append((file, 0, None))
            if file.stem == STEP:
                content, records = self._source.load_apart(file)
                step = records.check(content).detach().clone() if isinstance(content, Tensor) else content
                entries[STEP] = self._source.plain(step, file)
            else:
                found[file.stem] = self._saved(file, shape)
        if WEIGHT not in found:
            raise CheckpointError(f"{folder} has no {WEIGHT}.pt: the checkpoint is not complete.")
        self.weights[name] = found.pop(WEIGHT)
        for key, saved in found.items():
            if saved.spec.shape != self.weights[name].spec.shape:
                raise CheckpointError(
                    f"{folder / key}.pt has the shape {list(saved.spec.shape)}, but {WEIGHT}.pt beside it "
                    f"{list(self.weights[name].spec.shape)}: the files do not belong together."
                )
        if counted is not None and found:
            entries.setdefault(STEP, counted)
        if found:
            self.states[name] = {**found, **entries}

    def _saved(self, file: Path, shape: Shape | None) -> Saved:
        """The tensor of a file, which is opened again when the tensor is read: there may be thousands."""
        content, tensor, _ = self._tensor(file)
        if isinstance(content, dict) and content.get("is_expert_param"):
            shape = None  # model files have the shape of one rank's experts
        shape = tuple(tensor.shape) if shape is None or self._is_sliced else shape
        if tensor.numel() != math.prod(shape) or (tensor.dim() > 1 and tuple(tensor.shape) != shape):
            raise CheckpointError(
                f"{file} has the shape {list(tensor.shape)}, but the parameter {list(shape)}: the files do not belong "
                "together. Take another checkpoint."
            )

        def read() -> Tensor:
            _, again, records = self._tensor(file)
            return records.check(again).detach().reshape(shape).clone()

        return Saved(Spec(shape, tensor.dtype), read)

    def _tensor(self, file: Path) -> tuple[Any, Tensor, MappedRecords]:
        """The content of a file, the tensor in it, and what its values are checked by."""
        content, records = self._source.load_apart(file)
        tensor = content.get(PARAM) if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{file} has no tensor {PARAM!r}: it is damaged, or of an unknown version.")
        return content, tensor, records

    def _counted(self, settings: dict[Any, Any]) -> Any:
        """The number of steps where parameters have none of their own."""
        inner = settings.get("optimizer_state_dict")
        if not isinstance(inner, dict):
            return None
        states = mapping(inner.get("state"), "optimizer state", self._folder / SETTINGS)
        first = next(iter(states.values()), None)
        step = first.get(STEP) if isinstance(first, dict) else None
        return (
            step.detach().clone() if isinstance(step, Tensor) else None if step is None else torch.tensor(float(step))
        )
