"""A script of Fabric whose rank 0 ends a few seconds before rank 1; see tests/e2e/test_launchers.py."""

from __future__ import annotations

import time

import lightning as L
import torch
from torch import nn

import lt_zero


def main() -> None:
    strategy = lt_zero.FabricZeroStrategy(stage=2)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = nn.Linear(3, 3)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    fabric.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    time.sleep(6 * fabric.global_rank)  # longer than threads wait between looks at the store, which rank 0 serves
    print(f"rank {fabric.global_rank} ends", flush=True)


if __name__ == "__main__":
    main()
