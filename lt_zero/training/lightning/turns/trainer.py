"""Rounds in a Trainer. One of Lightning's batches is a round, so that all that counts batches counts rounds.

Note [A round in Lightning's loop]
    Lightning fetches ``Turns``, the batches of one round that this rank runs, and is given the first of them. It runs
    that as any batch. Its backward is followed by the later turns, each with its own transfer to the device, hooks of
    the module, forward and backward; then comes what Lightning does after a backward. So gradients are cleared before
    the first backward of a window, the result that callbacks see is that of the first turn (on rank 0 of virtual rank
    0), and a round has one step at most.

Note [Hooks in rounds]
    Hooks of callbacks around a batch are called once in a round, with the batch of the first turn, and draw from the
    random numbers that all ranks share. Those of the module are called for each micro-batch with its batch and result,
    and draw from its random numbers: ``on_before_batch_transfer``, ``transfer_batch_to_device``,
    ``on_after_batch_transfer``, ``on_train_batch_start``, ``training_step``, ``on_before_backward`` and
    ``on_after_backward`` in its turn, ``on_train_batch_end`` after the step of the round, for one micro-batch after the
    other. Evaluations do likewise. Hooks around the step are called once. Callbacks' ``on_before_backward`` and
    ``on_after_backward`` come once, before the backward of the first turn and after that of the last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer import call as lightning_calls
from torch import Tensor

from lt_zero.common.errors import ConfigError
from lt_zero.common.held import OwnGenerators
from lt_zero.core.data_part import split
from lt_zero.core.engine.engine import Engine
from lt_zero.core.rounds import Rounds
from lt_zero.training.lightning.turns.hooks import TurnHooks
from lt_zero.training.lightning.turns.logged import TurnResults
from lt_zero.training.lightning.turns.metrics import MetricTurns

_KEY = "reproducible.virtual_ranks"
_STARTS = "on_train_batch_start", "on_validation_batch_start", "on_test_batch_start"
_ENDS = "on_train_batch_end", "on_validation_batch_end", "on_test_batch_end"
Step = Callable[..., Any]


class TrainerTurns:
    """The turns of this rank in the rounds of one run of a Trainer.

    Args:
        rounds: of the run.
        module: of the user.
        engine: of the module.
        transfer: converts a batch and moves it to the device, as Lightning does; gets the index of its loader, too.

    Raises:
        ConfigError: the module does what rounds cannot do.
    """

    def __init__(
        self, rounds: Rounds, module: pl.LightningModule, engine: Engine, transfer: Callable[[Any, int], Any]
    ) -> None:
        self._rounds = rounds
        self._module = module
        self._engine = engine
        self._transfer = transfer
        self._trainer = module.trainer
        self._later: list[Any] = []  # batches of later turns of this round
        self._open: ExitStack | None = None  # of the first turn, from Lightning's fetch to the end of the transfer
        self._args: tuple[Any, ...] = ()  # of the first turn's step
        self._rest: tuple[Any, ...] = ()  # of the hook at the begin of a batch, after the batch
        self._ended: list[tuple[Any, Any]] = []  # results and batches of later turns
        self._turn: int | None = None  # that is running
        self._results: list[TurnResults] = []
        starts = [(name, self._first_start) for name in _STARTS]
        ends = [(name, self._all_ends) for name in _ENDS]
        self._refuse()
        rounds.follow(module, engine.peers)
        engine.buffers.leave_to_rounds()
        self._hooks = TurnHooks(module, [*starts, *ends])
        named = [
            (f"{type(module).__name__}.{name}" if name else type(module).__name__, m)
            for name, m in module.named_modules()
        ]
        self._generators = OwnGenerators(named)
        self._metrics = MetricTurns(module, rounds)

    def _refuse(self) -> None:
        """Refuse what would not have the same results at another number of ranks.

        Raises:
            ConfigError: names it, and the remedy.
        """
        module = self._module
        for name in ("training_step", "validation_step", "test_step"):
            if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
                raise ConfigError.about(
                    _KEY,
                    f"{_KEY}={self._rounds.count}: {type(module).__name__}.{name} reads dataloader_iter, whose batches "
                    "are not divided among virtual ranks. Take batch and batch_idx.",
                )
        if self._trainer.state.fn == "fit" and not module.automatic_optimization:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self._rounds.count}: {type(module).__name__} optimizes manually, and a step of its own would "
                "follow each micro-batch of a round. Use automatic optimization, or lt_zero.initialize.",
            )

    def leave(self) -> None:
        """Leave the module and the Trainer as they were."""
        self._hooks.remove()
        self._metrics.leave()
        for results in self._results:
            results.leave()
        self._results.clear()

    # ---- a turn ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True inside of a turn."""
        return self._turn is not None

    @property
    def is_last(self) -> bool:
        """True inside of the last turn of a round."""
        return self._turn is not None and self._turn + 1 == self._rounds.turns

    def _logged(self) -> TurnResults | None:
        """The collection of logged values of the loop that runs."""
        results = self._trainer._results
        if results is None or isinstance(results, TurnResults):
            return results
        self._metrics.refuse_unknown()  # of a loop that begins
        found = TurnResults.watch(results, self._rounds)
        self._results.append(found)
        return found

    @contextmanager
    def _in_turn(self, turn: int) -> Iterator[None]:
        """Context of what is run of the micro-batch of a turn."""
        if self._turn == turn:
            yield
            return
        results = self._logged()
        self._metrics.switch(turn)
        self._turn, self._metrics.running = turn, True
        if results is not None:
            results.turn = turn
        states = self._generators.states()
        try:
            with self._rounds.turn(turn):
                yield
            self._refuse_draws(states)
        finally:
            if results is not None:
                results.turn = None
            self._turn, self._metrics.running = None, False
            self._metrics.switch(0)

    def _refuse_draws(self, before: list[Any]) -> None:
        """Refuse draws of a turn from a generator of the module's own; ``before``: its states then.

        Raises:
            ConfigError: names the generator.
        """
        if (name := self._generators.drawn(before)) is not None:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self._rounds.count}: a step has drawn from {name}, which all micro-batches of this rank "
                "share, so that its numbers depend on how many there are. Draw from the generators of torch, numpy or "
                "Python, of which each virtual rank has states of its own.",
            )

    def _call_module(self, name: str, *args: Any) -> Any:
        """Call a hook of the module in place of Lightning."""
        return lightning_calls._call_lightning_module_hook(self._trainer, name, *args)

    # ---- the first turn, which Lightning runs --------------------------------------------------------------------

    def unpack(self, batch: Any) -> Any:
        """The batch of the first turn, of what a loader of rounds has given; others are returned as they are."""
        batches = split(batch, self._rounds.turns)
        if batches is None:
            return batch
        batch, *self._later = batches
        self._open = ExitStack()
        self._open.enter_context(self._in_turn(0))
        return batch

    def transferred(self) -> None:
        """The first turn's batch is on the device."""
        if self._open is not None and self._turn == 0:
            stack, self._open = self._open, None
            stack.close()

    def _first_start(self, hook: Step, batch: Any, *rest: Any) -> Any:
        """``on_*_batch_start`` of the module, which Lightning calls for the first turn."""
        self._rest = rest
        if self._turn is not None:  # of a later turn
            return hook(batch, *rest)
        with self._in_turn(0):
            return hook(batch, *rest)

    def _all_ends(self, hook: Step, output: Any, batch: Any, *rest: Any) -> None:
        """``on_*_batch_end`` of the module, which Lightning calls once."""
        ended, self._ended = [(output, batch), *self._ended], []
        for turn, (result, seen) in enumerate(ended):
            self._rounds.begin_turn(turn)
            if turn and (results := self._logged()) is not None:
                results.begin_batch(turn, seen)
            with self._in_turn(turn):
                hook(result, seen, *rest)
        self._end_round()

    def _end_round(self) -> None:
        self._rounds.end_round()
        if (results := self._logged()) is not None:
            results.end_round(self._monitored())

    def _monitored(self) -> set[str]:
        """The names of logged values by which callbacks and schedules decide. The same on all ranks."""
        trainer = self._trainer
        owners = [*trainer.callbacks, *trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
        return {name for owner in owners if isinstance(name := getattr(owner, "monitor", None), str)}

    def _keep(self, kind: str, output: Any, batch: Any) -> None:
        """Keep what a hook at the end of batches gets."""
        if f"on_{kind}_batch_end" in self._hooks.names:
            self._ended.append((output, batch))

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def values(self, copies: bool) -> dict[str, Any]:
        """Tell what this rank's micro-batches have logged in the epoch, and the states of their metrics.

        ``copies``: of the states, which change in place.
        """
        results = self._logged()
        found = results.sums() if results is not None else {"synced": [], "values": {}}
        return {**found, "metrics": self._metrics.values(copies)}

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the ``values`` of all ranks of the saved run, which may have had other ranks."""
        merged: dict[str, Any] = {"synced": [], "values": {}, "metrics": {}}
        for of_rank in saved:
            merged["synced"] = of_rank["synced"]
            merged["values"].update(of_rank["values"])
            merged["metrics"].update(of_rank["metrics"])
        self._metrics.restore(merged["metrics"])
        if (results := self._logged()) is not None:
            results.restore_sums(merged)

    # ---- training ------------------------------------------------------------------------------------------------

    def training_step(self, run: Step, *args: Any) -> Any:
        """The training step of the first turn; ``run``: does it."""
        self._args, self._ended = args, []
        self._rounds.begin_turn(0)
        with self._in_turn(0), self._unless_last(0):
            return self._checked(run(*args))

    def _checked(self, output: Any) -> Any:
        if output is None:
            raise RuntimeError(
                "training_step returned None, which skips a step on one device. With reproducible.virtual_ranks the "
                "other micro-batches of the round count on this one: return a loss, which may be multiplied by 0."
            )
        return output

    def _unless_last(self, turn: int) -> Any:
        """Context of a turn that is not the last of its round, whose gradients are not the last of a step."""
        return self._engine.no_sync() if turn + 1 < self._rounds.turns else nullcontext()

    def backward(self, run: Step, step: Step, loss: Tensor) -> Tensor:
        """The backward of the first turn, and the later turns. See Note [A round in Lightning's loop].

        Args:
            run: runs backward from a loss.
            step: runs the training step.
            loss: of the first turn.
        """
        lightning_calls._call_callback_hooks(self._trainer, "on_before_backward", loss)
        with self._in_turn(0), self._unless_last(0):
            first: Tensor = run(loss)
        later, self._later = self._later, []
        for turn, batch in enumerate(later, start=1):
            self._rounds.begin_turn(turn)
            with self._in_turn(turn), self._unless_last(turn):
                self._later_turn(turn, batch, run, step)
        self._end_round()
        lightning_calls._call_callback_hooks(self._trainer, "on_after_backward")
        return first

    def _later_turn(self, turn: int, batch: Any, run: Step, step: Step) -> None:
        batch = self._transfer(batch, 0)
        if (results := self._logged()) is not None:
            results.begin_batch(turn, batch)
        if "on_train_batch_start" in self._hooks.names:
            response = self._call_module("on_train_batch_start", batch, *self._rest)
            if response == -1:
                raise RuntimeError(
                    "on_train_batch_start returned -1 for a later micro-batch of a round. With reproducible."
                    "virtual_ranks it has to do so for all of them, or a callback for the round."
                )
        with self._named("training_step"):
            output = self._checked(step(batch, *self._args[1:]))
        result = ClosureResult.from_training_step_output(output, self._trainer.accumulate_grad_batches)
        with self._named("backward"):
            run(result.closure_loss)
        self._keep("train", result.asdict(), batch)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Context in which ``self.log`` knows the name of what calls it."""
        before, self._module._current_fx_name = self._module._current_fx_name, name
        try:
            yield
        finally:
            self._module._current_fx_name = before

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, kind: str, run: Step, *args: Any) -> Any:
        """A step of an evaluation: of the first turn, then of the later ones.

        Args:
            kind: "validation" or "test".
            run: runs the step of one.
            args: of the first turn.

        Returns:
            The first turn's output.
        """
        self._ended = []
        self._rounds.begin_turn(0)
        with self._in_turn(0):
            first = run(*args)
        later, self._later = self._later, []
        results = self._logged()
        index = results.dataloader_idx if results is not None else None
        for turn, batch in enumerate(later, start=1):
            self._rounds.begin_turn(turn)
            with self._in_turn(turn):
                moved = self._transfer(batch, index or 0)
                if results is not None:
                    results.begin_batch(turn, moved)
                if f"on_{kind}_batch_start" in self._hooks.names:
                    self._call_module(f"on_{kind}_batch_start", moved, *self._rest)
                with self._named(f"{kind}_step"):
                    self._keep(kind, run(moved, *args[1:]), moved)
        self._end_round()
        return first

    def refuse_inside(self, what: str) -> None:
        """Refuse an exchange of the user's inside of a turn.

        Raises:
            ConfigError: a turn is running; names ``what``.
        """
        if self.running:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self._rounds.count}: {what} inside of a step would reach the ranks that there are, not all "
                "virtual ranks. Do it at the end of the epoch, or log the value with sync_dist=True.",
            )
