"""State of each rank in checkpoints: gradients that it owes to the weights, and buffers and values that differ.

Note [Residuals]
    Residuals of ``gradient_compression`` are kept by parameter: ``worker`` [ranks, *shape] has a row for each rank,
    ``server`` [*shape] the residuals of the owners. ``units`` are factors: a residual times its unit is what it adds to
    the mean gradient of a later step. The same ranks resume exactly. Other numbers of ranks, and stages that need no
    server's residual, get equal parts of the sum, so that what is owed to the weights stays the same.
    Gradients that are in no sum yet (``communication.slow_node_tolerance``) have one row, their sum, and ``counts``: of
    how many ranks, by parameter.

Note [Buffers of each rank]
    They may differ with ``broadcast_buffers: false``. The state dict has those of rank 0, or of the first rank that has
    the buffer. Beside it are those persistent buffers of other ranks that have other values, by name and rank. The same
    number of ranks goes on with its own; any other one with the state dict's.

Note [Values of each rank]
    What a script saves beside the model may differ between ranks: random states, or the place of a loader. Rank 0's
    values are where readers of one value look for them. Beside them are those of all ranks, of the keys that differ.
    The same number of ranks goes on with its own; any other one with rank 0's, and a warning names the keys.

Note [States of features]
    What features save (``Feature.states``) has two parts, both by the prefix of the engine and the name of the state:
    ``values`` of rank 0, with fragments, and ``of_ranks`` as in Note [Values of each rank]. There is no entry without
    such a feature. A state whose feature is not there is left alone, and a warning names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_zero.common import plain_names
from lt_zero.common.boxes import ParamSpec
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import CheckpointError
from lt_zero.common.names import merged
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.comm.objects import packed
from lt_zero.core.comm.world import World
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.buffers import digests
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.exchange import BucketResiduals
from lt_zero.core.engine.lazy_tensor import Fragment, elements_of, whole
from lt_zero.core.followers import states_of

RESIDUALS, RANK_BUFFERS = "gradient_compression", "rank_buffers"  # keys in a Lightning checkpoint
FEATURES = "lt_zero_features"  # another
_UNKNOWN = b""  # the digest of a value that cannot be pickled
OF_RANKS = "of_ranks"  # key, in what a script has saved, of the values that differ between ranks

log = logging.getLogger("lt_zero")


def residual_state(engine: Engine, sharded: bool) -> dict[str, Any] | None:
    """The residuals to save of an exchange that remembers; None if nothing is owed. See Note [Residuals]. Collective.

    ``sharded``: with a ``Fragment`` for each tensor; else with full tensors on the CPU of rank 0, and none elsewhere.
    """
    exchange = engine.exchange
    if exchange.sums_late:
        return _late_gradients(engine, sharded)
    state: dict[str, Any] = {"steps": exchange.steps, "units": {}, "worker": {}, "server": {}}
    if all(feedback.residuals is None for feedback in exchange.of_bucket.values()):
        return state  # still warming up
    for bucket, feedback in exchange.of_bucket.items():
        names = [span.name for span in bucket.layout.spans]
        state["units"].update(dict.fromkeys(names, _unit(bucket, feedback)))
        worker, server = _fragments(bucket, feedback) if sharded else _gathered(bucket, feedback)
        state["worker"].update(worker)
        state["server"].update(server)
    return state


def _unit(bucket: Bucket, feedback: BucketResiduals) -> float:
    feedback.make()
    return _late_unit(bucket) / feedback.scale


def _late_unit(bucket: Bucket) -> float:
    return bucket.group.factors(bucket.grads.send_dtype(bucket.dtype))[1]


def _late_gradients(engine: Engine, sharded: bool) -> dict[str, Any] | None:
    world = engine.world
    state: dict[str, Any] = {"steps": 0, "units": {}, "worker": {}, "server": {}, "counts": {}}
    for bucket, rows, counts in engine.exchange.late_gradients():
        for span in bucket.layout.spans:
            numel = span.hi - span.lo
            if sharded:
                lo, hi = (numel * rank // world.size for rank in (world.rank, world.rank + 1))
                local = partial(rows.narrow, 0, span.lo + lo, hi - lo)
                state["worker"][span.name] = _fragment(span.spec.stacked(1), local, lo, hi, bucket.group.of_process)
            elif world.rank == 0:
                state["worker"][span.name] = rows[span.lo : span.hi].view(1, *span.shape)
            state["units"][span.name] = _late_unit(bucket)
            state["counts"][span.name] = float(counts[span.lo : span.hi].mean()) if numel else 0.0
    return state if state["units"] else None


def _fragments(bucket: Bucket, feedback: BucketResiduals) -> tuple[dict[str, Fragment], dict[str, Fragment]]:
    group = bucket.group
    layout = bucket.layout
    (rows, shard, *_) = feedback.make()
    worker, server = dict[str, Fragment](), dict[str, Fragment]()
    pieces = {piece.index: piece for piece in layout.pieces(*layout.shard(group.rank))}
    for index, span in enumerate(layout.spans):
        numel = span.hi - span.lo
        mine = partial(rows.narrow, 0, span.lo, numel)
        lo, hi = group.rank * numel, (group.rank + 1) * numel
        worker[span.name] = _fragment(span.spec.stacked(group.size), mine, lo, hi, group.of_process)
        if shard is not None:
            piece = pieces.get(index)
            at, lo, hi = (piece.offset, piece.lo, piece.hi) if piece is not None else (0, 0, 0)
            server[span.name] = _fragment(span.spec, partial(shard.narrow, 0, at, hi - lo), lo, hi, group.of_process)
    return worker, server


def _fragment(spec: ParamSpec, local: Callable[[], Tensor], lo: int, hi: int, ranks: tuple[int, ...]) -> Fragment:
    return Fragment(local, spec.global_shape, lo, hi, torch.float32, box=spec.local_box, ranks=ranks)


def _gathered(bucket: Bucket, feedback: BucketResiduals) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    group = bucket.group
    layout = bucket.layout
    (rows, shard, *_) = feedback.make()

    def gather(own: Tensor) -> Tensor:
        flat = torch.empty(group.size, own.numel(), dtype=own.dtype, device=own.device)
        flat[group.rank] = own
        group.all_gather(flat.view(-1), f"residuals of {bucket.name}").wait()
        return flat if group.rank == 0 else flat[:, :0]

    every, sums = gather(rows), gather(shard).view(-1) if shard is not None else None
    worker, server = dict[str, Tensor](), dict[str, Tensor]()
    for span in layout.spans if group.rank == 0 else ():
        worker[span.name] = every[:, span.lo : span.hi].reshape(-1, *span.shape).to("cpu", copy=True)
        if sums is not None:
            server[span.name] = sums[span.lo : span.hi].view(span.shape).to("cpu", copy=True)
    return worker, server


@torch.no_grad()
def load_residuals(engine: Engine, state: Mapping[str, Any] | None) -> None:
    """Take over ``residual_state`` of any number of ranks and any stage; None: begin at zero. Collective."""
    exchange = engine.exchange
    if exchange.sums_late:
        exchange.replace_late_gradients(partial(_load_late, state or {"worker": {}}))
        return
    # Residuals of the run so far are not owed to the weights of the checkpoint.
    exchange.resume(int(state["steps"]) if state is not None else exchange.steps)
    if state is None:
        return
    worker = state["worker"]
    if not exchange.remembers:
        if worker and engine.world.rank == 0:
            log.warning(
                "The checkpoint has residuals of gradient_compression or late gradients; both are off: drop them."
            )
        return
    for bucket, feedback in exchange.of_bucket.items():
        found = [(index, span.name) for index, span in enumerate(bucket.layout.spans) if span.name in worker]
        unit = state["units"][found[0][1]] if found else 1.0
        for index, name in found:
            factor = state["units"][name] / unit
            _load(bucket, feedback, index, worker[name], state["server"].get(name), factor)
        # Keep the units in which they were saved: converted to others and back, they would be rounded.
        if found:
            feedback.begin_units(_late_unit(bucket) / unit)


def _load_late(state: Mapping[str, Any], bucket: Bucket) -> tuple[Tensor, Tensor]:
    """The sum (1D, all elements) of the late gradients in ``state`` of a bucket, and the ranks that each is of."""
    rows, counts = torch.zeros(bucket.layout.numel), torch.zeros(bucket.layout.numel)
    for span in bucket.layout.spans:
        if (found := state["worker"].get(span.name)) is None:
            continue
        numel, factor = span.hi - span.lo, state["units"][span.name] / _late_unit(bucket)
        for rank in range(found.shape[0]):
            rows[span.lo : span.hi] += _row(found, span.spec, rank) * factor
        if (shard := state["server"].get(span.name)) is not None:
            rows[span.lo : span.hi] += elements_of(shard, 0, numel, span.spec.local_box) * factor
        counts[span.lo : span.hi] = state.get("counts", {}).get(span.name, 0.0)
    return rows, counts


def _row(rows: Tensor, spec: ParamSpec, rank: int) -> Tensor:
    """The residuals (1D) of this rank's part of a parameter that ``rank`` had."""
    numel = spec.local_box.numel
    return elements_of(rows, rank * numel, (rank + 1) * numel, spec.stacked(rows.shape[0]).local_box)


def _load(
    bucket: Bucket, feedback: BucketResiduals, index: int, rows: Tensor, sums: Tensor | None, factor: float
) -> None:
    """Load the residuals of parameter ``index``, times ``factor``."""
    group = bucket.group
    span = bucket.layout.spans[index]
    (worker, server, *_) = feedback.make()
    numel, mine = span.hi - span.lo, worker[span.lo : span.hi]

    box = span.spec.local_box
    if rows.shape[0] == group.size and (sums is None) == (server is None):
        mine.copy_(_row(rows, span.spec, group.rank).to(mine.device) * factor)
        for piece in bucket.layout.pieces(*bucket.layout.shard(group.rank)):
            if server is not None and sums is not None and piece.index == index:
                own = elements_of(sums, piece.lo, piece.hi, box).to(mine.device)
                server[piece.offset : piece.offset + piece.numel] = own * factor
        return
    total = torch.zeros(numel, dtype=torch.float64, device=mine.device)
    for rank in range(rows.shape[0]):
        total += _row(rows, span.spec, rank).to(mine.device)
    if sums is not None:
        total += elements_of(sums, 0, numel, box).to(mine.device)
    mine.copy_(total * (factor / group.size))


# ---- buffers ---------------------------------------------------------------------------------------------------------


def rank_buffers(engine: Engine, prefix: str = "") -> dict[str, Any] | None:
    """The buffers of all ranks to save, where they are not sent; None if all have rank 0's. Collective.

    See Note [Buffers of each rank]. ``prefix``: of names in the checkpoint.
    """
    world = engine.world
    if world.size == 1:
        return None
    average = average_of(engine)
    trained = average.buffers(averaged=False) if average is not None else {}
    persistent = plain_names.state_dict(engine.root).keys()
    own = {name: trained.get(name, b) for name, b in plain_names.named_buffers(engine.root) if name in persistent}
    values = dict(zip(own, digests(list(own.values())), strict=True))
    ranks = world.host_gather(values, "values of buffers")
    kept: dict[str, dict[str, Tensor]] = {}
    for name in merged(ranks):  # ranks may have other modules
        has = [rank for rank, theirs in enumerate(ranks) if name in theirs]
        if any(ranks[rank][name] != ranks[has[0]][name] for rank in has):
            found = world.host_gather(own[name].detach().cpu() if name in own else None, f"buffer {name}")
            kept[prefix + name] = {str(rank): found[rank] for rank in has[1:]}
    return {"ranks": world.size, "buffers": kept} if kept else None


@torch.no_grad()
def load_rank_buffers(engine: Engine, state: Mapping[str, Any], prefix: str = "") -> None:
    """Load this rank's buffers of a checkpoint, after its state dict. Not collective."""
    # Earlier versions saved the names of wrappers, too.
    mine = {clean_name(k.removeprefix(prefix)): v for k, v in state["buffers"].items() if k.startswith(prefix)}
    if not mine:
        return
    if state["ranks"] != engine.world.size or engine.buffers.enabled:
        if engine.world.rank == 0:
            why = "broadcast_buffers is on" if engine.buffers.enabled else f"here are {engine.world.size} ranks"
            log.warning(
                "The checkpoint has other buffers on each of %d ranks, and %s: all go on with those of rank 0.",
                state["ranks"],
                why,
            )
        return
    for name, buffer in plain_names.named_buffers(engine.root):
        if (value := mine.get(name, {}).get(str(engine.world.rank))) is not None:
            buffer.copy_(whole(value))


# ---- values of scripts -----------------------------------------------------------------------------------------------


class _Compared(pickle.Pickler):
    """Writes the same bytes for the same values; torch writes addresses of tensors."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return NotImplemented
        dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return bytes, (dense.reshape(-1).view(torch.uint8).numpy().tobytes(),), (str(value.dtype), value.shape)


def values_of_ranks(world: World, values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Find the values that differ between ranks, by key, with those of each rank. Collective.

    Values that cannot be pickled on some rank, or not unpickled, count as alike, and a rank without a value as one with
    rank 0's. A warning names values that rank 0 does not have. See Note [Values of each rank].
    """
    if world.alone:
        return {}
    every = world.host_gather({key: _digest_of(value) for key, value in values.items()}, "what the script saves")
    lacking = dict.fromkeys(key for found in every for key in found if key not in every[0])
    if lacking and world.rank == 0:
        log.warning(
            f"Other ranks save {', '.join(map(repr, lacking))}, and rank 0 does not: it is not in the checkpoint. Save "
            "it on all ranks."
        )
    digests = {key: {found[key] for found in every if key in found} for key in every[0]}
    differ = [key for key, those in digests.items() if len(those) > 1 and _UNKNOWN not in those]
    if not differ:
        return {}
    gathered = world.host_gather({key: packed(values[key]) for key in differ if key in values}, "values of each rank")
    made = dict[str, list[Any]]()
    for key in differ:
        # Some objects, such as many exceptions, can be pickled and not unpickled. All ranks have the same bytes.
        with contextlib.suppress(Exception):
            made[key] = [pickle.loads(found.get(key, gathered[0][key])) for found in gathered]
    return made


def _digest_of(value: Any) -> bytes:
    """Bytes that are the same for the same values; ``_UNKNOWN`` for what cannot be pickled."""
    file = io.BytesIO()
    try:
        _Compared(file).dump(value)
        packed(value)
    except Exception:  # of a class of the user's
        return _UNKNOWN
    return hashlib.blake2b(file.getbuffer(), digest_size=16).digest()


def own_values(world: World, values: Mapping[str, Any], of_ranks: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the saved values with this rank's own, where as many ranks have saved them.

    Args:
        values: of rank 0.
        of_ranks: what ``values_of_ranks`` has found.
    """
    fitting = {key: found for key, found in of_ranks.items() if len(found) == world.size and key in values}
    others = [key for key in of_ranks if key not in fitting]
    if others and not world.alone and world.rank == 0:
        log.warning(
            f"Each rank has saved another value of {', '.join(map(repr, others))}, and {world.size} ranks go on where "
            f"{len(of_ranks[others[0]])} have saved: all get that of rank 0."
        )
    return {**values, **{key: found[world.rank] for key, found in fitting.items()}}


# ---- states of features ----------------------------------------------------------------------------------------------


def feature_states(engine: Engine, prefix: str = "", sharded: bool = True) -> dict[str, dict[str, Any]]:
    """The states of the engine's features; {} if there are none. See Note [States of features]. Collective.

    Args:
        prefix: of the engine's parameters in the checkpoint.
        sharded: with fragments; else with full tensors in their place, on rank 0.

    Raises:
        CheckpointError: on all ranks: a feature has failed.
    """
    world = engine.world
    with world.agree("reading states of features", CheckpointError):
        values = {prefix + name: saved.state_dict() for name, saved in states_of(engine).items()}
    if not values:
        return {}
    of_ranks = values_of_ranks(world, values)  # fragments count as alike
    if not sharded:
        values = map_tensors(values, partial(_whole_fragment, world))
    return {"values": values, OF_RANKS: of_ranks}


def _whole_fragment(world: World, tensor: Tensor) -> Tensor:
    """The full tensor (on the CPU) of a fragment, on rank 0, and one without elements elsewhere; others as they are.

    Collective for fragments.
    """
    if not isinstance(tensor, Fragment):
        return tensor
    mine = tensor.box, tensor.lo, tensor.hi, tensor.local().detach().cpu()
    parts = world.host_gather(mine, "a tensor of a feature")
    if tensor.done is not None:
        tensor.done()
    if world.rank > 0:
        return torch.empty(0, dtype=tensor.dtype)
    made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    for box, lo, hi, values in parts:
        part = box.of(made)
        rows = part.flatten()
        rows[lo:hi] = values
        part.copy_(rows.view(part.shape))
    return made


def load_feature_states(engine: Engine, state: Mapping[str, Any], prefix: str = "") -> None:
    """Let the engine's features go on with what ``feature_states`` of any number of ranks has returned."""
    values = own_values(engine.world, state["values"], state.get(OF_RANKS, {}))
    mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    known = states_of(engine)
    for name, saved in known.items():
        if name in mine:
            saved.load_state_dict(mine[name])
    if (others := [name for name in mine if name not in known]) and engine.world.rank == 0:
        log.warning(
            "The checkpoint has states of features that this run does not have: %s. They are left out. To go on with "
            "them, ask for the features by their keys; those of other packages have to be registered "
            "(lt_zero.core.feature.register).",
            ", ".join(map(repr, others)),
        )
