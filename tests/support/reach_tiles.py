"""Where the values of ``long_sequences`` are looked for: in layers of a model that stands for one of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lt_zero
from tests.support.reach_engine import Config, Lab, nested

WIDTH, ROWS = 4, 9


def ForCausalLMLoss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:  # noqa: N802
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())


class TinyMLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = TinyMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class TinyCausalLM(nn.Module):
    """With what is public of a causal model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(ROWS, WIDTH), nn.ModuleList(TinyLayer() for _ in range(2))
        self.lm_head, self.loss_function = nn.Linear(WIDTH, ROWS, bias=False), ForCausalLMLoss
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(final_logit_softcapping=None))

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x)
        return logits if labels is None else self.loss_function(logits=logits, labels=labels, **options)


def seen(part: str) -> Callable[[Lab, Config], Any]:
    """The tokens of each call of an ``mlp`` or of the product with the ``loss``'s weight, in a forward of 10 tokens."""

    def look(lab: Lab, config: Config) -> Any:
        torch.manual_seed(0)
        model, sizes = TinyCausalLM(), list[int]()
        wanted = model(tokens := torch.arange(10)[None] % ROWS, labels=tokens)
        with mock.patch.dict(sys.modules, transformers=SimpleNamespace(PreTrainedModel=TinyCausalLM)):
            lt_zero.shard(model, nested(config, lab.folder))
        if part == "mlp":
            model.layers[0].mlp[0].register_forward_hook(lambda module, args, out: sizes.append(args[0].shape[-2]))
        elif part == "loss":
            multiply = Tensor.__matmul__

            def count(left: Tensor, right: Tensor) -> Tensor:
                sizes.append(len(left)) if right.shape == (WIDTH, ROWS) else None
                return multiply(left, right)

            with mock.patch.object(Tensor, "__matmul__", count):
                torch.testing.assert_close(model(tokens, labels=tokens), wanted)
            return sizes
        torch.testing.assert_close(model(tokens, labels=tokens), wanted)
        return sizes

    return look
