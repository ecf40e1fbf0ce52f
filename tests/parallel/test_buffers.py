"""Buffers of modules that their user parallelizes, which are DTensors to torch."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.parallel.buffers import make_plain
from tests.support.lightning_tools import quick, sharded_trainer, single_trainer, trust
from tests.support.matrix import only_rows
from tests.support.parallel_module import BATCH, Module
from tests.support.pool import Pool


class Scaled(nn.Linear):
    """Its output is multiplied by a buffer, and another follows the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.5 + self.weight.detach().mean()
            self.calls += 1
        return super().forward(x) * self.scale


class Buffered(Module):
    sharded = False  # a buffer

    def __init__(self, optimizer: str = "sgd", data: int = 1) -> None:
        super().__init__(optimizer, data)
        torch.manual_seed(1)
        for block in self.blocks:
            block.up, block.down = Scaled(6, 10), Scaled(10, 6)

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.blocks[0].up.weight, DTensor):
            return
        mesh = self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            if self.global_rank % mesh.size() == 1:
                block.up.scale.fill_(9.0)  # rank 0's counts
            # The output of the second layer is multiplied as a DTensor that is a sum already.
            down = RowwiseParallel(output_layouts=Replicate())
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": down})
            assert isinstance(block.up.scale, DTensor)
            if self.sharded:
                block.up.calls = distribute_tensor(torch.zeros(2, dtype=torch.int64), mesh, [Shard(0)])


def _fit(stage: int, path: str, resume: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    config = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": BATCH}
    trainer = sharded_trainer(stage, config=config, max_steps=4 if resume else 2)
    module = Buffered(data=dist.get_world_size() // 2)
    trainer.fit(module, ckpt_path=resume, **trust(False))
    trainer.save_checkpoint(path)
    assert not any(isinstance(buffer, DTensor) for buffer in module.buffers())
    return module.losses, {name: buffer.clone() for name, buffer in module.named_buffers()}


def expected() -> tuple[list[float], dict[str, Tensor]]:
    module = Buffered()
    single_trainer(max_steps=4).fit(module)
    return module.losses, dict(module.named_buffers())


@pytest.mark.parametrize(("ranks", "stage"), only_rows([(2, 3)], itertools.product([2, 4], [1, 3])))
def test_buffers_are_those_of_one_process(pool: Pool, tmp_path: Path, ranks: int, stage: int) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    losses, _ = pool.run(ranks, _fit, stage, one)[0]
    more, buffers = pool.run(ranks, _fit, stage, two, one)[0]
    want, wanted = expected()
    assert losses + more == pytest.approx(want, rel=1e-5)
    assert buffers.keys() == wanted.keys()
    for name, buffer in wanted.items():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-4, atol=1e-6)
    lt_zero.export(two, tmp_path / "weights.pt", dtype=torch.float32)
    assert torch.equal(torch.load(tmp_path / "weights.pt")["blocks.0.up.calls"], wanted["blocks.0.up.calls"])


def _refused() -> str:
    module: Any = Buffered()
    module.sharded = True
    with quick(), pytest.raises(ConfigError) as caught:
        sharded_trainer(1, config={"tensor_parallel": {"autotp_size": 2}}, max_steps=1).fit(module)
    return str(caught.value)


def test_parts_of_a_buffer_are_refused(pool: Pool) -> None:
    for text in pool.run(2, _refused):
        assert "buffer 'blocks.0.up.calls' of shape (2,)" in text


def _forward() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = parallelize_module(Scaled(6, 10), mesh, ColwiseParallel())
    make_plain(module)
    for each in module, copy.deepcopy(module):
        before = {name: (buffer, buffer._version) for name, buffer in each.named_buffers()}
        each(torch.ones(3, 6))
        after = dict(each.named_buffers())
        assert not any(isinstance(buffer, DTensor) for buffer in after.values())
        assert after["scale"] is before["scale"][0]
        assert after["scale"]._version == before["scale"][1]
        assert after["calls"] is before["calls"][0]
        assert after["calls"]._version > before["calls"][1], "changes are looked for by versions"
        assert after["mean"] is not before["mean"][0]
        with pytest.raises(RuntimeError):
            each(torch.ones(3, 7))
        assert not any(isinstance(buffer, DTensor) for buffer in each.buffers()), "after an error, too"


def test_a_module_sees_distributed_buffers_in_its_forward_only(pool: Pool) -> None:
    pool.run(2, _forward)
