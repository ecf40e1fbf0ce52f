"""``PipelineEngine``: the engine of a ``PipelineModule``, which draws the micro-batches of a step by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lt_zero.common.errors import ConfigError
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.config import ZeroConfig
from lt_zero.parallel.pipeline.batches import forms_of
from lt_zero.parallel.pipeline.module import PipelineModule
from lt_zero.training.loop.engine import TrainingEngine

_Parts = tuple[list[Any], list[Any]]  # inputs and labels of micro-batches


class PipelineEngine(TrainingEngine):
    """A pipeline, trained by ``train_batch``. Made by ``initialize``.

    Attributes:
        module: the pipeline.
        micro_batches: of a step: ``gradient_accumulation_steps``.
        stage_id, num_stages: of the ranks one after the other.
    """

    module: PipelineModule

    def __init__(self, model: PipelineModule, config: ZeroConfig, args: Any = None) -> None:
        super().__init__(model, config, args)
        self.stage_id, self.num_stages = model.position.rank, model.position.ranks
        self._added = self._gas if model.runner is None else 1
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None

    @property
    def micro_batches(self) -> int:
        return self._gas

    def is_first_stage(self) -> bool:
        """True if this rank has the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """True if this rank has the last layers."""
        return self.stage_id == self.num_stages - 1

    # ---- data --------------------------------------------------------------------------------------------------

    def read_from(self, loader: DataLoader[Any]) -> None:
        super().read_from(loader)
        self._iterator = _repeated(loader)

    set_dataloader = read_from

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Draw batches from ``iterator``: on all ranks of a pipeline the same."""
        self._iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Replace each batch that is drawn by the result of ``fn``."""
        self._batch_fn = fn

    def _draw(self, iterator: Iterator[Any] | None, count: int) -> _Parts:
        """The next ``count`` micro-batches. Collective.

        Raises:
            StopIteration: the data end before.
            ValueError, TypeError: there are no data, or they are no pairs of tensors of equal shapes.
            ConfigError: sequences are not cut.
        """
        with self.world.agree("drawing the batches of a pipeline", RuntimeError):
            if iterator is None:
                raise ValueError(
                    f"Rank {self.global_rank} has no data: pass train_batch(data_iter=...) on all ranks of a pipeline, "
                    "also on those between the first and the last, or training_data to initialize."
                )
            found: _Parts = ([], [])
            for _ in range(count):
                batch = next(iterator)
                batch = self._batch_fn(batch) if self._batch_fn is not None else batch
                if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                    raise TypeError(
                        f"A batch of a PipelineModule is a pair of inputs and labels, and this is a "
                        f"{type(batch).__name__}. Pass engine.set_batch_fn a function that makes one."
                    )
                for part, parts in zip(batch, found, strict=True):
                    moved = map_tensors(part, lambda tensor: tensor.to(self.device))
                    parts.append(tuple(moved) if isinstance(moved, list) else moved)
            cut = self.session.division.batch_cut
            if cut is not None and self.session.division.cuts_inputs:
                raise ConfigError.about(
                    cut.key,
                    f"{cut}: a PipelineModule has no names of its inputs, by "
                    "which they could be cut. Pass engine.set_batch_fn a function that returns "
                    "lt_zero.parallel.cut_sequence(...) of inputs and labels.",
                )
            forms = [forms_of(pair) for pair in zip(*found, strict=True)]
            if any(form != forms[0] for form in forms):
                told = "; ".join(dict.fromkeys(", ".join(map(str, form)) for form in forms))
                raise ValueError(
                    f"The {count} micro-batches of a step need tensors of equal shapes, and have {told}. Pad them, or "
                    "drop the last ones of an epoch (DataLoader(drop_last=True))."
                )
        return found

    # ---- a step ------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Draw ``gradient_accumulation_steps`` batches, and take one step. Collective.

        Args:
            data_iter: of pairs (inputs, labels), also for calls to come; default: the one of before, or the training
                data, again and again.

        Returns the mean loss (0D) of all micro-batches and data ranks.

        Raises:
            StopIteration: the data end before. RuntimeError: as ``step``, or gradients are disabled.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("engine.train_batch needs gradients, which are disabled. Use engine.eval_batch.")
        if self._sharded is None or self.optimizer is None:
            raise RuntimeError(
                "engine.train_batch needs an optimizer: pass one to lt_zero.initialize, or configure one."
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        inputs, labels = self._draw(self._iterator, self._gas)
        if self.session.trial is not None:
            self.session.trial.see_batch([inputs[0], labels[0]])
        if self.module.runner is None:
            losses = [self._train_alone(*pair) for pair in zip(self._cast_all(inputs), labels, strict=True)]
            return self._mean(torch.stack(losses).mean())
        self.loss_scale_controller.read_skip_flag()
        self.engine.set_requires_gradient_sync(True)
        with self._autocast(), self.engine.forward_scope(True), self.session.division.forward(self.module, True):
            loss: Tensor = self.module.runner.run_parts(self._cast_all(inputs), labels)
        super().backward(loss)
        self.session.before_step()
        self._scaled = self._applied = False
        self.micro_steps += self._gas
        self._pending = self._gas
        self._step(self._sharded, self.optimizer, {})
        return self._mean(loss.detach())

    def _train_alone(self, inputs: Any, labels: Any) -> Tensor:
        """A micro-batch where this rank has all layers; returns its loss."""
        self.engine.set_requires_gradient_sync(self.is_gradient_accumulation_boundary())
        with self._autocast(), self.engine.forward_scope(True):
            loss: Tensor = self.module(inputs, labels)
        super().backward(loss)
        super().step()
        return loss.detach().float()

    def _autocast(self) -> Any:
        policy = self.engine.policy
        return torch.autocast(self.device.type, policy.compute) if policy.autocast else nullcontext()

    def _cast_all(self, inputs: list[Any]) -> list[Any]:
        policy = self.engine.policy
        if not policy.cast_inputs or policy.compute is None:
            return inputs
        return [map_tensors(value, self._cast) for value in inputs]

    def _mean(self, loss: Tensor) -> Tensor:
        """The mean over data ranks. Collective."""
        return self.world.sum_all(loss.to(self.world.device, copy=True), "the loss of a pipeline") / self.world.size

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate as many batches as a step draws. The module is in evaluation mode afterwards. Collective.

        Args:
            return_logits: return (result, outputs), with the outputs of all micro-batches after each other.
            compute_loss: False: the result is of the outputs in place of the losses.
            reduce_output: ``avg``: the result is the mean over micro-batches and data ranks; None: a list of those of
                this data rank's micro-batches.
            bcast_loss: without effect: all ranks get the result.
            num_micro_batches: other than ``gradient_accumulation_steps``.

        Raises:
            ValueError: ``reduce_output`` is another.
        """
        if reduce_output not in (None, "avg"):
            raise ValueError(f"engine.eval_batch(reduce_output={reduce_output!r}): pass 'avg', or None.")
        self.module.eval()
        inputs, labels = self._draw(data_iter, num_micro_batches or self._gas)
        whole = return_logits or not compute_loss or reduce_output is None
        with self._autocast(), self.engine.forward_scope(False):
            outputs = self._outputs(inputs) if whole else []
            found: list[Any] = outputs
            if compute_loss and whole:
                found = [self.module.loss_fn(*pair).reshape(()) for pair in zip(outputs, labels, strict=True)]  # type: ignore[misc]
            elif compute_loss:
                found = [self._loss(inputs, labels)]
        if reduce_output is None:
            result: Any = found
        else:
            result = self._mean(torch.stack([value.float() for value in found]).mean(0))
        return (result, torch.cat([_rows(output) for output in outputs])) if return_logits else result

    def _loss(self, inputs: list[Any], labels: list[Any]) -> Tensor:
        runner, inputs = self.module.runner, self._cast_all(inputs)
        if runner is not None:
            loss: Tensor = runner.run_parts(inputs, labels)
            return loss
        return torch.stack([self.module(*pair).float() for pair in zip(inputs, labels, strict=True)]).mean()

    def _outputs(self, inputs: list[Any]) -> list[Any]:
        """Outputs of the last layer for each micro-batch, on all ranks."""
        runner, inputs = self.module.runner, self._cast_all(inputs)
        if runner is None:
            return [self.module(value) for value in inputs]
        output = runner.run_parts(inputs, None)
        if isinstance(output, Tensor):
            return list(output.chunk(len(inputs)))
        return list(zip(*(tensor.chunk(len(inputs)) for tensor in output), strict=True))

    # ---- what a pipeline does not have -------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError, as ``backward`` and ``step`` do: a pipeline does all three at once."""
        raise RuntimeError(_ONLY)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError(_ONLY)

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(_ONLY)


_ONLY = (
    "A PipelineModule runs the forwards and backwards of all micro-batches, and the step, in one call: "
    "engine.train_batch(data_iter=...), or engine.eval_batch(...)."
)


def _repeated(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _rows(output: Tensor) -> Tensor:
    return output if output.dim() else output[None]
