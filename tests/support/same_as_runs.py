"""Short runs whose bits ``make same-as`` compares between two checkouts: of the stages, precisions and features.

This file runs on its own, once for each checkout, whose package it finds on ``PYTHONPATH``: it imports public names
only. ``torchrun`` starts it with the number of ranks that the runs have which it is asked for.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lt_zero
from lt_zero import ZeroStrategy
from lt_zero.parallel import Experts, LayerSpec, Pipeline, sequence_attention, token_mean

VOCABULARY = 13
WIDTH = 12
HIDDEN = 38
HEADS = 2
LENGTH = 8
ROWS = 2
MICROS = 2  # of a step
SAVED, LAST = 3, 5  # steps
# Those that one of the optimizers has. A state that no name reaches is seen in the weights of the next step.
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Tokens(Dataset[dict[str, Tensor]]):
    """Rows of token ids with their labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Attention(nn.Module):
    """``sparse``: within blocks of 4 tokens."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.sparse = _sparse() if sparse else None
        self.attend = sequence_attention()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        if self.sparse is not None:
            found = self.sparse(query, key, value)
        else:
            found = self.attend(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _sparse() -> nn.Module:
    from lt_zero.attention import Fixed, SparseSelfAttention  # one run has it

    return SparseSelfAttention(Fixed(block=4, num_local_blocks=1, attention="unidirectional"))


class Block(nn.Module):
    """``tiled``: its second layer is a grid of smaller ones."""

    def __init__(self, sparse: bool = False, tiled: bool = False) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.attention = Attention(sparse)
        self.second = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        down: Any = lt_zero.TiledLinear if tiled else nn.Linear
        self.down = down(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class FeedForwards(Experts):
    """Four experts, each of one matrix."""

    def __init__(self) -> None:
        super().__init__(4)
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        mine = self.dispatch(tokens, expert_ids)
        rows = [torch.tanh(part @ weight) for part, weight in zip(mine.split(), self.local(self.weight), strict=True)]
        return self.combine(torch.cat(rows), mine, scores)


class Mixture(nn.Module):
    """A router that chooses two experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), FeedForwards()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, expert_ids = self.router(tokens).softmax(-1).topk(2, -1)
        return x + self.experts(tokens, expert_ids, scores).view_as(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Returns the mean loss of the tokens that have a label. Its head has the embedding's weights."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        places = batch.get("position_ids", torch.arange(tokens.shape[1]).expand_as(tokens))
        x = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        labels = batch.get("shift_labels")
        labels = tokens.roll(-1, 1) if labels is None else labels
        losses = F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten(), reduction="none")
        return token_mean(losses, labels.flatten() != -100)


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Piped(nn.Module):
    """Layers one after the other, which stages of a pipeline share."""

    def __init__(self) -> None:
        super().__init__()
        ends = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
        self.pipe = Pipeline([ends[0], *(LayerSpec(Block) for _ in range(3)), ends[1]], loss_fn=_mean_loss)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        return self.pipe(tokens, tokens.roll(-1, 1))  # type: ignore[no-any-return]


def _decoder(**options: bool) -> nn.Module:
    return Decoder([Block(**options) for _ in range(3)])


def _frozen() -> nn.Module:
    """A decoder whose blocks are trained in their norms only."""
    net = _decoder()
    for name, parameter in net.named_parameters():
        parameter.requires_grad = "blocks" not in name or ".first." in name or ".second." in name
    return net


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Run:
    """One short run.

    Attributes:
        stage: of ZeRO.
        keys: of the configuration's top level; ``{folder}`` in values is an empty folder.
        zero: of its block ``zero_optimization``.
        precision: of the Trainer.
        ranks: that the run has.
        net: makes the module.
        optimizer: of its parameters; None: that of the configuration.
        clip: maximum norm of the gradients.
        micros: micro-batches of a step.
        strategy: further arguments.
        callbacks: makes those of the Trainer.
        variables: of the environment; ``{folder}`` as in ``keys``.
        depends_on_time: two runs of the same package differ, so only names, shapes and dtypes are compared.
    """

    stage: int
    keys: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    precision: Any = "32-true"
    ranks: int = 2
    net: Callable[[], nn.Module] = _decoder
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = _adamw
    clip: float | None = 0.5
    micros: int = MICROS
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    variables: dict[str, str] = field(default_factory=dict)
    depends_on_time: bool = False


_CPU = {"device": "cpu"}
_NVME = {"device": "nvme", "nvme_path": "{folder}"}
_RULES = [
    {"patterns": [".*up.weight"], "partition_type": "column"},
    {"patterns": [".*down.weight"], "partition_type": "row"},
]

RUNS: dict[str, Run] = {
    "stage 0": Run(0, optimizer=_sgd),
    "stage 1": Run(1),
    "stage 2": Run(2, optimizer=_sgd, micros=3),
    "stage 3": Run(3),
    "stage 1, bf16": Run(1, precision="bf16-true"),
    "stage 2, fp16, steps that overflow": Run(2, {"fp16": {"initial_scale_power": 30}}, precision="16-true"),
    "stage 3, mixed": Run(3, precision="bf16-mixed", optimizer=_sgd),
    "stage 2, states on the host": Run(2, zero={"offload_optimizer": {**_CPU, "overlap_step": True}}, clip=None),
    "stage 3, all on the host": Run(3, zero={"offload_optimizer": _CPU, "offload_param": _CPU}, optimizer=_sgd),
    "stage 3, all in files": Run(3, zero={"offload_optimizer": _NVME, "offload_param": _NVME}, precision="bf16-true"),
    "recomputation": Run(3, {"activation_checkpointing": {"mode": "full", "cpu_checkpointing": True}}),
    "averaged weights": Run(2, callbacks=lambda: [lt_zero.EMA(decay=0.5)]),
    "shard groups": Run(3, zero={"mics_shard_size": 2}, ranks=4, micros=1),
    "ZeRO++": Run(
        3,
        zero={"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        ranks=4,
    ),
    "compressed gradients": Run(1, {"gradient_compression": {"algorithm": "topk", "topk_ratio": 0.2}}, clip=None),
    "1-bit Adam": Run(
        1,
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}},
        optimizer=None,
        clip=None,
    ),
    "zero-one Adam": Run(
        0,
        {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-2, "var_freeze_step": 2, "local_step_scaler": 1}}},
        optimizer=None,
        clip=None,
    ),
    "late nodes": Run(0, {"communication": {"slow_node_tolerance": 0.5}}, depends_on_time=True),
    "recorded for a comparison": Run(2, optimizer=_sgd, variables={"LT_ZERO_RECORD": "{folder}/record"}),
    "gradient noise": Run(2, {"gradient_noise_scale": True}, optimizer=_sgd),
    "moments of 8 bits": Run(3, {"optimizer_states": {"dtype": "int8"}}),
    "stochastic rounding": Run(
        2, {"bf16": {"bf16_master_weights_and_grads": True, "stochastic_rounding": True}}, precision="bf16-true"
    ),
    "frozen weights of 4 bits": Run(3, {"quantize": 4}, net=_frozen),
    "tiled layers": Run(3, net=lambda: _decoder(tiled=True)),
    "sparse attention": Run(2, net=lambda: _decoder(sparse=True)),
    "matrices": Run(
        1,
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}},
        zero={"shard_along": "parameter"},
        optimizer=None,
    ),
    "norms of parameters": Run(2, {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}, optimizer=None),
    "tensor ranks": Run(
        2,
        {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": _RULES}}},
        ranks=4,
        net=lambda: _decoder(),
    ),
    "pipeline": Run(1, ranks=4, net=Piped, strategy={"pipeline_parallel_size": 2}, optimizer=_sgd),
    "expert ranks": Run(3, ranks=4, net=lambda: Decoder([Mixture()]), strategy={"expert_parallel_size": 2}),
    "sequence ranks": Run(3, strategy={"sequence_parallel_size": 2}),
}


class Module(L.LightningModule):
    """Trains the net of a run.

    Attributes:
        loss: of the last micro-batch.
    """

    loss: Tensor

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = self.run.net()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        self.loss = loss.detach().clone()
        return loss


class OptimizedModule(Module):
    """With the optimizer of its run; without one the configuration has it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.run.optimizer is not None
        return self.run.optimizer([p for p in self.parameters() if p.requires_grad])


Values = dict[tuple[int, str], Tensor]  # step and name -> value


class Notes(Callback):
    """Notes losses and norms, and the values of a run after steps ``SAVED`` and ``LAST``; saves it after the first."""

    def __init__(self, checkpoint: Path | None) -> None:
        self.checkpoint, self.found = checkpoint, Values()
        self._seen = 0

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *rest: Any) -> None:
        step = self._seen + 1  # that which the micro-batch is of
        micro = sum(1 for at, name in self.found if at == step and name.startswith("loss"))
        self.found[step, f"loss of micro-batch {micro}"] = module.loss
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        norm = getattr(trainer.precision_plugin, "grad_norm", None)
        if norm is not None:  # it is computed where gradients are clipped
            self.found[step, "norm of the gradients"] = norm.detach().clone()
        if self._seen == SAVED and self.checkpoint is not None:
            trainer.save_checkpoint(self.checkpoint)
        if self._seen in (SAVED, LAST):
            self.found.update({(self._seen, name): value for name, value in _values(module)})


def _values(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Whole master weights and whole states. Collective."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, lt_zero.full_master(parameter).clone()
            for key in STATES:
                if (value := _state(parameter, key)) is not None:
                    yield f"{name}, {key}", value


def _state(parameter: Any, key: str) -> Tensor | None:
    try:
        return lt_zero.full_state(parameter, key).clone()
    except (KeyError, ValueError):
        return None


def _filled(values: Any, folder: Path) -> Any:
    if isinstance(values, dict):
        return {key: _filled(value, folder) for key, value in values.items()}
    return values.replace("{folder}", str(folder)) if isinstance(values, str) else values


def take(run: Run, folder: Path, checkpoint: Path, resumes: bool) -> Values:
    """The values of ``run``, which saves ``checkpoint`` in its middle, or goes on from it.

    Args:
        folder: empty, for files of the run.
    """
    random.seed(0)
    notes = Notes(None if resumes else checkpoint)
    block = {"stage": run.stage, "stage3_param_persistence_threshold": 0, **run.zero}
    strategy = ZeroStrategy(config=_filled({"zero_optimization": block, **run.keys}, folder), **run.strategy)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=run.ranks,
        precision=run.precision,
        max_steps=LAST,
        accumulate_grad_batches=run.micros,
        gradient_clip_val=run.clip,
        callbacks=[notes, *run.callbacks()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Tokens(), batch_size=ROWS, shuffle=True)
    torch.manual_seed(1)
    module = Module(run) if run.optimizer is None else OptimizedModule(run)
    with mock.patch.dict(os.environ, _filled(run.variables, folder)):
        trainer.fit(module, loader, ckpt_path=str(checkpoint) if resumes else None, weights_only=False)
    if resumes:  # the record of a run that goes on begins later
        return notes.found
    return {**notes.found, **_record(folder / "record")}


def _record(folder: Path) -> Values:
    """The bytes of the files for ``lt-zero compare``, which rank 0 has written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if os.environ["RANK"] == "0" else []
    return {
        (SAVED, f"record {path.name}"): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        for path in files
    }


def main(folder: Path, checkpoints: Path, resumes: bool, names: list[str]) -> None:
    """Write ``folder/NAME/RANK.pt`` for each of the runs."""
    rank = os.environ["RANK"]
    for name in names:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        found = take(RUNS[name], place / "files", checkpoints / name / "checkpoint", resumes)
        torch.save(found, place / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "resume", sys.argv[4:])
