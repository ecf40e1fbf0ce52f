"""``lt_zero.inference`` over tensor ranks: outputs and weights are those of one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import lt_zero
from lt_zero.common.errors import CheckpointError
from lt_zero.core.engine.guard import owner_of
from lt_zero.planning.check import measured
from lt_zero.planning.forecast import WEIGHTS
from tests.support.features import needs, skip_without
from tests.support.lightning_tools import FULL, sharded_trainer
from tests.support.llamas import Llama, rules
from tests.support.matrix import only, only_rows
from tests.support.parallel_module import Module, Rows
from tests.support.parallel_nets import Net, all_weights, batch, parallelize
from tests.support.plans import tokens
from tests.support.pool import Pool

BF16 = {"bf16": {"enabled": True}}
DTYPES = [torch.float32, torch.bfloat16]


def config_of(stage: int, tensor: int, rest: str | None = None, **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if rest is not None:
        zero["offload_param"] = {"device": "cpu"} if rest == "cpu" else {"device": "nvme", "nvme_path": rest}
    block = {"autotp_size": tensor, "partition_config": rules(fused=True, head_norms=True)}
    return {"zero_optimization": zero, "tensor_parallel": block, **keys}


def llama() -> Llama:
    """With fused weights, an embedding that is cut and tied, and norms of the heads of a rank."""
    return Llama(fused=True, head_norms=True)


def _outputs(tensor: int, config: dict[str, Any], file: str | None, dtype: torch.dtype) -> None:
    data = dist.get_rank() // tensor
    with torch.no_grad():
        want = [llama().to(dtype)(tokens(step, data)) for step in range(3)]
        if file is None:
            model = llama()
        else:
            with lt_zero.empty_weights():
                model = llama()
        lt_zero.inference(model, config, weights=file)
        assert isinstance(model.lm_head.weight, DTensor)
        assert model.lm_head.weight is model.embed_tokens.weight
        assert not model.training
        for step in range(3):
            close = {} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
            torch.testing.assert_close(model(tokens(step, data)), want[step], **close)
    whole = llama().state_dict()
    engine: Any = owner_of(model.norm.weight)
    for name, value in all_weights(engine).items():
        assert torch.equal(value, whole[name].to(dtype)), name
    found = measured(engine)
    # What rests here is this rank's share of all ranks', apart from padding: 8 elements for each parameter and rank.
    numel = sum(p.numel() for p in llama().parameters()) // dist.get_world_size()
    if WEIGHTS in found and config["zero_optimization"]["stage"] == 3:
        assert found[WEIGHTS] < (numel + 8 * len(whole)) * dtype.itemsize


@pytest.mark.parametrize(
    ("ranks", "stage", "place", "saved", "dtype"),
    only_rows(
        [
            ((2, 2), 0, "device", False, torch.bfloat16),
            ((3, 3), 3, "cpu", False, torch.float32),
            ((2, 2), 3, "files", True, torch.bfloat16),
        ],
        [
            *itertools.product([(2, 2), (4, 2), (3, 3)], [0], ["device"], [False, True], DTYPES),
            *itertools.product([(2, 2), (4, 2), (3, 3)], [3], ["device", "cpu", "files"], [False, True], DTYPES),
        ],
    ),
)
def test_outputs_and_weights_are_those_of_one_process(
    pool: Pool, tmp_path: Path, ranks: tuple[int, int], stage: int, place: str, saved: bool, dtype: torch.dtype
) -> None:
    if place != "device":
        skip_without("offload")
    world, tensor = ranks
    torch.save(llama().state_dict(), tmp_path / "llama.pt")
    rest = {"device": None, "cpu": "cpu", "files": str(tmp_path / "rest")}[place]
    config = config_of(stage, tensor, rest, **(BF16 if dtype == torch.bfloat16 else {}))
    pool.run(world, _outputs, tensor, config, str(tmp_path / "llama.pt") if saved else None, dtype)


class Mpu:
    """Megatron's, of which DeepSpeed's scripts have one."""

    def get_model_parallel_world_size(self) -> int:
        return 2


def _built_sharded() -> None:
    config = config_of(3, 2)
    with pytest.raises(ValueError, match=r"mpu=.*size of 2, and tensor_parallel\.autotp_size=1 is configured"):
        lt_zero.Init(mpu=Mpu())
    with lt_zero.Init(config=config, mpu=Mpu()):
        model = llama()
    lt_zero.inference(model, config)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(0, 0)), llama()(tokens(0, 0)))


def test_a_module_that_was_built_sharded(pool: Pool) -> None:
    pool.run(2, _built_sharded)


def _in_8_bits(file: str) -> float:
    with torch.no_grad():
        want = llama()(tokens(0, 0))
        with lt_zero.empty_weights():
            model = llama()
        lt_zero.inference(model, config_of(3, 2, quantize=8), weights=file)
        return float((model(tokens(0, 0)) - want).abs() / want)


@needs("quantize")
def test_weights_in_8_bits(pool: Pool, tmp_path: Path) -> None:
    torch.save(llama().state_dict(), tmp_path / "llama.pt")
    for far in pool.run(2, _in_8_bits, str(tmp_path / "llama.pt")):
        assert 0 < far < 0.02


def _by_hand() -> None:
    """A module that its user has parallelized, whose data ranks run different numbers of forwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data = dist.get_rank() // 2
    config: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    model = parallelize(Net(), mesh["tensor"])
    lt_zero.inference(model, {**config, "tensor_parallel": {"autotp_size": 2}})
    with torch.no_grad():
        for counts in ((3, 1), (0, 2)):
            with lt_zero.synced(model):
                for step in range(counts[data]):
                    torch.testing.assert_close(model(batch(step, data)), Net()(batch(step, data)))


def test_a_parallelized_module_and_other_numbers_of_forwards(pool: Pool) -> None:
    pool.run(4, _by_hand)


def _wrong(file: str) -> str:
    model = llama()
    with pytest.raises(CheckpointError) as caught:
        lt_zero.inference(model, config_of(3, 2), weights=file)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "the module is unchanged"
    return str(caught.value)


def test_weights_of_another_model(pool: Pool, tmp_path: Path) -> None:
    state = llama().state_dict()
    state["norm.weight"] = torch.zeros(3)
    torch.save(state, tmp_path / "llama.pt")
    for text in pool.run(2, _wrong, str(tmp_path / "llama.pt")):
        assert "norm.weight has the shape [3], the module needs [10]" in text


class Predicts(Module):
    def predict_step(self, rows: Tensor, index: int) -> Tensor:
        return self(rows)

    def predict_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(), batch_size=8)


def _predicts(stage: int) -> Tensor:
    trainer = sharded_trainer(stage, config={"tensor_parallel": {"autotp_size": 2}, **FULL})
    found = trainer.predict(Predicts(data=dist.get_world_size() // 2))
    assert found is not None
    return torch.cat([rows for rows in found if isinstance(rows, Tensor)])


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_a_trainer_predicts(pool: Pool, stage: int) -> None:
    with torch.no_grad():
        want = Predicts()(torch.stack([Rows()[index] for index in range(len(Rows()))]))
    first, _, second, _ = pool.run(4, _predicts, stage)
    torch.testing.assert_close(torch.stack([first, second], 1).flatten(0, 1), want)
