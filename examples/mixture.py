"""Train a small mixture of experts, whose experts are on two ranks each, and resume with all of them on each rank.

python examples/mixture.py                                  # 4 processes: 2 expert ranks x 2, with ZeRO stage 2
python examples/mixture.py --resume --experts 1 --ranks 3 --steps 60    # 3 processes, each with all experts
python examples/mixture.py --model mixtral                  # the Mixtral of transformers, if it is installed
"""

import argparse
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from corpus import Windows, read_text
from lt_zero import ZeroStrategy
from lt_zero.parallel import Experts

VOCABULARY, WIDTH, HIDDEN, HEADS, CONTEXT, DEPTH = 256, 64, 128, 4, 64, 3
EXPERTS, CHOSEN, BALANCE = 8, 2, 0.01


class GatedExperts(Experts):
    """The experts of a layer, each of which is a gated MLP."""

    def __init__(self) -> None:
        super().__init__(EXPERTS)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / math.sqrt(WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / math.sqrt(HIDDEN))

    def forward(self, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        mine = self.dispatch(tokens, expert_ids)  # the tokens of this rank's experts
        made = []
        for rows, gate_up, down in zip(mine.split(), self.local(self.gate_up), self.local(self.down), strict=True):
            gate, up = (rows @ gate_up).chunk(2, -1)
            made.append((F.silu(gate) * up) @ down)
        return self.combine(torch.cat(made), mine, scores)


class Mixture(nn.Module):
    """A router that chooses two experts for each token; keeps the loss that balances it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), GatedExperts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        scores, expert_ids = shares.topk(CHOSEN)
        chosen = torch.bincount(expert_ids.flatten(), minlength=EXPERTS) / len(tokens)
        balance = EXPERTS * (chosen * shares.mean(0)).sum() / CHOSEN
        scores = scores / scores.sum(-1, keepdim=True)
        return self.experts(tokens, expert_ids, scores).view_as(x), balance


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = Mixture()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        made, balance = self.mlp(self.norm2(x))
        return x + made, balance


class SmallMixtral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and the mean of the losses that balance the routers."""
        x, balance = self.embed(ids) + self.positions.weight[: ids.shape[1]], torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, added = layer(x)
            balance = balance + added / DEPTH
        return self.head(self.norm(x)), balance


def of_transformers() -> nn.Module:
    """Make the same with the modules of transformers, whose experts are recognised."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN}
    sizes |= {"num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    sizes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "max_position_embeddings": CONTEXT}
    config = transformers.MixtralConfig(**sizes, output_router_logits=True, router_aux_loss_coef=BALANCE)
    return transformers.MixtralForCausalLM(config)


class Module(L.LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = SmallMixtral() if model == "own" else of_transformers()

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of next bytes, and the one that balances routers."""
        ids, targets = batch
        if isinstance(self.net, SmallMixtral):
            logits, balance = self.net(ids)
        else:
            made = self.net(input_ids=ids)
            logits, balance = made.logits, made.aux_loss
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), balance

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss, balance = self.losses(batch)
        self.log_dict({"loss": loss, "balance": balance}, prog_bar=True, sync_dist=True)
        return loss + BALANCE * balance

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.losses(batch)[0], sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(options: argparse.Namespace) -> float:
    """Train, save and export; returns the perplexity of validation text."""
    strategy = ZeroStrategy(options.zero, expert_parallel_size=options.experts)
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.ranks,
        precision=options.precision,
        max_steps=options.steps,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=False,
    )
    train = Windows(read_text(validation=False), CONTEXT)
    validation = Windows(read_text(validation=True), CONTEXT, 192)
    size = options.batch // options.ranks
    loaders = DataLoader(train, size, shuffle=True, drop_last=True), DataLoader(validation, size)
    folder = options.folder
    trainer.fit(Module(options.model), *loaders, ckpt_path=folder / "last.ckpt" if options.resume else None)
    trainer.save_checkpoint(folder / "last.ckpt")
    strategy.export(folder / "weights.safetensors", dtype="fp16", overwrite=True)
    found = trainer.callback_metrics
    perplexity = math.exp(float(found["val_loss"]))
    if trainer.is_global_zero:
        sizes = f"{EXPERTS} experts on {options.experts} of {options.ranks} ranks, ZeRO stage {options.zero}"
        print(f"{sizes}: loss {float(found['loss']):.3f} after {options.steps} steps, perplexity {perplexity:.3f}")
    return perplexity


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("own", "mixtral"), default="own")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", type=int, default=2, help="ranks that share the experts of a layer")
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--batch", type=int, default=24, help="windows of all ranks in a step")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("out/mixture"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
