"""Reading and writing the values of sharded parameters: ``gathered``, loading, and streaming the full model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.common.module_hooks import Hook
from lt_zero.common.progress_bar import progress_bar
from lt_zero.engine.bucket import Bucket, State
from lt_zero.engine.guard import is_guarded, owner_of

if TYPE_CHECKING:
    from lt_zero.engine.engine import Engine


class FullParameter(NamedTuple):
    """One parameter with its full value, valid until the next one is asked for."""

    name: str
    parameter: Parameter
    value: Tensor


@contextmanager
def gathered(target: nn.Module | Parameter | Iterable[Parameter], write: bool = False) -> Iterator[None]:
    """Make the full values of parameters readable inside the context, at every stage. Collective: enter on all ranks.

    Args:
        target: a parameter, several, or a module (all of its parameters).
        write: keep changes made inside. The values of rank 0 win; master weights and compute copies of all ranks
            follow. Without it, changes of sharded parameters are an error.

    Parameters that no engine owns are left as they are, so the code also runs without ZeRO.

    Raises:
        RuntimeError: on all ranks, if some do not enter and something is to be gathered or written.
    """
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    else:
        parameters = [target] if isinstance(target, Parameter) else list(target)
    found: dict[Bucket, Engine] = {}
    held: dict[Bucket, bool] = {}  # -> whether it was gathered; a bucket in use outside of this context is not held
    for parameter in parameters:
        engine: Any = owner_of(parameter)
        if engine is None or id(parameter) not in getattr(engine, "owner", {}):
            continue
        bucket = engine.owner[id(parameter)][0]
        bucket.wait_background_step()
        if bucket not in found:
            found[bucket] = engine
            if not bucket.resident or is_guarded(parameter):
                held[bucket] = bucket.resident
    for engine in dict.fromkeys(e for b, e in found.items() if write or b.state is State.RELEASED):
        engine.comm.roll_call("lt_zero.gathered")
    for bucket in held:
        found[bucket].gatherer.hold(bucket)
    try:
        yield
        if write:
            for bucket in found:
                bucket.adopt_edits()
    except BaseException:
        for bucket in found:
            bucket.edits.note()  # do not report a lost edit instead of this error
        raise
    finally:
        for bucket, keep in held.items():
            found[bucket].gatherer.let_go(bucket, keep)


def full_parameters(engine: Engine) -> Iterator[FullParameter]:
    """Every parameter with its full value in the master's dtype, bucket by bucket. Collective.

    At most one more bucket than before is in memory.
    """
    engine.offload_manager.refuse_partially_stepped(engine.comm)
    for bucket in engine.buckets:
        flat = full_flat(bucket)
        for parameter, span in zip(bucket.params, bucket.layout.spans, strict=True):
            yield FullParameter(span.name, parameter, flat[span.lo : span.hi].view(span.shape))
        bucket.put_away()
        engine.offload_manager.check(engine.comm, "weights in files")


@torch.no_grad()
def full_flat(bucket: Bucket) -> Tensor:
    """All elements (1D) of the bucket's master weights. Collective."""
    bucket.wait_background_step()
    bucket.edits.check(values=True)
    if bucket.state is State.RESIDENT and not bucket.weights.has_master:
        return bucket.flat
    return gather_own(bucket, bucket.weights.values())


@torch.no_grad()
def gather_own(bucket: Bucket, shard: Tensor) -> Tensor:
    """All elements (1D) of a tensor sharded as the master weights (a moment, the accumulator). Collective."""
    if bucket.shard_range == (0, bucket.layout.numel):
        return shard
    flat = torch.empty(bucket.layout.numel, dtype=shard.dtype, device=bucket.comm.device)
    flat[bucket.shard_range[0] : bucket.shard_range[1]] = shard
    bucket.comm.all_gather(flat, bucket.name).wait()
    return flat


def full_state_dict(engine: Engine) -> dict[str, Any]:
    """``root.state_dict()`` with full parameters on the CPU of rank 0, {} elsewhere. Collective.

    Names, order and aliases of tied weights are those of the unsharded module.
    """
    keep = engine.comm.rank == 0
    values: dict[int, Tensor] = {}
    with progress_bar("Gathering weights", sum(len(b.params) for b in engine.buckets), rank=engine.comm.rank) as work:
        for _, parameter, value in full_parameters(engine):
            work.advance()
            if keep:
                values[id(parameter)] = value.detach().to("cpu", copy=True)
    # keep_vars: no values are read from sharded parameters. On all ranks, because metrics may synchronise in it.
    state = engine.root.state_dict(keep_vars=True)
    if not keep:
        return {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = values[id(value)] if id(value) in values else value.detach().to("cpu", copy=True)
    return state


def install_load_hooks(engine: Engine) -> None:
    """Make ``load_state_dict`` write master weights that are not a slice of the compute copy.

    Otherwise they would get values rounded to the 16-bit compute copy. Sharded parameters need no hook: their guard
    turns ``copy_`` into a scatter.
    """
    separate = {b for b in engine.buckets if not b.weights.master_is_view and not b.sharding.params}
    for module in engine.root.modules():
        places = {n: engine.owner[id(p)] for n, p in module.named_parameters(recurse=False) if id(p) in engine.owner}
        places = {n: place for n, place in places.items() if place[0] in separate}
        if places:
            _install(module, places)


def _install(module: nn.Module, places: dict[str, tuple[Bucket, int]]) -> None:
    def write(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, (bucket, index) in places.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and tuple(value.shape) == bucket.shapes[index]:
                bucket.write(index, value)

    def note_edits(module: nn.Module, incompatible: Any) -> None:
        for bucket, _ in places.values():
            bucket.edits.note()

    module.register_load_state_dict_pre_hook(Hook(write))
    module.register_load_state_dict_post_hook(Hook(note_edits))


def restore_whole(engine: Engine) -> None:
    """Give every rank the full model in its original dtypes, and remove the engine. Collective."""
    for bucket in engine.buckets:
        flat = full_flat(bucket)
        bucket.gather()
        bucket.unguard()
        with torch.no_grad():
            rows = zip(bucket.params, bucket.layout.spans, bucket.original, strict=True)
            for parameter, span, dtype in rows:
                parameter.data = flat[span.lo : span.hi].view(span.shape).to(dtype, copy=True)
    engine.detach()
    engine.offload_manager.rest()  # reading files has started threads
