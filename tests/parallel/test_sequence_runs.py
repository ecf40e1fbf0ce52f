"""Runs whose sequences are cut over ranks: precision, offload, recomputation, dropout, resuming, metrics, mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.parallel import part_group, row_group
from lt_zero.parallel.mesh import ParallelSizes
from tests.support.features import skip_without, there
from tests.support.lightning_tools import quick, sharded_trainer, single_trainer, torchrun_env, trust
from tests.support.matrix import only, only_rows
from tests.support.pool import Pool
from tests.support.sequences import (
    LENGTH,
    ROWS,
    Block,
    Decoder,
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
# Nothing is recomputed where this was taken out.
RECOMPUTED = {"activation_checkpointing": {"mode": "full" if there("activation_checkpointing") else "none"}}
OPTIONS: list[tuple[int, dict[str, Any], dict[str, Any], str, float]] = [
    (3, CPU_STATES, RECOMPUTED, "32-true", 1e-5),
    (2, {}, {"fp16": {"initial_scale_power": 8}}, "16-true", 2e-2),
    (1, {}, {"gradient_clipping": 0.1}, "32-true", 1e-5),
    (3, {}, {}, "bf16-mixed", 2e-2),
    (3, {"mics_shard_size": 1}, {}, "32-true", 1e-5),
    (0, {}, {"prescale_gradients": True}, "32-true", 1e-5),
    (1, {}, {"compile": {"backend": "aot_eager"}}, "64-true", 1e-5),
    (3, {}, {"compile": {"backend": "aot_eager"}}, "32-true", 1e-5),
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
    skip_without(options)
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
    """Logs what is known of parts and of whole rows in each way."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.metric, self.rows = SumMetric(), SumMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        labelled = (batch["shift_labels"] != -100).sum().float()
        self.log("val", self.net(**batch), sync_dist=True)
        how: dict[str, Any] = {"sync_dist": True, "batch_size": ROWS}
        for operation in ("sum", "min", "max"):
            self.log(operation, labelled, reduce_fx=operation, sync_dist_group=part_group(), **how)
        self.log("rows", float(ROWS), reduce_fx="sum", sync_dist_group=row_group(), **how)
        self.metric(labelled)
        self.log("metric", self.metric)
        self.rows.process_group = row_group()
        self.rows(float(ROWS))
        self.log("rows_metric", self.rows)
        if batch_idx == 0:
            self.log("gathered", self.all_gather(labelled).sum())

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        # Each data rank has other batches: Lightning divides them.
        return DataLoader(Rows(4), batch_size=1, collate_fn=first)


def _metrics() -> tuple[list[int], dict[str, float]]:
    module = Counting(2)
    trainer = sharded_trainer(1, config=keys_of(2), max_epochs=1)
    trainer.fit(module)
    return module.lengths, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_means_are_of_all_tokens_and_sums_say_of_what(pool: Pool) -> None:
    module = Module(2)
    with torch.no_grad():
        want = torch.stack([module.net(**whole(batch_of(number))) for number in range(2)]).mean()
    labels = [(whole(batch_of(number))["shift_labels"] != -100) for number in range(4)]
    parts = [int(part.sum()) for each in labels for part in each.chunk(2, dim=1)]
    whole_rows = sum(parts)
    for lengths, logged in pool.run(4, _metrics):
        assert lengths == [LENGTH // 2]
        close(logged["loss"], float(want))
        assert 0 < logged["val"] < logged["loss"] + 1
        assert logged["count"] == 2 * ROWS, "samples of two data ranks"
        assert logged["tokens"] == 2 * ROWS * LENGTH, "tokens of two data ranks, a half on each sequence rank"
        assert logged["rows"] == logged["rows_metric"] == 4 * ROWS
        assert logged["sum"] == logged["metric"] == whole_rows
        assert (logged["min"], logged["max"]) == (min(parts), max(parts))
        assert logged["gathered"] == sum(parts[:4]), "the first batches of two data ranks"


class Guessing(Module):
    """Logs a number without saying of what."""

    def __init__(self, operation: str) -> None:
        super().__init__(2)
        self.operation = operation

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("guessed", 1.0, sync_dist=True, reduce_fx=self.operation)
        return loss


def _guesses() -> list[str]:
    """The errors of a Trainer and of Fabric; each rank has the same value, by which nothing is decided."""
    found = []
    for operation in ("sum", "max"):
        with quick(), pytest.raises(ValueError, match="whole rows") as caught:
            sharded_trainer(1, config=keys_of(2), max_epochs=1).fit(Guessing(operation))
        found.append(str(caught.value))
    os.environ.update(torchrun_env())
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricZeroStrategy(sequence_parallel_size=2))
    fabric.launch()
    one, operations = torch.ones(()), ("sum", dist.ReduceOp.MIN)
    for reduce_op in operations:
        with pytest.raises(ValueError, match="whole rows") as caught:
            fabric.all_reduce(one, reduce_op=reduce_op)  # type: ignore[arg-type]
        found.append(str(caught.value))
    assert float(fabric.all_reduce(one.clone(), reduce_op="mean")) == 1
    assert float(fabric.all_reduce(one.clone(), part_group(), "sum")) == 2
    assert float(fabric.all_reduce(one.clone(), row_group(), "sum")) == 1
    assert torch.as_tensor(fabric.all_gather(one)).shape == (2,)
    assert not fabric.strategy.reduce_boolean_decision(dist.get_rank() == 0)
    net = Decoder()
    config = keys_of(2, train_micro_batch_size_per_gpu=ROWS, zero_optimization={"stage": 1})
    engine, *_ = lt_zero.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)
    assert engine(**batch_of(0)).isfinite(), "forward needs what the cut adds: positions, and shift_labels of labels"
    assert engine(batch_of(0)["input_ids"], shift_labels=whole(batch_of(0))["shift_labels"]).isfinite()
    with pytest.raises(TypeError, match="mistyped"):
        engine(**batch_of(0), mistyped=None)
    return found


def test_a_sum_that_does_not_say_of_what_is_refused(pool: Pool) -> None:
    for errors in pool.run(2, _guesses):
        for operation, text in zip(("sum", "max", "sum", "min"), errors, strict=True):
            assert f"sequence_parallel_size=2: a {operation} over ranks" in text
            for name in ("token_mean", f"{operation.title()}Metric", "part_group()", "row_group()"):
                assert name in text


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
    skip_without(keys)
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        lt_zero.ZeroConfig.of({"sequence_parallel_size": 2, **keys})


def test_inference_takes_whole_sequences() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel_size=2: lt_zero.inference takes whole sequences"):
        lt_zero.inference(nn.Linear(2, 2), {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}})
