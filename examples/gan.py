"""A generator and a discriminator with one engine each: two backward passes before a step, and one through both models.

torchrun --nproc-per-node 2 examples/gan.py
"""

from typing import Any

import torch
from torch import Tensor, nn

import lt_zero

SIZE = 6
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": SIZE,
    "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.5, 0.999]}},
    "zero_optimization": {"stage": 2},
}


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(5, 17), nn.ReLU(), nn.Linear(17, 9), nn.Tanh())
    return generator, nn.Sequential(nn.Linear(9, 17), nn.LeakyReLU(0.2), nn.Linear(17, 1))


def draw(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Real samples of a rank, and noise for as many others."""
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(SIZE, 9, generator=source) / 4 + 0.5, torch.randn(SIZE, 5, generator=source)


def main(config: dict[str, Any] = CONFIG, steps: int = 100) -> dict[str, Tensor]:
    """Train, and return the trained weights of both models."""
    generator, discriminator = make()
    engine_g, *_ = lt_zero.initialize(model=generator, config=config)
    engine_d, *_ = lt_zero.initialize(model=discriminator, config=config)
    criterion = nn.BCEWithLogitsLoss()
    true, false = torch.ones(SIZE, 1, device=engine_d.device), torch.zeros(SIZE, 1, device=engine_d.device)
    for step in range(steps):
        real, noise = (part.to(engine_d.device) for part in draw(step, engine_d.global_rank))
        engine_d.zero_grad()
        engine_d.backward(criterion(engine_d(real), true))
        fake = engine_g(noise)
        engine_d.backward(criterion(engine_d(fake.detach()), false))
        engine_d.step()
        engine_g.zero_grad()
        loss = criterion(engine_d(fake), true)
        engine_g.backward(loss)
        engine_g.step()
    if engine_g.global_rank == 0:
        print(f"loss of the generator: {loss.item():.3f}; mean of what it makes: {fake.mean().item():.3f} (real: 0.5)")
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    return {name: lt_zero.full_master(p) for name, p in both.named_parameters()}


if __name__ == "__main__":
    main()
