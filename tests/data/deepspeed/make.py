"""Makes the DeepSpeed checkpoints beside this file, and what is to be read from them (``expected.pt``).

Needs DeepSpeed 0.19.8 and Lightning 2.6.6 in an environment of their own; the tests need neither:
``python tests/data/deepspeed/make.py``. CPU only. Expected weights come from DeepSpeed's own ``zero_to_fp32`` where
that reads the kind (else from the parameters as DeepSpeed's API returns them), moments from
``safe_get_full_optimizer_state``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "stage0": {"world": 1, "stage": 0, "dtype": "fp32"},
    "stage1": {"world": 2, "stage": 1, "dtype": "fp32"},
    "stage1_bf16": {"world": 2, "stage": 1, "dtype": "bf16"},  # BF16_Optimizer
    "stage2_bf16": {"world": 3, "stage": 2, "dtype": "bf16"},
    "stage2_fp16": {"world": 2, "stage": 2, "dtype": "fp16", "steps": 14},
    "stage2_elastic": {"world": 2, "stage": 2, "dtype": "fp32", "elastic": True},
    "stage3": {"world": 2, "stage": 3, "dtype": "fp32", "sgd": True},
    "stage3_bf16": {"world": 3, "stage": 3, "dtype": "bf16", "sub_group": 5},
    "lightning_stage2": {"world": 2, "stage": 2, "dtype": "32-true"},
    "lightning_stage3_bf16": {"world": 2, "stage": 3, "dtype": "bf16-true"},
}


class Tiny(nn.Module):
    """A tied weight, a frozen parameter, a parameter of one element, buffers of two dtypes, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.body = nn.Linear(5, 9)
        self.frozen = nn.Linear(9, 5)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.frozen(torch.tanh(self.body(self.embed(tokens)))) * self.gain)
        self.mean += x.detach().mean(0) / 2
        self.calls += 1
        return nn.functional.cross_entropy(self.head(x).float(), tokens.roll(1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    wide, thin = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}]


def config(case: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case["stage"]}
    if "sub_group" in case:
        zero["sub_group_size"] = case["sub_group"]
    if case.get("elastic"):
        zero["elastic_checkpoint"] = True
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if case["dtype"] == "bf16":
        result["bf16"] = {"enabled": True}
        if case["stage"] == 1:
            result["data_types"] = {"grad_accum_dtype": "fp32"}
    if case["dtype"] == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}
    return result


def run(rank: int, name: str, port: int) -> None:
    import deepspeed

    case = CASES[name]
    start(rank, case["world"], port)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    if case["dtype"] == "fp16":  # DeepSpeed refuses it on CPUs, though torch computes it
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(1)
    model = Tiny()
    if case.get("sgd"):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups(model), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups(model), **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(case))
    torch.manual_seed(10 + rank)
    for _ in range(case.get("steps", 4)):
        engine.backward(engine(torch.randint(7, (4,))))
        engine.step()
    engine.save_checkpoint(str(HERE / name), tag="global_step4", client_state={"epoch": 2, "note": "client state"})
    keys = ["momentum_buffer"] if case.get("sgd") else ["exp_avg", "exp_avg_sq"]
    if case["stage"] == 0:
        weights = {key: value.detach().clone() for key, value in model.named_parameters()}
        named = {key: p for key, p in model.named_parameters() if p.requires_grad}
        state = {key: {kind: optimizer.state[p][kind] for kind in keys} for key, p in named.items()}
    else:
        weights, state = gathered(model, engine.optimizer, keys)
    if rank == 0:
        scaler = engine.optimizer.loss_scaler if case["dtype"] == "fp16" else None
        buffers = {key: value for key, value in model.named_buffers() if key != "hidden"}
        if case["stage"] < 3:
            buffers["frozen.weight"] = model.frozen.weight.detach()
        finish(HERE / name, weights, state, buffers, vars(scaler) if scaler is not None else None)


def gathered(
    model: nn.Module, optimizer: Any, keys: list[str]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and moments of the trained parameters, as DeepSpeed's API gathers them. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    relink(optimizer)
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    weights = {key: safe_get_full_fp32_param(p).clone() for key, p in named.items()}
    state = {k: {kind: safe_get_full_optimizer_state(p, kind).clone() for kind in keys} for k, p in named.items()}
    return weights, state


def relink(optimizer: Any) -> None:
    """Let DeepSpeed's API see the moments of stages 1 and 2, which it looked for before the first step made them."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        partitions = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
        for group, partition in partitions:
            lazy_init_hp_params_optimizer_state(group, partition, optimizer.optimizer.state)


def start(rank: int, world: int, port: int) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)


def finish(
    folder: Path,
    weights: dict[str, Tensor],
    state: dict[str, dict[str, Tensor]],
    buffers: dict[str, Tensor],
    scaler: dict[str, Any] | None = None,
) -> None:
    """Write expected.pt; DeepSpeed's converter has the last word on weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = {**buffers, **weights}
    try:
        converted = {k: v.clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items()}
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        print(f"{folder.name}: zero_to_fp32 says {error!r}")
    else:
        for key, value in weights.items():
            assert torch.equal(value.reshape(-1), converted[key].float().reshape(-1)), key
        expected = {**expected, **converted}
    for key in list(expected):
        expected.setdefault(key.replace("embed", "head"), expected[key])  # tied
    plain = {key: value for key, value in (scaler or {}).items() if isinstance(value, (int, float))}
    torch.save({"weights": expected, "state": state, "scaler": plain}, folder / "expected.pt")
    for script in folder.rglob("*.py"):
        script.unlink()


def lightning(rank: int, name: str, port: int) -> None:
    """One epoch with Lightning's DeepSpeedStrategy, which takes GPUs only, though all that it calls runs on CPUs."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    case = CASES[name]

    class OnCpu(DeepSpeedStrategy):
        root_device = torch.device("cpu", 0)

        def setup_environment(self) -> None:
            super(DeepSpeedStrategy, self).setup_environment()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    class Module(pl.LightningModule):
        def __init__(self, width: int = 5) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Tiny()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.net(batch)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(groups(self), **ADAMW)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    start(rank, case["world"], port)
    torch.manual_seed(1)
    strategy = OnCpu(stage=case["stage"], process_group_backend="gloo", logging_batch_size_per_gpu=4)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu", devices=case["world"], strategy=strategy, precision=case["dtype"], max_epochs=1, **quiet
    )
    torch.manual_seed(10)
    loader = torch.utils.data.DataLoader(torch.randint(7, (24,)), batch_size=4)
    module = Module()
    trainer.fit(module, loader)
    folder = HERE / name / "last"
    trainer.save_checkpoint(folder)
    weights, state = gathered(module, trainer.strategy.deepspeed_engine.optimizer, ["exp_avg", "exp_avg_sq"])
    buffers = {key: value for key, value in module.named_buffers() if not key.endswith("hidden")}
    if rank == 0:
        finish(folder, weights, state, buffers)
        (folder / "expected.pt").rename(HERE / name / "expected.pt")
    torch.distributed.barrier()


def main(names: list[str]) -> None:
    for number, name in enumerate(names):
        shutil.rmtree(HERE / name, ignore_errors=True)
        how = lightning if name.startswith("lightning") else run
        torch.multiprocessing.spawn(how, (name, 29700 + number), nprocs=CASES[name]["world"])


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
