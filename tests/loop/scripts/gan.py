"""A generator and a discriminator, an engine each: two backward passes before a step, and one through both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lt_zero as deepspeed

SIZE = 6
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": SIZE,
    "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.5, 0.999], "eps": 1e-8}},
    "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": True},
}


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(5, 17), nn.ReLU(), nn.Linear(17, 9), nn.Tanh())
    return generator, nn.Sequential(nn.Linear(9, 17), nn.LeakyReLU(0.2), nn.Linear(17, 1))


def draw(step: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(SIZE, 9, generator=source) + 1.0, torch.randn(SIZE, 5, generator=source)


def train(config: dict[str, Any]) -> dict[str, Tensor]:
    generator, discriminator = make()
    engine_g, *_ = deepspeed.initialize(model=generator, model_parameters=generator.parameters(), config=config)
    engine_d, *_ = deepspeed.initialize(model=discriminator, model_parameters=discriminator.parameters(), config=config)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(3):
        real, noise = draw(step, torch.distributed.get_rank())
        engine_d.zero_grad()
        engine_d.backward(criterion(engine_d(real), torch.ones(SIZE, 1)))
        fake = engine_g(noise)
        engine_d.backward(criterion(engine_d(fake.detach()), torch.zeros(SIZE, 1)))
        engine_d.step()
        engine_g.zero_grad()
        engine_g.backward(criterion(engine_d(fake), torch.ones(SIZE, 1)))
        engine_g.step()
    both = nn.ModuleDict({"g": generator, "d": discriminator})
    return {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in both.named_parameters()}


def plain(world: int) -> dict[str, Tensor]:
    generator, discriminator = make()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.002, (0.5, 0.999), 1e-8, 0.0) for m in (generator, discriminator)]
    criterion = nn.BCEWithLogitsLoss()
    for step in range(3):
        drawn = [draw(step, rank) for rank in range(world)]
        real, noise = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        ones = torch.ones(len(real), 1)
        discriminator.zero_grad()
        criterion(discriminator(real), ones).backward()
        fake = generator(noise)
        criterion(discriminator(fake.detach()), 0 * ones).backward()
        optimizers[1].step()
        generator.zero_grad()
        criterion(discriminator(fake), ones).backward()
        optimizers[0].step()
    both = nn.ModuleDict({"g": generator, "d": discriminator})
    return {name: p.detach() for name, p in both.named_parameters()}
