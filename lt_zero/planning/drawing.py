"""A drawing of the ranks of a mesh: who works on the same layers, and who sees the same data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lt_zero.config.parallel_sizes import ParallelSizes

_ALL = 8  # along an axis of so many ranks all are shown
_FIRST = 3  # of a longer one, and its last


def rank_table(sizes: Mapping[str, int], per_node: int) -> Table:
    """The numbers of ranks: columns along the innermost axis, rows along the others.

    Long axes are abbreviated, so that the drawing of thousands of ranks is no larger than that of ten.

    Args:
        sizes: ranks along each axis by its name, outermost first: neighbours are along the last.
        per_node: ranks of one node.
    """
    *outer, inner = sizes
    table = Table(
        title=f"{math.prod(sizes.values()):,} ranks: {' x '.join(f'{size:,} {axis}' for axis, size in sizes.items())}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    columns, width = list(shown(sizes[inner])), sizes[inner]
    for name in (*outer, *("..." if column is None else f"{inner} {column}" for column in columns), "node"):
        table.add_column(name, justify="right")
    for row in product(*(shown(sizes[axis]) for axis in outer)):
        places = ["..." if place is None else str(place) for place in row]
        if None in row:
            table.add_row(*places, *["..."] * (len(columns) + 1))
            continue
        first = 0
        for axis, place in zip(outer, row, strict=True):
            first = first * sizes[axis] + (place or 0)
        first *= width
        numbers = ["..." if column is None else str(first + column) for column in columns]
        nodes = dict.fromkeys(str(rank // per_node) for rank in (first, first + width - 1))
        table.add_row(*places, *numbers, " to ".join(nodes))
    return table


def shown(size: int) -> Iterator[int | None]:
    """The places along an axis that are shown; None: those between."""
    if size <= _ALL:
        yield from range(size)
        return
    yield from (*range(_FIRST), None, size - 1)


def shares(sizes: ParallelSizes, per_node: int) -> Iterator[str]:
    """Lines of text about the data and layers that ranks of a row, of a column, of a stage, and all ranks share."""
    yield from _shares(sizes, per_node)
    if sizes.expert > 1:
        rows = sizes.expert_rows()[:2].tolist()
        named = " and ".join(map(_shortened, rows))
        yield (
            f"Of each layer's experts a rank has 1/{sizes.expert}. Ranks {named}, and so on, send each other tokens; "
            f"ZeRO shards the experts of a rank over the {sizes.with_experts:,} that have the same."
        )


def _shortened(ranks: list[int]) -> str:
    places = (ranks[place] if place is not None else "..." for place in shown(len(ranks)))
    return f"({', '.join(map(str, places))})"


def _shares(sizes: ParallelSizes, per_node: int) -> Iterator[str]:
    data, tensor, stages = sizes.data, sizes.tensor, sizes.pipeline
    if stages > 1:
        yield (
            f"Ranks of a pipeline have the layers in turn: rank r sends to rank r + {sizes.of_stage:,}, which sees the "
            "same batch."
        )
    same = " of a stage" if stages > 1 else ""
    if sizes.sequence > 1:
        alike = f"Neighbours, {sizes.of_data_rank} at a time, see one batch" if tensor > 1 else "A row sees one batch"
        yield f"{alike}, of which each sequence rank has 1/{sizes.sequence} of the tokens; they exchange attention."
        if tensor == 1:
            yield f"All have the same layers: ZeRO shards them over these {sizes.with_part:,}."
        else:
            yield f"A tensor rank has 1/{tensor} of each layer that is cut, which ZeRO shards over {sizes.with_part:,}."
            yield f"Layers that are not cut are sharded over all {sizes.of_stage:,}."
        return
    if tensor == 1:
        yield f"The ranks{same} have the same layers, and see other batches: ZeRO shards them over these {data:,}."
        return
    yield f"A row sees one batch. Each of its ranks has 1/{tensor} of each layer that is cut; they sum activations."
    yield f"A column{same} has the same part, and sees other batches: ZeRO shards the part over its {data:,} rank(s)."
    yield f"Layers that are not cut are sharded over all {data * tensor:,}{same}."
    if per_node % tensor:
        yield f"The {tensor} tensor ranks do not divide the {per_node} of a node: rows that cross nodes are slow."
