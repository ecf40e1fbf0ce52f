"""A perceptron, its optimizer and its data from a configuration file, as in a first tutorial."""

from __future__ import annotations

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lt_zero as deepspeed

CONFIG = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
EPOCHS = 3


def make() -> tuple[nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 19), nn.ReLU(), nn.Linear(19, 19), nn.ReLU(), nn.Linear(19, 3))
    data = TensorDataset(torch.randn(48, 7, generator=generator), torch.randint(0, 3, (48,), generator=generator))
    return model, data


def train(arguments: list[str]) -> dict[str, Tensor]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args(arguments)
    deepspeed.init_distributed()

    model, data = make()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data
    )
    assert loader is not None
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            loss = F.cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
    return {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}


def plain(world: int) -> dict[str, Tensor]:
    model, data = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    samplers = [DistributedSampler(data, world, rank) for rank in range(world)]
    size, rates = 24 // 2 // world, (0.0, 0.0, 0.01 * math.log(2) / math.log(3), 0.01)
    step = 0
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for number, batches in enumerate(zip(*(DataLoader(data, size, sampler=s) for s in samplers), strict=True)):
            for inputs, labels in batches:
                (F.cross_entropy(model(inputs), labels) / (2 * world)).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.param_groups[0]["lr"] = rates[min(step, 3)]
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    return {name: p.detach() for name, p in model.named_parameters()}


if __name__ == "__main__":
    print({name: float(value.norm()) for name, value in train(sys.argv[1:]).items()})
