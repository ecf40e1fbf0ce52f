"""Forecasts of activations against what autograd saves and torch allocates in real steps, and the command."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from typer.testing import CliRunner

import lt_zero
from lt_zero import ConfigError, ZeroConfig
from lt_zero.cli import app
from lt_zero.planning.activations import ActivationForecast, estimate_activations
from lt_zero.planning.long_sequences import (
    LADDER,
    ActivationCounter,
    RankPart,
    Remedies,
    activations_of,
    longest_sequence,
)
from lt_zero.planning.transformer import Transformer
from tests.support.features import needs, skip_without, there
from tests.support.matrix import only_rows

WIDTH, VOCABULARY, LENGTH, DEPTH = 32, 300, 256, 3
BOUNDARY = LENGTH * WIDTH * 4  # bytes between two blocks, in fp32
FULL: dict[str, Any] = {"activation_checkpointing": {"mode": "full"}}


class Mixing(nn.Module):
    """A block with fused attention and an MLP that is four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, tiles: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Mixing() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tiles:
            for block in self.blocks:
                lt_zero.tiled(block.mlp)
            lt_zero.loss_head(self.head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_step(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def tiled_step(model: Any, ids: Tensor) -> Tensor:
    x = model.embed(ids)
    for block in model.blocks:
        x = block(x)
    return model.head(x, labels=ids)


def saved_bytes(model: Decoder, step: Callable[[Any, Tensor], Tensor], config: ZeroConfig) -> int:
    """Bytes that a real step keeps for backward when its last block has run."""
    kept: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
    others = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    others.add(ids.untyped_storage().data_ptr())
    with ExitStack() as stack:
        if config.activation_checkpointing.mode != "none":
            from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing

            stack.callback(Checkpointing(model, config.activation_checkpointing).remove)
        stack.callback(model.blocks[-1].register_forward_hook(lambda *_: found.append(sum(kept.values()))).remove)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            step(model, ids)
    return found[0]


def of(model: nn.Module, config: Any = None, **options: Any) -> ActivationForecast:
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    return estimate_activations(model, ids, config, **options)


@pytest.mark.parametrize(
    ("config", "tiles"),
    only_rows([({}, False), (FULL, True)], [({}, False), ({}, True), (FULL, False), (FULL, True)]),
)
def test_what_blocks_keep_is_what_autograd_saves(config: dict[str, Any], tiles: bool) -> None:
    """Beside the output of the last block, which the head keeps."""
    skip_without(*["tiles"] * tiles, *["activation_checkpointing"] * bool(config))
    step = tiled_step if tiles else plain_step
    model = Decoder(tiles)
    saved = saved_bytes(model, step, ZeroConfig.of(config))
    assert saved > (DEPTH - 1) * BOUNDARY
    found = of(model, config, step=step)
    assert found.kept == pytest.approx(saved + BOUNDARY, rel=0.05)
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())


@needs("tiles", "activation_checkpointing")
def test_each_remedy_saves_what_it_is_for() -> None:
    whole, recomputed = of(Decoder()), of(Decoder(), FULL)
    logits = LENGTH * VOCABULARY * 4
    assert 2 * logits <= whole.loss < 4 * logits
    assert recomputed.kept == pytest.approx((DEPTH + 1) * BOUNDARY, rel=0.02)
    assert recomputed.block > whole.block
    assert recomputed.aside == 0
    aside = of(Decoder(), {"activation_checkpointing": {"mode": "full", "cpu_checkpointing": True}})
    assert aside.aside == pytest.approx(DEPTH * BOUNDARY)
    assert aside.kept <= recomputed.kept - (DEPTH - 1) * BOUNDARY
    tiled = of(Decoder(tiles=True), FULL, step=tiled_step)
    assert tiled.kept == recomputed.kept, "tiles keep nothing that a recomputation drops"
    assert tiled.loss < 0.75 * recomputed.loss
    assert tiled.block < recomputed.block


def test_dtypes_of_a_run_and_modules_of_lightning() -> None:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Decoder()

        def training_step(self, batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
            assert batch["ids"].device == self.device
            return {"loss": plain_step(self.net, batch["ids"])}

    with torch.device("meta"):
        module, batch = Module(), {"ids": torch.zeros(1, LENGTH, dtype=torch.long)}
    wide, low = (estimate_activations(module, batch, precision=p) for p in ("32-true", "bf16-true"))
    assert low.kept == pytest.approx(wide.kept / 2, rel=0.02)
    assert wide.kept == of(Decoder()).kept
    assert next(module.parameters()).device.type == "meta"


def test_batches_that_are_no_tokens() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    found = estimate_activations(model, torch.zeros(4, 8), step=lambda net, x: net(x).square().mean())
    assert found.most > 0
    with pytest.raises(TypeError, match="pass step="):
        estimate_activations(model, {"x": torch.zeros(4, 8)})
    with pytest.raises(ConfigError, match="long_sequences"):
        estimate_activations(Decoder(), torch.zeros(1, 4).long(), {"long_sequences": {"tiled_mlp": True}})


SHAPE = Transformer(4, 64, 4, sequence=512, vocabulary=512)


def test_every_remedy_that_is_installed_is_counted() -> None:
    def is_there(remedies: Remedies) -> bool:
        tiled = remedies.tiled_loss or remedies.tiled_mlp
        return there("activation_checkpointing") >= remedies.recompute and there("tiles") >= tiled

    assert ActivationCounter(SHAPE, 1, ZeroConfig(), None).ladder == tuple(filter(is_there, LADDER))
    names = [remedies.name for remedies in ActivationCounter(nn.Linear(1, 1), 1, ZeroConfig(), None).ladder]
    assert names[0] == "as it is"
    assert ("+ blocks recomputed" in names) == there("activation_checkpointing")


@pytest.mark.slow
@needs("tiles", "activation_checkpointing")
def test_dimensions_give_what_a_module_of_them_keeps() -> None:
    """The numbers of bytes per token and feature that docs/long-sequences.md states, in fp32."""
    whole, fused, recomputed, loss, mlp, aside = (
        activations_of(SHAPE, remedies, "32-true", RankPart()) for remedies in LADDER
    )
    element = 4 * SHAPE.sequence * SHAPE.hidden
    scores = 4 * SHAPE.heads * SHAPE.sequence**2
    assert whole.kept - fused.kept > 0.95 * SHAPE.layers * scores
    assert fused.kept / SHAPE.layers / element == pytest.approx(2 + 4 + 2 + 4 * 8 / 3 + 1, rel=0.1)
    assert recomputed.kept == (SHAPE.layers + 1) * element
    assert (loss.kept, mlp.kept) == (recomputed.kept, recomputed.kept)
    assert loss.loss < recomputed.loss / 2
    assert mlp.block < loss.block
    assert (aside.aside, aside.kept) == (SHAPE.layers * element, 2 * element)


@pytest.mark.slow
def test_ranks_have_their_part() -> None:
    fused = LADDER[1]
    one = activations_of(SHAPE, fused, "32-true", RankPart())
    two = activations_of(SHAPE, fused, "32-true", RankPart(sequence=2))
    assert two.kept == pytest.approx(one.kept / 2, rel=0.1)
    assert two.loss == pytest.approx(one.loss / 2, rel=0.05)
    gathered = activations_of(SHAPE, fused, "32-true", RankPart(sequence=2, method="gather"))
    keys = 4 * SHAPE.sequence * SHAPE.hidden
    assert gathered.kept == pytest.approx(two.kept + SHAPE.layers * keys, rel=0.05), "keys and values are whole"
    assert one.kept / 2 < activations_of(SHAPE, fused, "32-true", RankPart(tensor=2)).kept < one.kept
    with pytest.raises(ValueError, match="--heads 4"):
        activations_of(SHAPE, fused, "32-true", RankPart(sequence=8))


@pytest.mark.slow
@pytest.mark.parametrize("remedies", [LADDER[0], LADDER[2]], ids=lambda remedies: remedies.name)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(remedies: Remedies) -> None:
    if remedies.recompute:
        skip_without("activation_checkpointing")
    counter, limit = ActivationCounter(SHAPE, 1, ZeroConfig(), None), 2e8
    length = longest_sequence(counter, remedies, limit)
    assert counter.count(remedies, length).most <= limit < counter.count(remedies, length + 1024).most


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "160"})
    return done.exit_code, done.output


@pytest.mark.slow
def test_the_command() -> None:
    shape = ("--layers", "4", "--hidden", "64", "--heads", "4", "--vocabulary", "512", "--device", "cpu")
    code, text = run(*shape, "--sequence-length", "512", "--world", "2", "--sequence-ranks", "2")
    assert code == 0, text
    assert "Activations of a rank: 1 x 512 tokens / 2 sequence ranks, 32-true" in text
    assert ("+ inputs of blocks in files" in text) == (there("tiles") and there("activation_checkpointing"))
    module = "tests.planning.test_activations:Decoder"
    code, text = run("--module", module, "--sequence-length", "64", "--gpu-gb", "1", "--stage", "1")
    assert code == 0, text
    assert "longest: tokens of a sequence in 1 GB" in text


def test_a_module_that_takes_no_tokens_is_an_error() -> None:
    code, text = run("--module", "tests.planning.test_activations:Mixing", "--sequence-length", "64")
    assert code == 2
    assert "lt_zero.estimate_activations(model, batch, step=...)" in " ".join(text.replace("│", " ").split())
