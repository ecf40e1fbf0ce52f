"""Pre-training of an encoder: a loop that sets learning rates itself, parameter groups, and a run in two parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero as deepspeed

STEPS, ACCUMULATION, ROWS, LENGTH, WORDS, WIDTH = 4, 3, 2, 9, 31, 16
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": ACCUMULATION,
    "steps_per_print": 100,
    "gradient_clipping": 0.3,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 3000},
}


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 40, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: Tensor, masked: Tensor) -> Tensor:
        hidden = self.words(tokens.masked_fill(masked, 0)) + self.places(torch.arange(LENGTH, device=tokens.device))
        logits = self.decoder(self.encoder(self.norm(hidden)))
        return F.cross_entropy(logits[masked], tokens[masked])


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    masked = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    masked[:, step % LENGTH] = True  # as many on every rank
    return torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator), masked


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    no_decay = ["bias", "norm"]
    return [
        {"params": [p for n, p in named if not any(word in n for word in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(word in n for word in no_decay)], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    return 0.01 * min(1.0, (step + 1) / 3)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Bert()
    # The gradient of a key's bias is zero but for rounding, which a small eps would blow up.
    return model, torch.optim.AdamW(groups(model), lr=0.0, eps=1e-4)


def start(config: dict[str, Any]) -> Any:
    model, optimizer = make()
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[:2]


def train(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    network, optimizer = start(config)
    micros = 0
    for micros in range(STEPS * ACCUMULATION):
        step, micro = divmod(micros, ACCUMULATION)
        if step == STEPS // 2 and micro == 0:
            network.save_checkpoint(folder, client_state={"step": step})
            network, optimizer = start(config)
            path, client = network.load_checkpoint(folder)
            assert path is not None
            assert client == {"step": network.global_steps} == {"step": step}
        loss = network(*batch(step, micro, torch.distributed.get_rank()))
        network.backward(loss)
        if network.is_gradient_accumulation_boundary():
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        network.step()
    return {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in network.module.named_parameters()}


def plain(world: int) -> dict[str, Tensor]:
    model, optimizer = make()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for micro in range(ACCUMULATION):
            for rank in range(world):
                (model(*batch(step, micro, rank)) / (ACCUMULATION * world)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}
