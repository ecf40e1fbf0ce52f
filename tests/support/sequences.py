"""A decoder whose sequences may be cut over ranks, its batches, and runs of it through each face."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.parallel import part_group, row_group, sequence_attention, token_mean
from lt_zero.parallel.sequence.batches import Takes, cut_for, last_layout, model_takes
from lt_zero.parallel.sequence.ranks import SequenceRanks
from tests.support.joined import use
from tests.support.lightning_tools import sharded_trainer, single_trainer, torchrun_env
from tests.support.parity import OPTIMIZERS

VOCABULARY, WIDTH, HEADS, KV_HEADS, ROWS, LENGTH = 11, 12, 4, 2, 2, 12


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        # A bias of keys has the gradient 0 but for rounding, which Adam would blow up.
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.ModuleDict({name: nn.Linear(WIDTH, count * 3, bias=False) for name, count in heads.items()})
        self.out, self.drop = nn.Linear(HEADS * 3, WIDTH), nn.Dropout(dropout)
        self.attend = sequence_attention()

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        seen = self.norm(x)
        q, k, v = (layer(seen).view(rows, length, -1, 3).transpose(1, 2) for layer in self.project.values())
        found = self.attend(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = x + self.drop(self.out(found.transpose(1, 2).reshape(rows, length, -1)))
        return result


class Decoder(nn.Module):
    """Returns the mean loss of tokens that have a label."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        losses = F.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten(), reduction="none")
        return token_mean(losses, shift_labels.flatten() != -100)


def batch_of(number: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Rows with labels of their tokens, of which the last rank has few."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (ROWS, length), generator=generator)
    labels = tokens.clone()
    labels[0, length - 4 :] = -100
    labels[1, :2] = -100
    return {"input_ids": tokens, "labels": labels}


def whole(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What one process makes of a batch."""
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    places = torch.arange(labels.shape[1]).expand(ROWS, -1)
    return {"input_ids": batch["input_ids"], "position_ids": places, "shift_labels": labels}


class Rows(Dataset[dict[str, Tensor]]):
    """A batch is a sample: data rank d of n gets numbers d, d + n, d + 2 n, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return batch_of(index)


def first(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return samples[0]


class Module(pl.LightningModule):
    """Trains on whole batches in one process, and on parts where they are cut."""

    def __init__(self, batches: int, optimizer: str = "adamw", dropout: float = 0.0) -> None:
        super().__init__()
        self.net, self.batches, self.optimizer = Decoder(dropout), batches, optimizer
        self.losses: list[float] = []
        self.lengths: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch = batch if "shift_labels" in batch else whole(batch)
        self.lengths.append(batch["input_ids"].shape[1])
        loss: Tensor = self.net(**batch)
        self.losses.append(float(loss))
        self.log("loss", loss, sync_dist=True)
        how: dict[str, Any] = {"sync_dist": True, "reduce_fx": "sum", "batch_size": ROWS}
        self.log("count", float(ROWS), sync_dist_group=row_group(), **how)
        self.log("tokens", float(batch["input_ids"].numel()), sync_dist_group=part_group(), **how)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = Rows(self.batches)  # in order, which Lightning's own sampler would shuffle
        ranks: Any = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        sampler = DistributedSampler(rows, shuffle=False, **ranks) if ranks is not None else None
        return DataLoader(rows, batch_size=1, collate_fn=first, sampler=sampler)


def keys_of(sequence: int, tensor: int = 1, **keys: Any) -> dict[str, Any]:
    return {"sequence_parallel_size": sequence, "tensor_parallel": {"autotp_size": tensor}, **keys}


def one_process(batches: int, steps: int, accumulates: int, data: int, optimizer: str) -> list[Tensor]:
    """Weights after training on what ``data`` ranks see."""
    net = Decoder()
    made = OPTIMIZERS[optimizer](net.parameters())
    for step in range(steps):
        made.zero_grad()
        numbers = range(step * accumulates * data, (step + 1) * accumulates * data)
        for number in numbers:
            (net(**whole(batch_of(number % batches))) / len(numbers)).backward()
        made.step()
    return [p.detach() for p in net.parameters()]


def run_trainer(stage: int, steps: int, accumulates: int, optimizer: str, config: dict[str, Any]) -> list[Tensor]:
    data = dist.get_world_size() // config["sequence_parallel_size"]
    module = Module(steps * accumulates * data, optimizer)
    trainer = sharded_trainer(stage, config=config, max_steps=steps, accumulate_grad_batches=accumulates)
    trainer.fit(module)
    weights = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return [weights[name] for name, _ in module.named_parameters()] if weights else []


def run_fabric(stage: int, steps: int, accumulates: int, optimizer: str, config: dict[str, Any]) -> list[Tensor]:
    os.environ.update(torchrun_env())
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    strategy = FabricZeroStrategy(config={"zero_optimization": block, **config})
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    net = Decoder()
    model, made = fabric.setup(net, OPTIMIZERS[optimizer](net.parameters()))
    data = Rows(steps * accumulates * strategy.session.division.data_ranks)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=1, collate_fn=first))
    for number, batch in enumerate(loader):
        ends = number % accumulates == accumulates - 1
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(model(**batch) / accumulates)
        if ends:
            made.step()
            made.zero_grad()
    weights = strategy.full_state_dict(model)
    return [weights[name] for name, _ in net.named_parameters()] if weights else []


def run_loop(stage: int, steps: int, accumulates: int, optimizer: str, config: dict[str, Any]) -> list[Tensor]:
    net = Decoder()
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = {"zero_optimization": block, "gradient_accumulation_steps": accumulates, **config}
    given["train_micro_batch_size_per_gpu"] = ROWS
    made = OPTIMIZERS[optimizer](net.parameters())
    engine, *_ = lt_zero.initialize(model=net, optimizer=made, config=given)
    ranks, rank = engine.data_ranks, engine.session.division.data_rank
    for number in range(steps * accumulates):
        engine.backward(engine(**whole(batch_of(number * ranks + rank))))
        engine.step()
    weights = engine.module_state_dict()
    engine.destroy()
    return [weights[name] for name, _ in net.named_parameters()] if weights else []


FACES: dict[str, Callable[..., list[Tensor]]] = {"trainer": run_trainer, "fabric": run_fabric, "loop": run_loop}


def single_run(batches: int, steps: int, **options: Any) -> Module:
    module = Module(batches, **options)
    single_trainer(max_steps=steps).fit(module)
    return module


class _Group:
    process_group, exchanges = None, 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@contextmanager
def as_rank(rank: int, size: int, **options: Any) -> Iterator[SequenceRanks]:
    """Sequences are cut over ranks of which this process is one, without the others."""
    group: Any = _Group(rank, size)
    ranks = SequenceRanks(group, group, **options)
    use(ranks)
    try:
        yield ranks
    finally:
        use(None)


def parts(batch: Any, size: int, model: nn.Module | None = None, takes: Takes | None = None, **options: Any) -> Any:
    """What each rank gets of a batch."""
    found = []
    for rank in range(size):
        with as_rank(rank, size, **options) as ranks:
            model_takes(ranks, takes or Takes())
            found.append((cut_for(batch, ranks, model), last_layout(ranks)))
    return found
