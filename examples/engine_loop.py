"""A training loop of your own around an engine, as in a script for DeepSpeed that imports lt_zero instead.

python examples/engine_loop.py
torchrun --nproc-per-node 2 examples/engine_loop.py --deepspeed_config ds_config.json --folder checkpoints
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lt_zero

EPOCHS = 3
CONFIG: dict[str, Any] = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def make() -> tuple[nn.Module, TensorDataset]:
    """A perceptron, and points whose class is the sign of a product."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 19), nn.ReLU(), nn.Linear(19, 19), nn.ReLU(), nn.Linear(19, 2))
    points = torch.randn(48, 7, generator=torch.Generator().manual_seed(1))
    return model, TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())


def main(arguments: list[str] | None = None) -> dict[str, Tensor]:
    """Train, and return the trained weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="some launchers give it")
    parser.add_argument("--folder", type=Path, help="where a checkpoint is written after each epoch, and looked for")
    args = lt_zero.add_config_arguments(parser).parse_args(arguments)

    model, data = make()
    config = None if args.deepspeed_config else CONFIG
    engine, _, loader, _ = lt_zero.initialize(args, model, training_data=data, config=config)
    assert loader is not None
    done = engine.load_checkpoint(args.folder)[1].get("epochs", 0) if args.folder else 0
    for epoch in range(done, EPOCHS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            loss = F.cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device))
            engine.backward(loss)
            engine.step()  # the optimizer steps after the last micro-batch
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, gradients {engine.get_global_grad_norm():.3f}")
        if args.folder:
            engine.save_checkpoint(args.folder, client_state={"epochs": epoch + 1})
    return {name: lt_zero.full_master(p) for name, p in model.named_parameters()}


if __name__ == "__main__":
    main()
