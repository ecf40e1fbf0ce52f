"""Advice for users whose ranks ran different modules: keys and contexts of the engine that help."""

from __future__ import annotations

from lt_zero.comm.work import CollectiveId

_RAN = (
    "Every rank has to run the same modules, and the same calls that need all ranks, in the same order: look for a"
    " branch or a loop that depends on the rank or its data. Texts of different lengths: generate with"
    " `synced_gpus=True`, or inside of `lt_zero.gathered(module)` on every rank. Experts that only some ranks call:"
    " name their list in zero_optimization.leaf_module.names."
)


def remedy(one: CollectiveId, other: CollectiveId | None) -> str:
    """Tell the user what to do if ranks ran these two collectives."""
    # Only gathers of weights differ for the reasons below.
    if other is None or not ("all-gather" in one.operation and "all-gather" in other.operation):
        return _RAN
    inside = one.name.rpartition(".")[0]
    if inside and other.name != one.name and other.name.rpartition(".")[0] == inside:
        return (
            f"The ranks called different members of {inside!r}. If the data decides which are called (experts), write"
            f' zero_optimization.leaf_module.names: ["{inside}"], and they are gathered together; otherwise look for a'
            " branch or a loop that depends on the rank."
        )
    return _RAN
