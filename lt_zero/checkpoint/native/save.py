"""Saves a sharded checkpoint: divides a Lightning checkpoint into tensors, plain containers and other objects.

Note [Rank 0 decides the names]
    Hooks may change the state dict, often on rank 0 only. The names and ties of rank 0 are saved; other ranks drop
    fragments of tensors that rank 0 does not have. Plain tensors are saved from rank 0, as under DDP, even if other
    ranks have fragments.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lt_zero.checkpoint.native.directory import Place
from lt_zero.checkpoint.native.pieces import Fragment, parameter_numbers
from lt_zero.checkpoint.native.plain import Path, plain, where
from lt_zero.checkpoint.native.writer import Bundle, DirectoryWriter, local_bytes
from lt_zero.comm.communicator import Comm
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.lazy_tensor import LazyTensor

KEY = "lt_zero"  # key of this package's entries in a Lightning checkpoint
REFERENCE = "lt_zero.tensor"  # key of a reference to a sharded tensor


def bundle(
    checkpoint: Mapping[str, Any],
    names: Sequence[Sequence[Sequence[str]]],
    comm: Comm,
    run: Mapping[str, Any],
    config: Mapping[str, Any],
    left_out: Collection[str] = (),
) -> Bundle:
    """Divide a checkpoint's content into the parts of a ``Bundle``. Collective.

    Args:
        checkpoint: Lightning's dictionary, with a ``Fragment`` for each sharded tensor.
        names: of each optimizer's parameters, by group.
        comm: the collectives.
        run: facts about the run, for the manifest.
        config: of the run.
        left_out: names of frozen parameters that are deliberately not saved.

    Raises:
        CheckpointError: a rank lacks an entry of the state dict that rank 0 has.
    """
    rest = dict(checkpoint)
    weights: dict[str, Any] = dict(rest.pop("state_dict", {}))
    optimizers: list[Any] = list(rest.pop("optimizer_states", []))
    flat = [[name for group in groups for name in group] for groups in names]
    made = Bundle({})
    order, aliases = _agreed(weights, comm)
    with comm.agree("reading the checkpoint's content", CheckpointError):  # values of hooks may fail
        extra_state = _take_weights(made, weights, order, aliases, comm.rank)
        packed = [_take_optimizer(made, i, state, flat[i], comm.rank) for i, state in enumerate(optimizers)]
        made.meta, left = plain(rest, lambda path, value: _swap(made, path, value))
        if comm.rank == 0:
            others, left_state = plain(extra_state)
            left |= {(KEY, "extra_state", *path): value for path, value in left_state.items()}
            made.meta[KEY] = {
                **made.meta.get(KEY, {}),
                "optimizers": packed,
                "extra_state": others,
                "left_out": [list(path) for path in left],
                "frozen_left_out": list(left_out),
                "config": plain(config)[0],
            }
            if "optimizer_states" in checkpoint:
                made.meta[KEY]["has_optimizers"] = True
            made.objects = _pickled(left) if left else None
            made.others = {("model", name): value for name, value in others.items()} | _others(packed)
            made.manifest = {"order": tuple(order), "aliases": aliases, "left_out": tuple(left_out), "run": dict(run)}
    return made


def write(
    made: Bundle,
    place: Place,
    comm: Comm,
    group: Any,
    then: Callable[[], object] = lambda: None,
    tick: Callable[[int], object] = lambda _: None,
) -> None:
    """Write and publish a bundle, then call ``then`` on rank 0. Collective over ``group`` (None: one process).

    ``tick`` is called with the bytes of each tensor that this rank has written.

    Raises:
        CheckpointError: on all ranks; names the failed ranks.
    """
    writer = DirectoryWriter(place, made, comm.rank, then, tick)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if there is no process group
            state_dict_saver.save(
                made.tensors,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise CheckpointError(" ".join(_reasons(error, comm))) from None


def _reasons(error: CheckpointException, comm: Comm) -> list[str]:
    reasons = []
    for rank, (cause, trace) in sorted(error.failures.items()):
        text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause} ({trace})"
        reasons.append(f"rank {rank}: {text}" if comm.world > 1 else text)
    return reasons


def _agreed(weights: Mapping[str, Any], comm: Comm) -> tuple[dict[str, bool], dict[str, str]]:
    """Rank 0's names, each with whether it is sharded, and its tied names. See Note [Rank 0 decides the names]."""
    own = ({name: isinstance(value, Fragment) for name, value in weights.items()}, _tied(weights))
    order, aliases = comm.host_broadcast(own, "names of the state dict")
    problem = None
    for name, is_sharded in order.items():
        if name not in weights:
            problem = f"the state dict has no {name!r}, which rank 0 has. Change it in the same way on all ranks."
        elif is_sharded and not isinstance(weights[name], Fragment):
            problem = f"{name!r} was replaced in the state dict, and not on rank 0. Replace it on all ranks."
    if found := comm.problems(problem, "the state dict"):
        raise CheckpointError(" ".join(found))
    return order, aliases


def _tied(weights: Mapping[str, Any]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor) and (known := first.setdefault(_identity(value), name)) != name:
            aliases[name] = known
    return aliases


def _take_weights(
    made: Bundle, weights: Mapping[str, Any], order: Mapping[str, bool], aliases: Mapping[str, str], rank: int
) -> dict[str, Any]:
    """Take the tensors of the state dict; returns its other values."""
    extra: dict[str, Any] = {}
    for name, is_sharded in order.items():
        value = weights[name]
        if not isinstance(value, Tensor):
            extra[name] = value
        elif name not in aliases and (is_sharded or rank == 0):
            made.tensors[f"model.{name}"] = value
    return extra


def _identity(value: Tensor) -> Any:
    """Equal for two names of one tensor."""
    if isinstance(value, Fragment) or value.numel() == 0:
        return id(value)
    return value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


def _take_optimizer(made: Bundle, number: int, state: Any, names: Sequence[str], rank: int) -> dict[str, Any]:
    """Move the fragments of an optimizer's state dict to the tensors; returns the rest, keyed by name."""
    state = {"state": {}, "param_groups": [], **state}  # Lightning's mock optimizer has an empty state
    by_number = dict(zip(parameter_numbers(state), names, strict=True))
    kept: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        name = by_number[parameter]
        for key, value in entries.items():
            if isinstance(value, Fragment):
                made.tensors[f"optimizer_{number}.state.{name}.{key}"] = value
            elif rank == 0:
                # Copy counters: torch.save would write a shared storage with each of them.
                copied = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                kept.setdefault(name, {})[key] = copied
    groups = [{**group, "params": [by_number[n] for n in group["params"]]} for group in state["param_groups"]]
    return plain({"param_groups": groups, "state": kept})[0] if rank == 0 else {}


def _swap(made: Bundle, path: Path, value: Tensor) -> Any:
    """Replace a fragment in another entry of the checkpoint by a reference."""
    if not isinstance(value, Fragment):
        return value.detach()
    name = f"extra.{where(path)}"
    made.tensors[name] = value
    return {REFERENCE: name}


def _pickled(left: Mapping[Path, Any]) -> bytes | None:
    places = ", ".join(repr(where(path)) for path in list(left)[:5])
    kept = {}
    failed = []
    for path, value in left.items():
        try:
            pickle.dumps(value)
            kept[path] = value
        except Exception as error:  # any class may fail in any way here
            failed.append(f"{where(path)!r} ({error})")
    text = f"The checkpoint has entries without a plain form: {places}. They are in objects.pkl, which is only read "
    warnings.warn(text + "with weights_only=False.", stacklevel=2)
    if failed:
        warnings.warn(f"Entries that cannot be pickled are not saved: {', '.join(failed)}.", stacklevel=2)
    return pickle.dumps(kept) if kept else None


def _others(packed: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Any]:
    """Groups and counters of optimizers, for readers of ``.metadata`` (torch, Lightning)."""
    found: dict[tuple[str, ...], Any] = {}
    for number, optimizer in enumerate(packed):
        head = f"optimizer_{number}"
        found[head, "param_groups"] = optimizer["param_groups"]
        for name, entries in optimizer["state"].items():
            for key, value in entries.items():
                found[head, "state", name, key] = value
    return found


def stage(made: Bundle, buffer: Tensor | None) -> Tensor:
    """Copy all tensors of a bundle to host memory, so that training can continue. Not collective.

    Args:
        made: all its tensors are replaced by copies, also step counters, which change in place.
        buffer: of an earlier call, to be reused.

    Returns:
        The buffer (1D uint8).
    """
    raw: dict[str, tuple[int, int]] = {}
    end = 0
    for name, value in made.tensors.items():
        nbytes = local_bytes(value)
        raw[name] = (end, nbytes)
        end += -(-nbytes // 64) * 64
    if buffer is None or buffer.numel() < end:
        buffer = torch.empty(end, dtype=torch.uint8)
    holder: Callable[[], object] | None = None
    for name, (start, nbytes) in raw.items():
        value = made.tensors[name]
        needs = value.done if isinstance(value, Fragment) else None
        if holder is not None and needs != holder:
            holder()
        holder = needs
        copy = buffer[start : start + nbytes].view(value.dtype)
        if not isinstance(value, Fragment):
            made.tensors[name] = copy.view(value.shape).copy_(value)
            continue
        if nbytes:
            copy.copy_(value.local())
        made.tensors[name] = Fragment(partial(_same, copy), tuple(value.shape), value.lo, value.hi, value.dtype)
    if holder is not None:
        holder()
    made.meta, made.others = _copied(made.meta), _copied(made.others)
    return buffer


def _copied(value: Any) -> Any:
    """Plain containers with copies of their tensors."""
    if isinstance(value, LazyTensor):
        return value
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((key, _copied(inner)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def _same(tensor: Tensor) -> Tensor:
    return tensor
