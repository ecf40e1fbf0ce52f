"""``lt_zero.EMA``: the average of a single process, in validation, at the end, in files; resumed exactly."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn

import lt_zero
from lt_zero import EMA
from lt_zero.core.engine.averaged_weights import average_of
from tests.support.features import skip_without
from tests.support.lightning_tools import GPT, QUIET, sharded_trainer, single_trainer, torchrun_env, trust
from tests.support.matrix import only_rows
from tests.support.pool import Pool

RUN: dict[str, Any] = {"max_epochs": 3, "use_distributed_sampler": False, "num_sanity_val_steps": 0}


class Model(GPT):
    """With a frozen block and a buffer that moves; keeps the mean loss of each validation batch over the ranks."""

    def __init__(self, world: int = 1) -> None:
        super().__init__(world, "adamw")
        self.net.blocks[0].requires_grad_(False)
        self.register_buffer("moves", torch.zeros(3))
        self.register_buffer("counts", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.moves += 1
        self.counts += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(float(self.trainer.strategy.reduce(self.loss(batch).detach().float(), reduce_op="mean")))


class Follows(pl.Callback):
    """Averages what ``full_master`` returns after each step."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        for name, p in module.named_parameters():
            now = lt_zero.full_master(p).double()
            self.average[name] = 0.7 * self.average[name] + (1 - 0.7) * now if name in self.average else now


def _whole(strategy: Any) -> dict[str, Tensor]:
    return {name: value.double() for name, value in strategy.full_state_dict().items()}


def _close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-5) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=rtol, atol=rtol / 10, msg=name)


def _averages(stage: int, precision: Any, zero: dict[str, Any], folder: str) -> list[float]:
    config = {"bf16": {"bf16_master_weights_and_grads": True}} if precision == "bf16 masters" else {}
    precision = "bf16-true" if config else precision
    follows, model = Follows(), Model(dist.get_world_size())
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_weights_only=True, save_on_train_epoch_end=True)
    callbacks: list[pl.Callback] = [follows, EMA(decay=0.7), saves]
    if "nvme_path" in zero.get("offload_optimizer", {}):
        zero["offload_optimizer"]["nvme_path"] = folder
    options = {**RUN, "precision": precision, "callbacks": callbacks, "enable_checkpointing": True}
    trainer = sharded_trainer(stage, zero, config, **options)
    trainer.fit(model)
    found, low = _whole(trainer.strategy), "32" not in precision
    if dist.get_rank() == 0:  # low master weights are rounded at the end, not on the way
        _close(found, follows.average, 1e-2 if config else 1e-5)
    trainer.strategy.export(f"{folder}/all.pt", torch.float32)
    exported = torch.load(f"{folder}/all.pt", weights_only=True)
    if dist.get_rank() == 0:
        _close(exported, found, 1e-7)
    seen, again = model.seen[:], Model(dist.get_world_size())
    sharded_trainer(stage, precision=precision, **RUN).validate(
        again, ckpt_path=f"{folder}/epoch=2.ckpt", verbose=False
    )
    assert again.seen == pytest.approx(seen[-len(again.seen) :], rel=0.05 if low else 1e-5)  # weights only: the average
    return seen


STATES: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": {"device": "cpu"}},
    {"offload_optimizer": {"device": "nvme", "nvme_path": ""}},
]


FAST_AVERAGES = [(3, 3, "bf16 masters", STATES[2])]  # in fp32: the next test
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "bf16 masters"]


@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "zero"),
    only_rows(FAST_AVERAGES, itertools.product([2, 3], [0, 1, 2, 3], PRECISIONS, STATES)),
)
def test_the_average_is_that_of_one_process(
    pool: Pool, tmp_path: Path, ranks: int, stage: int, precision: str, zero: dict[str, Any]
) -> None:
    skip_without(zero)
    pool.run(ranks, _averages, stage, precision, zero, str(tmp_path))


def test_it_is_lightnings(pool: Pool, tmp_path: Path) -> None:
    model = Model()
    single_trainer(callbacks=[pl.callbacks.EMAWeightAveraging(decay=0.7)], **RUN).fit(model)
    seen = pool.run(2, _averages, 3, "32-true", {}, str(tmp_path))[0]
    assert seen == pytest.approx(model.seen, rel=1e-5)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    _close(found, {name: value for name, value in model.state_dict().items() if name != "counts"})


def _beside_ddp(stage: int | None, zero: dict[str, Any], folder: str) -> list[float]:
    """Losses of the validations in a fit, and of all that comes after it. ``stage``: None: DDP."""

    def trainer_of(*callbacks: pl.Callback) -> pl.Trainer:
        options = {**RUN, "callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
        if stage is not None:
            return sharded_trainer(stage, zero, **options)
        os.environ.update(torchrun_env())
        return pl.Trainer(**{**QUIET, "strategy": "ddp", "devices": dist.get_world_size(), **options})

    def tested(trainer: pl.Trainer, **given: Any) -> float:
        return trainer.test(model, verbose=False, **given)[0]["test"]

    average = EMA(decay=0.7) if stage is not None else pl.callbacks.EMAWeightAveraging(decay=0.7)
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = trainer_of(average, saves)
    model = Model(dist.get_world_size())
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    after = tested(trainer)
    other = trainer_of()
    epochs = (1, 2)
    by_other = [tested(other, ckpt_path=f"{folder}/epoch={epoch}.ckpt", **trust(False)) for epoch in epochs]
    # With EMAWeightAveraging, the Trainer that has fitted tests a checkpoint with its trained weights, and any other
    # Trainer with the averages.
    by_same = by_other
    if stage is not None:
        by_same = [tested(trainer, ckpt_path=f"{folder}/epoch={epoch}.ckpt") for epoch in epochs]
    return [*model.seen, after, *by_other, *by_same]


@pytest.mark.parametrize(
    ("stage", "zero"),
    only_rows([(3, {})], itertools.product([0, 1, 2, 3], STATES[:2])),
)
def test_metrics_in_and_after_a_fit_are_those_of_ddp(
    pool: Pool, tmp_path: Path, stage: int, zero: dict[str, Any]
) -> None:
    wanted = pool.run(2, _beside_ddp, None, {}, str(tmp_path / "ddp"))[0]
    assert pool.run(2, _beside_ddp, stage, zero, str(tmp_path / "zero"))[0] == pytest.approx(wanted, rel=1e-5)


class Tuned(Model):
    """All of its blocks are trained, two of them from epoch 1 on."""

    def __init__(self, world: int = 1) -> None:
        super().__init__(world)
        self.net.requires_grad_(True)

    @property
    def backbone(self) -> nn.Module:
        return nn.ModuleList(self.net.blocks[:2])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def _tuned(stage: int | None, device: str, folder: str) -> list[float]:
    """Losses of a run, and of one that goes on with the checkpoint from after the epoch that has unfrozen blocks."""
    found: list[float] = []
    for resume in (None, f"{folder}/epoch=1.ckpt"):
        saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        tuning = BackboneFinetuning(1, lambda_func=lambda epoch: 1.5)
        average = EMA(decay=0.7) if stage is not None else pl.callbacks.EMAWeightAveraging(decay=0.7)
        options = {**RUN, "callbacks": [average, tuning, saves], "enable_checkpointing": True}
        if stage is None:
            trainer = single_trainer(**options)
            model = Tuned()
        else:
            zero = {"offload_optimizer": {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}}
            trainer = sharded_trainer(stage, zero, **options)
            model = Tuned(dist.get_world_size())
        trainer.fit(model, ckpt_path=resume, **trust(False))
        found += model.seen
    return found


@pytest.mark.parametrize(
    ("stage", "device"), only_rows([(3, "nvme")], itertools.product([0, 1, 2, 3], ["none", "cpu", "nvme"]))
)
def test_weights_that_are_unfrozen_are_averaged_from_the_start(
    pool: Pool, tmp_path: Path, stage: int, device: str
) -> None:
    if device != "none":
        skip_without("offload")
    wanted = _tuned(None, "none", str(tmp_path / "single"))
    assert pool.run(2, _tuned, stage, device, str(tmp_path / "zero"))[0] == pytest.approx(wanted, rel=1e-6)


def _before_the_first_update() -> None:
    """Losses and weights are the same with an average that has not begun, and without the callback."""
    found = []
    for callbacks in ([], [EMA(decay=0.7, start_step=1000)]):
        model = Model(dist.get_world_size())
        trainer = sharded_trainer(3, callbacks=callbacks, **RUN)
        trainer.fit(model)
        found.append((model.seen, trainer.strategy.full_state_dict()))
    (seen, whole), (others_seen, others) = found
    assert others_seen == seen
    assert all(torch.equal(others[name], value) for name, value in whole.items())


def test_before_its_first_update_there_is_no_average(pool: Pool) -> None:
    pool.run(2, _before_the_first_update)


# ---- resuming --------------------------------------------------------------------------------------------------------


def _fit(stage: int, folder: str, precision: Any, form: str, resume: str | None = None) -> tuple[Any, list[float]]:
    model = Model(dist.get_world_size())
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    ema = EMA(decay=0.7, every_n_steps=2, start_step=1)
    options = {**RUN, "precision": precision, "callbacks": [ema, saves], "enable_checkpointing": True}
    trainer = sharded_trainer(stage, {}, {"checkpoint": {"format": form}}, **options)
    trainer.fit(model, ckpt_path=resume)
    return trainer.strategy.full_state_dict(), model.seen


def _resumed(stages: tuple[int, int], folder: str, precision: str, form: str) -> None:
    whole, seen = _fit(stages[0], f"{folder}/first", precision, form)
    again, later = _fit(stages[1], f"{folder}/second", precision, form, f"{folder}/first/epoch=1.ckpt")
    exact = stages[0] == stages[1]
    assert later == pytest.approx(seen[-len(later) :], rel=0 if exact else 1e-5)
    for name, value in whole.items():
        assert torch.equal(again[name], value) if exact else torch.allclose(again[name], value, rtol=1e-4, atol=1e-6)
    # Without the callback training goes on with the trained weights, and averages are weights to everybody else.
    model = Model(dist.get_world_size())
    trainer = sharded_trainer(stages[1], precision=precision, **{**RUN, "max_epochs": 2})
    trainer.fit(model, ckpt_path=f"{folder}/first/epoch=1.ckpt")
    trained = _whole(trainer.strategy)
    other = Model(dist.get_world_size())
    trainer = sharded_trainer(stages[1], precision=precision, **RUN)
    trainer.validate(other, ckpt_path=f"{folder}/first/epoch=1.ckpt", verbose=False)
    averaged = _whole(trainer.strategy)
    if dist.get_rank() == 0:
        name = "net.blocks.1.up.weight"
        assert not torch.allclose(trained[name], averaged[name], rtol=1e-4)
    assert other.seen == pytest.approx(
        seen[len(other.seen) : 2 * len(other.seen)], rel=1e-5 if precision == "32-true" else 0.05
    )


@pytest.mark.parametrize(
    ("stages", "precision", "form"),
    only_rows(
        [((2, 2), "bf16-true", "sharded")],
        itertools.product([(3, 3), (2, 2), (0, 0), (3, 1)], ["32-true", "bf16-true"], ["sharded", "full"]),
    ),
)
def test_goes_on_exactly(pool: Pool, tmp_path: Path, stages: tuple[int, int], precision: str, form: str) -> None:
    if precision != "32-true" and stages[0] != stages[1]:
        precision = "32-true"
    pool.run(2, _resumed, stages, str(tmp_path), precision, form)


class Keeps(pl.Callback):
    """Keeps this rank's averages of the last step, and the trained weights."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        average = average_of(engine)
        assert average is not None
        stores = [average.averages(bucket) for bucket in engine.buckets]
        self.averages = [store.read().clone() for store in stores if store is not None]
        self.weights = [lt_zero.full_master(p) for p in module.parameters()]


def _low_masters(stage: int, folder: str, device: str, resume: str | None = None) -> Keeps:
    keeps = Keeps()
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    callbacks = [EMA(decay=0.7), keeps, saves]
    zero = {"offload_optimizer": {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}}
    config = {"checkpoint": {"format": "full"}, "bf16": {"bf16_master_weights_and_grads": True}}
    options = {**RUN, "precision": "bf16-true", "callbacks": callbacks, "enable_checkpointing": True}
    sharded_trainer(stage, zero, config, **options).fit(Model(dist.get_world_size()), ckpt_path=resume, **trust(False))
    return keeps


def _resumes_low_masters(stage: int, folder: str, device: str) -> None:
    """Averages are in fp32 in one file, too, so a run that goes on with it has the bits of one that never stopped."""
    whole = _low_masters(stage, f"{folder}/first", device)
    path = f"{folder}/first/epoch=1.ckpt"
    saved = torch.load(path, weights_only=False)
    name = "net.blocks.1.up.weight"
    assert saved["state_dict"][name].dtype == torch.float32
    assert saved["state_dict"]["net.blocks.0.up.weight"].dtype == torch.bfloat16, "it is frozen, and has no average"
    assert saved["lt_zero_trained"]["weights"][name].dtype == torch.bfloat16
    again = _low_masters(stage, f"{folder}/second", device, path)
    assert whole.averages
    for found, wanted in ((again.averages, whole.averages), (again.weights, whole.weights)):
        assert all(map(torch.equal, found, wanted))
    # Files that were written before have rounded averages.
    state = {
        key: value.bfloat16() if value.is_floating_point() else value for key, value in saved["state_dict"].items()
    }
    if dist.get_rank() == 0:
        torch.save({**saved, "state_dict": state}, f"{folder}/old.ckpt")
    dist.barrier()
    old = _low_masters(stage, f"{folder}/third", device, f"{folder}/old.ckpt")
    assert all(map(torch.equal, old.weights, whole.weights))
    assert not all(map(torch.equal, old.averages, whole.averages))
    for one, other in zip(old.averages, whole.averages, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("stage", "device"), only_rows([(2, "none")], itertools.product([0, 1, 2, 3], ["none", "cpu", "nvme"]))
)
def test_averages_of_low_masters_go_on_exactly_from_one_file(
    pool: Pool, tmp_path: Path, stage: int, device: str
) -> None:
    pool.run(2, _resumes_low_masters, stage, str(tmp_path), device)


class Begins(pl.Callback):
    """The weights at the start of training, and the numbers of updates after each batch."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.updates: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = [lt_zero.full_master(p) for p in module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        average = average_of(trainer.strategy.engine)  # type: ignore[attr-defined]
        self.updates.append(average.updates if average is not None else 0)


class Fails(Model):
    fails = True

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.fails:
            raise OSError("no data")
        super().validation_step(batch, batch_idx)


def _validation_fails(stage: int, other: bool, precision: Any) -> None:
    model = Fails(dist.get_world_size())
    trained = Begins()
    begins = Begins()
    trained.on_train_batch_end = lambda trainer, *_: trained.on_train_start(trainer, model)  # type: ignore
    trainer = sharded_trainer(stage, callbacks=[EMA(decay=0.7), trained, begins], precision=precision, **RUN)
    with pytest.raises(OSError, match="no data"):
        trainer.fit(model)
    wanted, model.fails = trained.weights, False
    if other:
        trainer = sharded_trainer(stage, callbacks=[begins], precision=precision, **RUN)
    trainer.fit(model)
    assert all(map(torch.equal, begins.weights, wanted))


@pytest.mark.parametrize(
    ("stage", "other", "precision"),
    only_rows(
        [(0, False, "32-true"), (3, True, "bf16-mixed")],
        itertools.product([0, 1, 2, 3], [False, True], ["32-true", "bf16-mixed"]),
    ),
)
def test_weights_are_back_after_an_error_in_validation(pool: Pool, stage: int, other: bool, precision: str) -> None:
    pool.run(2, _validation_fails, stage, other, precision)


def _saved_at_the_end(folder: str, form: str) -> None:
    follows, begins = Begins(), Begins()
    follows.on_train_batch_end = lambda trainer, module, *_: follows.on_train_start(trainer, module)  # type: ignore
    saves = ModelCheckpoint(folder, save_last=True, every_n_epochs=10)
    options = {**RUN, "callbacks": [follows, EMA(decay=0.7), saves], "enable_checkpointing": True}
    trainer = sharded_trainer(3, {}, {"checkpoint": {"format": form}}, **options)
    trainer.fit(Model(dist.get_world_size()))
    model = Model(dist.get_world_size())
    again = sharded_trainer(3, callbacks=[begins, EMA(decay=0.7)], **{**RUN, "max_epochs": 4})
    again.fit(model, ckpt_path=f"{folder}/last.ckpt")
    assert all(map(torch.equal, begins.weights, follows.weights))
    assert begins.updates[0] == 3 * len(begins.updates)  # of 3 epochs


@pytest.mark.slow  # of a run that has ended: the next test
@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_checkpoint_of_the_end_has_the_trained_weights(pool: Pool, tmp_path: Path, form: str) -> None:
    pool.run(2, _saved_at_the_end, str(tmp_path), form)


def _saved_after(folder: str, between: str, stage: int, precision: Any, form: str, device: str) -> None:
    """A run that is saved after its end goes on as one that was saved inside; ``between``: what comes before."""
    follows, begins = Begins(), Begins()
    follows.on_train_batch_end = lambda trainer, module, *_: follows.on_train_start(trainer, module)  # type: ignore
    model, config = Model(dist.get_world_size()), {"checkpoint": {"format": form}}
    masters = {"bf16": {"bf16_master_weights_and_grads": True}} if precision == "bf16 masters" else {}
    run = {**RUN, "precision": "bf16-true" if masters else precision}
    zero = {"offload_optimizer": {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}}
    trainer = sharded_trainer(stage, zero, {**config, **masters}, **run, callbacks=[follows, EMA(decay=0.7)])
    trainer.fit(model)
    averages, wanted = _whole(trainer.strategy), follows.weights
    if between == "a test":
        trainer.test(model, verbose=False)
    elif between == "a file":
        trainer.save_checkpoint(f"{folder}/first")
        trainer.test(model, ckpt_path=f"{folder}/first", verbose=False)
    elif between == "an edit":
        with lt_zero.gathered(model.temperature, write=True), torch.no_grad():
            model.temperature.fill_(3.0)
    trainer.save_checkpoint(f"{folder}/saved")
    now = _whole(trainer.strategy)
    if between in ("a file", "an edit"):  # they are what the model has now
        wanted = [lt_zero.full_master(p) for p in model.parameters()]
    elif dist.get_rank() == 0:
        _close(now, averages, 1e-7)
    again = sharded_trainer(stage, zero, masters, callbacks=[begins, EMA(decay=0.7)], **{**run, "max_epochs": 4})
    again.fit(Model(dist.get_world_size()), ckpt_path=f"{folder}/saved")
    assert all(map(torch.equal, begins.weights, wanted))
    assert begins.updates[0] == (0 if between in ("a file", "an edit") else 3 * len(begins.updates))


FAST = [
    ("a test", 0, "bf16 masters", "full", "none"),
    ("an edit", 2, "32-true", "sharded", "cpu"),
]
SLOW = [
    ("nothing", 3, "32-true", "sharded", "nvme"),
    ("nothing", 1, "bf16-mixed", "full", "cpu"),
    ("nothing", 2, "bf16 masters", "sharded", "none"),
    ("a test", 3, "bf16-true", "sharded", "cpu"),
    ("a file", 1, "32-true", "sharded", "none"),
    ("an edit", 2, "bf16 masters", "full", "cpu"),
    ("a file", 3, "bf16 masters", "full", "nvme"),
    ("an edit", 3, "32-true", "sharded", "nvme"),
    ("an edit", 0, "32-true", "sharded", "none"),
]


@pytest.mark.parametrize(("between", "stage", "precision", "form", "device"), only_rows(FAST, FAST + SLOW))
def test_a_run_that_is_saved_after_its_end_goes_on(
    pool: Pool, tmp_path: Path, between: str, stage: int, precision: str, form: str, device: str
) -> None:
    if device != "none":
        skip_without("offload")
    pool.run(2, _saved_after, str(tmp_path), between, stage, precision, form, device)


def _loaded_after_an_error(stage: int, folder: str) -> None:
    """A checkpoint that is loaded after an error in validation is not overwritten by the weights of that run."""
    model, begins = Fails(dist.get_world_size()), Begins()
    trainer = sharded_trainer(stage, **{**RUN, "max_epochs": 1}, limit_val_batches=0)
    trainer.fit(model)
    trainer.save_checkpoint(f"{folder}/early")
    wanted = [lt_zero.full_master(p) for p in model.parameters()]
    trainer = sharded_trainer(stage, callbacks=[EMA(decay=0.7)], **RUN)
    with pytest.raises(OSError, match="no data"):
        trainer.fit(model, ckpt_path=f"{folder}/early")
    model.fails = False
    trainer = sharded_trainer(stage, callbacks=[EMA(decay=0.7), begins], **RUN)
    trainer.fit(model, ckpt_path=f"{folder}/early")
    assert all(map(torch.equal, begins.weights, wanted))


def test_weights_of_a_file_replace_those_of_a_run_that_failed(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _loaded_after_an_error, 3, str(tmp_path))


class Two(Model):
    """Two optimizers, which both step in each batch."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        both = (self.temperature, *self.net.blocks[1].parameters()), self.net.blocks[2].parameters()
        return [torch.optim.SGD(parameters, lr=0.1) for parameters in both]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return loss


def _updates(model: type[Model], folder: str, arguments: dict[str, Any]) -> list[int]:
    begins = Begins()
    more = {"accumulate_grad_batches": 1 if model is Two else 2, **RUN}
    trainer = sharded_trainer(2, **{**more, "max_epochs": 1})
    trainer.fit(model(dist.get_world_size()))
    trainer.save_checkpoint(f"{folder}/saved")
    trainer = sharded_trainer(2, callbacks=[EMA(**arguments), begins], **more)
    trainer.fit(model(dist.get_world_size()), ckpt_path=f"{folder}/saved")
    return begins.updates


@pytest.mark.parametrize(
    ("model", "arguments", "wanted"),
    [
        (Two, {"every_n_steps": 2}, [1, 2, 3, 4]),  # from step 4 on, two steps in a batch
        (Model, {}, [0, 1, 1, 2]),  # two batches in a step
    ],
)
def test_updates_are_due_by_steps(
    pool: Pool, tmp_path: Path, model: type[Model], arguments: dict[str, Any], wanted: list[int]
) -> None:
    assert pool.run(2, _updates, model, str(tmp_path), arguments)[0] == wanted


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"EMA\(decay=1.5\) is out of range"):
        EMA(decay=1.5)
    with pytest.raises(TypeError, match=r"EMA\(decay=\.\.\.\) is '.9' \(str\): pass a number"):
        EMA(decay=".9")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="every_n_steps.* is 2.5 .*whole number"):
        EMA(every_n_steps=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="start_step.* is True"):
        EMA(start_step=True)
    trainer = pl.Trainer(**QUIET, callbacks=[EMA()], max_steps=1)
    with pytest.raises(TypeError, match="Use ZeroStrategy, or Lightning's EMAWeightAveraging"):
        trainer.fit(Model())
