"""float8 linears and quantisation-aware training of torchao: all stages train as DistributedDataParallel does.

``make compat-peers`` runs this at the versions of ``constraints-peers.txt``.

Rounding to few bits makes a whole level of a difference in the last bit. So runs are compared where sums have the same
terms: gradients of two ranks are summed alike by all, stages sum alike on any number of ranks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lt_zero
from lt_zero.training.checkpoints import export_weights
from tests.support.docs_tools import BLOCKS, SmallTrainer, execute
from tests.support.parity import RELEASE, config_of
from tests.support.pool import Pool

KINDS = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "qat", "quantizer"]
GROUP = 32  # of int4 codes; it divides the inputs of a layer
STEPS = 4

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Layers of odd sizes, none of which three ranks share evenly; the head's inputs are no whole groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 51), nn.GELU(), nn.Linear(51, 96), nn.GELU(), nn.Linear(96, 64, bias=False))
            for _ in range(2)
        )
        self.narrow = nn.Linear(64, 33)
        self.head = nn.Linear(33, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.gelu(self.narrow(x)))


def fits(module: nn.Module, name: str = "") -> bool:
    return isinstance(module, nn.Linear) and module.in_features % GROUP == 0


def int4() -> Any:
    """What quantisation-aware training prepares for: activations in 8 bits, weights in groups of 4."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerGroup

    return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(GROUP))


def prepared(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if kind == "qat":
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        quantize_(model, QATConfig(int4(), step="prepare"), fits)
        return model
    if kind == "quantizer":
        from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer

        quantizer: Any = Int8DynActInt4WeightQATQuantizer(groupsize=GROUP)
        return quantizer.prepare(model)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(kind)
    object.__setattr__(config, "emulate", True)  # as recipes have no argument for it; CPUs have no matmul of float8
    return convert_to_float8_training(model, config=config)


def train(kind: str, stage: int | None, file: Path | None = None) -> list[dict[str, Tensor]]:
    """All weights after each step; without a stage those of DistributedDataParallel. The last are exported to ``file``.

    Products with these hyper-parameters are exact: kernels that fuse a product and a sum round as others do.
    """
    model = prepared(kind)
    engine, module = None, model
    if stage is None:
        module = DistributedDataParallel(model)
    else:
        engine = lt_zero.shard(model, config_of(stage, RELEASE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)
    if engine is not None:
        lt_zero.ShardedOptimizer(engine, optimizer)
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, 17, (3, 5), generator=draw)
        F.cross_entropy(module(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with lt_zero.gathered(model):
            found.append({name: value.detach().clone() for name, value in model.named_parameters()})
    if engine is not None:
        if file is not None:
            export_weights(engine, file, dtype="same")
        engine.detach()
    return found


def _as_ddp(kind: str) -> None:
    want = train(kind, None)
    stage_3 = train(kind, 3)
    start = dict(prepared(kind).named_parameters())
    assert all(not torch.equal(start[name], value) for name, value in want[-1].items())
    alike = dist.get_world_size() == 2
    for name, value in want[0].items():
        assert torch.allclose(stage_3[0][name], value, rtol=0, atol=1e-7), name
    for stage in (0, 1, 2):
        got = train(kind, stage)
        for step, weights in enumerate(got):
            for name, value in weights.items():
                assert torch.equal(value, stage_3[step][name]), (stage, step, name)
                assert not alike or torch.equal(value, want[step][name]), (stage, step, name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_ddp(pool: Pool, kind: str, ranks: int) -> None:
    pytest.importorskip("torchao")
    pool.run(ranks, _as_ddp, kind)


def _exported(folder: Path) -> None:
    """What one process converts of a file computes in int4 what the trained model computes in fp32."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import FakeQuantizedLinear, QATConfig

    want = train("qat", None)[-1]
    file = folder / "weights.safetensors"
    train("qat", 3, file)
    dist.barrier()
    trained, model = prepared("qat"), prepared("qat")
    trained.load_state_dict(want)
    model.load_state_dict(load_file(file))
    quantize_(model, QATConfig(int4(), step="convert"), lambda module, _: isinstance(module, FakeQuantizedLinear))
    assert {type(weight).__name__ for weight in model.parameters()} == {"IntxUnpackedToInt8Tensor", "Parameter"}
    ids = torch.arange(15).view(3, 5)
    assert torch.equal(model(ids), trained(ids))


@pytest.mark.timeout(600)
def test_exported_weights_are_converted(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    pool.run(2, _exported, tmp_path)


def _gathered_in_float8() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(Net(), config=config)
    with pytest.raises(lt_zero.ConfigError, match=r"blocks.0.0.weight .* Set enable_fsdp_float8_all_gather=False"):
        lt_zero.shard(model, config_of(3))


def test_weights_that_fsdp2_gathers_in_float8_are_refused(pool: Pool) -> None:
    pytest.importorskip("torchao")
    pool.run(1, _gathered_in_float8)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.marks.get("run by") == "test_torchao"], ids=str)
def test_the_page_runs(block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao.md. CPUs have no matmul of float8."""
    float8 = pytest.importorskip("torchao.float8")
    monkeypatch.setattr(float8, "Float8LinearConfig", partial(float8.Float8LinearConfig, emulate=True))
    monkeypatch.setattr(L, "Trainer", SmallTrainer)
    monkeypatch.chdir(tmp_path)
    execute(block)
