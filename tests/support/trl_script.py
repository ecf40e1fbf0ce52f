"""Runs of TRL's trainers on CPU ranks: ``python -m torch.distributed.run ... trl_script.py JSON``.

All trainers that the argument names train one after the other in the same processes. For each of them rank 0 writes a
list of rows (loss, gradient norm and what else was logged, of each step), or the text of its error, to ``rows``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(60)]
SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "head_dim": 6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
STEPS = 3


def write_models(folder: Path) -> None:
    """Write a tokenizer of words, a small Llama (``lm``) and one with a single score (``score``) into a folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["<pad>", "<eos>", "<unk>", "<bos>", *WORDS]
    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = transformers.LlamaConfig(**SIZES, num_labels=1, pad_token_id=0, eos_token_id=1, bos_token_id=3)
    for name, kind in (
        ("lm", transformers.LlamaForCausalLM),
        ("score", transformers.LlamaForSequenceClassification),
    ):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def sentences(count: int, seed: int, longest: int = 6) -> list[str]:
    """Random sentences of 2 to ``longest`` words, the same on all ranks."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=drawn).tolist()
    return [
        " ".join(WORDS[index] for index in torch.randint(0, len(WORDS), (length,), generator=drawn).tolist())
        for length in lengths
    ]


def write_data(folder: Path, count: int = 16) -> None:
    """Write a data set for each trainer: columns of sentences; ``label`` is a truth value.

    They lie in files because ranks that compute log-probabilities in advance share them beside these.
    """
    from datasets import Dataset

    for columns in dict.fromkeys(columns for _, columns, _ in TRAINERS.values()):
        values: dict[str, Any] = {name: sentences(count, seed) for seed, name in enumerate(columns)}
        if "label" in values:
            values["label"] = [number % 3 != 0 for number in range(count)]
        Dataset.from_dict(values).save_to_disk(folder / " ".join(columns))


def reward(completions: list[str], **known: Any) -> list[float]:
    """Numbers that any change of a completion changes."""
    found = []
    for text in completions:
        words = [int(word[1:]) for word in text.split() if word[:1] == "w" and word[1:].isdigit()]
        found.append(sum(word / (place + 7) for place, word in enumerate(words)) / 10)
    return found


PAIRS, PROMPTS = ("prompt", "chosen", "rejected"), ("prompt",)
SHORT = {"max_length": 16}
ROLLOUT: dict[str, Any] = {"max_completion_length": 5, "num_generations": 2}

# Name -> trainer, columns of its data, its arguments.
TRAINERS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "sft": ("SFT", ("text",), SHORT),
    "reward": ("Reward", ("chosen", "rejected"), SHORT),
    "dpo": ("DPO", PAIRS, SHORT),
    "dpo, precomputed": ("DPO", PAIRS, {**SHORT, "precompute_ref_log_probs": True}),
    "kto": ("KTO", ("prompt", "completion", "label"), SHORT),
    "grpo": ("GRPO", PROMPTS, ROLLOUT),
    "grpo, beta": ("GRPO", PROMPTS, {**ROLLOUT, "beta": 0.1}),
    "grpo, not gathered": ("GRPO", PROMPTS, {**ROLLOUT, "beta": 0.1, "ds3_gather_for_generation": False}),
    "grpo, synced": ("GRPO", PROMPTS, {**ROLLOUT, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "rloo": ("RLOO", PROMPTS, {**ROLLOUT, "beta": 0.1}),
}


def config(stage: int) -> dict[str, Any]:
    """A file of DeepSpeed's whose sizes transformers fills."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    zero |= {**dict.fromkeys(keys, "auto"), "stage3_param_persistence_threshold": 0}
    return {**dict.fromkeys(sizes, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": zero}


def train(name: str, told: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The rows of one trainer."""
    import peft
    import torch
    import transformers
    import trl
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from datasets import load_from_disk

    stage, lora = told["stage"], told["lora"]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    known: dict[str, Any] = {}
    if stage is not None:
        PartialState(backend="gloo")
        known = {"deepspeed": config(stage), "accelerator_config": {"use_configured_state": True}}
    kind, columns, options = TRAINERS[name]
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no",
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS, learning_rate=1e-2,
        max_grad_norm=0.5, seed=1, bf16=False, gradient_checkpointing=bool(told.get("checkpointing")),
        **options, **known,
    )  # fmt: skip
    source, of = ("score", "SequenceClassification") if kind == "Reward" else ("lm", "CausalLM")
    source = str(Path(told["models"]) / source)
    made = getattr(transformers, f"AutoModelFor{of}").from_pretrained(source, dtype=torch.float32)
    given: dict[str, Any] = {"reward_funcs": reward} if kind in ("GRPO", "RLOO") else {}
    if lora:
        task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
        given["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(5)
    dataset = load_from_disk(str(Path(told["models"], " ".join(columns))))
    trainer = getattr(trl, f"{kind}Trainer")(
        model=made, args=arguments, train_dataset=dataset, processing_class=tokenizer, **given
    )
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return [row for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    """Run what the last argument says."""
    told = json.loads(sys.argv[-1])
    folder = Path(told["folder"])
    if told["stage"] is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        import lt_zero

        lt_zero.as_deepspeed()
    found: dict[str, Any] = {}
    for name in told["trainers"]:
        try:
            found[name] = train(name, told, folder / name)
        except Exception:
            found[name] = traceback.format_exc()
            traceback.print_exc()
        if os.environ["RANK"] == "0":
            (folder / "rows").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # Accelerate leaves threads of gloo behind, which may abort at the exit


if __name__ == "__main__":
    main()
