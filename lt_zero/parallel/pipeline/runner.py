"""Runs a pipeline in a step: micro-batches through torch's schedules, with an engine for this rank's stages.

Note [Gradients of a pipeline]
    All forwards and backwards run while the pipeline is called, in ``training_step``, and the loss that it returns has
    nothing left to compute: its backward only checks that the loss was not multiplied by anything that the gradients
    do not know. Gradients that are not sharded are reduced in the last backward of this rank, those that are in each.
    Layers at several stages wait for the step: core/engine/grad_reducer.py, Note [Wide buckets].

Note [Shapes]
    A rank posts its receives before the sender has computed what it sends, so it has to know the shapes. For each form
    of a batch that is new, stages run once without gradients, on zeros, one after the other, and tell the others the
    form of their output. Before each batch all ranks compare its form: of another size, sends and receives would end
    the process. Random numbers and buffers are as before afterwards.

Note [Random numbers]
    Ranks have the same generators, and different layers would draw the same masks. So a forward of a stage begins with
    a seed made of a number that all ranks draw once per batch, the stage, the micro-batch, and the data rank, which has
    other samples, and the same number where the user seeds all ranks alike. In rounds
    (core/rounds.py) that number is the batch's own, and the data rank is left out, as any may run the batch. Masks do
    not depend on the schedule, and ranks have the same generators afterwards.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    schedules,
)

from lt_zero.common import accelerator
from lt_zero.common.errors import add_note
from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.config.pipelines import micro_batches, running
from lt_zero.core.comm.point_to_point import transfers_over, watched
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.parallel.pipeline.batches import Form, cut, forms_of, joined, rows_in
from lt_zero.parallel.pipeline.layers import Pipeline
from lt_zero.parallel.random import draw_seed, seed_of, seeded

_KEPT = 4  # forms of batches whose stages, with memory for what they receive, are kept
_FORMS = 256  # forms of batches that are remembered, in 1 to 2 kB each: finding one again takes a forward
_MASK = 0xFFFFFFFF

Signature = tuple[Any, ...]


@dataclass
class _Batch:
    """State of the running batch that its stages need."""

    inputs: list[Any]  # of the first layer, by micro-batch
    targets: list[Any] | None
    factor: float  # of the losses
    seed: int | None  # None: nothing is drawn
    trains: bool
    last_backward: int = 0  # number of the last one of this rank
    sync: bool = True  # whether gradients are reduced in that
    backwards: int = 0  # so far
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class Runner(ProcessLocal):
    """Runs the stages of this rank.

    Args:
        pipeline: made for this rank's position.
        engine: of the module that has it.
        row: the ranks that have the other stages, in order.
        group: the process group over these ranks for what stages send.
        data_rank: this one's number, of ``data_ranks``.
        wanted: micro-batches of a whole batch.
        begin: called before the first forward; returns the loss scale.
        weight: what the loss will be multiplied with before backward: 1 / accumulated batches.
        alike: data ranks exchange something inside of layers, and so run as many micro-batches.
        first: called on all ranks after their first batch with gradients.
        in_rounds: random numbers are those of a batch, whichever data rank runs it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        engine: Engine,
        row: Ranks,
        group: Any,
        data_rank: int,
        data_ranks: int,
        wanted: int,
        begin: Callable[[], float],
        weight: Callable[[], float],
        alike: bool = False,
        first: Callable[[], None] | None = None,
        in_rounds: bool = False,
    ) -> None:
        self._drawn_by = 0 if in_rounds else data_rank
        self._alike, self._first_batch = alike, first
        self.pipeline = pipeline
        self.engine = engine
        self._row = row
        self._group = group
        self._data_rank = data_rank
        self._data_ranks = data_ranks
        self._wanted = wanted
        self._begin = begin
        self._weight = weight
        self._position = pipeline.position
        self._forms: OrderedDict[Signature, list[tuple[Form, ...]]] = OrderedDict()  # what each stage returns
        self._schedules: OrderedDict[Signature, Any] = OrderedDict()
        self.batch = _Batch([], None, 1.0, None, False)
        self._buckets = {stage: self._buckets_of(stage) for stage in self._position.own}
        self.transfers = transfers_over(group, engine.world)
        self._owed = 0  # losses whose backward is to come
        self._checked = False  # the factor of a loss, on a GPU, where that waits for it

    # ---- a batch ---------------------------------------------------------------------------------------------------

    # Not traced by torch.compile, which fails at collectives. A layer that is compiled by itself still is.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, inputs: Any, targets: Any) -> Any:
        """``Pipeline.forward``. Collective. Errors are those of ``run_parts``."""
        rows = rows_in(inputs)
        count = micro_batches(rows, self._wanted)
        return self.run_parts(cut(inputs, rows, count), cut(targets, rows, count) if targets is not None else None)

    def run_parts(self, inputs: list[Any], targets: list[Any] | None) -> Any:
        """``Pipeline.forward`` of micro-batches, which have the same form. Collective.

        Raises:
            RuntimeError: on all ranks, if those of one pipeline have batches of different forms; if a step was taken
                with the gradients of a loss that had no backward; or autocast, which the precision of the run asks
                for, is off.
        """
        trains, count = targets is not None and torch.is_grad_enabled(), len(inputs)
        self._refuse_outside()
        if trains:
            self._refuse_dropped()
        scale, weight = (self._begin(), self._weight() * self.pipeline.loss_weight) if trains else (1.0, 1.0)
        draws = self.pipeline.training
        batch = self.batch = _Batch(
            inputs,
            targets,
            scale * weight / count,
            draw_seed() if draws else None,
            trains,
            count * len(self._position.own),
            self.engine.reducer.sync,
        )
        self._refuse_gradients(inputs)
        own = set[Bucket]().union(*self._buckets.values())
        signature = (forms_of(batch.inputs[0]), count, trains, torch.is_autocast_enabled(self.engine.device.type))
        try:
            with self._running():
                if self._agree(signature):
                    with self.engine.whole_passes(False, own), torch.no_grad():
                        self._forms[signature] = self._probe()
                self._forms.move_to_end(signature)
                if len(self._forms) > _FORMS:
                    self._forms.popitem(last=False)
            passes = self.engine.whole_passes(trains, own)
            with self._closing(), self._running(), passes, torch.set_grad_enabled(trains):
                self._step(signature, count)
            if targets is None:
                return self._outputs(batch)
            loss = self._mean(batch, count)
        finally:
            self.engine.set_requires_gradient_sync(batch.sync)
            self.engine.reducer.expect_parts(False)
            self.batch = _Batch([], None, 1.0, None, False)
        if not trains:
            return loss
        if (check := self._first_batch) is not None:
            self._first_batch = None
            check()
        self._owed += 1
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return _Ran.apply(anchor, loss, self, scale * weight)  # type: ignore[no-untyped-call]

    def _refuse_dropped(self) -> None:
        owed = self._owed
        if owed and self.engine.grad_views.spent:
            self._owed = 0
            raise RuntimeError(
                f"A step was taken with the gradients of {owed} loss{'es' if owed > 1 else ''} of the pipeline whose "
                "backward was never called: a pipeline computes them when it is called. Call it under torch.no_grad() "
                "to look at a loss; to leave a batch out, call backward, then zero_grad."
            )

    def _refuse_outside(self) -> None:
        """Raise RuntimeError if the pipeline is called around the run's precision."""
        if self.engine.policy.autocast and not torch.is_autocast_enabled(self.engine.device.type):
            raise RuntimeError(
                "The pipeline was called outside of the autocast of this run's precision. Call it in the forward of "
                "the module that was set up (in Fabric: model(inputs, targets), not model.pipe(inputs, targets))."
            )

    @staticmethod
    def _refuse_gradients(inputs: Any) -> None:
        if any(tensor.requires_grad for tensor in iter_tensors(inputs)):
            raise ValueError(
                "An input of the pipeline requires a gradient, and its backward has run when the pipeline returns. "
                "Make what computes it a layer of the pipeline, or detach it."
            )

    def _agree(self, signature: Signature) -> bool:
        """Compare the batch with those of the ranks of this pipeline; returns whether its form is new on any rank.

        Collective.
        """
        world = self.engine.world
        ranks = self._data_ranks
        count = signature[1]
        mine = zlib.crc32(repr(signature).encode())
        flags = torch.zeros(3 + 2 * ranks, dtype=torch.int64)
        flags[0] = signature not in self._forms
        flags[1] = count
        flags[2] = -count
        flags[3 + self._data_rank], flags[3 + ranks + self._data_rank] = mine, _MASK - mine
        world.host_max(flags, "the form of a batch").wait()
        reduces = any(bucket.sharding.grads for bucket in self.engine.buckets)
        if flags[1] != -flags[2] and (self._alike or reduces):
            why = "experts on several ranks get tokens" if self._alike else "ZeRO stages 2 and 3 reduce gradients"
            raise RuntimeError(
                f"Data ranks cut their batches into {-int(flags[2])} to {int(flags[1])} micro-batches, as these have "
                f"different numbers of samples, and {why} for each. Give all ranks as many samples (drop_last=True of "
                f"the data loader){'' if self._alike else ', or use stage 1'}."
            )
        if bool((flags[3 : 3 + ranks] + flags[3 + ranks :] == _MASK).all()):
            return bool(flags[0])
        told = world.host_gather((self._data_rank, [str(form) for form in signature[0]], signature[1]), "forms")
        firsts: dict[int, tuple[int, Any]] = {}
        for rank, (data_rank, *theirs) in enumerate(told):
            first, known = firsts.setdefault(data_rank, (rank, theirs))
            if theirs != known:
                raise RuntimeError(
                    f"Ranks {first} and {rank} have stages of one pipeline, and need the same batch, but that of rank "
                    f"{first} has {_described(*known)}, and that of rank {rank} {_described(*theirs)}. Draw samples by "
                    "the data rank, in the same order on all of these ranks."
                )
        raise RuntimeError("The ranks run a pipeline in different modes: call it in the same way on all ranks.")

    def _mean(self, batch: _Batch, count: int) -> Tensor:
        """The mean loss (0D) on all ranks of the pipeline. Collective."""
        wide = self.engine.policy.compute == torch.float64
        mean = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=self.engine.device)
        if batch.losses:
            assert len(batch.losses) == count
            mean = torch.stack(batch.losses).to(mean.dtype).mean()
        self._broadcast(mean)
        return mean

    def _broadcast(self, tensor: Tensor) -> None:
        """Give all ranks of the pipeline the values of the last stage's."""
        last = self._position.rank_of(self._position.stages - 1)
        self._row.broadcast(tensor, "results of a pipeline", last)

    def _outputs(self, batch: _Batch) -> Any:
        """The output of the last layer for the whole batch, on all ranks of the pipeline. Collective."""
        output = joined(batch.outputs) if batch.outputs else None
        last = self._position.stages - 1
        mine = None if output is None else _forms_in(output, self.pipeline.last_of(last))
        forms = self._row.host_gather(mine, "forms of outputs")[self._position.rank_of(last)]
        if output is None:
            made = tuple(torch.empty(f.shape, dtype=f.dtype, device=self.engine.device) for f in forms.tensors)
            output = made[0] if forms.alone else made
        for tensor in (output,) if isinstance(output, Tensor) else output:
            self._broadcast(tensor.contiguous())
        return output

    # ---- stages ----------------------------------------------------------------------------------------------------

    def _probe(self) -> list[tuple[Form, ...]]:
        """Find the forms of each stage's output. See Note [Shapes]. Collective."""
        device, found = self.engine.device, list[tuple[Form, ...]]()
        with _keeping_buffers(self.engine.root), torch.no_grad(), seeded(None, device.type):
            for stage in range(self._position.stages):
                mine: tuple[Form, ...] | None = None
                if stage in self._position.own:
                    given = (
                        [form.example(device, False) for form in found[-1]] if found else _first(self.batch.inputs[0])
                    )
                    with self.engine.forward_scope(trains=False):
                        output = self.pipeline.run_stage(stage, *given, batch=self.batch.inputs[0])
                        mine = _forms_in(output, self.pipeline.last_of(stage)).tensors
                told = self._row.host_gather(mine, "the form of a stage's output")
                found.append(told[self._position.rank_of(stage)])
        return found

    def _step(self, signature: Signature, count: int) -> None:
        """Run all micro-batches. Collective over the ranks of the pipeline."""
        if signature in self._schedules:
            self._schedules.move_to_end(signature)
        else:
            self._schedules[signature] = self._schedule(signature, count)
            if len(self._schedules) > _KEPT:
                self._schedules.popitem(last=False)
        schedule, numbers = self._schedules[signature], torch.arange(count)
        given: dict[str, Any] = {"target": numbers, "return_outputs": False}
        if self.batch.trains:
            self.engine.set_requires_gradient_sync(False)
        with _quiet():
            (schedule.step if self.batch.trains else schedule.eval)(
                *([numbers] if 0 in self._position.own else ()), **given
            )

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Context of work of all ranks of the pipeline: an error of one ends it on all, and names the rank."""
        world = self.engine.world
        with world.together("Pipeline"), world.explaining(), torch.inference_mode(False):
            yield

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Context of transfers, which an error ends on all ranks of the pipeline. The others have been told of it."""
        try:
            yield
        except BaseException:
            # Stages keep the outputs of micro-batches without a backward. The hooks of their graphs refer to the
            # engine, and it to this: a cycle through C++, which would keep the run's connections and threads for ever.
            self._schedules.clear()
            if self.transfers is not None:
                self.transfers.close()
            raise

    def _schedule(self, signature: Signature, count: int) -> Any:
        """Torch's schedule for batches of one form."""
        forms = self._forms[signature]
        block = self._position.block
        device = self.engine.device
        stages: list[Any] = []
        for number in self._position.own:
            before = [form.example("meta", True) for form in forms[number - 1]] if number else [torch.zeros(1).long()]
            after = [form.example("meta", True) for form in forms[number]]
            stages.append(_Stage(self, number, self._position.stages, device, tuple(before), tuple(after), self._group))
        how: dict[str, Any] = {"n_microbatches": count, "loss_fn": self._loss, "scale_grads": False}
        runs = running(block.schedule, self._position.ranks, count, self.batch.trains)
        if len(stages) > 1:
            return (ScheduleInterleaved1F1B if runs == "Interleaved1F1B" else ScheduleLoopedBFS)(stages, **how)
        return (Schedule1F1B if runs == "1F1B" else ScheduleGPipe)(stages[0], **how)

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        """The loss of a micro-batch, as it is differentiated."""
        if self.batch.targets is None:
            self.batch.outputs.append(output)
            return torch.zeros(())
        assert self.pipeline.loss_fn is not None
        try:
            loss = self.pipeline.loss_fn(output, self.batch.targets[int(number)])
        except Exception as error:
            add_note(error, f"In loss_fn of the pipeline, micro-batch {int(number)}.")
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_fn of the pipeline returned {shown}: return the mean loss of a micro-batch, 0D.")
        loss = loss.reshape(())
        self.batch.losses.append(loss.detach())
        return (loss.float() if loss.dtype == torch.float16 else loss) * self.batch.factor

    def forward(self, stage: int, number: int, *inputs: Any) -> Any:
        """The forward of a stage for micro-batch ``number``."""
        batch = self.batch
        given = _first(batch.inputs[number]) if stage == 0 else tuple(map(_writable, inputs))
        seed = None if batch.seed is None else seed_of(batch.seed, stage, number, self._drawn_by)
        with self._drawing(seed), self.engine.forward_scope(trains=False):
            output = self.pipeline.run_stage(stage, *given, batch=batch.inputs[number])
        return _differentiable(output) if batch.trains else output

    def _drawing(self, seed: int | None) -> AbstractContextManager[None]:
        return nullcontext() if seed is None else seeded(seed, self.engine.device.type)

    def _buckets_of(self, stage: int) -> set[Bucket]:
        """Buckets that have parameters of a stage."""
        owner = self.engine.owner
        return {owner[id(p)][0] for p in self.pipeline.parameters_of(stage) if id(p) in owner}

    @contextmanager
    def backward(self, stage: int) -> Iterator[None]:
        """Context of a backward of a stage of this rank."""
        batch = self.batch
        batch.backwards += 1
        self.engine.reducer.expect_parts(batch.backwards < batch.last_backward)
        self.engine.set_requires_gradient_sync(batch.sync and batch.backwards == batch.last_backward)
        device = self.engine.device.type
        with torch.autocast(device, enabled=False), self.engine.backward_pass(self._buckets[stage]):
            yield

    def check(self, grad: Tensor, expected: float) -> None:
        """Check the factor of a loss, at its backward, which is no longer owed.

        Raises:
            RuntimeError: it is another than the gradients have.
        """
        self._owed = max(0, self._owed - 1)
        if self._checked and accelerator.holds(grad):
            return
        self._checked, found = True, float(grad)
        if abs(found - expected) > 1e-4 * abs(expected):
            raise RuntimeError(
                f"The loss of a pipeline was multiplied by {found / expected:g} after its backward had run. Do it in "
                "its loss_fn, or say so before: pipeline.loss_weight = 1 / batches, where a loop accumulates gradients."
            )


class _Stage(PipelineStage):
    """A stage of this rank."""

    def __init__(
        self,
        runner: Runner,
        number: int,
        stages: int,
        device: torch.device,
        before: tuple[Tensor, ...],
        after: tuple[Tensor, ...],
        group: Any,
    ) -> None:
        self._chunk = _Chunk(runner, number)
        self._runner = runner
        super().__init__(self._chunk, number, stages, device, before, after, group=group)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._chunk.number = fwd_chunk_id
        with _unwrapped(f"the forward of micro-batch {fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        runs = self._runner.backward(self.stage_index) if self.has_backward else nullcontext()
        with runs, _unwrapped(f"the backward of micro-batch {bwd_chunk_id}, stage {self.stage_index}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    # What torch sends and receives is named by the micro-batch and the way it goes, for messages.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._named(super().get_fwd_recv_ops(fwd_chunk_id), fwd_chunk_id, self.stage_index - 1, 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._named(super().get_fwd_send_ops(fwd_chunk_id), fwd_chunk_id, self.stage_index, 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._named(super().get_bwd_recv_ops(bwd_chunk_id), bwd_chunk_id, self.stage_index + 1, -1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._named(super().get_bwd_send_ops(bwd_chunk_id), bwd_chunk_id, self.stage_index, -1)

    def _named(self, ops: list[Any], number: int, source: int, step: int) -> list[Any]:
        transfers, what = self._runner.transfers, "outputs" if step > 0 else "gradients"
        for op in ops:
            # Outputs of layers, and their gradients, may be views that are not contiguous, as sends need them.
            op.tensor = op.tensor.contiguous()
        if transfers is None:
            return ops
        name = f"{what} of micro-batch {number} from stage {source} to stage {source + step}"
        return [watched(op, transfers, name) for op in ops]


@contextmanager
def _keeping_buffers(root: nn.Module) -> Iterator[None]:
    """Context after which modules have the buffers, with the values, that they had before."""
    tables = [(module._buffers, dict(module._buffers)) for module in root.modules()]
    values = [(buffer, buffer.clone()) for buffer in root.buffers()]
    try:
        yield
    finally:
        for table, buffers in tables:
            # A forward may have assigned other tensors to the names of buffers.
            table.update(buffers)
        with torch.no_grad():
            for buffer, before in values:
                buffer.copy_(before)


@contextmanager
def _unwrapped(what: str) -> Iterator[None]:
    """Context of a call of torch that wraps errors of modules: raises these errors, with a note of ``what`` ran."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if not isinstance(cause, Exception):
            raise
        add_note(cause, f"In {what}.")
        raise cause from cause.__cause__ or cause.__context__


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which torch's schedules do not print pages of planned operations: the error says where it was."""
    log = logging.getLogger(schedules.__name__)
    log.addFilter(_below_error)
    try:
        yield
    finally:
        log.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


class _Chunk(nn.Module):
    """The layers of a stage, for torch's schedules; they are registered in the pipeline."""

    def __init__(self, runner: Runner, stage: int) -> None:
        super().__init__()
        self.stage, self.number = stage, 0  # that of the micro-batch
        self.call = runner.forward

    def forward(self, *inputs: Any) -> Any:
        return self.call(self.stage, self.number, *inputs)


class _Ran(torch.autograd.Function):
    """A loss after its backward."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, loss: Tensor, runner: Runner, expected: float) -> Tensor:
        context.runner, context.expected = runner, expected
        return loss.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, None, None, None]:
        runner, context.runner = context.runner, None
        if runner is None:
            raise RuntimeError("A loss of a pipeline has one backward, which has run: call the pipeline again.")
        runner.check(grad, context.expected)
        return None, None, None, None


class _Anchored(torch.autograd.Function):
    """An output that no trained parameter has made: the stage before waits for its gradient all the same."""

    @staticmethod
    def forward(context: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Received(torch.autograd.Function):
    """Make a received tensor one that the first layer may write to, as in-place activations do."""

    @staticmethod
    def forward(context: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return grad


def _writable(received: Any) -> Any:
    return _Received.apply(received) if isinstance(received, Tensor) and received.requires_grad else received  # type: ignore[no-untyped-call]


def _differentiable(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(map(_differentiable, output))
    if not isinstance(output, Tensor) or output.requires_grad or not output.is_floating_point():
        return output
    anchor = torch.zeros((), device=output.device, requires_grad=True)
    return _Anchored.apply(output, anchor)  # type: ignore[no-untyped-call]


def _first(inputs: Any) -> Any:
    """The arguments of the first layer."""
    return inputs if isinstance(inputs, (tuple, list)) else (inputs,)


@dataclass
class _Forms:
    tensors: tuple[Form, ...]
    alone: bool  # no tuple


def _described(forms: list[str], count: int) -> str:
    """Micro-batches of a batch, in words."""
    return f"{count} micro-batch{'' if count == 1 else 'es'} of {', '.join(forms)}"


def _forms_in(output: Any, layer: str) -> _Forms:
    """Forms of the tensors in the output of a stage, whose last layer is ``layer``.

    Raises:
        TypeError: it is no tensor, or tuple of tensors.
    """
    alone = isinstance(output, Tensor)
    tensors = (output,) if alone else output
    if not isinstance(tensors, tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        found = type(output).__name__
        if isinstance(tensors, tuple):
            found = f"a tuple of {', '.join(type(tensor).__name__ for tensor in tensors)}"
        raise TypeError(
            f"{layer} returned {found}. Return a tensor, or a tuple of tensors, which can be sent to the next stage."
        )
    return _Forms(tuple(map(Form.of, tensors)), alone)
