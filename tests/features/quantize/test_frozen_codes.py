"""Adapters on frozen weights that rest, and are gathered, in 8 or 4 bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lt_zero
from lt_zero import ConfigError, ZeroConfig
from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.config.options import engine_options
from lt_zero.config.precision import dtype_policy
from lt_zero.core.ask import adapted
from lt_zero.core.engine.full_values import full_parameters
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import plan_engine
from lt_zero.features import features_of
from lt_zero.features.quantize.feature import warn_of_blocks
from lt_zero.features.quantize.nf4 import NF4, RESTING
from lt_zero.kernels.codecs import INT8
from lt_zero.planning.check import measured
from lt_zero.planning.forecast import WEIGHTS
from tests.support.matrix import cover, only_rows
from tests.support.parity import OPTIMIZERS, RELEASE, config_of
from tests.support.pool import Pool

WIDTH, RANK = 33, 3


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as peft names them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(Adapted(WIDTH, 65), nn.GELU(), Adapted(65, WIDTH)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embedding.weight)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def decode(model: nn.Module, bits: int) -> nn.Module:
    """Replace frozen weights by what is decoded of them alone, encoded in the dtype in which they are."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = RESTING[bits].decoded(parameter.data.flatten()).view_as(parameter)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    ids = torch.randint(0, 17, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(-1, 1).flatten())


def trained(model: nn.Module, optimizer: str, dtype: torch.dtype | None, zero: dict[str, Any], **keys: Any) -> Any:
    """The engine after three steps, and all full values."""
    engine = lt_zero.shard(model, config_of(3, zero, dtype, **keys))
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    lt_zero.ShardedOptimizer(engine, made)
    for step in range(3):
        loss_of(model, step, dist.get_rank()).backward()
        made.step()
        made.zero_grad()
    return engine, {name: value.clone() for name, _, value in full_parameters(engine)}


def _equal_training(bits: int, optimizer: str, low: bool, zero: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if low else None
    engine, got = trained(net(), optimizer, dtype, zero, quantize=bits)
    _, want = trained(decode(net(), bits), optimizer, dtype, zero)
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name].float(), want[name].float()), name
    before = dict(net().named_parameters())
    assert all(not torch.equal(got[name].float(), before[name]) for name in got if "lora" in name)
    assert any("lora" in name for name in got)
    if not zero.get("offload_param"):
        rows = [bucket for bucket in engine.buckets if not bucket.wants_grad]
        assert len(rows) == 3, "the embedding, and a bucket for each block"
        kept = sum(RESTING[bits].nbytes(bucket.layout.shard_numel) for bucket in rows)
        assert measured(engine)[WEIGHTS] == kept
    engine.detach()


PLACES: dict[str, dict[str, Any]] = {
    "device": RELEASE,
    "host": {**RELEASE, "offload_param": {"device": "cpu"}},
    "files": {**RELEASE, "offload_param": {"device": "nvme"}},
}


@pytest.mark.parametrize(
    ("world", "bits", "optimizer", "low", "place"),
    only_rows(
        [(2, 4, "adamw", False, "device")],
        itertools.product([1, 2, 3], [8, 4], ["sgd", "adamw"], [False, True], PLACES),
    ),
)
def test_adapters_train_as_on_decoded_weights(
    pool: Pool, tmp_path: Path, world: int, bits: int, optimizer: str, low: bool, place: str
) -> None:
    zero = dict(PLACES[place])
    if place == "files":
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    pool.run(world, _equal_training, bits, optimizer, low, zero)


def _one_process(bits: int, optimizer: str, world: int) -> dict[str, Tensor]:
    model = decode(net(), bits)
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        (sum(loss_of(model, step, rank) for rank in range(world)) / world).backward()  # type: ignore[union-attr]
        made.step()
        made.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _same_as_one_process(bits: int, optimizer: str) -> None:
    _, got = trained(net(), optimizer, None, RELEASE, quantize=bits)
    for name, value in _one_process(bits, optimizer, dist.get_world_size()).items():
        assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(("world", "bits", "optimizer"), cover([2, 3], [8, 4], ["sgd", "adamw"])[:2])
def test_training_is_that_of_one_process(pool: Pool, world: int, bits: int, optimizer: str) -> None:
    pool.run(world, _same_as_one_process, bits, optimizer)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def _loop(folder: Path, saves: bool) -> dict[str, Tensor]:
    model = net()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "quantize": 4, "bf16": {"enabled": True}}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = lt_zero.initialize(model=model, optimizer=optimizer, config=config)
    if not saves:
        codes = {name: value.clone() for name, _, value in full_parameters(engine.engine)}
        with lt_zero.gathered(model):
            shown = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value * 0.3 for name, value in shown.items()})
        model.load_state_dict(shown)
        for name, _, value in full_parameters(engine.engine):
            assert torch.equal(value, codes[name]), f"{name} is swapped, and comes back with its code and scale"
        with torch.no_grad(), lt_zero.gathered(model, write=True):
            for parameter in model.parameters():
                parameter.mul_(0.5)
        engine.load_checkpoint(str(folder))
    engine.backward(loss_of(engine, 0, 0))
    if not saves:
        return {name: value.clone() for name, _, value in full_parameters(engine.engine)}
    engine.step()
    engine.save_checkpoint(str(folder))
    return {name: value.clone() for name, _, value in full_parameters(engine.engine)}


def test_a_resume_on_other_ranks_has_the_same_codes(pool: Pool, tmp_path: Path) -> None:
    saved, *_ = pool.run(2, _loop, tmp_path, True)
    want = dict(decode(net(), 4).named_parameters())
    for name, value in saved.items():
        assert "base_layer" not in name or torch.equal(value, want[name]), "encoded as they were given, in fp32"
    for loaded in pool.run(3, _loop, tmp_path, False):
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), name


# ---- what is refused -----------------------------------------------------------------------------------------------


def _unfreezes() -> None:
    model = net()
    engine = lt_zero.shard(model, config_of(3, RELEASE, quantize=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    model.blocks[1][0].base_layer.weight.requires_grad_(True)
    loss = loss_of(model, 1, 0)
    with pytest.raises(ConfigError, match="quantize: blocks.1 has parameters that require gradients") as caught:
        loss.backward()
    assert [problem.key for problem in caught.value.problems] == ["quantize"]


def test_an_unfrozen_weight_is_refused_on_all_ranks(pool: Pool) -> None:
    pool.run(2, _unfreezes)


def test_weights_that_cannot_rest_encoded_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantize=4 .* not sharded at stage 2"):
        lt_zero.shard(net(), config_of(2, quantize=4))
    with pytest.raises(ConfigError, match="quantize=8 .* no frozen parameter of at least 0 elements"):
        lt_zero.shard(net().requires_grad_(True), config_of(3, quantize=8))
    with pytest.raises(ConfigError, match="quantize"):
        config_of(3, quantize=2)
    with pytest.raises(ConfigError, match="zero_hpz_partition_size=2 keeps a second copy"):
        config_of(3, {"zero_hpz_partition_size": 2}, quantize=4)
    with pytest.warns(UserWarning, match=r"zero_quantized_nontrainable_weights \(with quantize=8"):
        config_of(3, {"zero_quantized_nontrainable_weights": True}, quantize=8)


def _options(config: ZeroConfig, training: bool = True) -> EngineOptions:
    return adapted(engine_options(config, dtype_policy(config, "bf16-mixed")), features_of(config), training)


def test_weights_rest_in_the_codec_of_their_bits() -> None:
    assert _options(config_of(3, quantize=8)).resting is INT8
    assert _options(config_of(3, quantize=4)).resting is NF4


def test_no_wider_weights_are_kept_in_inference() -> None:
    found = [_options(config_of(3, quantize=8), training).dtypes.low_master for training in (True, False)]
    assert found == [False, True]


def test_parts_that_cut_through_blocks_are_named() -> None:
    """A resume on another number of tensor or expert ranks rounds them again."""
    parts = {"rows": ((6, 64), (2, 64)), "columns": ((4, 128), (4, 64)), "few": ((6, 40), (2, 40))}
    specs = [ParamSpec(f"0.{name}", whole, Box((0, 0), sizes)) for name, (whole, sizes) in parts.items()]
    for bits, text in ((4, r"\[0:2, 0:40\] of '0.few' \(6, 40\) cuts .* 64 elements"), (8, "'0.columns'.* 2 others")):
        model = nn.ParameterDict({name: torch.zeros(sizes) for name, (_, sizes) in parts.items()})
        model.requires_grad_(False)
        config = config_of(3, quantize=bits)
        plan = plan_engine(nn.Sequential(model), _options(config), 2, specs)
        with pytest.warns(UserWarning, match=text):
            warn_of_blocks(plan, bits)


@pytest.mark.parametrize("library", ["bitsandbytes.nn.modules", "torchao.dtypes"])
def test_codes_of_other_libraries_are_refused_by_name(library: str) -> None:
    kind = type("Params4bit", (nn.Parameter,), {"__module__": library})
    model = net()
    model.blocks[0][0].base_layer.weight = kind(torch.zeros(5, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match=rf"blocks.0.0.base_layer.weight.* Params4bit of {library.partition('.')[0]}"):
        lt_zero.shard(model, config_of(3))


def test_weights_that_fsdp2_gathers_in_float8_are_refused_with_the_remedy() -> None:
    kind = type("WeightWithDynamicFloat8CastTensor", (nn.Parameter,), {"__module__": "torchao.float8.fsdp_utils"})
    model = net()
    model.blocks[0][0].base_layer.weight = kind(torch.zeros(5))
    with pytest.raises(ConfigError, match=r"blocks.0.0.base_layer.weight.* Set enable_fsdp_float8_all_gather=False"):
        lt_zero.shard(model, config_of(3))
