"""Values that ranks gather: each of them, and equal ones once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lt_zero.core.comm.world import World
from tests.support.pool import Pool

CPU = torch.device("cpu")
VALUES: list[tuple[str, Any]] = [
    ("equal", [{"a": [1, "x"]}] * 3),
    ("different lengths", ["", "x" * 1000, None]),
    ("one that is different", [[1, 2], [1, 2], [3]]),
    ("two of three", [("a", 1), ("b", 2), ("a", 1)]),
    ("zeros", [0, 0.0, False]),
]


def _gathered() -> list[tuple[Any, int, bool]]:
    """What is gathered of each of ``VALUES``, the bytes that are sent with digests, and whether equal ones are one."""
    world, found = World.join(CPU), []
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        for name, values in VALUES:
            sent.reset_mock()
            mine = world.host_gather(values[world.rank], name)
            shared = all(a is b for a in mine for b in mine if type(a) is type(b) and a == b)
            found.append((mine, sum(call.args[0].nbytes for call in sent.call_args_list), shared))
    tensors = world.host_gather({"t": torch.full((2,), world.rank)}, "tensors")
    found.append(([told["t"].tolist() for told in tensors], 0, True))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_values_of_all(pool: Pool, ranks: int) -> None:
    for found in pool.run(ranks, _gathered):
        *rows, (tensors, _, _) = found
        for (name, values), (got, nbytes, shared) in zip(VALUES, rows, strict=True):
            assert got == values[:ranks], name
            assert [type(one) for one in got] == [type(one) for one in values[:ranks]], name
            assert shared, name
            assert (nbytes > 0) is (len(set(map(repr, values[:ranks]))) > 1), name
        assert tensors == [[rank, rank] for rank in range(ranks)]
