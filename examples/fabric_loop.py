"""Train a small GPT with Lightning Fabric and ZeRO, in a loop of your own.

python examples/fabric_loop.py                                        # 2 processes on the CPU, or every GPU
python examples/fabric_loop.py --stage 2 --precision bf16-mixed
python examples/fabric_loop.py --folder run --steps 200               # saves at the end; run again, it continues
"""

import argparse
from itertools import chain, repeat
from pathlib import Path

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from corpus import Windows, read_text
from gpt import GPT
from lt_zero import FabricZeroStrategy

CONTEXT, MICRO_BATCHES = 64, 2


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--steps", type=int, default=100, help="steps of the whole run")
    parser.add_argument("--folder", type=Path, help="of the checkpoint")
    args = parser.parse_args(arguments)

    strategy = FabricZeroStrategy(stage=args.stage)
    fabric = L.Fabric(strategy=strategy, devices=args.devices, precision=args.precision)
    fabric.launch()
    fabric.seed_everything(0)
    with fabric.init_module():  # at stage 3 sharded while it is built
        model = GPT(256, 2, 64, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    data = Windows(read_text(validation=True), CONTEXT, 4096)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))

    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpoint = args.folder / "last" if args.folder else None
    if checkpoint is not None and checkpoint.exists():
        fabric.load(checkpoint, state)
    loss = torch.zeros(())
    batches = chain.from_iterable(repeat(loader))  # one epoch after another
    for _ in range(MICRO_BATCHES * state["step"]):
        next(batches)
    for step in range(state["step"], args.steps):
        for micro in range(MICRO_BATCHES):
            tokens, targets = next(batches)
            with fabric.no_backward_sync(model, enabled=micro < MICRO_BATCHES - 1):
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
                fabric.backward(loss / MICRO_BATCHES)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            fabric.print(f"step {step}: loss {loss.item():.3f}, gradients {float(norm):.3f}")
    mean = fabric.all_reduce(loss.detach())
    if checkpoint is not None:
        state["step"] = args.steps
        fabric.save(checkpoint, state)
        strategy.export(model, args.folder / "gpt-fp16.pt", dtype="fp16")
    fabric.print(f"loss {float(mean):.3f} after {args.steps} steps")
    return float(mean)


if __name__ == "__main__":
    main()
