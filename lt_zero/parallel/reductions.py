"""The ranks over which numbers are reduced: those that see other tokens, or other rows.

Note [Parts and whole rows]
    Where sequences are cut, a rank's number may be of its part of the rows (tokens that count), or of whole rows (their
    number), which all ranks of a sequence have alike. A sum over ranks is of the parts in the first case, and of data
    ranks in the second. Values do not tell which it is, as parts may happen to have equal ones. So nothing is guessed:
    the call gives the group, by ``part_group`` or ``row_group``. A mean counts all ranks alike, so that values that
    ranks of a sequence have alike, such as those of ``token_mean``, stay as they are.
"""

from __future__ import annotations

from typing import Any

from lt_zero.core import division
from lt_zero.core.comm.process_groups import exists
from lt_zero.parallel.mesh import ParallelMesh

SIZE = "sequence_parallel_size"
_METRICS = {"sum": "SumMetric", "min": "MinMetric", "max": "MaxMetric"}


def _mesh() -> ParallelMesh | None:
    """The mesh of the run that this process has joined last; None: all ranks see other rows, or it is over."""
    run = division.current()
    mesh = run.find(ParallelMesh) if run is not None else None
    return mesh if mesh is not None and exists(mesh.token_group) else None


def part_group() -> Any:
    """The process group of the ranks that see other tokens than this one, for a value of this rank's part of rows.

    For ``self.log(..., sync_dist_group=part_group())``, ``fabric.all_reduce(..., group=part_group())`` and
    torch.distributed. None, which means all ranks, where no ranks see the same tokens.
    """
    mesh = _mesh()
    return mesh.token_group if mesh is not None else None


def row_group() -> Any:
    """The process group of the ranks that see other rows than this one, for a value of whole rows (their number).

    Where sequences are not cut over ranks it has the ranks of ``part_group``.
    """
    mesh = _mesh()
    return mesh.data_group if mesh is not None else None


def group_of_reduction(mesh: ParallelMesh, reduce_op: Any) -> Any:
    """The process group of a reduction for which a script has given none; None: all ranks.

    Raises:
        ValueError: it is no mean, and sequences are cut. See Note [Parts and whole rows].
    """
    kind = getattr(reduce_op, "op", reduce_op)  # torch's operations have a kind, and kinds a name
    operation = str(getattr(kind, "name", kind) or "mean").lower()
    if mesh.sequence is None or operation in ("mean", "avg"):
        return mesh.token_group
    metric = _METRICS.get(operation, "SumMetric")
    raise ValueError(
        f"{SIZE}={mesh.sizes.sequence}: a {operation} over ranks needs to know whether each rank's value is of its "
        "part of the rows or of whole rows, which the value does not tell. Write "
        "self.log(..., sync_dist_group=lt_zero.parallel.part_group()) for a value of a part, such as a number of "
        "tokens, and row_group() for one of whole rows, such as their number (fabric.all_reduce: group=...). Or log "
        f"lt_zero.parallel.token_mean(values, mask), or a torchmetrics.{metric}, which counts parts."
    )
