"""examples/gan.py, and plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gan as example

CONFIG, STEPS = example.CONFIG, 3


def train(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    config["optimizer"]["params"]["eps"] = 1e-4  # a small one blows up the rounding of small gradients
    return example.main(config, STEPS)


def plain(world: int) -> dict[str, Tensor]:
    generator, discriminator = example.make()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.002, (0.5, 0.999), 1e-4, 0.0) for m in (generator, discriminator)]
    criterion = nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        drawn = [example.draw(step, rank) for rank in range(world)]
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
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    return {name: p.detach() for name, p in both.named_parameters()}
