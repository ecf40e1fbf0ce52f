"""Contracts that hold under a Trainer, in Fabric and in a loop of one's own (tests/support/faces.py)."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from tests.support.faces import FACES, GAS, Face, Settings, run
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import cover, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.pool import Pool

# ---- gradients, before and after clipping ----------------------------------------------------------------------------

ROUGH = {"rtol": 0.2, "atol": 0.02}  # of 16 bits
LIMIT, BOUND = 0.25, 0.01  # of the norm, which is about 0.7, and of elements, of which a few are larger


class Plain:
    """The same steps in one process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def backward(self, step: int, micros: int = GAS) -> None:
        self.optimizer.zero_grad()
        world = dist.get_world_size()
        for micro, rank in itertools.product(range(micros), range(world)):
            (next_token_loss(self.net, step, micro, rank) / (GAS * world)).backward()

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.net.parameters() if p.grad is not None]


def _read(p: nn.Parameter) -> Tensor:
    """A gradient that all accessors agree on."""
    full = lt_zero.safe_get_full_grad(p)
    assert full is not None
    assert torch.equal(full, lt_zero.full_grad(p).float())  # type: ignore[union-attr]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, lt_zero.safe_get_local_grad(p))
    rows = [part for part in parts if part is not None]
    for row in rows if len(rows[0]) == p.numel() else [torch.cat(rows)]:
        assert torch.equal(row.view(p.shape), full)
    return full


def _close(found: Any, wanted: Any, what: str, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def _compare(face: Face, wanted: list[Tensor], exact: bool, scaled: float = 1.0) -> None:
    """Elementwise with the reference in fp32; in 16 bits its gradients are others."""
    for (name, p), grad in zip(face.net.named_parameters(), wanted, strict=True):
        found = _read(p)
        _close(found, grad, name, **({} if exact else ROUGH))
        assert p.grad is not None
        _close(p.grad.norm().float() / scaled, found.norm(), name, rtol=1e-5 if exact else 1e-3)
    reduced = lt_zero.ShardedOptimizer.of(face.optimizer).grads  # type: ignore[union-attr]
    for order in (2.0, float("inf")):
        norms = torch.stack([_read(p).norm(order) for p in face.net.parameters()])
        _close((reduced.norm(order) / reduced.loss_scale).float(), norms.norm(order), f"norm {order}", rtol=1e-4)


def _grows(p: nn.Parameter) -> None:
    """Ways of changing a gradient that ranks without a part of it take, too: the norm is that of all ranks."""
    assert p.grad is not None
    if type(p.grad) is Tensor:  # all of it
        p.grad = 0.5 * p.grad
    before = p.grad.norm()
    part = lt_zero.safe_get_local_grad(p)
    lt_zero.safe_set_local_grad(p, None if part is None else 2 * part)  # type: ignore[arg-type]
    _close(p.grad.norm(), 2 * before, "set")
    p.grad *= 2
    _close(p.grad.norm(), 4 * before, "in place")


def _takes(face: Face, grads: list[Tensor]) -> None:
    """The step takes these gradients."""
    before = [lt_zero.full_master(p) for p in face.net.parameters()]
    momenta = [lt_zero.safe_get_full_optimizer_state(p, "momentum_buffer") for p in face.net.parameters()]
    face.step()
    for (name, p), was, momentum, grad in zip(face.net.named_parameters(), before, momenta, grads, strict=True):
        moves = grad if momentum is None else 0.9 * momentum + grad
        _close(lt_zero.full_master(p), was - 0.1 * moves, name, rtol=1e-5, atol=1e-6)


def _steps(plain: Plain, exact: bool, face: Face) -> None:
    parameters = list(face.net.parameters())
    for step, clip in enumerate([{"max_norm": LIMIT}, {"clip_val": BOUND}, None, {"max_norm": LIMIT}]):
        for micro in range(GAS):
            face.backward(step, micro)
            if step == 1 and micro == 0:  # on the way
                plain.backward(step, 1)
                for p, grad in zip(parameters, plain.grads, strict=True):
                    _close(lt_zero.full_grad(p), grad, "first", **({} if exact else ROUGH))
        plain.backward(step)
        _compare(face, plain.grads, exact, face.scaled)
        before = [_read(p) for p in parameters]
        if clip is not None:
            face.clip(**clip)
            clip_plain = nn.utils.clip_grad_norm_ if "max_norm" in clip else nn.utils.clip_grad_value_
            clip_plain(plain.net.parameters(), *clip.values())
        scaled = 1.0 if clip else face.scaled
        _compare(face, plain.grads, exact, scaled)
        grads = [_read(p) for p in parameters]
        norm = torch.stack([grad.norm() for grad in before]).norm()
        for grad, was in zip(grads, before, strict=True):
            wanted = was if clip is None else was.clamp(-BOUND, BOUND) if "clip_val" in clip else was * LIMIT / norm
            _close(grad, wanted, "clipped")
        lt_zero.set_full_grad(parameters[0], grads[0])  # changes nothing
        lt_zero.safe_set_local_grad(parameters[1], lt_zero.safe_get_local_grad(parameters[1]))  # type: ignore[arg-type]
        _grows(parameters[0])
        lt_zero.set_full_grad(parameters[0], grads[0])
        lt_zero.set_full_grad(parameters[-1], 2 * grads[-1])
        plain.grads[-1].mul_(2)
        _compare(face, plain.grads, exact, scaled)
        _takes(face, [*grads[:-1], 2 * grads[-1]])
        plain.optimizer.step()
    for (name, p), q in zip(face.net.named_parameters(), plain.net.parameters(), strict=True):
        _close(lt_zero.full_master(p), q.detach(), name, **({} if exact else {"rtol": 0.05, "atol": 0.02}))


def _overflows(face: Face) -> None:
    """A step that is skipped, and the next one, whose loss scale is another."""
    before = [lt_zero.full_master(p) for p in face.net.parameters()]
    for micro in range(GAS):
        face.backward(4, micro, float("inf") if dist.get_rank() == 0 else 1.0)
    face.clip(max_norm=LIMIT)
    grads = [lt_zero.full_grad(p) for p in face.net.parameters()]
    assert not all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
    face.step()
    assert all(map(torch.equal, before, [lt_zero.full_master(p) for p in face.net.parameters()]))
    for micro in range(GAS):
        face.backward(5, micro)
    face.clip(max_norm=LIMIT)
    grads = [_read(p) for p in face.net.parameters()]
    _close(torch.stack([grad.norm() for grad in grads]).norm(), torch.tensor(LIMIT).float(), "norm", rtol=1e-4)
    _takes(face, grads)


def _gradients(plain: Plain, settings: Settings, face: Face) -> None:
    _steps(plain, settings.precision == "32-true", face)
    if settings.precision == "16-true":
        _overflows(face)


def _run_gradients(face: str, settings: Settings, folder: str) -> None:
    offload = settings.zero.get("offload_optimizer", {})
    if offload.get("device") == "nvme":
        offload["nvme_path"] = folder
    run(face, settings, partial(_gradients, Plain(), settings))


def _offload(device: str) -> dict[str, Any]:
    return {"offload_optimizer": {"device": device}}


FP16 = {"fp16": {"initial_scale_power": 10, "hysteresis": 1}}
SETTINGS = [
    *(Settings(stage) for stage in range(4)),
    *(Settings(stage, zero=_offload(device)) for stage, device in [(2, "cpu"), (0, "cpu"), (3, "nvme")]),
    Settings(1, config={"fused_step": False}),
    *(Settings(stage, "16-true", config=FP16) for stage in (0, 1, 3)),
    Settings(2, "16-true", config={**FP16, "data_types": {"grad_accum_dtype": "fp16"}}),
    Settings(2, "bf16-mixed"),
]


@pytest.mark.parametrize(
    ("face", "settings", "ranks"),
    only_rows(
        [("loop", 0, 2), ("fabric", 1, 2), ("trainer", 2, 2)],
        [*itertools.product(FACES, range(len(SETTINGS)), [2]), *itertools.product(FACES, [3], [3])],
    ),
)
def test_gradients_are_read_as_the_step_takes_them(
    pool: Pool, tmp_path: Path, face: str, settings: int, ranks: int
) -> None:
    pool.run(ranks, _run_gradients, face, SETTINGS[settings], str(tmp_path))


class Clips(GPT):
    """Reads gradients before and after Lightning clips them, and sets them to what was read."""

    def __init__(self, world: int, look: bool) -> None:
        super().__init__(world)
        self.look = look
        self.norms: list[Tensor] = []

    def total(self) -> Tensor:
        grads = [lt_zero.full_grad(p) for p in self.parameters()]
        for p, grad in zip(self.parameters(), grads, strict=True):
            assert grad is not None
            assert p.grad is not None
            _close(p.grad.norm().float(), grad.norm(), "shown")
            lt_zero.set_full_grad(p, grad)
        first = next(self.parameters())
        if dist.get_rank() == 0:  # as before they were set, one rank alone may read norms
            assert first.grad is not None
            assert first.grad.norm() > 0
        return torch.stack([grad.norm() for grad in grads if grad is not None]).norm()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        before = self.total() if self.look else None
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        if before is not None:
            self.norms.append(torch.stack([before, self.total(), self.trainer.precision_plugin.grad_norm]))  # type: ignore


def _automatic(stage: int, precision: Any) -> None:
    found = []
    for look in (False, True):
        module = Clips(dist.get_world_size(), look)
        config: dict[str, Any] = FP16 if precision == "16-true" else {}
        clips = {"gradient_clip_val": LIMIT, "accumulate_grad_batches": 2, "max_epochs": 2}
        sharded_trainer(stage, {}, config, precision=precision, use_distributed_sampler=False, **clips).fit(module)
        found.append([lt_zero.full_master(p) for p in module.parameters()])
    for before, after, known in module.norms:
        assert before > LIMIT
        _close(after, torch.tensor(LIMIT), "clipped", rtol=1e-4)
        _close(known, before, "known", rtol=1e-4)
    assert len(module.norms) == 2
    for one, other in zip(*found, strict=True):
        _close(one, other, "weights", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "precision"), cover([2, 0, 3, 1], ["32-true", "16-true"]))
def test_lightnings_own_clipping_is_seen(pool: Pool, stage: int, precision: str) -> None:
    pool.run(2, _automatic, stage, precision)


class Assigns(GPT):
    """Clears one gradient and enlarges another before Lightning clips them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        cleared, larger = itertools.islice(self.parameters(), 2)
        cleared.grad = None
        assert lt_zero.full_grad(cleared) is None
        before = lt_zero.full_grad(larger)
        assert larger.grad is not None
        assert before is not None
        if type(larger.grad) is Tensor:
            larger.grad = 4 * larger.grad
        else:
            larger.grad *= 4
        _close(lt_zero.full_grad(larger), 4 * before, "assigned")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        grads = [lt_zero.full_grad(p) for p in self.parameters()]
        assert grads[0] is None
        _close(torch.stack([grad.norm() for grad in grads if grad is not None]).norm(), torch.tensor(LIMIT), "clipped")
        zero = torch.zeros(())
        steps = [0.1 * (zero if grad is None else grad) for grad in grads]
        self.wanted = [lt_zero.full_master(p) - step for p, step in zip(self.parameters(), steps, strict=True)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        for p, wanted in zip(self.parameters(), self.wanted, strict=True):
            _close(lt_zero.full_master(p), wanted, "weights", rtol=1e-5, atol=1e-6)


def _assigns(stage: int) -> None:
    keys = {"gradient_clip_val": LIMIT, "max_epochs": 1, "use_distributed_sampler": False}
    module = Assigns(dist.get_world_size())
    sharded_trainer(stage, {}, {}, **keys).fit(module)
    assert module.wanted


@pytest.mark.parametrize("stage", [0, 2])
def test_what_a_hook_assigns_is_clipped(pool: Pool, stage: int) -> None:
    pool.run(2, _assigns, stage)


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


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without states, which would tell that steps were taken."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


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
    only_rows([(f, n) for f in FACES for n in (0, 1)], itertools.product(FACES, range(len(RESUMES)))),
)
def test_a_resumed_run_goes_on_exactly(pool: Pool, tmp_path: Path, face: str, settings: int) -> None:
    pool.run(2, _resumed, face, RESUMES[settings], str(tmp_path))


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
    places = {"loop": folder, "fabric": f"{folder}/saved"}
    saved = run(saves, settings, partial(_saves, places[saves]))
    assert saved[0] > 2.0**10
    assert run(loads, settings, partial(_takes_over, places[loads])) == saved


@pytest.mark.parametrize(
    ("saves", "loads"), only_rows([("fabric", "loop")], itertools.permutations(("fabric", "loop")))
)
def test_a_run_goes_on_in_another_face(pool: Pool, tmp_path: Path, saves: str, loads: str) -> None:
    pool.run(2, _changes_faces, saves, loads, str(tmp_path))
