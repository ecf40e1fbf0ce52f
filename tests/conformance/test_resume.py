"""Saving and resuming in three faces: exactly, at another world size and stage, in another face, with averages."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero.checkpoint.native.load import engine_of
from lt_zero.checkpoint.open import digest_of_values
from lt_zero.core.followers import states_of
from tests.conformance.faces import FACES, GAS, Face, Plain, Settings, adamw, close, plain_sgd, run, sgd
from tests.outside import noise
from tests.support.features import needs, skip_without
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.outside import features
from tests.support.pool import Pool

# ---- a run that is resumed -------------------------------------------------------------------------------------------


def _step(face: Face, step: int) -> list[Tensor]:
    for micro in range(GAS):
        face.backward(step, micro)
    face.step()
    return [lt_zero.full_master(p) for p in face.net.parameters()]


def _goes_on(path: str, face: Face) -> list[list[Tensor]]:
    for step in (0, 2, 3):
        _step(face, step)
    saved = _step(face, 1)
    face.save(path)
    return [saved, _step(face, 2), _step(face, 3), [torch.tensor(face.loss_scale)]]


def _loads(path: str, face: Face) -> list[list[Tensor]]:
    face.load(path)
    loaded = [lt_zero.full_master(p) for p in face.net.parameters()]
    return [loaded, _step(face, 2), _step(face, 3), [torch.tensor(face.loss_scale)]]


def _resumed(face: str, settings: Settings, folder: str) -> None:
    whole = run(face, settings, partial(_goes_on, f"{folder}/saved"))
    again = run(face, settings, partial(_loads, f"{folder}/saved"), resume=f"{folder}/saved")
    rounds = not settings.zero.get("load_from_fp32_weights", True)
    for name, wanted, found in zip(["loaded", "next", "last", "loss scale"], whole, again, strict=True):
        for value, same in zip(wanted, found, strict=True):
            if not rounds:
                assert torch.equal(value, same), name
            elif name == "loaded":
                assert torch.equal(value.bfloat16().float(), same)
                assert not torch.equal(value, same)


RESUMES = [
    Settings(2, zero={"zero_quantized_weights": True}, optimizer=plain_sgd),
    Settings(1, "bf16-true", zero={"load_from_fp32_weights": False, "stage3_param_persistence_threshold": 0}),
    Settings(3, "bf16-mixed", optimizer=adamw),
    Settings(2, config={"gradient_compression": {"algorithm": "1bit"}}),
    Settings(0, "16-true", config={"fp16": {"initial_scale_power": 10, "loss_scale_window": 1}}),
    Settings(0, config={"gradient_compression": {"algorithm": "2bit"}}),
]


@pytest.mark.parametrize(
    ("face", "settings"),
    # Of a Trainer: tests/checkpoint/test_checkpoint.py.
    only_rows([("loop", 1)], itertools.product(FACES, range(len(RESUMES)))),
)
def test_a_resumed_run_goes_on_exactly(pool: Pool, tmp_path: Path, face: str, settings: int) -> None:
    skip_without(RESUMES[settings])
    pool.run(2, _resumed, face, RESUMES[settings], str(tmp_path))


# ---- each of the contents --------------------------------------------------------------------------------------------


class Seeing(Net):
    """Has a buffer that is another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.sum()
        return super().forward(tokens)


EVERYTHING = Settings(
    2,
    "16-true",
    config={
        "gradient_compression": {"algorithm": "2bit"},
        "fp16": {"initial_scale_power": 10, "loss_scale_window": 1},
        "broadcast_buffers": False,
        "noise": {"scale": 0.01},
    },
    schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
)


def _contents(face: Face) -> dict[str, str]:
    """All that a checkpoint has for every face, as this rank has it."""
    engine = engine_of(face.net)
    assert engine is not None
    parameters = list(face.net.parameters())
    found = {
        "weights": [lt_zero.full_master(p) for p in parameters],
        "are those of a step": engine.stepped,
        "optimizer states": [face.optimizer.state.get(p, {}) for p in parameters],
        "options of groups": [sorted({**group, "params": []}.items()) for group in face.optimizer.param_groups],
        "schedule": face.schedule.state_dict(),
        "loss scale": face.loss_scale,
        "residuals": [residuals.make()[0] for residuals in engine.exchange.of_bucket.values()],
        "buffers": face.net.get_buffer("seen"),
        "states of features": {name: state.state_dict() for name, state in states_of(engine).items()},
    }
    return {key: digest_of_values(value) for key, value in found.items()}


def _saves_all(path: str, face: Face) -> list[Any]:
    for step in range(3):
        _step(face, step)
    face.save(path)
    return [_contents(face), _step(face, 3)]


def _loads_all(path: str, face: Face) -> list[Any]:
    face.load(path)
    return [_contents(face), _step(face, 3)]


def _restores_all(face: str, path: str) -> None:
    with features(noise.ENTRY):
        new = run(face, EVERYTHING, _contents, net=Seeing)
        saved, wanted = run(face, EVERYTHING, partial(_saves_all, path), net=Seeing)
        loaded, found = run(face, EVERYTHING, partial(_loads_all, path), resume=path, net=Seeing)
    alike = [key for key, value in saved.items() if value == new[key]]
    assert not alike, f"{alike} would be the same without a load"
    lost = [key for key, value in saved.items() if value != loaded[key]]
    assert not lost, f"{lost} are not restored"
    assert all(map(torch.equal, wanted, found)), "the next step"


@needs("compression")
@pytest.mark.parametrize("face", FACES)
def test_each_of_the_contents_is_restored(pool: Pool, tmp_path: Path, face: str) -> None:
    pool.run(2, _restores_all, face, str(tmp_path / "saved"))


# ---- in another face -------------------------------------------------------------------------------------------------

ROUNDED = {"zero_quantized_weights": True}
SCALED = {"fp16": {"initial_scale_power": 10, "loss_scale_window": 1}}


def _seen(face: Face) -> list[float]:
    with torch.no_grad():
        return [face.loss_scale, float(next_token_loss(face.net, 9, 0, 0))]


def _saves(path: str, face: Face) -> list[float]:
    for step in range(4):
        _step(face, step)
    face.save(path)
    return _seen(face)


def _takes_over(path: str, face: Face) -> list[float]:
    face.load(path)
    return _seen(face)


def _changes_faces(saves: str, loads: str, folder: str) -> None:
    settings = Settings(2, "16-true", zero=ROUNDED, config=SCALED, optimizer=plain_sgd)
    path = f"{folder}/saved"
    saved = run(saves, settings, partial(_saves, path))
    assert saved[0] > 2.0**10
    assert run(loads, settings, partial(_takes_over, path)) == saved


@pytest.mark.parametrize(
    ("saves", "loads"), only_rows([("fabric", "loop")], itertools.permutations(("fabric", "loop")))
)
def test_a_run_goes_on_in_another_face(pool: Pool, tmp_path: Path, saves: str, loads: str) -> None:
    skip_without(ROUNDED)
    pool.run(2, _changes_faces, saves, loads, str(tmp_path))


# ---- at another world size and stage ---------------------------------------------------------------------------------

SAVED_BY = 2  # ranks
STATES = {sgd: ["momentum_buffer"], adamw: ["exp_avg", "exp_avg_sq"]}


def _values(settings: Settings, face: Face) -> list[list[Tensor]]:
    keys = STATES[settings.optimizer]
    return [[lt_zero.full_master(p), *(lt_zero.full_state(p, k) for k in keys)] for p in face.net.parameters()]


def _trains_and_saves(settings: Settings, path: str, face: Face) -> Any:
    for step in range(2):
        _step(face, step)
    face.save(path)
    return _values(settings, face), face.loss_scale


def _loads_and_trains(plain: Plain, settings: Settings, path: str, face: Face) -> Any:
    face.load(path)
    loaded, scale = _values(settings, face), face.loss_scale
    for step in range(4):
        plain.backward(step, world=SAVED_BY if step < 2 else dist.get_world_size())
        plain.optimizer.step()
        weights = _step(face, step) if step >= 2 else []
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if settings.precision == "32-true" else {"rtol": 0.1, "atol": 0.05}
    for value, (name, q) in zip(weights, plain.net.named_parameters(), strict=True):
        close(value.float(), q.detach(), name, **tolerance)  # type: ignore[arg-type]
    return loaded, scale


def _elsewhere(face: str, settings: Settings, folder: str, loads: bool) -> Any:
    path, plain = f"{folder}/saved", Plain(settings.optimizer)  # before a Trainer changes the default dtype
    contract: Any = partial(_loads_and_trains, plain) if loads else _trains_and_saves
    return run(face, settings, partial(contract, settings, path), path if loads else None)


SCALE = {"fp16": {"initial_scale_power": 10, "loss_scale_window": 1}}
MOVES = [
    (Settings(3, optimizer=adamw), Settings(1, optimizer=adamw), 3),
    (Settings(1, "16-true", config=SCALE), Settings(3, "16-true", config=SCALE), 3),
    (Settings(0, "bf16-mixed", optimizer=adamw), Settings(2, "bf16-mixed", optimizer=adamw), 1),
    (Settings(2, "bf16-true"), Settings(0, "bf16-true"), 3),
    (Settings(2, "16-mixed", config=SCALE), Settings(3, "16-mixed", config=SCALE), 1),
    (Settings(2, config={"checkpoint": {"format": "full"}}), Settings(3), 3),
]


@pytest.mark.parametrize(
    ("face", "number"),
    # Of a Trainer: tests/checkpoint/test_reshard.py; of a loop: tests/training/loop/test_engine_loop.py.
    only_rows([("fabric", 1)], itertools.product(FACES, range(len(MOVES)))),
)
def test_a_run_goes_on_at_another_world_size_and_stage(pool: Pool, tmp_path: Path, face: str, number: int) -> None:
    before, after, ranks = MOVES[number]
    wanted, scale = pool.run(SAVED_BY, _elsewhere, face, before, str(tmp_path), False)[0]
    found, same_scale = pool.run(ranks, _elsewhere, face, after, str(tmp_path), True)[0]
    assert scale == same_scale
    for values, others in zip(wanted, found, strict=True):
        assert all(map(torch.equal, values, others))


# ---- a checkpoint with averages --------------------------------------------------------------------------------------


class Follows(pl.Callback):
    """Keeps the trained weights of the last step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights = [lt_zero.full_master(p) for p in pl_module.parameters()]


def _averaged(face: str, folder: str) -> None:
    """With an optimizer's states come the trained weights, without them the averages."""
    world, follows = dist.get_world_size(), Follows()
    keys = {"max_epochs": 1, "use_distributed_sampler": False}
    trainer = sharded_trainer(2, callbacks=[follows, lt_zero.EMA(decay=0.7)], **keys)
    trainer.fit(trained := GPT(world, "adamw"))
    trainer.save_checkpoint(f"{folder}/saved")
    averages = [lt_zero.full_master(p) for p in trained.parameters()]
    assert not all(map(torch.equal, averages, follows.weights))
    for settings, wanted in ((Settings(3, optimizer=adamw), follows.weights), (Settings(1), averages)):
        states = settings.optimizer is adamw
        found = run(face, settings, partial(_takes, f"{folder}/saved", states), net=GPT)
        assert all(map(torch.equal, found, wanted)), states


def _takes(path: str, states: bool, face: Face) -> list[Tensor]:
    face.load(path, states)
    return [lt_zero.full_master(p) for p in face.net.parameters()]


@needs("ema")
@pytest.mark.parametrize(
    "face", only(["fabric"], ["fabric", "loop"])
)  # that of a Trainer: tests/features/ema/test_callback.py
def test_other_faces_go_on_with_the_trained_weights(pool: Pool, tmp_path: Path, face: str) -> None:
    pool.run(2, _averaged, face, str(tmp_path))
