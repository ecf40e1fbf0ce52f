"""Fingerprints of a run's outputs, gradients and weights, by which ``lt-zero compare`` finds where two runs part.

Note [Fingerprints]
    A fingerprint of a tensor has its squared norm, its largest element, and its products with a few vectors of random
    signs. The signs depend on the position only, so equal tensors have equal fingerprints in any run, and the products
    of the difference of two tensors tell its norm: the mean of their squares is the squared norm.

    Gradients and weights are whole tensors, whatever the stage and the ranks. Inputs and outputs are sums over samples
    (the first dimension) and ranks: they depend neither on how samples are spread over ranks and micro-batches nor on
    their order. Ranks that see the same data have the same output, which counts once, or parts of it: then the squares
    of the parts add up, and there are no products.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.common.compat import in_running_backward
from lt_zero.common.errors import ConfigError
from lt_zero.common.module_hooks import Hook, hookable_modules
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_parameters, gather_own, joined

RECORD = "LT_ZERO_RECORD"  # in the environment: the folder of the record
VERSION = 2
INPUT = "input"
OUTPUT = "output"
GRADIENT = "gradient"
WEIGHT = "weight"
_SIGNS = 8  # vectors
_SAME = 0.02  # products of the same tensor differ less, relative to its norm: of two 16-bit roundings
_CHUNK = 1 << 18  # elements whose signs are drawn at once


@dataclass
class Fingerprint:
    """Facts that are kept of a tensor. See Note [Fingerprints].

    Attributes:
        dtype: of its computation.
        rows: samples that were added.
        numel: elements of a sample; without samples of the tensor.
        squares: the sum of all squares.
        largest: the largest absolute value.
        products: with the vectors of signs, summed over samples; none of a tensor whose parts are known.
    """

    dtype: str
    rows: int
    numel: int
    squares: float
    largest: float
    products: list[float]

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype, samples: bool = False) -> Fingerprint:
        """The fingerprint of ``value``, in fp64; with ``samples`` its first dimension are samples."""
        rows = value.shape[0] if samples and value.dim() else 1
        matrix = value.detach().reshape(rows, -1)
        matrix = matrix if matrix.is_floating_point() else matrix.double()
        squares = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
        row = matrix.sum(0, dtype=torch.float64)
        products = [0.0] * _SIGNS
        for lo in range(0, row.numel(), _CHUNK):
            part = row[lo : lo + _CHUNK]
            found = (signs(lo, part.numel()).to(part.device, part.dtype) @ part).tolist()
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

    def equals(self, other: Fingerprint) -> bool:
        """True if two ranks have the same tensor, up to rounding."""
        if (self.rows, self.numel, len(self.products)) != (other.rows, other.numel, len(other.products)):
            return False
        scale = math.sqrt(max(self.squares, other.squares))
        pairs = zip(self.products, other.products, strict=True)
        return not math.isfinite(scale) or all(abs(one - two) <= _SAME * scale for one, two in pairs)

    def beside(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of a tensor with these two parts. Numbers are means of samples: the mean of both counts."""
        if self.numel == other.numel == 1 and self.rows == other.rows:
            return self.plus(other)
        numel = self.rows * self.numel + other.rows * other.numel
        largest = max(self.largest, other.largest)
        return Fingerprint(self.dtype, 1, numel, self.squares + other.squares, largest, [])


def of_one(parts: Sequence[Fingerprint]) -> Fingerprint:
    """The fingerprint of a tensor of which ranks that see the same data have ``parts``, or all the same."""
    return parts[0] if all(part.equals(parts[0]) for part in parts) else reduce(Fingerprint.beside, parts)


@lru_cache(maxsize=16)
def _whole_chunk(lo: int) -> Tensor:
    generator = torch.Generator().manual_seed(lo)
    return torch.randint(0, 2, (_SIGNS, _CHUNK), generator=generator, dtype=torch.int8) * 2 - 1


def signs(lo: int, count: int) -> Tensor:
    """The signs [lo, lo + count) of each vector, of which ``lo`` is the beginning of a chunk."""
    return _whole_chunk(lo)[:, :count]


_Found = dict[tuple[str, str], Fingerprint]  # by kind and name


class Recorder:
    """Writes the fingerprints of each step of one engine to a file, a line for each step.

    Args:
        engine: of the module.
        path: the file, which rank 0 writes.
        config: of the run.
        together: neighbouring ranks that see the same data, and have parts of it or of the model.

    Raises:
        ConfigError: on all ranks: there is a record already, or no file can be written.
    """

    def __init__(self, engine: Engine, path: Path, config: ZeroConfig, together: int) -> None:
        self._engine = weakref.ref(engine)
        self._path = path
        self._together = together
        self._stages = config.pipeline.ranks
        self._compute = engine.policy.compute or torch.float32
        self._found: _Found = {}
        self._step = 0  # that is running; 0: none has begun
        self._depth = 0  # of calls of modules
        self._works = True  # the file can be written
        self._began = False  # the first weights are written
        with engine.world.agree("opening the record", ConfigError):
            if engine.world.rank == 0:
                self._begin(config, engine)
        for name, module in hookable_modules(engine.root):
            module.register_forward_pre_hook(Hook(partial(self._enter, name or "(model)")), with_kwargs=True)
            module.register_forward_hook(Hook(partial(self._leave, name or "(model)")), always_call=True)
        engine.before_step.append(self._before_step)
        engine.after_step.append(self._stepped)
        engine.after_skip.append(self._skipped)

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

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        engine = self._engine()
        if in_running_backward() or engine is None:
            return  # a recomputation
        self._depth += 1
        trains = module.training and torch.is_grad_enabled()
        if trains and self._depth == 1 and engine.running:
            self._step = self._step or 1
            for number, value in enumerate(v for v in iter_tensors([args, kwargs]) if v.numel()):
                self._add((INPUT, f"{name}[{number}]"), value)

    def _leave(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if in_running_backward():
            return
        self._depth = max(0, self._depth - 1)
        if module.training and torch.is_grad_enabled():  # otherwise an evaluation
            for number, value in enumerate(v for v in iter_tensors(output) if v.is_floating_point() and v.numel()):
                self._add((OUTPUT, f"{name}[{number}]" if number else name), value)

    def _add(self, key: tuple[str, str], value: Tensor) -> None:
        made = Fingerprint.of(value, value.dtype, samples=True)
        self._found[key] = self._found[key].plus(made) if key in self._found else made

    @torch.no_grad()
    def _before_step(self) -> None:
        """Note the gradients. Not at the end of a backward: there stages of a pipeline still wait for each other."""
        engine = self._engine()
        if engine is None or self._step == 0:
            return
        if not self._began:
            self._began = True
            self._write(0, {(WEIGHT, name): made for name, made in self._weights(engine)}, engine)
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
                    yield span.name, Fingerprint.of(value, self._compute)
            bucket.put_away()

    @torch.no_grad()
    def _weights(self, engine: Engine) -> Iterable[tuple[str, Fingerprint]]:
        """The fingerprints of the master weights that are trained. Collective."""
        every: Iterator[tuple[str, Parameter, Tensor]] = full_parameters(engine)
        for name, parameter, value in every:
            whole = joined(engine, parameter, value)
            if parameter.requires_grad:
                yield name, Fingerprint.of(whole, self._compute)

    def _stepped(self) -> None:
        engine = self._engine()
        if engine is None or self._step == 0:
            return
        found, self._found = self._found, {}
        found |= {(WEIGHT, name): made for name, made in self._weights(engine)}
        self._write(self._step, found, engine)
        self._step += 1

    def _skipped(self) -> None:
        engine = self._engine()
        if engine is None or self._step == 0:
            return
        found, self._found = self._found, {}
        self._write(self._step, found, engine, skipped=True)
        self._step += 1

    def _write(self, step: int, found: _Found, engine: Engine, skipped: bool = False) -> None:
        """Write the fingerprints of all ranks: inputs and outputs are added, of others one rank's count. Collective."""
        merged: _Found = {}
        stage_of: dict[tuple[str, str], int] = {}
        of_ranks = engine.world.host_gather(found, f"the record of step {step}")
        for lo in range(0, len(of_ranks), self._together):
            same = of_ranks[lo : lo + self._together]
            stage = lo * self._stages // len(of_ranks)
            for key in dict.fromkeys(key for of_rank in same for key in of_rank):
                made = of_one([of_rank[key] for of_rank in same if key in of_rank])
                if key not in merged:
                    merged[key] = made
                    stage_of[key] = stage
                elif key[0] in (INPUT, OUTPUT) and stage_of[key] == stage:  # other stages see the same data again
                    merged[key] = merged[key].plus(made)
        if engine.world.rank == 0 and self._works:
            rows = [{"kind": kind, "name": name, **asdict(made)} for (kind, name), made in merged.items()]
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "skipped": skipped, "tensors": rows}) + "\n")
            except OSError as error:  # other ranks go on, so this one has to
                self._works = False
                warn(f"{self._path} cannot be written ({error.strerror or error}): the record ends before step {step}.")
