"""Adapters (peft) of a causal language model of transformers, which is built sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import lt_zero as deepspeed

STEPS, ROWS = 3, 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def make() -> Any:
    shape = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(1, 37, (ROWS, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def train(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config):
        base = make()
    model = adapted(base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()
    for step in range(STEPS):
        batch = tokens(step, torch.distributed.get_rank())
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
    engine.save_16bit_model(folder)
    saved = torch.load(Path(folder, "pytorch_model.bin"), weights_only=True)
    full = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    assert all(torch.equal(saved[name], value.half()) for name, value in full.items())
    return full


def plain(world: int) -> dict[str, Tensor]:
    model = adapted(make()).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(STEPS):
        for rank in range(world):
            batch = tokens(step, rank)
            (model(input_ids=batch, labels=batch).loss / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}
