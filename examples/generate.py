"""Write text with a trained GPT: `python generate.py FILE`, where FILE is a state dict that train_gpt.py exported.

It imports torch and gpt.py and nothing else: an exported file needs neither lt_zero nor Lightning.
"""

import argparse
import sys
from pathlib import Path

import torch

from gpt import GPT

PREFIX = "gpt."  # the model's attribute name in the LightningModule that was exported


def load(path: Path, context: int) -> GPT:
    """Rebuild the model from a file; its shape is read off the weights' shapes."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    # fp32, because CPUs are slow at fp16.
    weights = {name.removeprefix(PREFIX): weight.float() for name, weight in state.items() if name.startswith(PREFIX)}
    vocabulary, width = weights["embed.weight"].shape
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    model = GPT(vocabulary, depth, width, context)
    model.load_state_dict(weights)
    return model.eval()


@torch.inference_mode()
def sample(model: GPT, prompt: bytes, length: int, temperature: float) -> bytes:
    """Continue `prompt` by `length` bytes, drawn one at a time."""
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(tokens[:, -model.context :])[:, -1]
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
        tokens = torch.cat((tokens, drawn), dim=1)
    return bytes(tokens[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="state dict to load")
    parser.add_argument("--prompt", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument("--length", type=int, default=400, help="bytes to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="lower is safer (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="bytes the model looks back on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = load(args.file, args.context)
    text = sample(model, args.prompt.encode(), args.length, args.temperature)
    assert "lt_zero" not in sys.modules
    assert "lightning" not in sys.modules
    print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
