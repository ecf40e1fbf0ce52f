"""Write text with a GPT whose weights are larger than the memory that they may take.

    python examples/inference_beyond_memory.py                               # weights of random numbers, one process
    torchrun --nproc-per-node 2 examples/inference_beyond_memory.py          # each rank writes a text of another length
    python examples/inference_beyond_memory.py --weights gpt.pt --share 5    # what train_gpt.py has exported (small)
    python examples/inference_beyond_memory.py --quantize                    # weights rest in 8 bits
    python examples/inference_beyond_memory.py --perplexity 64               # of that many windows of text

Weights are read block by block, rest in files and pass through memory when their block runs; the next block is read
meanwhile. No process ever holds the model.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn import functional as F

import lt_zero
from corpus import Windows, read_text
from generate import PREFIX, sample
from gpt import GPT
from lt_zero.checkpoint.open import open_source


def write_random_weights(folder: Path, vocabulary: int, depth: int, width: int, context: int) -> None:
    """Write a folder as Hugging Face's tools do, one file per block, so that the model is never in memory."""
    files: dict[str, str] = {}
    for number in range(depth):
        state = {
            name.replace("blocks.0.", f"blocks.{number}."): value
            for name, value in GPT(vocabulary, 1, width, context).state_dict().items()
            if name != "head.weight" and (number == 0 or name.startswith("blocks."))
        }
        file = f"block-{number}.safetensors"
        save_file(state, folder / file)
        files |= dict.fromkeys(state, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def own_memory() -> int:
    """Bytes of this process in memory, without file pages, which the system drops when it needs memory."""
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))


def main(arguments: list[str] | None = None) -> str:
    """Write a text, and return it; each rank has its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a state dict, or a folder of Hugging Face's")
    parser.add_argument("--depth", type=int, default=24, help="blocks of the model of random numbers")
    parser.add_argument("--width", type=int, default=512, help="its width")
    parser.add_argument("--context", type=int, default=128, help="bytes the model looks back on")
    parser.add_argument("--share", type=float, default=0.5, help="memory of a node, in sizes of the weights")
    parser.add_argument("--nvme", type=Path, help="a folder on a local disk (default: a temporary one)")
    parser.add_argument("--quantize", action="store_true", help="let weights rest in 8 bits")
    parser.add_argument("--length", type=int, default=16, help="bytes that rank 0 writes; each next rank half as many")
    parser.add_argument("--perplexity", type=int, default=0, metavar="WINDOWS", help="measure it on validation text")
    args = parser.parse_args(arguments)

    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if world > 1:
            dist.broadcast_object_list(shared)  # all ranks use the folder of rank 0
        folder = Path(shared[0])
        weights = args.weights or folder
        if args.weights is None and rank == 0:
            write_random_weights(folder, 256, args.depth, args.width, args.context)
        if world > 1:
            dist.barrier()
        text = write(args, weights, args.nvme or folder, rank, world)
        if world > 1:
            dist.barrier()  # the folder is removed next
    return text


@torch.no_grad()
def perplexity(model: GPT, windows: int) -> float:
    """The perplexity of bytes that the demo does not train on; all ranks read the same."""
    text = Windows(read_text(validation=True), model.context, windows)
    losses = [F.cross_entropy(model(tokens[None])[0].float(), targets) for tokens, targets in text]
    return float(torch.stack(losses).mean().exp())


def write(args: argparse.Namespace, weights: Path, nvme: Path, rank: int, world: int) -> str:
    """Load the model, and continue a prompt."""
    shapes = {name.removeprefix(PREFIX): spec.shape for name, spec in open_source(weights).weights.items()}
    vocabulary, width = shapes["embed.weight"]
    depth = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
    with lt_zero.empty_weights():
        model = GPT(vocabulary, depth, width, args.context)
    nbytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    config = {
        "zero_optimization": {"stage": 3},
        "max_cpu_gb": nbytes * args.share / 1e9,
        "quantize": 8 if args.quantize else None,
    }
    files = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(nvme)}}
    before = own_memory()
    try:
        model = lt_zero.inference(model, config, weights=weights)
    except lt_zero.NotEnoughMemory as error:  # the model is unchanged
        if rank == 0:
            print(f"In memory: {str(error).splitlines()[0]}")
        model = lt_zero.inference(model, config | {"zero_optimization": files}, weights=weights)

    if args.perplexity:
        found = perplexity(model, args.perplexity)
        if rank == 0:
            print(f"perplexity: {found:.4f}")
    length = args.length >> rank
    torch.manual_seed(rank)
    with lt_zero.synced(model):  # ranks write texts of different lengths
        text = sample(model, b"def ", length, temperature=0.8).decode(errors="replace")
    grew = own_memory() - before
    print(
        f"rank {rank}: {text!r}: weights of {nbytes / 1e6:.0f} MB, the process grew by {grew / 1e6:.0f} MB", flush=True
    )
    return text


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout)
    main()
