"""Reports about a sharded model: tables of units and dtypes, and bytes of model states."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable

from rich.table import Table
from torch import Tensor

from lt_zero.common.console import Console, RunConsole
from lt_zero.common.moment_form import stored_part
from lt_zero.common.tables import show
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.gather import Unit
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer


def unit_table(engine: Engine, console: Console | None = None) -> None:
    """Print the units and their elements (as in the dtype table, without padding), similar units in one row.

    Names come last and are never truncated, since they often differ at the end only.
    """
    rows = [("parameters", "elements", "sharded", "kept after forward", "class", "unit")]
    for cells, group in itertools.groupby([*engine.units, engine.root_unit], key=_cells):
        # First and last name of a unit whose buckets are shared with other units.
        names = [next((b.name for b in unit.buckets if " to " in b.name), unit.name) for unit in group]
        name = names[0] or "(root and small parameters)"
        if len(names) > 1:  # model.layers.0 ... 23 (24)
            block = names[0].rpartition(".")[0] + "."
            last = names[-1] if any(" to " in name for name in names) else names[-1].removeprefix(block)
            name = f"{names[0]} ... {last} ({len(names)})"
        rows.append((*cells, name))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padding = sum(b.layout.numel for b in engine.buckets) - _elements(engine.buckets)
    lines = [f"ZeRO units, {engine.world.size} rank(s)" + (f", and {padding:,} elements of padding" if padding else "")]
    for *numbers, kind, name in rows:
        right = "  ".join(cell.rjust(width) for cell, width in zip(numbers, widths, strict=False))
        lines.append(f"  {right}  {kind.ljust(widths[-2])}  {name}")
    if engine.world.communicators.nbytes:
        lines.append(f"  {engine.world.communicators} are taken of this rank's {engine.device.type} memory")
    if reason := _why_nothing_is_sharded(engine):
        lines.append(reason)
    (console or RunConsole()).print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _why_nothing_is_sharded(engine: Engine) -> str:
    """The reason why every rank of a stage 3 run keeps all parameters, and what to change; "" in all other runs."""
    units = [*engine.units, engine.root_unit]
    if engine.options.stage != 3 or engine.world.size == 1 or any(unit.sharded for unit in units):
        return ""
    largest = max((span.numel for bucket in engine.buckets for span in bucket.layout.spans), default=0)
    threshold = engine.options.param_persistence_threshold
    if largest >= threshold:
        return ""
    return (
        f"No parameter is sharded, since the largest has {largest:,} elements and zero_optimization."
        f"stage3_param_persistence_threshold is {threshold:,}. Every rank keeps all parameters; gradients and "
        "optimizer states are sharded. Lower the threshold to shard the parameters, or use stage 2."
    )


def _elements(buckets: Iterable[Bucket]) -> int:
    return sum(bucket.layout.elements for bucket in buckets)


def _cells(unit: Unit) -> tuple[str, str, str, str, str]:
    return (
        str(sum(len(b.params) for b in unit.buckets)),
        f"{_elements(unit.buckets):,}",
        f"{_elements(unit.sharded):,}",
        "yes" if unit.keep and unit.sharded else "no" if unit.sharded else "-",
        type(unit.module).__name__,
    )


def dtype_table(engine: Engine, console: Console | None = None) -> Table:
    """Print and return the dtypes of compute, reduction, master weights and states per kind of parameter."""
    table = Table(title=f"Precision {engine.policy.mode}")
    for column in ("kind", "elements", "forward", "gradient", "wire", "accum.", "master", "moments"):
        table.add_column(column, justify="right" if column == "elements" else "left")
    kinds: Counter[tuple[str, ...]] = Counter()
    for bucket in engine.buckets:
        kinds[_dtypes(bucket, engine)] += _elements([bucket])
    for (kind, *dtypes), numel in kinds.items():
        table.add_row(kind, f"{numel:,}", *dtypes)
    return show(table, console)


def has_one_dtype(engine: Engine) -> bool:
    """True if all of ``dtype_table`` would be one dtype, as of a run in fp32."""
    return len({dtype for bucket in engine.buckets for dtype in _dtypes(bucket, engine)[1:] if dtype != "-"}) <= 1


def _dtypes(bucket: Bucket, engine: Engine) -> tuple[str, ...]:
    kept = ", kept" if engine.policy.compute not in (None, bucket.dtype) else ""
    dtypes: list[object] = [bucket.dtype]
    if bucket.wants_grad:
        wire, master = bucket.grads.send_dtype(bucket.dtype), bucket.weights.master_dtype
        dtypes += [bucket.dtype, wire, bucket.grads.dtype, master, bucket.storage.moments.name]
    names = [str(d).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp") for d in dtypes]
    return (f"{'trained' if bucket.wants_grad else 'frozen'}{kept}", *names, *["-"] * (6 - len(names)))


def memory_report(engine: Engine, optimizers: list[ShardedOptimizer]) -> dict[str, tuple[int, int]]:
    """Bytes per kind: (on this rank now, of a replicated run).

    Weights include fp32 master weights; gradients are the accumulators, without the two transient reduce buffers.
    """
    weights = grads = states = whole_weights = whole_grads = whole_states = 0
    for bucket in engine.buckets:
        size, held = bucket.layout.elements, bucket.grads
        # The compute copy if it is in memory, and master weights if they are separate.
        weights += bucket.weights.nbytes + (0 if bucket.released else bucket.compute.flat.nbytes)
        whole_weights += size * bucket.dtype.itemsize
        if bucket.weights.trains:
            whole_weights += 0 if held.dtype == bucket.dtype else size * bucket.weights.master_dtype.itemsize
            whole_grads += size * held.dtype.itemsize
        grads += held.nbytes + (held.local.nbytes if held.local is not None else 0)
    for sharded in optimizers:
        # Of whole parameters; of the states of one element.
        elements, nbytes = Counter[Bucket](), defaultdict[Bucket, float](float)
        for parameter in sharded.parameters():
            values = sharded.optimizer.state.get(parameter, {}).values()
            tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
            kept = [stored_part(value) for value in tensors]
            states += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in kept)  # NaN while they are on NVMe
            if id(parameter) in engine.owner:
                bucket, index = engine.owner[id(parameter)]
                elements[bucket] += bucket.layout.spans[index].numel
                for piece in bucket.pieces_of(index):  # none if this rank has no part of it
                    own = sum(k.nbytes for k, t in zip(kept, tensors, strict=True) if t.numel() == piece.numel)
                    nbytes[bucket] = max(nbytes[bucket], own / piece.numel)
        whole_states += int(sum(count * nbytes[bucket] for bucket, count in elements.items()))
    return {
        "weights": (weights, whole_weights),
        "gradients": (grads, whole_grads),
        "optimizer": (states, whole_states),
    }
