"""Checkpoints of DeepSpeed's PipelineModule: the stages of a pipeline put together.

Note [Files of a pipeline]
    ``layer_<number>-model_<tensor rank>-model_states.pt`` (of one rank without it) has the tensors of a layer. Model
    files have none, but the optimizer files of a stage have the master weights of its layers, named
    ``<number>.<name>``, or ``tied_modules.<key>.<name>``: stages have copies of a tied module, and the layer file with
    its number does not tell its key. Model ranks are numbered stage by stage, and by tensor rank within one.

Note [Names]
    They are those of lt_zero's pipelines: ``layers.<number>.<name>`` and ``tied.<key>.<name>``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved
from lt_zero.checkpoint.formats.model_rank import ModelRank
from lt_zero.common.errors import CheckpointError

_LAYER = re.compile(r"layer_(?P<layer>\d+)-(?:model_(?P<rank>\d+)-)?model_states\.pt")
_TIED = "tied_modules."


def pipeline_name(name: str) -> str:
    """The name in a pipeline of lt_zero. See Note [Names].

    >>> pipeline_name("3.up.weight"), pipeline_name("tied_modules.embed.weight")
    ('layers.3.up.weight', 'tied.embed.weight')
    """
    return re.sub(r"^(?=\d+\.)", "layers.", re.sub(rf"^{re.escape(_TIED)}", "tied.", name))


class LayerFiles:
    """The layer files of a folder, by tensor rank and number. Raises CheckpointError if there are two for a place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[int, dict[int, Path]] = {}
        for file in sorted(folder.iterdir()):
            if match := _LAYER.fullmatch(file.name):
                own = self.found.setdefault(int(match["rank"] or 0), {})
                if (known := own.get(int(match["layer"]))) is not None:
                    raise CheckpointError(
                        f"{file} and {known.name} are of the same layer: files of different runs must not be in one "
                        "folder. Take another checkpoint."
                    )
                own[int(match["layer"])] = file

    def of(self, rank: int) -> dict[int, Path]:
        """Files of a tensor rank by number.

        Raises:
            CheckpointError: another rank has files of other layers.
        """
        every = {number for files in self.found.values() for number in files}
        own = self.found.get(rank, {})
        if missing := sorted(every - set(own)):
            raise CheckpointError(
                f"{self.folder} has no file of layer {missing[0]} of tensor rank {rank}, as of others "
                f"(layer_{missing[0]:02d}-model_{rank:02d}-model_states.pt). Copy it, or take another tag."
            )
        return own


class PipelineStages:
    """Stages of a pipeline put together, of one tensor rank; attributes as those of ``ModelRank``.

    Args:
        source: reads files, and takes notes.
        stages: in their order; opened.
        files: layer files of this tensor rank by number. Empty (a universal folder): there are trained parameters only.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, source: ForeignSource, stages: Sequence[ModelRank], files: dict[int, Path]) -> None:
        self._source, self.file = source, stages[0].file
        self.shared: dict[str, str] = {}
        self.absent: list[str] = []
        self.weights: dict[str, Saved] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.buffers = {name for stage in stages for name in stage.buffers}
        for stage in reversed(stages):  # of copies the first stage's count
            self.weights = {**stage.weights, **{n: w for n, w in self.weights.items() if n not in stage.weights}}
            self.states |= stage.states
        self.groups: list[dict[str, Any]] = []
        for same in zip_longest(*(stage.groups for stage in stages)):
            own = [group for group in same if group is not None]
            names = dict.fromkeys(name for group in own for name in group["params"])
            self.groups.append({**own[0], "params": list(names)})
        numbered = {int(found[1]) for name in self.weights if (found := re.match(r"(\d+)\.", name))}
        if files and (missing := sorted(numbered - set(files))):
            raise CheckpointError(
                f"{self.file.parent} has no file layer_{missing[0]:02d}-..., but an optimizer file has parameters "
                "of that layer: the checkpoint is not complete. Copy it, or take another tag."
            )
        trained = set(self.weights)
        for number, file in files.items():
            self._add_layer(number, file, trained)

    def _add_layer(self, number: int, file: Path, trained: set[str]) -> None:
        """Add what is not trained of a layer. ``trained``: names that are."""
        content = self._source.load_file(file, "layer")
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        own = any(f"{number}.{name}" in trained for name in tensors)
        prefix = f"{number}." if own else self._tied_prefix(tensors, trained) or f"{number}."
        records = self._source.records
        for name, tensor in tensors.items():
            if prefix + name not in self.weights:
                saved = Saved.of(tensor)
                self.weights[prefix + name] = saved._replace(read=partial(records.check, tensor))

    def _tied_prefix(self, tensors: dict[str, Tensor], trained: set[str]) -> str | None:
        """The prefix of the tied module that a layer without trained parameters of its own is; None if none fits."""
        keys = {name.split(".")[1] for name in trained if name.startswith(_TIED)}
        fitting = []
        for key in sorted(keys):
            prefix = f"{_TIED}{key}."
            names = [name.removeprefix(prefix) for name in trained if name.startswith(prefix)]
            if all(n in tensors and tuple(tensors[n].shape) == self.weights[prefix + n].spec.shape for n in names):
                fitting.append((prefix, names))
        if len(fitting) > 1:  # modules of equal shapes: look at the values
            fitting = [(prefix, names) for prefix, names in fitting if self._has_values(prefix, names, tensors)]
        return fitting[0][0] if fitting else None

    def _has_values(self, prefix: str, names: Sequence[str], tensors: dict[str, Tensor]) -> bool:
        records = self._source.records
        return all(
            torch.equal(self.weights[prefix + name].read().to(tensors[name].dtype), records.check(tensors[name]))
            for name in names
        )
