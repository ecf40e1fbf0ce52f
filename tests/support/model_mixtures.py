"""Small mixtures of transformers, and their batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH, EXPERTS = 19, 7, 4
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "deepseek_v3": {"n_routed_experts": EXPERTS, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 2, "kv_lora_rank": 4, "q_lora_rank": 4}
    | {"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6},
    "gpt_oss": {"num_local_experts": EXPERTS, "sliding_window": 4},
}


def build(model_type: str, dtype: torch.dtype = torch.float32, how: str = "eager", **keys: Any) -> Any:
    """A causal model in training.

    Args:
        how: its experts are computed (``experts_implementation``).
        keys: of its configuration.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**_SIZES, **OWN.get(model_type, {}), **keys})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=how).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "embed" not in name and "lm_head" not in name:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "gate.w" in name or "router" in name else 0.3))
    return model.train()


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Of other lengths on each rank."""
    drawn = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH + rank), generator=drawn)
    return {"input_ids": ids, "labels": ids}


def causal_loss(model: Any, step: int, rank: int) -> Tensor:
    loss: Tensor = model(**batch(step, rank)).loss
    return loss


def choose(model: Any, expert: int) -> None:
    """Let all tokens go to ``expert``, and the next ones, whatever their scores are."""

    def chosen(router: Any, given: Any, made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, ids = made
        return logits, scores, ((expert + torch.arange(ids.shape[1])) % EXPERTS).expand_as(ids)

    for module in model.modules():
        if type(module).__name__.lower().endswith("router"):
            module.register_forward_hook(chosen)


def same_lengths(model: Any, step: int, rank: int) -> Tensor:
    """The loss of a batch that has as many tokens on each rank."""
    drawn = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=drawn)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss
