"""Writes DeepSpeed's universal folders, which its ``load_checkpoint`` reads with ``checkpoint.load_universal=true``.

Note [What DeepSpeed reads of a universal folder]
    Trained parameters and their states come from ``zero/<name>/``, counters and the schedule from the model file, whose
    name depends on the stage of the run that reads: so there are two. Stages 1 and 2 have a step counter and options
    per parameter group. Stage 3 takes both from the first group for all, and needs the moments of Adam. So weights
    alone come with moments of zero before the first step, as a new optimizer has (a value that is expanded, and takes
    no space). Buffers and frozen parameters are in the model files, as in DeepSpeed's own, but under ``load_universal``
    it does not load them: the model keeps its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.cast import Cast, some
from lt_zero.checkpoint.formats.universal import FOLDER, PARAM, SETTINGS, STEP, WEIGHT
from lt_zero.checkpoint.native.torchfile import TorchFile
from lt_zero.checkpoint.output import naming, whole_folder
from lt_zero.checkpoint.source import CheckpointSource, SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.common.users_code import warn
from lt_zero.core.stores.pinned import view_of
from lt_zero.core.stores.regular_file import read_start
from lt_zero.core.stores.staging import sync_folder

_SHOWN = 100  # characters of a name that a file has
LATEST = "latest_universal"  # the file that names the folder; DeepSpeed looks for it
_VERSION = "0.19.8"  # of DeepSpeed, whose format this is
_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")  # of stages 1 and 2, and of 3
_MOMENTS = ("exp_avg", "exp_avg_sq")
_LONGEST = 4096  # characters of a tag
_RESERVED = {SETTINGS, "..", ".", ""}  # no names of folders


def earlier_of(out: Path, overwrite: bool) -> list[str]:
    """The entries of a folder that a universal checkpoint in it replaces, ``latest_universal`` first.

    Raises:
        CheckpointError: there is one, and not ``overwrite``.
    """
    latest = out / LATEST
    found = [LATEST] if os.path.lexists(latest) else []
    with naming(out):
        tag = read_start(latest, _LONGEST).decode(errors="replace").strip() if found else ""
    if tag and Path(tag).name == tag and (out / tag / FOLDER).is_dir():
        found.append(tag)
    if found and not overwrite:
        raise CheckpointError(
            f"{out} has a universal checkpoint ({tag[:_SHOWN]}), which an export there deletes. Name another folder, "
            "or replace it with --overwrite (overwrite=True)."
        )
    return found


def tag_of(source: CheckpointSource) -> str:
    """The name of the folder for a checkpoint, as DeepSpeed's own are."""
    return f"global_step{_steps(source)}_universal"


def write_universal(out: Path, cast: Cast, training_state: bool, earlier: list[str]) -> list[Path]:
    """Write the folder ``tag_of`` into ``out``, and the file that names it; both replace the entries ``earlier``.

    Args:
        cast: the weights, in fp32.
        training_state: include optimizer states.

    Returns:
        A model file and ``latest_universal``; there are too many others to be listed.

    Raises:
        CheckpointError: DeepSpeed could not read the states, or a file cannot be written; ``out`` is unchanged.
    """
    tag = tag_of(cast.source)
    saved = _only_optimizer(cast) if training_state else SavedOptimizer([])
    _check_file_names(cast, saved)
    names = _Names.of(cast, saved)
    with whole_folder(out, [tag, LATEST], earlier) as staging:
        for name in names.trained:
            _write_weight(staging / tag / FOLDER / name, cast, name)
            entries = saved.state.get(cast.saved(name), {})
            _write_states(staging / tag / FOLDER / name, cast, name, entries, names.steps, names.are_known)
        with _torch_file(staging / tag / FOLDER / SETTINGS) as file:
            file.finish(_settings(saved, names))
        first, second = (staging / tag / model for model in _MODELS)
        with _torch_file(first) as file:
            file.finish(_model(file, cast, names))
        with naming(out):
            os.link(first, second)
            (staging / LATEST).write_text(tag)
            sync_folder(staging / tag)
    return [out / tag / _MODELS[0], out / LATEST]


def _check_file_names(cast: Cast, saved: SavedOptimizer) -> None:
    """Raise CheckpointError if the name of a weight or state, which a stranger may have chosen, names no file here."""
    for name in cast.weights:
        if "/" in name or "\0" in name or name in _RESERVED:
            raise CheckpointError(f"{name!r} cannot name a folder, and a universal checkpoint has one for each name.")
    for name, entries in saved.state.items():
        for key in (key for key, value in entries.items() if isinstance(value, Spec)):
            if "/" in key or "\0" in key or key in (WEIGHT, STEP):
                raise CheckpointError(
                    f"The state {key!r} of {name} cannot name a file, and a universal checkpoint has one for each "
                    "state. Export without training_state."
                )


class _Names:
    """Exported names of a checkpoint by what they are.

    Attributes:
        trained: parameters with optimizer states; without these all floating-point tensors, which may be trained.
        groups: of ``trained``, by parameter group.
        steps: the step counter of each of ``trained``.
        are_known: whether it is known what trains.
    """

    def __init__(self, groups: list[list[str]], steps: dict[str, Any], are_known: bool = True) -> None:
        self.groups, self.steps, self.are_known = groups, steps, are_known
        self.trained = [name for group in groups for name in group]

    @classmethod
    def of(cls, cast: Cast, saved: SavedOptimizer) -> _Names:
        """Raises CheckpointError if parameters of a group were not stepped equally often."""
        if not saved.groups:
            floats = [name for name in cast.names if cast.spec(name).dtype.is_floating_point]
            return cls([floats], dict.fromkeys(floats, torch.tensor(0.0)), are_known=False)
        exported = {cast.saved(name): name for name in cast.weights}
        steps: dict[str, Any] = {}
        idle: list[str] = []
        for number, group in enumerate(saved.groups):
            entries = {name: saved.state.get(name, {}) for name in group["params"]}
            counted = {name: entry[STEP] for name, entry in entries.items() if STEP in entry}
            different = {float(step): name for name, step in counted.items()}
            if len(different) > 1:
                found = ", ".join(f"{name} {step:g}" for step, name in different.items())
                raise CheckpointError(
                    f"DeepSpeed counts steps once for a parameter group, but those of group {number} have different "
                    f"numbers of steps ({found}). Export without training_state."
                )
            own = next(iter(counted.values()), None)
            steps |= {exported[name]: own for name in group["params"]}
            idle += [name for name, entry in entries.items() if not any(isinstance(v, Spec) for v in entry.values())]
        if idle:
            warn(
                f"{some(idle)} have no optimizer states: they get moments of zero with the steps of their group, as "
                "DeepSpeed keeps them."
            )
        return cls([[exported[name] for name in group["params"]] for group in saved.groups], steps)


def _only_optimizer(cast: Cast) -> SavedOptimizer:
    optimizers = cast.source.optimizers
    if len(optimizers) != 1:
        raise CheckpointError(
            f"The checkpoint has the states of {len(optimizers)} optimizers, and DeepSpeed has one. Export without "
            "training_state."
        )
    if "scale" in str(cast.source.meta.get("ZeroPrecision", "")):
        warn("The loss scale is not in the folder: DeepSpeed begins with that of its configuration.")
    return optimizers[0]


@contextmanager
def _torch_file(path: Path) -> Iterator[TorchFile]:
    """Context that yields a new file for ``torch.load``, to be finished."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("xb")
    with stream, naming(path):
        yield TorchFile(lambda data: stream.write(view_of(data) if isinstance(data, Tensor) else data))
        stream.flush()
        os.fsync(stream.fileno())


def _write_weight(folder: Path, cast: Cast, name: str) -> None:
    spec = cast.spec(name)
    with _torch_file(folder / f"{WEIGHT}.pt") as file:
        file.finish({PARAM: file.add_parts(spec.shape, spec.dtype, cast.parts(name)), "cat_dim": 0})


def _write_states(
    folder: Path, cast: Cast, name: str, entries: Mapping[str, Any], steps: Mapping[str, Any], is_known: bool
) -> None:
    """Write the states of a parameter; moments of zero if it has none."""
    found = {key: value for key, value in entries.items() if isinstance(value, Spec)}
    for key, value in found.items():
        with _torch_file(folder / f"{key}.pt") as file:
            file.finish({PARAM: file.add(cast.state(0, cast.saved(name), key, value)), "cat_dim": 0})
    for key in _MOMENTS if not found else ():
        with naming(folder):
            zero = torch.zeros((), device="cpu").expand(cast.spec(name).shape)
            # Only where nothing else is known, as readers may take an expanded tensor for an attack.
            torch.save({PARAM: zero.contiguous() if is_known else zero, "cat_dim": 0}, folder / f"{key}.pt")
    if steps[name] is not None:
        with _torch_file(folder / f"{STEP}.pt") as file:
            file.finish(steps[name])


def _settings(saved: SavedOptimizer, names: _Names) -> dict[str, Any]:
    """The content of ``optimizer_state.pt``."""
    # Without states, the groups are those of the run that reads: none has an option here.
    groups: list[dict[str, Any]] = [{"params": [number]} for number in range(len(names.trained))]
    if saved.groups:
        groups = [{**group, "params": [number]} for number, group in enumerate(saved.groups)]
        for group, own in zip(groups, names.groups, strict=True):
            step = names.steps.get(own[0]) if own else None
            group |= {} if step is None else {STEP: int(step)}  # fused optimizers count here
    first = next((step for step in names.steps.values() if step is not None), torch.tensor(0.0))
    return {
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {STEP: first}}, "param_groups": groups},
    }


def _model(file: TorchFile, cast: Cast, names: _Names) -> dict[str, Any]:
    """The content of a model file."""
    meta = cast.source.meta
    own = getattr(cast.source, "loop", meta.get("loop"))
    loop: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
    schedules = meta.get("lr_schedulers")
    schedule = dict(schedules[0]) if isinstance(schedules, list) and schedules else None
    if schedule is not None and isinstance(last := schedule.get("last_epoch"), int):
        schedule.setdefault("last_batch_iteration", last - 1)  # DeepSpeed's own schedules count so
    shapes = [{name: torch.Size(cast.spec(name).shape) for name in group} for group in names.groups]
    rest = {name: cast.spec(name) for name in cast.names if name not in names.steps}
    return {
        "module": {n: file.add_parts(spec.shape, spec.dtype, cast.parts(n)) for n, spec in rest.items()},
        "buffer_names": list(rest),
        "optimizer": None,
        "param_shapes": shapes if names.are_known else [],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(cast.owner),
        "lr_scheduler": schedule,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": _steps(cast.source),
        "global_samples": int(loop.get("global_samples") or 0),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        **(loop.get("client_state") or {"epoch": meta.get("epoch", 0)}),
    }


def _steps(source: CheckpointSource) -> int:
    steps = getattr(source, "steps", source.meta.get("global_step", 0))
    return steps if isinstance(steps, int) else 0
