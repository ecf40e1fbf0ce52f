"""The activations of a transformer that is given by its dimensions, and what each remedy for long sequences saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lt_zero.common.tables import bytes_cell, show
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import resolve_mode
from lt_zero.features import is_installed, require
from lt_zero.planning.activations import ActivationForecast, estimate_activations
from lt_zero.planning.transformer import Transformer

_FEW = (2, 3)  # blocks that are counted; the others are like them


class Remedies(NamedTuple):
    """The settings that are switched on against the memory of long sequences.

    Attributes:
        name: how a table calls the last of them.
        fused: attention makes no matrix of scores.
        recompute: blocks keep their input only.
        tiled_loss: logits of a tile of tokens exist at a time.
        tiled_mlp: and so do the tensors inside of an MLP.
        aside: inputs of recomputed blocks are in host memory, or in files.
    """

    name: str
    fused: bool = True
    recompute: bool = False
    tiled_loss: bool = False
    tiled_mlp: bool = False
    aside: bool = False

    @property
    def installed(self) -> bool:
        """True if the features that they need are installed."""
        needed = ["activation_checkpointing"] * self.recompute
        needed += ["tiles"] * (self.tiled_loss or self.tiled_mlp)
        return all(map(is_installed, needed))

    def of(self, config: ZeroConfig) -> ZeroConfig:
        """``config`` with these."""
        if not self.recompute:
            return ZeroConfig.of(config, overrides=["activation_checkpointing={mode: none}"])
        changes = ["mode=full", *(["cpu_checkpointing=true"] if self.aside else ["cpu_checkpointing=false"])]
        return ZeroConfig.of(config, overrides=[f"activation_checkpointing.{change}" for change in changes])


LADDER = (
    Remedies("attention with a matrix of scores", fused=False),
    Remedies("fused attention"),
    Remedies("+ blocks recomputed", recompute=True),
    Remedies("+ loss in tiles", recompute=True, tiled_loss=True),
    Remedies("+ MLP in tiles", recompute=True, tiled_loss=True, tiled_mlp=True),
    Remedies("+ inputs of blocks {aside}", recompute=True, tiled_loss=True, tiled_mlp=True, aside=True),
)


@dataclass(frozen=True)
class RankPart:
    """The part of a transformer, and of its sequences, that a rank has.

    Attributes:
        tensor: ranks that share each layer.
        sequence: ranks that share each sequence.
        method: how these compute attention, as ``sequence_parallel.method``.
    """

    tensor: int = 1
    sequence: int = 1
    method: str = "ulysses"

    @classmethod
    def of(cls, config: ZeroConfig) -> RankPart:
        method = config.sequence_parallel.method
        return cls(config.tensor_parallel.autotp_size, config.sequence_parallel_size, method)

    def tokens(self, shape: Transformer) -> int:
        """Tokens of a sequence that a rank has."""
        return -(-shape.sequence // self.sequence)

    def check(self, shape: Transformer) -> None:
        """Raise ValueError if heads are not whole."""
        ranks = self.tensor * (self.sequence if self.method == "ulysses" else 1)
        if shape.heads % ranks or shape.hidden % shape.heads:
            raise ValueError(
                f"--hidden {shape.hidden} with --heads {shape.heads}: {self.tensor} tensor ranks times "
                f"{self.sequence} sequence ranks have to divide the heads, and these the width. Give another --heads, "
                "or sequence_parallel.method=gather."
            )


def activations_of(shape: Transformer, remedies: Remedies, precision: str, part: RankPart) -> ActivationForecast:
    """Bytes of activations of one micro-batch on one rank.

    Raises:
        ValueError: the ranks do not divide the heads.
    """
    part.check(shape)
    ids = torch.empty(shape.micro_batch, part.tokens(shape), dtype=torch.long, device="meta")
    found = []
    for layers in _FEW:
        with torch.device("meta"):
            model = _Decoder(replace(shape, layers=layers), part, remedies)
        with nullcontext() if remedies.fused else sdpa_kernel(SDPBackend.MATH):
            found.append(estimate_activations(model, ids, remedies.of(ZeroConfig()), precision=precision, step=_loss))
    less, more = found
    others = shape.layers - _FEW[0]
    kept, aside = (one + others * (two - one) for one, two in ((less.kept, more.kept), (less.aside, more.aside)))
    return replace(less, kept=kept, aside=aside)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids)
    return loss


class _Attention(nn.Module):
    """Causal attention of a rank's heads; what sequence ranks exchange has the same size here, but no other values."""

    def __init__(self, shape: Transformer, part: RankPart) -> None:
        super().__init__()
        self._size, self._ranks, self._gathers = shape.hidden // shape.heads, part.sequence, part.method == "gather"
        width = shape.hidden // part.tensor
        self.queries, self.keys, self.values = (nn.Linear(shape.hidden, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (linear(x).unflatten(-1, (-1, self._size)).transpose(1, 2) for linear in (self.queries, self.keys))
        # A rotation of positions makes a new tensor.
        query, key = (part * torch.ones((), dtype=part.dtype) for part in parts)
        value = self.values(x).unflatten(-1, (-1, self._size)).transpose(1, 2)
        if self._ranks == 1:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        elif self._gathers:
            key, value = (each.repeat(1, 1, self._ranks, 1) for each in (key, value))
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            query_, key, value = (self._exchanged(each) for each in (query, key, value))
            mixed = F.scaled_dot_product_attention(query_, key, value, is_causal=True).contiguous().view(query.shape)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _exchanged(self, part: Tensor) -> Tensor:
        """Some heads of whole sequences for all heads of parts."""
        batch, heads, length, size = part.shape
        return part.clone(memory_format=torch.contiguous_format).view(batch, heads // self._ranks, -1, size)


class _MLP(nn.Module):
    """A gated feed-forward layer with as many parameters as one of two matrices and four times the width."""

    def __init__(self, shape: Transformer, part: RankPart) -> None:
        super().__init__()
        inner = max(1, 8 * shape.hidden // 3 // part.tensor)
        self.gate, self.up = (nn.Linear(shape.hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class _Mixture(nn.Module):
    """Experts that get equally many tokens, so that all of them keep as much as one that gets the rows of all."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(shape.hidden, shape.experts, bias=False), shape.top_k
        self.expert = _MLP(shape, RankPart())

    def forward(self, x: Tensor) -> Tensor:
        scores, _ = self.router(x.flatten(0, -2)).softmax(-1).topk(self.top_k, -1)
        rows = x.flatten(0, -2).repeat_interleave(self.top_k, 0)
        made = self.expert(rows).unflatten(0, scores.shape) * scores[..., None].to(rows.dtype)
        result: Tensor = made.sum(1).view_as(x)
        return result


class _DecoderBlock(nn.Module):
    """A block in the manner of Llama. LayerNorm keeps as much as a fused RMSNorm: its input."""

    def __init__(self, shape: Transformer, part: RankPart) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(shape.hidden, bias=False) for _ in range(2))
        self.attention = _Attention(shape, part)
        self.mlp = _Mixture(shape) if shape.experts else _MLP(shape, part)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class _Decoder(nn.Module):
    """The blocks of a rank, with the embedding, and the loss of the head if there is a vocabulary."""

    def __init__(self, shape: Transformer, part: RankPart, remedies: Remedies) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max(1, shape.vocabulary), shape.hidden)
        self.blocks = nn.ModuleList(_DecoderBlock(shape, part) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=False)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if shape.vocabulary else None
        self._tiled_loss = remedies.tiled_loss
        if remedies.tiled_mlp or remedies.tiled_loss:
            self._tile(remedies)

    def _tile(self, remedies: Remedies) -> None:
        """Compute in tiles what the remedies say; raises ConfigError if tiles are not installed."""
        require("long_sequences")
        from lt_zero.features.tiles.head import loss_head
        from lt_zero.features.tiles.tokens import tiled

        if remedies.tiled_mlp:
            for module in self.blocks.modules():
                if isinstance(module, _MLP):
                    tiled(module)
        if remedies.tiled_loss and self.head is not None:
            loss_head(self.head)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.head is None:
            return x.sum()
        if self._tiled_loss:
            loss: Tensor = self.head(x, labels=ids)
            return loss
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationCounter:
    """Counts the activations of a model, given by its dimensions or as a module that gets token ids.

    Attributes:
        model: one of both.
        micro_batch: sequences of a micro-batch.
        config: of the run.
        precision: as for ``Trainer``; None: that of the configuration.
    """

    model: Transformer | nn.Module
    micro_batch: int
    config: ZeroConfig
    precision: str | None

    @property
    def ladder(self) -> tuple[Remedies, ...]:
        """The remedies that may be switched on; attention of a module is what it is."""
        ladder: tuple[Remedies, ...] = LADDER
        if not isinstance(self.model, Transformer):
            recomputed = Remedies("+ blocks recomputed", recompute=True)
            ladder = Remedies("as it is"), recomputed, recomputed._replace(name="+ their inputs {aside}", aside=True)
        return tuple(remedies for remedies in ladder if remedies.installed)

    @property
    def mode(self) -> str:
        """The precision of the run."""
        return resolve_mode(self.config, self.precision or "32-true")

    def count(self, remedies: Remedies, length: int) -> ActivationForecast:
        """Count those of sequences of ``length`` tokens.

        Raises:
            ValueError: ranks do not divide the heads, or the module does not take token ids.
        """
        part = RankPart.of(self.config)
        if isinstance(self.model, Transformer):
            return activations_of(replace(self.model, sequence=length), remedies, self.mode, part)
        ids = torch.empty(self.micro_batch, -(-length // part.sequence), dtype=torch.long, device="meta")
        try:
            return estimate_activations(self.model, ids, remedies.of(self.config), precision=self.precision)
        except Exception as error:  # of the user's code
            raise ValueError(
                f"{type(self.model).__name__} with token ids of shape {tuple(ids.shape)}: {error}. "
                "lt_zero.estimate_activations(model, batch, step=...) counts steps with other batches."
            ) from error

    def lengths(self, remedies: Remedies) -> tuple[int, ...]:
        """Lengths that tell the activations of longer sequences: two, or three where bytes grow with the square."""
        step = RankPart.of(self.config).sequence
        if isinstance(self.model, nn.Module) or not remedies.fused:
            return 1024 * step, 2048 * step, 4096 * step
        return 4 * self.model.hidden * step, 8 * self.model.hidden * step  # tiles have as many tokens as features

    def extrapolated(self, remedies: Remedies, lengths: Sequence[int]) -> Callable[[int], ActivationForecast]:
        """Those of any length, by the polynomial through those of ``lengths``, whose degree is 1 or 2."""
        found = [self.count(remedies, length) for length in lengths]

        def of(length: int) -> ActivationForecast:
            weights = [
                math.prod((length - other) / (own - other) for other in lengths if other != own) for own in lengths
            ]
            rows = zip(*(vars(one).values() for one in found), strict=True)
            return ActivationForecast(
                *(round(sum(weight * each for weight, each in zip(weights, row, strict=True))) for row in rows)
            )

        return of


def remedies_table(
    counter: ActivationCounter, length: int, device: str, limit: float | None, console: Console
) -> Table:
    """Print, and return, the activations of a rank with each remedy and those above it.

    Args:
        length: tokens of a sequence.
        device: "cuda" or "cpu".
        limit: bytes that activations may take, for the longest sequence; None: not limited.
    """
    part = RankPart.of(counter.config)
    ranks = f" / {part.sequence} sequence ranks" if part.sequence > 1 else ""
    place, aside = ("GPU", "host memory") if device == "cuda" else ("memory", "files")
    table = Table(
        title=f"Activations of a rank: {counter.micro_batch} x {length:,} tokens{ranks}, {counter.mode}",
        caption="Each row has what is above it. kept: by blocks until their backward. logits, in a block: at most in\n"
        f"addition, of the head and the loss, and inside of a block. {place}: kept, and the larger of both.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("switched on", no_wrap=True)
    longest = [] if limit is None else ["longest"]
    for name in ("kept", "logits", "in a block", place, aside, *longest):
        table.add_column(name, justify="right", no_wrap=True)
    for remedies in counter.ladder:
        found = _counted(counter, remedies, length)
        cells = [bytes_cell(n, 1) for n in (found.kept, found.loss, found.block, found.most, found.aside)]
        if limit is not None:
            cells.append(f"{longest_sequence(counter, remedies, limit):,}")
        table.add_row(remedies.name.format(aside=f"in {aside}"), *cells)
    return show(table, console)


def _counted(counter: ActivationCounter, remedies: Remedies, length: int) -> ActivationForecast:
    """Activations of sequences of ``length`` tokens; with many tiles those of a transformer are extrapolated."""
    lengths = counter.lengths(remedies)
    if remedies.tiled_loss and length > lengths[-1]:
        return counter.extrapolated(remedies, lengths)(length)
    return counter.count(remedies, length)


def longest_sequence(counter: ActivationCounter, remedies: Remedies, limit: float) -> int:
    """Tokens of the longest sequence whose activations take at most ``limit`` bytes, rounded down to 1,024 or 0."""
    step = 1024 * RankPart.of(counter.config).sequence
    counted = counter.extrapolated(remedies, counter.lengths(remedies))
    times = 0
    for power in reversed(range(30)):
        times += (counted(step * (times + 2**power)).most <= limit) << power
    return step * times
