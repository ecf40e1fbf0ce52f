"""Ranks that share a node, and the dimensions in which collectives run: ``communication.topology``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.core.comm.shared_memory import host_identity
from lt_zero.core.comm.transport import Mesh

KEY = "communication.topology"


def node_identity(node: int | None) -> str:
    """A string that ranks of one node have in common.

    Args:
        node: number of the node, as the launcher knows it; None: only what the system tells counts.
    """
    number = os.environ.get("LT_ZERO_NODE_RANK", "" if node is None else str(node))
    return f"{number} {host_identity()}"


def group_by_node(identities: Sequence[Any]) -> list[list[int]]:
    """The ranks of each node, by the first of them."""
    nodes: dict[Any, list[int]] = {}
    for rank, identity in enumerate(identities):
        nodes.setdefault(identity, []).append(rank)
    return list(nodes.values())


def whole_nodes(nodes: Sequence[Sequence[int]]) -> int | None:
    """Number of ranks per node, if it is the same for all nodes and their ranks are consecutive; else None."""
    size = len(nodes[0])
    return size if all(list(node) == list(range(node[0], node[0] + size)) for node in nodes) else None


class Topology(NamedTuple):
    """The dimensions in which a shard group is crossed, innermost first; (): directly. ``why``: for the user."""

    sizes: tuple[int, ...]
    why: str


def choose(wanted: str | int, mesh: Mesh, nodes: list[list[int]], transport: str) -> Topology:
    """The topology of ``communication.topology=wanted``.

    Args:
        mesh: of the ranks.
        nodes: the ranks of each node.
        transport: "gloo", "windows" (all ranks read each other's memory) or the name of a device's backend.

    Raises:
        ConfigError: it cannot be had.
    """
    if transport not in ("gloo", "windows"):
        if wanted in (2, 3):
            text = f"{KEY}={wanted} is for gloo: {transport} finds its own rings and trees between and inside nodes."
            raise ConfigError([Problem(KEY, f"{text} Write 'auto'.")])
        return Topology((), f"{transport} chooses its own")
    needless, problem = _needs_no_nodes(mesh, nodes), _cannot_use_nodes(mesh, nodes)
    sizes: tuple[int, ...]
    if wanted == 3:
        sizes = torus(mesh.shards, 1 if needless or problem else len(nodes[0]))
        return Topology(sizes, f"a torus of {' x '.join(map(str, sizes))} ranks, as configured")
    if wanted == 2 and problem and not needless:
        text = f"{KEY}=2 (ranks of a node, then nodes) cannot be used: {problem}. Write 'auto'."
        raise ConfigError([Problem(KEY, text)])
    if wanted == "auto" and transport == "windows":
        return Topology((), "all ranks share memory")
    if wanted == "auto" and (problem or 1 < len(nodes) == mesh.world) and mesh.shards > 1 and not _inside(mesh, nodes):
        return Topology((mesh.shards,), f"{needless or problem}: all ranks exchange pieces directly")
    if wanted == 1 or needless or problem:
        return Topology((), needless or (problem if wanted == "auto" else "as configured"))
    sizes = (len(nodes[0]), mesh.shards // len(nodes[0]))
    return Topology(sizes, f"{sizes[0]} ranks of a node, then {sizes[1]} nodes: each byte crosses the network once")


def _needs_no_nodes(mesh: Mesh, nodes: list[list[int]]) -> str:
    """Reason why a dimension of nodes would gain nothing; "" if it would gain something."""
    if len(nodes) == 1:
        return "there is one node"
    if len(nodes) == mesh.world:
        return "each node has one rank"
    return "shard groups are inside nodes" if _inside(mesh, nodes) else ""


def _inside(mesh: Mesh, nodes: list[list[int]]) -> bool:
    return mesh.shards <= min(map(len, nodes))


def _cannot_use_nodes(mesh: Mesh, nodes: list[list[int]]) -> str:
    """Reason why a shard group cannot have a dimension of nodes; "" if it can."""
    size = len(nodes[0])
    if any(len(node) != size for node in nodes):
        return f"nodes have different numbers of ranks ({', '.join(str(len(node)) for node in nodes)})"
    if any(node != list(range(node[0], node[0] + size)) for node in nodes):
        return "the ranks of a node are not neighbours"
    if mesh.shards % size:
        return f"shard groups of {mesh.shards} ranks do not consist of whole nodes of {size}"
    return ""


def torus(shards: int, per_node: int) -> tuple[int, int, int]:
    """Three dimensions, innermost first, as equal as they can be; the first is a node if it has several ranks.

    >>> torus(8, 1), torus(16, 4), torus(12, 2), torus(7, 1)
    ((2, 2, 2), (4, 2, 2), (2, 2, 3), (7, 1, 1))
    """
    inner = per_node
    if per_node == 1:  # the divisor nearest to the cube root from above
        inner = next(n for n in range(1, shards + 1) if shards % n == 0 and n**3 >= shards)
    outer = shards // inner
    middle = max(n for n in range(1, math.isqrt(outer) + 1) if outer % n == 0)
    return inner, middle, outer // middle
