"""Fingerprints of a run's outputs, gradients and weights, by which ``lt-zero compare`` finds where two runs part.

Note [Fingerprints]
    A fingerprint of a tensor has its squared norm, its largest element, and its products with a few vectors of random
    signs. The signs depend on the name only, so equal tensors have equal fingerprints in any run, and the products of
    the difference of two tensors tell its norm: the mean of their squares is the squared norm.

    Gradients and weights are whole tensors, whatever the stage and the ranks. Outputs are sums over samples (the first
    dimension) and ranks: they depend neither on how samples are spread over ranks and micro-batches nor on their order.
"""

from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.common.compat import in_running_backward
from lt_zero.common.errors import ConfigError
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.config import ZeroConfig
from lt_zero.engine.engine import Engine
from lt_zero.engine.full_params import full_parameters, gather_own, joined

RECORD = "LT_ZERO_RECORD"  # in the environment: the folder of the record
VERSION = 1
OUTPUT, GRADIENT, WEIGHT = "output", "gradient", "weight"
_SIGNS = 8  # vectors
_CHUNK = 1 << 20  # elements whose signs are drawn at once


@dataclass
class Fingerprint:
    """Facts that are kept of a tensor. See Note [Fingerprints].

    Attributes:
        dtype: of its computation.
        rows: samples that were added.
        numel: elements of a sample; without samples of the tensor.
        squares: the sum of all squares.
        largest: the largest absolute value.
        products: with the vectors of signs, summed over samples.
    """

    dtype: str
    rows: int
    numel: int
    squares: float
    largest: float
    products: list[float]

    @classmethod
    def of(cls, value: Tensor, name: str, dtype: torch.dtype, samples: bool = False) -> Fingerprint:
        """The fingerprint of ``value``, in fp64; with ``samples`` its first dimension are samples."""
        rows = value.shape[0] if samples and value.dim() else 1
        matrix = value.detach().reshape(rows, -1)
        squares = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
        row, products = matrix.sum(0, dtype=torch.float64), [0.0] * _SIGNS
        for lo in range(0, row.numel(), _CHUNK):
            part = row[lo : lo + _CHUNK]
            found = (signs(name, lo, part.numel()).to(part.device, part.dtype) @ part).tolist()
            products = [one + other for one, other in zip(products, found, strict=True)]
        largest = float(matrix.abs().max()) if matrix.numel() else 0.0
        return cls(str(dtype).removeprefix("torch."), rows, row.numel(), squares, largest, products)

    def plus(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of both tensors' samples; the other's alone if their samples have another size."""
        if self.numel != other.numel:
            return other
        products = [one + two for one, two in zip(self.products, other.products, strict=True)]
        largest = max(self.largest, other.largest)
        return Fingerprint(
            self.dtype, self.rows + other.rows, self.numel, self.squares + other.squares, largest, products
        )


def signs(name: str, lo: int, count: int) -> Tensor:
    """The signs [lo, lo + count) of each vector of a name, of which ``lo`` is the beginning of a chunk."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {lo}".encode()))
    return torch.randint(0, 2, (_SIGNS, count), generator=generator, dtype=torch.int8) * 2 - 1


class Recorder:
    """Writes the fingerprints of each step of one engine to a file, a line for each step.

    Args:
        engine: of the module.
        path: the file, which rank 0 writes.
        config: of the run.
        counts: this rank's outputs count: of ranks with parts of the same samples one does.

    Raises:
        ConfigError: on all ranks: there is a record already, or no file can be written.
    """

    def __init__(self, engine: Engine, path: Path, config: ZeroConfig, counts: bool) -> None:
        self._engine, self._path, self._counts = weakref.ref(engine), path, counts
        self._compute = engine.policy.compute or torch.float32
        self._found: dict[tuple[str, str], Fingerprint] = {}
        self._step = 0
        with engine.world.agree("opening the record", ConfigError):
            if engine.world.rank == 0:
                self._begin(config, engine)
        for name, module in engine.root.named_modules():
            module.register_forward_hook(partial(self._forward, name or "(model)"))
        engine.root.register_forward_pre_hook(self._first)
        engine.after_backward.append(self._backward)
        engine.after_step.append(self._stepped)

    def _begin(self, config: ZeroConfig, engine: Engine) -> None:
        about = {"version": VERSION, "stage": config.zero_optimization.stage, "ranks": engine.world.size}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({**about, "mode": engine.policy.mode}) + "\n")
        except FileExistsError:
            text = f"{RECORD}={self._path.parent} has a record already ({self._path.name}). Name another folder."
            raise ConfigError(text) from None
        except OSError as error:
            text = f"{RECORD}={self._path.parent} cannot be written: {error.strerror}. Name another folder."
            raise ConfigError(text) from None

    def _forward(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if not (self._counts and module.training and torch.is_grad_enabled()) or in_running_backward():
            return  # an evaluation, or a recomputation
        for number, value in enumerate(v for v in iter_tensors(output) if v.is_floating_point() and v.numel()):
            key = OUTPUT, f"{name}[{number}]" if number else name
            made = Fingerprint.of(value, key[1], value.dtype, samples=True)
            self._found[key] = self._found[key].plus(made) if key in self._found else made

    def _first(self, module: nn.Module, arguments: Any) -> None:
        engine = self._engine()
        if self._step == 0 and engine is not None and engine.running and module.training and torch.is_grad_enabled():
            self._step = 1
            self._write(0, {(WEIGHT, name): made for name, made in self._weights(engine)}, engine)

    @torch.no_grad()
    def _backward(self) -> None:
        engine = self._engine()
        if engine is None or not engine.reducer.sync or self._step == 0:
            return
        for name, made in self._gradients(engine):
            self._found[GRADIENT, name] = made

    def _gradients(self, engine: Engine) -> Iterator[tuple[str, Fingerprint]]:
        """The fingerprints of the gradients that the step takes, without the loss scale. Collective."""
        ready = engine.finish_reductions()
        scales = {id(p): sharded.grads.loss_scale for sharded in engine.optimizers for p in sharded.parameters()}
        for bucket in engine.buckets:
            if not any((bucket, index) in ready for index in range(len(bucket.params))):
                continue
            flat = gather_own(bucket, bucket.grads.read())
            for index, (parameter, span) in enumerate(zip(bucket.params, bucket.layout.spans, strict=True)):
                if (bucket, index) in ready:
                    value = joined(engine, parameter, flat[span.lo : span.hi].view(span.shape))
                    value = value.double() / scales.get(id(parameter), 1.0)
                    yield span.name, Fingerprint.of(value, span.name, self._compute)
            bucket.put_away()

    @torch.no_grad()
    def _weights(self, engine: Engine) -> Iterable[tuple[str, Fingerprint]]:
        """The fingerprints of the master weights that are trained. Collective."""
        every: Iterator[tuple[str, Parameter, Tensor]] = full_parameters(engine)
        for name, parameter, value in every:
            whole = joined(engine, parameter, value)
            if parameter.requires_grad:
                yield name, Fingerprint.of(whole, name, self._compute)

    def _stepped(self) -> None:
        engine = self._engine()
        if engine is None or self._step == 0:
            return
        found, self._found = self._found, {}
        found |= {(WEIGHT, name): made for name, made in self._weights(engine)}
        self._write(self._step, found, engine)
        self._step += 1

    def _write(self, step: int, found: dict[tuple[str, str], Fingerprint], engine: Engine) -> None:
        """Write the fingerprints of all ranks: outputs are added, of gradients and weights one rank's count."""
        merged: dict[tuple[str, str], Fingerprint] = {}
        for of_rank in engine.world.host_gather(found, f"the record of step {step}"):
            for key, made in of_rank.items():
                if key not in merged:
                    merged[key] = made
                elif key[0] == OUTPUT:
                    merged[key] = merged[key].plus(made)
        if engine.world.rank == 0:
            rows = [{"kind": kind, "name": name, **asdict(made)} for (kind, name), made in merged.items()]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "tensors": rows}) + "\n")


def record(engine: Engine, number: int, config: ZeroConfig, counts: bool) -> None:
    """Record the engine of a run, its ``number``-th, if ``LT_ZERO_RECORD`` is set. Collective."""
    if folder := os.environ.get(RECORD):
        Recorder(engine, Path(folder).expanduser() / f"engine{number}.jsonl", config, counts)
