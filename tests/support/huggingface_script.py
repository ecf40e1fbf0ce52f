"""A run of transformers' Trainer, or of Accelerate's loop, on CPU ranks: ``python -m torch.distributed.run ... JSON``.

Rank 0 writes a list of rows (loss, gradient norm, rate, of each step) to ``rows`` in the folder of the run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SIZES = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "head_dim": 6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}


def config(stage: int, folder: Path, configured_optimizer: bool = False) -> dict[str, Any]:
    """A file as articles have it: what the Trainer knows is "auto"; events go to ``folder/events``."""
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": stage, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    found: dict[str, Any] = {**dict.fromkeys(sizes, "auto"), "zero_optimization": zero | dict.fromkeys(keys, "auto")}
    found |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "initial_scale_power": 8}}
    found["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "events"}
    if configured_optimizer:
        found["optimizer"] = {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
        }
    return found


def data(count: int) -> list[dict[str, Any]]:
    """The same samples on all ranks."""
    import torch

    rows = torch.randint(0, SIZES["vocab_size"], (count, 9), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def model(options: dict[str, Any]) -> Any:
    """A small Llama, from a folder or drawn, with adapters if asked for."""
    import torch
    import transformers

    torch.manual_seed(0)
    if "pretrained" in options:
        made = transformers.LlamaForCausalLM.from_pretrained(options["pretrained"])
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if options.get("lora"):
        import peft

        torch.manual_seed(5)
        made = peft.get_peft_model(made, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return made


def train(folder: Path, stage: int | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """``Trainer.train``, and ``save_model`` to ``folder/final``."""
    import transformers

    known: dict[str, Any] = {}
    if stage is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import PartialState

        PartialState(backend="gloo")  # without a GPU Accelerate has no default
        known = {"deepspeed": config(stage, folder, bool(options.get("configured_optimizer")))}
        known["accelerator_config"] = {"use_configured_state": True}
    decay = 0.0 if options.get("configured_optimizer") else 0.01  # only the Trainer's own leaves out norms
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_steps=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=options.get("accumulation", 1), max_steps=4,
        learning_rate=1e-2, weight_decay=decay, warmup_steps=1, max_grad_norm=0.5, seed=1,
        bf16=bool(options.get("bf16")), **known,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model(options), args=arguments, train_dataset=data(26))
    trainer.train(resume_from_checkpoint=options.get("resume"))
    trainer.save_model(str(folder / "final"))
    return [row for row in trainer.state.log_history if "loss" in row]


def loop(folder: Path, stage: int | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Accelerate's loop, with a save and a load of the state."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    gas = options.get("accumulation", 1)
    if stage is None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gas)
    else:
        plugin = DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=gas, gradient_clipping=0.5, zero3_save_16bit_model=True
        )
        plugin.deepspeed_config["csv_monitor"] = config(stage, folder)["csv_monitor"]
        gloo = [InitProcessGroupKwargs(backend="gloo")]
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=gloo)
    net = model(options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    prepared = net, optimizer, torch.utils.data.DataLoader(data(26), batch_size=2), schedule
    net, optimizer, loader, schedule = accelerator.prepare(*prepared)
    rows: list[dict[str, Any]] = []
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(net.parameters(), 0.5))
                mean = float(accelerator.reduce(loss.detach(), "mean"))
                rows.append({"loss": mean, "grad_norm": norm, "learning_rate": optimizer.param_groups[0]["lr"]})
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if len(rows) == 2 and accelerator.sync_gradients:
            accelerator.save_state(str(folder / "state"))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(folder / "state"))
    weights = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.save(weights, folder / "weights.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return rows


def main() -> None:
    """Run what the last argument says."""
    options = json.loads(sys.argv[-1])
    folder, stage = Path(options["folder"]), options["stage"]
    if stage is not None:
        import lt_zero

        lt_zero.as_deepspeed()
    rows = {"trainer": train, "accelerate": loop}[options["face"]](folder, stage, options)
    if os.environ["RANK"] == "0":
        (folder / "rows").write_text(json.dumps(rows), encoding="utf-8")
    os._exit(0)  # Accelerate leaves threads of gloo behind, which may abort at the exit


if __name__ == "__main__":
    main()
