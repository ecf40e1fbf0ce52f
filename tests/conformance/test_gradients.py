"""Gradients in three faces: full and local values, norms, clipping, setters, accumulation, skipped steps."""

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
from tests.conformance.faces import FACES, GAS, ROUGH, Face, Plain, Settings, close, run
from tests.support.matrix import only_rows
from tests.support.models import Net
from tests.support.pool import Pool

LIMIT, BOUND = 0.25, 0.01  # of the norm, which is about 0.7, and of elements, of which a few are larger


def _read(p: nn.Parameter) -> Tensor:
    """A gradient that all accessors agree on."""
    full = lt_zero.safe_get_full_grad(p)
    assert full is not None
    assert torch.equal(full, lt_zero.full_grad(p).float())  # type: ignore[union-attr]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, lt_zero.safe_get_local_grad(p))
    rows = [part for part in parts if part is not None and part.numel()]  # some have no elements of it
    for row in rows if len(rows[0]) == p.numel() else [torch.cat(rows)]:
        assert torch.equal(row.view(p.shape), full)
    return full


def _compare(face: Face, wanted: list[Tensor], exact: bool, scaled: float = 1.0) -> None:
    """Elementwise with the reference in fp32; in 16 bits its gradients are others."""
    for (name, p), grad in zip(face.net.named_parameters(), wanted, strict=True):
        found = _read(p)
        close(found, grad, name, **({} if exact else ROUGH))
        assert p.grad is not None
        close(p.grad.norm().float() / scaled, found.norm(), name, rtol=1e-5 if exact else 1e-3)
    reduced = lt_zero.ShardedOptimizer.of(face.optimizer).grads  # type: ignore[union-attr]
    for order in (2.0, float("inf")):
        norms = torch.stack([_read(p).norm(order) for p in face.net.parameters()])
        close((reduced.norm(order) / reduced.loss_scale).float(), norms.norm(order), f"norm {order}", rtol=1e-4)


def _grows(p: nn.Parameter) -> None:
    """Ways of changing a gradient that ranks without a part of it take, too: the norm is that of all ranks."""
    assert p.grad is not None
    if type(p.grad) is Tensor:  # all of it
        p.grad = 0.5 * p.grad
    before = p.grad.norm()
    part = lt_zero.safe_get_local_grad(p)
    lt_zero.safe_set_local_grad(p, None if part is None else 2 * part)  # type: ignore[arg-type]
    close(p.grad.norm(), 2 * before, "set")
    p.grad *= 2
    close(p.grad.norm(), 4 * before, "in place")


def _takes(face: Face, grads: list[Tensor]) -> None:
    """The step takes these gradients."""
    before = [lt_zero.full_master(p) for p in face.net.parameters()]
    momenta = [lt_zero.safe_get_full_optimizer_state(p, "momentum_buffer") for p in face.net.parameters()]
    face.step()
    for (name, p), was, momentum, grad in zip(face.net.named_parameters(), before, momenta, grads, strict=True):
        moves = grad if momentum is None else 0.9 * momentum + grad
        close(lt_zero.full_master(p), was - 0.1 * moves, name, rtol=1e-5, atol=1e-6)


def _steps(plain: Plain, exact: bool, face: Face) -> None:
    parameters = list(face.net.parameters())
    for step, clip in enumerate([{"max_norm": LIMIT}, {"clip_val": BOUND}, None]):
        for micro in range(GAS):
            face.backward(step, micro)
            if step == 1 and micro == 0:  # on the way
                plain.backward(step, 1)
                for p, grad in zip(parameters, plain.grads, strict=True):
                    close(lt_zero.full_grad(p), grad, "first", **({} if exact else ROUGH))
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
            close(grad, wanted, "clipped")
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
        close(lt_zero.full_master(p), q.detach(), name, **({} if exact else {"rtol": 0.05, "atol": 0.02}))


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
    close(torch.stack([grad.norm() for grad in grads]).norm(), torch.tensor(LIMIT).float(), "norm", rtol=1e-4)
    _takes(face, grads)


def _gradients(plain: Plain, settings: Settings, face: Face) -> None:
    _steps(plain, settings.precision == "32-true", face)
    if settings.precision == "16-true":
        _overflows(face)


small = partial(Net, depth=1)  # every parameter is read often


def _run_gradients(face: str, settings: Settings, folder: str) -> None:
    offload = settings.zero.get("offload_optimizer", {})
    if offload.get("device") == "nvme":
        offload["nvme_path"] = folder
    run(face, settings, partial(_gradients, Plain(net=small), settings), net=small)


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
        [("loop", 0, 2), ("fabric", 8, 2), ("trainer", 2, 2)],
        [*itertools.product(FACES, range(len(SETTINGS)), [2]), *itertools.product(FACES, [3], [3])],
    ),
)
def test_gradients_are_read_as_the_step_takes_them(
    pool: Pool, tmp_path: Path, face: str, settings: int, ranks: int
) -> None:
    pool.run(ranks, _run_gradients, face, SETTINGS[settings], str(tmp_path))
