"""Fine-tune a causal language model of transformers with adapters of peft; the base model is built sharded.

    pip install transformers peft
    torchrun --nproc-per-node 2 examples/lora.py

Only the adapters have gradients, master weights and optimizer states.
"""

from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import lt_zero

ROWS = 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3},
}


def make() -> Any:
    """Make a small Llama; for weights from a hub use ``from_pretrained(...)``."""
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


def main(config: dict[str, Any] = CONFIG, steps: int = 20, folder: str = "lora") -> dict[str, Tensor]:
    """Train, write all weights to the folder in 16 bits, and return them."""
    with lt_zero.Init(config=config):
        base = make()
    model = adapted(base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-4)
    engine, *_ = lt_zero.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()
    for step in range(steps):
        batch = tokens(step, engine.global_rank).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"loss {loss.item():.3f}")
    engine.save_16bit_model(folder)
    return {name: lt_zero.full_master(p) for name, p in model.named_parameters()}


if __name__ == "__main__":
    main()
