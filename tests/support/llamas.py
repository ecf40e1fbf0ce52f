"""Decoders in the manner of Llama, written by hand, with rules that cut them over tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 18, 10, 12, 6, 2, 18  # 2 and 3 ranks divide all but the width


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) + 0.1 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Grouped queries; ``fused``: one weight for queries, keys and values; ``head_norms``: as in Qwen3."""

    def __init__(self, fused: bool, head_norms: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.fused = HEADS, KV_HEADS, fused
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        if fused:
            self.qkv = nn.Linear(WIDTH, q + 2 * kv, bias=False)
        else:
            # A bias of keys has the gradient 0 but for rounding, which Adam would blow up.
            self.q_proj, self.k_proj = nn.Linear(WIDTH, q), nn.Linear(WIDTH, kv, bias=False)
            self.v_proj = nn.Linear(WIDTH, kv)
        self.o_proj = nn.Linear(q, WIDTH)
        self.q_norm, self.k_norm = (RMSNorm(HEAD_DIM) if head_norms else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
            q, k, v = self.qkv(x).split([n * HEAD_DIM for n in heads], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        batch, length, _ = x.shape
        # A size is inferred, so that a wrong number of heads would be silent.
        q = self.q_norm(q.view(batch, length, self.num_heads, -1)).transpose(1, 2)
        k = self.k_norm(k.view(batch, length, self.num_kv_heads, -1)).transpose(1, 2)
        v = v.view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class GatedMLP(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        else:
            self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        result: Tensor = self.down_proj(F.silu(gate) * up)
        return result


class Layer(nn.Module):
    def __init__(self, fused: bool, head_norms: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(fused, head_norms), GatedMLP(fused)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Llama(nn.Module):
    """Returns the loss of the next tokens."""

    def __init__(self, fused: bool = False, head_norms: bool = False, tied: bool = True, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer(fused, head_norms) for _ in range(depth))
        self.norm, self.lm_head = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def rules(fused: bool = False, head_norms: bool = False, vocabulary: bool = True) -> dict[str, Any]:
    """``partition_config`` for such a model."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    specs: list[dict[str, Any]] = [{"patterns": [r".*\.(o_proj|down_proj)\.weight$"], "partition_type": "row"}]
    if fused:
        specs.append({"patterns": [r".*\.qkv\.weight$"], "shape": [[q, kv, kv], -1], "partition_dim": 0})
        specs.append({"patterns": [r".*\.gate_up\.weight$"], "shape": [2, -1]})
    else:
        specs.append({"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.(gate|up)_proj\.weight$"]})
    if head_norms:
        specs.append({"patterns": [r".*\.[qk]_norm\."], "partition_type": "skip", "grad_allreduce": True})
    if vocabulary:
        specs.append({"patterns": ["embed_tokens", "lm_head"], "partition_type": "column"})
    return {"layer_specs": specs, "embedding_partition_dim": 0}
