"""Runs whose sequences are cut over ranks: precision, offload, recomputation, dropout, resuming, metrics, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.parallel.mesh import ParallelSizes
from tests.support.lightning_tools import quick, sharded_trainer, single_trainer, trust
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool
from tests.support.sequences import (
    LENGTH,
    ROWS,
    Block,
    Module,
    Rows,
    batch_of,
    first,
    keys_of,
    single_run,
    whole,
)

BATCHES = 6


def close(found: Any, wanted: Any, **options: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), **options)


# ---- options of a run ------------------------------------------------------------------------------------------------

CPU_STATES = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
RECOMPUTED = {"activation_checkpointing": {"mode": "full"}}
OPTIONS: list[tuple[int, dict[str, Any], dict[str, Any], str, float]] = [
    (3, CPU_STATES, RECOMPUTED, "32-true", 1e-5),
    (2, {}, {"fp16": {"initial_scale_power": 8}}, "16-true", 2e-2),
    (1, {}, {"gradient_clipping": 0.1}, "32-true", 1e-5),
    (3, {}, {}, "bf16-mixed", 2e-2),
    (3, {"mics_shard_size": 1}, {}, "32-true", 1e-5),
    (0, {}, {"prescale_gradients": True}, "32-true", 1e-5),
]


def _losses(rows: list[tuple[int, dict[str, Any], dict[str, Any], str, float]]) -> list[list[float]]:
    found = []
    for stage, zero, keys, precision, _ in rows:
        module = Module(3, "sgd")
        config = keys_of(2, **keys)
        trainer = sharded_trainer(stage, zero, config, max_steps=3, precision=precision)
        trainer.fit(module)
        assert module.lengths == [LENGTH // 2] * 3
        found.append(module.losses)
    return found


@pytest.mark.parametrize("options", only([OPTIONS[:1]], [OPTIONS[:1], OPTIONS[1:]]))
def test_options_train_as_one_process(pool: Pool, options: list[Any]) -> None:
    want = single_run(3, 3, optimizer="sgd").losses
    clipped = Module(3, "sgd")
    single_trainer(max_steps=3, gradient_clip_val=0.1).fit(clipped)
    one, other = pool.run(2, _losses, options)
    assert one == other, "the loss of whole sequences is known on each rank"
    for (_, _, keys, _, bound), found in zip(options, one, strict=True):
        close(found, clipped.losses if "gradient_clipping" in keys else want, rtol=bound, atol=bound / 10)


# ---- tensor ranks, and resuming at other meshes ----------------------------------------------------------------------


class Cut(Module):
    """Has its heads on several tensor ranks."""

    def configure_model(self) -> None:
        for block in self.net.blocks:
            assert self.device_mesh is not None
            assert isinstance(block, Block)
            plan = {"out": RowwiseParallel(), **{f"project.{name}": ColwiseParallel() for name in "qkv"}}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


def _cut(stage: int, optimizer: str) -> list[float]:
    module = Cut(3, optimizer)
    sharded_trainer(stage, config=keys_of(2, 2), max_steps=3).fit(module)
    return module.losses


CUTS = [(stage, optimizer) for stage in range(4) for optimizer in ("sgd", "adamw")]


@pytest.mark.parametrize(("stage", "optimizer"), only_rows([(2, "adamw")], CUTS))
def test_layers_may_be_cut_over_tensor_ranks(pool: Pool, stage: int, optimizer: str) -> None:
    want = single_run(3, 3, optimizer=optimizer).losses
    assert pool.run(4, _cut, stage, optimizer)[3] == pytest.approx(want, rel=1e-5)


def _fit(sequence: int, stage: int, steps: int, save: str, resume: str | None = None) -> list[float]:
    module = Module(BATCHES)
    trainer = sharded_trainer(stage, config=keys_of(sequence), max_steps=steps)
    trainer.fit(module, ckpt_path=resume, **trust(False))
    trainer.save_checkpoint(save)
    return module.losses


WALKS = [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((4, 4), (2, 2)), ((2, 2), (4, 4))]  # ranks, and those of a sequence


@pytest.mark.parametrize(("before", "after"), only_rows(WALKS[:1], WALKS))
def test_a_run_goes_on_with_other_sequence_ranks(
    pool: Pool, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    path = str(tmp_path / "first")
    losses = pool.run(before[0], _fit, before[1], 3, 3, path)[0]
    losses += pool.run(after[0], _fit, after[1], 1, 6, str(tmp_path / "second"), path)[0]
    assert losses == pytest.approx(single_run(BATCHES, 6).losses, rel=1e-4)


# ---- random numbers --------------------------------------------------------------------------------------------------


class Dropping(Module):
    def __init__(self, batches: int) -> None:
        super().__init__(batches, dropout=0.5)
        self.masks: list[Tensor] = []
        self.orders: list[float] = []
        self.net.blocks[0].drop.register_forward_hook(self._see)  # type: ignore[union-attr]

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.masks.append(output.detach() == 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.orders.append(torch.rand(()).item())  # as a sampler draws


def _dropout(folder: str) -> tuple[list[Tensor], list[float], list[Tensor]]:
    torch.manual_seed(5)
    module = Dropping(BATCHES)
    trainer = sharded_trainer(2, config=keys_of(2), max_steps=2)
    trainer.fit(module)
    trainer.save_checkpoint(folder)
    whole = Dropping(BATCHES)
    torch.manual_seed(6)
    trainer = sharded_trainer(2, config=keys_of(2), max_steps=4)
    trainer.fit(whole, ckpt_path=folder, **trust(False))
    again = Dropping(BATCHES)
    torch.manual_seed(7)
    trainer = sharded_trainer(2, config=keys_of(2), max_steps=4)
    trainer.fit(again, ckpt_path=folder, **trust(False))
    assert all(map(torch.equal, whole.masks, again.masks)), "a resumed run repeats them"
    assert len(whole.masks) == 2
    return module.masks, module.orders, whole.masks


def test_parts_have_masks_of_their_own_and_data_is_drawn_alike(pool: Pool, tmp_path: Path) -> None:
    (masks, orders, resumed), (others, same, _) = pool.run(2, _dropout, str(tmp_path / "saved"))
    assert orders == same
    for mask, other in zip(masks, others, strict=True):
        agree = float((mask == other).double().mean())
        assert 0.3 < agree < 0.7, "equal masks would agree everywhere"
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], resumed[0])


# ---- data ------------------------------------------------------------------------------------------------------------


class Counting(Module):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert batch["input_ids"].shape == (ROWS, LENGTH // 2)
        self.log("val", self.net(**batch), sync_dist=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Rows(4), batch_size=1, collate_fn=first)


def _metrics() -> tuple[float, float, float]:
    module = Counting(2)
    trainer = sharded_trainer(1, config=keys_of(2), max_epochs=1)
    trainer.fit(module)
    logged = trainer.callback_metrics
    return float(logged["loss"]), float(logged["count"]), float(logged["val"])


def test_means_are_of_all_tokens_and_sums_count_data_ranks(pool: Pool) -> None:
    module = Module(2)
    with torch.no_grad():
        want = torch.stack([module.net(**whole(batch_of(number))) for number in range(2)]).mean()
    for loss, count, val in pool.run(4, _metrics):
        close(loss, float(want))
        assert count == 2 * ROWS, "samples of two data ranks"
        assert 0 < val < loss + 1


def test_sequence_ranks_are_neighbours_that_see_the_same_data() -> None:
    config = lt_zero.ZeroConfig.of({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}})
    sizes = ParallelSizes.of(config, 8)
    assert [sizes.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [sizes.sequence_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert list(sizes.firsts()) == [0, 4]
    with pytest.raises(ConfigError, match="sequence_parallel_size=2: 4 does not divide the 6 ranks"):
        ParallelSizes.of(config, 6)


# ---- mistakes --------------------------------------------------------------------------------------------------------


class Alone(Module):
    """Attention sees the tokens of a rank only."""

    def __init__(self) -> None:
        super().__init__(2)
        for block in self.net.blocks:
            block.attend = nn.functional.scaled_dot_product_attention


class Lengths(Module):
    """Rank 1 has shorter rows."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        batch = batch_of(0, LENGTH - 2 * self.global_rank)
        return DataLoader([batch], batch_size=1, collate_fn=first)  # type: ignore[arg-type]


class Tuples(Module):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(2, LENGTH), batch_size=2)  # type: ignore[arg-type]


class Reading(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError("not reached")


class ThreeHeads(Module):
    """Cannot be exchanged over two ranks."""

    def __init__(self) -> None:
        super().__init__(2)
        for block in self.net.blocks:
            assert isinstance(block, Block)
            attend = block.attend
            block.attend = lambda q, k, v, attend=attend, **options: attend(q[:, :3], k[:, :1], v[:, :1], **options)


MISTAKES: list[tuple[Callable[[], pl.LightningModule], str]] = [
    (Alone, "Alone has computed a loss, but its tokens have not seen those of other ranks"),
    (lambda: Lengths(2), "Ranks 0 and 1 have parts of the same sequences (sequence_parallel_size=2"),
    (
        lambda: Tuples(2),
        "a batch of Tensor has no names by which what is cut can be known. Define Tuples.",
    ),
    (lambda: Reading(2), "Reading.training_step takes dataloader_iter"),
    (ThreeHeads, "3 heads cannot be exchanged over 2 ranks"),
]


def _mistakes() -> list[str]:
    found = []
    for make, _ in MISTAKES:
        with quick(), pytest.raises((ConfigError, RuntimeError)) as caught:
            sharded_trainer(1, config=keys_of(2), max_steps=1, use_distributed_sampler=False).fit(make())
        found.append(str(caught.value))
    return found


def test_mistakes_are_named_before_the_first_step(pool: Pool) -> None:
    for texts in pool.run(2, _mistakes):
        for (_, text), found in zip(MISTAKES, texts, strict=True):
            assert text in found


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention needs whole sequences on each rank"),
    ({"sequence_parallel": {"gather": 3}}, "sequence_parallel.gather=3 does not divide sequence_parallel_size=2"),
    (
        {"gradient_compression": {"algorithm": "1bit"}},
        "gradient_compression.algorithm needs gradients of whole",
    ),
]


@pytest.mark.parametrize(("keys", "text"), REFUSED)
def test_keys_that_contradict_it_are_named(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        lt_zero.ZeroConfig.of({"sequence_parallel_size": 2, **keys})


def test_inference_takes_whole_sequences() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel_size=2: lt_zero.inference takes whole sequences"):
        lt_zero.inference(nn.Linear(2, 2), {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}})
