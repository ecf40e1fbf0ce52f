"""Styles of tensor parallelism: no collective of a module waits for its caller."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from lt_zero.parallel.styles import EMBEDDING, GATHERED, ROW, SPLIT, VOCABULARY, style_of
from tests.support.pool import Pool

# Shapes of what a module of each kind gets.
GIVEN = {ROW: (2, 2), SPLIT: (2, 4), GATHERED: (2, 4), VOCABULARY: (2,), EMBEDDING: (2,)}


def _dropped_outputs() -> None:
    mesh, before = init_device_mesh("cpu", (2,)), _get_work_registry_size()
    for kind, shape in GIVEN.items():
        embeds = kind in (VOCABULARY, EMBEDDING)
        module: nn.Module = nn.Embedding(6, 4) if embeds else nn.Linear(4, 4)
        style = style_of(kind)
        assert style is not None
        parallelize_module(module, mesh, style)
        given = torch.ones(shape, dtype=torch.long if embeds else torch.float32)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                module(given)
            assert _get_work_registry_size() == before, kind

        def fail(module: nn.Module, args: object, output: object) -> None:
            raise ValueError("of a hook")

        module.register_forward_hook(fail)
        with pytest.raises(ValueError, match="of a hook"):
            module(given)
        assert _get_work_registry_size() == before, kind


def test_an_output_that_an_error_drops_keeps_no_group(pool: Pool) -> None:
    pool.run(2, _dropped_outputs)
