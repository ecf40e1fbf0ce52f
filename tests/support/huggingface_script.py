"""A run of transformers' Trainer, or of Accelerate's loop, on CPU ranks: ``python -m torch.distributed.run ... JSON``.

With ``runs`` there are several, one after the other, in folders of their names. Rank 0 writes a list of rows (loss,
gradient norm, rate, of each step) to ``rows`` in the folder of the run.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

SIZES = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "head_dim": 6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}


def config(stage: int, folder: Path, configured_optimizer: bool = False, tensor: int = 1) -> dict[str, Any]:
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
    if tensor > 1:
        found["tensor_parallel"] = {"autotp_size": tensor}
    return found


def parallelism(options: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's ``ParallelismConfig`` as an argument, if the run has one."""
    if "parallelism" not in options:
        return {}
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    sizes = dict(options["parallelism"])
    if sizes.get("sp_size", 1) > 1:
        sizes["sp_handler"] = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        )
    return {"parallelism_config": ParallelismConfig(**sizes)}


def data(count: int) -> list[dict[str, Any]]:
    """The same samples on all ranks."""
    import torch

    rows = torch.randint(0, SIZES["vocab_size"], (count, 9), generator=torch.Generator().manual_seed(3))
    found = [{"input_ids": row, "labels": row.clone()} for row in rows]
    for number, sample in enumerate(found):
        sample["labels"][: number % 6] = -100  # prompts: parts of a sequence have other numbers of labels
    return found


def model(options: dict[str, Any]) -> Any:
    """A small Llama, from a folder or drawn, with adapters if asked for."""
    import torch
    import transformers

    torch.manual_seed(0)
    if "pretrained" in options:
        made = transformers.LlamaForCausalLM.from_pretrained(options["pretrained"])
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options.get("sizes", {})))
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
        tensor = options.get("tensor", 1)
        known = {"deepspeed": config(stage, folder, bool(options.get("configured_optimizer")), tensor)}
        known |= parallelism(options)
        known["accelerator_config"] = {"use_configured_state": True}
    decay = 0.0 if options.get("configured_optimizer") else 0.01  # only the Trainer's own leaves out norms
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_steps=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=options.get("accumulation", 1), max_steps=4,
        learning_rate=1e-2, weight_decay=decay, warmup_steps=1, max_grad_norm=0.5, seed=1,
        average_tokens_across_devices=options.get("average_tokens", True),
        bf16=bool(options.get("bf16")), **known,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model(options), args=arguments, train_dataset=data(26))
    trainer.train(resume_from_checkpoint=options.get("resume"))
    trainer.save_model(str(folder / "final"))
    return [row for row in trainer.state.log_history if "loss" in row]


def mend_gather() -> None:
    """Let backwards of ``all_gather`` work in groups without rank 0: over gloo torch 2.13 takes numbers of ranks inside
    of a group for those of all ranks.
    """
    import torch
    import torch.distributed as dist

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, group: Any, value: Any) -> Any:
            context.group = group
            found = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, value.contiguous(), group=group)
            return tuple(found)

        @staticmethod
        def backward(context: Any, *grads: Any) -> Any:
            summed = torch.stack(grads)
            dist.all_reduce(summed, group=context.group)
            return None, summed[dist.get_rank(context.group)]

    functional: Any = import_module("torch.distributed.nn.functional")
    functional.all_gather = lambda value, group: Gather.apply(group, value)  # type: ignore[no-untyped-call]


def weighted(accelerator: Any, net: Any, batch: dict[str, Any]) -> Any:
    """The mean over the tokens of all parts of a sequence, as Accelerate's guide computes it."""
    import torch
    from deepspeed.utils import groups  # type: ignore[import-not-found]

    labels = batch["shift_labels"]
    logits = net(**batch).logits
    loss = accelerator.unwrap_model(net).loss_function(
        logits=logits, labels=None, shift_labels=labels, vocab_size=logits.shape[-1]
    )
    counted = (labels != -100).sum()
    gather = torch.distributed.nn.functional.all_gather
    group = groups._get_sequence_parallel_group()
    losses, counts = (torch.stack(list(gather(value, group=group))) for value in (loss, counted))
    return torch.where(counts > 0, losses * counts, 0.0).sum() / counts.sum().clamp(min=1)


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
        if (tensor := options.get("tensor", 1)) > 1:
            plugin.deepspeed_config["tensor_parallel"] = {"autotp_size": tensor}
        if options.get("parallelism", {}).get("tp_size", 1) > 1:  # Accelerate does not find the batch size then
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        gloo = [InitProcessGroupKwargs(backend="gloo")]
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=gloo, **parallelism(options))
    net = model(options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    # Accelerate steps it once for each rank, also for those that see the same data.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, options.get("decay_after", 4))
    prepared = net, optimizer, torch.utils.data.DataLoader(data(26), batch_size=2), schedule
    net, optimizer, loader, schedule = accelerator.prepare(*prepared)
    rows: list[dict[str, Any]] = []
    losses = []
    for batch in loader:
        with accelerator.accumulate(net):
            loss = weighted(accelerator, net, batch) if "shift_labels" in batch else net(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(net.parameters(), 0.5))
                mean = float(accelerator.reduce(torch.stack(losses).mean(), "mean"))
                losses.clear()
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
    if options.get("ends", True):  # it destroys the process group, so a run after it could not begin
        accelerator.end_training()
    return rows


def main() -> None:
    """Run what the last argument says."""
    options = json.loads(sys.argv[-1])
    folder, stage = Path(options["folder"]), options["stage"]
    if stage is not None:
        import lt_zero

        lt_zero.as_deepspeed()
    mend_gather()
    for name, run in options.get("runs", {"": options}).items():
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        here = folder / name
        here.mkdir(exist_ok=True)
        rows = {"trainer": train, "accelerate": loop}[run["face"]](here, run["stage"], run)
        if os.environ["RANK"] == "0":
            (here / "rows").write_text(json.dumps(rows), encoding="utf-8")
    os._exit(0)  # Accelerate leaves threads of gloo behind, which may abort at the exit


if __name__ == "__main__":
    main()
