"""Makes the checkpoints of DeepSpeed's parallel runs beside this file, and what is to be read from them.

Needs DeepSpeed 0.19.8 in an environment of its own; the tests need no DeepSpeed:
``python tests/data/deepspeed_parallel/make.py``. CPU only (gloo). ``autotp_*`` are runs with tensor parallelism.
``universal`` is what DeepSpeed's own ``ds_to_universal.py`` makes of a run, and ``expected.pt`` has the values of one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
TOKENS, WIDTH, HIDDEN = 9, 6, 7
CASES: dict[str, dict[str, Any]] = {
    "autotp_stage1_bf16": {"world": 4, "stage": 1, "bf16": True},
    "autotp_stage3": {"world": 4, "stage": 3},
    "pipe_bf16": {"world": 4, "pipe": True},
}


class Block(nn.Module):
    """Linear layers that are cut by rows, by columns, and in three sub-parameters; an odd size; a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.frozen = nn.Linear(WIDTH, 8, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.close = nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.tanh(q) * k + v)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.close(torch.tanh(self.frozen(x)))
        return nn.functional.cross_entropy(self.head(x).float(), tokens.roll(1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    wide, thin = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}]


SPECS = [
    {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
    {"patterns": [r".*(up|frozen)\.weight$"], "partition_type": "column"},
    {"patterns": [r".*(out|down|close)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*head\.weight$"], "partition_type": "skip"},
]


def start(rank: int, world: int, port: int) -> None:
    import deepspeed

    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def autotp(rank: int, name: str, port: int) -> None:
    import deepspeed

    case = CASES[name]
    start(rank, case["world"], port)
    torch.manual_seed(1)
    model = Block()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": case["stage"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
    }
    if case.get("bf16"):
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(10 + rank // 2)
    for _ in range(3):
        engine.backward(engine(torch.randint(TOKENS, (4,))))
        engine.step()
    engine.save_checkpoint(str(HERE / name), tag="global_step3", client_state={"note": "client state"})


class Tanh(nn.Module):
    """A layer with a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.frozen(self.linear(x)))


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), labels)


def pipe(rank: int, name: str, port: int) -> None:
    """Two stages of a PipelineModule, two data ranks, ZeRO stage 1."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    start(rank, CASES[name]["world"], port)
    torch.manual_seed(1)
    tied = ("embed", nn.Embedding, TOKENS, WIDTH)
    blocks = [LayerSpec(Tanh), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]
    layers = [TiedLayerSpec(*tied), *blocks, TiedLayerSpec(*tied, forward_fn=head)]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform", seed_layers=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(10 + rank % 2)
    batches = iter([(tokens, tokens.roll(1)) for tokens in torch.randint(TOKENS, (6, 4))])
    for _ in range(3):
        engine.train_batch(batches)
    engine.save_checkpoint(str(HERE / name), tag="global_step3", client_state={"note": "client state"})
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, dict[str, Tensor]] = {}
    for key, p in model.named_parameters():
        if p.requires_grad:
            states = {kind: safe_get_full_optimizer_state(p, kind).clone() for kind in ("exp_avg", "exp_avg_sq")}
            found[key] = {"fp32": safe_get_full_fp32_param(p).clone(), **states}
        else:
            found[key] = {"fp32": p.detach().clone()}
    stages: list[Any] = [None] * CASES[name]["world"]
    torch.distributed.all_gather_object(stages, found)
    if rank == 0:
        torch.save({key: value for stage in stages for key, value in stage.items()}, HERE / name / "expected.pt")


def universal(source: Path, target: Path) -> None:
    """Convert a checkpoint with DeepSpeed's script."""
    import deepspeed.checkpoint.ds_to_universal as script

    how = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    paths = ["--input_folder", str(source), "--output_folder", str(target)]
    subprocess.run([sys.executable, script.__file__, *paths, *how], check=True, stdout=subprocess.DEVNULL)


def values_of(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of a universal folder, by the names of parameters and files."""
    found: dict[str, dict[str, Tensor]] = {}
    for file in sorted(folder.glob("zero/*/*.pt")):
        content = torch.load(file, weights_only=False)
        found.setdefault(file.parent.name, {})[file.stem] = content["param"] if isinstance(content, dict) else content
    return found


def main(names: list[str]) -> None:
    for number, name in enumerate(names):
        shutil.rmtree(HERE / name, ignore_errors=True)
        how = pipe if CASES[name].get("pipe") else autotp
        torch.multiprocessing.spawn(how, (name, 29500 + number), nprocs=CASES[name]["world"])
        for script in (HERE / name).rglob("*.py"):
            script.unlink()
        if how is autotp:
            universal(HERE / name / "global_step3", HERE / name / "universal")
        if name == "autotp_stage3":
            torch.save(values_of(HERE / name / "universal"), HERE / name / "expected.pt")
            shutil.rmtree(HERE / name / "universal")
            (HERE / name / "latest_universal").unlink()
    if not sys.argv[1:]:  # of a run without tensor parallelism
        shutil.rmtree(HERE / "stage3_bf16", ignore_errors=True)
        universal(HERE.parent / "deepspeed" / "stage3_bf16" / "global_step4", HERE / "stage3_bf16" / "universal")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
