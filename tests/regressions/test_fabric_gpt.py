"""Programs of Fabric as litgpt writes them: pretraining, fine-tuning and LoRA of a GPT that is built without values.

The model computes tables in ``reset_parameters``, which assigns them, has an ``_init_weights`` that nothing calls, and
gets its initial values from functions on its modules. Rank 0 generates alone between two steps, with caches that are
added and removed. The reference is the same program under DDP.
"""

from __future__ import annotations

import itertools
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero
from tests.support.lightning_tools import torchrun_env
from tests.support.matrix import only_rows
from tests.support.pool import Pool

VOCAB = 13
WIDTH = 12
HEADS = 2
LENGTH = 8
RANK = 3
MICROS, STEPS = 2, 3


class Adapted(nn.Module):
    """A linear layer with a low-rank update."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.empty(RANK, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, RANK))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x) + x @ self.lora_a.T @ self.lora_b.T
        return made


class Cache(nn.Module):
    """Keys and values of the positions so far."""

    def __init__(self) -> None:
        super().__init__()
        shape = 1, HEADS, LENGTH, WIDTH // HEADS
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape), persistent=False)

    def forward(self, position: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.k.index_copy_(2, position, k), self.v.index_copy_(2, position, v)


class Attention(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        made = Adapted if lora else nn.Linear
        self.qkv, self.proj = made(WIDTH, 3 * WIDTH), made(WIDTH, WIDTH)
        self.cache: Cache | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = (cos * each + sin * each.flip(-1) for each in (q, k))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if position is not None:
            assert self.cache is not None
            k, v = self.cache(position, k, v)
            mask = torch.arange(LENGTH) <= position[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
        made: Tensor = self.proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return made


class Block(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(lora)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.attn(self.norm_1(x), *rest)
        made: Tensor = x + self.mlp(self.norm_2(x))
        return made


class Language(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        layers = {"wte": nn.Embedding(VOCAB, WIDTH), "h": nn.ModuleList(Block(lora) for _ in range(2))}
        self.transformer = nn.ModuleDict({**layers, "ln_f": nn.LayerNorm(WIDTH)})
        self.max_length = LENGTH

    @property
    def max_length(self) -> int:
        return self._max_length

    @max_length.setter
    def max_length(self, value: int) -> None:
        self._max_length = value
        if not hasattr(self, "cos"):
            cos, sin = self.tables()
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        elif value != len(self.cos):
            self.cos, self.sin = self.tables(self.cos.device)

    def tables(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        size = WIDTH // HEADS
        angles = torch.arange(self.max_length, device=device)[:, None] / 10.0 ** torch.arange(size, device=device)
        return angles.cos(), angles.sin()

    def reset_parameters(self) -> None:
        self.cos, self.sin = self.tables(self.cos.device)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=1e-3)

    def forward(self, ids: Tensor, position: Tensor | None = None) -> Tensor:
        chosen = slice(0, ids.shape[1]) if position is None else position
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x, self.cos[chosen].to(x.dtype), self.sin[chosen].to(x.dtype), position)
        made: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return made

    def set_caches(self) -> None:
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            block.attn.cache = Cache()

    def clear_caches(self) -> None:
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            block.attn.cache = None


def _normal(module: Any, std: float) -> None:
    nn.init.normal_(module.weight, std=std)
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def _generate(fabric: Any, model: Any) -> list[int]:
    """Greedy tokens after the first one."""
    model.eval()
    with fabric.init_tensor():
        model.set_caches()
    ids = [1]
    for place in range(LENGTH - 1):
        ids.append(int(model(torch.tensor([[ids[-1]]]), torch.tensor([place]))[0, -1].argmax()))
    model.clear_caches()
    model.train()
    return ids


def _batch(step: int, micro: int, rank: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, VOCAB, (2, LENGTH), generator=made)


def _values(fabric: Any, module: nn.Module) -> dict[str, Tensor]:
    if isinstance(fabric.strategy, lt_zero.FabricZeroStrategy):
        return {name: lt_zero.full_master(p).clone() for name, p in module.named_parameters()}
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _program(fabric: Any, kind: str, start: dict[str, Tensor] | None, alone: bool, path: Path | None = None) -> Any:
    """Train; returns the initial weights, those at the end, and what was generated. ``start``: what is loaded."""
    with fabric.init_module(empty_init=True):
        net = Language(kind == "lora")
    if kind == "pretrain":
        for module in net.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.reset_parameters = partial(_normal, module, std=0.4)  # type: ignore[method-assign]
        for block in net.transformer["h"]:  # type: ignore[attr-defined]
            block.attn.proj.reset_parameters = partial(_normal, block.attn.proj, std=0.05)
    if kind == "lora":
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("lora_" in name)
    net.max_length = LENGTH - 1
    model = fabric.setup(net)
    made: Any = torch.optim.AdamW if kind == "pretrain" else partial(torch.optim.SGD, momentum=0.9)
    optimizer = fabric.setup_optimizers(made([p for p in model.parameters() if p.requires_grad], lr=0.1))
    if start is not None:
        model.load_state_dict(start)
    first = _values(fabric, net)
    model.max_length = LENGTH
    tokens: list[int] = []
    for step in range(STEPS):
        for micro in range(MICROS):
            with fabric.no_backward_sync(model, enabled=micro < MICROS - 1):
                batch = _batch(step, micro, fabric.global_rank)
                loss = F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
                fabric.backward(loss / MICROS)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and (fabric.global_rank == 0 or not alone):
            tokens = _generate(fabric, model)
        fabric.barrier()
    if path is not None:
        fabric.save(path, {"model": model}, filter={"model": lambda name, value: "lora_" in name})
    return first, _values(fabric, net), tokens, net.cos.clone()


def _equals_ddp(kind: str, stage: int, path: Path) -> None:
    os.environ.update(torchrun_env())
    torch.manual_seed(3)
    start = None if kind == "pretrain" else Language(kind == "lora").double().state_dict()
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    keys: dict[str, Any] = {"accelerator": "cpu", "devices": dist.get_world_size(), "precision": "64-true"}
    fabric = L.Fabric(strategy=lt_zero.FabricZeroStrategy(config={"zero_optimization": block}), **keys)
    fabric.launch()
    first, last, tokens, cos = _program(fabric, kind, start, stage < 3, path if kind == "lora" else None)
    if kind == "pretrain":
        assert first["lm_head.weight"].std().item() == pytest.approx(0.4, rel=0.2)
        assert first["transformer.h.1.attn.proj.weight"].std().item() == pytest.approx(0.05, rel=0.2)
    # All ranks generate: DDP sends buffers before a forward in evaluation, too, so one rank would wait for ever.
    ddp = L.Fabric(strategy="ddp", **keys)
    ddp.launch()
    wanted_first, wanted, wanted_tokens, wanted_cos = _program(ddp, kind, first, False)
    assert torch.equal(cos.double(), wanted_cos.double())
    for name, value in first.items():
        assert torch.equal(value, wanted_first[name]), name
    changed = {name for name, value in last.items() if not torch.equal(value, first[name])}
    assert changed == {name for name, value in wanted.items() if kind != "lora" or "lora_" in name}
    for name, value in last.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=name)
    assert fabric.global_rank > 0 or tokens == wanted_tokens


@pytest.mark.parametrize(
    ("kind", "stage"),
    only_rows([("pretrain", 3), ("lora", 2)], itertools.product(["pretrain", "full", "lora"], [2, 3])),
)
def test_a_language_model_is_trained_as_under_ddp(pool: Pool, kind: str, stage: int, tmp_path: Path) -> None:
    pool.run(2, _equals_ddp, kind, stage, tmp_path / "adapters")
