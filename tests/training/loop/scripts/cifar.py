"""A convolutional network on images, with a batch of its own making and a loop over ``engine.step``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero as deepspeed

CONFIG: dict[str, Any] = {
    "train_batch_size": 12,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-4, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu"},
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 21)
        self.fc2 = nn.Linear(21, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 3, 32, 32, generator=generator), torch.randint(0, 10, (12,), generator=generator)


def train(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, _, scheduler = deepspeed.initialize(model=net, model_parameters=parameters, config=config)
    assert model_engine.bfloat16_enabled() == model_engine.fp16_enabled() == False  # noqa: E712
    criterion = nn.CrossEntropyLoss()
    size = model_engine.train_micro_batch_size_per_gpu()
    for step in range(4):
        first = torch.distributed.get_rank() * size
        inputs, labels = (part[first : first + size].to(model_engine.device) for part in images(step))
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
        assert model_engine.get_lr() == [0.001]
    model_engine.eval()
    with torch.no_grad():
        assert model_engine(images(0)[0]).shape == (12, 10)
    return {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in net.named_parameters()}


def plain(world: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, betas=(0.8, 0.999), eps=1e-4, weight_decay=3e-7)
    for step in range(4):
        inputs, labels = images(step)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}
